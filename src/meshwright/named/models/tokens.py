"""Tokens in and logits out: what a Transformer has at its two ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ...errors import DimError
from ...layouts.dim_rules import Dim, Dims
from ..array import NamedArray, as_named, find
from ..elementwise import equal, where
from ..indexing import arange
from ..joining import slice
from ..layers.dense import dense
from ..layers.embedding import Embedding
from ..layers.initialisers import SCALED
from ..layers.layer import Params, in_dtype, without
from ..layers.positions import sinusoids
from ..layers.vocabulary import Vocabulary
from ..operation import operation
from ..shifting import shift

# The dims of a Transformer.
NAMES = ("length", "vocab", "d_model", "d_ff", "heads", "d_kv", "layers")

# How a model knows where a token stands: by a table of its own, by waves that are added, by
# rotations or a bias in attention, or not at all.
Positions = Literal["learned", "sinusoid", "rotary", "relative", "none"]


@dataclass(frozen=True)
class Tokens:
    """The embedding of tokens and of their places, and the logits of the next ones.

    Parameters are ``table``, of ``vocab`` and ``d_model``; with ``positions="learned"``,
    ``places``, of ``position`` and ``d_model``; and ``output``, unless the table is ``shared`` by
    both ends. With a ``vocabulary`` that one embeds and gives logits, and its parameters are in the
    place of table and output. ``length`` is the most positions, or none if there is no limit.
    """

    length: Dim | None
    vocab: Dim
    d_model: Dim
    shared: bool = True
    dtype: Any = jnp.float32
    positions: Positions = "learned"
    vocabulary: Vocabulary | None = None

    def _embedded(self, params: Params, ids: NamedArray) -> NamedArray:
        if self.vocabulary is not None:
            return in_dtype(self.vocabulary(params["vocabulary"], ids), self.dtype)
        return self._words({"table": params["table"]}, ids)

    @property
    def _words(self) -> Embedding:
        return Embedding(self.vocab, self.d_model, dtype=self.dtype)

    @property
    def _places(self) -> Embedding:
        return Embedding(self._limit.renamed("position"), self.d_model, dtype=self.dtype)

    @property
    def _limit(self) -> Dim:
        if self.length is None:
            raise DimError("positions='learned' takes the dim 'length', the most positions.")
        return self.length

    def init(self, key: Any) -> Params:
        table, places, output = jax.random.split(key, 3)
        params: Params
        if self.vocabulary is None:
            params = {"table": self._words.init(table)["table"]}
        else:
            params = {"vocabulary": self.vocabulary.init(table)}
        if self.positions == "learned":
            params["places"] = self._places.init(places)["table"]
        if not self.shared and self.vocabulary is None:
            params["output"] = SCALED(output, (self.d_model,), (self.vocab,))
        return params

    def __call__(
        self, params: Params, ids: NamedArray, places: NamedArray | None = None
    ) -> NamedArray:
        """What stands at every position, or at these ``places``.

        Raises :class:`DimError` if there are too many.
        """
        length = find(ids.dims, "length")
        self.check(length.size)
        words = self._embedded(params, ids)
        if self.positions == "learned" and places is None:
            rows = slice(params["places"], "position", 0, length.size, name="length")
            return words + in_dtype(rows, self.dtype)
        return self._placed(params, words, arange(length) if places is None else places)

    def step(self, params: Params, ids: NamedArray, at: Any) -> NamedArray:
        """What stands at position number ``at`` alone."""
        return self._placed(params, self._embedded(params, ids), as_named(at))

    def _placed(self, params: Params, words: NamedArray, at: NamedArray) -> NamedArray:
        if self.positions == "learned":
            return words + self._places({"table": params["places"]}, at)
        if self.positions == "sinusoid":
            return words + in_dtype(sinusoids(at, self.d_model), self.dtype)
        return words

    def check(self, length: int) -> None:
        """Raise :class:`DimError` if there are more tokens than positions."""
        if self.length is not None and length > self.length.size:
            raise DimError(
                f"{length} tokens are more than the model's {self.length.size} positions: give it "
                f"'{self.length.name}:{length}', or take fewer tokens."
            )

    def logits(self, params: Params, x: NamedArray) -> NamedArray:
        """How likely each token of the vocabulary is."""
        if self.vocabulary is not None:
            return self.vocabulary.logits(params["vocabulary"], x)
        if self.shared:
            return dense(x * self.d_model.size**-0.5, params["table"], self.vocab)
        return dense(x, params["output"], self.vocab)


@operation
def tokens_before(
    tokens: NamedArray, length: str, start: int, segments: NamedArray | None = None
) -> NamedArray:
    """The token before each position: those given, moved up by one, with ``start`` in front.

    With ``segments``, ``start`` stands in front of each of them.
    """
    moved = shift(tokens, 1, length)
    if segments is not None:
        same = equal(segments, shift(segments, 1, length))
        first = equal(arange(find(tokens.dims, length)), 0)
        return where(same & ~first, moved, start, out=tokens.dims)
    if not start:
        return moved
    return where(arange(find(tokens.dims, length)) > 0, moved, start, out=tokens.dims)


def others(tokens: NamedArray) -> Dims:
    """All dims of tokens but the length: those of the sequences."""
    return without(tokens.dims, [find(tokens.dims, "length")])
