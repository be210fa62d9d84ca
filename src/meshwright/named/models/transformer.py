"""The Transformer language model of the Mesh-TensorFlow paper (Shazeer et al. 2018).

The program says nothing of devices; rules do. ``batch:rows`` makes it data-parallel,
``vocab:cols;d_ff:cols;heads:cols`` model-parallel, and all four are the paper's layout on a mesh of
rows and columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...layouts.dim_rules import Dim, Dims, DimsLike
from ..array import NamedArray, find
from ..elementwise import cast, equal, less, less_equal, not_equal, where
from ..indexing import arange, gather
from ..layers.dense import FeedForward
from ..layers.layer import Layer, Params, as_dim, pick, under_rules
from ..layers.losses import softmax_cross_entropy, weighted_mean
from ..layers.multi_head import Attention
from ..layers.normalisation import LayerNorm, RMSNorm
from ..layers.positions import RelativeBias
from ..layers.vocabulary import Vocabulary
from ..operation import operation
from ..random import dropout
from ..reductions import reduce_sum
from . import decoding
from .choices import (
    Turns,
    bias_of,
    check_places,
    in_turn,
    is_spare,
    is_training,
    relative_of,
    with_positions,
)
from .stack import Block, Stack
from .tokens import NAMES, Positions, Tokens, others, tokens_before


@dataclass(frozen=True)
class Transformer:
    """A language model: how likely every token is, given those before it.

    ``dims`` are ``length`` (the most positions), ``vocab``, ``d_model``, ``d_ff``, ``heads``,
    ``d_kv`` and ``layers``. Tokens are whole numbers with the dim ``length``; their other dims,
    such as ``batch``, are free.

    ``feed_forward`` replaces that layer by any that is made for ``d_model`` (see :class:`Layer`);
    ``attention`` replaces self-attention, by a local one for example. A tuple of several takes
    turns: ``feed_forward=(None, experts)`` is the usual layer and a mixture of experts, one after
    the other. ``shared_embedding`` uses one table for the tokens that come in and the logits that
    go out. ``dtype`` is the element type of activations; parameters are float32, as are sums in
    norms, softmax and loss. ``recompute`` and ``scan`` are those of :class:`Stack`.

    ``positions`` are ``"learned"``, one row of a table each; ``"sinusoid"`` (Vaswani et al. 2017);
    ``"rotary"`` (Su et al. 2021); ``"relative"``, T5's bias by distance, or a
    :class:`RelativeBias` of other sizes, which all layers share; or ``"none"``. Only a table needs
    the dim ``length``; without it there is no limit.

    Rows may be packed with several texts: ``segments`` number them from 1, 0 is padding, and no
    token sees another segment; ``places`` say where each token stands in its own (:func:`pack`
    makes both). ``prefix`` is true for tokens that are given: all of the same segment see them, and
    they have no part in the loss (prefix LM, Raffel et al. 2020); it may also be their number, for
    each sequence.

    >>> from meshwright.named import named
    >>> model = Transformer("length:8 vocab:16 d_model:8 d_ff:16 heads:2 d_kv:4 layers:1")
    >>> params = jax.jit(model.init)(jax.random.key(0))
    >>> tokens = named([[3, 1, 4, 1, 5]], "batch:1 length:5")
    >>> jax.jit(model)(params, tokens).shape
    {'batch': 1, 'length': 5, 'vocab': 16}
    >>> loss, gradients = jax.jit(jax.value_and_grad(model.loss))(params, tokens)
    """

    dims: DimsLike
    feed_forward: Turns[Layer] = None
    attention: Turns[Attention] = None
    norm: type[LayerNorm] | type[RMSNorm] = LayerNorm
    shared_embedding: bool = True
    dropout: float = 0.0
    z_loss: float = 0.0
    recompute: bool | str = False
    scan: bool = False
    dtype: Any = jnp.float32
    start: int = 0  # the token before the first
    positions: Positions | RelativeBias = "learned"
    vocabulary: Vocabulary | None = None  # in place of one table for tokens
    shared_layers: bool = False  # all layers have the same parameters

    def __post_init__(self) -> None:
        _ = self._dims  # what is wrong with them is said here

    @property
    def _dims(self) -> dict[str, Dim]:
        spare = [
            *(["d_ff"] if is_spare(self.feed_forward) else []),
            *(["heads", "d_kv"] if is_spare(self.attention) else []),
            *([] if self.positions == "learned" else ["length"]),
        ]
        return pick(self.dims, NAMES, "Transformer", spare)

    @property
    def tokens(self) -> Tokens:
        dims, shared = self._dims, self.shared_embedding
        positions = "relative" if isinstance(self.positions, RelativeBias) else self.positions
        return Tokens(
            dims.get("length"), dims["vocab"], dims["d_model"], shared, self.dtype, positions,
            self.vocabulary,
        )  # fmt: skip

    @property
    def stack(self) -> Stack:
        dims, rate = self._dims, self.dropout
        attentions, layers = in_turn(self.attention), in_turn(self.feed_forward)
        blocks = []
        for i in range(math.lcm(len(attentions), len(layers))):
            attention = attentions[i % len(attentions)] or Attention(
                dims["d_model"], dims["heads"], dims["d_kv"], causal=True, dropout=rate
            )
            layer = layers[i % len(layers)] or FeedForward(
                dims["d_model"], dims["d_ff"], dropout=rate
            )
            attention = with_positions(attention, self.positions)
            blocks.append(Block(self.norm(dims["d_model"]), attention, layer, dropout=rate))
        return Stack(tuple(blocks), dims["layers"], self.recompute, self.scan, self.shared_layers)

    @property
    def _relative(self) -> RelativeBias | None:
        return relative_of(self.positions, self._dims.get("heads"), causal=True)

    @property
    def last(self) -> LayerNorm | RMSNorm:
        """The norm after the last block."""
        return self.norm(self._dims["d_model"])

    @under_rules
    def init(self, key: Any) -> Params:
        """Parameters, the same under any rules; under ``jax.jit`` devices make their own pieces."""
        tokens, stack = jax.random.split(key)
        params = {
            "tokens": self.tokens.init(tokens),
            "stack": self.stack.init(stack),
            "last": self.last.init(),
        }
        if (relative := self._relative) is not None:
            params["relative"] = relative.init(jax.random.fold_in(key, 1))
        return params

    @under_rules
    def __call__(
        self,
        params: Params,
        tokens: NamedArray,
        *,
        segments: NamedArray | None = None,
        places: NamedArray | None = None,
        prefix: NamedArray | None = None,
        key: Any = None,
        training: bool | None = None,
    ) -> NamedArray:
        """Logits of the token that follows each position.

        With a ``key`` as in training, with dropout, unless ``training=False``; else as in
        evaluation. ``prefix`` is true for the tokens that every position of their segment sees.
        """
        training = key is not None if training is None else training
        prefix = None if prefix is None else _as_mask(prefix, tokens)
        return self._logits(params, tokens, key, training, segments, places, prefix)[0]

    @under_rules
    def loss(
        self,
        params: Params,
        tokens: NamedArray,
        *,
        weights: NamedArray | None = None,
        segments: NamedArray | None = None,
        places: NamedArray | None = None,
        prefix: NamedArray | None = None,
        key: Any = None,
        training: bool | None = None,
    ) -> Any:
        """The mean cross-entropy of every token given those before, a scalar for ``jax.grad``.

        ``weights`` say how much each token counts, 0 for padding. Losses of layers are added. A
        ``key`` means training, unless ``training=False``. Raises :class:`ModelError` if neither is
        given to a model that differs between the two: one with dropout or a mixture of experts.
        """
        training = is_training(key, training, self.stack.in_training, "Transformer")
        losses, weights, extra = self._losses(
            params, tokens, weights, segments, places, prefix, key, training
        )
        return (weighted_mean(losses, weights) + extra).array

    @under_rules
    def log_likelihoods(
        self,
        params: Params,
        tokens: NamedArray,
        *,
        weights: NamedArray | None = None,
        prefix: NamedArray | None = None,
    ) -> NamedArray:
        """How likely each sequence is: the sum of its tokens' log-probabilities, in evaluation.

        ``weights`` and ``prefix`` are those of :meth:`loss`: a prefix is taken as given.
        """
        plain = replace(self, z_loss=0.0)
        losses, weights, _ = plain._losses(params, tokens, weights, None, None, prefix, None, False)
        return -reduce_sum(losses if weights is None else losses * weights, "length")

    def _losses(
        self,
        params: Params,
        tokens: NamedArray,
        weights: NamedArray | None,
        segments: NamedArray | None,
        places: NamedArray | None,
        prefix: NamedArray | None,
        key: Any,
        training: bool,
    ) -> tuple[NamedArray, NamedArray | None, NamedArray]:
        """The loss of every token, how much each counts, and the losses of layers."""
        before = tokens_before(tokens, "length", self.start, segments)
        seen = None
        if prefix is not None:
            prefix = _as_mask(prefix, tokens)
            # A token stands one position after its own in what goes in.
            seen = tokens_before(prefix, "length", 1, segments)
            weights = _times(weights, ~prefix)
        if segments is not None:
            weights = _times(weights, not_equal(segments, 0))
        logits, extra = self._logits(params, before, key, training, segments, places, seen)
        losses = softmax_cross_entropy(logits, tokens, "vocab", z_loss=self.z_loss)
        return losses, weights, extra

    def _logits(
        self,
        params: Params,
        tokens: NamedArray,
        key: Any,
        training: bool,
        segments: NamedArray | None = None,
        places: NamedArray | None = None,
        prefix: NamedArray | None = None,
    ) -> tuple[NamedArray, NamedArray]:
        check_places(self.positions, segments, places)
        first, rest = (None, None) if key is None else jax.random.split(key)
        x = self.tokens(params["tokens"], tokens, places)
        if first is not None and training and self.dropout:
            x = dropout(x, first, rate=self.dropout)
        stack, length = self.stack, find(tokens.dims, "length")
        bias = bias_of(self._relative, params.get("relative"), stack, length)
        present = None if segments is None else not_equal(segments, 0)
        x, extra = stack(
            params["stack"], x, present=present, segments=segments, prefix=prefix, bias=bias,
            key=rest, training=training,
        )  # fmt: skip
        return self.tokens.logits(params["tokens"], self.last(params["last"], x)), extra

    @under_rules
    def stepper(
        self, params: Params, batch: DimsLike, length: int
    ) -> tuple[decoding.Step, decoding.States]:
        """A step that goes from one token to the logits of the next, and what it starts from.

        It is what :mod:`decoding` asks for: ``step(ids, at, states)``. The states are the keys and
        values of ``length`` positions, for every sequence of the dims ``batch``.
        """

        bias = bias_of(self._relative, params.get("relative"), self.stack, None)

        def step(ids: NamedArray, at: Any, states: Any) -> tuple[NamedArray, Any]:
            x = self.tokens.step(params["tokens"], ids, at)
            x, states = self.stack.step(params["stack"], x, states, at, bias=bias)
            return self.tokens.logits(params["tokens"], self.last(params["last"], x)), states

        self.tokens.check(length)
        return step, self.stack.empty(batch, length, self.dtype)

    def _whole_stepper(
        self, params: Params, prompt: NamedArray, length: int, beam: Dims = ()
    ) -> tuple[decoding.Step, decoding.States]:
        """A step that recomputes all positions; those of the prompt attend to each other."""
        self.tokens.check(length)
        along = Dim("length", length)
        # A token stands one position after its own in what goes in.
        prefix = less_equal(arange(along), find(prompt.dims, "length").size)

        def step(ids: NamedArray, at: Any, before: Any) -> tuple[NamedArray, Any]:
            before = where(equal(arange(along), at), ids, before, out=before.dims)
            return gather(self(params, before, prefix=prefix), at, along), before

        return step, decoding.filled((*others(prompt), *beam, along), 0)

    @under_rules
    def greedy(
        self, params: Params, prompt: NamedArray, length: int, *, prefix: bool = False, **how: Any
    ) -> NamedArray:
        """The prompt, continued to ``length`` tokens: the likeliest, or drawn at a temperature.

        With ``prefix`` the tokens of the prompt attend to each other, as with ``prefix=`` of the
        loss; every step then recomputes all positions. ``how`` are the options of
        :func:`decoding.greedy`.
        """
        forced = decoding.forced(prompt, length)
        if prefix:
            step, states = self._whole_stepper(params, prompt, length)
        else:
            step, states = self.stepper(params, others(prompt), length)
        return decoding.greedy(step, states, forced, start=self.start, **how)

    @under_rules
    def beam_search(
        self,
        params: Params,
        prompt: NamedArray,
        length: int,
        beam: str | Dim,
        *,
        prefix: bool = False,
        **how: Any,
    ) -> tuple[NamedArray, NamedArray]:
        """The likeliest continuations of the prompt to ``length`` tokens, and their scores.

        ``beam`` is the dim of the results that are looked for, such as ``"beam:4"``; ``prefix`` is
        that of :meth:`greedy`, and ``how`` are the options of :func:`decoding.beam_search`.
        """
        forced, beam = decoding.forced(prompt, length), as_dim(beam, "beam")
        if prefix:
            step, states = self._whole_stepper(params, prompt, length, (beam,))
        else:
            step, states = self.stepper(params, (*others(prompt), beam), length)
        return decoding.beam_search(step, states, forced, beam, start=self.start, **how)


@operation
def _as_mask(prefix: NamedArray, tokens: NamedArray) -> NamedArray:
    """Where a token is of the prefix, of which the number may be given for each sequence."""
    length = find(tokens.dims, "length")
    if length in prefix.dims:
        return not_equal(prefix, 0)
    return less(arange(length), prefix, out=(*prefix.dims, length))


@operation
def _times(weights: NamedArray | None, mask: NamedArray) -> NamedArray:
    mask = cast(mask, jnp.float32)
    return mask if weights is None else weights * mask
