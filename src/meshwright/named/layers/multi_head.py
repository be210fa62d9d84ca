"""The attention layer: many heads, to itself or to a memory, at once or a position at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import DimError
from ...layouts.dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from ..array import NamedArray, as_named, find, position, spread
from ..elementwise import equal, greater_equal, less_equal, logical_and, logical_or
from ..indexing import arange
from ..operation import operation
from ..shapes import rename
from ..windowed import Numbers, counts
from .attention import Talking, attend, attend_locally
from .dense import dense, dense_together
from .initialisers import SCALED, Initialiser
from .layer import Params, as_dim, filled, under_rules
from .positions import rotated

Cache = dict[str, NamedArray]  # the keys and values of a memory
Mask = NamedArray | None
# What is added to products: an array, or what makes it from how far away a key is.
Bias = NamedArray | Callable[[NamedArray], NamedArray]


class Queries(NamedTuple):
    """Queries at positions ``at``, and what bounds what they see: see :class:`Attention`."""

    array: NamedArray
    mask: Mask
    bias: Any
    key: Any
    at: NamedArray | None


@dataclass(frozen=True)
class Attention:
    """Multi-head attention (Vaswani et al. 2017); its kernels are query, key, value and output.

    Called with one input it attends to that; with ``memory``, to another array with ``d_model``.
    ``causal`` lets a position see itself and those before. ``radius`` makes it local: a position
    sees others at most that far away, and no array of length × length is made. With
    ``multi_query`` all heads share keys and values (Shazeer 2019). ``dropout`` is the part of the
    weights that is left out where a ``key`` is given. ``rotary`` turns queries and keys of
    self-attention by their positions, and is the base of the rates (see :func:`rotated`).
    ``scale`` is that of :func:`attend`. Where heads are ``talking``, kernels mix them before the
    softmax and after it (Shazeer et al. 2020); of split heads, that sums logits over devices.

    Positions lie along the dim ``length`` of the input, and along ``memory`` where they are
    attended to, since one array holds both. A rule for ``length`` splits queries; keys and values
    are then gathered along it, unless there is a rule for ``memory`` or a ``radius``. Positions of
    images lie along several dims, ``length="height width"`` with a ``radius`` (see
    :func:`attend_locally`); masks then have these dims.

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
    radius: Numbers | None = None
    multi_query: bool = False
    dropout: float = 0.0
    length: str = "length"
    memory: str = "memory"
    initialiser: Initialiser = SCALED
    rotary: float | None = None
    scale: float | None = None
    talking: bool = False

    def __post_init__(self) -> None:
        if len(self._lengths) > 1 and (self.radius is None or self.rotary is not None):
            raise DimError(
                f"attention along several dims, {self.length!r}, is local and takes a radius=; "
                "rotary= turns by the position along one."
            )

    @property
    def whole(self) -> bool:
        """Whether each position is looked at by itself, however far away it is."""
        return self.radius is None

    @property
    def _lengths(self) -> list[str]:
        return self.length.split()

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
        params = {
            "query": make(query, d_model, self._per_query),
            "key": make(keys, d_model, self._per_key),
            "value": make(values, d_model, self._per_key),
            "output": make(output, self._per_query, d_model),
        }
        if self.talking:
            before, after = jax.random.split(jax.random.fold_in(key, 1))
            heads = self._per_query[0]
            talkers = heads.renamed("talkers")
            params |= {
                "talk": make(before, (heads,), (talkers,)),
                "talk_back": make(after, (talkers,), (heads,)),
            }
        return params

    def _talking(self, params: Params) -> Talking | None:
        return (params["talk"], params["talk_back"]) if self.talking else None

    @under_rules
    def __call__(
        self,
        params: Params,
        x: NamedArray,
        memory: NamedArray | None = None,
        *,
        mask: NamedArray | None = None,
        segments: NamedArray | None = None,
        prefix: NamedArray | None = None,
        bias: Bias | None = None,
        key: Any = None,
    ) -> NamedArray:
        """What the input finds in the memory, or in itself; ``mask`` is true where it may look.

        The dims of ``mask`` are any of those of the input and ``memory``: of a padded batch,
        ``[batch memory]``. ``bias`` is added to the products: an array of such dims and ``heads``,
        or a function that makes one from how far away a position is, such as a
        :class:`RelativeBias` of its parameters.

        In attention to itself, positions whose numbers in ``segments`` differ do not see each
        other, and those where ``prefix`` is true are seen by earlier ones too, although the layer
        is ``causal`` (prefix LM, Raffel et al. 2020). Both have the dim ``length``.
        """
        source = x if memory is None else memory
        if not {*self._lengths} <= {*source.shape} and self.memory not in source.shape:
            raise DimError(
                f"attention is to positions along {self.length!r} or {self.memory!r}; "
                f"[{text_of(source.dims)}] has neither. Rename the dim of its positions."
            )
        if memory is not None:
            if segments is not None or prefix is not None:
                raise DimError(
                    "segments= and prefix= are of attention of an input to itself. Of a memory, "
                    f"give mask=, with the dims {self.length!r} and {self.memory!r}."
                )
            return self.recall(params, x, self.keep(params, source), mask=mask, bias=bias, key=key)
        if self.radius is not None:
            return self._locally(params, x, mask, segments, prefix, bias, key)
        length = find(x.dims, self.length)
        mask, at = self._visible(length, mask, segments, prefix), arange(length)
        if callable(bias):
            bias = bias(self._away(length.renamed(self.memory), at))
        query, keys, values = self._projected(params, x)
        queries = Queries(query, mask, bias, key, at)
        return self._attended(params, queries, self._cached(keys, values, at))

    def _visible(self, length: Dim, mask: Mask, segments: Mask, prefix: Mask) -> Mask:
        """Where a position may look, or ``None`` for everywhere."""
        if self.causal:
            mask = _both(mask, _causal(length, self.memory, prefix))
        if segments is not None:
            mask = _both(mask, equal(segments, rename(segments, length, self.memory)))
        return mask

    def _away(self, memory: Dim, at: NamedArray) -> NamedArray:
        """How far after the positions ``at`` each one of the memory is."""
        return arange(memory) - at

    def _seen_by_step(self, memory: Dim, at: Any) -> NamedArray | None:
        """True for position ``at`` and those before, within the radius if there is one."""
        if self.radius is None:
            return less_equal(arange(memory), at)
        (radius,) = counts(self.radius, [self.length], "radius").values()
        return _within(memory, at, radius)

    @under_rules
    def keep(self, params: Params, memory: NamedArray, *, at: NamedArray | None = None) -> Cache:
        """Keys and values of a memory, to :meth:`recall` from any number of times.

        ``at`` are the positions by which a ``rotary`` layer turns the keys; none leaves them.
        """
        kernels = [params["key"], params["value"]]
        keys, values = dense_together(memory, kernels, self._per_key)
        return self._cached(keys, values, at)

    def _cached(self, keys: NamedArray, values: NamedArray, at: NamedArray | None) -> Cache:
        return {
            "key": _along(self._turned(keys, at), self.length, self.memory),
            "value": _along(values, self.length, self.memory),
        }

    def _projected(self, params: Params, x: NamedArray) -> list[NamedArray]:
        """Queries, keys and values of an input."""
        query, *others = (params[name] for name in ("query", "key", "value"))
        if not self.multi_query:
            return dense_together(x, [query, *others], self._per_query)
        queries = dense(x, query, self._per_query)
        return [queries, *dense_together(x, others, self._per_key)]

    @under_rules
    def recall(
        self,
        params: Params,
        x: NamedArray,
        cache: Cache,
        *,
        mask: NamedArray | None = None,
        bias: Any = None,
        key: Any = None,
        at: NamedArray | None = None,
    ) -> NamedArray:
        """What the input, at positions ``at``, finds in keys and values that were kept."""
        query = dense(x, params["query"], self._per_query)
        return self._attended(params, Queries(query, mask, bias, key, at), cache)

    def _attended(self, params: Params, queries: Queries, cache: Cache) -> NamedArray:
        array, mask, bias, key, at = queries
        values = attend(
            self._turned(array, at),
            cache["key"],
            cache["value"],
            memory=self.memory, d_kv=self._per_query[1], mask=mask, bias=bias, scale=self.scale,
            talking=self._talking(params), rate=self.dropout, key=key,
        )  # fmt: skip
        return dense(values, params["output"], as_dims(self.d_model))

    def _turned(self, x: NamedArray, at: NamedArray | None) -> NamedArray:
        if self.rotary is None or at is None:
            return x
        return rotated(x, at, self._per_query[1], base=self.rotary)

    @under_rules
    def empty(self, batch: DimsLike, length: int, dtype: Any = jnp.float32) -> Cache:
        """Room for the keys and values of ``length`` positions, for :meth:`step`."""
        heads, d_kv = self._per_key[:-1], self._per_key[-1]
        room = filled((*as_dims(batch), *heads, Dim(self.memory, length), d_kv), 0, dtype)
        return {"key": room, "value": room}

    @under_rules
    def step(
        self, params: Params, x: NamedArray, cache: Cache, at: Any, *, bias: Any = None
    ) -> tuple[NamedArray, Cache]:
        """What position number ``at`` finds in itself and those before; and their keys and values.

        The input is that of one position and has no ``length``. Taken for each position in turn,
        the results are those of the causal layer on all positions at once.
        """
        self._check_step(x)
        place = as_named(at)
        query, keys, values = self._projected(params, x)
        cache = {
            name: _written(cache[name], new, self.memory, at)
            for name, new in self._cached(keys, values, place).items()
        }
        memory = find(cache["key"].dims, self.memory)
        if callable(bias):
            bias = bias(self._away(memory, place))
        mask = self._seen_by_step(memory, at)
        return self._attended(params, Queries(query, mask, bias, None, place), cache), cache

    def _check_step(self, x: NamedArray) -> None:
        if len(self._lengths) > 1:
            raise DimError(f"steps go along one length; this layer has {self.length!r}.")
        if self.length in x.shape:
            raise DimError(
                f"a step is of one position: its input [{text_of(x.dims)}] should have no dim "
                f"{self.length!r}."
            )

    def _locally(
        self,
        params: Params,
        x: NamedArray,
        mask: NamedArray | None,
        segments: NamedArray | None,
        prefix: NamedArray | None,
        bias: Bias | None,
        key: Any,
    ) -> NamedArray:
        if prefix is not None:
            raise DimError("local attention does not support prefix=: leave it or radius= out.")
        if mask is not None and len(self._lengths) == 1:
            if self.length in mask.shape:
                raise DimError(
                    "a mask of local attention is of the positions that are looked at: "
                    f"[{text_of(mask.dims)}] should have {self.memory!r} and not {self.length!r}."
                )
            mask = rename(mask, self.memory, self.length)
        if isinstance(bias, NamedArray):
            raise DimError(
                "a bias of local attention is a function of how far away a position is, such as a "
                f"RelativeBias of its parameters; received an array [{text_of(bias.dims)}]."
            )
        at = None if self.rotary is None else arange(find(x.dims, self.length))
        query, keys, values = self._projected(params, x)
        attended = attend_locally(
            self._turned(query, at),
            self._turned(keys, at),
            values,
            self.radius or 0,  # none is not local, and does not come here
            causal=self.causal, length=self.length, d_kv=self._per_query[1],
            mask=mask, segments=segments, bias=bias, scale=self.scale,
            talking=self._talking(params), rate=self.dropout, key=key,
        )  # fmt: skip
        return dense(attended, params["output"], as_dims(self.d_model))


@operation
def _causal(length: Dim, memory: str, prefix: NamedArray | None) -> NamedArray:
    """True where a position of the memory is not after one of ``length``, or is of the prefix."""
    visible = greater_equal(arange(length), arange(length.renamed(memory)))
    return visible if prefix is None else logical_or(visible, rename(prefix, length, memory))


@operation
def _within(memory: Dim, at: Any, radius: int) -> NamedArray:
    return logical_and(less_equal(arange(memory), at), greater_equal(arange(memory), at - radius))


@operation
def _both(one: NamedArray | None, other: NamedArray) -> NamedArray:
    return other if one is None else logical_and(one, other)


@operation
def _written(cache: NamedArray, new: NamedArray, memory: str, at: Any) -> NamedArray:
    """What was kept, with one position of the memory replaced."""
    axis = position(cache.dims, memory)
    piece = spread(new, cache.dims)
    return NamedArray(jax.lax.dynamic_update_slice_in_dim(cache.array, piece, at, axis), cache.dims)


def _along(x: NamedArray, length: str, memory: str) -> NamedArray:
    """The array with its positions along the memory, where it has any."""
    return rename(x, length, memory) if length in x.shape else x
