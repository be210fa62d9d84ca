"""A compiled Keras model as a Program: pure functions over its variables by path."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import jax
import keras
import numpy as np

from ... import _compat
from ...errors import ModelError
from ...layouts.params import ParamInfo
from ...layouts.placement import Placement
from ...program import Arrays, Aux, Batch, Logs, Program, TrainState
from ...stages.stacking import Stacking
from ...step.assemble import Assembly, assemble
from ...step.padding import Padded
from ...step.storing import Storing
from .batches import labeller_of
from .hooks import find_parameters, lying, parameter_of, unguarded
from .memory import memory_of, unshared
from .paths import distinct, model_infos, other_info, slot_info
from .rowwise import loss_on_true_rows

if TYPE_CHECKING:
    from .sharded import Sharded

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class KerasVariables:
    """Variables of a model, its optimizer and its metrics by path, in Keras' order.

    ``storing`` says which of them a step stores padded; the variables themselves never are.
    """

    params: dict[str, Any]  # path -> variable, and so on
    state: dict[str, Any]
    slots: dict[str, Any]
    metrics: dict[str, Any]
    infos: dict[int, ParamInfo]
    listed: tuple[str, ...]  # paths of metrics as the model lists them: some perhaps twice
    storing: Storing | Stacking = field(default_factory=Storing)

    @classmethod
    def of(cls, model: keras.Model) -> KerasVariables:
        """Those of a built model."""
        infos = model_infos(model)
        listed = model.metrics_variables
        metrics = list({id(metric): metric for metric in listed}.values())
        optimizer = _compat.optimizer_of(model)
        slots = [] if optimizer is None else optimizer.variables
        find_parameters(slots, model.trainable_variables)
        others = {info.path for info in infos.values()}
        for slot in slots:
            owner = parameter_of(slot)
            if owner is not None and id(owner) not in infos:
                # The model has dropped it, as `quantize` does, and its slots lie as they did.
                infos[id(owner)] = distinct(other_info(owner, "parameter"), others)
            infos[id(slot)] = distinct(slot_info(slot, owner, infos.get(id(owner))), others)
        for metric in metrics:
            infos[id(metric)] = distinct(other_info(metric, "metric"), others)
        counted = {id(v) for v in metrics}
        return cls(
            params=_by_path(model.trainable_variables, infos),
            state=_by_path(
                [v for v in model.non_trainable_variables if id(v) not in counted], infos
            ),
            slots=_by_path(slots, infos),
            metrics=_by_path(metrics, infos),
            infos=infos,
            listed=tuple(infos[id(metric)].path for metric in listed),
        )

    def under(self, placement: Placement) -> KerasVariables:
        """The same variables, stored as a placement says."""
        storing = Storing.of(placement, *(_infos(self, part) for part in _parts(self)))
        return self.stored_by(storing)

    def stored_by(self, storing: Storing | Stacking) -> KerasVariables:
        """The same variables, stored as some steps take them."""
        return replace(self, storing=storing)

    def metrics_as_listed(self, values: Arrays) -> list[Any]:
        """Values of metrics in the order of ``model.metrics_variables``.

        A model whose ``metrics`` add to those of Keras what Keras has found lists it twice.
        """
        return [values[path] for path in self.listed]

    def metrics_by_path(self, values: list[Any]) -> Arrays:
        """The reverse of :meth:`metrics_as_listed`."""
        return dict(zip(self.listed, values, strict=True))

    @property
    def all(self) -> list[Any]:
        """Every variable, in the order of :class:`TrainState`."""
        parts = (self.params, self.state, self.slots, self.metrics)
        return [variable for part in parts for variable in part.values()]


def read_state(variables: KerasVariables) -> TrainState:
    """The arrays that the variables hold, as a step stores them, no two in the same memory."""
    memories: set[int] = set()
    values = TrainState(
        *(
            {path: unshared(_laid_out(v), memories) for path, v in part.items()}
            for part in _parts(variables)
        )
    )
    return variables.storing.store(values)


def take_state(variables: KerasVariables) -> TrainState:
    """The same for steps that donate it: the variables hold nothing until :func:`write_state`.

    A step frees what it is given, but of what is padded it is given a copy.
    """
    state = read_state(variables)
    if not variables.storing:
        return state
    memories = {memory_of(array) for part in state for array in part.values()}
    for part, padded in zip(_parts(variables), variables.storing.parts, strict=True):
        for path in padded:
            array = _compat.raw_value(part[path])
            if not array.is_deleted() and memory_of(array) not in memories:
                array.delete()
    return state


def _laid_out(variable: Any) -> Any:
    """The array of a variable in its layout. Keras takes an array on the only device of a mesh as
    it is, and a step would be compiled once more for what was assigned since the last one."""
    value, layout = _compat.raw_value(variable), _compat.variable_layout(variable)
    if isinstance(value.sharding, jax.sharding.SingleDeviceSharding) and layout is not None:
        return jax.device_put(value, layout)
    return value


def write_state(variables: KerasVariables, state: TrainState) -> None:
    """Give every variable its array, in its own dims."""
    state = variables.storing.restore(state)
    for part, values in zip(_parts(variables), state, strict=True):
        for path, variable in part.items():
            variable.assign(values[path])


def check_state(variables: KerasVariables, state: Any) -> None:
    """Raise :class:`ModelError` unless a state has an array for each of the variables."""
    if not isinstance(state, TrainState):
        raise ModelError(f"expected the mw.TrainState of strategy.state(model); received {state!r}")
    parts = zip(TrainState._fields, _parts(variables), state, strict=True)
    missing = [f"{name} {path}" for name, part, values in parts for path in part.keys() - values]
    if missing:
        raise ModelError(
            f"the state lacks {len(missing)} variable(s) of the model: {', '.join(sorted(missing))}"
            ". Give the newest state of strategy.state(model)."
        )


def keras_program(
    model: keras.Model,
    variables: KerasVariables,
    in_force: Context | None = None,
    example: Batch | None = None,
) -> Program:
    """The Program of a built model; of one that is not compiled, only to predict with.

    It is traced inside of ``in_force()``: under the strategy whose layers' outputs it lays out.
    """
    functions = _Functions(model, variables)
    owns = functools.partial(_compat.has_own, model)
    params, state, slots, metrics = (_infos(variables, part) for part in _parts(variables))
    return Program(
        name=model.name,
        params=params,
        state=state,
        slots=slots,
        metrics=metrics,
        initial=functions.initial,
        forward=functions.forward,
        loss=functions.loss,
        measure=functions.measure,
        update=functions.update,
        own_step=functions.own_step if owns("train_step") else None,
        own_test_step=functions.own_test_step if owns("test_step") else None,
        predict=functions.predict,
        reduction=_reduction(model) if model.compiled else "mean",
        label=labeller_of(model),
        context=None if in_force is None else lambda placement, whole: in_force(),
        example=example,
    )


@dataclass(frozen=True, eq=False)
class _Functions:
    """The functions of a :class:`Program`, as Keras computes them without side effects."""

    model: keras.Model
    variables: KerasVariables

    def initial(self) -> TrainState:
        return read_state(self.variables)

    def forward(
        self, params: Arrays, state: Arrays, inputs: Any, training: bool
    ) -> tuple[Any, Arrays]:
        v = self.variables
        values = _ordered(v.params, params), _ordered(v.state, state)
        how = _training(self.model, training)
        with unguarded():
            called: Any = self.model.stateless_call(*values, inputs, **how)
        outputs, new = called
        return outputs, _named(v.state, new)

    def loss(
        self, params: Arrays, whole: TrainState, batch: Batch, training: bool
    ) -> tuple[Any, Aux]:
        model, v = self.model, self.variables
        x, y, weights = _unpack(batch.arrays if isinstance(batch, Padded) else batch)
        whole_batch = model.compute_loss_and_updates
        compute = loss_on_true_rows(model, batch) if isinstance(batch, Padded) else whole_batch
        with unguarded():
            value, aux = compute(
                _ordered(v.params, params),
                _ordered(v.state, whole.state),
                v.metrics_as_listed(whole.metrics),
                x,
                y,
                weights,
                training=training,
                optimizer_variables=_ordered(v.slots, whole.slots),
            )
        unscaled, outputs, state, metrics = aux
        # Transformations drop notes on arrays: Keras' own metrics see no mask while training.
        masks = [] if training else _compat.masks_of(outputs)
        masked = outputs, masks or [None] * len(jax.tree.leaves(outputs))
        return value, Aux(unscaled, masked, _named(v.state, state), v.metrics_by_path(metrics))

    def measure(self, metrics: Arrays, aux: Aux, batch: Batch) -> tuple[Arrays, Logs]:
        v = self.variables
        outputs, masks = aux.outputs
        _compat.set_masks(outputs, masks)
        logs, new = _compat.update_metrics(
            self.model, v.metrics_as_listed(metrics), aux.loss, _unpack(batch), outputs
        )
        return v.metrics_by_path(new), logs

    def update(self, params: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
        v = self.variables
        new_params, new_slots = self.model.optimizer.stateless_apply(
            _ordered(v.slots, slots), _ordered(v.params, grads), _ordered(v.params, params)
        )
        return _named(v.params, new_params), _named(v.slots, new_slots)

    def predict(self, params: Arrays, state: Arrays, batch: Batch) -> tuple[Any, Arrays]:
        v = self.variables
        with unguarded():
            values = _ordered(v.params, params), _ordered(v.state, state)
            outputs, new = self.model.predict_step(values, batch)
        return outputs, _named(v.state, new)

    def own_step(self, whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        logs, new = self.model.train_step(tuple(_lists(self.variables, whole)), batch)
        return _state(self.variables, new), logs

    def own_test_step(self, whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        params, state, _, metrics = _lists(self.variables, whole)
        logs, (params, state, metrics) = self.model.test_step((params, state, metrics), batch)
        new = _state(self.variables, (params, state, [], metrics))
        return new._replace(slots=whole.slots), logs


def steps_of(
    strategy: Sharded,
    model: keras.Model,
    variables: KerasVariables,
    losses: tuple[str, ...] | None = None,
    example: Batch | None = None,
) -> Assembly:
    """How the steps of a model are put together under a strategy; see :func:`assemble`.

    ``example`` is a batch, or its shapes, by which a pipeline is cut.
    """

    @contextlib.contextmanager
    def in_force() -> Iterator[None]:
        ahead = contextlib.nullcontext()
        if strategy.mesh.is_abstract:  # the variables lie elsewhere, or nowhere
            ahead = lying(strategy._placed(model))
        with strategy.in_force(model), ahead:
            yield

    if strategy.how.pipeline is not None:
        take_constants_off_meshes(model)
    program = keras_program(model, variables, in_force, example)
    return assemble(program, strategy.placement, strategy.how, losses=losses)


def take_constants_off_meshes(model: keras.Model) -> None:
    """Hold on the host what layers compute from their variables when they are built, as
    ``Normalization`` does with its mean: a stage has a mesh of its own."""
    for layer in _compat.layers_inside(model):
        for name, value in list(vars(layer).items()):
            if isinstance(value, jax.Array) and value.is_fully_replicated:
                object.__setattr__(layer, name, np.asarray(value))


def loss_metrics(model: keras.Model, variables: KerasVariables) -> tuple[str, ...]:
    """Paths of the variables in which Keras averages the loss."""
    trackers = [metric for metric in model.metrics if metric.name == "loss"]
    own = {id(v) for metric in trackers for v in metric.variables}
    return tuple(path for path, v in variables.metrics.items() if id(v) in own)


def _reduction(model: keras.Model) -> Literal["mean", "sum"]:
    """Whether the model's losses are sums; a mixture counts as a mean."""
    return "sum" if set(_compat.loss_reductions(model)) == {"sum"} else "mean"


def _parts(v: KerasVariables) -> tuple[dict[str, Any], ...]:
    return v.params, v.state, v.slots, v.metrics


def _by_path(variables: list[Any], infos: dict[int, ParamInfo]) -> dict[str, Any]:
    return {infos[id(variable)].path: variable for variable in variables}


def _infos(v: KerasVariables, part: dict[str, Any]) -> tuple[ParamInfo, ...]:
    return tuple(v.infos[id(variable)] for variable in part.values())


def _ordered(part: dict[str, Any], values: Arrays) -> list[Any]:
    """Values in Keras' order; a pytree's dict comes back sorted."""
    return [values[path] for path in part]


def _named(part: dict[str, Any], values: list[Any]) -> Arrays:
    return dict(zip(part, values, strict=True))


def _lists(v: KerasVariables, whole: TrainState) -> list[list[Any]]:
    return [
        _ordered(v.params, whole.params),
        _ordered(v.state, whole.state),
        _ordered(v.slots, whole.slots),
        v.metrics_as_listed(whole.metrics),
    ]


def _state(v: KerasVariables, lists: Any) -> TrainState:
    paths = (v.params, v.state, v.slots, v.listed)
    return TrainState(*(dict(zip(part, new)) for part, new in zip(paths, lists, strict=True)))  # noqa: B905


def _unpack(batch: Batch) -> tuple[Any, Any, Any]:
    if isinstance(batch, Padded):
        x, y, weights = _unpack(batch.arrays)
        return batch.true(x), y, weights
    return keras.utils.unpack_x_y_sample_weight(batch)


def _training(model: keras.Model, training: bool) -> dict[str, bool]:
    return {"training": training} if _compat.takes_training(model) else {}
