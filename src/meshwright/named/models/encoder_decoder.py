"""The encoder-decoder Transformer of the Mesh-TensorFlow paper (Shazeer et al. 2018).

The encoder reads the whole source; the decoder writes the target one token after the other, and
looks at what the encoder said. The paper's rules are those of the language model:
``batch:rows;vocab:cols;d_ff:cols;heads:cols``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...dim_rules import Dim, DimsLike, as_dims
from ..array import NamedArray
from ..elementwise import not_equal
from ..layers.dense import FeedForward
from ..layers.layer import Layer, Params, as_dim, pick, under_rules
from ..layers.losses import softmax_cross_entropy, weighted_mean
from ..layers.multi_head import Attention
from ..layers.normalisation import LayerNorm, RMSNorm
from ..operation import operation
from ..random import dropout
from ..shapes import rename
from . import decoding
from .stack import Block, Stack
from .tokens import NAMES, Tokens, others, tokens_before


@dataclass(frozen=True)
class EncoderDecoder:
    """A translator: how likely every token of a target is, given a source and the tokens before.

    ``dims`` are ``length`` (the most positions, of either), ``vocab`` (of both), ``d_model``,
    ``d_ff``, ``heads``, ``d_kv`` and ``layers`` (of the encoder, and of the decoder). Source and
    target are whole numbers with the dim ``length``, each of its own size; their other dims, such
    as ``batch``, are the same. The token ``padding`` is no token: nothing looks at it, and it has
    no part in the loss. It is also the token before the first of a target.

    The other choices are those of :class:`Transformer`; ``smoothing`` is that of
    :func:`softmax_cross_entropy`.

    >>> from meshwright.named import named
    >>> model = EncoderDecoder("length:8 vocab:16 d_model:8 d_ff:16 heads:2 d_kv:4 layers:2")
    >>> source = named([[3, 1, 4, 0]], "batch:1 length:4")
    >>> target = named([[5, 9, 2, 6, 5]], "batch:1 length:5")
    >>> params = jax.eval_shape(model.init, jax.random.key(0))  # shapes; jax.jit makes numbers
    >>> jax.eval_shape(model, params, source, target).shape
    {'batch': 1, 'length': 5, 'vocab': 16}
    >>> translate = lambda params, source: model.beam_search(params, source, 8, "beam:3", end=1)
    >>> ids, scores = jax.eval_shape(translate, params, source)
    >>> ids.shape
    {'batch': 1, 'beam': 3, 'length': 8}
    """

    dims: DimsLike
    feed_forward: Layer | None = None
    norm: type[LayerNorm] | type[RMSNorm] = LayerNorm
    shared_embedding: bool = True
    dropout: float = 0.0
    z_loss: float = 0.0
    smoothing: float = 0.0
    recompute: bool | str = False
    scan: bool = False
    dtype: Any = jnp.float32
    padding: int = 0

    def __post_init__(self) -> None:
        _ = self._dims  # what is wrong with them is said here

    @property
    def _dims(self) -> dict[str, Dim]:
        return pick(self.dims, NAMES, "EncoderDecoder", ["d_ff"] if self.feed_forward else [])

    @property
    def tokens(self) -> Tokens:
        """Tokens of both languages."""
        dims, shared = self._dims, self.shared_embedding
        return Tokens(dims["length"], dims["vocab"], dims["d_model"], shared, self.dtype)

    @property
    def encoder(self) -> Stack:
        return Stack(
            Block(self.last, self._attention(), self._feed_forward, dropout=self.dropout),
            self._dims["layers"], self.recompute, self.scan,
        )  # fmt: skip

    @property
    def decoder(self) -> Stack:
        return Stack(
            Block(
                self.last,
                self._attention(causal=True),
                self._feed_forward,
                cross=self._attention(),
                dropout=self.dropout,
            ),
            self._dims["layers"], self.recompute, self.scan,
        )  # fmt: skip

    @property
    def last(self) -> LayerNorm | RMSNorm:
        """The norm after the last block, and before every sub-layer."""
        return self.norm(self._dims["d_model"])

    @property
    def _feed_forward(self) -> Layer:
        dims = self._dims
        return self.feed_forward or FeedForward(dims["d_model"], dims["d_ff"], dropout=self.dropout)

    def _attention(self, causal: bool = False) -> Attention:
        dims = self._dims
        return Attention(
            dims["d_model"], dims["heads"], dims["d_kv"], causal=causal, dropout=self.dropout
        )

    @under_rules
    def init(self, key: Any) -> Params:
        """Parameters, the same under any rules."""
        tokens, encoder, decoder = jax.random.split(key, 3)
        return {
            "tokens": self.tokens.init(tokens),
            "encoder": self.encoder.init(encoder),
            "encoder_last": self.last.init(),
            "decoder": self.decoder.init(decoder),
            "decoder_last": self.last.init(),
        }

    @under_rules
    def __call__(
        self, params: Params, source: NamedArray, target: NamedArray, *, key: Any = None
    ) -> NamedArray:
        """Logits of the token that follows each one of the target; with a ``key``, with dropout."""
        return self._logits(params, source, target, key)[0]

    @under_rules
    def loss(
        self, params: Params, source: NamedArray, target: NamedArray, *, key: Any = None
    ) -> Any:
        """The mean cross-entropy of every token of the target, a scalar for ``jax.grad``.

        Losses of layers are added.
        """
        before = tokens_before(target, "length", self.padding)
        logits, extra = self._logits(params, source, before, key)
        losses = softmax_cross_entropy(
            logits, target, "vocab", z_loss=self.z_loss, smoothing=self.smoothing
        )
        return (weighted_mean(losses, not_equal(target, self.padding)) + extra).array

    @under_rules
    def encode(
        self, params: Params, source: NamedArray, *, key: Any = None
    ) -> tuple[NamedArray, NamedArray]:
        """What the encoder says of the source, and the losses of its layers."""
        first, rest = (None, None) if key is None else jax.random.split(key)
        x = self._embedded(params, source, first)
        mask = _is_token(source, self.padding)
        x, extra = self.encoder(params["encoder"], x, mask=mask, key=rest)
        return self.last(params["encoder_last"], x), extra

    def _logits(
        self, params: Params, source: NamedArray, target: NamedArray, key: Any
    ) -> tuple[NamedArray, NamedArray]:
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        encoded, extra = self.encode(params, source, key=keys[0])
        x, more = self.decoder(
            params["decoder"],
            self._embedded(params, target, keys[1]),
            memory=self.decoder.keep(params["decoder"], encoded),
            memory_mask=_is_token(source, self.padding),
            key=keys[2],
        )
        x = self.last(params["decoder_last"], x)
        return self.tokens.logits(params["tokens"], x), extra + more

    def _embedded(self, params: Params, tokens: NamedArray, key: Any) -> NamedArray:
        x = self.tokens(params["tokens"], tokens)
        return dropout(x, key, rate=self.dropout) if key is not None and self.dropout else x

    @under_rules
    def stepper(
        self, params: Params, source: NamedArray, length: int, beam: DimsLike = ()
    ) -> tuple[decoding.Step, decoding.States]:
        """A step that goes from one token of the target to the logits of the next, and its states.

        It is what :mod:`decoding` asks for. All beams look at the keys and values of one source.
        """
        self.tokens.check(length)
        encoded, _ = self.encode(params, source)
        memory, mask = (
            self.decoder.keep(params["decoder"], encoded),
            _is_token(source, self.padding),
        )

        def step(ids: NamedArray, at: Any, states: Any) -> tuple[NamedArray, Any]:
            x = self.tokens.step(params["tokens"], ids, at)
            x, states = self.decoder.step(
                params["decoder"], x, states, at, memory=memory, memory_mask=mask
            )
            return self.tokens.logits(
                params["tokens"], self.last(params["decoder_last"], x)
            ), states

        return step, self.decoder.empty((*others(source), *as_dims(beam)), length, self.dtype)

    @under_rules
    def greedy(self, params: Params, source: NamedArray, length: int, **how: Any) -> NamedArray:
        """A target of at most ``length`` tokens, each the likeliest, or drawn at a temperature.

        ``how`` are the options of :func:`decoding.greedy`; ``end`` is the token that ends a target.
        """
        step, states = self.stepper(params, source, length)
        free = decoding.free(others(source), length)
        return decoding.greedy(step, states, free, start=self.padding, **how)

    @under_rules
    def beam_search(
        self, params: Params, source: NamedArray, length: int, beam: str | Dim, **how: Any
    ) -> tuple[NamedArray, NamedArray]:
        """The likeliest targets of at most ``length`` tokens, and their scores.

        ``beam`` is the dim of the results that are looked for, such as ``"beam:4"``; ``how`` are
        the options of :func:`decoding.beam_search`.
        """
        beam = as_dim(beam, "beam")
        step, states = self.stepper(params, source, length, beam)
        free = decoding.free(others(source), length)
        return decoding.beam_search(step, states, free, beam, start=self.padding, **how)


@operation
def _is_token(source: NamedArray, padding: int) -> NamedArray:
    """Where the memory that a source makes may be looked at."""
    return rename(not_equal(source, padding), "length", "memory")
