"""Layers of the named language: each function obeys the laws, each layer is its function."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from named_laws import USUAL, Case, check

import meshwright as mw
import meshwright.named as mn
from meshwright.errors import ArrayError, DimError, ModelError
from meshwright.named import layers

# Functions, under every kind of rules, beside NumPy.


def np_softmax(x: Any) -> Any:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def np_relu(x: Any) -> Any:
    return np.maximum(x, 0)


def np_sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def np_attend(q: Any, k: Any, v: Any, mask: Any = True) -> Any:
    """Of ``[batch length heads d_kv]``; the result is ``[batch heads length d_kv]``."""
    logits = np.einsum("blhd,bmhd->bhlm", q, k) / np.sqrt(q.shape[-1])
    return np.einsum("bhlm,bmhd->bhld", np_softmax(np.where(mask, logits, -1e30)), v)


def band(length: int, radius: int, causal: bool) -> Any:
    away = np.arange(length)[:, None] - np.arange(length)
    return (abs(away) <= radius) & (away >= 0) if causal else abs(away) <= radius


def np_norm(x: Any, centre: bool = True) -> Any:
    x = x - x.mean(-1, keepdims=True) if centre else x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def np_cross_entropy(logits: Any, probabilities: Any, z_loss: float = 0.0) -> Any:
    total = np.log(np.exp(logits).sum(-1))
    return (probabilities * (total[..., None] - logits)).sum(-1) + z_loss * total**2


def np_one_hot(ids: Any, size: int) -> Any:
    return (ids[..., None] == np.arange(size)).astype("float64")


QKV = ["batch:8 length:8 heads:8 d_kv:4"] + 2 * ["batch:8 memory:8 heads:8 d_kv:4"]
LOCAL = 3 * ["batch:2 length:32 heads:2 d_kv:4"]
LOGITS = "batch:8 length:4 vocab:16"


def ids_and(*shape: int) -> Any:
    def make(random: np.random.Generator) -> list[Any]:
        return [random.normal(size=shape).astype("float32"), random.integers(0, 16, [8, 4])]

    return make


CASES = [
    Case("dense", lambda x, w, b: layers.dense(x, w, "d_ff:8", b, mn.relu),
         lambda x, w, b: np_relu(x @ w + b), ["batch:8 d_model:8", "d_model:8 d_ff:8", "d_ff:8"],
         ("d_ff", "batch", "d_model"), slopes=(0, 1, 2)),
    Case("dense of several dims", lambda x, w: layers.dense(x, w, "d_model:8"),
         lambda x, w: np.einsum("bhlk,hkd->bld", x, w),
         ["batch:8 heads:8 length:2 d_kv:4", "heads:8 d_kv:4 d_model:8"],
         ("heads", "batch", "d_model"), slopes=(0, 1)),
    Case("layer_norm", lambda x, s, b: layers.layer_norm(x, "d_model:8", s, b),
         lambda x, s, b: np_norm(x) * s + b, ["batch:8 d_model:8", "d_model:8", "d_model:8"],
         ("d_model", "batch"), slopes=(0, 1, 2)),
    Case("rms_norm", lambda x, s: layers.rms_norm(x, "d_model:8", s),
         lambda x, s: np_norm(x, centre=False) * s, ["batch:8 d_model:8", "d_model:8"],
         ("batch", "d_model"), slopes=(0, 1)),
    Case("embed", lambda t, i: layers.embed(t, i, "vocab"), lambda t, i: t[i],
         ["vocab:16 d_model:8", "batch:8 length:4"], ("vocab", "batch", "d_model"),
         make=ids_and(16, 8)),
    Case("embed by one_hot", lambda t, i: layers.embed(t, i, "vocab", by="one_hot"),
         lambda t, i: t[i], ["vocab:16 d_model:8", "batch:8 length:4"],
         ("vocab", "batch", "d_model"), make=ids_and(16, 8)),
    Case("attend", layers.attend, np_attend, QKV, ("heads", "batch", "length"), slopes=(0, 1, 2)),
    Case("attend to a split memory", layers.attend, np_attend, QKV, ("memory", "batch", "heads"),
         slopes=(0, 1, 2)),
    Case("attend with a mask",
         lambda q, k, v, m: layers.attend(q, k, v, mask=m > 0),
         lambda q, k, v, m: np_attend(q, k, v, (m > 0)[:, None, None]),
         [*QKV, "batch:8 memory:8"], ("heads", "batch", "length"), slopes=(0, 1, 2)),
    Case("attend, multi-query", layers.attend,
         lambda q, k, v: np_attend(q, *(x[:, :, None].repeat(8, 2) for x in (k, v))).swapaxes(1, 2),
         [QKV[0], "batch:8 memory:8 d_kv:4", "batch:8 memory:8 d_kv:4"],
         ("heads", "batch", "length"), slopes=(0, 1, 2)),
    Case("attend_locally", lambda q, k, v: layers.attend_locally(q, k, v, 3),
         lambda q, k, v: np_attend(q, k, v, band(32, 3, False)).swapaxes(1, 2),
         LOCAL, ("length", "batch", "heads"), slopes=(0, 1, 2)),
    Case("attend_locally, causal", lambda q, k, v: layers.attend_locally(q, k, v, 4, causal=True),
         lambda q, k, v: np_attend(q, k, v, band(32, 4, True)).swapaxes(1, 2),
         LOCAL, ("length", "batch", "heads"), slopes=(0, 1, 2)),
    Case("softmax_cross_entropy",
         lambda x, i: layers.softmax_cross_entropy(x, i),
         lambda x, i: np_cross_entropy(x, np_one_hot(i, 16)),
         [LOGITS, "batch:8 length:4"], ("vocab", "batch", "length"), make=ids_and(8, 4, 16)),
    Case("softmax_cross_entropy, z-loss and smoothing",
         lambda x, i: layers.softmax_cross_entropy(x, i, z_loss=0.1, smoothing=0.2),
         lambda x, i: np_cross_entropy(x, 0.8 * np_one_hot(i, 16) + 0.2 / 16, 0.1),
         [LOGITS, "batch:8 length:4"], ("vocab", "batch", "length"), make=ids_and(8, 4, 16)),
    Case("softmax_cross_entropy of probabilities",
         lambda x, p: layers.softmax_cross_entropy(x, mn.softmax(p, "vocab")),
         lambda x, p: np_cross_entropy(x, np_softmax(p)),
         [LOGITS, LOGITS], ("vocab", "batch", "length"), slopes=(0, 1)),
    Case("sigmoid_cross_entropy", layers.sigmoid_cross_entropy,
         lambda x, t: -t * np.log(np_sigmoid(x)) - (1 - t) * np.log(1 - np_sigmoid(x)),
         [LOGITS, LOGITS], ("vocab", "batch", "length"), slopes=(0, 1)),
    Case("weighted_mean", lambda x, w: layers.weighted_mean(x, mn.square(w)),
         lambda x, w: (x * w[:, None] ** 2).sum() / (4 * (w**2).sum()),
         ["batch:8 length:4", "batch:8"], ("batch", "length"), slopes=(0, 1)),
]  # fmt: skip


@pytest.mark.full_for("attend_locally, causal-3-D", "attend_locally-3-D")
@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)


# Layers, each beside its function.


def normal(dims: str, seed: int = 0) -> mn.NamedArray:
    shape = [dim.size for dim in mn.as_dims(dims)]
    return mn.named(np.random.default_rng(seed).normal(size=shape).astype("float32"), dims)


def close(result: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(result), np.asarray(expected), rtol=2e-5, atol=2e-6)


def bare(params: Any) -> list[Any]:
    """The parameters in the order of their names."""
    return [np.asarray(x) for x in jax.tree.leaves(params)]


def test_dense() -> None:
    layer = layers.Dense("heads:2 d_kv:4", "d_model:6", mn.tanh)
    params = layer.init(jax.random.key(0))
    params["bias"] = normal("d_model:6", 1)
    x = normal("batch:3 heads:2 d_kv:4")
    b, w = bare(params)
    close(layer(params, x), np.tanh(np.einsum("bhk,hkd->bd", x, w) + b))
    assert "bias" not in layers.Dense("io:2", "hidden:2", bias=False).init(jax.random.key(0))


GATES = {
    "glu": np_sigmoid,
    "reglu": np_relu,
    "geglu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "swiglu": lambda x: x * np_sigmoid(x),
}


@pytest.mark.parametrize("name", GATES)
def test_a_product_of_dense_layers_is_the_gated_unit_of_its_name(name: str) -> None:
    layer = getattr(layers, name)("d_model:4", "d_ff:6")
    params = layer.init(jax.random.key(0))
    x = normal("batch:3 d_model:4")
    gate, linear = bare(params)
    close(layer(params, x), GATES[name](x.array @ gate) * (x.array @ linear))


@pytest.mark.full_for("activations1")
@pytest.mark.parametrize("activations", [(mn.relu,), (mn.relu, None)])
def test_a_feed_forward_layer_goes_up_and_down(activations: Any) -> None:
    layer = layers.FeedForward("d_model:4", "d_ff:16", activations, dropout=0.5)
    params = layer.init(jax.random.key(0))
    x = normal("batch:3 d_model:4")
    down, *ups = bare(params)
    expected = np_relu(x.array @ ups[0])
    for up in ups[1:]:
        expected = expected * (x.array @ up)
    close(layer(params, x), expected @ down)
    dropped = layer(params, x, key=jax.random.key(1))
    assert not np.allclose(dropped.array, expected @ down)


@pytest.mark.parametrize("kind", [layers.LayerNorm, layers.RMSNorm])
def test_norms_begin_with_a_scale_of_one(kind: Any) -> None:
    layer = kind("d_model:8")
    x = normal("batch:3 d_model:8")
    close(layer(layer.init(), x), np_norm(x.array, centre=kind is layers.LayerNorm))


@pytest.mark.parametrize("by", ["gather", "one_hot"])
def test_an_embedding_gives_zeros_for_what_is_not_in_it(by: Any) -> None:
    layer = layers.Embedding("vocab:5", "heads:2 d_kv:3", by, jnp.bfloat16)
    params = layer.init(jax.random.key(0))
    result = layer(params, mn.named([[3, 0], [-1, 5]], "batch:2 length:2"))
    assert (result.dtype, result.shape) == (
        jnp.bfloat16,
        {"batch": 2, "length": 2, "heads": 2, "d_kv": 3},
    )
    (table,) = bare(params)
    close(result.array[0], table[[3, 0]].astype(jnp.bfloat16))
    assert not result.array[1].any()


def test_norms_and_losses_of_half_precision_are_taken_in_full() -> None:
    x = mn.cast(normal("batch:4 vocab:8") * 100, jnp.bfloat16)
    assert layers.layer_norm(x, "vocab:8").dtype == jnp.bfloat16
    wide = np.asarray(x.array, "float32")
    close(
        layers.softmax_cross_entropy(x, mn.named([0, 1, 2, 3], "batch:4")),
        np_cross_entropy(wide - wide.max(-1, keepdims=True), np_one_hot(np.arange(4), 8)),
    )


def test_sigmoid_cross_entropy_of_large_logits_is_finite() -> None:
    x, t = mn.named([1e4, -1e4], "vocab:2"), mn.named([0.0, 1.0], "vocab:2")
    assert layers.sigmoid_cross_entropy(x, t).array.tolist() == [1e4, 1e4]


def test_a_mean_over_nothing_is_zero() -> None:
    assert float(layers.weighted_mean(normal("batch:4"), mn.named(np.zeros(4), "batch:4"))) == 0
    assert float(layers.weighted_mean(mn.named([], "batch:0"), mn.named([], "batch:0"))) == 0


def test_a_mean_by_weights_of_another_type_or_of_more_dims() -> None:
    weights = mn.named([0.5, 0.25, 0.25], "batch:3")
    for values in ([2, 4, 8], [True, False, True]):
        mean = layers.weighted_mean(mn.named(values, "batch:3"), weights)
        assert float(mean) == np.average(values, weights=weights.array)
    finer = mn.named([[1.0, 0.0], [2.0, 1.0], [0.0, 0.0]], "batch:3 length:2")
    mean = layers.weighted_mean(mn.named([2.0, 4.0, 8.0], "batch:3"), finer)
    assert float(mean) == (2 + 3 * 4) / 4


SCALES = [("inputs", 64), ("outputs", 256), ("both", 160)]


@pytest.mark.parametrize("distribution", ["normal", "truncated_normal", "uniform"])
@pytest.mark.parametrize(("over", "count"), SCALES)
def test_variance_is_scaled_by_name(over: Any, count: int, distribution: Any) -> None:
    make = layers.VarianceScaling(2.0, over, distribution)
    kernel = make(jax.random.key(0), "heads:8 d_kv:8", "d_model:256")
    assert kernel.shape == {"heads": 8, "d_kv": 8, "d_model": 256}
    np.testing.assert_allclose(np.var(kernel.array), 2 / count, rtol=0.05)


# Attention.

SIZES = ("d_model:8", "heads:2", "d_kv:4")


def np_attention(params: Any, x: Any, memory: Any, mask: Any = True) -> Any:
    key, output, query, value = bare(params)
    q, k, v = (
        np.einsum("bld,dhk->blhk", x, w) for x, w in ((x, query), (memory, key), (memory, value))
    )
    return np.einsum("bhlk,hkd->bld", np_attend(q, k, v, mask), output)


@pytest.mark.full_for("1-False", "1-True")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("radius", [None, 1, 3, 9])
def test_attention_to_itself(causal: bool, radius: int | None) -> None:
    """Local attention is whole attention with a band for a mask, for lengths of any size."""
    layer = layers.Attention(*SIZES, causal=causal, radius=radius)
    params = layer.init(jax.random.key(0))
    x, there = normal("batch:2 length:7 d_model:8"), np.arange(7) < [[7], [5]]
    mask = band(7, radius or 7, causal) & there[:, None, None]
    result = jax.jit(layer)(params, x, mask=mn.named(there, "batch:2 memory:7"))
    sees = mask.any(-1)[:, 0]  # what sees nothing finds nothing in particular
    expected = np_attention(params, np.asarray(x), np.asarray(x), mask)
    close(np.asarray(result)[sees], expected[sees])


def test_attention_to_a_memory() -> None:
    layer = layers.Attention(*SIZES)
    params = layer.init(jax.random.key(0))
    x, memory = normal("batch:2 length:5 d_model:8"), normal("batch:2 length:3 d_model:8", 1)
    expected = np_attention(params, np.asarray(x), np.asarray(memory))
    close(layer(params, x, memory), expected)
    close(layer(params, x, mn.named(memory.array, "batch:2 memory:3 d_model:8")), expected)


def test_no_array_of_local_attention_has_the_length_twice() -> None:
    x = jax.eval_shape(lambda: normal("batch:1 length:1024 d_model:8"))
    for radius, largest in ((None, 2 * 1024 * 1024), (16, 2 * 1024 * 48)):
        layer = layers.Attention(*SIZES, radius=radius)
        params = jax.eval_shape(layer.init, jax.random.key(0))
        traced = jax.make_jaxpr(layer)(params, x)
        assert max(v.aval.size for e in traced.eqns for v in e.outvars) == largest


def test_dropout_leaves_weights_out() -> None:
    ones = mn.named(np.ones([4, 64, 1], "float32"), "batch:4 memory:64 d_kv:1")
    query = mn.named(np.ones([4, 1], "float32"), "batch:4 d_kv:1")
    result = layers.attend(query, ones, ones, rate=0.25, key=jax.random.key(0)).array * 64 * 0.75
    assert (np.asarray(result) != 64).all()
    np.testing.assert_allclose(result, result.round(), atol=1e-4)  # how many were kept
    np.testing.assert_allclose(result.mean() / 64, 0.75, atol=0.1)


def test_rules_may_be_given() -> None:
    rules = mn.BoundRules(mn.DimRules("heads:all"), mw.create_mesh({"all": 8}))
    layer = layers.Attention("d_model:8", "heads:8", "d_kv:4")
    params = layer.init(jax.random.key(0), rules=rules)
    assert params["query"].array.sharding.is_equivalent_to(
        rules.layout(params["query"].dims).sharding, 3
    )


# What does not fit.


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (lambda: layers.dense(normal("batch:2 io:3 d_ff:4"), normal("io:5 d:2 d_ff:4"), "d_ff:4"),
         DimError, r"dense does not fit its input \[batch:2 io:3 d_ff:4\]: it lacks d:2; its io:3 "
         "should be io:5; it has d_ff:4 already, which the layer makes. Rename or resize"),
        (lambda: layers.Dense("d_model:4", "d_model:4").init(jax.random.key(0)),
         DimError, "dim 'd_model' appears twice"),
        (lambda: layers.layer_norm(normal("batch:2"), "d_model:4"),
         DimError, "layer_norm does not fit its input .* lacks d_model:4"),
        (lambda: layers.rms_norm(normal("batch:2"), "d_model:4"),
         DimError, "rms_norm does not fit its input .* lacks d_model:4"),
        (lambda: layers.embed(normal("vocab:4 d:2"), normal("batch:3"), "vocab"),
         ArrayError, "not whole numbers"),
        (lambda: layers.embed(normal("vocab:4 d:2"), mn.named([1, 2], "d:2"), "vocab"),
         DimError, "it has d:2 already, which the layer makes"),
        (lambda: layers.embed(normal("vocab:4 d:2"), mn.named([1], "n:1"), "vocab", by="onehot"),
         ModelError, "by must be 'gather' or 'one_hot'; received 'onehot'"),
        (lambda: layers.layer_norm(np.ones([2, 4]), "d:4"),  # type: ignore[arg-type]
         DimError, r"an array of shape \(2, 4\) has no names for its dims"),
        (lambda: attention()(mask=np.ones([5, 5], bool)),
         DimError, r"an array of shape \(5, 5\) has no names for its dims"),
        (lambda: layers.Embedding("vocab:4 words:3", "d_model:2").init(jax.random.key(0)),
         DimError, "vocab is one dim, such as 'd_model:64'; received 'vocab:4 words:3'"),
        (lambda: layers.softmax_cross_entropy(normal("batch:2 vocab:4"), mn.named([1], "length:1")),
         DimError, r"targets \[length:1\] do not fit the logits \[batch:2 vocab:4\]: give class "
         r"numbers of dims \[batch:2\], or probabilities of the logits' dims"),
        (lambda: layers.softmax_cross_entropy(normal("batch:2 vocab:4"), normal("batch:2")),
         DimError, "targets of float32 lack dim 'vocab:4': class numbers are whole numbers"),
        (lambda: layers.softmax_cross_entropy(normal("vocab:4"), mn.named(1, ""), smoothing=10),
         ModelError, "smoothing=10 is the part of the targets to spread, from 0 to 1"),
        (lambda: layers.sigmoid_cross_entropy(normal("batch:2 vocab:4"), normal("classes:4")),
         DimError, r"have classes:4, which the logits \[batch:2 vocab:4\] lack"),
        (lambda: layers.attend_locally(normal("length:4 d_kv:2"), normal("length:4 d_kv:2"),
                                       normal("length:4 d_kv:2"), 0),
         DimError, "radius must be whole numbers, at least 1; received 0"),
        (lambda: layers.attend_locally(normal("length:4 d_kv:2"), normal("memory:4 d_kv:2"),
                                       normal("memory:4 d_kv:2"), 1),
         DimError, r"queries \[length:4 d_kv:2\] have length:4, and so should keys \[memory:4"),
        (lambda: attention(radius=2)(mask=mn.named(np.ones([5, 5], bool), "length:5 memory:5")),
         DimError, r"\[length:5 memory:5\] should have 'memory' and not 'length'"),
        (lambda: layers.Attention(*SIZES)({}, normal("batch:2 time:5 d_model:8")),
         DimError, r"along 'length' or 'memory'; \[batch:2 time:5 d_model:8\] has neither"),
        (lambda: attention().step(at=0),
         DimError, r"of one position: its input \[length:5 d_model:8\] should have no dim"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(wrong: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        wrong()


def attention(**how: Any) -> Any:
    layer = layers.Attention(*SIZES, **how)
    args = layer.init(jax.random.key(0)), normal("length:5 d_model:8")
    call = functools.partial(layer, *args)
    call.step = functools.partial(layer.step, *args, {})  # type: ignore[attr-defined]
    return call
