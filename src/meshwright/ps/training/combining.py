"""Combiners: the rows of several ids as one, by TensorFlow's names and rules.

``sum`` adds the weighted rows up, ``mean`` divides that by the sum of the weights, ``sqrtn`` by the
root of the sum of their squares, as ``tf.nn.embedding_lookup_sparse``. Ragged ids are padded: what
is not present counts nothing, and of no ids at all comes 0 (``safe_embedding_lookup_sparse``).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from keras import ops

Combiner = Literal["sum", "mean", "sqrtn"]
COMBINERS: tuple[str, ...] = get_args(Combiner)


def combine(rows: Any, present: Any, weights: Any, combiner: str) -> Any:
    """Rows of shape (..., ids, dim) as (..., dim); ``present`` and ``weights`` are (..., ids).

    >>> import numpy as np
    >>> rows = np.array([[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]], "float32")
    >>> there = np.array([True, True, False])
    >>> [np.asarray(combine(rows, there, None, how)).tolist() for how in ("sum", "mean")]
    [[4.0, 6.0], [2.0, 3.0]]
    """
    weighs = ops.cast(present, rows.dtype)
    if weights is not None:
        weighs = ops.where(present, ops.cast(weights, rows.dtype), 0)
    total = ops.sum(rows * ops.expand_dims(weighs, -1), axis=-2)
    if combiner == "sum":
        return total
    size = ops.sum(weighs if combiner == "mean" else ops.square(weighs), axis=-1, keepdims=True)
    is_empty = ops.equal(size, 0)
    divisor = ops.where(is_empty, 1, size)  # so that gradients of what is not taken are finite
    divisor = divisor if combiner == "mean" else ops.sqrt(divisor)
    return ops.where(is_empty, 0, total / divisor)
