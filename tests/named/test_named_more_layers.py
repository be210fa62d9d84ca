"""Layers beside the usual ones: NumPy's values under any rules, and models of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_transformer as plain
import pytest
from named_laws import USUAL, Case, check, of_each

import meshwright as mw
import meshwright.named as mn
from meshwright.errors import DataError, DimError, ModelError
from meshwright.named import layers, models


def np_softmax(x: Any, axis: Any = -1) -> Any:
    x = np.exp(x - x.max(axis, keepdims=True))
    return x / x.sum(axis, keepdims=True)


# Adaptive softmax: the chance of a word of a tail is that of the tail times its own in there.

ADAPTIVE = layers.AdaptiveVocabulary("vocab:32", "d_model:8", cuts=(8, 16), shrink=2)
TABLES = [
    "vocab:8 d_model:8", "d_model:8 tail:2", "vocab:8 inner:4", "inner:4 d_model:8",
    "vocab:16 inner:2", "inner:2 d_model:8",
]  # fmt: skip


def adaptive(head: Any, tails: Any, table: Any, up: Any, other_table: Any, other_up: Any) -> Any:
    return {
        "head": {"table": head, "tails": tails},
        "tail_1": {"table": table, "up": up},
        "tail_2": {"table": other_table, "up": other_up},
    }


def np_adaptive(x: Any, head: Any, tails: Any, *others: Any) -> Any:
    size = np.sqrt(x.shape[-1])
    first = np_softmax(np.concatenate([x @ head.T / size, x @ tails], -1))
    chances = [first[..., :8]]
    for i in range(2):
        table, up = others[2 * i : 2 * i + 2]
        chances.append(first[..., 8 + i, None] * np_softmax(x @ up.T @ table.T / size))
    return np.log(np.concatenate(chances, -1))


# Attention to rectangles of images, and to means.


def np_images(q: Any, k: Any, v: Any, radii: tuple[int, int], causal: bool) -> Any:
    """Of [height width heads d_kv]."""
    height, width, heads, size = q.shape
    at = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1)
    at = at.reshape(-1, 2)
    actual = (np.abs(at[:, None] - at) <= radii).all(-1)
    if causal:
        actual &= np.tril(np.ones(actual.shape, bool))
    q, k, v = (x.reshape(-1, heads, size) for x in (q, k, v))
    logits = np.einsum("lhk,mhk->hlm", q, k) / np.sqrt(size)
    weights = np_softmax(np.where(actual, logits, -1e30))
    return np.einsum("hlm,mhk->lhk", weights, v).reshape(height, width, heads, size)


def images(radius: Any, causal: bool = False) -> Any:
    return lambda q, k, v: layers.attend_locally(
        q, k, v, radius, length="height width", causal=causal
    )


TALL = 3 * ["height:16 width:8 heads:2 d_kv:4"]
WIDE = 3 * ["height:4 width:32 heads:2 d_kv:4"]
WINDOW = 3
MEANS = layers.CompressedAttention("d_model:8", "heads:8", "d_kv:4", causal=True, window=WINDOW)
KERNELS = ["d_model:8 heads:8 d_kv:4"] * 3 + ["heads:8 d_kv:4 d_model:8"]


def compressed(layer: Any) -> Any:
    names = ("query", "key", "value", "output")
    return lambda x, *kernels: layer(dict(zip(names, kernels, strict=True)), x)


def np_compressed(x: Any, query: Any, key: Any, value: Any, output: Any) -> Any:
    length = x.shape[1]
    means = np.stack(
        [x[:, i : i + WINDOW].mean(1) for i in range(0, length - WINDOW + 1, WINDOW)], 1
    )
    ends = np.arange(means.shape[1]) * WINDOW + WINDOW - 1
    actual = ends <= np.arange(length)[:, None]
    q, k, v = (
        np.einsum("bld,dhk->blhk", y, w) for y, w in ((x, query), (means, key), (means, value))
    )
    weights = np_softmax(np.where(actual, np.einsum("blhk,bmhk->bhlm", q, k) / 2, -1e30))
    weights = weights * actual.any(-1)[:, None]  # the first ones find nothing
    return np.einsum("bhlm,bmhk,hkd->bld", weights, v, output)


# Halting: what every turn gave, weighted with its chance; the last one has the rest.

HALTING = models.Halting("d_model:8", cost=1.0, epsilon=0.1)


def halted(ys: Any, kernel: Any, bias: Any) -> Any:
    params = {"kernel": kernel, "bias": bias}
    turns = mn.unstack(ys, "turns")
    state = HALTING.begun(turns[0])
    for y in turns:
        state = HALTING.turn(params, y, state)
    return HALTING.result(turns[-1], state), HALTING.loss(state)


def np_halted(ys: Any, kernel: Any, bias: Any) -> Any:
    chances = 1 / (1 + np.exp(-(ys @ kernel + bias)))
    output, cost = np.zeros(ys.shape[1:]), 0.0
    for place in np.ndindex(ys.shape[1:-1]):
        left = 1.0
        for turn in range(len(ys)):
            chance = chances[(turn, *place)]
            if left - chance <= 0.1 or turn == len(ys) - 1:
                output[place] += left * ys[(turn, *place)]
                cost += turn + 1 + left
                break
            output[place] += chance * ys[(turn, *place)]
            left -= chance
    return output, cost / np.prod(ys.shape[1:-1])


CASES = [
    Case("adaptive softmax", lambda x, *tables: ADAPTIVE.logits(adaptive(*tables), x),
         np_adaptive, ["batch:8 d_model:8", *TABLES], ["vocab", "batch", "d_model"],
         slopes=tuple(range(7))),
    Case("attend_locally in images", images(2),
         lambda q, k, v: np_images(q, k, v, (2, 2), False), TALL, ["height", "width", "heads"],
         slopes=(0, 1, 2)),
    Case("attend_locally in images, causal", images("height:1 width:3", causal=True),
         lambda q, k, v: np_images(q, k, v, (1, 3), True), WIDE, ["width", "height"],
         slopes=(0, 1, 2)),
    Case("compressed attention", compressed(MEANS), np_compressed,
         ["batch:8 length:8 d_model:8", *KERNELS], ["heads", "batch", "d_model"],
         slopes=(0, 1, 2, 3, 4)),
    Case("halting", halted, np_halted, ["turns:4 batch:8 d_model:8", "d_model:8", ""],
         ["batch", "d_model"], slopes=(0, 1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)


def test_rows_of_an_adaptive_vocabulary_are_those_of_its_clusters() -> None:
    params = ADAPTIVE.init(jax.random.key(0))
    result = np.asarray(ADAPTIVE(params, mn.arange("length:32")))
    parts = [np.asarray(params["head"]["table"])]
    parts += [
        np.asarray(params[tail]["table"]) @ np.asarray(params[tail]["up"])
        for tail in ("tail_1", "tail_2")
    ]
    np.testing.assert_allclose(result, np.concatenate(parts), rtol=1e-5, atol=1e-6)
    logits = ADAPTIVE.logits(params, mn.named(np.ones([3, 8], "float32"), "batch:3 d_model:8"))
    np.testing.assert_allclose(np.exp(logits.array).sum(-1), 1, rtol=1e-5)


def test_an_adaptive_vocabulary_takes_bytes() -> None:
    layer = layers.AdaptiveVocabulary("vocab:300", "d_model:8", cuts=(100,))
    params = layer.init(jax.random.key(0))
    few_bits, enough = (layer(params, mn.arange("length:256", dtype=t)) for t in ("uint8", "int32"))
    np.testing.assert_array_equal(few_bits, enough)


def test_no_array_of_local_attention_in_images_is_of_all_positions_twice() -> None:
    layer = layers.Attention("d_model:8", "heads:2", "d_kv:4", radius=2, length="height width")
    x = jax.ShapeDtypeStruct((32, 32, 8), jnp.float32)
    params = jax.eval_shape(layer.init, jax.random.key(0))
    traced = jax.make_jaxpr(lambda p, x: layer(p, mn.named(x, "height:32 width:32 d_model:8")))(
        params, x
    )
    largest = max(v.aval.size for e in traced.eqns for v in e.outvars)
    assert largest == 2 * 32**2 * 6**2  # of each head: 2 × 2 positions see 6 × 6


def test_padding_has_no_part_in_a_mean() -> None:
    layer = layers.CompressedAttention("d_model:8", "heads:2", "d_kv:4", window=2)
    params = layer.init(jax.random.key(0))
    draw = np.random.default_rng(0)
    x = draw.normal(size=[2, 5, 8]).astype("float32")
    mask = np.arange(5) < [[5], [3]]
    results = [
        layer(
            params, mn.named(np.where(mask[..., None], x, other), "batch:2 length:5 d_model:8"),
            mask=mn.named(mask, "batch:2 memory:5"),
        )
        for other in (0, 7)
    ]  # fmt: skip
    one, other = (np.asarray(y)[mask] for y in results)
    np.testing.assert_allclose(one, other, rtol=1e-5)


# Models.

DIMS = "length:16 vocab:32 d_model:8 d_ff:16 heads:8 d_kv:4 layers:3"
MODELS = {
    "adaptive": models.Transformer(DIMS, vocabulary=ADAPTIVE, positions="rotary"),
    "compressed": models.Transformer(DIMS, attention=MEANS, positions="relative"),
    "compressed, rotary": models.Transformer(DIMS, attention=MEANS, positions="rotary"),
    "halting": models.Transformer(
        DIMS, shared_layers=True, halting=models.Halting("d_model:8", epsilon=0.2), scan=True
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_all_positions_at_once(name: str) -> None:
    model = MODELS[name]
    params, tokens = plain.parameters(model), np.random.default_rng(0).integers(1, 32, [2, 16])

    plain.check_steps(model, params, tokens)


@pytest.mark.full
@pytest.mark.parametrize("name", ["adaptive", "compressed", "halting"])
def test_losses_and_gradients_are_those_of_one_device(name: str) -> None:
    model = MODELS[name]
    params, tokens = plain.parameters(model), np.random.default_rng(0).integers(1, 32, [8, 16])
    step = jax.jit(jax.value_and_grad(model.loss))
    results = []
    for text in ("", "batch:rows;vocab:cols;d_ff:cols;heads:cols"):
        with mn.rules(text, mw.create_mesh({"rows": 4, "cols": 2})):
            own = jax.tree.map(
                lambda x: mn.named(x.array, x.dims),
                params,
                is_leaf=lambda x: isinstance(x, mn.NamedArray),
            )
            results.append(jax.tree.leaves(step(own, mn.named(tokens, "batch:8 length:16"))))
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=3e-6)


def test_halting_after_one_turn_is_no_halting() -> None:
    dims = DIMS.replace("layers:3", "layers:1")
    model = models.Transformer(dims, shared_layers=True, halting=models.Halting("d_model:8", 0.5))
    params = plain.parameters(model)
    tokens = mn.named(np.arange(16)[None] % 7, "batch:1 length:16")
    without = dataclasses.replace(model, halting=None)
    actual, expected = (jax.jit(m.loss)(params, tokens) for m in (model, without))
    np.testing.assert_allclose(
        actual, expected + 0.5 * (1 + 1), rtol=1e-6
    )  # one turn, all the rest


# Files of lines.

LINES = ["1 2 3", "4 5", "6 7 8 9", "10", "11 12"]


def numbers(line: str) -> dict[str, list[int]]:
    return {"source": [int(word) for word in line.split()]}


def test_a_file_is_decoded_line_by_line(tmp_path: Path) -> None:
    model = models.EncoderDecoder("length:8 vocab:16 d_model:8 d_ff:16 heads:2 d_kv:4 layers:1")
    params = plain.parameters(model)
    traced = []

    @jax.jit
    def decode(batch: Any) -> Any:
        traced.append(batch)
        return model.greedy(params, batch["source"], 6, end=3)

    def text(ids: Any) -> str:
        return " ".join(map(str, ids))

    (tmp_path / "in.txt").write_text("\n".join(LINES) + "\n")
    count = models.decode_file(
        decode, tmp_path / "in.txt", tmp_path / "new" / "out.txt",
        encode=numbers, decode=text, lengths={"source": 4}, rows=2, end=3,
    )  # fmt: skip
    result = (tmp_path / "new" / "out.txt").read_text().splitlines()
    assert count == len(result) == 5
    assert len(traced) == 1  # one shape for all batches
    for line, written in zip(LINES, result, strict=True):
        ids = np.zeros([1, 4], int)
        ids[0, : len(line.split())] = [int(word) for word in line.split()]
        expected = np.asarray(model.greedy(params, mn.named(ids, "batch:1 length:4"), 6, end=3))[0]
        expected = expected.tolist()
        assert written == text(expected[: expected.index(3)] if 3 in expected else expected)


def test_a_failure_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("1 2\n1 2 3 4 5\n")
    (tmp_path / "out.txt").write_text("before")
    with pytest.raises(DataError, match="example 1 is too long: 'source' has 5 and a row 4"):
        models.score_file(
            lambda batch: mn.reduce_sum(batch["source"], "length"),
            tmp_path / "in.txt", tmp_path / "out.txt",
            encode=numbers, lengths={"source": 4}, rows=1,
        )  # fmt: skip
    assert (tmp_path / "out.txt").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_is_scored_line_by_line(tmp_path: Path) -> None:
    model = models.Transformer("length:8 vocab:16 d_model:8 d_ff:16 heads:2 d_kv:4 layers:1")
    params = plain.parameters(model)
    (tmp_path / "in.txt").write_text("\n".join(LINES))

    def score(batch: Any) -> Any:
        tokens = batch["source"]
        return model.log_likelihoods(params, tokens, weights=mn.cast(tokens > 0, jnp.float32))

    models.score_file(
        jax.jit(score), tmp_path / "in.txt", tmp_path / "out.txt",
        encode=numbers, lengths={"source": 8}, rows=4,
    )  # fmt: skip
    results = [float(line) for line in (tmp_path / "out.txt").read_text().splitlines()]
    one = [int(word) for word in LINES[2].split()]
    exact = model.log_likelihoods(params, mn.named([one], "batch:1 length:4"))
    assert len(results) == 5
    np.testing.assert_allclose(results[2], exact.array[0], rtol=1e-5)


IMAGE = layers.Attention("d_model:8", "heads:2", "d_kv:4", radius=2, length="height width")


@of_each(
    [
        ("cuts", lambda: layers.AdaptiveVocabulary("vocab:8", "d_model:4", (4, 4)),
         r"cuts must be at least 1, increase and stay below vocab:8; received \(4, 4\)"),
        ("shrink", lambda: layers.AdaptiveVocabulary("vocab:8", "d_model:4", (4,), 0),
         "shrink must be 1 or more"),
        ("a radius of means", lambda: dataclasses.replace(MEANS, radius=2),
         "radius= is not supported; leave it out"),
        ("window", lambda: dataclasses.replace(MEANS, window=0), "window must be 1 or more"),
        ("segments of means",
         lambda: MEANS({}, mn.named(np.ones([4, 8]), "length:4 d_model:8"),
                       segments=mn.arange("length:4")), "does not support segments= or prefix="),
        ("images without a radius", lambda: dataclasses.replace(IMAGE, radius=None),
         "several dims, 'height width', is local and takes a radius="),
        ("a step of images",
         lambda: IMAGE.step({}, mn.named(np.ones(8), "d_model:8"), {}, 0), "steps go along one"),
        ("epsilon", lambda: models.Halting("d_model:8", epsilon=1.0), "epsilon must be"),
    ]
)  # fmt: skip
def test_what_does_not_fit_is_said(call: Any, says: str) -> None:
    with pytest.raises(DimError, match=says):
        call()


def test_halting_takes_shared_layers() -> None:
    with pytest.raises(ModelError, match="takes shared=True"):
        _ = models.Transformer(DIMS, halting=models.Halting("d_model:8")).stack
