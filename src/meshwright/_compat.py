"""Every version test and every private import of JAX and Keras, each with its version and reason.

Nothing heavy is imported before it is used: ``import meshwright`` must stay fast.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol


def jax_is_running() -> bool:
    """Whether JAX has created its clients, after which devices cannot be added any more.

    JAX 0.10.2 has no public question for this (``jax.devices()`` would start them); the function
    has been in ``xla_bridge`` since 0.4.26.
    """
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


# Keras 3.15, JAX backend


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
        """The tensor laid out, or ``NotImplemented`` if the layout is not ours."""
        ...

    def stateless_call(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """``model.stateless_call``, of which ``original`` is Keras' own."""
        ...

    def on_host(self, variable: Any) -> Any | None:
        """The whole value of a variable, or ``None`` to leave reading it to Keras."""
        ...

    def keep_weights(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Around ``fit``, ``evaluate`` and ``predict``: what fails inside loses no weight."""
        ...


def install_keras_hooks(hooks: KerasHooks) -> None:
    """Ask ``hooks`` where Keras has no public hook; done once, and each passes on what is not ours.

    Keras 3.15.1 (https://github.com/keras-team/keras): no hook sees all variables before they are
    allocated (``backend/jax/core.py``), no hook learns which parameter a slot belongs to
    (``optimizers/base_optimizer.py``), layouts of batches are computed once and reused for a
    smaller last batch, and a failure in ``predict`` or ``evaluate`` leaves every weight empty
    (``backend/jax/trainer.py``).
    """
    from keras.src.backend.jax import core, distribution_lib, trainer
    from keras.src.layers.layer import Layer
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    variables: Any = core.JaxVariable
    if getattr(variables, "_meshwright_hooks", None) is not None:
        return
    variables._meshwright_hooks = hooks

    def initialize(original: Any, variable: Any, initializer: Any) -> None:
        if not hooks.defer(variable, initializer):
            original(variable, initializer)

    def construct(original: Any, model: Any) -> None:
        original(model)
        hooks.new_model(model)

    def add_slot(
        original: Any, optimizer: Any, reference_variable: Any, *args: Any, **kw: Any
    ) -> Any:
        slot = original(optimizer, reference_variable, *args, **kw)
        hooks.new_slot(slot, reference_variable)
        return slot

    def as_numpy(original: Any, variable: Any, *args: Any, **kw: Any) -> Any:
        whole = hooks.on_host(variable)  # what lies in other processes too, Keras cannot read
        return original(variable, *args, **kw) if whole is None else whole.__array__(*args, **kw)

    def iterate(original: Any, iterator: Any, distribution: Any) -> Any:
        ours = hooks.put_batches(distribution, iterator.data_adapter.get_jax_iterator())
        return original(iterator, distribution) if ours is None else ours

    def put(original: Any, data: Any, *args: Any, **kw: Any) -> Any:
        ours = hooks.put_batch(data)
        return original(data, *args, **kw) if ours is None else ours

    def lay_out(original: Any, tensor: Any, layout: Any) -> Any:
        ours = hooks.lay_out_activation(tensor, layout)
        return original(tensor, layout) if ours is NotImplemented else ours

    def call(original: Any, model: Any, *args: Any, **kw: Any) -> Any:
        return hooks.stateless_call(original, model, *args, **kw)

    def guarded(original: Any, model: Any, *args: Any, **kw: Any) -> Any:
        with hooks.keep_weights(model):
            return original(model, *args, **kw)

    _wrap(core.JaxVariable, "_initialize_with_initializer", initialize)
    _wrap(core.JaxVariable, "__array__", as_numpy)
    _wrap(trainer.JAXTrainer, "__init__", construct)
    _wrap(Layer, "stateless_call", call)
    _wrap(BaseOptimizer, "add_variable_from_reference", add_slot)
    _wrap(trainer.JAXEpochIterator, "_get_distributed_iterator", iterate)
    _wrap(trainer, "_distribute_data", put)
    _wrap(distribution_lib, "distribute_tensor", lay_out)
    for name in ("fit", "evaluate", "predict"):
        _wrap(trainer.JAXTrainer, name, guarded)


def _wrap(owner: Any, name: str, around: Any) -> None:
    """Replace ``owner.name`` by ``around(original, ...)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def in_stateless_scope() -> bool:
    """Whether Keras is only tracing shapes, or calling a function without side effects."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    return in_stateless_scope()


def stored_dtype(variable: Any) -> str:
    """The dtype a variable is stored in; ``variable.dtype`` is the compute dtype inside a layer."""
    return variable._dtype


def set_variable(variable: Any, value: Any, sharding: Any) -> None:
    """Give a Keras variable its value and the layout that later assignments keep."""
    variable._layout = sharding
    variable._value = value


def raw_value(variable: Any) -> Any:
    """The array a variable holds, without autocast or placeholder; ``None`` if it is empty."""
    return variable._value


def restore_value(variable: Any, value: Any) -> None:
    """Put back the array a variable held."""
    variable._value = value


def variable_layout(variable: Any) -> Any:
    """The layout, or sharding, that Keras has noted on a variable; ``None`` if it has none."""
    return variable._layout


def note_layout(variable: Any, layout: Any) -> None:
    """Note on a variable how it lies; its value stays where it is."""
    variable._layout = layout


def is_built(model: Any) -> bool:
    """Whether the model and every layer in it is built."""
    return model.built and all(layer.built for layer in model._flatten_layers())


def needs_batch_to_build(model: Any) -> bool:
    """Whether model, metrics or loss wait for a first batch to be built."""
    parts = (model._compile_metrics, model._compile_loss)
    return not (is_built(model) and all(part is None or part.built for part in parts))


def has_unbuilt_optimizer(model: Any) -> bool:
    """Whether the optimizer has no slots yet."""
    optimizer = optimizer_of(model)
    return optimizer is not None and not optimizer.built


def optimizer_of(model: Any) -> Any:
    """The optimizer of a model; ``None`` before ``compile``, when Keras has no such attribute."""
    return getattr(model, "optimizer", None)


def add_slots(model: Any, name: str) -> None:
    """Give a model's optimizer one more slot of this name for each parameter, unless it has it."""
    optimizer = optimizer_of(model)
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of one that scales losses
    if not any(slot.path.endswith(name) for slot in inner.variables):
        for parameter in model.trainable_variables:
            inner.add_variable_from_reference(reference_variable=parameter, name=name)


def add_rows(model: Any, name: str, make: Callable[[], Any]) -> Any:
    """The variable of this name that a model's optimizer has; it is made of NumPy's rows once."""
    optimizer = optimizer_of(model)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for variable in inner.variables:
        if variable.path.endswith(name):
            return variable
    rows = make()
    return inner.add_variable(rows.shape, lambda shape, dtype: rows, "float32", name=name)


def build_for(model: Any, batch: Any) -> None:
    """Build a compiled model, its metrics and its optimizer for batches like this one.

    ``Trainer._symbolic_build`` (Keras 3.15) is what ``fit`` calls; only shapes are looked at.
    """
    model._symbolic_build(data_batch=batch)


def build_forward(model: Any, inputs: Any) -> None:
    """Build a model for inputs like these, without optimizer, loss and metrics."""
    import jax
    from keras.src import backend

    def symbolic(value: Any) -> Any:
        return backend.KerasTensor(value.shape, backend.standardize_dtype(value.dtype))

    backend.compute_output_spec(model, jax.tree.map(symbolic, inputs), training=False)


def in_metric_order(model: Any, logs: dict[str, Any]) -> Any:
    """What ``evaluate`` returns without ``return_dict``: one value, or a list in metric order."""
    return model._flatten_metrics_in_order(logs)


def compile_token(model: Any) -> tuple[Any, ...]:
    """Objects that change when the model is compiled again."""
    return (optimizer_of(model), model._compile_loss, model._compile_metrics)


def metrics_variables(model: Any) -> list[Any]:
    """The variables of the loss tracker and of every metric."""
    return model.metrics_variables


def attach_state(model: Any, parts: dict[str, list[Any]] | None) -> None:
    """Let callbacks that look at the model find this state (``Trainer.jax_state_sync``).

    Keras' own ``__setattr__`` would look through the whole state for layers and variables.
    """
    object.__setattr__(model, "_jax_state", parts)
    object.__setattr__(model, "_jax_state_synced", False)


def detach_state(model: Any) -> None:
    """The variables hold the newest state again."""
    object.__setattr__(model, "_jax_state", None)
    object.__setattr__(model, "_jax_state_synced", True)


def initial_epoch_of(model: Any) -> int | None:
    """The epoch that Keras' BackupAndRestore has restored, and asks to go on with."""
    return getattr(model, "_initial_epoch", None)


def state_was_synced(model: Any) -> bool:
    """Whether a callback has taken the state over into the variables, and perhaps changed it."""
    return model._jax_state_synced


def numpy_batches(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    steps: int | None,
    shuffle: bool,
    class_weight: Any = None,
) -> Any:
    """Keras' own reading of arrays, ``tf.data``, ``PyDataset``, generators: an epoch iterator.

    ``enumerate_epoch()`` yields ``(begin, end, [batch])``; ``num_batches`` may be ``None``.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    epochs = EpochIterator(x, y, sample_weight, batch_size, steps, shuffle, class_weight)
    if steps is None and not is_one_shot(epochs):
        # Data of unknown length ends when it ends; Keras calls every such end an interruption.
        epochs._interrupted_warning = lambda: None
    return epochs


def global_seed() -> list[int] | None:
    """The state of the generator of unseeded ``keras.random`` calls; ``None`` if it is unused.

    ``keras.random`` (Keras 3.15) exports neither the generator nor a way to set it.
    """
    generator = _global_seed_generator()
    return None if generator is None else [int(word) for word in generator.state.numpy()]


def set_global_seed(state: list[int] | None) -> None:
    """Set what :func:`global_seed` read."""
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    if state is None:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)
    else:
        seed_generator.global_seed_generator().state.assign(state)


def _global_seed_generator() -> Any:
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


class Readable(NamedTuple):
    """An array on the host: how rows of it are read by their numbers, and its dims."""

    read: Any
    dims: tuple[int, ...]


def arrays_of(epochs: Any) -> tuple[Any, int, int]:
    """What an epoch iterator over arrays cuts batches of: ``(arrays, rows, rows of a batch)``.

    The arrays are a tree like a batch, with a :class:`Readable` in place of each.
    """
    import keras
    from keras.src.trainers.data_adapters import array_slicing

    def readable(sliceable: Any) -> Readable:
        def read(rows: Any) -> Any:
            return sliceable.convert_to_numpy(sliceable[rows])

        return Readable(read, tuple(sliceable.array.shape))

    adapter = epochs.data_adapter
    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="numpy")
    arrays = keras.tree.map_structure(readable, inputs, none_is_leaf=False)
    return arrays, adapter._num_samples, adapter.batch_size


def reads_arrays(epochs: Any) -> bool:
    """Whether the data are arrays, of which Keras itself cuts the batches."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    return isinstance(epochs.data_adapter, ArrayDataAdapter)


def is_one_shot(epochs: Any) -> bool:
    """Whether batches that were taken to look at are gone: only so for generators."""
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    return isinstance(epochs.data_adapter, GeneratorDataAdapter)


def split_validation(arrays: Any, share: float) -> Any:
    """``(train, validation)`` as ``validation_split`` means it: the last share is held out."""
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.train_validation_split(arrays, validation_split=share)


def layers_inside(layer: Any) -> list[Any]:
    """Every layer inside a layer, at any depth."""
    return list(layer._flatten_layers(include_self=False, recursive=True))


def own_variables(layer: Any) -> list[Any]:
    """The variables right inside a layer, in no layer of it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def unpacked_dims(layer: Any, name: str) -> tuple[int, ...] | None:
    """The dims that a layer's weight was built with, before it was packed, where Keras packs it.

    Keras 3.15: ``Dense`` and ``EinsumDense`` note them in several private attributes, each mode of
    quantization in another one (``layers/core/dense.py``, ``layers/core/einsum_dense.py``).
    """
    import keras

    if isinstance(layer, keras.layers.Embedding):
        dims = layer.input_dim, layer.output_dim
        return dims[::-1] if name == "reverse_embeddings" else dims
    if not isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense):
        return None
    noted: Any = getattr(layer, "original_kernel_shape", None)
    noted = noted or getattr(layer, "kernel_shape", None)
    if noted is None and hasattr(layer, "_orig_input_dim"):
        noted = layer._orig_input_dim, layer._orig_output_dim
    return None if noted is None else tuple(noted)


def is_stored_by_columns(layer: Any) -> bool:
    """Whether quantization stores a layer's kernel as columns by rows: GPTQ and AWQ do."""
    return hasattr(layer, "is_gptq_calibrated") or hasattr(layer, "is_awq_calibrated")


def called_with(layer: Any) -> tuple[tuple[int | None, ...], bool]:
    """The shape of a layer's first input in a model, and whether a call of it has another input.

    ``layer.input`` (Keras 3.15) refuses layers that are called more than once.
    """
    calls = [node.input_tensors for node in layer._inbound_nodes]
    return tuple(calls[0][0].shape), any(len(tensors) > 1 for tensors in calls)


def functional_of(model: Any) -> Any | None:
    """The Functional model that a Sequential (Keras 3.15) keeps for itself; it has its layers."""
    return getattr(model, "_functional", None)


def input_tensors(model: Any) -> Any | None:
    """The symbolic inputs of a Functional or Sequential model, as it takes them; else ``None``.

    Keras 3.15 keeps their structure in ``Functional._inputs_struct``; a list of one is taken as the
    one, which such a model takes too.
    """
    functional = model if hasattr(model, "_inputs_struct") else functional_of(model)
    if functional is None:
        return None
    tensors = functional._inputs_struct
    return tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors


def loss_reductions(model: Any) -> list[str]:
    """The reductions of the losses that a model was compiled with."""
    import keras

    default = "sum_over_batch_size"
    asked = getattr(model, "_compile_loss", None)
    losses = keras.tree.flatten(asked._user_loss) if asked is not None else []
    return [str(getattr(loss, "reduction", default)) for loss in losses if loss is not None]


def loss_of_outputs(
    model: Any, values: Any, batch: Any, outputs: Any, losses: list[Any], training: bool
) -> Any:
    """What ``compute_loss_and_updates`` (Keras 3.15) does once the outputs are there.

    ``values`` are those of trainable and other variables, metrics and optimizer; ``losses`` are
    those that layers have added.
    """
    from keras.src import backend

    trained, others, metrics, slots = values
    x, y, weights = batch
    if losses:
        model._losses_override.clear()
        model._losses_override = losses
    loss, (trained, others, metrics) = model.stateless_compute_loss(
        trained,
        others,
        metrics,
        x=x,
        y=y,
        y_pred=outputs,
        sample_weight=weights,
        training=training,
    )
    if losses:
        model._losses_override.clear()
    unscaled = loss
    if training and model.optimizer is not None:
        of_slots = list(zip(model.optimizer.variables, slots, strict=True))
        with backend.StatelessScope(state_mapping=of_slots):
            loss = model.optimizer.scale_loss(loss)
    return loss, (unscaled, outputs, others, metrics)


def update_metrics(model: Any, metrics: list[Any], loss: Any, batch: Any, outputs: Any) -> Any:
    """``(logs, new metrics variables)`` after one batch, without side effects."""
    x, y, weights = batch
    return model._update_metrics_variables(metrics, loss, x, y, outputs, weights)


def has_loss(model: Any) -> bool:
    """Whether a model was compiled with a loss, which compares outputs with targets."""
    return getattr(model, "_compile_loss", None) is not None


def has_own(model: Any, method: str) -> bool:
    """Whether the model's class brings its own ``train_step``, ``test_step`` and so on."""
    from keras.src.backend.jax.trainer import JAXTrainer

    return getattr(type(model), method) is not getattr(JAXTrainer, method)


def add_layout_property(read: Any) -> None:
    """Give every Keras variable a ``layout``, as TensorFlow's ``DVariable`` had one."""
    from keras.src.backend.jax.core import JaxVariable

    variables: Any = JaxVariable
    if not hasattr(variables, "layout"):
        variables.layout = property(read)


def masks_of(tensors: Any) -> list[Any]:
    """The masks that Keras has noted on the arrays of a tree; ``None`` where there is none."""
    import jax
    from keras.src.backend import get_keras_mask

    return [get_keras_mask(tensor) for tensor in jax.tree.leaves(tensors)]


def set_masks(tensors: Any, masks: list[Any]) -> None:
    """Note these masks on the arrays of a tree."""
    import jax
    from keras.src.backend import set_keras_mask

    for tensor, mask in zip(jax.tree.leaves(tensors), masks, strict=True):
        if mask is not None:
            set_keras_mask(tensor, mask)


def takes_training(model: Any) -> bool:
    """Whether the model's ``call`` has an argument ``training``."""
    return model._call_has_training_arg


def keras_distribution_class() -> Any:
    """The base of Keras' strategies; Keras 3.15 exports only its subclasses."""
    from keras.src.distribution.distribution_lib import Distribution

    return Distribution


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


def without_lines() -> contextlib.AbstractContextManager[Any]:
    """Lower without files and lines of the source, which would make equal programs differ.

    JAX 0.10.2: the option is public, only its use for a while is not.
    """
    from jax._src import config

    return config.traceback_in_locations_limit(0)


@contextlib.contextmanager
def keras_sees(platform: str) -> Iterator[None]:
    """Let Keras choose its attention kernels for another platform than that of the devices here.

    Keras 3.15 asks ``jax.devices()[0].platform`` as it traces (``backend/jax/nn.py``). Does
    nothing where Keras was never imported.
    """
    nn: Any = sys.modules.get("keras.src.backend.jax.nn")
    if nn is None:
        yield
        return
    real, nn.jax = nn.jax, _WithDevicesOf(platform)
    try:
        yield
    finally:
        nn.jax = real


@contextlib.contextmanager
def keras_splits_attention() -> Iterator[None]:
    """Let Keras compute attention without its kernel for TPUs, which XLA cannot cut over a mesh.

    Keras 3.15 takes it by itself where the first device is a TPU (``backend/jax/nn.py``). A layer
    that was given ``flash_attention=True`` has it all the same, and XLA's refusal.
    """
    nn: Any = sys.modules.get("keras.src.backend.jax.nn")
    real = getattr(nn, "_can_use_flash_attention", None)
    if real is None:
        yield
        return

    def can(*args: Any, raise_error: bool = False, **options: Any) -> bool:
        if not raise_error and nn.jax.devices()[0].platform == "tpu":
            return False
        return real(*args, raise_error=raise_error, **options)

    nn._can_use_flash_attention = can
    try:
        yield
    finally:
        nn._can_use_flash_attention = real


class _WithDevicesOf:
    """The module ``jax``, whose first device is of another platform."""

    def __init__(self, platform: str) -> None:
        self._platform = {"cuda": "gpu"}.get(platform, platform)

    def devices(self) -> list[Any]:
        return [types.SimpleNamespace(platform=self._platform)]

    def __getattr__(self, name: str) -> Any:
        import jax

        return getattr(jax, name)


# Names in saved files: Keras 3.15 keeps its table from class to name, and back, to itself.


def keras_name(cls: Any) -> str:
    """The name that Keras writes into files for one of its own classes; ``""`` for others."""
    from keras.src import api_export

    return api_export.REGISTERED_OBJS_TO_NAMES.get(cls, "")


def write_as_keras_name(cls: Any, name: str) -> None:
    """Let files name a class as one of Keras' own, so that plain Keras reads them."""
    from keras.src import api_export

    api_export.REGISTERED_OBJS_TO_NAMES[cls] = name


def read_keras_name_as(name: str, reader: Any) -> None:
    """Let ``reader.from_config`` make what a file names so."""
    from keras.src import api_export

    api_export.REGISTERED_NAMES_TO_OBJS[name] = reader


@contextlib.contextmanager
def names_from_the_start() -> Iterator[None]:
    """Inside, Keras numbers layer names from one again, so two builds give the same paths.

    Keras 3.15 resets this counter only together with everything else (``clear_session``).
    """
    from keras.src.backend.common import global_state

    counted = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", counted)


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Everything that is made inside is made, and computed, in float64.

    Keras 3.15 would round to single inside BatchNormalization, ``tanh``, Adafactor and others: its
    type promotion knows no ``float64`` on JAX.
    """
    import jax
    import keras
    from keras.src.backend.common import dtypes

    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    floatx = keras.config.floatx()
    policy = keras.config.dtype_policy()
    rounded = dtypes.BIT64_TO_BIT32_DTYPE.pop("float64", None)
    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)
        keras.config.set_floatx(floatx)
        jax.config.update("jax_enable_x64", x64)
        if rounded is not None:
            dtypes.BIT64_TO_BIT32_DTYPE["float64"] = rounded


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


def devices_by_hand(shard_map: Any) -> int:
    """Over how many devices an equation of ``jax.shard_map`` maps; other axes are left to XLA.

    JAX 0.10.2: ``newly_manual_axes`` among the parameters of the primitive has no page.
    """
    mesh = shard_map.params["mesh"]
    return math.prod(mesh.shape[axis] for axis in shard_map.params["newly_manual_axes"])


def decays(optimizer: Any, parameter: Any) -> bool:
    """Whether an optimizer lets the weights of a parameter decay.

    Keras 3.15: ``exclude_from_weight_decay`` stores its arguments under private names
    (keras/src/optimizers/base_optimizer.py).
    """
    return optimizer._use_weight_decay(parameter)


def without_dead_code(jaxpr: Any) -> Any:
    """A jaxpr without the equations that none of its results depends on."""
    from jax.interpreters import partial_eval

    inner = getattr(jaxpr, "jaxpr", jaxpr)
    needed, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars), instantiate=True)
    return needed


def keras_layout_map(distribution: Any) -> Any:
    """The layout map of ``keras.distribution.ModelParallel``, which has no public name for it."""
    return getattr(distribution, "_layout_map", None)


# Errors of JAX, Keras and XLA, which say by their words what no class or code of them says


def lies_on_other_devices(error: ValueError) -> bool:
    """Whether a jitted function was refused for the devices that its arguments lie on.

    JAX 0.10.2 raises a ValueError in the place of a class of its own, which stays its context.
    """
    from jax._src.stages import DeviceAssignmentMismatchError

    return isinstance(error.__context__, DeviceAssignmentMismatchError)


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


def own_error(error: BaseException) -> BaseException:
    """The error that Keras tells in words of its own, with the arguments of the call around it.

    Keras 3.15 marks what it raises in place of another error (``utils/traceback_utils.py``); that
    stays its context. For some of JAX' classes its words are no more than a ``repr``.
    """
    while getattr(error, "_keras_call_info_injected", False):
        cause = error.__cause__ or error.__context__
        if cause is None:
            break
        error = cause
    return error


def any_custom_call() -> Any:
    """Let ``jax.export`` serialize every custom call: the same JAX reads the program at once.

    JAX 0.10.2 takes "ALL" for a name, which has no page; else each name would have to be read out
    of the error that refuses it.
    """
    import jax

    return jax.export.DisabledSafetyCheck.custom_call("ALL")


def ran_out_of_memory(words: str) -> bool:
    """Whether a compiler's error, as text, says that the program does not fit into a device.

    jaxlib 0.10: the status code of a ``JaxRuntimeError`` is nowhere but in front of its text.
    """
    return "RESOURCE_EXHAUSTED" in words


def refuses_libtpu(words: str) -> bool:
    """Whether JAX, as text, says that it does not take the libtpu that is installed.

    jaxlib 0.10: a ``RuntimeError`` of no class of its own.
    """
    return "TPU support not installed" in words


def memory_in(words: str) -> tuple[int | None, int | None]:
    """Bytes needed and available, as XLA (jaxlib 0.10) words them for TPUs and in no other way.

    >>> memory_in("Used 2.00G of 1.50G hbm.")
    (2147483648, 1610612736)
    """
    patterns = (
        r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
        r"temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    )
    for pattern in patterns:
        if found := re.search(pattern, words):
            used, unit, there, its_unit = found.groups()
            return _bytes(used, unit), _bytes(there, its_unit)
    return None, None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** " KMGT".index(unit or " "))
