"""Dry runs of models and Programs, under strategies of ours and of Keras."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..errors import BatchError, ModelError
from ..layouts.context_mesh import outside_of_context
from ..layouts.mesh import Mesh
from ..layouts.placement import Placement
from ..planning.dry_run import Blocks, DryRun, dry_run_of
from ..program import Batch, Program
from ..targets.hardware import Hardware, hardware_of
from ..targets.target import Target, check_size

if TYPE_CHECKING:
    import keras

    from ..planning.serving import ServingReport
    from .keras import Sharded


@outside_of_context()
def dry_run(
    model: keras.Model | Program,
    batch: Batch,
    *,
    strategy: Sharded
    | Placement
    | keras.distribution.ModelParallel
    | keras.distribution.DataParallel,
    target: Target | str,
    mesh: Mesh | Mapping[str, int] | None = None,
    hardware: Hardware | None = None,
    blocks: Blocks = "auto",
    compile: bool = True,
    timeout_s: float = 3600.0,
) -> DryRun:
    """Compile the training step for a target, which need not be there, and read what it costs.

    ``model`` is a compiled Keras model, best built in :func:`~meshwright.abstract`, or a
    :class:`~meshwright.Program`. ``batch`` holds arrays ``(x, y)``, or what the program takes; only
    shapes and dtypes matter, so ``jax.ShapeDtypeStruct`` will do. ``strategy`` may be Keras' own
    ``ModelParallel`` or ``DataParallel``; the layout map of that holds here too. With
    ``accumulate=k`` the batch is one of the step's ``k`` micro-batches. ``mesh`` takes the place of
    the strategy's, and ``hardware`` that of what is known of the target's chips. Of sixteen equal
    blocks or more (on GPUs, 64) only one and two are compiled, and the difference gives the rest,
    which the report says; ``blocks="few"`` does so from four on, and ``"whole"`` never. A step that
    needs more memory than a device has gives a report that says so. The compiler has ``timeout_s``
    seconds. ``compile=False``, and a GPU target where XLA for GPUs is not installed, gives what the
    planner's model says in place of the compiler, in seconds, and the report says so
    (:attr:`DryRun.is_analytic`). Raises :class:`~meshwright.TargetError` for a target that does not
    go with the mesh, or a layout that the model does not know where it has to do, and
    :class:`~meshwright.CompileError` if the step does not compile.

    >>> import jax, keras, meshwright as mw
    >>> with mw.abstract():
    ...     model = keras.Sequential([keras.Input([64]), keras.layers.Dense(32, name="last")])
    ...     model.compile("adam", "mse")
    >>> strategy = mw.Sharded(mw.Mesh({"batch": 4, "model": 2}), {"last/kernel": [None, "model"]})
    >>> batch = [jax.ShapeDtypeStruct((16, features), "float32") for features in (64, 32)]
    >>> report = dry_run(model, tuple(batch), strategy=strategy, target="cpu:8")
    >>> report.parameter_bytes == 4 * (64 * 16 + 32)
    True
    """
    target, ours = Target.of(target), _ours(strategy)
    if mesh is not None:
        ours = ours.on(mesh if isinstance(mesh, Mesh) else Mesh(mesh))
    hardware = hardware or hardware_of(target)
    return dry_run_of(model, batch, ours, target, hardware, blocks, compile, timeout_s)


@outside_of_context()
def dry_serve(
    model: keras.Model | Program,
    inputs: Any,
    *,
    strategy: Sharded | Placement,
    target: Target | str,
    rows: Sequence[int] = (1, 8, 32),
    precision: Literal["bfloat16", "float16", "int8"] | None = None,
    hardware: Hardware | None = None,
    compile: bool = True,
    timeout_s: float = 3600.0,
) -> ServingReport:
    """What serving a model takes on a target, which need not be there, for batches of some sizes.

    ``model`` is a Keras model, best built in :func:`~meshwright.abstract`, or a
    :class:`~meshwright.Program`; ``inputs`` are a batch of what goes in, of which shapes and dtypes
    matter. ``strategy`` is that of serving, see :meth:`~meshwright.Sharded.serving`; its mesh has
    as many devices as ``target``. With a pipeline over an axis of that mesh the model is cut into
    stages as a server cuts it, and each of them is dry-run on its own devices. The forward pass is
    compiled for each of ``rows``; with ``compile=False``, and for GPUs where XLA for them is not
    installed, times, collectives and the peak are those of the planner's model, and bytes of
    weights are exact. ``precision`` is that of a :class:`~meshwright.Server`.
    ``hardware`` takes the place of what is known of the target's chips, and the compiler has
    ``timeout_s`` seconds. Raises :class:`~meshwright.ModelError` for any other ``precision``,
    :class:`~meshwright.BatchError` for no rows, :class:`~meshwright.TargetError` and
    :class:`~meshwright.CompileError`.

    >>> import jax, keras, meshwright as mw
    >>> with mw.abstract():
    ...     model = keras.Sequential([keras.Input([64]), keras.layers.Dense(32, name="last")])
    >>> strategy = mw.Sharded(mw.Mesh({"model": 8}), {"last/kernel": [None, "model"]}, batch=None)
    >>> x = jax.ShapeDtypeStruct((1, 64), "float32")
    >>> report = dry_serve(model, x, strategy=strategy, target="h100:8", compile=False)
    >>> report.weight_bytes, report.devices_for(rows_per_s=1000).devices
    (1152, 8)
    """
    from .forwards import Forwards
    from .serving_dry_runs import dry_run_of_serving
    from .staged_forwards import served_pipeline

    target = Target.of(target)
    placement = strategy if isinstance(strategy, Placement) else strategy.placement
    check_size(placement.mesh, target)
    if precision not in (None, "bfloat16", "float16", "int8"):
        raise ModelError(
            f"precision must be 'bfloat16', 'float16', 'int8' or None; received {precision!r}."
        )
    if not rows or min(rows) < 1:
        raise BatchError(f"rows must list sizes of batches of at least 1; received {list(rows)}.")
    forwards = Forwards(model, inputs, precision)
    return dry_run_of_serving(
        forwards,
        strategy,
        served_pipeline(strategy),
        target,
        hardware or hardware_of(target),
        rows=rows,
        compile=compile,
        timeout_s=timeout_s,
    )


def _ours(strategy: Any) -> Any:
    """The strategy, or what lays a model out as Keras' own does."""
    keras = sys.modules.get("keras")
    if keras is None or hasattr(strategy, "placement"):
        return strategy
    if not isinstance(strategy, keras.distribution.DataParallel | keras.distribution.ModelParallel):
        return strategy
    from .keras import Sharded

    return Sharded.from_keras(strategy)
