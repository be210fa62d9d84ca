"""The digits every side trains on, the same bytes for all, and the initial weights.

Run alone it writes them to ``benchmarks/.cache/digits.npz``; needs NumPy, and Meshwright where no
path is given.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from settings import JOBS, SEED, Job

CACHE = Path(__file__).parent / ".cache" / "digits.npz"


def prepare(source: str | None = None) -> Path:
    """Write the digits that the jobs need, from an ``mnist.npz`` or from those shipped with us."""
    if source is None:
        from meshwright.data.datasets import shipped_subset

        shipped = shipped_subset()  # the same on every machine, with and without a network
        x, y = shipped.x_train, shipped.y_train
    else:
        with np.load(source) as arrays:
            x, y = arrays["x_train"], arrays["y_train"]
    wanted = max(job.examples for job in JOBS.values())
    if len(x) < wanted:
        sys.exit(f"{len(x)} digits, and the jobs need {wanted}.")
    CACHE.parent.mkdir(exist_ok=True)
    np.savez(CACHE, x=x[:wanted].astype("float32") / 255, y=y[:wanted].astype("int32"))
    return CACHE


def load(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Images, float32 [n, 784] or [n, 28, 28, 1], and labels, int32 [n]."""
    if not CACHE.exists():
        sys.exit(f"No digits in {CACHE}: run `python {Path(__file__).name}` beside it first.")
    with np.load(CACHE) as arrays:
        x, y = arrays["x"][: job.examples], arrays["y"][: job.examples]
    return x.reshape(len(x), *input_shape(job)), y


def input_shape(job: Job) -> tuple[int, ...]:
    return (784,) if job.network == "mlp" else (28, 28, 1)


def orders(job: Job) -> list[np.ndarray]:
    """For each epoch, the order of the examples: the one that Keras' shuffle takes as well.

    Keras draws it from NumPy's global generator, which the Keras sides seed as training begins.
    """
    generator = np.random.RandomState(SEED)
    return [generator.permutation(job.examples) for _ in range(job.epochs)]


def initial_weights(job: Job) -> dict[str, np.ndarray]:
    """Path -> value, in the order of the layers: Glorot uniform kernels and zero biases."""
    generator = np.random.default_rng(SEED)
    weights: dict[str, Any] = {}
    for path, shape in _kernel_shapes(job).items():
        fan_in, fan_out = int(np.prod(shape[:-1])), int(np.prod(shape[:-2])) * shape[-1]
        limit = np.sqrt(6 / (fan_in + fan_out))
        weights[f"{path}/kernel"] = generator.uniform(-limit, limit, shape).astype("float32")
        weights[f"{path}/bias"] = np.zeros(shape[-1], "float32")
    return weights


def _kernel_shapes(job: Job) -> dict[str, tuple[int, ...]]:
    if job.network == "mlp":
        return {"hidden": (784, 128), "output": (128, 10)}
    return {
        "conv_a": (3, 3, 1, 32),
        "conv_b": (3, 3, 32, 64),
        "conv_c": (3, 3, 64, 128),
        "hidden": (7 * 7 * 128, 128),
        "output": (128, 10),
    }


if __name__ == "__main__":
    print(prepare(*sys.argv[1:2]))
