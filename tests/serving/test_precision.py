"""Weights in fewer bits: near the answers of the model's own, and the difference is known."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from test_server import LAYOUTS, ROWS, build

import meshwright as mw


@pytest.mark.full
@pytest.mark.parametrize(("precision", "near"), [("bfloat16", 0.02), ("int8", 0.05)])
def test_fewer_bits_of_a_run_that_is_followed(precision: str, near: float, tmp_path: Path) -> None:
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), LAYOUTS)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
    strategy.save(model, tmp_path, 1)
    here = strategy.serving(mw.create_mesh({"model": 2, "batch": 4}))
    options = {"build": build, "checkpoint": tmp_path, "sample": {"input": ROWS}, "buckets": [8]}
    with mw.Server(None, here, precision=precision, **options) as server:
        served = server.model("small")
        answer = server.answer({"input": ROWS}).outputs["last"]
        expected = model.predict(ROWS, verbose=0)
        largest = np.abs(answer - expected).max()
        assert 0 < largest < near * np.abs(expected).max()
        assert answer.dtype == "float32"
        (difference,) = served.differences
        assert difference.output == "last"
        assert difference.largest == pytest.approx(largest, rel=1e-3)
        kernel = next(w for w in served.status().weights if w.name.endswith("hidden/kernel"))
        assert (kernel.dtype, kernel.shape) == (precision, (8, 16))
        assert kernel.bytes_per_device == 8 * 8 * (1 if precision == "int8" else 2)

        model.get_layer("last").kernel.assign(model.get_layer("last").kernel * 2.0)
        strategy.save(model, tmp_path, 2)
        shapes = served.forward.shapes
        assert served.reload()
        answer = server.answer({"input": ROWS}).outputs["last"]
        expected = model.predict(ROWS, verbose=0)
        np.testing.assert_allclose(answer, expected, atol=near * np.abs(expected).max())
        assert served.forward.shapes == shapes
