"""A vocabulary in clusters: words that come often have large rows, and rare ones small rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import DimError
from ...layouts.dim_rules import Dim
from ..array import NamedArray
from ..elementwise import elementwise
from ..indexing import index, whole_numbers
from ..joining import concat
from ..operation import operation
from ..reductions import log_softmax, logsumexp
from .dense import dense
from .embedding import By, Embedding
from .initialisers import SCALED
from .layer import Params, as_dim, in_dtype, under_rules
from .vocabulary import FactorizedVocabulary


@dataclass(frozen=True)
class AdaptiveVocabulary:
    """A :class:`Vocabulary` in clusters, of which those of rarer words have smaller rows.

    Ids go by how often their words come, the most frequent first. Those below the first of
    ``cuts`` are the head; each tail goes from one cut to the next, and the last to the end. Rows of
    tail i have ``d_model / shrink ** i`` numbers, and a kernel from them to ``d_model`` (adaptive
    input representations, Baevski and Auli 2019). The softmax of the head has one class more for
    each tail, whose own softmax shares its chance out (adaptive softmax, Grave et al. 2017); logits
    are the logarithms of the chances. Both are computed at every position, since shapes are fixed
    before a program runs: what is saved is the size of the rows.

    Parameters are ``head``, its ``table`` and the kernel ``tails``; and of each tail a
    :class:`FactorizedVocabulary`'s. Where ``vocab`` is split, cuts are multiples of the pieces.

    >>> from meshwright.named import named
    >>> layer = AdaptiveVocabulary("vocab:100", "d_model:8", cuts=(10, 40))
    >>> params = layer.init(jax.random.key(0))
    >>> [params[f"tail_{i}"]["table"].shape for i in (1, 2)]
    [{'vocab': 30, 'inner': 2}, {'vocab': 60, 'inner': 1}]
    >>> x = layer(params, named(jnp.array([3, 50]), "length:2"))
    >>> layer.logits(params, x).shape
    {'length': 2, 'vocab': 100}
    """

    vocab: str | Dim
    d_model: str | Dim
    cuts: tuple[int, ...]
    shrink: int = 4
    by: By = "gather"
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        ends = self._ends
        if not self.cuts or list(ends) != sorted({*ends}) or ends[0] < 1:
            raise DimError(
                f"cuts must be at least 1, increase and stay below {self._vocab}; received "
                f"{self.cuts!r}."
            )
        if self.shrink < 1:
            raise DimError(f"shrink must be 1 or more; received {self.shrink!r}.")

    @property
    def _vocab(self) -> Dim:
        return as_dim(self.vocab, "vocab")

    @property
    def _d_model(self) -> Dim:
        return as_dim(self.d_model, "d_model")

    @property
    def _ends(self) -> tuple[int, ...]:
        """Where each cluster ends."""
        return (*self.cuts, self._vocab.size)

    @property
    def _head(self) -> Embedding:
        words = self._vocab.resized(self.cuts[0])
        return Embedding(words, self._d_model, by=self.by, dtype=self.dtype)

    @property
    def _classes(self) -> Dim:
        """One for each tail, in the softmax of the head."""
        return Dim("tail", len(self.cuts))

    @property
    def _tails(self) -> dict[str, FactorizedVocabulary]:
        sizes = [end - begin for begin, end in zip(self.cuts, self._ends[1:], strict=True)]
        rows = [max(1, self._d_model.size // self.shrink ** (i + 1)) for i in range(len(sizes))]
        return {
            f"tail_{i + 1}": FactorizedVocabulary(
                self._vocab.resized(size), Dim("inner", few), self._d_model, self.by, self.dtype
            )
            for i, (size, few) in enumerate(zip(sizes, rows, strict=True))
        }

    @under_rules
    def init(self, key: Any) -> Params:
        head, tails, *others = jax.random.split(key, 2 + len(self.cuts))
        params = {
            "head": {
                **self._head.init(head),
                "tails": SCALED(tails, (self._d_model,), (self._classes,)),
            }
        }
        for (name, tail), own in zip(self._tails.items(), others, strict=True):
            params[name] = tail.init(own)
        return params

    @under_rules
    def __call__(self, params: Params, ids: NamedArray) -> NamedArray:
        return _embedded(self, params, ids)

    @under_rules
    def logits(self, params: Params, x: NamedArray) -> NamedArray:
        return _logits(self, params, x)


@operation
def _embedded(layer: AdaptiveVocabulary, params: Params, ids: NamedArray) -> NamedArray:
    """The sum over clusters: a number that is outside of one has a row of zeros there."""
    ids = whole_numbers(ids, "AdaptiveVocabulary: the ids")
    x = layer._head(params["head"], ids)
    for begin, (name, tail) in zip(layer.cuts, layer._tails.items(), strict=True):
        x = x + tail(params[name], ids - begin)
    return x


@operation
def _logits(layer: AdaptiveVocabulary, params: Params, x: NamedArray) -> NamedArray:
    wide, vocab, head = jnp.promote_types(x.dtype, jnp.float32), layer._vocab, params["head"]
    words = dense(x * layer._d_model.size**-0.5, head["table"], vocab.resized(layer.cuts[0]))
    tails = dense(x, head["tails"], layer._classes)
    words, tails = in_dtype(words, wide), in_dtype(tails, wide)
    # Not joined first: with a class more for each tail, the head's words would not divide evenly.
    total = elementwise(jnp.logaddexp, logsumexp(words, vocab.name), logsumexp(tails, "tail"))
    chances = [words - total]
    for i, (name, tail) in enumerate(layer._tails.items()):
        own = in_dtype(tail.logits(params[name], x), wide)
        chances.append(log_softmax(own, vocab.name) + index(tails, {"tail": i}) - total)
    return concat(chances, vocab.name)
