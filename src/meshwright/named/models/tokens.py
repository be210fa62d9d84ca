"""Tokens in and logits out: what a Transformer has at its two ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...dim_rules import Dim, Dims
from ...errors import DimError
from ..array import NamedArray, as_named, find
from ..elementwise import where
from ..indexing import arange
from ..joining import slice
from ..layers.dense import dense
from ..layers.embedding import Embedding
from ..layers.initialisers import SCALED
from ..layers.layer import Params, in_dtype, without
from ..operation import operation
from ..shifting import shift

# The dims of a Transformer.
NAMES = ("length", "vocab", "d_model", "d_ff", "heads", "d_kv", "layers")


@dataclass(frozen=True)
class Tokens:
    """The embedding of tokens and of their places, and the logits of the next ones.

    Parameters are ``table``, of ``vocab`` and ``d_model``; ``places``, of ``position`` and
    ``d_model``; and ``output``, unless the table is ``shared`` by both ends.
    """

    length: Dim
    vocab: Dim
    d_model: Dim
    shared: bool = True
    dtype: Any = jnp.float32

    @property
    def _words(self) -> Embedding:
        return Embedding(self.vocab, self.d_model, dtype=self.dtype)

    @property
    def _places(self) -> Embedding:
        return Embedding(self.length.renamed("position"), self.d_model, dtype=self.dtype)

    def init(self, key: Any) -> Params:
        table, places, output = jax.random.split(key, 3)
        params = {
            "table": self._words.init(table)["table"],
            "places": self._places.init(places)["table"],
        }
        if not self.shared:
            params["output"] = SCALED(output, (self.d_model,), (self.vocab,))
        return params

    def __call__(self, params: Params, ids: NamedArray) -> NamedArray:
        """What stands at every position. Raises :class:`DimError` if there are too many."""
        length = find(ids.dims, self.length.name)
        self.check(length.size)
        places = slice(params["places"], "position", 0, length.size, name=length.name)
        return self._words({"table": params["table"]}, ids) + in_dtype(places, self.dtype)

    def step(self, params: Params, ids: NamedArray, at: Any) -> NamedArray:
        """What stands at position number ``at`` alone."""
        place = self._places({"table": params["places"]}, as_named(at))
        return self._words({"table": params["table"]}, ids) + place

    def check(self, length: int) -> None:
        """Raise :class:`DimError` if there are more tokens than positions."""
        if length > self.length.size:
            raise DimError(
                f"{length} tokens are more than the model's {self.length.size} positions: give it "
                f"'{self.length.name}:{length}', or take fewer tokens."
            )

    def logits(self, params: Params, x: NamedArray) -> NamedArray:
        """How likely each token of the vocabulary is."""
        if self.shared:
            return dense(x * self.d_model.size**-0.5, params["table"], self.vocab)
        return dense(x, params["output"], self.vocab)


@operation
def tokens_before(tokens: NamedArray, length: str, start: int) -> NamedArray:
    """The token before each position: those given, moved up by one, with ``start`` in front."""
    moved = shift(tokens, 1, length)
    if not start:
        return moved
    return where(arange(find(tokens.dims, length)) > 0, moved, start, out=tokens.dims)


def others(tokens: NamedArray) -> Dims:
    """All dims of tokens but the length: those of the sequences."""
    return without(tokens.dims, [find(tokens.dims, "length")])
