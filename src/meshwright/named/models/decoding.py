"""Decoding: one token after the other, by taking the likeliest, by drawing, or by beam search.

Each is one loop of ``jax.lax``, so that all of it is one compiled program. A model gives a step and
the states it starts from: ``step(ids, at, states)`` takes, for every sequence, the token before
position number ``at``; it returns the logits of the token there and the next states, such as the
keys and values that are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import DimError, ModelError
from ...layouts.dim_rules import Dim, DimsLike, as_dims
from ..array import NamedArray, find
from ..elementwise import cast, equal, where
from ..indexing import arange, gather
from ..joining import concat, pad
from ..layers.layer import as_dim, filled, under_rules, without
from ..operation import is_named, operation
from ..ordering import argmax, top_k
from ..random import sample_with_temperature
from ..reductions import log_softmax, reduce_all, reduce_any, reduce_max, reduce_min
from ..shapes import merge_dims, rename

States = Any  # a pytree of named arrays
Step = Callable[[NamedArray, Any, States], tuple[NamedArray, States]]

_NONE = -1e9  # the score of a place in the beam that no sequence has taken


@under_rules
def greedy(
    step: Step,
    states: States,
    forced: NamedArray,
    *,
    temperature: Any = 0.0,
    key: Any = None,
    end: int | None = None,
    start: int = 0,
    length: str = "length",
    vocab: str = "vocab",
) -> NamedArray:
    """Sequences of which every token is the likeliest after those before it.

    ``forced`` holds the tokens that are given, and negative numbers where they are free; its dims
    are those of the result. With a ``temperature`` tokens are drawn by the softmax of the logits
    over it; they depend on ``key``, and never on rules. After ``end`` a sequence holds zeros, and
    when all have ended the loop does too. ``start`` is the token before the first. Raises
    :class:`ModelError` for a temperature without a key.
    """
    drawing = not isinstance(temperature, (int, float)) or temperature != 0
    if drawing and key is None:
        raise ModelError(
            f"temperature={temperature!r} samples tokens and needs a key: key=jax.random.key(0)."
        )
    forced, along = cast(forced, jnp.int32), find(forced.dims, length)
    first = filled(without(forced.dims, [along]), start)

    def unfinished(carry: Any) -> Any:
        at, _, ended, *_ = carry
        return (at < along.size) & ~reduce_all(ended).array

    def next_token(carry: Any) -> Any:
        at, last, ended, ids, states = carry
        logits, states = step(last, at, states)
        if drawing:
            token = sample_with_temperature(jax.random.fold_in(key, at), logits, vocab, temperature)
        else:
            token = argmax(logits, vocab)
        prompted = gather(forced, at, along)
        last = where(prompted >= 0, prompted, where(ended, 0, token))
        ended = ended | _is_end(last, prompted, end)
        return at + 1, last, ended, _written(ids, last, along, at), states

    carry = jnp.int32(0), first, first < 0, filled(forced.dims, 0), states
    _, _, _, ids, _ = jax.lax.while_loop(unfinished, next_token, carry)
    return ids


@under_rules
def beam_search(
    step: Step,
    states: States,
    forced: NamedArray,
    beam: str | Dim,
    *,
    alpha: float = 0.6,
    end: int | None = None,
    start: int = 0,
    stop_early: bool = True,
    length: str = "length",
    vocab: str = "vocab",
) -> tuple[NamedArray, NamedArray]:
    """The likeliest sequences that are found by following the best few, and their scores.

    ``beam`` is the dim of the results, best first, such as ``"beam:4"``; logits and states have it,
    and states are taken along with the sequences that they belong to. A score is the logarithm of
    a sequence's probability over ``((5 + length) / 6) ** alpha`` (Wu et al. 2016). A sequence ends
    after ``end``, and holds zeros from there; or where the length does. From every beam the best
    2 × beam continuations are looked at, so that as many are left when half of them end. With
    ``stop_early`` the loop ends when no sequence that goes on can come among the best: the results
    are the same. Of ``forced`` and ``start`` see :func:`greedy`; tokens that are given count as
    certain, and in the length.
    """
    if alpha < 0:
        raise ModelError(f"alpha={alpha!r} would penalize long sequences twice; give 0 or more.")
    forced, along = cast(forced, jnp.int32), find(forced.dims, length)
    beam = as_dim(beam, "beam")
    per_beam = (*without(forced.dims, [along]), beam)

    def unfinished(carry: Any) -> Any:
        at, _, scores, _, finished, _, _ = carry
        if not stop_early:
            return at < along.size
        reachable = reduce_max(scores, beam) / _penalty(along.size, alpha)
        return (at < along.size) & reduce_any(reachable > reduce_min(finished, beam)).array

    def next_token(carry: Any) -> Any:
        at, last, scores, ids, finished, finished_ids, states = carry
        logits, states = step(last, at, states)
        prompted = gather(forced, at, along)
        score, source, token = _continued(scores, logits, prompted, beam, vocab)
        is_end = _is_end(token, prompted, end) & (score > _NONE / 2)

        ended = where(is_end, score / _penalty(at + 1, alpha), _NONE)
        ended_ids = _written(gather(ids, source, beam), token, along, at)
        finished, finished_ids = _best(beam, [(finished, finished_ids), (ended, ended_ids)])

        scores, best = top_k(where(is_end, _NONE, score), "candidate", beam)
        source, last = gather(source, best, "candidate"), gather(token, best, "candidate")
        ids = _written(gather(ids, source, beam), last, along, at)
        states = _taken_along(states, source, beam)
        return at + 1, last, scores, ids, finished, finished_ids, states

    none, empty = filled(per_beam, _NONE), filled((*per_beam, along), 0)
    begun = where(arange(beam) == 0, 0.0, none, out=per_beam)
    carry = jnp.int32(0), filled(per_beam, start), begun, empty, none, empty, states
    _, _, scores, ids, finished, finished_ids, _ = jax.lax.while_loop(unfinished, next_token, carry)
    cut = where(scores > _NONE / 2, scores / _penalty(along.size, alpha), _NONE)
    scores, ids = _best(beam, [(finished, finished_ids), (cut, ids)])
    return ids, scores


def forced(prompt: NamedArray, length: int) -> NamedArray:
    """The tokens of a prompt, and -1 for what follows, up to ``length`` tokens in all."""
    along = find(prompt.dims, "length")
    if along.size > length:
        raise DimError(f"the prompt has {along}, longer than the maximum of {length} tokens.")
    return pad(cast(prompt, jnp.int32), "length", after=length - along.size, value=-1)


def free(sequences: DimsLike, length: int) -> NamedArray:
    """No token given, for sequences of these dims."""
    return filled((*as_dims(sequences), Dim("length", length)), -1)


@operation
def _continued(
    scores: NamedArray, logits: NamedArray, prompted: NamedArray, beam: Dim, vocab: str
) -> tuple[NamedArray, NamedArray, NamedArray]:
    """The best continuations of all beams, along "candidate": score, beam that it is of, token."""
    words = find(logits.dims, vocab)
    chance = log_softmax(cast(logits, jnp.float32), words)
    chance = where(
        prompted >= 0, where(arange(words) == prompted, 0.0, _NONE), chance, out=logits.dims
    )
    # First the best of every beam, so that a vocabulary that is split stays so.
    few = Dim("few", min(2 * beam.size, words.size))
    score, token = (merge_dims(x, (beam, few), "any") for x in top_k(scores + chance, words, few))
    candidates = Dim("candidate", min(2 * beam.size, beam.size * few.size))
    score, place = top_k(score, "any", candidates)
    return score, place // few.size, gather(token, place, "any")


@operation
def _best(
    beam: Dim, sequences: list[tuple[NamedArray, NamedArray]]
) -> tuple[NamedArray, NamedArray]:
    """The best of these scores and tokens, whether they lie along "candidate" or the beam."""

    def together(xs: tuple[NamedArray, ...]) -> NamedArray:
        return concat(
            [rename(x, beam, "candidate") if beam in x.dims else x for x in xs], "candidate"
        )

    scores, ids = (together(xs) for xs in zip(*sequences, strict=True))
    scores, best = top_k(scores, "candidate", beam)
    return scores, gather(ids, best, "candidate")


@operation
def _taken_along(states: States, source: NamedArray, beam: Dim) -> States:
    """The states of the beams that sequences come from; what has no beam stays."""

    def take(state: Any) -> Any:
        return gather(state, source, beam) if is_named(state) and beam in state.dims else state

    return jax.tree.map(take, states, is_leaf=is_named)


@operation
def _is_end(token: NamedArray, prompted: NamedArray, end: int | None) -> NamedArray:
    """Whether a token ends its sequence; one that was given does not."""
    return equal(token, -1 if end is None else end) & (prompted < 0)


@operation
def _written(ids: NamedArray, token: NamedArray, along: Dim, at: Any) -> NamedArray:
    return where(arange(along) == at, token, ids, out=ids.dims)


def _penalty(length: Any, alpha: float) -> Any:
    return ((5 + length) / 6) ** alpha
