"""Models of keras.applications in stages beside one device, in float64: run by hand.

``python tests/stages/applications.py ResNet50 EfficientNetB0`` takes about three minutes for each
on two cores. A step of two unequal stages with two micro-batches is compared with one device that
accumulates over the same two; what differs is rounding, near 1e-15 of each variable.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

import meshwright as mw

# isort: split
import keras  # after Meshwright, which chooses Keras' backend

ROWS, PIXELS, CLASSES = 8, 32, 4
SMALLEST = 1e-3  # what a difference is a share of, for variables that are smaller


def fitted(name: str, strategy: mw.Sharded, batch_size: int) -> tuple[float, dict[str, Any]]:
    """The loss and the variables after one step."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=[ROWS, PIXELS, PIXELS, 3])
    y = draw.integers(0, CLASSES, ROWS)
    keras.utils.clear_session()  # layers have the same names in every build
    keras.utils.set_random_seed(0)
    with strategy.scope():
        build = getattr(keras.applications, name)
        model = build(weights=None, input_shape=(PIXELS, PIXELS, 3), classes=CLASSES)
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy())
    history = strategy.fit(model, x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return history.history["loss"][-1], {v.path: v.numpy() for v in model.weights}


def main(names: list[str]) -> None:
    """Print how far apart both are."""
    mw.virtual_devices(2)
    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    pipeline = mw.Pipeline("stage", micro_batches=2, schedule="1f1b")
    for name in names:
        stages = mw.Sharded(
            mw.create_mesh({"stage": 2}), batch=None, unmatched="replicate", pipeline=pipeline
        )
        alone = mw.create_mesh({"data": 1}, devices=jax.devices()[:1])
        one = mw.Sharded(alone, batch="data", unmatched="replicate", accumulate=2)
        loss, weights = fitted(name, stages, ROWS)
        expected_loss, expected = fitted(name, one, ROWS // 2)
        worst, path = max(
            (float(abs(weights[path] - value).max() / max(SMALLEST, abs(value).max())), path)
            for path, value in expected.items()
        )
        print(f"{name}: losses {loss} and {expected_loss}, largest difference {worst:.1e} ({path})")


if __name__ == "__main__":
    main(sys.argv[1:] or ["ResNet50", "EfficientNetB0"])
