"""The forward pass as files that run without Meshwright: StableHLO, SavedModel, ONNX.

StableHLO is what ``jax.export`` writes, for CPUs, GPUs and TPUs alike and for any number of rows;
beside it lie the weights and a loader of twenty lines. A SavedModel is the same program through
jax2tf, which takes TensorFlow, and ONNX the same through jax2onnx, which Keras exports by, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, ServingError
from ..extras import is_installed
from ..files import writing

if TYPE_CHECKING:
    from .api import TensorSpec
    from .forward import Forward
    from .model import LoadedModel

FORMATS = ("stablehlo", "savedmodel", "onnx")
_NEEDED = {
    "savedmodel": ("tensorflow", "pip install tensorflow"),
    "onnx": (
        "jax2onnx",
        "pip install jax2onnx, in an environment of its own, for it takes an older Orbax than "
        "checkpoints do; write the model from a .keras file there",
    ),
}
_PLATFORMS = ("cpu", "cuda", "tpu")
_LOADER = '''\
"""Runs the model beside this file; needs JAX alone: python load.py inputs.npz outputs.npz"""

import json
import sys
from pathlib import Path

import jax.export
import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it
import numpy as np

HERE = Path(__file__).parent
MODEL = json.loads((HERE / "model.json").read_text())
CALL = jax.export.deserialize(bytearray((HERE / "forward.bin").read_bytes())).call
with np.load(HERE / "weights.npz") as file:
    WEIGHTS = [file[str(n)].view(w["dtype"]) for n, w in enumerate(MODEL["weights"])]


def cast(given, name, dtype):
    array = np.asarray(given).astype(dtype)
    if not np.allclose(array.astype("f8"), np.asarray(given, "f8"), rtol=0.1, equal_nan=True):
        raise ValueError(f"input {name!r} has values outside the range of {dtype}")
    return array


def predict(inputs):
    arrays = [cast(inputs[i["name"]], i["name"], i["dtype"]) for i in MODEL["inputs"]]
    outputs = jax.jit(CALL)(WEIGHTS, arrays)
    return dict(zip((o["name"] for o in MODEL["outputs"]), map(np.asarray, outputs)))


if __name__ == "__main__":
    np.savez(sys.argv[2], **predict(np.load(sys.argv[1])))
'''


def export(model: LoadedModel, folder: Path, format: str = "stablehlo") -> tuple[Path, ...]:
    """Write a model on one device in a format; returns the paths of its files.

    Raises ServingError for an unknown format, a missing package, a folder that is not empty, or a
    mesh of several devices, which other programs know nothing of, and DataError for a folder that
    cannot be written.
    """
    if format not in FORMATS:
        raise ServingError(f"unknown format {format!r}. Known: {', '.join(FORMATS)}.")
    package, remedy = _NEEDED.get(format, ("", ""))
    if package and not is_installed(package):
        raise ServingError(f"--write {format} needs {package}, which is not installed: {remedy}.")
    if model.source.tables is not None:
        raise ServingError(
            f"model {model.name!r} has tables on parameter servers, which other programs cannot "
            "read: export the plain Keras model of it, strategy.export(model).save('plain.keras')."
        )
    if (size := model.source.whole_mesh.size) != 1:
        raise ServingError(
            f"the model lies on {size} devices, and other programs know no mesh: leave --mesh out."
        )
    with writing(folder, "the exported model"):
        if folder.exists() and any(folder.iterdir()):
            raise ServingError(f"{folder} is not empty. Name another folder by --to.")
        folder.mkdir(parents=True, exist_ok=True)
        return _WRITERS[format](model, folder)


def _stablehlo(model: LoadedModel, folder: Path) -> tuple[Path, ...]:
    import jax
    import numpy as np

    function, weights, inputs, _ = _bare(model)
    exported = jax.export.export(jax.jit(function), platforms=_PLATFORMS)(_shapes(weights), inputs)
    files = [folder / name for name in ("forward.bin", "weights.npz", "model.json", "load.py")]
    files[0].write_bytes(exported.serialize())
    host = [np.asarray(weight) for weight in weights]
    raw = [array.view(_raw(array.dtype)) for array in host]
    named: Any = {str(n): array for n, array in enumerate(raw)}
    np.savez(files[1], **named)
    described = {
        "weights": [{"dtype": array.dtype.name, "shape": array.shape} for array in host],
        "inputs": [_described(spec) for spec in model.inputs],
        "outputs": [_described(spec) for spec in _outputs(model)],
    }
    files[2].write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    files[3].write_text(_LOADER, encoding="utf-8")
    return tuple(files)


def _raw(dtype: Any) -> Any:
    """A type that NumPy's own files know, of the same size."""
    import numpy as np

    return dtype if dtype.kind in "biufc" else np.dtype(f"uint{8 * dtype.itemsize}")


def _described(spec: Any) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def _savedmodel(model: LoadedModel, folder: Path) -> tuple[Path, ...]:
    import importlib

    from jax.experimental import jax2tf

    tf: Any = importlib.import_module("tensorflow")  # not one of our packages
    function, weights, inputs, constraints = _bare(model)
    shapes: Any = [f"({', '.join(map(str, each.shape))},)" for each in inputs]
    converted = jax2tf.convert(
        function,
        polymorphic_shapes=[None, shapes],
        polymorphic_constraints=constraints,
        with_gradient=False,  # which TensorFlow would trace for a program that only answers
    )
    module = tf.Module()
    module.weights = [tf.Variable(weight, trainable=False) for weight in weights]
    names = [spec.name for spec in _outputs(model)]

    def serve(**inputs: Any) -> dict[str, Any]:
        arrays = [inputs[spec.name] for spec in model.inputs]
        return dict(zip(names, converted(list(module.weights), arrays), strict=True))

    signature = {
        spec.name: tf.TensorSpec(spec.shape, spec.dtype, name=spec.name) for spec in model.inputs
    }
    module.serve = tf.function(serve, autograph=False, jit_compile=True)
    concrete = module.serve.get_concrete_function(**signature)
    _try_to_run(model, concrete, tf)
    tf.saved_model.save(module, str(folder), signatures={"serving_default": concrete})
    return (folder,)


def _try_to_run(model: LoadedModel, serve: Any, tf: Any) -> None:
    """Raise ServingError where TensorFlow does not know what a newer JAX has written."""
    import jax

    forward = _forward_of(model)
    shapes = forward.shapes_of(replace(forward.typical, rows=1))
    named = zip(model.inputs, shapes, strict=True)
    zeros = {spec.name: tf.zeros(like.shape, like.dtype.name) for spec, like in named}
    try:
        serve(**zeros)
    except tf.errors.OpError as error:
        lines = error.message.splitlines()
        line = next((line for line in lines if "error:" in line), lines[0])
        raise ServingError(
            f"TensorFlow {tf.__version__} cannot run a program of JAX {jax.__version__}: {line}. "
            "Write the model where an older JAX is installed, or as stablehlo."
        ) from error


def _onnx(model: LoadedModel, folder: Path) -> tuple[Path, ...]:
    import importlib

    import jax

    jax2onnx: Any = importlib.import_module("jax2onnx")
    function, weights, inputs, _ = _bare(model)
    shapes = [  # jax2onnx makes symbols of texts itself
        jax.ShapeDtypeStruct([d if isinstance(d, int) else str(d) for d in i.shape], i.dtype)
        for i in inputs
    ]
    path = folder / "model.onnx"
    jax2onnx.to_onnx(
        lambda *arrays: function(weights, list(arrays)),
        inputs=shapes,
        input_names=[spec.name for spec in model.inputs],
        output_names=[spec.name for spec in _outputs(model)],
        return_mode="file",
        output_path=str(path),
    )
    return (path,)


_WRITERS: dict[str, Callable[[Any, Path], tuple[Path, ...]]] = {
    "stablehlo": _stablehlo,
    "savedmodel": _savedmodel,
    "onnx": _onnx,
}


def _bare(
    model: LoadedModel,
) -> tuple[Callable[..., Any], list[Any], list[Any], tuple[str, ...]]:
    """The forward pass over lists of weights and inputs, the weights, shapes of the inputs, and
    what is known of the symbols in these: the server does not accept longer inputs.

    Raises ModelError for dims that the model does not take by any size.
    """
    import jax

    from ..program import TrainState

    source = model.source
    state = model.first_weights().state
    values = TrainState(state.params, state.state, {}, {})
    weights, tree = jax.tree.flatten(values)

    def forward(weights: list[Any], arrays: list[Any]) -> list[Any]:
        whole = jax.tree.unflatten(tree, weights)
        step = source.steps.predict_step
        return jax.tree.leaves(step(whole.params, whole.state, source.batch(arrays)))

    lengths = _lengths(model)
    most = model.options.lengths[-1:]
    constraints = tuple(f"{name} <= {n}" for name in dict.fromkeys(lengths) for n in most)
    scope = jax.export.SymbolicScope(constraints)
    inputs, following = [], iter(lengths)
    for spec in model.inputs:
        dims = ["rows", *(next(following) if n is None else str(n) for n in spec.shape[1:])]
        shape = jax.export.symbolic_shape(", ".join(dims) + ",", scope=scope)
        inputs.append(jax.ShapeDtypeStruct(shape, spec.dtype))
    errors = TypeError, ValueError, NotImplementedError, jax.errors.InconclusiveDimensionOperation
    try:
        jax.eval_shape(forward, _shapes(weights), inputs)
    except errors as error:
        raise ModelError(_why_untraced(model, error, bool(lengths))) from error
    return forward, weights, inputs, constraints


def _why_untraced(model: LoadedModel, error: Exception, has_lengths: bool) -> str:
    import jax

    lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()  # Keras writes in bold
    line = next((line for line in lines if "inconclusive" in line), lines[0])
    remedy = ""
    if isinstance(error, jax.errors.InconclusiveDimensionOperation) and has_lengths:
        remedy = " Give lengths= (--lengths): no input is longer than the largest of them."
    return f"model {model.name!r} cannot be traced for any number of rows: {line}{remedy}"


def _forward_of(model: LoadedModel) -> Forward:
    from .forward import Forward

    return Forward(model.source)


def _outputs(model: LoadedModel) -> Sequence[TensorSpec]:
    return _forward_of(model).outputs()


def _lengths(model: LoadedModel) -> list[str]:
    """A symbol for each dim of any size; those that must be as long as each other have one."""
    forward = _forward_of(model)
    return [f"length_{n}" for n in forward.ragged().first] if forward.num_lengths else []


def _shapes(weights: list[Any]) -> list[Any]:
    import jax

    return [jax.ShapeDtypeStruct(weight.shape, weight.dtype) for weight in weights]
