"""Positions, packing and prefixes: models are the same under any rules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_transformer as plain
import pytest

import meshwright as mw
import meshwright.named as mn
from meshwright.named import layers, models

SOFTMAXES = layers.MixtureOfSoftmaxes("vocab:16", "d_model:8", "mixture:3")


# Models: the same under any rules, and step by step.

DIMS = "length:16 vocab:16 d_model:8 d_ff:16 heads:8 d_kv:4 layers:2"
LOCAL = layers.Attention("d_model:8", "heads:8", "d_kv:4", causal=True, radius=3)
EXPERTS = mn.MixtureOfExperts("d_model:8", "d_ff:16", mn.Gating("experts:4", "switch"))
RULES = "batch:rows;vocab:cols;d_ff:cols;heads:cols"
LAYOUTS = [("", {"all": 8}), (RULES, {"rows": 4, "cols": 2}),
           (f"{RULES};d_model:planes", {"rows": 2, "cols": 2, "planes": 2})]  # fmt: skip

TALKING = layers.Attention("d_model:8", "heads:8", "d_kv:4", causal=True, talking=True)
MODELS = {
    "softmaxes": models.Transformer(
        DIMS, attention=TALKING, positions="sinusoid", vocabulary=SOFTMAXES, scan=True
    ),
    "factorized": models.Transformer(
        DIMS,
        positions="rotary",
        vocabulary=layers.FactorizedVocabulary("vocab:16", "inner:2", "d_model:8"),
    ),
    "relative": models.Transformer(DIMS, positions="relative"),
    "rotary": models.Transformer(DIMS, positions="rotary", scan=True),
    "sinusoid": models.Transformer(DIMS, positions="sinusoid"),
    "none": models.Transformer(DIMS, positions="none"),
    "in turn": models.Transformer(
        DIMS, (None, EXPERTS), (None, LOCAL), positions="relative", scan=True, remat=True
    ),
    "in turn, written out": models.Transformer(
        DIMS, (None, EXPERTS), (None, LOCAL), positions="rotary"
    ),
}


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.full)


def ids(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).integers(1, 16, shape)


def laid(tree: Any) -> Any:
    is_named = lambda x: isinstance(x, mn.NamedArray)  # noqa: E731
    return jax.tree.map(lambda x: mn.named(x.array, x.dims), tree, is_leaf=is_named)


def on_all_layouts(loss: Callable[..., Any], params: Any, batch: Any, rules: str = "") -> None:
    """Loss and gradient are those of one device."""
    results = []
    for text, axes in LAYOUTS:
        with mn.rules(f"{text};{rules}" if text else "", mw.create_mesh(axes), strict=False):
            batch_here = {name: mn.named(x.array, x.dims) for name, x in batch.items()}
            step = jax.jit(jax.value_and_grad(lambda params, batch: loss(params, **batch)))
            results.append(jax.tree.leaves(step(laid(params), batch_here)))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=3e-6)


def named(batch: dict[str, np.ndarray]) -> dict[str, mn.NamedArray]:
    return {name: mn.named(x, f"batch:{len(x)} length:{x.shape[1]}") for name, x in batch.items()}


def packed(rows: int = 8) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Texts of several lengths, and rows of them."""
    draw = np.random.default_rng(1)
    texts = [draw.integers(1, 16, n) for n in draw.integers(2, 9, 20)]
    (batch,) = models.pack([{"tokens": text} for text in texts], {"tokens": 16}, rows=rows)
    return texts, {name.replace("tokens_", ""): x for name, x in batch.items()}


def padded(texts: Any, length: int) -> tuple[mn.NamedArray, mn.NamedArray]:
    """A text in each row, and where there is any."""
    rows = np.stack([np.pad(text, [0, length - len(text)]) for text in texts])
    dims = f"batch:{len(texts)} length:{length}"
    return mn.named(rows, dims), mn.named((rows > 0).astype("float32"), dims)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_packed_losses_and_gradients_are_those_of_one_device(name: str) -> None:
    model = MODELS[name]
    rules = "experts:rows" if "in turn" in name else ""
    loss = functools.partial(model.loss, training=True)
    on_all_layouts(loss, plain.parameters(model), named(packed()[1]), rules)


@pytest.mark.parametrize("name", ["relative", slow("in turn, written out")])
def test_a_packed_loss_is_that_of_its_texts(name: str) -> None:
    model = MODELS[name]
    if name != "relative":  # experts take what all texts of a row send
        model = dataclasses.replace(model, feed_forward=None)
    texts, batch = packed()
    params = plain.parameters(model)
    loss = jax.jit(model.loss)
    rows, weights = padded(texts, 8)
    expected = loss(params, rows, weights=weights)
    np.testing.assert_allclose(loss(params, **named(batch)), expected, rtol=1e-5)


def test_a_learned_table_is_looked_up_by_places() -> None:
    model = models.Transformer(DIMS)
    texts, batch = packed()
    params = plain.parameters(model)
    with pytest.raises(mw.ModelError, match="positions='learned' requires places="):
        model(params, mn.named(ids(1, 4), "batch:1 length:4"), segments=mn.named(1, ""))
    rows, weights = padded(texts, 8)
    loss = jax.jit(model.loss)
    expected = loss(params, rows, weights=weights)
    np.testing.assert_allclose(loss(params, **named(batch)), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["relative", *map(slow, ["rotary", "softmaxes", "factorized"]), "in turn, written out"]
)
def test_steps_are_those_of_all_positions_at_once(name: str) -> None:
    model = MODELS[name]
    if "in turn" in name:
        model = dataclasses.replace(model, feed_forward=None)
    params, tokens = plain.parameters(model), ids(2, 16)

    plain.check_steps(model, params, tokens)


def test_without_a_table_there_is_no_limit_and_no_order_with_none() -> None:
    dims = DIMS.replace("length:16 ", "").replace("layers:2", "layers:1")
    model = models.Transformer(dims, positions="none")
    params, tokens = plain.parameters(model), ids(1, 24)
    logits = jax.jit(model)
    swapped = tokens[:, [1, 0, *range(2, 24)]]
    one, other = (
        np.asarray(logits(params, mn.named(x, "batch:1 length:24"))) for x in (tokens, swapped)
    )
    assert "places" not in params["tokens"]
    np.testing.assert_allclose(one[:, 2:], other[:, 2:], rtol=1e-4, atol=1e-5)
    assert abs(one[:, 0] - other[:, 0]).max() > 1e-3
    with pytest.raises(mw.DimError, match="Transformer lacks 'length'"):
        models.Transformer(dims)


def test_padding_takes_no_place_of_an_expert() -> None:
    tight = mn.Gating("experts:4", "switch", min_capacity=2, capacity_factor=0.5)
    model = models.Transformer(
        DIMS, mn.MixtureOfExperts("d_model:8", "d_ff:16", tight), positions="none"
    )
    params, tokens = plain.parameters(model), ids(1, 8)
    segments = np.repeat([0, 1], [4, 4])[None]  # padding comes first, and would be served first
    loss = jax.jit(lambda params, **batch: model.loss(params, training=True, **named(batch)))
    results = [
        float(loss(params, tokens=np.where(segments, tokens, other), segments=segments))
        for other in (0, ids(1, 8) % 3)
    ]
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.full), True])
def test_shared_layers_are_layers_with_the_same_parameters(scan: bool) -> None:
    apart = models.EncoderDecoder(DEPTHS)
    model = dataclasses.replace(apart, shared_layers=True, scan=scan)
    params = plain.parameters(model)
    several = dict(params)
    for end in ("encoder", "decoder"):
        assert list(params[end]) == ["layer_0"]
        several[end] = {f"layer_{i}": params[end]["layer_0"] for i in range(2)}
    several["encoder"].pop("layer_1")
    batch = mn.named(ids(2, 6), "batch:2 length:6"), mn.named(ids(2, 8), "batch:2 length:8")
    result = jax.jit(model.loss)(params, *batch)
    np.testing.assert_allclose(result, jax.jit(apart.loss)(several, *batch), rtol=1e-6)
    both = (jax.jit(lambda p, m=m: m.greedy(p, batch[0], 5).array) for m in (model, apart))
    np.testing.assert_array_equal(next(both)(params), next(both)(several))


# Prefix LM.


@pytest.mark.full
def test_a_prefix_is_seen_by_all_and_has_no_loss() -> None:
    model = models.Transformer(DIMS, positions=layers.RelativeBias("heads:8", 8, 16))
    params, tokens = plain.parameters(model), ids(2, 8)
    batch = mn.named(tokens, "batch:2 length:8")
    counts = mn.named([3, 5], "batch:2")
    loss = jax.jit(model.loss)
    actual = loss(params, batch, prefix=counts)
    mask = mn.named(np.arange(8) < np.array([[3], [5]]), "batch:2 length:8")
    np.testing.assert_array_equal(loss(params, batch, prefix=mask), actual)

    # Beside the plain twin: each position sees those before it and the prefix, moved up by one.
    result = np.tril(np.ones([8, 8], bool)) | (np.arange(8) <= np.array([3, 5])[:, None])[:, None]
    logits = jax.jit(_plain_logits)(plain.bare(params), plain.before(tokens), result)
    expected = plain.cross_entropy(logits, tokens, np.arange(8) >= np.array([[3], [5]]))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def _plain_logits(bare: Any, tokens: Any, seen: Any) -> Any:
    away = np.arange(tokens.shape[1])[None] - np.arange(tokens.shape[1])[:, None]
    bias = jnp.einsum("lmh->hlm", bare["relative"]["table"][plain.t5_bucket(away, False, 8, 16)])
    x = bare["tokens"]["table"][tokens]
    for block in bare["stack"].values():
        y = plain.norm(block["attention_norm"], x)
        q, k, v = (jnp.einsum("bld,dhk->bhlk", y, block["attention"][n])
                   for n in ("query", "key", "value"))  # fmt: skip
        logits = jnp.einsum("bhlk,bhmk->bhlm", q, k) / 2 + bias
        weights = jax.nn.softmax(jnp.where(seen[:, None], logits, -1e30))
        x = x + jnp.einsum("bhlm,bhmk,hkd->bld", weights, v, block["attention"]["output"])
        y = plain.norm(block["feed_forward_norm"], x)
        kernels = block["feed_forward"]
        x = x + jax.nn.relu(y @ kernels["up"]["kernel"]) @ kernels["down"]["kernel"]
    return plain.logits_of(bare["tokens"], plain.norm(bare["last"], x))


def test_a_prefix_is_continued_as_it_was_learned() -> None:
    model = models.Transformer(DIMS, positions=layers.RelativeBias("heads:8", 8, 16))
    params, prompt = plain.parameters(model), mn.named(ids(2, 4), "batch:2 length:4")

    @jax.jit
    def both(params: Any) -> Any:
        actual = model.greedy(params, prompt, 8, prefix=True)
        beams, scores = model.beam_search(params, prompt, 8, "beam:2", prefix=True, alpha=0.0)
        prefix = mn.arange("length:8") <= 4
        logits = model(params, mn.shift(actual, 1, "length"), prefix=prefix)
        best = mn.index(beams, {"beam": 0})
        is_prefix = mn.arange("length:8") < 4
        likely = model.log_likelihoods(
            params, best, prefix=mn.broadcast(is_prefix, "batch:2 length")
        )
        return actual.array, mn.argmax(logits, "vocab").array, scores.array[:, 0], likely.array

    actual, expected, scores, likely = both(params)
    np.testing.assert_array_equal(actual[:, :4], prompt)
    np.testing.assert_array_equal(actual[:, 4:], expected[:, 4:])
    np.testing.assert_allclose(scores, likely, rtol=1e-5)


@pytest.mark.full
def test_log_likelihoods_are_sums_of_losses() -> None:
    model = models.Transformer(DIMS, z_loss=0.1)
    params, tokens = plain.parameters(model), ids(2, 8)
    actual = jax.jit(model.log_likelihoods)(params, mn.named(tokens, "batch:2 length:8"))
    logits = jax.jit(plain.transformer)(plain.bare(params), plain.before(tokens))
    expected = [-8 * plain.cross_entropy(x[None], t[None], jnp.ones([1, 8]))
              for x, t in zip(logits, tokens, strict=True)]  # fmt: skip
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


# The encoder-decoder.

DEPTHS = "length:12 vocab:16 d_model:8 d_ff:16 heads:8 d_kv:4 encoder_layers:1 decoder_layers:2"


def pairs() -> tuple[list[Any], dict[str, np.ndarray]]:
    draw = np.random.default_rng(2)
    sizes = draw.integers(2, 6, [16, 2])
    several = [{"source": draw.integers(1, 16, m), "target": draw.integers(1, 16, n)}
               for m, n in sizes]  # fmt: skip
    (batch,) = models.pack(several, {"source": 12, "target": 12}, rows=8)
    return several, batch


@pytest.mark.parametrize("positions", [slow("learned"), "relative"])
def test_a_packed_pair_is_translated_as_alone(positions: Any) -> None:
    model = models.EncoderDecoder(DEPTHS, positions=positions)
    params = plain.parameters(model)
    assert (len(params["encoder"]), len(params["decoder"])) == (1, 2)
    several, batch = pairs()
    loss = jax.jit(model.loss)

    sources, targets = (padded([p[name] for p in several], 5)[0] for name in ("source", "target"))
    expected = loss(params, sources, targets)
    np.testing.assert_allclose(loss(params, **named(batch)), expected, rtol=1e-5)


@pytest.mark.full
def test_a_packed_translator_is_the_same_on_all_layouts() -> None:
    local = layers.Attention("d_model:8", "heads:8", "d_kv:4", radius=2, multi_query=True)
    model = models.EncoderDecoder(DEPTHS, attention=(None, local), positions="relative")
    batch = named(pairs()[1])
    weights = mn.named(np.linspace(0, 1, 8, dtype="float32"), "batch:8")
    on_all_layouts(model.loss, plain.parameters(model), batch | {"weights": weights})


def test_weights_of_a_translator_count_beside_padding() -> None:
    model = models.EncoderDecoder(DEPTHS)
    params, source, target = plain.parameters(model), ids(2, 6), ids(2, 8)
    target[:, 6:] = 0
    weights = np.array([1.0, 0.25], "float32")
    batch = mn.named(source, "batch:2 length:6"), mn.named(target, "batch:2 length:8")
    likely = np.asarray(jax.jit(model.log_likelihoods)(params, *batch))
    actual = jax.jit(model.loss)(params, *batch, weights=mn.named(weights, "batch:2"))
    np.testing.assert_allclose(actual, -(likely * weights).sum() / 6 / weights.sum(), rtol=1e-5)
    logits = jax.jit(plain.encoder_decoder)(plain.bare(params), source, plain.before(target))
    expected = plain.cross_entropy(logits, target, (target != 0) * weights[:, None])
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("positions", [slow("relative"), slow("rotary")])
def test_a_translator_decodes_with_positions(positions: Any) -> None:
    model = models.EncoderDecoder(DEPTHS, positions=positions)
    params, source = plain.parameters(model), mn.named(ids(2, 6), "batch:2 length:6")

    @jax.jit
    def both(params: Any) -> Any:
        result = model.greedy(params, source, 6)
        before = mn.shift(result, 1, "length")
        return result.array, mn.argmax(model(params, source, before), "vocab").array

    np.testing.assert_array_equal(*both(params))


# What does not fit.


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: layers.RelativeBias("heads:2", buckets=8, furthest=2), "a furthest= above the 2"),
        (lambda: layers.rotated(mn.named(jnp.ones([2, 3]), "length:2 d_kv:3"), mn.arange(
            "length:2")), "the size of 'd_kv:3' must be even"),
        (lambda: models.Transformer(DIMS.replace("layers:2", "layers:3"), (None, EXPERTS),
                                    scan=True).stack, "layers:3 must be a multiple of the 2"),
        (lambda: [*models.pack([{"a": [1, 2, 3]}], {"a": 2})], "'a' has 3 and a row 2"),
        (lambda: [*models.pack([{"a": [1]}], {"b": 2})], r"example 0 has \['a'\] and lacks 'b'"),
        (lambda: [*models.pack([], {"a": 2}, rows=0)], "rows must be at least 1"),
        (lambda: models.EncoderDecoder(DEPTHS.replace("encoder_layers:1 ", "")), "lacks 'layers'"),
        (lambda: LOCAL(LOCAL.init(jax.random.key(0)), mn.named(jnp.ones([4, 8]), "length:4 "
            "d_model:8"), prefix=mn.named(jnp.ones(4), "length:4")), "does not support prefix="),
        (lambda: LOCAL(LOCAL.init(jax.random.key(0)), mn.named(jnp.ones([4, 8]), "length:4 "
            "d_model:8"), bias=mn.named(0.0, "")), "a bias of local attention is a function"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(wrong: Callable[[], Any], says: str) -> None:
    with pytest.raises((mw.DimError, mw.ModelError, mw.DataError), match=says):
        wrong()


def test_packed_rows_hold_every_text_once() -> None:
    draw = np.random.default_rng(3)
    texts = [draw.integers(1, 99, n).tolist() for n in draw.integers(1, 13, 60)]
    batches = [*models.pack([{"x": text} for text in texts], {"x": 12}, rows=4)]
    results = []
    for batch in batches:
        assert all(array.shape == (4, 12) for array in batch.values())
        parts = (batch[f"x{end}"] for end in ("", "_segments", "_places"))
        for tokens, segments, places in zip(*parts, strict=True):
            for number in range(1, segments.max() + 1):
                results.append(tokens[segments == number].tolist())
                np.testing.assert_array_equal(places[segments == number], range(len(results[-1])))
            assert not tokens[segments == 0].any()
    assert sorted(results) == sorted(texts)
    assert len(batches) * 4 * 12 < 1.2 * sum(map(len, texts))


@pytest.mark.parametrize("tokens", [[1.5, 2.0], ["a", "b"], [True]])
def test_tokens_are_whole_numbers(tokens: Any) -> None:
    with pytest.raises(mw.DataError, match=r"example 1: 'x' is of type .*the ids of its tokens"):
        list(models.pack([{"x": []}, {"x": tokens}], {"x": 4}))
    with pytest.raises(mw.DataError, match="example 0: 'x' is of type"):
        list(models.for_each(lambda batch: batch["x"], [{"x": tokens}], {"x": 4}))
