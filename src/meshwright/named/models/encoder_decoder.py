"""The encoder-decoder Transformer of the Mesh-TensorFlow paper (Shazeer et al. 2018).

The encoder reads the whole source; the decoder writes the target one token after the other, and
looks at what the encoder said. The paper's rules are those of the language model:
``batch:rows;vocab:cols;d_ff:cols;heads:cols``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from ...errors import ModelError
from ...layouts.dim_rules import Dim, DimsLike, as_dims
from ..array import NamedArray, find
from ..elementwise import cast, equal, logical_and, not_equal, where
from ..layers.layer import Params, as_dim, pick, under_rules
from ..layers.losses import softmax_cross_entropy, weighted_mean
from ..layers.multi_head import Attention
from ..layers.positions import RelativeBias
from ..operation import operation
from ..reductions import reduce_sum
from ..shapes import rename
from . import decoding
from .choices import Turns, check_places, in_turn, is_spare, is_training
from .model import Model, keys_for
from .stack import Stack
from .tokens import NAMES, others, tokens_before

_DEPTHS = ["encoder_layers", "decoder_layers"]


@dataclass(frozen=True)
class EncoderDecoder(Model):
    """A translator: how likely every token of a target is, given a source and the tokens before.

    ``dims`` are ``length`` (the most positions, of either), ``vocab`` (of both), ``d_model``,
    ``d_ff``, ``heads``, ``d_kv`` and ``layers`` (of the encoder, and of the decoder; or
    ``encoder_layers`` and ``decoder_layers``). Source and target are whole numbers with the dim
    ``length``, each of its own size; their other dims, such as ``batch``, are the same. The id
    ``padding`` marks empty positions: they are masked in attention and left out of the loss. It is
    also the token before the first of a target.

    ``attention`` replaces self-attention at both ends (the decoder's is made causal), ``cross`` the
    attention of the decoder to what the encoder says. The other choices are those of
    :class:`Transformer`; each end has its own bias by distance. ``smoothing`` is that of
    :func:`softmax_cross_entropy`. Rows may be packed with several pairs: ``source_segments`` and
    ``target_segments`` number them, and a pair has one number in both.

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

    smoothing: float = 0.0
    padding: int = 0
    cross: Turns[Attention] = None

    @property
    def _dims(self) -> dict[str, Dim]:
        apart = [dim for dim in as_dims(self.dims) if dim.name in _DEPTHS]
        no_heads = is_spare(self.attention) and is_spare(self.cross)
        spare = [*self._spare(no_heads), *(["layers"] if len(apart) == 2 else _DEPTHS)]
        return pick(self.dims, (*NAMES, *_DEPTHS) if apart else NAMES, "EncoderDecoder", spare)

    @property
    def encoder(self) -> Stack:
        return self._stack(self._depth("encoder_layers"), causal=False)

    @property
    def decoder(self) -> Stack:
        return self._stack(self._depth("decoder_layers"), True, in_turn(self.cross))

    def _depth(self, layers: str) -> Dim:
        dims = self._dims
        return dims[layers] if layers in dims else dims["layers"]

    def _relative(self, causal: bool) -> RelativeBias | None:
        relative = super()._relative(causal)
        return None if relative is None else replace(relative, causal=causal)

    @under_rules
    def init(self, key: Any) -> Params:
        """Parameters, the same under any rules."""
        tokens, encoder, decoder = jax.random.split(key, 3)
        params = {
            "tokens": self.tokens.init(tokens),
            "encoder": self.encoder.init(encoder),
            "encoder_last": self.last.init(),
            "decoder": self.decoder.init(decoder),
            "decoder_last": self.last.init(),
        }
        for i, end in enumerate(("encoder", "decoder")):
            if (relative := self._relative(end == "decoder")) is not None:
                params[f"{end}_relative"] = relative.init(jax.random.fold_in(key, i + 1))
        return params

    @under_rules
    def __call__(
        self,
        params: Params,
        source: NamedArray,
        target: NamedArray,
        *,
        key: Any = None,
        training: bool | None = None,
        **packed: NamedArray,
    ) -> NamedArray:
        """Logits of the token that follows each one of the target.

        With a ``key`` as in training, with dropout, unless ``training=False``; else as in
        evaluation. ``packed`` are segments and places, as those of :meth:`loss`.
        """
        training = key is not None if training is None else training
        return self._logits(params, source, target, key, training, _Packed(**packed))[0]

    @under_rules
    def loss(
        self,
        params: Params,
        source: NamedArray,
        target: NamedArray,
        *,
        weights: NamedArray | None = None,
        source_segments: NamedArray | None = None,
        target_segments: NamedArray | None = None,
        source_places: NamedArray | None = None,
        target_places: NamedArray | None = None,
        key: Any = None,
        training: bool | None = None,
    ) -> Any:
        """The mean cross-entropy of every token of the target, a scalar for ``jax.grad``.

        ``weights`` say how much each token counts; padding never does. Losses of layers are added.
        Of packed rows, ``source_segments`` and ``target_segments`` say which pair each token is of,
        and ``source_places`` and ``target_places`` where it stands in it. A ``key`` means training,
        unless ``training=False``. Raises :class:`ModelError` if neither is given to a model that
        differs between the two: one with dropout or a mixture of experts.
        """
        differs = [*self.encoder.in_training, *self.decoder.in_training]
        training = is_training(key, training, list(dict.fromkeys(differs)), "EncoderDecoder")
        counted = not_equal(target, self.padding)
        packed = _Packed(
            source_segments, target_segments, source_places, target_places, present=counted
        )
        before = tokens_before(target, "length", self.padding, target_segments)
        logits, extra = self._logits(params, source, before, key, training, packed)
        losses = softmax_cross_entropy(
            logits, target, "vocab", z_loss=self.z_loss, smoothing=self.smoothing
        )
        if weights is not None:
            counted = weights * cast(counted, weights.dtype)
        return (weighted_mean(losses, counted) + extra).array

    @under_rules
    def log_likelihoods(self, params: Params, source: NamedArray, target: NamedArray) -> NamedArray:
        """How likely each target is, given its source: the sum of its tokens' log-probabilities.

        As in evaluation; padding does not count.
        """
        before = tokens_before(target, "length", self.padding)
        logits, _ = self._logits(params, source, before, None, False, _Packed())
        losses = softmax_cross_entropy(logits, target, "vocab")
        return -reduce_sum(where(not_equal(target, self.padding), losses, 0.0), "length")

    @under_rules
    def encode(
        self,
        params: Params,
        source: NamedArray,
        *,
        segments: NamedArray | None = None,
        places: NamedArray | None = None,
        key: Any = None,
        training: bool | None = None,
    ) -> tuple[NamedArray, NamedArray]:
        """What the encoder says of the source, and the losses of its layers."""
        training = key is not None if training is None else training
        check_places(self.positions, segments, places)
        first, rest = keys_for(key, 2)
        x = self._embedded(params, source, places, first if training else None)
        stack, mask = self.encoder, _is_token(source, self.padding)
        length = find(source.dims, "length")
        bias = self._bias(params, "encoder_relative", stack, length, causal=False)
        present = not_equal(source, self.padding)
        x, extra = stack(
            params["encoder"], x, present=present, mask=mask, segments=segments, bias=bias,
            key=rest, training=training,
        )  # fmt: skip
        return self.last(params["encoder_last"], x), extra

    def _logits(
        self,
        params: Params,
        source: NamedArray,
        target: NamedArray,
        key: Any,
        training: bool,
        packed: _Packed,
    ) -> tuple[NamedArray, NamedArray]:
        check_places(self.positions, packed.target_segments, packed.target_places)
        keys = keys_for(key, 3)
        encoded, extra = self.encode(
            params, source, segments=packed.source_segments, places=packed.source_places,
            key=keys[0], training=training,
        )  # fmt: skip
        stack, length = self.decoder, find(target.dims, "length")
        x, more = stack(
            params["decoder"],
            self._embedded(params, target, packed.target_places, keys[1] if training else None),
            memory=stack.keep(params["decoder"], encoded),
            memory_mask=packed.mask(_is_token(source, self.padding)),
            segments=packed.target_segments,
            present=packed.present,
            bias=self._bias(params, "decoder_relative", stack, length, causal=True),
            key=keys[2],
            training=training,
        )
        x = self.last(params["decoder_last"], x)
        return self.tokens.logits(params["tokens"], x), extra + more

    @under_rules
    def stepper(
        self, params: Params, source: NamedArray, length: int, beam: DimsLike = ()
    ) -> tuple[decoding.Step, decoding.States]:
        """A step that goes from one token of the target to the logits of the next, and its states.

        It is what :mod:`decoding` asks for. All beams look at the keys and values of one source.
        """
        self.tokens.check(length)
        encoded, _ = self.encode(params, source)
        memory = self.decoder.keep(params["decoder"], encoded)
        mask = _is_token(source, self.padding)
        bias = self._bias(params, "decoder_relative", self.decoder, None, causal=True)

        def step(ids: NamedArray, at: Any, states: Any) -> tuple[NamedArray, Any]:
            x = self.tokens.step(params["tokens"], ids, at)
            x, states = self.decoder.step(
                params["decoder"], x, states, at, memory=memory, memory_mask=mask, bias=bias
            )
            x = self.last(params["decoder_last"], x)
            return self.tokens.logits(params["tokens"], x), states

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


class _Packed(NamedTuple):
    """Which pair each token is of, and where it stands in it."""

    source_segments: NamedArray | None = None
    target_segments: NamedArray | None = None
    source_places: NamedArray | None = None
    target_places: NamedArray | None = None
    present: NamedArray | None = None  # where the target is no padding, if that is known

    def mask(self, is_token: NamedArray) -> NamedArray:
        """Where the target may look at the source. Raises :class:`ModelError` for half a pair."""
        one, other = self.source_segments, self.target_segments
        if one is None and other is None:
            return is_token
        if one is None or other is None:
            raise ModelError("source_segments= and target_segments= go together.")
        return _same_pair(is_token, one, other)


@operation
def _same_pair(is_token: NamedArray, source: NamedArray, target: NamedArray) -> NamedArray:
    return logical_and(is_token, equal(target, rename(source, "length", "memory")))
