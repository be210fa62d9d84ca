"""The attention layer: many heads, to itself or to a memory, at once or a position at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from ...errors import DimError
from ..array import NamedArray, find, position, spread
from ..elementwise import greater_equal, less_equal, logical_and
from ..indexing import arange
from ..operation import operation
from ..shapes import rename
from .attention import attend, attend_locally
from .dense import dense
from .initialisers import SCALED, Initialiser
from .layer import Params, as_dim, under_rules

Kept = dict[str, NamedArray]  # the keys and values of a memory


@dataclass(frozen=True)
class Attention:
    """Multi-head attention (Vaswani et al. 2017); its kernels are query, key, value and output.

    Called with one input it attends to that; with ``memory``, to another array with ``d_model``.
    ``causal`` lets a position see itself and those before. ``radius`` makes it local: a position
    sees others at most that far away, and no array of length × length is made. With
    ``multi_query`` all heads share keys and values (Shazeer 2019). ``dropout`` is the part of the
    weights that is left out where a ``key`` is given.

    Positions lie along the dim ``length`` of the input, and along ``memory`` where they are
    attended to, since one array holds both. A rule for ``length`` splits queries; keys and values
    are then gathered along it, unless there is a rule for ``memory`` or a ``radius``.

    >>> from meshwright.named import named
    >>> layer = Attention("d_model:8", "heads:2", "d_kv:4", causal=True)
    >>> params = layer.init(jax.random.key(0))
    >>> layer(params, named(jnp.ones([3, 5, 8]), "batch:3 length:5 d_model:8")).shape
    {'batch': 3, 'length': 5, 'd_model': 8}
    """

    d_model: str | Dim
    heads: str | Dim
    d_kv: str | Dim
    causal: bool = False
    radius: int | None = None
    multi_query: bool = False
    dropout: float = 0.0
    length: str = "length"
    memory: str = "memory"
    initialiser: Initialiser = SCALED

    @property
    def _per_query(self) -> Dims:
        return as_dim(self.heads, "heads"), as_dim(self.d_kv, "d_kv")

    @property
    def _per_key(self) -> Dims:
        return self._per_query[1:] if self.multi_query else self._per_query

    @under_rules
    def init(self, key: Any) -> Params:
        d_model, make = as_dims(self.d_model), self.initialiser
        query, keys, values, output = jax.random.split(key, 4)
        return {
            "query": make(query, d_model, self._per_query),
            "key": make(keys, d_model, self._per_key),
            "value": make(values, d_model, self._per_key),
            "output": make(output, self._per_query, d_model),
        }

    @under_rules
    def __call__(
        self,
        params: Params,
        x: NamedArray,
        memory: NamedArray | None = None,
        *,
        mask: NamedArray | None = None,
        key: Any = None,
    ) -> NamedArray:
        """What the input finds in the memory, or in itself; ``mask`` is true where it may look.

        The dims of ``mask`` are any of those of the input and ``memory``: of a padded batch,
        ``[batch memory]``.
        """
        seen = x if memory is None else memory
        if self.length not in seen.shape and self.memory not in seen.shape:
            raise DimError(
                f"attention is to positions along {self.length!r} or {self.memory!r}; "
                f"[{text_of(seen.dims)}] has neither. Rename the dim of its positions."
            )
        if memory is None and self.radius is not None:
            return self._locally(params, x, mask, key)
        if memory is None and self.causal:
            mask = _both(mask, _causal(find(x.dims, self.length), self.memory))
        return self.recall(params, x, self.keep(params, seen), mask=mask, key=key)

    @under_rules
    def keep(self, params: Params, memory: NamedArray) -> Kept:
        """Keys and values of a memory, to :meth:`recall` from as often as need be."""
        return {
            name: _along(dense(memory, params[name], self._per_key), self.length, self.memory)
            for name in ("key", "value")
        }

    @under_rules
    def recall(
        self,
        params: Params,
        x: NamedArray,
        kept: Kept,
        *,
        mask: NamedArray | None = None,
        key: Any = None,
    ) -> NamedArray:
        """What the input finds in keys and values that were kept."""
        found = attend(
            dense(x, params["query"], self._per_query),
            kept["key"],
            kept["value"],
            memory=self.memory, d_kv=self._per_query[1], mask=mask, rate=self.dropout, key=key,
        )  # fmt: skip
        return dense(found, params["output"], as_dims(self.d_model))

    @under_rules
    def empty(self, batch: DimsLike, length: int, dtype: Any = jnp.float32) -> Kept:
        """Room for the keys and values of ``length`` positions, for :meth:`step`."""
        heads, d_kv = self._per_key[:-1], self._per_key[-1]
        room = _room((*as_dims(batch), *heads, Dim(self.memory, length), d_kv), dtype)
        return {"key": room, "value": room}

    @under_rules
    def step(self, params: Params, x: NamedArray, kept: Kept, at: Any) -> tuple[NamedArray, Kept]:
        """What position number ``at`` finds in itself and those before; and their keys and values.

        The input is that of one position and has no ``length``. Taken for each position in turn,
        the results are those of the causal layer on all positions at once.
        """
        if self.length in x.shape:
            raise DimError(
                f"a step is of one position: its input [{text_of(x.dims)}] should have no dim "
                f"{self.length!r}."
            )
        kept = {
            name: _written(kept[name], new, self.memory, at)
            for name, new in self.keep(params, x).items()
        }
        seen = _until(find(kept["key"].dims, self.memory), at, self.radius)
        return self.recall(params, x, kept, mask=seen), kept

    def _locally(self, params: Params, x: NamedArray, mask: Any, key: Any) -> NamedArray:
        if mask is not None:
            if self.length in mask.shape:
                raise DimError(
                    "a mask of local attention is of the positions that are looked at: "
                    f"[{text_of(mask.dims)}] should have {self.memory!r} and not {self.length!r}."
                )
            mask = rename(mask, self.memory, self.length)
        found = attend_locally(
            dense(x, params["query"], self._per_query),
            dense(x, params["key"], self._per_key),
            dense(x, params["value"], self._per_key),
            self.radius or 0,
            causal=self.causal, length=self.length, d_kv=self._per_query[1],
            mask=mask, rate=self.dropout, key=key,
        )  # fmt: skip
        return dense(found, params["output"], as_dims(self.d_model))


@operation
def _causal(length: Dim, memory: str) -> NamedArray:
    """True where a position of the memory is not after one of ``length``."""
    return greater_equal(arange(length), arange(length.renamed(memory)))


@operation
def _until(memory: Dim, at: Any, radius: int | None) -> NamedArray:
    """True for position ``at`` and those before, within the radius if there is one."""
    seen = less_equal(arange(memory), at)
    if radius is None:
        return seen
    return logical_and(seen, greater_equal(arange(memory), at - radius))


@operation
def _both(one: NamedArray | None, other: NamedArray) -> NamedArray:
    return other if one is None else logical_and(one, other)


@operation
def _room(dims: Dims, dtype: Any) -> NamedArray:
    return NamedArray(jnp.zeros([dim.size for dim in dims], dtype), dims)


@operation
def _written(kept: NamedArray, new: NamedArray, memory: str, at: Any) -> NamedArray:
    """What was kept, with one position of the memory replaced."""
    axis = position(kept.dims, memory)
    piece = spread(new, kept.dims)
    return NamedArray(jax.lax.dynamic_update_slice_in_dim(kept.array, piece, at, axis), kept.dims)


def _along(x: NamedArray, length: str, memory: str) -> NamedArray:
    """The array with its positions along the memory, where it has any."""
    return rename(x, length, memory) if length in x.shape else x
