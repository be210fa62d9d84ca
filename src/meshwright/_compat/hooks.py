"""Where Keras asks us, and has no public hook for it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Protocol


class KerasHooks(Protocol):
    """What the Keras front end wants to be asked; see :func:`install_keras_hooks`."""

    def defer(self, variable: Any, initializer: Any) -> bool:
        """Whether the variable is to be made later, in its layout, and not now."""
        ...

    def new_model(self, model: Any) -> None:
        """A model is being constructed."""
        ...

    def new_slot(self, slot: Any, parameter: Any) -> None:
        """An optimizer has made ``slot`` for ``parameter``."""
        ...

    def put_batches(self, distribution: Any, batches: Iterable[Any]) -> Iterator[Any] | None:
        """The batches laid out, or ``None`` to leave that to Keras."""
        ...

    def put_batch(self, data: Any) -> Any | None:
        """One batch of ``train_on_batch`` or ``test_on_batch`` laid out, or ``None``."""
        ...

    def lay_out_activation(self, tensor: Any, layout: Any) -> Any:
        """The tensor laid out, or ``NotImplemented`` to leave that to Keras."""
        ...

    def stateless_call(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """``model.stateless_call``, of which ``original`` is Keras' own."""
        ...

    def loss_and_updates(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The same for ``compute_loss_and_updates``, which takes a batch and all variables."""
        ...

    def on_host(self, variable: Any) -> Any | None:
        """The whole value of a variable, or ``None`` to leave reading it to Keras."""
        ...

    def refuse_other_value(self, variable: Any, value: Any) -> None:
        """Raise, in all processes, for a value that another process has differently."""
        ...

    def holds_value(self, variable: Any) -> bool:
        """Whether a variable has a value, and does not wait for one."""
        ...

    def keep_weights(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Around ``fit``, ``evaluate`` and ``predict``: what fails inside loses no weight, and what
        ends well leaves no two variables in one memory."""
        ...

    def lay_out_model(self, model: Any) -> None:
        """Before any of these: a model may have been built or compiled for other devices."""
        ...

    def in_keras(self) -> contextlib.AbstractContextManager[None]:
        """Around these and their relatives for one batch: Keras itself calls the model."""
        ...


def install_keras_hooks(hooks: KerasHooks) -> None:
    """Ask ``hooks`` where Keras has no public hook; done once, and each passes on what is not ours.

    Keras 3.15.1 (https://github.com/keras-team/keras): no hook sees all variables before they are
    allocated (``backend/jax/core.py``), no hook learns which parameter a slot belongs to
    (``optimizers/base_optimizer.py``), layouts of batches are computed once and reused for a
    smaller last batch, a failure in ``predict`` or ``evaluate`` leaves every weight empty
    (``backend/jax/trainer.py``), and ``Normalization`` computes with what its variables held when
    it was built or adapted, not with what they hold (``layers/preprocessing/normalization.py``).
    """
    from keras.src.backend.jax import core, distribution_lib, trainer
    from keras.src.layers.layer import Layer
    from keras.src.layers.preprocessing.normalization import Normalization
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    variables: Any = core.JaxVariable
    if getattr(variables, "_meshwright_hooks", None) is not None:
        return
    variables._meshwright_hooks = hooks
    around = _Around(hooks)
    _wrap(core.JaxVariable, "_initialize_with_initializer", around.initialize)
    _wrap(core.JaxVariable, "_direct_assign", around.assign)
    _wrap(core.JaxVariable, "__array__", around.as_numpy)
    _wrap(trainer.JAXTrainer, "__init__", around.construct)
    _wrap(Layer, "stateless_call", hooks.stateless_call)
    _wrap(Normalization, "call", around.normalize)
    _wrap(trainer.JAXTrainer, "compute_loss_and_updates", hooks.loss_and_updates)
    _wrap(BaseOptimizer, "add_variable_from_reference", around.add_slot)
    _wrap(trainer.JAXEpochIterator, "_get_distributed_iterator", around.iterate)
    _wrap(trainer, "_distribute_data", around.put)
    _wrap(distribution_lib, "distribute_tensor", around.lay_out)
    for name in ("fit", "evaluate", "predict"):
        _wrap(trainer.JAXTrainer, name, around.guarded)
        _wrap(trainer.JAXTrainer, _OF_ONE_BATCH[name], around.called)


_OF_ONE_BATCH = {
    "fit": "train_on_batch",
    "evaluate": "test_on_batch",
    "predict": "predict_on_batch",
}


_asked: contextvars.ContextVar[Any] = contextvars.ContextVar("asked", default=None)


class _HandedOn(BaseException):
    """Ends a model's own ``fit`` where it calls Keras'."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def handed_on(model: Any, method: str, given: dict[str, Any]) -> dict[str, Any]:
    """What a model's own ``fit``, ``evaluate`` or ``predict`` hands on to Keras', which is not run;
    the hooks must be installed.

    Keras Hub's ``PipelineModel`` (0.32) prepares its data there and has no method for that alone.
    """
    token = _asked.set(model)
    try:
        getattr(model, method)(**given)
    except _HandedOn as end:
        return end.arguments
    finally:
        _asked.reset(token)
    raise AssertionError(f"{type(model).__name__}.{method} does not call that of keras.Model")


class _Around:
    """Keras' own functions with the hooks around them."""

    def __init__(self, hooks: KerasHooks) -> None:
        self.hooks = hooks

    def initialize(self, original: Any, variable: Any, initializer: Any) -> None:
        if not self.hooks.defer(variable, initializer):
            original(variable, initializer)

    def assign(self, original: Any, variable: Any, value: Any) -> None:
        try:
            original(variable, value)
        except AssertionError as error:  # of device_put, which compares and shows all values
            if "is not the same on each process" not in str(error):
                raise
        else:
            return
        self.hooks.refuse_other_value(variable, value)

    def construct(self, original: Any, model: Any) -> None:
        original(model)
        self.hooks.new_model(model)

    def add_slot(
        self, original: Any, optimizer: Any, reference_variable: Any, *args: Any, **kw: Any
    ) -> Any:
        slot = original(optimizer, reference_variable, *args, **kw)
        self.hooks.new_slot(slot, reference_variable)
        return slot

    def as_numpy(self, original: Any, variable: Any, *args: Any, **kw: Any) -> Any:
        whole = self.hooks.on_host(variable)  # Keras cannot read shards of other processes
        return original(variable, *args, **kw) if whole is None else whole.__array__(*args, **kw)

    def normalize(self, original: Any, layer: Any, *args: Any, **kw: Any) -> Any:
        """By the present values of the variables: those of a file, a checkpoint, a step."""
        statistics = _statistics(layer)
        if not statistics or not all(map(self._has_value, statistics)):
            return original(layer, *args, **kw)
        twin = object.__new__(type(layer))  # other threads may be tracing the layer itself
        vars(twin).update(vars(layer))
        twin.finalize_state()
        return original(twin, *args, **kw)

    def _has_value(self, variable: Any) -> bool:
        from keras.src.backend.common.stateless_scope import get_stateless_scope

        scope = get_stateless_scope()
        is_passed = scope is not None and scope.get_current_value(variable) is not None
        return is_passed or self.hooks.holds_value(variable)

    def iterate(self, original: Any, iterator: Any, distribution: Any) -> Any:
        ours = self.hooks.put_batches(distribution, iterator.data_adapter.get_jax_iterator())
        return original(iterator, distribution) if ours is None else ours

    def put(self, original: Any, data: Any, *args: Any, **kw: Any) -> Any:
        ours = self.hooks.put_batch(data)
        return original(data, *args, **kw) if ours is None else ours

    def lay_out(self, original: Any, tensor: Any, layout: Any) -> Any:
        ours = self.hooks.lay_out_activation(tensor, layout)
        return original(tensor, layout) if ours is NotImplemented else ours

    def guarded(self, original: Any, model: Any, *args: Any, **kw: Any) -> Any:
        if _asked.get() is model:
            raise _HandedOn(inspect.signature(original).bind(model, *args, **kw).arguments)
        self.hooks.lay_out_model(model)
        with self.hooks.keep_weights(model), self.hooks.in_keras():
            return original(model, *args, **kw)

    def called(self, original: Any, model: Any, *args: Any, **kw: Any) -> Any:
        self.hooks.lay_out_model(model)
        with self.hooks.in_keras():
            return original(model, *args, **kw)


def _statistics(layer: Any) -> tuple[Any, ...]:
    """The mean and variance that a ``Normalization`` layer adapts; none where it was given both."""
    if layer.input_mean is not None or not layer.built:
        return ()
    return layer.adapt_mean, layer.adapt_variance


def _wrap(owner: Any, name: str, around: Any) -> None:
    """Replace ``owner.name`` by ``around(original, ...)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)
