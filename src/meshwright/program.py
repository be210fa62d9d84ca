"""The program: what a model is to the rest of the library, whichever front end it came from.

Pure functions over named arrays. Trainer, planner, parameter server and serving take Programs and
know neither Keras nor any other front end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .layouts.context_mesh import in_place_of_context
from .layouts.dim_names import DimNames
from .layouts.params import ParamInfo
from .layouts.placement import Placement

Arrays = dict[str, Any]  # path -> jax.Array
Batch = Any  # a pytree; Keras' is (inputs, targets, sample weights), shorter where parts are absent
Logs = dict[str, Any]  # name -> scalar

ROWS_SO_FAR = "counts/rows"  # the path of the state that counts rows, of which keys are made


class TrainState(NamedTuple):
    """All that a training step reads and returns, by path; a pytree.

    ``params`` are trained, ``slots`` are the optimizer's, ``state`` is what the model keeps besides
    (batch statistics, seeds, frozen weights), ``metrics`` what the metrics count.

    >>> import numpy as np
    >>> state = TrainState({"w": np.zeros(2)}, {}, {"w/momentum": np.zeros(2)}, {})
    >>> sorted(state.params), sorted(state.slots)
    (['w'], ['w/momentum'])
    """

    params: Arrays
    state: Arrays
    slots: Arrays
    metrics: Arrays


def shapes_of(infos: Iterable[ParamInfo]) -> Arrays:
    """The shapes and dtypes of variables by path.

    >>> shapes_of([ParamInfo("w", ("w",), (4, 2), "float32", itemsize=4)])
    {'w': ShapeDtypeStruct(shape=(4, 2), dtype=float32)}
    """
    import jax
    import jax.numpy as jnp

    return {info.path: jax.ShapeDtypeStruct(info.dims, jnp.dtype(info.dtype)) for info in infos}


class Aux(NamedTuple):
    """What the loss function returns beside the loss."""

    loss: Any  # scalar, before any loss scaling
    outputs: Any
    state: Arrays
    metrics: Arrays


Step = Callable[[TrainState, Batch], tuple[TrainState, Logs]]


class Label(NamedTuple):
    """Which part of a batch an array is."""

    kind: Literal["input", "target"]
    name: str | None
    position: int


def label_inputs(batch: Batch) -> list[Label]:
    """Every array of the batch is an input: named by its key in a mapping, else by position.

    >>> label_inputs({"image": 0, "mask": 1})[1]
    Label(kind='input', name='mask', position=1)
    """
    return [Label("input", name, i) for i, (name, _) in enumerate(named_leaves(batch))]


def named_leaves(part: Any) -> list[tuple[str | None, Any]]:
    """``(name, array)`` of each array; the name is the outermost key, where that is a mapping's."""
    import jax

    if not isinstance(part, Mapping):
        return [(None, value) for value in jax.tree.leaves(part)]
    paths = jax.tree_util.tree_flatten_with_path(part)[0]
    return [(path[0].key, value) for path, value in paths]


@dataclass(frozen=True, eq=False)
class Program:
    """A model as descriptions of its variables and pure functions over their values.

    ``name`` is the model's; ``params``, ``state``, ``slots`` and ``metrics`` describe its
    variables. ``forward(params, state, inputs, training)`` gives outputs and new state.
    ``loss(params, whole, batch, training)`` gives the scalar that is differentiated and an
    :class:`Aux`; ``whole`` is the :class:`TrainState` that the other variables are read from.
    ``measure(metrics, aux, batch)`` gives new metrics and logs. ``update(params, grads, slots)`` is
    the optimizer's step; where it computes with the loss, :meth:`noting` puts that among the slots,
    as ``loss_slot`` describes it. ``initial()`` gives the values to begin with. ``own_step`` is a
    whole training step ``(whole, batch) -> (whole, logs)`` where the model brings its own, or its
    optimizer, which ``step_of`` says; ``own_test_step`` is one of evaluation;
    ``predict(params, state, batch)`` gives outputs and new state where that takes more than
    ``forward``.
    ``reduction`` says whether the loss is a mean over the rows of the batch or a sum; ``logs`` says
    whether those of ``measure`` are of one batch, means over its rows, or of all batches that its
    metrics have counted. ``label`` says which input or target each array of a batch is. A program
    over named dims has the names of its batches' dims in ``inputs``, by position, and its
    ``context(placement, whole)`` lays out by the placement's rules what is traced inside; ``whole``
    is true of a step, which meets every dim. ``example`` is a batch, or its shapes, by which a
    pipeline cuts the model into stages.

    >>> import jax.numpy as jnp, numpy as np, optax, meshwright as mw
    >>> params = {"w": np.zeros([4, 2], "float32")}
    >>> program = mw.jax_program(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, optax.adam(0.1))
    >>> [info.path for info in program.params], program.params[0].dims
    (['w'], (4, 2))
    """

    name: str
    params: tuple[ParamInfo, ...]
    state: tuple[ParamInfo, ...]
    slots: tuple[ParamInfo, ...]
    metrics: tuple[ParamInfo, ...]
    initial: Callable[[], TrainState]
    forward: Callable[[Arrays, Arrays, Any, bool], tuple[Any, Arrays]]
    loss: Callable[[Arrays, TrainState, Batch, bool], tuple[Any, Aux]]
    measure: Callable[[Arrays, Aux, Batch], tuple[Arrays, Logs]]
    update: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    own_step: Step | None = None
    step_of: Literal["model", "optimizer"] = "model"
    own_test_step: Step | None = None
    predict: Callable[[Arrays, Arrays, Batch], tuple[Any, Arrays]] | None = None
    reduction: Literal["mean", "sum"] = "mean"
    logs: Literal["of one batch", "of all counted"] = "of all counted"
    label: Callable[[Batch], list[Label]] = label_inputs
    inputs: tuple[tuple[int, DimNames], ...] = ()
    context: Callable[[Placement, bool], AbstractContextManager[Any]] | None = None
    example: Batch | None = None
    loss_slot: ParamInfo | None = None

    def noting(self, slots: Arrays, loss: Any) -> Arrays:
        """The slots as ``update`` takes them in a step of this loss, the mean over its rows.

        >>> import numpy as np, optax, meshwright as mw
        >>> def loss(params, x):
        ...     return ((x @ params["w"]) ** 2).mean()
        >>> program = mw.jax_program(loss, {"w": np.ones([4, 2])}, optax.polyak_sgd())
        >>> sorted(program.noting(program.initial().slots, 0.5))
        ['step/loss']
        """
        if self.loss_slot is None:
            return slots
        import jax.numpy as jnp

        return {**slots, self.loss_slot.path: jnp.asarray(loss, self.loss_slot.dtype)}

    @property
    def update_slots(self) -> tuple[ParamInfo, ...]:
        """What ``update`` takes as slots: those of the state, and the loss where it reads that."""
        return self.slots if self.loss_slot is None else (*self.slots, self.loss_slot)

    def under(
        self, placement: Placement, function: Callable[..., Any], *, whole: bool = False
    ) -> Callable[..., Any]:
        """A function of this program, traced as it is under a placement."""

        @functools.wraps(function)
        def traced(*args: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(in_place_of_context(placement.mesh))
                if self.context is not None:
                    stack.enter_context(self.context(placement, whole))
                return function(*args)

        return traced

    def __repr__(self) -> str:
        return f"Program({self.name!r}, {len(self.params)} parameters)"

    @property
    def has_more_dims(self) -> bool:
        """Whether a step may have named dims that no variable has, as programs over them do."""
        return self.context is not None

    @property
    def parts(self) -> tuple[tuple[ParamInfo, ...], ...]:
        """The variables in the fields of :class:`TrainState`."""
        return self.params, self.state, self.slots, self.metrics

    @property
    def infos(self) -> tuple[ParamInfo, ...]:
        """Every variable: parameters, state, slots, metrics."""
        return (*self.params, *self.state, *self.slots, *self.metrics)
