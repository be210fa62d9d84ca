"""The body of a Transformer: blocks of sub-layers, one after the other.

A sub-layer sees its input normalised, and what it says is added to that: ``x + f(norm(x))``. In a
block self-attention comes first, then attention to a memory if there is one, then a feed-forward
layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...dim_rules import Dim, DimsLike
from ...errors import ModelError
from ..array import NamedArray
from ..gradients import recompute
from ..joining import stack
from ..layers.layer import Layer, Params, as_dim, under_rules
from ..layers.multi_head import Attention, Kept
from ..layers.normalisation import LayerNorm, RMSNorm
from ..loops import scan
from ..operation import is_named
from ..random import dropout


@dataclass(frozen=True)
class Block:
    """Self-attention, attention to a memory if ``cross`` is given, and a feed-forward layer.

    Where a ``key`` is given, ``dropout`` is the part of what each sub-layer says that is left out.
    """

    norm: LayerNorm | RMSNorm
    attention: Attention
    feed_forward: Layer
    cross: Attention | None = None
    dropout: float = 0.0

    def init(self, key: Any) -> Params:
        layers = {"attention": self.attention, "feed_forward": self.feed_forward}
        if self.cross is not None:
            layers["cross"] = self.cross
        params: Params = {}
        for (name, layer), own in zip(
            layers.items(), jax.random.split(key, len(layers)), strict=True
        ):
            params |= {name: layer.init(own), f"{name}_norm": self.norm.init()}
        return params

    def __call__(
        self,
        params: Params,
        x: NamedArray,
        *,
        mask: NamedArray | None = None,
        memory: Kept | None = None,
        memory_mask: NamedArray | None = None,
        key: Any = None,
    ) -> tuple[NamedArray, NamedArray | None]:
        """The output, and the loss of a feed-forward layer that has one of its own.

        ``memory`` holds the keys and values that ``cross`` looks at.
        """
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        x, _ = self._sublayer(params, "attention", self.attention, x, keys[0], mask=mask)
        x = self._crossed(params, x, memory, memory_mask, keys[1])
        return self._sublayer(params, "feed_forward", self.feed_forward, x, keys[2])

    def step(
        self,
        params: Params,
        x: NamedArray,
        kept: Kept,
        at: Any,
        *,
        memory: Kept | None = None,
        memory_mask: NamedArray | None = None,
    ) -> tuple[NamedArray, Kept]:
        """Position number ``at`` alone; ``kept`` are the keys and values of those before."""
        x, kept = self._sublayer(params, "attention", self.attention.step, x, kept=kept, at=at)
        x = self._crossed(params, x, memory, memory_mask)
        x, _ = self._sublayer(params, "feed_forward", self.feed_forward, x)
        return x, kept

    def _crossed(
        self, params: Params, x: NamedArray, memory: Kept | None, mask: Any, key: Any = None
    ) -> NamedArray:
        """The input, after it has looked at the memory if the block does."""
        if (self.cross is None) != (memory is None):
            raise ModelError(
                "a block with cross= takes memory=, the keys and values that it looks at, and one "
                f"without takes none; received cross={self.cross} and "
                f"memory={None if memory is None else sorted(memory)}."
            )
        if self.cross is None:
            return x
        return self._sublayer(params, "cross", self.cross.recall, x, key, kept=memory, mask=mask)[0]

    def _sublayer(
        self,
        params: Params,
        name: str,
        layer: Callable[..., Any],
        x: NamedArray,
        key: Any = None,
        **given: Any,
    ) -> tuple[NamedArray, Any]:
        """The input and what a layer says to it; and what else the layer returns."""
        inner, outer = (None, None) if key is None else jax.random.split(key)
        if inner is not None:
            given["key"] = inner
        said = layer(params[name], self.norm(params[f"{name}_norm"], x), **given)
        said, more = said[:2] if isinstance(said, tuple) else (said, None)
        if outer is not None and self.dropout:
            said = dropout(said, outer, rate=self.dropout)
        return x + said, more


@dataclass(frozen=True)
class Stack:
    """A block, ``layers`` times, each with parameters of its own.

    Parameters are a dict of ``layer_0``, ``layer_1`` and so on. With ``scan`` they are one block's,
    in which every array has the dim ``layers`` in front: the block is traced and compiled once, for
    any number of layers. With ``recompute`` the backward pass keeps what enters each block, and
    computes what is inside again; or keeps some of that, if it names a policy (see
    :func:`meshwright.named.recompute`).
    """

    block: Block
    layers: str | Dim
    recompute: bool | str = False
    scan: bool = False

    @property
    def _layers(self) -> Dim:
        return as_dim(self.layers, "layers")

    @under_rules
    def init(self, key: Any) -> Params:
        keys = jax.random.split(key, self._layers.size)
        return self._together([self.block.init(each) for each in keys])

    @under_rules
    def __call__(
        self, params: Params, x: NamedArray, *, memory: Any = None, key: Any = None, **given: Any
    ) -> tuple[NamedArray, NamedArray]:
        """The output, and the sum of the losses that blocks have of their own.

        ``memory`` holds keys and values for every block, as :meth:`keep` makes them.
        """

        def body(carry: Any, own: Any) -> tuple[Any, None]:
            (x, total), (params, memory, key) = carry, own
            x, loss = self.block(params, x, memory=memory, key=key, **given)
            return (x, total if loss is None else total + loss), None

        if self.recompute:
            policy = "nothing_saveable" if self.recompute is True else self.recompute
            body = recompute(body, policy)
        nothing = NamedArray(jnp.zeros([], jnp.float32), ())
        return self._repeat(body, (x, nothing), (params, memory, self._keys(key)))[0]

    @under_rules
    def step(
        self,
        params: Params,
        x: NamedArray,
        kept: Params,
        at: Any,
        *,
        memory: Any = None,
        **given: Any,
    ) -> tuple[NamedArray, Params]:
        """Position number ``at`` alone; ``kept`` are all keys and values of those before."""

        def body(x: Any, own: Any) -> tuple[Any, Any]:
            params, kept, memory = own
            return self.block.step(params, x, kept, at, memory=memory, **given)

        return self._repeat(body, x, (params, kept, memory))

    @under_rules
    def empty(self, batch: DimsLike, length: int, dtype: Any = jnp.float32) -> Params:
        """Room for every block's keys and values of ``length`` positions, for :meth:`step`."""
        return self._together(
            [self.block.attention.empty(batch, length, dtype)] * self._layers.size
        )

    @under_rules
    def keep(self, params: Params, memory: NamedArray) -> Params:
        """The keys and values of a memory, for ``cross`` of every block."""
        cross = self.block.cross
        if cross is None:
            raise ModelError("blocks without cross= look at no memory: give Block(cross=...).")

        def body(_: None, own: Any) -> tuple[None, Kept]:
            return None, cross.keep(own[0]["cross"], memory)

        return self._repeat(body, None, (params,))[1]

    def _keys(self, key: Any) -> Any:
        if key is None:
            return None
        keys = jax.random.split(key, self._layers.size)
        return keys if self.scan else dict(zip(self._names, keys, strict=True))

    @property
    def _names(self) -> list[str]:
        return [f"layer_{i}" for i in range(self._layers.size)]

    def _together(self, blocks: list[Any]) -> Params:
        """What is of each block, as what is of all."""
        if not self.scan:
            return dict(zip(self._names, blocks, strict=True))
        return jax.tree.map(lambda *each: stack(each, self._layers.name), *blocks, is_leaf=is_named)

    def _repeat(
        self, body: Callable[..., Any], carry: Any, own: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        """``body`` for each block in turn, with what is its own; in a loop, or written out."""
        if self.scan:
            return scan(body, carry, own, self._layers)
        results = {}
        for name in self._names:
            carry, results[name] = body(carry, [each and each[name] for each in own])
        return carry, results
