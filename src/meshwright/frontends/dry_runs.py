"""Dry runs of models and Programs, under strategies of ours and of Keras."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..layouts.mesh import Mesh
from ..layouts.placement import Placement
from ..planning import dry_run as planned
from ..planning.dry_run import DryRun
from ..program import Batch, Program
from ..targets.hardware import Hardware
from ..targets.target import Target

if TYPE_CHECKING:
    import keras

    from .keras import Sharded


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
    blocks: Literal["auto", "whole", "few"] = "auto",
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
    return planned.dry_run(
        model,
        batch,
        strategy=_ours(strategy),
        target=target,
        mesh=mesh,
        hardware=hardware,
        blocks=blocks,
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
