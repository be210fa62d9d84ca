"""What the Transformers have in common: their options, the layers of their blocks, and the ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...layouts.dim_rules import Dim, DimsLike
from ..array import NamedArray
from ..layers.dense import FeedForward
from ..layers.layer import Layer, Params, pick
from ..layers.multi_head import Attention, Bias
from ..layers.normalisation import LayerNorm, RMSNorm
from ..layers.positions import RelativeBias
from ..layers.vocabulary import Vocabulary
from ..random import dropout
from .choices import (
    Turns,
    bias_of,
    check_positions,
    in_turn,
    is_spare,
    relative_of,
    with_positions,
)
from .halting import Halting
from .stack import Block, Stack
from .tokens import NAMES, Positions, Tokens


@dataclass(frozen=True)
class Model:
    """The options that all Transformers take; see :class:`Transformer` for what they mean."""

    dims: DimsLike
    feed_forward: Turns[Layer] = None
    attention: Turns[Attention] = None
    norm: type[LayerNorm] | type[RMSNorm] = LayerNorm
    shared_embedding: bool = True
    dropout: float = 0.0
    z_loss: float = 0.0
    remat: bool | str = False
    scan: bool = False
    dtype: Any = jnp.float32
    positions: Positions | RelativeBias = "learned"
    vocabulary: Vocabulary | None = None  # in place of one table for tokens
    shared_layers: bool = False  # all layers have the same parameters
    halting: Halting | None = None  # positions go through shared layers as often as they need

    def __post_init__(self) -> None:
        check_positions(self.positions)
        _ = self._dims  # raises for invalid ones

    @property
    def _dims(self) -> dict[str, Dim]:
        return pick(self.dims, NAMES, type(self).__name__, self._spare(is_spare(self.attention)))

    def _spare(self, no_heads: bool) -> list[str]:
        """The dims that these options do not need."""
        return [
            *(["d_ff"] if is_spare(self.feed_forward) else []),
            *(["heads", "d_kv"] if no_heads else []),
            *([] if self.positions == "learned" else ["length"]),
        ]

    @property
    def tokens(self) -> Tokens:
        """The table of tokens and positions, and the logits."""
        dims, shared = self._dims, self.shared_embedding
        positions = "relative" if isinstance(self.positions, RelativeBias) else self.positions
        return Tokens(
            dims.get("length"), dims["vocab"], dims["d_model"], shared, self.dtype, positions,
            self.vocabulary,
        )  # fmt: skip

    @property
    def last(self) -> LayerNorm | RMSNorm:
        """The norm after the last block, and before every sub-layer."""
        return self.norm(self._dims["d_model"])

    def _stack(
        self, depth: Dim, causal: bool | None = None, crossing: Sequence[Attention | None] = ()
    ) -> Stack:
        """Blocks whose layers take turns; ``crossing`` is attention to a memory."""
        dims, rate = self._dims, self.dropout
        attentions, layers = in_turn(self.attention), in_turn(self.feed_forward)
        blocks = []
        for i in range(math.lcm(len(attentions), len(layers), len(crossing) or 1)):
            attention = attentions[i % len(attentions)] or self._attention(
                causal=causal is not False
            )
            if causal is not None:
                attention = replace(attention, causal=causal)
            layer = layers[i % len(layers)] or FeedForward(
                dims["d_model"], dims["d_ff"], dropout=rate
            )
            cross = (crossing[i % len(crossing)] or self._attention()) if crossing else None
            attention = with_positions(attention, self.positions)
            blocks.append(Block(self.last, attention, layer, cross=cross, dropout=rate))
        return Stack(tuple(blocks), depth, self.remat, self.scan, self.shared_layers, self.halting)

    def _attention(self, causal: bool = False) -> Attention:
        dims = self._dims
        return Attention(
            dims["d_model"], dims["heads"], dims["d_kv"], causal=causal, dropout=self.dropout
        )

    def _relative(self, causal: bool) -> RelativeBias | None:
        return relative_of(self.positions, self._dims.get("heads"), causal)

    def _bias(
        self, params: Params, name: str, stack: Stack, length: Dim | None, causal: bool
    ) -> Bias | None:
        return bias_of(self._relative(causal), params.get(name), stack, length)

    def _embedded(self, params: Params, tokens: NamedArray, places: Any, key: Any) -> NamedArray:
        """Tokens as vectors, with dropout where there is a ``key``."""
        x = self.tokens(params["tokens"], tokens, places)
        return dropout(x, key, rate=self.dropout) if key is not None and self.dropout else x


def keys_for(key: Any, parts: int) -> Any:
    """As many random keys, or ``None`` where there is no key."""
    return [None] * parts if key is None else jax.random.split(key, parts)
