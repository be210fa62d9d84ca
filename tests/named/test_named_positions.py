"""Layers of positions, biases and softmaxes are NumPy's."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from named_laws import USUAL, Case, check
from plain_transformer import t5_bucket

import meshwright.named as mn
from meshwright.named import layers


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_those_of_t5(causal: bool) -> None:
    offsets = np.arange(-200, 201)
    layer = layers.RelativeBias("heads:1", causal=causal)
    expected = t5_bucket(offsets, causal, 32, 128)
    np.testing.assert_array_equal([layer.bucket(int(at)) for at in offsets], expected)
    table = mn.named(np.arange(32.0, dtype="float32")[:, None], "bucket:32 heads:1")
    result = layer({"table": table}, mn.named(offsets, "memory:401"))
    np.testing.assert_array_equal(result.array[:, 0], expected)


BIAS = layers.RelativeBias("heads:8", buckets=8, furthest=16)


def away() -> mn.NamedArray:
    return mn.subtract(mn.arange("memory:16"), mn.arange("length:16"), out="length memory")


def bias_of(table: Any, length: int) -> Any:
    away = np.arange(length)[None] - np.arange(length)[:, None]
    return table[t5_bucket(away, False, 8, 16)]


def turned(x: Any, base: float = 10_000.0) -> Any:
    """Pairs as complex numbers, multiplied by one of the angle."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[-2])[:, None] * base ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


def waves(length: int, size: int) -> Any:
    half = size // 2
    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    return np.concatenate([np.sin(angles), np.cos(angles)], -1)


def attention(q: Any, k: Any, v: Any, bias: Any, seen: Any, scale: float) -> Any:
    """Queries, keys and values [length heads d_kv]; bias [length memory heads]."""
    logits = np.einsum("lhk,mhk->lmh", q, k) * scale + bias
    logits = np.where(seen[:, :, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return np.einsum("lmh,mhk->lhk", weights / weights.sum(1, keepdims=True), v)


def mixed(q: Any, k: Any, v: Any, one: Any, other: Any) -> Any:
    """Heads that talk before the softmax and after it."""
    logits = np.einsum("lmh,ht->lmt", np.einsum("lhk,mhk->lmh", q, k) / 2, one)
    weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return np.einsum("lmt,th,mhk->lhk", weights, other, v)


def talking(q: Any, k: Any, v: Any, one: Any, other: Any) -> Any:
    k, v = (mn.rename(x, "length", "memory") for x in (k, v))
    return layers.attend(q, k, v, talking=(one, other)).transpose("length heads d_kv")


def softmaxes(x: Any, table: Any, prior: Any, heads: Any) -> Any:
    prior = np.exp(x @ prior)
    prior /= prior.sum(-1, keepdims=True)
    logits = np.einsum("bme,ve->bmv", np.tanh(np.einsum("bd,dme->bme", x, heads)), table)
    logits = np.exp(logits / np.sqrt(x.shape[-1]))
    return np.log(np.einsum("bm,bmv->bv", prior, logits / logits.sum(-1, keepdims=True)))


SOFTMAXES = layers.MixtureOfSoftmaxes("vocab:16", "d_model:8", "mixture:3")

PRODUCT_KEYS = layers.ProductKeyMemory("d_model:8", "heads:2", "d_key:4", "keys:8", "best:3")


def read(x: Any, query: Any, left: Any, right: Any, values: Any) -> Any:
    """The best of all pairs of keys, each of which is looked at."""
    queries = np.einsum("bd,dshk->bshk", x, query)
    scores = (np.einsum("bhk,khi->bhi", queries[:, 0], left)[..., :, None]
              + np.einsum("bhk,khj->bhj", queries[:, 1], right)[..., None, :])  # fmt: skip
    scores = scores.reshape(*scores.shape[:2], 64)
    best = np.argsort(-scores, -1)[..., :3]
    weights = np.exp(np.take_along_axis(scores, best, -1))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhn,bhnd->bd", weights, values[best])


SEGMENTS = np.repeat([1, 2, 0], [5, 8, 3])
NEAR = np.abs(np.arange(16)[:, None] - np.arange(16)) <= 3


def biased(q: Any, k: Any, v: Any, table: Any) -> Any:
    bias = BIAS({"table": table}, away())
    k, v = (mn.rename(x, "length", "memory") for x in (k, v))
    result = layers.attend(q, k, v, bias=bias, scale=0.7)
    return result.transpose("length heads d_kv")


def locally(q: Any, k: Any, v: Any, table: Any) -> Any:
    return layers.attend_locally(
        q, k, v, 3,
        bias=functools.partial(BIAS, {"table": table}),
        segments=mn.named(SEGMENTS, "length:16"),
        scale=0.7,
    )  # fmt: skip


HEADS = ["length:16 heads:8 d_kv:4"] * 3 + ["bucket:8 heads:8"]
CASES = [
    Case("relative bias",
         lambda table: BIAS({"table": table}, away()),
         lambda table: bias_of(table, 16), ["bucket:8 heads:8"], ["heads", "length", "memory"]),
    Case("a bias added to products", biased,
         lambda q, k, v, table: attention(q, k, v, bias_of(table, 16), NEAR | True, 0.7),
         HEADS, ["heads", "length", "memory"], slopes=(0, 1, 2, 3),
         gathers="keys and values along the length"),
    Case("a bias and segments of local attention", locally,
         lambda q, k, v, table: attention(
             q, k, v, bias_of(table, 16), NEAR & (SEGMENTS[:, None] == SEGMENTS), 0.7),
         HEADS, ["heads", "length"], slopes=(0, 3)),
    Case("heads that talk", talking, mixed,
         [*HEADS[:3], "heads:8 talkers:8", "talkers:8 heads:8"], ["heads", "memory"],
         slopes=(0, 2, 3, 4)),
    Case("product keys",
         lambda x, query, left, right, values: PRODUCT_KEYS(
             {"query": query, "left": left, "right": right, "values": values}, x),
         read, ["batch:8 d_model:8", "d_model:8 side:2 heads:2 d_key:4", "d_key:4 heads:2 keys:8",
                "d_key:4 heads:2 keys:8", "slot:64 d_model:8"], ["slot", "batch", "heads"],
         slopes=(0, 1, 2, 4)),
    Case("a mixture of softmaxes",
         lambda x, table, prior, heads: SOFTMAXES.logits(
             {"table": table, "prior": prior, "heads": heads}, x),
         softmaxes, ["batch:8 d_model:8", "vocab:16 d_model:8", "d_model:8 mixture:3",
                     "d_model:8 mixture:3 d_model_of_head:8"], ["vocab", "batch", "d_model"],
         slopes=(0, 1, 2, 3)),
    Case("rotation", lambda x: layers.rotated(x, mn.arange("length:8")), turned,
         ["heads:2 length:8 d_kv:8"], ["d_kv", "length", "heads"]),
    Case("rotation by another base", lambda x: layers.rotated(x, mn.arange("length:8"), base=10.0),
         lambda x: turned(x, 10.0), ["heads:2 length:8 d_kv:8"], ["length"]),
    Case("sinusoids", lambda x: x * layers.sinusoids(mn.arange("length:8"), "d_model:16"),
         lambda x: x * waves(8, 16), ["length:8 d_model:16"], ["d_model", "length"]),
]  # fmt: skip


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)
