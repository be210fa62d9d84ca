"""What JAX says of its programs, devices and services by private names alone."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any


def jax_is_running() -> bool:
    """Whether JAX has created its clients, after which devices cannot be added any more.

    JAX 0.10.2 has no public question for this (``jax.devices()`` would start them); the function
    has been in ``xla_bridge`` since 0.4.26.
    """
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def name_scope(eqn: Any) -> str:
    """The path of ``jax.named_scope`` names that an equation of a jaxpr was traced under.

    JAX 0.10.2: equations are public (``jax.extend.core``), their ``source_info`` has no page.
    """
    return str(eqn.source_info.name_stack)


def frames_of(eqn: Any) -> Iterator[tuple[str, str, int]]:
    """File, function and line of what was called when an equation was traced, the innermost first.

    JAX 0.10.2: as for :func:`name_scope`; what is JAX's own is left out.
    """
    from jax._src import source_info_util as info

    for frame in info.user_frames(eqn.source_info.traceback):
        yield frame.file_name, frame.function_name, frame.start_line


def under_scope(eqn: Any, name: str) -> Any:
    """The equation as if it had been traced under one more name scope; JAX 0.10.2, as above."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are the same for every step, and how many it carries.

    JAX 0.10 has two numbers for it; JAX 0.11.2 a tree of the operands in three parts.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carried, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carried)


def jit_inlined(function: Callable[..., Any], **options: Any) -> Any:
    """``jax.jit`` of a function whose equations become those of the program that calls it.

    ``inline=True`` does so up to JAX 0.10; in JAX 0.11 the call stays until the program is lowered.
    """
    import jax

    kinds: Any = getattr(jax, "Inline", None)
    inline: Any = True if kinds is None else kinds.JAX_EARLY
    return jax.jit(function, inline=inline, **options)


def is_staged() -> bool:
    """Whether what is computed now becomes part of a program, instead of being run at once.

    Within ``jax.jit`` and ``jax.make_jaxpr``, not within ``jax.grad`` alone. JAX has no public name
    for it.
    """
    from jax._src import core
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace

    trace: Any = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def is_inlined_late(eqn: Any) -> bool:
    """Whether it calls a function that is jitted with ``inline=True``: JAX 0.11 keeps the call
    until the program is lowered."""
    how = getattr(eqn.params.get("inline"), "value", None)
    return eqn.primitive.name == "jit" and how == "jax_late"


def written_out(closed: Any, is_inlined: Callable[[Any], bool] = is_inlined_late) -> Any:
    """A closed jaxpr with the equations of some functions that are jitted in place of their
    calls."""
    import jax

    def run(of: Any, *args: Any) -> list[Any]:
        values = dict(
            zip([*of.jaxpr.constvars, *of.jaxpr.invars], [*of.consts, *args], strict=True)
        )
        for eqn in of.jaxpr.eqns:
            read = [atom.val if hasattr(atom, "val") else values[atom] for atom in eqn.invars]
            inlined = is_inlined(eqn)
            results = run(eqn.params["jaxpr"], *read) if inlined else evaluate(eqn, read)
            values.update(zip(eqn.outvars, results, strict=True))
        return [atom.val if hasattr(atom, "val") else values[atom] for atom in of.jaxpr.outvars]

    if not any(map(is_inlined, closed.jaxpr.eqns)):
        return closed
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals
    ]
    return jax.make_jaxpr(functools.partial(run, closed))(*shapes)


def aborts_on_split_tables() -> bool:
    """Whether XLA ends the process for a gather of rows of a table that are split over one axis, by
    indices that are split over another, inside of a ``shard_map`` over a third one; seen with
    JAX 0.11.2, not with 0.10.2."""
    import jax

    return jax.__version_info__ >= (0, 11)


def without_lines() -> contextlib.AbstractContextManager[Any]:
    """Lower without files and lines of the source, which would make equal programs differ.

    JAX 0.10.2: the option is public, only its use for a while is not.
    """
    from jax._src import config

    return config.traceback_in_locations_limit(0)


def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
    """The results of one equation of a jaxpr, computed now, under the names it was traced under.

    JAX 0.10.2: ``jax.core.eval_jaxpr`` does so for all of them; ``get_bind_params`` and what keeps
    names and lines of the source have no page.
    """
    from jax._src import source_info_util as info

    scope = info.current_name_stack() + eqn.source_info.name_stack
    with info.user_context(eqn.source_info.traceback, name_stack=scope), eqn.ctx.manager:
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def evaluate_here(eqn: Any, values: list[Any]) -> list[Any]:
    """The same in the mesh of the context, whatever mesh it was traced in. JAX 0.10.2, as above:
    what an equation was traced in holds the mesh, too."""
    import jax

    mesh = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        here = type(eqn.ctx)()
    return evaluate(eqn.replace(ctx=here), values)


def evaluate_by(eqn: Any, values: list[Any], called: Callable[[Any, Any], list[Any]]) -> list[Any]:
    """The results of a function with its own gradient, whose equations ``called`` evaluates.

    ``called`` takes a closed jaxpr and values. The function's rules are traced where it was, and
    what they compute is evaluated where the gradient is taken.

    JAX 0.10.2: as ``get_bind_params`` of the two primitives, with ``called`` in the place of
    ``jax.core.eval_jaxpr``; none of it has a page.
    """
    from jax._src import linear_util as lu

    of, params = eqn.params["call_jaxpr"], eqn.params
    by_rule = _by_jvp_rule if "jvp_jaxpr_fun" in params else _by_vjp_rules
    run = lu.wrap_init(lambda *xs: called(of, xs), debug_info=of.jaxpr.debug_info)
    rules, others = by_rule(eqn, called)
    return list(eqn.primitive.bind(*values, subfuns=(run, *rules), **others))


def _by_jvp_rule(eqn: Any, called: Callable[[Any, Any], list[Any]]) -> tuple[list[Any], Any]:
    from jax._src import linear_util as lu
    from jax.custom_derivatives import SymbolicZero
    from jax.extend.core import ClosedJaxpr

    skipped, traced = eqn.params["num_consts"], eqn.params["jvp_jaxpr_fun"]

    def rule(*xs: Any) -> list[Any]:
        import jax

        half = len(xs) // 2
        primals, tangents = xs[skipped:half], xs[half + skipped :]
        with eqn.ctx.manager:
            jaxpr, consts, are_zero = traced.call_wrapped(
                *(type(tangent) is SymbolicZero for tangent in tangents)
            )
        own = [tangent for tangent in tangents if type(tangent) is not SymbolicZero]
        results = called(ClosedJaxpr(jaxpr, consts), [*primals, *own])
        y, rest = results[: len(are_zero)], iter(results[len(are_zero) :])
        return y + [
            SymbolicZero(jax.typeof(value).to_tangent_aval()) if is_zero else next(rest)
            for value, is_zero in zip(y, are_zero, strict=True)
        ]

    wrapped = lu.wrap_init(rule, debug_info=traced.debug_info)
    return [wrapped], {"symbolic_zeros": eqn.params["symbolic_zeros"]}


def _by_vjp_rules(eqn: Any, called: Callable[[Any, Any], list[Any]]) -> tuple[list[Any], Any]:
    from jax._src import linear_util as lu
    from jax._src.ad_util import Zero
    from jax._src.interpreters.ad import CustomVJPException
    from jax.extend.core import ClosedJaxpr

    count, traced = eqn.params["num_consts"], eqn.params["fwd_jaxpr_thunk"]
    back, avals = eqn.params["bwd"], eqn.params["call_jaxpr"].in_avals

    def forward(*pairs: Any) -> list[Any]:
        values, are_nonzero = pairs[::2], pairs[1::2]
        if any(are_nonzero[:count]):
            raise CustomVJPException
        with eqn.ctx.manager:
            jaxpr, consts = traced.call_wrapped(*are_nonzero[count:])
        return called(ClosedJaxpr(jaxpr, consts), values[count:])

    def backward(*values: Any) -> Any:
        import jax

        nothing = [Zero(aval.to_ct_aval()) for aval in avals[:count]]
        kinds = eqn.ctx.cur_abstract_mesh.axis_types
        if jax.sharding.AxisType.Manual in kinds:  # nothing is laid out there
            gradients, logs = _apart(back.call_wrapped(*values))
            return _together([*nothing, *gradients], logs)
        found: list[Any] = []
        logs: Any = ()

        def run(*values: Any) -> list[Any]:
            nonlocal logs
            found[:], there = _apart(back.call_wrapped(*values))
            logs = tuple(None for _ in there)  # traced values of another function otherwise
            return [value for value in found if type(value) is not Zero]

        shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
        with eqn.ctx.manager:
            closed = jax.make_jaxpr(run)(*shapes)
        rest = iter(called(closed, values))
        own = [value if type(value) is Zero else next(rest) for value in found]
        return _together([*nothing, *own], logs)

    rules = [
        lu.wrap_init(forward, debug_info=traced.debug_info),
        lu.wrap_init(backward, debug_info=back.debug_info),
    ]
    return rules, {"out_trees": eqn.params["out_trees"], "symbolic_zeros": False}


def _apart(result: Any) -> tuple[list[Any], Any]:
    """The gradients of a backward rule, and what JAX 0.11 has beside them: its logs."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], list):
        return result[0], result[1:]
    return list(result), ()


def _together(gradients: list[Any], logs: Any) -> Any:
    return (gradients, *logs) if logs else gradients


def devices_by_hand(shard_map: Any) -> int:
    """Over how many devices an equation of ``jax.shard_map`` maps; other axes are left to XLA.

    JAX 0.10.2: ``newly_manual_axes`` among the parameters of the primitive has no page.
    """
    mesh = shard_map.params["mesh"]
    return math.prod(mesh.shape[axis] for axis in shard_map.params["newly_manual_axes"])


def without_dead_code(jaxpr: Any, results: Collection[int] | None = None) -> Any:
    """A jaxpr without the equations that none of its results depends on, or none of these."""
    from jax.interpreters import partial_eval

    inner = getattr(jaxpr, "jaxpr", jaxpr)
    wanted = [results is None or number in results for number in range(len(inner.outvars))]
    needed, _ = partial_eval.dce_jaxpr(inner, wanted, instantiate=True)
    return needed


def any_custom_call() -> Any:
    """Let ``jax.export`` serialize every custom call: the same JAX reads the program at once.

    JAX 0.10.2 takes "ALL" for a name, which has no page; else each name would have to be read out
    of the error that refuses it.
    """
    import jax

    return jax.export.DisabledSafetyCheck.custom_call("ALL")


def start_coordination_service(port: str, processes: int, shutdown_s: int) -> Any:
    """JAX's coordination service in this process, which need not take part in the group.

    jaxlib 0.10: ``jax.distributed.initialize`` starts it in process 0, and nowhere else. Importing
    the extension alone takes 0.1 s; it reads once how much it logs, and the service logs each end
    of a group as an error. Raises ``RuntimeError`` if the port is taken.
    """
    level, before = "TF_CPP_MIN_LOG_LEVEL", os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    os.environ[level] = "3" if before in (None, "1") else before  # JAX itself sets 1
    try:
        service: Any = importlib.import_module("jaxlib._jax").get_distributed_runtime_service
        return service(
            f"[::]:{port}", processes, heartbeat_timeout=100, shutdown_timeout=shutdown_s
        )
    finally:
        os.environ.pop(level)
        os.environ |= {} if before is None else {level: before}


class GroupStore:
    """Short texts that the processes of a group tell each other, through JAX's coordination.

    JAX 0.10 has no public name for its client. ``get`` waits until the text is there.
    """

    def __init__(self, prefix: str, wait_s: float) -> None:
        from jax._src import distributed

        self._client: Any = distributed.global_state.client
        self._prefix, self._wait_ms = prefix, max(1, round(wait_s * 1000))

    def set(self, key: str, text: str) -> None:
        self._client.key_value_set(f"{self._prefix}/{key}", text)

    def get(self, key: str) -> str:
        return self._client.blocking_key_value_get(f"{self._prefix}/{key}", self._wait_ms)

    def delete(self, key: str) -> None:
        self._client.key_value_delete(f"{self._prefix}/{key}")
