"""A training step with all that it takes, as shapes that lie on a mesh: what is compiled ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..layouts.placement import ParamInfo, Placed, Placement
from ..layouts.strict import inspect
from ..program import Batch, Program, TrainState
from ..step.options import PLAIN, StepOptions
from ..step.sharing import Sharing
from ..step.storing import Storing, stored
from ..step.train import Step, guarded, make_train_step
from .faults import tracing

if TYPE_CHECKING:
    from ..data import Putter  # which imports JAX, as the compiling process may not yet


@dataclass(frozen=True, eq=False)
class Source:
    """What a step was made of, so that one can be made of a part of it.

    ``state`` are the shapes that ``program`` takes, ``around`` puts a function under the layouts
    while it is traced, and ``described`` is the same step of another Program, all of whose
    variables this one has.
    """

    program: Program
    state: TrainState
    around: Callable[[Callable[..., Any]], Callable[..., Any]]
    described: Callable[[Program], Described]


@dataclass(frozen=True, eq=False)
class Described:
    """A training step and its arguments without values.

    ``step`` takes ``state`` and ``batch``, which hold ``jax.ShapeDtypeStruct`` with shardings on
    the mesh of ``placement``; ``batch`` is a tuple of micro-batches where the step accumulates.
    ``placed`` says of every variable where it lies and why. ``source`` is ``None`` where a front
    end does not tell.
    """

    name: str
    step: Step
    state: TrainState
    batch: Any
    placed: tuple[Placed, ...]
    placement: Placement
    how: StepOptions
    source: Source | None = None

    @property
    def mesh(self) -> Mesh:
        return self.placement.mesh

    @functools.cached_property
    def jitted(self) -> Any:
        """The step as training compiles it: the state is donated and lies afterwards as before."""
        import jax

        lies = jax.tree.map(lambda array: array.sharding, self.state)
        return jax.jit(self.step, donate_argnums=0, out_shardings=(lies, None))


class Describes(Protocol):
    """What planning asks of a strategy; :class:`~meshwright.Sharded` has it."""

    @property
    def placement(self) -> Placement: ...
    @property
    def how(self) -> StepOptions: ...
    def described(self, model: Any, batch: Batch) -> Described: ...
    def on(self, mesh: Mesh) -> Any: ...
    def from_placement(self, placement: Placement, how: StepOptions | None = None) -> Any: ...


def describe(model: Any, batch: Batch, strategy: Describes | Placement) -> Described:
    """The step that would train a model, or a Program, on such batches under a strategy.

    A Program may come with a :class:`~meshwright.Placement` alone.
    """
    if not isinstance(model, Program):
        assert not isinstance(strategy, Placement)
        with tracing(getattr(model, "name", "model")):  # Keras builds what is not built yet
            return strategy.described(model, batch)
    if isinstance(strategy, Placement):
        return of_program(model, batch, strategy, PLAIN)
    return of_program(model, batch, strategy.placement, strategy.how)


def of_program(program: Program, batch: Batch, placement: Placement, how: StepOptions) -> Described:
    """The step that :class:`~meshwright.Trainer` would take."""
    placement = unbound(placement)
    inspect(placement.naming(program.inputs), program.infos, repr(program.name))
    return _of_part(program, batch, placement, how)


def _of_part(program: Program, batch: Batch, placement: Placement, how: StepOptions) -> Described:
    """The same of a Program that may be a part of the one which the placement was made for."""
    from ..data import Putter

    named = placement.naming(program.inputs)

    def layouts(placement: Placement, which: Callable[[Placed], Layout]) -> TrainState:
        placed = {each.info: which(each) for each in placement.place(program.infos)}
        return TrainState(*({i.path: placed[i] for i in part} for part in _parts(program)))

    put = Putter(named)
    used = layouts(placement, lambda placed: placed.unpadded)
    gathered = layouts(placement.with_zero(0), lambda placed: placed.unpadded)
    used = used._replace(params=gathered.params)
    storing = Storing.of(placement, *_parts(program))
    safe = guarded(program, used, put.layouts)
    step = make_train_step(stored(safe, storing), Sharing.of(placement, program.params), how)
    placed = tuple(placement.place(program.infos))
    return Described(
        name=program.name,
        step=program.under(placement, step, whole=True),
        state=state_of(placed, _parts(program)),
        batch=batch_of(batch, put, how),
        placed=placed,
        placement=placement,
        how=how,
        source=Source(
            program=program,
            state=_shapes_of(program),
            around=functools.partial(program.under, placement),
            described=lambda part: _of_part(part, batch, placement, how),
        ),
    )


def _shapes_of(program: Program) -> TrainState:
    import jax
    import jax.numpy as jnp

    def shape(info: ParamInfo) -> Any:
        return jax.ShapeDtypeStruct(info.dims, jnp.dtype(info.dtype))

    return TrainState(*({info.path: shape(info) for info in part} for part in _parts(program)))


def unbound(placement: Placement) -> Placement:
    """The placement on the same mesh without devices."""
    return placement if placement.mesh.is_abstract else placement.on(placement.mesh.abstract())


def state_of(placed: tuple[Placed, ...], parts: tuple[tuple[ParamInfo, ...], ...]) -> TrainState:
    """The state as a step stores it, without values. ``parts`` are those of a TrainState."""
    import jax
    import jax.numpy as jnp

    by_info = {each.info: each for each in placed}

    def array(info: ParamInfo) -> Any:
        each = by_info[info]
        return jax.ShapeDtypeStruct(
            each.stored_dims, jnp.dtype(info.dtype), sharding=each.layout.sharding
        )

    return TrainState(*({info.path: array(info) for info in part} for part in parts))


def batch_of(batch: Batch, put: Putter, how: StepOptions) -> Any:
    """What a step takes of such batches, without values."""
    import jax

    def array(value: Any, layout: Layout) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(_dtype(value))
        return jax.ShapeDtypeStruct(value.shape, dtype, sharding=layout.sharding)

    laid = jax.tree.map(array, batch, put.layouts(batch, last=False))
    (taken,) = how.for_steps([laid] * how.accumulate)
    return taken


def _dtype(value: Any) -> Any:
    import numpy as np

    return value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype


def _parts(program: Program) -> tuple[tuple[ParamInfo, ...], ...]:
    return program.params, program.state, program.slots, program.metrics
