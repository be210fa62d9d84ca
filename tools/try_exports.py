"""Write models in every format, load them by what reads it, and compare numbers.

``python tools/try_exports.py FOLDER...`` looks for TensorFlow, jax2onnx and ONNX Runtime in these
folders too, behind the installed packages: ``pip install --target FOLDER --no-deps`` fills one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path += sys.argv[1:]

import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np

import meshwright as mw
from meshwright.serving.exporting import FORMATS, export

Call = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def net() -> mw.Server:
    """Convolutions and batch statistics."""
    layers = keras.layers
    image = keras.Input([8, 8, 1], name="image")
    x: Any = layers.BatchNormalization()(layers.Conv2D(4, 3, activation="relu")(image))
    digit = layers.Dense(3, "softmax", name="digit")(layers.Flatten()(x))
    return mw.Server(keras.Model(image, digit, name="net"))


def texts() -> mw.Server:
    """Ragged ids and attention."""
    ids = keras.Input([None], dtype="int32", name="ids")
    x: Any = keras.layers.Embedding(50, 8)(ids)
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 4)(x, x))
    return mw.Server(keras.Model(ids, keras.layers.Dense(2, name="class")(x), name="texts"))


def twice() -> mw.Server:
    """A function of two inputs with weights in bfloat16, and two outputs."""

    def doubled(params: Any, inputs: Any) -> Any:
        total = jnp.sum(inputs["x"] * params["kernel"].astype("float32"), 1)
        return {"total": total + params["bias"], "twice": inputs["ids"] * 2}

    params = {"kernel": np.arange(3, dtype=ml_dtypes.bfloat16), "bias": np.float32(0.5)}
    example = {"x": np.ones([1, 3], "float32"), "ids": np.ones([1, 2], "int32")}
    return mw.Server(doubled, params=params, example=example, name="twice")


def stablehlo(folder: Path) -> Call:
    import importlib.util

    spec = importlib.util.spec_from_file_location("load", folder / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.predict


def savedmodel(folder: Path) -> Call:
    import tensorflow as tf

    loaded: Any = tf.saved_model.load(str(folder))
    serve = loaded.signatures["serving_default"]

    def call(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            name: value.numpy()
            for name, value in serve(**{n: tf.constant(v) for n, v in inputs.items()}).items()
        }

    call.keep = loaded  # type: ignore[attr-defined] # a signature does not keep its variables
    return call


def onnx(folder: Path) -> Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(None, inputs), strict=True))


READERS: dict[str, Callable[[Path], Call]] = {
    "stablehlo": stablehlo,
    "savedmodel": savedmodel,
    "onnx": onnx,
}


def inputs_of(model: Any, rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    return {
        spec.name: rng.integers(0, 50, [rows, *(7 if n is None else n for n in spec.shape[1:])])
        .astype(spec.dtype)
        for spec in model.inputs
    }  # fmt: skip


def main() -> None:
    for make in (net, texts, twice):
        with make() as server, tempfile.TemporaryDirectory() as folder:
            model: Any = server.model(server.names()[0])
            for format in FORMATS:
                try:
                    export(model, Path(folder) / format, format)
                    call = READERS[format](Path(folder) / format)
                    gap = 0.0
                    for rows in (1, 5):
                        inputs = inputs_of(model, rows)
                        found, wanted = call(inputs), server.answer(inputs).outputs
                        assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
                        for name, value in wanted.items():
                            assert found[name].shape == value.shape
                            gap = max(gap, float(np.abs(found[name] - value).max(initial=0)))
                    print(f"{model.name:6} {format:10} largest difference {gap:.3g}")
                except Exception as error:
                    print(f"{model.name:6} {format:10} {type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
