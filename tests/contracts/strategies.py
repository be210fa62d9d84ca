"""The contract table's rows: every kind of strategy and mesh, each with a model that it suits.

A row added here inherits every law of this folder. The models are the smallest that have what the
laws are about: dropout, a bias before BatchNorm, a stride, a recurrent layer, an embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw

BATCH = 16
ROWS = 96  # six batches


@dataclass(frozen=True)
class Subject:
    """A model and its data.

    ``noise`` are the weights whose exact gradient is zero, so that only rounding is left of it, and
    ``follows`` what is computed from them.
    """

    build: Callable[[], keras.Model]
    inputs: Callable[[np.random.Generator, int], np.ndarray]
    noise: tuple[str, ...] = ()  # paths
    follows: tuple[str, ...] = ()

    def data(self, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(7)
        x, y = self.inputs(draw, rows), draw.integers(0, 4, rows)
        return x.astype(keras.config.floatx()) if x.dtype.kind == "f" else x, y


@dataclass(frozen=True)
class Row:
    """One strategy: a mesh by its axes, layouts, how batches lie, and the subject it trains."""

    name: str
    axes: dict[str, int]
    subject: str
    layouts: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: Any = "batch"
    inputs: Any = None
    zero: int = 0
    core: bool = False  # asked with more optimizers
    pipeline: mw.Pipeline | mw.Branches | None = None

    @property
    def is_asked_all(self) -> bool:
        """Whether laws that say nothing of ZeRO are asked of it; two of its rows stand for all."""
        return self.core or not self.zero

    def strategy(self) -> mw.Sharded:
        mesh = mw.create_mesh(self.axes)
        layouts = {
            pattern: specs
            for pattern, specs in self.layouts.items()
            if pattern.startswith(_LAYERS[self.subject])  # a rule that places nothing is an error
        }
        return mw.Sharded(
            mesh,
            layouts,
            batch=self.batch,
            inputs=self.inputs,
            zero=self.zero,
            pipeline=self.pipeline,
        )

    @property
    def of(self) -> Subject:
        return SUBJECTS[self.subject]


def classifier(name: str, inputs: keras.KerasTensor, *layers: keras.layers.Layer) -> keras.Model:
    """Layers, and four classes at the end."""
    output = keras.layers.Dense(4, name="output")
    return keras.Sequential([inputs, *layers, output], name=name)


def mlp(
    name: str, inputs: int, hidden: int, middle: int, activation: str, *norms: keras.layers.Layer
) -> keras.Model:
    layers = keras.layers
    return classifier(
        name,
        keras.Input([inputs]),
        layers.Dense(hidden, activation=activation, name="hidden"),
        *norms,
        layers.Dropout(0.25),
        layers.Dense(middle, activation="tanh", name="middle"),
    )


def dense() -> keras.Model:
    return mlp("dense", 12, 16, 8, "relu")


def images() -> keras.Model:
    layers = keras.layers
    return classifier(
        "images",
        keras.Input([8, 8, 3]),
        layers.Conv2D(8, 3, padding="same", name="conv"),
        layers.BatchNormalization(name="norm", momentum=0.8),
        layers.ReLU(),
        layers.MaxPooling2D(2),
        layers.Conv2D(8, 3, strides=2, padding="same", activation="tanh", name="strided"),
        layers.Flatten(),
    )


def wide() -> keras.Model:
    """Kernels large enough for ZeRO to share them out, a bias and a normalization that are not."""
    norm = keras.layers.BatchNormalization(name="norm", momentum=0.8)
    return mlp("wide", 16, 192, 64, "tanh", norm)


def tokens() -> keras.Model:
    layers = keras.layers
    return classifier(
        "tokens",
        keras.Input([6], dtype="int32"),
        layers.Embedding(16, 8, name="words"),
        layers.LSTM(8, name="lstm"),
    )


def chain(*after: keras.Layer) -> keras.Model:
    """Eight equal blocks between two layers that differ, some of them kernels for ZeRO."""
    layers = keras.layers
    blocks = [layers.Dense(24, activation="tanh", name=f"block{n}") for n in range(8)]
    first = layers.Dense(24, activation="gelu", name="first")
    return classifier("chain", keras.Input([12]), first, *blocks, *after)


def topped() -> keras.Model:
    """The same with a layer after the blocks that takes as many FLOPs as all of them."""
    return chain(keras.layers.Dense(192, activation="gelu", name="top"))


def lines() -> keras.Model:
    """Equal blocks over rows of several positions, which lie in pieces."""
    layers = keras.layers
    blocks = [layers.Dense(8, activation="tanh", name=f"block{n}") for n in range(4)]
    first = layers.Dense(8, activation="gelu", name="first")
    last = layers.GlobalAveragePooling1D()
    return classifier("lines", keras.Input([6, 3]), first, *blocks, last)


def levels() -> keras.Model:
    """Layers of which no two are alike."""
    layers = keras.layers
    widths = (16, 20, 12, 24)
    dense = [layers.Dense(w, activation="tanh", name=f"level{n}") for n, w in enumerate(widths)]
    return classifier("levels", keras.Input([12]), *dense)


def towers() -> keras.Model:
    """Three branches between a layer that all of them read and one that reads all."""
    layers = keras.layers
    inputs = keras.Input([12])
    first = layers.Dense(16, activation="tanh", name="first")(inputs)
    made = [
        layers.Dense(8, name=f"top{n}")(layers.Dense(w, activation="tanh", name=f"tower{n}")(first))
        for n, w in enumerate((24, 16, 8))
    ]
    joined = layers.Concatenate(name="joined")(made)
    return keras.Model(inputs, layers.Dense(4, name="output")(joined), name="towers")


SUBJECTS = {
    "dense": Subject(dense, lambda draw, rows: draw.normal(size=[rows, 12])),
    "images": Subject(
        images,
        lambda draw, rows: draw.normal(size=[rows, 8, 8, 3]),
        noise=("conv/bias",),
        follows=("norm/moving_mean",),
    ),
    "wide": Subject(
        wide,
        lambda draw, rows: draw.normal(size=[rows, 16]),
    ),
    "chain": Subject(chain, lambda draw, rows: draw.normal(size=[rows, 12])),
    "topped": Subject(topped, lambda draw, rows: draw.normal(size=[rows, 12])),
    "lines": Subject(lines, lambda draw, rows: draw.normal(size=[rows, 6, 3])),
    "levels": Subject(levels, lambda draw, rows: draw.normal(size=[rows, 12])),
    "towers": Subject(towers, lambda draw, rows: draw.normal(size=[rows, 12])),
    "tokens": Subject(tokens, lambda draw, rows: draw.integers(0, 16, [rows, 6], "int32")),
}

_SPLIT = {  # first layers by their outputs, last layers by their inputs
    "hidden.*kernel": [None, "model"],
    "hidden.*bias": ["model"],
    "middle.*kernel": ["model", None],
    "conv/kernel": [None, None, None, "model"],
    "strided/kernel": [None, None, "model", None],
    "lstm.*kernel": [None, "model"],
    "lstm.*bias": ["model"],
    "output.*kernel": ["model", None],
}
_FSDP = {  # every kernel in as many pieces as there are replicas
    "conv/kernel": [None, None, None, "batch"],
    "strided/kernel": [None, None, None, "batch"],
    "hidden.*kernel": [None, "batch"],
    "middle.*kernel": [None, "batch"],
    "lstm.*kernel": [None, "batch"],
    "words": ["batch", None],
    "output.*kernel": ["batch", None],
}
_LAYERS = {
    "dense": ("hidden", "middle", "output"),
    "wide": ("hidden", "middle", "output"),
    "images": ("conv", "strided", "output"),
    "tokens": ("words", "lstm", "output"),
    "chain": ("first", "block", "output"),
    "topped": ("first", "block", "top", "output"),
    "lines": ("first", "block", "output"),
    "levels": ("level", "output"),
    "towers": ("first", "tower", "top", "output"),
}
_VOCABULARY = {"words.embeddings": ["model", None]}
_PADDED = {  # 12 and 4 over eight devices; test_padding_laws.py has more of these
    "hidden.*kernel": mw.Layout([("batch", "model"), None], pad=True),
    "output.*kernel": mw.Layout([None, ("model", "batch")], pad=True),
    "output.*bias": mw.Layout([("model", "batch")], pad=True),
}
_MODEL, _EIGHT = {"batch": 4, "model": 2}, {"batch": 8}
_TWO = {"data": 2, "fsdp": 4}


def _over_fsdp(layouts: dict[str, Any]) -> dict[str, Any]:
    return {
        pattern: ["fsdp" if axis == "batch" else axis for axis in axes]
        for pattern, axes in layouts.items()
    }


STRATEGIES = [
    Row("dp8-dense", _EIGHT, "dense", core=True),
    Row("dp8-images", _EIGHT, "images"),
    Row("dp8-tokens", _EIGHT, "tokens"),
    Row("model-dense", _MODEL, "dense", _SPLIT, core=True),
    Row("model-images", _MODEL, "images", _SPLIT),
    Row("model-tokens", _MODEL, "tokens", _SPLIT | _VOCABULARY),
    Row("fsdp-dense", _EIGHT, "dense", _FSDP, core=True),
    Row("fsdp-images", _EIGHT, "images", _FSDP),
    Row("fsdp-tokens", _EIGHT, "tokens", _FSDP),
    Row("data-fsdp-dense", _TWO, "dense", _over_fsdp(_FSDP), batch=("data", "fsdp")),
    Row("data-fsdp-images", _TWO, "images", _over_fsdp(_FSDP), batch=("data", "fsdp")),
    Row("vocabulary-tokens", _MODEL, "tokens", _VOCABULARY, core=True),
    Row(
        "spatial-images",
        {"batch": 2, "rows": 2, "cols": 2},
        "images",
        inputs=["batch", "rows", "cols", None],
        core=True,
    ),
    Row("padded-dense", _MODEL, "dense", _PADDED),
    Row("zero1-wide", _EIGHT, "wide", zero=1, core=True),
    Row("zero2-wide", _EIGHT, "wide", zero=2),
    Row("zero3-wide", _EIGHT, "wide", zero=3),
    Row("zero1-model-wide", _MODEL, "wide", _SPLIT, zero=1),
    Row("zero2-model-wide", _MODEL, "wide", _SPLIT, zero=2),
    Row("zero3-model-wide", _MODEL, "wide", _SPLIT, zero=3, core=True),
    Row("zero3-data-fsdp-wide", _TWO, "wide", batch=("data", "fsdp"), zero=3),
    Row(
        "zero3-spatial-images",
        {"batch": 2, "rows": 2, "cols": 2},
        "images",
        inputs=["batch", "rows", "cols", None],
        zero=3,
    ),
]


_BLOCKS = {"block.*kernel": [None, "model"], "block.*bias": ["model"]}


def _piped(
    name: str,
    axes: dict[str, int],
    pipeline: mw.Pipeline | mw.Branches,
    subject: str = "chain",
    layouts: dict[str, Any] | None = None,
    **options: Any,
) -> Row:
    batch = "data" if "data" in axes else None
    return Row(name, axes, subject, layouts or {}, batch, pipeline=pipeline, **options)


# Every schedule with every number of stages that it has here, and each of them at least once
# beside a data axis, a model axis, ZeRO and pieces of rows; not every pair of these.
PIPELINES = [
    _piped("stage2-gpipe-zero1", {"stage": 2, "data": 4}, mw.Pipeline("stage", 4, "gpipe"), zero=1),
    _piped(
        "stage4-gpipe-model",
        {"stage": 4, "model": 2},
        mw.Pipeline("stage", 4, "gpipe"),
        layouts=_BLOCKS,
    ),
    _piped("stage8-gpipe", {"stage": 8}, mw.Pipeline("stage", 8, "gpipe", remat_stages=False)),
    _piped(
        "stage2-1f1b-model",
        {"stage": 2, "data": 2, "model": 2},
        mw.Pipeline("stage", 4),
        layouts=_BLOCKS,
    ),
    _piped("stage4-1f1b-zero2", {"stage": 4, "data": 2}, mw.Pipeline("stage", 8), zero=2),
    _piped("stage8-1f1b", {"stage": 8}, mw.Pipeline("stage", 16)),
    _piped(  # all stages compute the loss
        "stage4-1f1b-shared-loss", {"stage": 4, "data": 2}, mw.Pipeline("stage", 8), "topped"
    ),
    _piped(
        "stage2-gpipe-shared-loss",
        {"stage": 2, "data": 2, "model": 2},
        mw.Pipeline("stage", 4, "gpipe"),
        "topped",
        _BLOCKS,
        zero=1,
    ),
    _piped(
        "stage2-circular-model",
        {"stage": 2, "data": 2, "model": 2},
        mw.Pipeline("stage", 4, "circular", 2),
        layouts=_BLOCKS,
    ),
    _piped(
        "stage4-circular-zero2",
        {"stage": 4, "data": 2},
        mw.Pipeline("stage", 8, "circular", 2),
        zero=2,
    ),
    _piped(
        "stage2-zero_bubble-zero1",
        {"stage": 2, "data": 4},
        mw.Pipeline("stage", 4, "zero_bubble"),
        zero=1,
    ),
    _piped("stage4-zero_bubble", {"stage": 4, "data": 2}, mw.Pipeline("stage", 8, "zero_bubble")),
    _piped("stage8-zero_bubble", {"stage": 8}, mw.Pipeline("stage", 8, "zero_bubble")),
    _piped(
        "stage2-1f1b-spatial",
        {"stage": 2, "data": 2, "places": 2},
        mw.Pipeline("stage", 4),
        "lines",
        inputs=["data", "places", None],
    ),
    _piped("stage2-unequal", {"stage": 2, "data": 4}, mw.Pipeline("stage", 4), "levels"),
    _piped("branch2-towers", {"branch": 2, "data": 4}, mw.Branches("branch"), "towers"),
]


# What always runs: other rows are marked ``full``.
QUICK = ("model-dense", "spatial-images", "zero3-model-wide")

# Every way to lay weights and batches out once, every subject at least once: for laws about what
# is done with weights that lie so, whatever the step that trains them.
LAYOUTS = (
    "model-dense",
    "dp8-tokens",
    "fsdp-images",
    "data-fsdp-dense",
    "vocabulary-tokens",
    "spatial-images",
    "padded-dense",
)


def rows(
    *, always: tuple[str, ...] | None = None, only: Callable[[Row], bool] = lambda row: True
) -> list[Any]:
    """Every row as a parameter of a test; those outside ``always``, or ``QUICK``, are ``full``."""
    names = QUICK if always is None else always
    return [
        pytest.param(row, id=row.name, marks=() if row.name in names else pytest.mark.full)
        for row in STRATEGIES
        if only(row)
    ]
