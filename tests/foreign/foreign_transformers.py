"""Transformers as others write them: plain Keras after the published configurations.

Each family is one set of switches over the same few layers, which know nothing of Meshwright.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops


@dataclass(frozen=True)
class Config:
    """What tells one family from another; the sizes are those of a test on CPUs."""

    width: int = 16
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 4
    hidden: int = 32
    vocabulary: int = 64
    length: int = 8
    blocks: int = 2
    norm: str = "layer"  # or "rms", or "rms+1" (Gemma: the weight is an offset from one)
    post_norm: bool = False  # BERT
    gated: str = ""  # the activation of the gate: "silu" (Llama), "gelu" (Gemma)
    positions: str = "learned"  # or "rope", or "relative" (T5), or "none"
    window: int = 0  # Mistral's sliding window
    causal: bool = True
    bias: bool = False
    tied: bool = False
    parallel: bool = False  # Falcon: attention and feed-forward layer read the same
    scaled: bool = False  # Gemma: embeddings times the root of the width


GPT2 = Config(bias=True, tied=True)
BERT = Config(bias=True, post_norm=True, causal=False)
LLAMA = Config(kv_heads=2, norm="rms", gated="silu", positions="rope")
MISTRAL = Config(kv_heads=2, norm="rms", gated="silu", positions="rope", window=4)
GEMMA = Config(
    kv_heads=1, norm="rms+1", gated="gelu", positions="rope", tied=True, scaled=True, head_dim=8
)
FALCON = Config(kv_heads=1, positions="rope", tied=True, parallel=True)
PHI = Config(bias=True, positions="rope", parallel=True)
VIT = Config(bias=True, causal=False, vocabulary=0)
T5 = Config(norm="rms", positions="relative", gated="gelu", tied=True)


class OffsetNorm(layers.Layer):
    """RMS normalization whose weight is an offset from one, as in Gemma."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="zeros", name="scale")

    def call(self, x: Any) -> Any:
        mean = ops.mean(ops.square(x), axis=-1, keepdims=True)
        return x * ops.rsqrt(mean + 1e-6) * (1.0 + self.scale)


class Rotary(layers.Layer):
    """Rotary positions: the halves of each head are rotated by angles that grow with the place."""

    def call(self, x: Any) -> Any:
        length, dim = x.shape[1], x.shape[-1]
        rates = ops.power(10_000.0, -ops.arange(0, dim, 2, dtype=x.dtype) / dim)
        angles = ops.expand_dims(ops.arange(length, dtype=x.dtype), -1) * rates
        angles = ops.concatenate([angles, angles], axis=-1)[None, :, None, :]
        first, second = ops.split(x, 2, axis=-1)
        turned = ops.concatenate([-second, first], axis=-1)
        return x * ops.cos(angles) + turned * ops.sin(angles)


class RelativeBias(layers.Layer):
    """T5's learned bias by the distance of query and key, in buckets that grow with it."""

    def __init__(self, heads: int, buckets: int = 8, **options: Any) -> None:
        super().__init__(**options)
        self.table = layers.Embedding(buckets, heads, name="table")
        self.buckets = buckets

    def call(self, query: Any, key: Any) -> Any:
        distance = np.abs(np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])[None, :])
        buckets = np.minimum(np.log2(distance + 1).astype("int32"), self.buckets - 1)
        return ops.transpose(self.table(ops.convert_to_tensor(buckets)), (2, 0, 1))[None]


class Attention(layers.Layer):
    """Attention with queries in groups over fewer keys and values."""

    def __init__(self, config: Config, causal: bool, **options: Any) -> None:
        super().__init__(**options)
        c, bias = config, {"bias_axes": "hd"} if config.bias else {}
        self.config, self.causal = config, causal
        project = "bsm,mhd->bshd"
        self.query = layers.EinsumDense(project, (None, c.heads, c.head_dim), name="query", **bias)
        self.key = layers.EinsumDense(project, (None, c.kv_heads, c.head_dim), name="key", **bias)
        self.value = layers.EinsumDense(
            project, (None, c.kv_heads, c.head_dim), name="value", **bias
        )
        out_bias = {"bias_axes": "m"} if config.bias else {}
        self.out = layers.EinsumDense("bshd,hdm->bsm", (None, c.width), name="out", **out_bias)
        self.rotary = Rotary() if c.positions == "rope" else None

    def call(self, x: Any, memory: Any = None, bias: Any = None) -> Any:
        c, memory = self.config, x if memory is None else memory
        query, key, value = self.query(x), self.key(memory), self.value(memory)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        key, value = (ops.repeat(heads, c.heads // c.kv_heads, axis=2) for heads in (key, value))
        scores = ops.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(c.head_dim)
        scores = scores if bias is None else scores + bias
        scores = ops.where(self._sees(query.shape[1], key.shape[1]), scores, -1e9)
        return self.out(ops.einsum("bhqk,bkhd->bqhd", ops.softmax(scores), value))

    def _sees(self, queries: int, keys: int) -> Any:
        distance = np.arange(queries)[:, None] - np.arange(keys)[None, :]
        sees = np.ones_like(distance, bool) if not self.causal else distance >= 0
        return sees & (distance < self.config.window) if self.config.window else sees


class FeedForward(layers.Layer):
    """Two products, or three with a gate."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(**options)
        self.up = layers.Dense(config.hidden, use_bias=config.bias, name="up")
        self.gate = (
            layers.Dense(config.hidden, activation=config.gated, use_bias=False, name="gate")
            if config.gated
            else None
        )
        self.down = layers.Dense(config.width, use_bias=config.bias, name="down")

    def call(self, x: Any) -> Any:
        up = self.up(x)
        return self.down(ops.gelu(up) if self.gate is None else self.gate(x) * up)


class Block(layers.Layer):
    """A block of an encoder or a decoder; with ``crosses``, of one that reads another's output."""

    def __init__(self, config: Config, causal: bool, crosses: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.post_norm, self.parallel = config.post_norm, config.parallel
        self.attention = Attention(config, causal, name="attention")
        norms = 1 if config.parallel else 3 if crosses else 2
        self.norms = [norm(config) for _ in range(norms)]
        self.feed_forward = FeedForward(config, name="feed_forward")
        self.cross = Attention(config, causal=False, name="cross") if crosses else None

    def call(self, x: Any, memory: Any = None, bias: Any = None) -> Any:
        if self.parallel:
            normed = self.norms[0](x)
            return x + self.attention(normed) + self.feed_forward(normed)
        x = self._add(0, lambda value: self.attention(value, bias=bias), x)
        if self.cross is not None:
            cross = self.cross
            x = self._add(2, lambda value: cross(value, memory), x)
        return self._add(1, self.feed_forward, x)

    def _add(self, number: int, layer: Any, x: Any) -> Any:
        normed = self.norms[number]
        return normed(x + layer(x)) if self.post_norm else x + layer(normed(x))


class TiedEmbedding(layers.Embedding):
    """A table that gives the embeddings of tokens and, with ``reverse``, the logits of outputs."""

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        if reverse:
            return ops.matmul(inputs, ops.transpose(self.embeddings))
        return super().call(inputs)

    def compute_output_spec(self, inputs: Any, reverse: bool = False) -> Any:
        last = self.input_dim if reverse else self.output_dim
        shape = (*(inputs.shape[:-1] if reverse else inputs.shape), last)
        return keras.KerasTensor(shape, self.compute_dtype)


def norm(config: Config) -> keras.Layer:
    if config.norm == "layer":
        return layers.LayerNormalization()
    return layers.RMSNormalization() if config.norm == "rms" else OffsetNorm()


class Places(layers.Layer):
    """Learned positions."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="normal", name="table")

    def call(self, x: Any) -> Any:
        return x + self.table


class WithClass(layers.Layer):
    """A learned token before the patches of an image."""

    def build(self, shape: Any) -> None:
        self.token = self.add_weight(shape=(1, 1, shape[-1]), initializer="normal", name="token")

    def call(self, x: Any) -> Any:
        rows = ops.zeros_like(x[:, :1]) + self.token
        return ops.concatenate([rows, x], axis=1)


def language_model(c: Config) -> keras.Model:
    """A decoder (or BERT's encoder) over tokens, with the logits of each."""
    tokens = keras.Input([c.length], dtype="int32", name="tokens")
    embed = TiedEmbedding(c.vocabulary, c.width, name="embed")
    x = embed(tokens)
    x = layers.Rescaling(c.width**0.5, name="scale")(x) if c.scaled else x
    x = Places(name="places")(x) if c.positions == "learned" else x
    for number in range(c.blocks):
        x = Block(c, c.causal, name=f"block_{number}")(x)
    head = layers.Dense(c.vocabulary, use_bias=False, name="head")
    x = norm(c)(x)
    return keras.Model(tokens, embed(x, reverse=True) if c.tied else head(x))


def seq2seq(c: Config) -> keras.Model:
    """T5: an encoder, and a decoder that reads it."""
    source = keras.Input([c.length], dtype="int32", name="source")
    target = keras.Input([c.length], dtype="int32", name="target")
    embed = TiedEmbedding(c.vocabulary, c.width, name="embed")
    memory, x = embed(source), embed(target)
    seen, target_bias = (
        RelativeBias(c.heads, name=f"{part}_bias") for part in ("source", "target")
    )
    of_source, of_target = seen(memory, memory), target_bias(x, x)
    for number in range(c.blocks):
        memory = Block(c, causal=False, name=f"encoder_{number}")(memory, bias=of_source)
    for number in range(c.blocks):
        x = Block(c, True, crosses=True, name=f"decoder_{number}")(x, memory, bias=of_target)
    return keras.Model({"source": source, "target": target}, embed(norm(c)(x), reverse=True))


def vision_transformer(c: Config, size: int = 8, patch: int = 4, classes: int = 8) -> keras.Model:
    """ViT: patches by a convolution, a class token, learned positions."""
    images = keras.Input([size, size, 3], name="images")
    x = layers.Conv2D(c.width, patch, strides=patch, name="patches")(images)
    x = layers.Reshape([(size // patch) ** 2, c.width])(x)
    x = Places(name="places")(WithClass(name="class")(x))
    for number in range(c.blocks):
        x = Block(c, causal=False, name=f"block_{number}")(x)
    return keras.Model(images, layers.Dense(classes, name="head")(norm(c)(x)[:, 0]))
