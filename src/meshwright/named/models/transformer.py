"""The Transformer language model of the Mesh-TensorFlow paper (Shazeer et al. 2018).

The program says nothing of devices; rules do. ``batch:rows`` makes it data-parallel,
``vocab:cols;d_ff:cols;heads:cols`` model-parallel, and all four are the paper's layout on a mesh of
rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...dim_rules import Dim, DimsLike
from ..array import NamedArray
from ..layers.dense import FeedForward
from ..layers.layer import Layer, Params, as_dim, pick, under_rules
from ..layers.losses import softmax_cross_entropy, weighted_mean
from ..layers.multi_head import Attention
from ..layers.normalisation import LayerNorm, RMSNorm
from ..random import dropout
from . import decoding
from .stack import Block, Stack
from .tokens import NAMES, Tokens, others, tokens_before


@dataclass(frozen=True)
class Transformer:
    """A language model: how likely every token is, given those before it.

    ``dims`` are ``length`` (the most positions), ``vocab``, ``d_model``, ``d_ff``, ``heads``,
    ``d_kv`` and ``layers``. Tokens are whole numbers with the dim ``length``; their other dims,
    such as ``batch``, are free.

    ``feed_forward`` replaces that layer by any that is made for ``d_model`` (see :class:`Layer`);
    ``attention`` replaces self-attention, by a local one for example. ``shared_embedding`` uses one
    table for the tokens that come in and the logits that go out. ``dtype`` is the element type of
    activations; parameters are float32, as are sums in norms, softmax and loss. ``recompute`` and
    ``scan`` are those of :class:`Stack`.

    >>> from meshwright.named import named
    >>> model = Transformer("length:8 vocab:16 d_model:8 d_ff:16 heads:2 d_kv:4 layers:1")
    >>> params = jax.jit(model.init)(jax.random.key(0))
    >>> tokens = named([[3, 1, 4, 1, 5]], "batch:1 length:5")
    >>> jax.jit(model)(params, tokens).shape
    {'batch': 1, 'length': 5, 'vocab': 16}
    >>> loss, gradients = jax.jit(jax.value_and_grad(model.loss))(params, tokens)
    """

    dims: DimsLike
    feed_forward: Layer | None = None
    attention: Attention | None = None
    norm: type[LayerNorm] | type[RMSNorm] = LayerNorm
    shared_embedding: bool = True
    dropout: float = 0.0
    z_loss: float = 0.0
    recompute: bool | str = False
    scan: bool = False
    dtype: Any = jnp.float32
    start: int = 0  # the token before the first

    def __post_init__(self) -> None:
        _ = self._dims  # what is wrong with them is said here

    @property
    def _dims(self) -> dict[str, Dim]:
        spare = [
            *(["d_ff"] if self.feed_forward else []),
            *(["heads", "d_kv"] if self.attention else []),
        ]
        return pick(self.dims, NAMES, "Transformer", spare)

    @property
    def tokens(self) -> Tokens:
        dims = self._dims
        shared = self.shared_embedding
        return Tokens(dims["length"], dims["vocab"], dims["d_model"], shared, self.dtype)

    @property
    def stack(self) -> Stack:
        dims, rate = self._dims, self.dropout
        block = Block(
            self.norm(dims["d_model"]),
            self.attention
            or Attention(dims["d_model"], dims["heads"], dims["d_kv"], causal=True, dropout=rate),
            self.feed_forward or FeedForward(dims["d_model"], dims["d_ff"], dropout=rate),
            dropout=rate,
        )
        return Stack(block, dims["layers"], self.recompute, self.scan)

    @property
    def last(self) -> LayerNorm | RMSNorm:
        """The norm after the last block."""
        return self.norm(self._dims["d_model"])

    @under_rules
    def init(self, key: Any) -> Params:
        """Parameters, the same under any rules; under ``jax.jit`` devices make their own pieces."""
        tokens, stack = jax.random.split(key)
        return {
            "tokens": self.tokens.init(tokens),
            "stack": self.stack.init(stack),
            "last": self.last.init(),
        }

    @under_rules
    def __call__(self, params: Params, tokens: NamedArray, *, key: Any = None) -> NamedArray:
        """Logits of the token that follows each position; with a ``key``, with dropout."""
        return self._logits(params, tokens, key)[0]

    @under_rules
    def loss(
        self,
        params: Params,
        tokens: NamedArray,
        *,
        weights: NamedArray | None = None,
        key: Any = None,
    ) -> Any:
        """The mean cross-entropy of every token given those before, a scalar for ``jax.grad``.

        ``weights`` say how much each token counts, 0 for padding. Losses of layers are added.
        """
        before = tokens_before(tokens, "length", self.start)
        logits, extra = self._logits(params, before, key)
        losses = softmax_cross_entropy(logits, tokens, "vocab", z_loss=self.z_loss)
        return (weighted_mean(losses, weights) + extra).array

    def _logits(
        self, params: Params, tokens: NamedArray, key: Any
    ) -> tuple[NamedArray, NamedArray]:
        first, rest = (None, None) if key is None else jax.random.split(key)
        x = self.tokens(params["tokens"], tokens)
        if first is not None and self.dropout:
            x = dropout(x, first, rate=self.dropout)
        x, extra = self.stack(params["stack"], x, key=rest)
        return self.tokens.logits(params["tokens"], self.last(params["last"], x)), extra

    @under_rules
    def stepper(
        self, params: Params, batch: DimsLike, length: int
    ) -> tuple[decoding.Step, decoding.States]:
        """A step that goes from one token to the logits of the next, and what it starts from.

        It is what :mod:`decoding` asks for: ``step(ids, at, states)``. The states are the keys and
        values of ``length`` positions, for every sequence of the dims ``batch``.
        """

        def step(ids: NamedArray, at: Any, states: Any) -> tuple[NamedArray, Any]:
            x = self.tokens.step(params["tokens"], ids, at)
            x, states = self.stack.step(params["stack"], x, states, at)
            return self.tokens.logits(params["tokens"], self.last(params["last"], x)), states

        self.tokens.check(length)
        return step, self.stack.empty(batch, length, self.dtype)

    @under_rules
    def greedy(self, params: Params, prompt: NamedArray, length: int, **how: Any) -> NamedArray:
        """The prompt, continued to ``length`` tokens: the likeliest, or drawn at a temperature.

        ``how`` are the options of :func:`decoding.greedy`.
        """
        forced = decoding.forced(prompt, length)
        step, states = self.stepper(params, others(prompt), length)
        return decoding.greedy(step, states, forced, start=self.start, **how)

    @under_rules
    def beam_search(
        self, params: Params, prompt: NamedArray, length: int, beam: str | Dim, **how: Any
    ) -> tuple[NamedArray, NamedArray]:
        """The likeliest continuations of the prompt to ``length`` tokens, and their scores.

        ``beam`` is the dim of the results that are looked for, such as ``"beam:4"``; ``how`` are
        the options of :func:`decoding.beam_search`.
        """
        forced, beam = decoding.forced(prompt, length), as_dim(beam, "beam")
        step, states = self.stepper(params, (*others(prompt), beam), length)
        return decoding.beam_search(step, states, forced, beam, start=self.start, **how)
