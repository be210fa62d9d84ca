"""The body of a Transformer: blocks of sub-layers, one after the other.

A sub-layer sees its input normalised, and what it says is added to that: ``x + f(norm(x))``. In a
block self-attention comes first, then attention to a memory if there is one, then a feed-forward
layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import ModelError
from ...layouts.dim_rules import Dim, DimsLike
from ..array import NamedArray
from ..gradients import remat
from ..joining import stack
from ..layers.layer import Layer, Params, as_dim, takes, under_rules
from ..layers.multi_head import Attention, Cache
from ..layers.normalisation import LayerNorm, RMSNorm
from ..loops import scan
from ..operation import is_named
from ..random import dropout
from .halting import Halted, Halting


@dataclass(frozen=True)
class Block:
    """Self-attention, attention to a memory if ``cross`` is given, and a feed-forward layer.

    Where a ``key`` is given, ``dropout`` is the part of what each sub-layer says that is left out.

    >>> from meshwright.named.layers import FeedForward
    >>> attention = Attention("d_model:8", "heads:2", "d_kv:4")
    >>> block = Block(LayerNorm("d_model:8"), attention, FeedForward("d_model:8", "d_ff:16"))
    >>> sorted(jax.eval_shape(block.init, jax.random.key(0)))
    ['attention', 'attention_norm', 'feed_forward', 'feed_forward_norm']
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
        memory: Cache | None = None,
        memory_mask: NamedArray | None = None,
        key: Any = None,
        training: bool | None = None,
        present: NamedArray | None = None,
        **options: Any,
    ) -> tuple[NamedArray, NamedArray | None]:
        """The output, and the loss of a feed-forward layer that has one of its own.

        ``memory`` holds the keys and values that ``cross`` looks at. Without ``training``, a key
        means training. ``present`` is true for tokens that are not padding, for layers that ask.
        ``options`` are those of self-attention, such as ``mask`` or ``bias``.
        """
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        training = key is not None if training is None else training
        quiet = keys if training else [None] * 3
        options = {name: value for name, value in options.items() if value is not None}
        x, _ = self._sublayer(params, "attention", self.attention, x, quiet[0], **options)
        x = self._crossed(params, x, memory, memory_mask, quiet[1])
        how: dict[str, Any] = {}
        if present is not None and takes(self.feed_forward, "present"):
            how["present"] = present
        if not takes(self.feed_forward, "training"):
            return self._sublayer(params, "feed_forward", self.feed_forward, x, quiet[2], **how)
        # It may draw numbers in evaluation too.
        layer: Any = functools.partial(self.feed_forward, **how, **{"training": training})
        return self._sublayer(params, "feed_forward", layer, x, keys[2], drops=training)

    @property
    def in_training(self) -> list[str]:
        """What is computed otherwise in training than in evaluation."""
        layers = [self.attention, self.feed_forward, *([self.cross] if self.cross else [])]
        reasons = [f"dropout={self.dropout}"] if self.dropout else []
        for layer in layers:
            if rate := getattr(layer, "dropout", 0):
                reasons.append(f"dropout={rate}")
            if takes(layer, "training"):
                reasons.append(type(layer).__name__)
        return list(dict.fromkeys(reasons))

    def step(
        self,
        params: Params,
        x: NamedArray,
        cache: Cache,
        at: Any,
        *,
        memory: Cache | None = None,
        memory_mask: NamedArray | None = None,
        **options: Any,
    ) -> tuple[NamedArray, Cache]:
        """Position number ``at`` alone; ``cache`` has the keys and values of those before."""
        options = {name: value for name, value in options.items() if value is not None}
        x, cache = self._sublayer(
            params, "attention", self.attention.step, x, cache=cache, at=at, **options
        )
        x = self._crossed(params, x, memory, memory_mask)
        x, _ = self._sublayer(params, "feed_forward", self.feed_forward, x)
        return x, cache

    def _crossed(
        self, params: Params, x: NamedArray, memory: Cache | None, mask: Any, key: Any = None
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
        return self._sublayer(params, "cross", self.cross.recall, x, key, cache=memory, mask=mask)[
            0
        ]

    def _sublayer(
        self,
        params: Params,
        name: str,
        layer: Callable[..., Any],
        x: NamedArray,
        key: Any = None,
        drops: bool = True,
        **options: Any,
    ) -> tuple[NamedArray, Any]:
        """The input and what a layer says to it; and what else the layer returns."""
        inner, outer = (None, None) if key is None else jax.random.split(key)
        if inner is not None:
            options["key"] = inner
        output = layer(params[name], self.norm(params[f"{name}_norm"], x), **options)
        output, more = output[:2] if isinstance(output, tuple) else (output, None)
        if outer is not None and drops and self.dropout:
            output = dropout(output, outer, rate=self.dropout)
        return x + output, more


@dataclass(frozen=True)
class Stack:
    """A block, ``layers`` times, each with parameters of its own; or several blocks in turn.

    Parameters are a dict of ``layer_0``, ``layer_1`` and so on. With ``scan`` they are one block's,
    in which every array has the dim ``layers`` in front: the block is traced and compiled once, for
    any number of layers. With ``remat`` the backward pass keeps what enters each block, and
    computes what is inside again; or keeps some of that, if it names a policy (see
    :func:`meshwright.named.remat`).

    Of several blocks, layer ``i`` is block ``i % len(block)``, such as every second one with a
    mixture of experts (GShard, Lepikhin et al. 2020). With ``scan`` their parameters are a dict of
    ``block_0``, ``block_1`` and so on, each with its own part of ``layers``, which has to divide.

    With ``shared`` all layers are one block with the same parameters, those of ``layer_0``
    (ALBERT, Lan et al. 2020). ``halting`` then lets each position stop after fewer turns
    (Universal Transformer, Dehghani et al. 2019); its parameters are those of ``halting``.
    Raises :class:`ModelError` for choices that do not go together.

    >>> from meshwright.named.layers import FeedForward
    >>> attention = Attention("d_model:8", "heads:2", "d_kv:4")
    >>> block = Block(LayerNorm("d_model:8"), attention, FeedForward("d_model:8", "d_ff:16"))
    >>> stack = Stack(block, "layers:3", scan=True)
    >>> params = jax.eval_shape(stack.init, jax.random.key(0))
    >>> params["feed_forward"]["up"]["kernel"].shape
    {'layers': 3, 'd_model': 8, 'd_ff': 16}
    """

    block: Block | Sequence[Block]
    layers: str | Dim
    remat: bool | str = False
    scan: bool = False
    shared: bool = False
    halting: Halting | None = None

    def __post_init__(self) -> None:
        count = len(self.blocks)
        if self.halting is not None and not self.shared:
            raise ModelError("halting= counts turns of one block: it takes shared=True.")
        if self.shared and count > 1:
            raise ModelError(
                f"shared=True makes all layers one block; received {count} that take turns."
            )
        if not count:
            raise ModelError("a Stack needs at least one Block; received none.")
        if self.scan and self._layers.size % count:
            raise ModelError(
                f"with scan=True, {self._layers} must be a multiple of the {count} blocks that "
                "take turns."
            )

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that take turns."""
        return (self.block,) if isinstance(self.block, Block) else tuple(self.block)

    @property
    def in_training(self) -> list[str]:
        """What is computed otherwise in training than in evaluation."""
        return list(dict.fromkeys(text for block in self.blocks for text in block.in_training))

    @property
    def _layers(self) -> Dim:
        return as_dim(self.layers, "layers")

    @under_rules
    def init(self, key: Any) -> Params:
        keys = jax.random.split(key, self._layers.size)
        if not self.shared:
            return self._together(lambda block, own: block.init(own), keys)
        params = {"layer_0": self.blocks[0].init(keys[0])}
        if self.halting is not None:
            params["halting"] = self.halting.init(keys[-1])
        return params

    @under_rules
    def __call__(
        self, params: Params, x: NamedArray, *, memory: Any = None, key: Any = None, **how: Any
    ) -> tuple[NamedArray, NamedArray]:
        """The output, and the sum of the losses that blocks have of their own.

        ``memory`` holds keys and values for every block, as :meth:`keep` makes them; ``how`` are
        the other options of a block.
        """

        def body(block: Block, carry: Any, own: Any) -> tuple[Any, None]:
            (x, total, halted), (own_params, memory, key) = carry, own
            x, loss = block(own_params or params["layer_0"], x, memory=memory, key=key, **how)
            return (x, total if loss is None else total + loss, self._turn(params, x, halted)), None

        nothing = NamedArray(jnp.zeros([], jnp.float32), ())
        own = self._own(params), memory, self._keys(key)
        carry = x, nothing, self._begun(x)
        (x, total, halted), _ = self._repeat(body, carry, own, again=True)
        if self.halting is None:
            return x, total
        return self.halting.result(x, halted), total + self.halting.loss(halted, how.get("present"))

    @under_rules
    def step(
        self,
        params: Params,
        x: NamedArray,
        cache: Params,
        at: Any,
        *,
        memory: Any = None,
        **how: Any,
    ) -> tuple[NamedArray, Params]:
        """Position number ``at`` alone; ``cache`` has all keys and values of those before."""

        def body(block: Block, carry: Any, own: Any) -> tuple[Any, Any]:
            (x, halted), (own_params, cache, memory) = carry, own
            x, cache = block.step(
                own_params or params["layer_0"], x, cache, at, memory=memory, **how
            )
            return (x, self._turn(params, x, halted)), cache

        own = self._own(params), cache, memory
        (x, halted), cache = self._repeat(body, (x, self._begun(x)), own)
        return (x if self.halting is None else self.halting.result(x, halted)), cache

    @under_rules
    def empty(self, batch: DimsLike, length: int, dtype: Any = jnp.float32) -> Params:
        """Room for every block's keys and values of ``length`` positions, for :meth:`step`."""
        return self._together(
            lambda block, _: block.attention.empty(batch, length, dtype), range(self._layers.size)
        )

    @under_rules
    def keep(self, params: Params, memory: NamedArray) -> Params:
        """The keys and values of a memory, for ``cross`` of every block."""

        def body(block: Block, _: None, own: Any) -> tuple[None, Cache]:
            if block.cross is None:
                raise ModelError("blocks without cross= look at no memory: give Block(cross=...).")
            return None, block.cross.keep((own[0] or params["layer_0"])["cross"], memory)

        return self._repeat(body, None, (self._own(params),))[1]

    def _begun(self, x: NamedArray) -> Halted | None:
        return None if self.halting is None else self.halting.begun(x)

    def _turn(self, params: Params, x: NamedArray, halted: Halted | None) -> Halted | None:
        if self.halting is None or halted is None:
            return None
        return self.halting.turn(params["halting"], x, halted)

    def _own(self, params: Params) -> Params | None:
        """The parameters that each layer has for itself."""
        return None if self.shared else params

    def _keys(self, key: Any) -> Any:
        """A key for each block, in the form of the parameters."""
        if key is None:
            return None
        keys, count = jax.random.split(key, self._layers.size), len(self.blocks)
        if not self.scan:
            return dict(zip(self._names, keys, strict=True))
        return keys if count == 1 else {_turn(i): keys[i::count] for i in range(count)}

    @property
    def _names(self) -> list[str]:
        return [f"layer_{i}" for i in range(self._layers.size)]

    def _together(self, make: Callable[[Block, Any], Any], several: Iterable[Any]) -> Params:
        """What is made for each block, as what is of all."""
        count = len(self.blocks)
        params = [make(self.blocks[i % count], own) for i, own in enumerate(several)]
        if not self.scan:
            return dict(zip(self._names, params, strict=True))
        turns = {_turn(i): self._stacked(params[i::count]) for i in range(count)}
        return turns[_turn(0)] if count == 1 else turns

    def _stacked(self, some: list[Any]) -> Any:
        return jax.tree.map(
            lambda *blocks: stack(blocks, self._layers.name), *some, is_leaf=is_named
        )

    def _repeat(
        self,
        body: Callable[..., Any],
        carry: Any,
        own: tuple[Any, ...],
        again: bool = False,
    ) -> tuple[Any, Any]:
        """``body`` for each block in turn, with what is its own; in a loop, or written out."""
        bodies = [functools.partial(body, block) for block in self.blocks]
        if again and self.remat:
            policy = "nothing_saveable" if self.remat is True else self.remat
            bodies = [remat(body, policy) for body in bodies]

        def in_turn(names: list[str], carry: Any, own: Any) -> tuple[Any, Any]:
            results = {}
            for i, name in enumerate(names):
                part = [values and values[name] for values in own]
                carry, results[name] = bodies[i % len(bodies)](carry, part)
            return carry, results

        if not self.scan:
            return in_turn(self._names, carry, own)
        count = len(bodies)
        if count == 1:
            return scan(bodies[0], carry, own, self._layers)
        turns = functools.partial(in_turn, [_turn(i) for i in range(count)])
        return scan(turns, carry, own, self._layers.resized(self._layers.size // count))


def _turn(i: int) -> str:
    return f"block_{i}"
