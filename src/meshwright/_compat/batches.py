"""Keras' own reading of data."""

from __future__ import annotations

from typing import Any, NamedTuple


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


def is_symbolic(value: Any) -> bool:
    """Whether a value is a shape and a dtype alone, as ``keras.Input`` makes, or JAX describes."""
    import sys

    keras, jax = sys.modules.get("keras"), sys.modules.get("jax")
    kinds = [keras and getattr(keras, "KerasTensor", None), jax and jax.ShapeDtypeStruct]
    return isinstance(value, tuple(kind for kind in kinds if kind))


class Readable(NamedTuple):
    """An array on the host: how rows of it are read by their numbers, and its dims."""

    read: Any
    dims: tuple[int, ...]


def arrays_of(epochs: Any) -> tuple[Any, int, int]:
    """What an epoch iterator over arrays cuts batches of: ``(arrays, rows, rows of a batch)``.

    The arrays are a tree like a batch, with a :class:`Readable` in place of each.
    """
    import keras
    import numpy as np
    from keras.src.trainers.data_adapters import array_slicing

    def readable(sliceable: Any) -> Readable:
        def read(rows: Any) -> Any:
            return np.asarray(sliceable.convert_to_numpy(sliceable[rows]))

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
