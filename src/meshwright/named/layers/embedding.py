"""Embedding: a row of a table for every number, where the table may be split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp

from ...errors import ModelError
from ...layouts.dim_rules import Dim, DimsLike, as_dims
from ..array import NamedArray, find, lay_out
from ..contraction import einsum
from ..indexing import gather, one_hot
from ..operation import operation
from .initialisers import STANDARD, Initialiser
from .layer import Params, as_dim, fit, in_dtype, under_rules, without

By = Literal["gather", "one_hot"]


@operation
def embed(
    table: NamedArray,
    ids: NamedArray,
    vocab: str | Dim,
    *,
    by: By = "gather",
    dtype: Any = None,
) -> NamedArray:
    """The rows of a table that these numbers name; zeros for a number that is outside of it.

    Of a table that is split along ``vocab`` each device looks up the rows that it holds, and the
    results are summed: the table is never gathered. ``by="one_hot"`` multiplies by a matrix of ones
    and zeros instead, which some devices do faster. ``dtype`` is the element type of the result.
    Raises :class:`ModelError` for another way.

    >>> from meshwright.named import named
    >>> table = named(jnp.arange(6.0).reshape(3, 2), "vocab:3 d_model:2")
    >>> embed(table, named(jnp.array([2, 0, 7]), "length:3"), "vocab").array.tolist()
    [[4.0, 5.0], [0.0, 1.0], [0.0, 0.0]]
    """
    if by not in get_args(By):
        raise ModelError(f"by must be 'gather' or 'one_hot'; received {by!r}.")
    vocab = find(table.dims, vocab)
    row = without(table.dims, [vocab])
    fit(ids, "embed", makes=(vocab, *row))
    dtype = dtype or table.dtype
    # The gradient is a sum of rows: laid out here, it is formed in the pieces that are kept.
    table = lay_out(table, "table of embed")
    if by == "one_hot":
        rows = one_hot(ids, vocab, dtype=table.dtype)
        return in_dtype(einsum([rows, table], (*ids.dims, *row)), dtype)
    return in_dtype(gather(table, ids, vocab), dtype)


@dataclass(frozen=True)
class Embedding:
    """A row of learned numbers, in the dims ``outputs``, for every number below ``vocab``.

    Its parameter is ``table``. ``by`` and ``dtype`` are those of :func:`embed`.

    >>> import jax
    >>> from meshwright.named import named
    >>> layer = Embedding("vocab:16", "d_model:4")
    >>> layer(layer.init(jax.random.key(0)), named(jnp.array([3, 5]), "length:2")).shape
    {'length': 2, 'd_model': 4}
    """

    vocab: str | Dim
    outputs: DimsLike
    by: By = "gather"
    dtype: Any = jnp.float32
    initialiser: Initialiser = STANDARD

    @under_rules
    def init(self, key: Any) -> Params:
        vocab = as_dim(self.vocab, "an embedding's vocab")
        return {"table": self.initialiser(key, (vocab,), as_dims(self.outputs))}

    @under_rules
    def __call__(self, params: Params, ids: NamedArray) -> NamedArray:
        vocab = as_dim(self.vocab, "an embedding's vocab")
        return embed(params["table"], ids, vocab, by=self.by, dtype=self.dtype)
