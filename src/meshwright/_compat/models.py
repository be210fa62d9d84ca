"""Keras models, layers and optimizers: how they are built, and what is inside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def is_built(model: Any) -> bool:
    """Whether the model and every layer in it is built."""
    return model.built and all(layer.built for layer in model._flatten_layers())


def has_its_variables(model: Any) -> bool:
    """Whether the model is built, or was called: layers that its call leaves out stay unbuilt."""
    return model.built and (model._called or is_built(model))


def needs_batch_to_build(model: Any) -> bool:
    """Whether model, metrics or loss wait for a first batch to be built."""
    parts = (model._compile_metrics, model._compile_loss)
    return not (is_built(model) and all(part is None or part.built for part in parts))


def has_unbuilt_optimizer(model: Any) -> bool:
    """Whether the optimizer has no slots yet."""
    optimizer = optimizer_of(model)
    return optimizer is not None and not optimizer.built


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


def build_as_declared(model: Any) -> bool:
    """Build a model for the inputs that it declares itself; whether it declares any."""
    tensors = input_tensors(model)
    if tensors is not None:
        build_forward(model, tensors)
    return tensors is not None


def compile_token(model: Any) -> tuple[Any, ...]:
    """Objects that change when the model is compiled again."""
    return (optimizer_of(model), model._compile_loss, model._compile_metrics)


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


def decays(optimizer: Any, parameter: Any) -> bool:
    """Whether an optimizer lets the weights of a parameter decay.

    Keras 3.15: ``exclude_from_weight_decay`` stores its arguments under private names
    (keras/src/optimizers/base_optimizer.py).
    """
    return optimizer._use_weight_decay(parameter)


def layers_inside(layer: Any) -> list[Any]:
    """Every layer inside a layer, at any depth."""
    return list(layer._flatten_layers(include_self=False, recursive=True))


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


@contextlib.contextmanager
def quantizing_shapes() -> Iterator[None]:
    """While the block runs, Keras takes weights that it quantizes to eight bits for zeros.

    ``AbsMaxQuantizer`` (Keras 3.15, ``quantizers/quantizers.py``) reads them, and has no hook. What
    it gives here takes no memory, whatever its shape.
    """
    import numpy as np
    from keras.src.quantizers import quantizers

    original = quantizers.abs_max_quantize

    def of_zeros(inputs: Any, axis: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        del args, options
        dims, axes = tuple(inputs.shape), np.atleast_1d(axis) % len(inputs.shape)
        ones = [1 if dim in axes else size for dim, size in enumerate(dims)]
        scale = np.broadcast_to(np.ones((), inputs.dtype), ones)
        return np.broadcast_to(np.zeros((), np.int8), dims), scale

    quantizers.abs_max_quantize = of_zeros
    try:
        yield
    finally:
        quantizers.abs_max_quantize = original


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
    one, which such a model takes too. A dict that was an attribute of a layer, as the inputs of a
    ``FeatureSpace`` are, is of a class of Keras' own, which is a leaf to JAX.
    """
    functional = model if hasattr(model, "_inputs_struct") else functional_of(model)
    if functional is None:
        return None
    tensors = _untracked(functional._inputs_struct)
    return tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors


def _untracked(tree: Any) -> Any:
    """A structure of tensors in the containers of Python itself."""
    if isinstance(tree, dict):
        return {key: _untracked(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_untracked(value) for value in tree]
    if type(tree) is tuple:
        return tuple(_untracked(value) for value in tree)
    return tree


def takes_training(model: Any) -> bool:
    """Whether the model's ``call`` has an argument ``training``."""
    return model._call_has_training_arg


def keras_distribution_class() -> Any:
    """The base of Keras' strategies; Keras 3.15 exports only its subclasses."""
    from keras.src.distribution.distribution_lib import Distribution

    return Distribution


def keras_layout_map(distribution: Any) -> Any:
    """The layout map of ``keras.distribution.ModelParallel``, which has no public name for it."""
    return getattr(distribution, "_layout_map", None)
