"""The table: each family with its model and batch at a small size, and at real widths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import foreign_transformers as t
import keras
import numpy as np
from keras import layers

ROWS = 8
RULES = {  # of all families; each takes those that are found in its paths
    r"(query|key|value)/kernel": [None, "model", None],
    r"out/kernel": ["model", None, None],
    r"(up|gate|wide|expand)/kernel": [None, "model"],
    r"(down|project)/kernel": ["model", None],
    r"embed/embeddings": ["model", None],
    r"(predictions|head)/kernel": [None, "model"],
    r"conv_preds/kernel": [None, None, None, "model"],
}


@dataclass(frozen=True)
class Family:
    """How a model is built, small or at real widths, and a batch for it."""

    small: Callable[[], keras.Model]
    real: Callable[[], keras.Model]
    rows: int = 64  # of a batch at real widths
    splits: tuple[str, ...] = tuple(RULES)  # the rules that its dims divide for


def _real(config: t.Config, **sizes: Any) -> t.Config:
    return dataclasses.replace(config, **sizes)


def _language_model(
    config: t.Config, splits: tuple[str, ...] = tuple(RULES), **real: Any
) -> Family:
    """Of a small config, and of the same at real widths."""
    return Family(
        lambda: t.language_model(config),
        lambda: t.language_model(_real(config, **real)),
        splits=splits,
    )


def batch_of(model: keras.Model, rows: int) -> tuple[Any, Any]:
    """Random inputs for a model, and classes for its outputs."""
    draw = np.random.default_rng(3)

    def one(tensor: Any) -> np.ndarray:
        dims = (rows, *tensor.shape[1:])
        if "int" in tensor.dtype:
            return draw.integers(0, 64, dims, "int32")
        return draw.normal(size=dims).astype(keras.config.floatx())

    x = keras.tree.map_structure(one, model.input)
    *dims, classes = model.output.shape[1:]
    return x, draw.integers(0, classes, [rows, *dims], "int32")


def shapes_of(model: keras.Model, rows: int) -> tuple[Any, Any]:
    """The same as shapes."""
    import jax

    def one(tensor: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, *tensor.shape[1:]), tensor.dtype)

    *dims, _ = model.output.shape[1:]
    x = keras.tree.map_structure(one, model.input)
    return x, jax.ShapeDtypeStruct((rows, *dims), "int32")


def check_plan(plan: Any) -> None:
    """A plan fits, and no layout with a name that fits is faster by the planner's model."""
    assert plan.verdict in ("fits", "may not fit")
    assert {"data parallel", "FSDP"} <= {*plan.named}
    fit = [option for option in plan.named.values() if option.peak_bytes <= plan.limit_bytes]
    assert all(plan.chosen.time_s <= option.time_s for option in fit)


def convnext(width: int, size: int, classes: int) -> keras.Model:
    """ConvNeXt: depthwise convolution, LayerNorm, two wide products, a scale per channel."""
    images = keras.Input([size, size, 3])
    x = layers.Conv2D(width, 4, strides=4, name="patches")(images)
    x = layers.LayerNormalization()(x)
    for number in range(2):
        y = layers.DepthwiseConv2D(7, padding="same", name=f"deep_{number}")(x)
        y = layers.LayerNormalization()(y)
        y = layers.Dense(4 * width, activation="gelu", name=f"{number}_expand")(y)
        x = x + LayerScale(name=f"scale_{number}")(layers.Dense(width, name=f"{number}_project")(y))
    x = layers.LayerNormalization()(layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, layers.Dense(classes, name="head")(x))


def mixer(width: int, size: int, patch: int, hidden: int, classes: int) -> keras.Model:
    """MLP-Mixer: products over the patches, and products over the channels."""
    images = keras.Input([size, size, 3])
    x = layers.Conv2D(width, patch, strides=patch, name="patches")(images)
    x = layers.Reshape([(size // patch) ** 2, width])(x)
    for number in range(2):
        y = layers.Permute([2, 1])(layers.LayerNormalization()(x))
        y = layers.Dense(hidden // 4, activation="gelu", name=f"patches_{number}_expand")(y)
        y = layers.Dense(x.shape[1], name=f"patches_{number}_project")(y)
        x = x + layers.Permute([2, 1])(y)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(hidden, activation="gelu", name=f"channels_{number}_expand")(y)
        x = x + layers.Dense(width, name=f"channels_{number}_project")(y)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(images, layers.Dense(classes, name="head")(x))


def recommender(rows: int, width: int, lookups: int, hidden: int) -> keras.Model:
    """DLRM: look-ups in a table, numbers, and the products of each two of them."""
    ids = keras.Input([lookups], dtype="int32", name="ids")
    numbers = keras.Input([13], name="numbers")
    dense = layers.Dense(hidden, activation="relu", name="numbers_expand")(numbers)
    dense = layers.Dense(width, activation="relu", name="numbers_project")(dense)
    looked_up = layers.Embedding(rows, width, name="embed")(ids)
    every = layers.Concatenate(axis=1)([looked_up, layers.Reshape([1, width])(dense)])
    pairs = layers.Flatten()(layers.Dot(axes=2)([every, every]))
    x = layers.Concatenate()([pairs, dense])
    x = layers.Dense(hidden, activation="relu", name="pairs_expand")(x)
    x = layers.Dense(hidden // 2, activation="relu", name="pairs_project")(x)
    return keras.Model({"ids": ids, "numbers": numbers}, layers.Dense(2, name="clicked")(x))


class LayerScale(layers.Layer):
    """One learned factor per channel."""

    def build(self, shape: Any) -> None:
        self.gamma = self.add_weight(shape=(shape[-1],), initializer="ones", name="gamma")

    def call(self, x: Any) -> Any:
        return x * self.gamma


def application(name: str, size: int, **options: Any) -> keras.Model:
    make = getattr(keras.applications, name)
    return make(
        weights=None,
        input_shape=(size, size, 3),
        classifier_activation=None,
        **{"classes": 8, **options},
    )


_LARGE = {"width": 4096, "heads": 32, "head_dim": 128, "vocabulary": 32_000, "length": 1024}
FAMILIES = {
    "GPT-2": _language_model(
        t.GPT2, width=1600, heads=25, kv_heads=25, head_dim=64, hidden=6400,
        vocabulary=50_304, length=1024,
        splits=tuple(p for p in RULES if "query" not in p and "out/" not in p),  # 25 heads
    ),
    "BERT": _language_model(
        t.BERT, width=1024, heads=16, kv_heads=16, head_dim=64, hidden=4096,
        vocabulary=30_528, length=512,
    ),
    "Llama": _language_model(t.LLAMA, **_LARGE, kv_heads=8, hidden=14_336),
    "Mistral": _language_model(t.MISTRAL, **_LARGE, kv_heads=8, hidden=14_336, window=512),
    "Gemma": _language_model(
        t.GEMMA, width=2048, heads=8, head_dim=256, hidden=16_384, vocabulary=256_000, length=1024,
        splits=tuple(pattern for pattern in RULES if "query" not in pattern),  # one key, one value
    ),
    "T5": Family(
        lambda: t.seq2seq(t.T5),
        lambda: t.seq2seq(
            _real(t.T5, width=1024, heads=16, kv_heads=16, head_dim=64, hidden=2816,
                  vocabulary=32_128, length=512)
        ),
    ),
    "ViT": Family(
        lambda: t.vision_transformer(t.VIT),
        lambda: t.vision_transformer(
            _real(t.VIT, width=1024, heads=16, kv_heads=16, head_dim=64, hidden=4096),
            size=224, patch=16, classes=1000,
        ),
    ),
    "ConvNeXt": Family(lambda: convnext(8, 16, 8), lambda: convnext(192, 224, 1000)),
    "MobileNet": Family(
        lambda: application("MobileNet", 32, alpha=0.25, dropout=0.0),
        lambda: application("MobileNet", 224, classes=1000),
    ),
}  # fmt: skip
MORE = {
    "Falcon": _language_model(
        t.FALCON, width=4544, heads=71, head_dim=64, hidden=18_176, vocabulary=65_024, length=1024,
        splits=tuple(p for p in RULES if "query" not in p and "out/" not in p),  # 71 heads
    ),
    "Phi": _language_model(
        t.PHI, width=2560, heads=32, kv_heads=32, head_dim=80, hidden=10_240,
        vocabulary=51_200, length=1024,
    ),
    "MLP-Mixer": Family(
        lambda: mixer(8, 8, 4, 16, 8), lambda: mixer(768, 224, 16, 3072, 1000),
    ),
    "DLRM": Family(
        lambda: recommender(64, 8, 4, 16), lambda: recommender(1_000_000, 128, 26, 1024), rows=4096,
    ),
}  # fmt: skip
DEEP = {  # too deep for a step on CPUs here, but not to be dry-run
    "EfficientNetB0": lambda: application("EfficientNetB0", 224),
    "ResNet50V2": lambda: application("ResNet50V2", 224),
}
