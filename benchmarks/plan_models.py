"""The models that plans are compared on, and the layouts that one would give them by hand.

Data parallel, the same with ZeRO, FSDP (ZeRO of level 3: Rajbhandari et al. 2020), the split of
Megatron-LM (Shoeybi et al. 2019: feed-forward layers and heads by columns and then by rows, the
vocabulary too), and that beside data parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
import paper_sizes

import meshwright as mw  # before Keras: it settles KERAS_BACKEND=jax

Specs = dict[str, Any]


@dataclass(frozen=True)
class Hand:
    """A layout by hand; ``rules`` is a string for programs over named dims."""

    axes: dict[str, int]
    rules: Specs | str = field(default_factory=dict)
    zero: int = 0

    def placement(self) -> mw.Placement:
        mesh = mw.Mesh(self.axes)
        batch = [axis for axis in self.axes if axis == "batch"] or None
        if isinstance(self.rules, str):
            return mw.Placement.of(mesh, rules=self.rules, zero=self.zero)
        return mw.Placement.of(
            mesh, self.rules, batch=batch, zero=self.zero, unmatched="replicate", strict=False
        )


@dataclass(frozen=True)
class Job:
    """A model, one batch of it, and what it is laid out over."""

    what: str
    build: Callable[[], Any]
    batch: Any
    target: str
    by_hand: dict[str, Hand]
    can_remat: bool = False


def shape(*dims: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def usual(devices: int, rules: Specs, *split: tuple[int, int, int]) -> dict[str, Hand]:
    """Data parallel in three ways, and a split over ``(batch, model)`` with a level of ZeRO."""
    found = {
        "data parallel": Hand({"batch": devices}),
        "data parallel, ZeRO 1": Hand({"batch": devices}, zero=1),
        "FSDP": Hand({"batch": devices}, zero=3),
    }
    for batch, model, zero in split:
        name = f"Megatron {model}" + (f" x data {batch}" if batch > 1 else "")
        axes = {"batch": batch, "model": model} if batch > 1 else {"model": model}
        found[name + (f", ZeRO {zero}" if zero else "")] = Hand(axes, rules, zero)
    return found


# A language model in plain JAX: weights are float32, products run in bfloat16


def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype("float32")
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (scaled * gain).astype(x.dtype)


def attended(own: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, own[n].astype(x.dtype)) for n in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k).astype("float32") * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    seen = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores).astype(x.dtype), v)
    return jnp.einsum("bthk,hkd->btd", seen, own["o"].astype(x.dtype))


def block(own: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = x + attended(own, normed(x, own["g1"]))
    h = jax.nn.gelu(normed(x, own["g2"]) @ own["up"].astype(x.dtype))
    return mw.block_output(x + h @ own["down"].astype(x.dtype))


def next_token_loss(
    params: dict[str, Any], ids: jax.Array, block: Callable[..., jax.Array] = block
) -> jax.Array:
    x = params["embed"].astype("bfloat16")[ids] + params["places"].astype("bfloat16")
    for number, own in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{number}"):
            x = block(own, x)
    logits = (normed(x, params["g"]) @ params["head"].astype("bfloat16")).astype("float32")
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1)
    return -jnp.mean(found)


def gpt_shapes(depth: int, width: int, heads: int, length: int, vocab: int = 50304) -> Any:
    head = width // heads
    own = {
        **dict.fromkeys("qkv", shape(width, heads, head)),
        **{"o": shape(heads, head, width), "g1": shape(width), "g2": shape(width)},
        **{"up": shape(width, 4 * width), "down": shape(4 * width, width)},
    }
    ends = {"embed": shape(vocab, width), "head": shape(width, vocab), "g": shape(width)}
    return {**ends, "places": shape(length, width), "blocks": [own] * depth}


def gpt(depth: int, width: int, heads: int, length: int) -> mw.Program:
    params = gpt_shapes(depth, width, heads, length)
    return mw.jax_program(next_token_loss, params, optax.adam(1e-4), name="gpt")


FEED_FORWARD: Specs = {
    "blocks/.*/up": [None, "model"],
    "blocks/.*/down": ["model", None],
    "embed": ["model", None],
    "head": [None, "model"],
}
MEGATRON: Specs = {
    "blocks/.*/[qkv]": [None, "model", None],
    "blocks/.*/o": ["model", None, None],
    **FEED_FORWARD,
}


# Others, in Keras


def mlp() -> Any:
    import keras

    model = keras.Sequential([keras.Input([1024])], name="mlp")
    for width in (8192, 8192, 8192):
        model.add(keras.layers.Dense(width, activation="relu"))
    model.add(keras.layers.Dense(1024))
    model.compile("adam", "mse")
    return model


MLP_SPLIT: Specs = {
    "dense(_2)?/kernel": [None, "model"],
    "dense(_2)?/bias": ["model"],
    "dense_[13]/kernel": ["model", None],
}


def resnet() -> Any:
    import keras

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = keras.applications.ResNet50(weights=None)  # pyright: ignore[reportArgumentType]
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def bert(tokens: int, words: int, width: int, blocks: int, heads: int, name: str) -> Any:
    """An encoder of Keras' own layers that tells two classes apart, not compiled."""
    import keras
    from keras import layers

    ids = keras.Input([tokens], dtype="int32", name="ids")
    x: Any = layers.Embedding(words, width)(ids)
    for _ in range(blocks):
        y = layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = layers.LayerNormalization()(x + y)
        y = layers.Dense(width)(layers.Dense(4 * width, "gelu")(x))
        x = layers.LayerNormalization()(x + y)
    return keras.Model(ids, layers.Dense(2, name="class")(x[:, 0]), name=name)


def recommender(rows: int = 10_000_000, width: int = 64, lookups: int = 26) -> Any:
    import keras

    ids = keras.Input([lookups], dtype="int32", name="ids")
    numbers = keras.Input([13], name="numbers")
    found = keras.layers.Embedding(rows, width, name="table")(ids)
    x = keras.layers.Concatenate()([keras.layers.Flatten()(found), numbers])
    for size in (1024, 512, 256):
        x = keras.layers.Dense(size, activation="relu")(x)
    clicked = keras.layers.Dense(1, activation="sigmoid")(x)
    model = keras.Model([ids, numbers], clicked, name="recommender")
    model.compile("adam", "binary_crossentropy")
    return model


def fresh(build: Callable[[], Any]) -> Callable[[], Any]:
    """The same with names of layers that begin anew."""

    @functools.wraps(build)
    def built() -> Any:
        import keras

        keras.backend.clear_session()
        with mw.abstract():
            return build()

    return built


def _mlp_batch(rows: int) -> Any:
    return shape(rows, 1024), shape(rows, 1024)


def ids(rows: int, length: int) -> jax.ShapeDtypeStruct:
    return shape(rows, length, dtype="int32")


PAPER = paper_sizes.SIZES[5]
TABLE: Specs = {"table/embeddings": ["model", None]}
JOBS = {
    "mlp_64": Job(
        "MLP 1024-8192-8192-8192-1024, 64 rows", fresh(mlp), _mlp_batch(64), "h100:8",
        usual(8, MLP_SPLIT, (1, 8, 0), (2, 4, 1)),
    ),
    "mlp_4096": Job(
        "the same, 4,096 rows", fresh(mlp), _mlp_batch(4096), "h100:8",
        usual(8, MLP_SPLIT, (1, 8, 0), (2, 4, 1), (4, 2, 1)),
    ),
    "resnet_50": Job(
        "ResNet-50, 512 images, bfloat16", fresh(resnet),
        (shape(512, 224, 224, 3), shape(512, dtype="int32")), "h100:8",
        usual(8, {"conv.*/kernel": [None, None, None, "model"]}, (4, 2, 1)),
    ),
    "gpt2_h100": Job(
        "GPT-2 1.5B, 128 x 1,024 tokens", lambda: gpt(48, 1600, 25, 1024), ids(128, 1024),
        "h100:8", usual(8, FEED_FORWARD, (1, 8, 0), (4, 2, 1)), can_remat=True,
    ),
    "gpt2_v5e": Job(
        "GPT-2 1.5B, 128 x 1,024 tokens", lambda: gpt(48, 1600, 25, 1024), ids(128, 1024),
        "v5e:4x4", usual(16, FEED_FORWARD, (1, 16, 0), (4, 4, 1), (4, 4, 3)), can_remat=True,
    ),
    "gpt_13b_v5p": Job(
        "GPT 13B, 1,024 x 2,048 tokens", lambda: gpt(40, 5120, 40, 2048), ids(1024, 2048),
        "v5p:8x8x8", usual(512, MEGATRON, (64, 8, 1), (64, 8, 3)), can_remat=True,
    ),
    "gpt_13b_h200": Job(
        "GPT 13B, 1,024 x 2,048 tokens", lambda: gpt(40, 5120, 40, 2048), ids(1024, 2048),
        "h200:8x8", usual(64, MEGATRON, (8, 8, 1), (8, 8, 3)), can_remat=True,
    ),
    "paper_4.9b": Job(
        "4.9B of the Mesh-TensorFlow paper, 256 x 256 tokens",
        lambda: paper_sizes.language_model(5), paper_sizes.BATCH, "v2:16x16",
        {
            "the paper's": Hand(PAPER.axes, PAPER.rules),
            "the paper's, ZeRO 1": Hand(PAPER.axes, PAPER.rules, zero=1),
            "Megatron 2 x FSDP 256": Hand({"batch": 256, "model": 2}, PAPER.rules, zero=3),
        },
    ),
    "recommender": Job(
        "recommender, a table of 10M x 64, 16,384 rows of 26 look-ups", fresh(recommender),
        ((ids(16384, 26), shape(16384, 13)), shape(16384, 1)), "h100:8",
        {
            **usual(8, TABLE, (1, 8, 0), (2, 4, 1)),
            "table by rows, data parallel": Hand(
                {"batch": 8}, {"table/embeddings": ["batch", None]}
            ),
        },
    ),
}  # fmt: skip
