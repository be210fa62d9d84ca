"""Layers that compute the first value of a weight from another one while they are built."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw


@keras.saving.register_keras_serializable("meshwright-tests")
class Interpolated(keras.layers.Layer):
    """As position embeddings that are resized to the image, in vision transformers."""

    def __init__(self, resized: Any, **options: Any) -> None:
        super().__init__(**options)
        self.resized = resized

    def build(self, shape: Any) -> None:
        self.stored = self.add_weight(shape=[4, shape[-1]], name="stored", trainable=False)
        self.used = self.add_weight(shape=[8, shape[-1]], initializer="zeros", name="used")
        self.used.assign(self.resized(self.stored))

    def call(self, x: Any) -> Any:
        return x + self.used


def build(resized: Any = lambda stored: keras.ops.repeat(stored, 2, axis=0)) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [Interpolated(resized, name="interpolated"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([8, 2]), *layers])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def values_of(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(weight) for weight in model.weights]


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_value_is_that_of_one_device(is_abstract: bool) -> None:
    mesh = mw.create_mesh({"batch": 4, "model": 2})
    layouts = {"interpolated/used": ["model", None]}
    strategy = mw.Sharded(mesh, layouts, strict=False, zero=3)
    with mw.abstract() if is_abstract else strategy.scope():
        model = build()
    if is_abstract:
        strategy.place(model)
    for expected, value in zip(values_of(build()), values_of(model), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)
    assert mw.fetch_layout(model.layers[0].used.value) == mw.Layout(["model", None], mesh)


def test_a_step_is_planned_of_shapes_only() -> None:
    with mw.abstract():
        model = build()
    batch = np.zeros([8, 8, 2], "float32"), np.zeros([8, 8, 1], "float32")
    strategy = mw.Sharded(mw.Mesh({"batch": 8}))
    report = mw.dry_run(model, batch, strategy=strategy, target="cpu:8", compile=False)
    assert report.peak_bytes > 0


def test_a_value_of_another_shape_is_refused_as_by_keras() -> None:
    with mw.abstract(), pytest.raises(ValueError, match=r"used is \(8, 2\) and not \(4, 2\)"):
        build(lambda stored: stored * 2)
