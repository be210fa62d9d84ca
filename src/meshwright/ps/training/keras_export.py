"""A model with tables on the servers as a plain Keras model, which needs neither them nor this.

Each :class:`~.embeddings.Embedding` becomes a ``keras.layers.Embedding`` of its rows; around it, in
Keras' own operations, stand the search for the row of a hash key, padding and combiner.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from ... import _compat
from ...errors import ModelError
from ..shared.client import Servers
from ..shared.placing import VariableSpec
from .embeddings import Embedding, combine
from .model_cache import table_of

_INT32 = np.iinfo(np.int32)


def plain_model(strategy: Any, model: keras.Model) -> keras.Model:
    """A plain Keras model with the values of a model that was trained on a strategy.

    It predicts the same, without servers, and what it saves is loaded without Meshwright. All rows
    of its tables come into this process. Keys that a hash table does not have get a row of zeros,
    for the rule by which servers make their rows is not there.

    Raises :class:`~meshwright.ModelError` for a model that is neither Functional nor Sequential,
    for tables that were not trained on this strategy, and for keys that do not fit 32 bits, which
    is what Keras computes with on JAX.
    """
    if strategy.coordinator_made is not None:
        strategy.coordinator_made.join()
    pairs: list[tuple[Any, Any]] = []

    def copied(layer: Any) -> Any:
        if isinstance(layer, Embedding):
            spec = table_of(strategy, model, layer.name).spec
            return strategy.with_servers(lambda servers: _plain(layer, servers, spec))
        copy = layer.__class__.from_config(layer.get_config())
        pairs.append((layer, copy))
        return copy

    def called(layer: Any, *args: Any, **options: Any) -> Any:
        is_bag = isinstance(layer, keras.Model) and len(layer.inputs) == 2 and layer.name in bags
        return _called(layer, *args, **options) if is_bag else layer(*args, **options)

    bags = {one.name for one in _compat.layers_inside(model) if isinstance(one, Embedding)}
    how = {} if isinstance(model, keras.Sequential) else {"call_function": called}
    try:
        plain: Any = keras.models.clone_model(model, clone_function=copied, recursive=True, **how)
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"model {model.name!r} cannot be exported: {error} Only Functional and Sequential "
            "models can. Of others, read the rows of each table with "
            "mw.ps.table_of(strategy, model, name)."
        ) from error
    if hidden := [one.name for one in _compat.layers_inside(plain) if isinstance(one, Embedding)]:
        raise ModelError(
            f"model {model.name!r} cannot be exported: the tables {', '.join(hidden)} are inside "
            "of layers of your own. Use mw.ps.Embedding as a layer of the model itself."
        )
    for old, new in pairs:
        new.set_weights(old.get_weights())
    return plain


def _plain(layer: Embedding, servers: Servers, spec: VariableSpec) -> Any:
    """A layer, or a small model, that looks up what this one does."""
    (rows,) = servers.read([spec])
    keys = None
    if spec.is_hash:
        keys = servers.keys(spec)
        order = np.argsort(keys)
        keys, rows = _checked(layer, keys[order]), rows[order]
        rows = np.concatenate([rows, np.zeros_like(rows[:1])])  # the last is that of other keys
    is_alone = keys is None and layer.combiner is None and layer.padding_id is None
    table = keras.layers.Embedding(
        len(rows),
        layer.dim,
        name=layer.name if is_alone else "rows",
        dtype=layer.dtype_policy,
        trainable=layer.trainable,
    )
    table.build([None])
    table.set_weights([rows])
    return table if is_alone else _around(layer, table, keys)


def _around(layer: Embedding, table: Any, keys: np.ndarray | None) -> keras.Model:
    """The table with what is done before and after, as a model of Keras' own operations."""
    shape, is_weighed = _compat.called_with(layer)
    ids = keras.Input([None] * (len(shape) - 1), dtype="int32", name="ids")
    inputs = [ids]
    at: Any = ids
    present: Any = ops.ones_like(ids, dtype="bool")
    if layer.padding_id is not None:
        present = ops.not_equal(ids, layer.padding_id)
        at = ops.where(present, ids, 0)
    if keys is not None:
        near = ops.minimum(ops.searchsorted(keys, ids), len(keys) - 1)
        at = ops.where(ops.equal(ops.take(keys, near), ids), near, len(keys))
    rows = table(at)
    if layer.padding_id is not None:
        rows = ops.where(ops.expand_dims(present, -1), rows, 0)
    if layer.combiner is not None:
        weights = None
        if is_weighed:
            weights = keras.Input([None] * (len(shape) - 1), name="weights")
            inputs.append(weights)
        rows = combine(rows, present, weights, layer.combiner)
    return keras.Model(inputs if len(inputs) > 1 else ids, rows, name=layer.name)


def _called(bag: Any, inputs: Any, weights: Any = None) -> Any:
    """A table that is weighed somewhere in the model, with these weights or with equal ones."""
    return bag([inputs, ops.ones_like(inputs, dtype="float32") if weights is None else weights])


def _checked(layer: Embedding, keys: np.ndarray) -> np.ndarray:
    """Keys in ascending order as Keras can hold them."""
    if not len(keys):
        raise ModelError(f"table {layer.name!r} has no rows yet: train the model first.")
    if wide := int(np.sum((keys < _INT32.min) | (keys > _INT32.max))):
        raise ModelError(
            f"{wide} of {len(keys)} keys of table {layer.name!r} do not fit 32 bits, and Keras on "
            "JAX has no wider integers. Map the keys to small numbers before training, or predict "
            "with strategy.predict."
        )
    return keys.astype(np.int32)
