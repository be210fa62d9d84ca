"""Compiles a step for a target that may not be there, in a process of its own.

The step is traced and lowered here, for the platform of the target, and serialized with
``jax.export``; a fresh process loads it, compiles it over the target's devices and writes down
what the compiler says (``child.py``). Nothing is started in this process but what tracing needs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from .. import _compat
from ..errors import CompileError, DoesNotFitError, TargetError
from ..hlo.collectives import Collective, read_collectives
from ..jaxprs.edits import equations
from ..jaxprs.lines import Lines, SourceLine, noting
from ..jaxprs.primitives import CALLBACKS, PRINTS
from ..jaxprs.prints import has_prints, without_prints
from ..layouts.mesh import Mesh
from ..step.platform import tracing_for
from ..targets import gpu
from ..targets.target import Target, check_size
from .abstract_step import AbstractStep, HasSteps, abstract_step
from .compiler_process import ask
from .faults import tracing

# A function is traced once, and asked for again when it is not.
_LINES: weakref.WeakKeyDictionary[Any, Lines] = weakref.WeakKeyDictionary()
_NO_LIBTPU = (
    "steps for {} are compiled by the TPU's own compiler, libtpu, which is not installed; no TPU "
    "is needed. pip install 'meshwright[tpu]' adds it."
)


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step: memory of one device, and the program it made.

    All bytes are those of one device. ``argument_bytes`` are state and batch, padded as the
    device stores them. ``output_bytes`` include the ``donated_bytes`` that lie in the arguments'
    memory. ``temporary_bytes`` are what the step needs besides, at most at one time.
    ``peak_bytes`` is the compiler's own ``peak_memory_in_bytes``, its code left out or in as the
    platform has it. For a CPU target the figures are right for a CPU, and say nothing of an
    accelerator: XLA orders and fuses the program otherwise there.
    """

    target: Target
    axes: tuple[tuple[str, int], ...]  # of the mesh, (name, size)
    argument_bytes: int
    output_bytes: int
    donated_bytes: int
    temporary_bytes: int
    peak_bytes: int
    code_bytes: int
    text: str = field(repr=False)  # optimized HLO, in the order in which it is issued
    compile_s: float = field(default=0.0, repr=False, compare=False)  # what compiling took
    lines: tuple[SourceLine, ...] = field(default=(), repr=False, compare=False)  # by number

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of the step, in the order of its schedule."""
        return read_collectives(self.text, self.axes)

    def of_kind(self, *kinds: str) -> tuple[Collective, ...]:
        """The collectives of some kinds, such as ``"all-gather"``."""
        return tuple(collective for collective in self.collectives if collective.kind in kinds)


def compile_step(
    strategy: HasSteps, model: Any, batch: Any, target: Target | str, *, timeout_s: float = 3600.0
) -> Compiled:
    """The training step that ``strategy.fit`` would run on such a batch, compiled for a target.

    ``batch`` holds arrays ``(x, y)``, or with sample weights, of which shapes and dtypes matter;
    with ``accumulate=k`` it is one micro-batch of the step's ``k``. The strategy's mesh has as many
    devices as the target, and an abstract mesh will do; the model may be one of shapes only
    (:func:`~meshwright.abstract`). The state is donated, as in training.
    Raises :class:`~meshwright.DoesNotFitError` and whatever :func:`compile_ahead` does.

    >>> import keras, numpy as np, meshwright as mw
    >>> strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> batch = np.ones([16, 4], "float32"), np.ones([16, 1], "float32")
    >>> step = compile_step(strategy, model, batch, "cpu:8")
    >>> [(c.kind, c.axes, c.dtypes) for c in step.collectives]
    [('all-reduce', ('batch',), ('float32',))]
    """
    return compile_abstract(abstract_step(model, batch, strategy), target, timeout_s=timeout_s)


def compile_abstract(
    described: AbstractStep, target: Target | str, *, timeout_s: float = 3600.0
) -> Compiled:
    """The step of :func:`describe`, compiled; raises as :func:`compile_ahead`."""
    arguments = described.state, described.batch
    return compile_ahead(described.jitted, arguments, target, timeout_s=timeout_s)


def compile_ahead(
    jitted: Any, args: Sequence[Any], target: Target | str, *, timeout_s: float = 3600.0
) -> Compiled:
    """A jitted function of positional arguments, compiled for a target that may not be there.

    ``args`` are arrays, or ``jax.ShapeDtypeStruct`` with shardings, on a mesh with as many devices
    as the target; an abstract mesh will do. Donation and shardings of results are the jitted
    function's own. What was compiled before is not compiled again (``cache.py``). Raises
    :class:`~meshwright.TargetError` if the target has another number of
    devices, :class:`~meshwright.DoesNotFitError` if a device has too little memory, else
    :class:`~meshwright.CompileError`.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> layout = mw.Layout(["batch", None], mw.Mesh({"batch": 8}))
    >>> x = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=layout.sharding)
    >>> compiled = compile_ahead(jax.jit(lambda x: x.sum()), [x], "cpu:8")
    >>> compiled.argument_bytes, compiled.collectives[0].kind
    (32, 'all-reduce')
    """
    target = Target.of(target)
    step, job, lines = _exported(jitted, args, target)
    answer = ask(step, job, target, timeout_s)
    if "memory" not in answer:
        raise _failure(target, answer)
    axes = tuple((axis, size) for axis, size, _ in job["axes"])
    took = answer.get("compile_s", 0.0)
    return Compiled(
        target, axes, **answer["memory"], text=answer["text"], compile_s=took, lines=lines
    )


def trace(jitted: Any, args: Sequence[Any], target: Target) -> Any:
    """The function as it is traced for a target, before it is lowered."""
    with _tracing(jitted, target):
        return jitted.trace(*args)


@contextlib.contextmanager
def _tracing(jitted: Any, target: Target) -> Iterator[Lines]:
    """Trace as for a target; the lines of the source that were met, now or when it was before."""
    lines = _LINES.setdefault(jitted, Lines())
    on = target.platform
    with _compat.keras_sees(on), tracing_for(on), noting(lines), _compat.without_lines():
        yield lines


def _exported(
    jitted: Any, args: Sequence[Any], target: Target
) -> tuple[bytes, dict[str, Any], tuple[SourceLine, ...]]:
    """The serialized step, flat in arguments and results, what the child has to know of it, and the
    lines of the source that it is from."""
    abstract = jax.tree.map(_abstract, tuple(args))
    mesh = _mesh_of(abstract)
    check_size(Mesh.from_jax(mesh), target)
    gpus = gpu.described(target) if target.platform == "cuda" else None
    if target.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise CompileError(_NO_LIBTPU.format(target))
    with _tracing(jitted, target) as lines:
        with tracing(getattr(jitted, "__name__", "step")):
            traced = jitted.trace(*abstract)
        donated = [i for i, leaf in enumerate(jax.tree.leaves(traced.args_info)) if leaf.donated]
        silent, taken = jitted, abstract
        if has_prints(traced.jaxpr):
            silent = jax.jit(without_prints(jitted, *abstract), donate_argnums=donated)
            taken = tuple(jax.tree.leaves(abstract))
        exported = _export(silent, traced, taken, target)
    # Only the arrays travel: containers of the caller's own could not be read by the child.
    flat = replace(
        exported,
        in_tree=jax.tree.structure((tuple(exported.in_avals), {})),
        out_tree=jax.tree.structure(tuple(exported.out_avals)),
    )
    kinds = [kind.name for kind in mesh.axis_types]
    axes = [[*pair, kind] for pair, kind in zip(mesh.shape.items(), kinds, strict=True)]
    job = {"kind": target.kind, "topology": target.topology, "axes": axes, "donated": donated}
    if target.slices > 1:
        job["slices"] = target.slices
    if gpus is not None:
        job["gpus"] = gpus
    # It may be set in code, and the child sees the environment alone.
    if jax.dtypes.canonicalize_dtype("float64").itemsize == 8:
        job["x64"] = True
    return bytes(flat.serialize()), job, lines.all()


def _export(jitted: Any, traced: Any, abstract: Any, target: Target) -> Any:
    """The lowered step. Any custom call may be in it: the same JAX reads it at once."""
    exporting = jax.export.export(
        jitted, platforms=[target.platform], disabled_checks=[_compat.any_custom_call()]
    )
    try:
        return exporting(*abstract)
    except (NotImplementedError, ValueError) as error:
        calls_back = any(
            eqn.primitive.name in CALLBACKS - PRINTS for eqn in equations(traced.jaxpr)
        )
        if not (calls_back or isinstance(error, NotImplementedError)):
            raise
        advice = ""
        if calls_back:
            advice = (
                " Leave jax.pure_callback and similar calls out of it, such as "
                "equinox.error_if (EQX_ON_ERROR=nan)."
            )
        raise CompileError(
            f"the step cannot be lowered for {target}: {str(error).rstrip('.')}.{advice}"
        ) from error


def _abstract(value: Any) -> Any:
    sharding = getattr(value, "sharding", None)
    named = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=named)


def _mesh_of(abstract: Any) -> Any:
    for leaf in jax.tree.leaves(abstract):
        if leaf.sharding is not None:
            return leaf.sharding.mesh
    raise TargetError(
        "no argument lies on a mesh, so nothing says how the step is split over the target: "
        "give arrays, or jax.ShapeDtypeStruct, with the sharding of a mw.Layout."
    )


def _failure(target: Target, answer: dict[str, Any]) -> CompileError:
    words = answer["error"].strip()
    if _compat.refuses_libtpu(words):  # it is there, and JAX does not take it
        return CompileError(f"{_NO_LIBTPU.format(target)} JAX says: {words}")
    if not _compat.ran_out_of_memory(words):
        return CompileError(f"the step does not compile for {target}: {words}")
    needed, available = _compat.memory_in(words)
    return DoesNotFitError(
        f"the step does not fit into a device of {target}. Shard more of it, or use smaller "
        f"batches, recomputation or a larger target. The compiler says:\n{words}",
        needed,
        available,
        words,
    )
