"""A memory of very many rows, of which each token reads a few: product keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...layouts.dim_rules import Dim
from ..array import NamedArray
from ..contraction import einsum
from ..elementwise import add
from ..indexing import gather
from ..operation import operation
from ..ordering import top_k
from ..reductions import softmax
from ..shapes import merge_dims
from .dense import dense
from .initialisers import SCALED, Normal
from .layer import Params, as_dim, fit, in_dtype, under_rules, without


@dataclass(frozen=True)
class ProductKeyMemory:
    """A feed-forward layer that reads the best few of ``keys ** 2`` rows of a table.

    A row has a pair of keys; its score is the sum of the products of two queries, each with one of
    them, so that the best ``best`` of all pairs are found among the best of either side. Every one
    of ``heads`` reads rows of one table, weighted by the softmax of their scores. Parameters are
    ``query``, the keys ``left`` and ``right``, and the table ``values``, of ``slot`` and
    ``d_model``. (Lample et al. 2019.)

    >>> layer = ProductKeyMemory("d_model:8", "heads:2", "d_key:4", "keys:16", "best:4")
    >>> params = layer.init(jax.random.key(0))
    >>> from meshwright.named import named
    >>> x = named(jnp.ones([3, 8]), "length:3 d_model:8")
    >>> params["values"].shape, layer(params, x).shape
    ({'slot': 256, 'd_model': 8}, {'length': 3, 'd_model': 8})
    """

    d_model: str | Dim
    heads: str | Dim
    d_key: str | Dim
    keys: str | Dim
    best: str | Dim

    @property
    def _dims(self) -> tuple[Dim, Dim, Dim, Dim, Dim]:
        d_model, heads, d_key, keys, best = (
            as_dim(getattr(self, name), name)
            for name in ("d_model", "heads", "d_key", "keys", "best")
        )
        return d_model, heads, d_key, keys, best

    @under_rules
    def init(self, key: Any) -> Params:
        d_model, heads, d_key, keys, _ = self._dims
        query, left, right, values = jax.random.split(key, 4)
        slots = Dim("slot", keys.size**2)
        return {
            "query": SCALED(query, (d_model,), (Dim("side", 2), heads, d_key)),
            "left": SCALED(left, (d_key,), (heads, keys)),
            "right": SCALED(right, (d_key,), (heads, keys)),
            "values": Normal(d_model.size**-0.5)(values, (slots,), (d_model,)),
        }

    @under_rules
    def __call__(self, params: Params, x: NamedArray, *, key: Any = None) -> NamedArray:
        fit(x, "product-key memory", needs=self._dims[:1], makes=self._dims[1:])
        return _read(self, params, x)


@operation
def _read(layer: ProductKeyMemory, params: Params, x: NamedArray) -> NamedArray:
    d_model, heads, d_key, keys, best = layer._dims
    queries = dense(x, params["query"], (Dim("side", 2), heads, d_key))
    others = without(x.dims, (d_model,))
    right = best.renamed(f"{best.name}_right")

    def side(i: int, name: str, few: Dim) -> tuple[NamedArray, NamedArray]:
        query = gather(queries, i, "side")
        wide = jnp.promote_types(x.dtype, jnp.float32)
        key = in_dtype(params[name], x.dtype)
        return top_k(einsum([query, key], (*others, heads, keys), dtype=wide), keys, few)

    (one, row), (other, column) = side(0, "left", best), side(1, "right", right)
    pairs = (*others, heads, best, right)
    scores = merge_dims(add(one, other, out=pairs), (best, right), "pair")
    slots = merge_dims(add(row * keys.size, column, out=pairs), (best, right), "pair")
    scores, place = top_k(scores, "pair", best)
    weights = in_dtype(softmax(scores, best), x.dtype)
    rows = gather(in_dtype(params["values"], x.dtype), gather(slots, place, "pair"), "slot")
    return einsum([weights, rows], x.dims)
