"""Decoding, beside a search through every sequence of a small vocabulary."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_transformer as plain
import pytest

import meshwright as mw
import meshwright.named as mn
from meshwright.errors import DimError, ModelError
from meshwright.named import models
from meshwright.named.indexing import gather
from meshwright.named.models import decoding

WORDS, LENGTH, MEMORIES, BATCH, END = 3, 4, 5, 2, 2
FREE = decoding.free(f"batch:{BATCH}", LENGTH)


class Tables:
    """A language of tables: the logits of a token follow from its place, the token before, and a
    state that all tokens before have made. A search that mixes up states finds other scores."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.table = (
            random.normal(size=[BATCH, LENGTH, WORDS, MEMORIES, WORDS]).astype("float32") * 2
        )

    def log_probability(self, row: int, sequence: Any) -> float:
        total, last, state = 0.0, 0, 0
        for at, token in enumerate(sequence):
            logits = self.table[row, at, last, state].astype("float64")
            total += logits[token] - np.log(np.exp(logits).sum())
            last, state = token, (3 * state + token + 1) % MEMORIES
        return total


def step(ids: mn.NamedArray, at: Any, states: Any) -> Any:
    """The logits of a language whose table is among the states; and what tokens before have made,
    of which the last is not one yet."""
    state = mn.where(at == 0, 0, (3 * states["made"] + ids + 1) % MEMORIES)
    rows = gather(states["table"], at, "at")
    return gather(rows, ids * MEMORIES + state, "place"), states | {"made": state}


def states_of(table: Any, more: str = "") -> Any:
    dims = mn.as_dims(f"batch:{BATCH} {more}")
    table = table.reshape(BATCH, LENGTH, WORDS * MEMORIES, WORDS)
    return {
        "made": mn.named(jnp.zeros([d.size for d in dims], int), dims),
        "table": mn.named(
            table, f"batch:{BATCH} at:{LENGTH} place:{WORDS * MEMORIES} vocab:{WORDS}"
        ),
    }


def sequences(end: int | None) -> list[tuple[int, ...]]:
    """All that end, at their end, and all of the whole length that do not."""
    results = []
    for size in range(1, LENGTH + 1):
        for sequence in itertools.product(range(WORDS), repeat=size):
            inner = end not in sequence[:-1]
            if inner and (sequence[-1] == end or size == LENGTH):
                results.append(sequence)
    return results


def padded(sequence: tuple[int, ...]) -> list[int]:
    return [*sequence, *[0] * (LENGTH - len(sequence))]


def score(tables: Tables, row: int, sequence: Any, alpha: float) -> float:
    return tables.log_probability(row, sequence) / ((5 + len(sequence)) / 6) ** alpha


@functools.cache
def searching(beams: int, how: Any) -> Any:
    beam = f"beam:{beams}"
    return jax.jit(
        lambda table, given: decoding.beam_search(
            step, states_of(table, beam), given, beam, **dict(how)
        )
    )


def search(tables: Tables, beams: int, forced: Any = FREE, **how: Any) -> Any:
    result = searching(beams, tuple(how.items()))(tables.table, forced)
    return tuple(np.asarray(x) for x in result)


@functools.cache
def taking(how: Any) -> Any:
    return jax.jit(lambda table, given: decoding.greedy(step, states_of(table), given, **dict(how)))


def greedy(tables: Tables, forced: Any = FREE, **how: Any) -> np.ndarray:
    return np.asarray(taking(tuple(how.items()))(tables.table, forced))


@pytest.mark.parametrize(("end", "alpha"), [(END, 0.6), (END, 0.0), (None, 1.0)])
def test_a_wide_beam_finds_the_best_of_all_sequences(end: int | None, alpha: float) -> None:
    tables, count = Tables(), 6
    beams = WORDS ** (LENGTH - 1)  # no sequence is ever left out
    ids, scores = search(tables, beams, end=end, alpha=alpha)
    for row in range(BATCH):
        ranked = sorted(sequences(end), key=lambda s: -score(tables, row, s, alpha))[:count]
        assert ids[row, :count].tolist() == [padded(s) for s in ranked]
        expected = [score(tables, row, s, alpha) for s in ranked]
        np.testing.assert_allclose(scores[row, :count], expected, rtol=1e-5)


def narrow(tables: Tables, row: int, beams: int, alpha: float) -> list[tuple[float, list[int]]]:
    """Beam search in lists of Python."""
    alive: list[tuple[int, ...]] = [()]
    ended: list[tuple[int, ...]] = []
    for _ in range(LENGTH):
        longer = [(*s, token) for s in alive for token in range(WORDS)]
        longer.sort(key=lambda s: -tables.log_probability(row, s))
        best = longer[: 2 * beams]
        ended += [s for s in best if s[-1] == END]
        alive = [s for s in best if s[-1] != END][:beams]
    ranked = sorted(
        ((score(tables, row, s, alpha), padded(s)) for s in ended + alive), reverse=True
    )
    return ranked[:beams]


@pytest.mark.full_for("1-True")
@pytest.mark.parametrize("stop_early", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_narrow_beam_is_that_of_lists(seed: int, stop_early: bool) -> None:
    tables = Tables(seed)
    ids, scores = search(tables, 2, end=END, stop_early=stop_early)
    for row in range(BATCH):
        expected = narrow(tables, row, 2, 0.6)
        assert ids[row].tolist() == [s for _, s in expected]
        np.testing.assert_allclose(scores[row], [x for x, _ in expected], rtol=1e-5)


@pytest.mark.full
def test_a_loop_stops_when_nothing_better_can_come() -> None:
    tables = Tables()
    tables.table[..., END] += 20  # all sequences end at once

    def turns(**how: Any) -> int:
        count = []

        def counted(*args: Any) -> Any:
            jax.debug.callback(lambda: count.append(1))
            return step(*args)

        states = states_of(tables.table, "beam:1")
        result = decoding.beam_search(counted, states, FREE, "beam:1", end=END, **how)
        jax.block_until_ready(result)
        jax.effects_barrier()
        return len(count)

    assert turns() == 1
    assert turns(stop_early=False) == LENGTH


def test_greedy_takes_the_likeliest_token_and_ends_with_zeros() -> None:
    for seed in range(3):
        tables = Tables(seed)
        result = greedy(tables, end=END)
        for row in range(BATCH):
            sequence: tuple[int, ...] = ()
            while len(sequence) < LENGTH and sequence[-1:] != (END,):
                longer = [(*sequence, token) for token in range(WORDS)]
                sequence = max(longer, key=lambda s: tables.log_probability(row, s))
            assert result[row].tolist() == padded(sequence)


def test_a_beam_of_one_is_greedy_where_nothing_ends() -> None:
    tables = Tables()
    np.testing.assert_array_equal(search(tables, 1)[0][:, 0], greedy(tables))


def test_tokens_that_are_given_stay_and_are_certain() -> None:
    tables = Tables()
    forced = mn.named(np.array([[1, -1, 2, -1], [-1, 0, -1, -1]]), f"batch:{BATCH} length:{LENGTH}")
    for result in (
        greedy(tables, forced, end=END),
        *np.moveaxis(search(tables, 2, forced, end=END)[0], 1, 0),
    ):
        assert [result[0, 0], result[0, 2], result[1, 1]] == [1, 2, 0]
    free = decoding.forced(mn.named([[1, 2], [0, 0]], "batch:2 length:2"), LENGTH)
    ids, scores = search(tables, WORDS**2, free)
    for row, begin in enumerate(((1, 2), (0, 0))):
        every = [(*begin, *rest) for rest in itertools.product(range(WORDS), repeat=2)]
        chances = [
            (tables.log_probability(row, s) - tables.log_probability(row, begin)) / (9 / 6) ** 0.6
            for s in every
        ]
        best = np.argsort(chances)[::-1]
        assert ids[row].tolist() == [list(every[i]) for i in best]
        np.testing.assert_allclose(scores[row], np.array(chances)[best], rtol=1e-5)


def test_tokens_are_drawn_with_their_probabilities() -> None:
    chances = np.array([0.2, 0.5, 0.3])
    logits = mn.named(np.log(chances).astype("float32"), "vocab:3")

    def step(ids: Any, at: Any, states: Any) -> Any:
        return mn.where(ids >= 0, logits, 0.0), states

    free = decoding.free("batch:2000", 2)
    draw = jax.jit(lambda key: decoding.greedy(step, (), free, temperature=0.5, key=key))
    counts = np.bincount(np.asarray(draw(jax.random.key(0))).ravel(), minlength=3) / 4000
    expected = chances**2 / (chances**2).sum()  # a temperature of a half
    np.testing.assert_allclose(counts, expected, atol=0.03)


# Models.

DIMS = "length:8 vocab:16 d_model:8 d_ff:16 heads:8 d_kv:4 layers:1"
PAPER = "batch:rows;vocab:cols;d_ff:cols;heads:cols"


@pytest.mark.full
def test_a_model_decodes_the_same_under_the_rules_of_the_paper() -> None:
    model = models.Transformer(DIMS)
    params = plain.parameters(model)
    prompt = mn.named(np.random.default_rng(0).integers(0, 16, [4, 3]), "batch:4 length:3")

    def decode(params: Any, prompt: Any) -> Any:
        drawn = model.greedy(params, prompt, 8, temperature=1.0, key=jax.random.key(1))
        return drawn, *model.beam_search(params, prompt, 8, "beam:2", end=1)

    expected = jax.jit(decode)(params, prompt)
    with mn.rules(PAPER, mw.create_mesh({"rows": 4, "cols": 2})):
        is_named = lambda x: isinstance(x, mn.NamedArray)  # noqa: E731
        params = jax.tree.map(lambda x: mn.named(x.array, x.dims), params, is_leaf=is_named)
        compiled = jax.jit(decode).lower(params, mn.named(prompt, prompt.dims)).compile()
        actual = compiled(params, mn.named(prompt, prompt.dims))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x.array, y.array, rtol=1e-5)
    np.testing.assert_array_equal(actual[0].array[:, :3], prompt.array)


@pytest.mark.full
def test_a_translator_writes_what_it_finds_likeliest() -> None:
    model = models.EncoderDecoder(DIMS)
    params = plain.parameters(model)
    source = mn.named(np.array([[3, 5, 9, 0], [7, 1, 0, 0]]), "batch:2 length:4")
    result = jax.jit(lambda p, s: model.greedy(p, s, 5))(params, source)
    ids, scores = jax.jit(lambda p, s: model.beam_search(p, s, 5, "beam:3", alpha=0.0))(
        params, source
    )
    logits = jax.jit(model)
    written = np.zeros([2, 6], int)
    for at in range(5):
        next_logits = logits(params, source, mn.named(written[:, :5], "batch:2 length:5"))
        written[:, at + 1] = np.asarray(next_logits)[:, at].argmax(-1)
    np.testing.assert_array_equal(result.array, written[:, 1:])

    for i in range(3):  # a score is the probability that the model itself gives
        target = np.asarray(ids)[:, i]
        before = np.pad(target, [(0, 0), (1, 0)])[:, :5]
        next_logits = jax.nn.log_softmax(
            logits(params, source, mn.named(before, "batch:2 length:5")).array
        )
        chance = np.take_along_axis(np.asarray(next_logits), target[..., None], -1).sum((1, 2))
        np.testing.assert_allclose(np.asarray(scores)[:, i], chance, rtol=1e-5)


def test_decoding_is_one_loop() -> None:
    model = models.Transformer(DIMS)
    params = jax.eval_shape(model.init, jax.random.key(0))
    prompt = mn.named(jnp.zeros([2, 1], int), "batch:2 length:1")
    for decode in (model.greedy, model.beam_search):
        beam = {"beam": "beam:2"} if decode == model.beam_search else {}
        traced = jax.make_jaxpr(lambda p: decode(p, prompt, 8, **beam))(params)  # noqa: B023
        assert [str(e.primitive) for e in traced.eqns].count("while") == 1


# What does not fit.


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (lambda: greedy(Tables(), temperature=1.0), ModelError,
         r"temperature=1.0 samples tokens and needs a key: key=jax.random.key\(0\)"),
        (lambda: search(Tables(), 2, alpha=-1.0), ModelError, "alpha=-1.0 .* give 0 or more"),
        (lambda: models.Transformer(DIMS).beam_search({}, mn.named([1], "length:1"), 4, beam=4),
         DimError, "beam is one dim, such as 'd_model:64'; received 4"),
        (lambda: decoding.forced(mn.named([[1, 2]], "batch:1 length:2"), 1), DimError,
         "the prompt has length:2, longer than the maximum of 1 tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(wrong: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        wrong()
