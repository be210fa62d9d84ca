"""The Transformer language model of the Mesh-TensorFlow paper (Shazeer et al. 2018).

The program says nothing of devices; rules do. ``batch:rows`` makes it data-parallel,
``vocab:cols;d_ff:cols;heads:cols`` model-parallel, and all four are the paper's layout on a mesh of
rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...layouts.dim_rules import Dim, Dims, DimsLike
from ..array import NamedArray, find
from ..elementwise import cast, equal, less, less_equal, not_equal, where
from ..indexing import arange, gather
from ..layers.layer import Params, as_dim, filled, under_rules
from ..layers.losses import softmax_cross_entropy, weighted_mean
from ..operation import operation
from ..reductions import reduce_sum
from . import decoding
from .choices import check_places, is_training
from .model import Model, keys_for
from .stack import Stack
from .tokens import others, tokens_before


@dataclass(frozen=True)
class Transformer(Model):
    """A language model: how likely every token is, given those before it.

    ``dims`` are ``length`` (the most positions), ``vocab``, ``d_model``, ``d_ff``, ``heads``,
    ``d_kv`` and ``layers``. Tokens are whole numbers with the dim ``length``; their other dims,
    such as ``batch``, are free.

    ``feed_forward`` replaces that layer by any that is made for ``d_model`` (see :class:`Layer`);
    ``attention`` replaces self-attention, by a local one for example. A tuple of several takes
    turns: ``feed_forward=(None, experts)`` is the usual layer and a mixture of experts, one after
    the other. ``shared_embedding`` uses one table for the tokens that come in and the logits that
    go out. ``dtype`` is the element type of activations; parameters are float32, as are sums in
    norms, softmax and loss. ``remat`` and ``scan`` are those of :class:`Stack`.

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

    start: int = 0  # the token before the first

    @property
    def stack(self) -> Stack:
        return self._stack(self._dims["layers"])

    @under_rules
    def init(self, key: Any) -> Params:
        """Parameters, the same under any rules; under ``jax.jit`` devices make their own pieces."""
        tokens, stack = jax.random.split(key)
        params = {
            "tokens": self.tokens.init(tokens),
            "stack": self.stack.init(stack),
            "last": self.last.init(),
        }
        if (relative := self._relative(causal=True)) is not None:
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
        visible = None
        if prefix is not None:
            prefix = _as_mask(prefix, tokens)
            # A token stands one position after its own in what goes in.
            visible = tokens_before(prefix, "length", 1, segments)
            weights = _times(weights, ~prefix)
        if segments is not None:
            weights = _times(weights, not_equal(segments, 0))
        logits, extra = self._logits(params, before, key, training, segments, places, visible)
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
        first, rest = keys_for(key, 2)
        x = self._embedded(params, tokens, places, first if training else None)
        stack, length = self.stack, find(tokens.dims, "length")
        bias = self._bias(params, "relative", stack, length, causal=True)
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
        bias = self._bias(params, "relative", self.stack, None, causal=True)

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

        return step, filled((*others(prompt), *beam, along), 0)

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
