"""TensorFlow Serving's REST API: ``/v1/models/{m}:predict`` in row and in column format.

Rows are ``{"instances": [...]}`` and answered by ``{"predictions": [...]}``; columns are
``{"inputs": ...}`` and answered by ``{"outputs": ...}``. NaN and Infinity are bare words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...api import Answer, ServedModel, TensorSpec
from ..json_text import parsed_object, written
from ..limits import Limits
from ..problems import refuse, short
from ..tensors import array_of, check_names, check_rows, sole
from .request import Reply, Request

SIGNATURE = "serving_default"


def read(body: bytes, specs: Sequence[TensorSpec], limits: Limits) -> Request:
    """The arrays of a request. Raises RequestError with all its faults."""
    head = parsed_object(body, limits)
    faults: list[str] = []
    forms = [form for form in ("instances", "inputs") if form in head]
    if len(forms) != 1:
        received = "both" if forms else "neither"
        faults.append(
            f"expected either 'instances' (rows) or 'inputs' (columns); received {received}."
        )
    if unknown := head.keys() - {"instances", "inputs", "signature_name"}:
        faults.append(f"unknown key {short(sorted(unknown)[0])} in the request.")
    if (signature := head.get("signature_name", SIGNATURE)) != SIGNATURE:
        faults.append(f"unknown signature {short(signature)}: the model has {SIGNATURE!r} alone.")
    refuse(faults)
    reader = rows if forms[0] == "instances" else columns
    inputs = reader(head[forms[0]], specs, limits, faults)
    refuse(faults)
    return Request(inputs, forms[0])


def rows(
    value: Any, specs: Sequence[TensorSpec], limits: Limits, faults: list[str]
) -> dict[str, Any]:
    """Arrays of a list of rows: values, or objects with a value for each input."""
    if not isinstance(value, list) or not value:
        faults.append(f"'instances' must be an array of rows; received {short(value)}.")
        return {}
    if not isinstance(value[0], dict):
        spec = sole(specs, faults)
        return {} if spec is None else {spec.name: array_of(value, spec, faults)}
    if len(value[0]) > limits.tensors:
        faults.append(f"a row has {len(value[0]):,} tensors; at most {limits.tensors} are read.")
        return {}
    names = value[0].keys()
    for number, row in enumerate(value):
        if not isinstance(row, dict) or row.keys() != names:
            faults.append(f"row {number} does not have the inputs of row 0, {short(list(names))}.")
            return {}
    return columns({name: [row[name] for row in value] for name in names}, specs, limits, faults)


def columns(
    value: Any, specs: Sequence[TensorSpec], limits: Limits, faults: list[str]
) -> dict[str, Any]:
    """Arrays of an object with all rows of each input, or of the rows of the only input."""
    if not isinstance(value, dict):
        spec = sole(specs, faults)
        return {} if spec is None else {spec.name: array_of(value, spec, faults)}
    if len(value) > limits.tensors:
        faults.append(f"{len(value):,} inputs; at most {limits.tensors} are read.")
        return {}
    check_names(value, specs, faults)
    arrays = {
        spec.name: array_of(value[spec.name], spec, faults) for spec in specs if spec.name in value
    }
    check_rows(arrays, faults)
    return arrays


def write(request: Request, answer: Answer) -> Reply:
    """An answer, in the format of the request."""
    if request.form == "inputs":
        return Reply(written({"outputs": by_column(answer.outputs)}))
    return Reply(written({"predictions": by_row(answer.outputs)}))


def by_column(outputs: Any) -> Any:
    """All rows of each output, and of an only output its rows alone."""
    return next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)


def by_row(outputs: Any) -> Any:
    """A value, or an object with a value for each output, for every row."""
    if len(outputs) == 1:
        return next(iter(outputs.values()))
    count = len(next(iter(outputs.values())))
    return [{name: _item(array, row) for name, array in outputs.items()} for row in range(count)]


def _item(array: np.ndarray, row: int) -> Any:
    return array[row] if array.ndim > 1 else array[row].item()


def status(models: Sequence[ServedModel]) -> dict[str, Any]:
    """``GET /v1/models/{m}``: the state of each version."""
    return {
        "model_version_status": [
            {
                "version": model.version,
                "state": "AVAILABLE" if model.ready else "LOADING",
                "status": {"error_code": "OK", "error_message": ""},
            }
            for model in models
        ]
    }


def metadata(model: ServedModel) -> dict[str, Any]:
    """``GET /v1/models/{m}/metadata``: the signature."""
    return {
        "model_spec": {"name": model.name, "signature_name": "", "version": model.version},
        "metadata": {
            "signature_def": {
                "signature_def": {
                    SIGNATURE: {
                        "inputs": {spec.name: _info(spec) for spec in model.inputs},
                        "outputs": {spec.name: _info(spec) for spec in model.outputs},
                        "method_name": "tensorflow/serving/predict",
                    }
                }
            }
        },
    }


_KINDS = {"float32": "DT_FLOAT", "float64": "DT_DOUBLE", "float16": "DT_HALF"}


def _info(spec: TensorSpec) -> dict[str, Any]:
    dims = [{"size": str(-1 if size is None else size), "name": ""} for size in spec.shape]
    return {
        "dtype": _KINDS.get(spec.dtype, f"DT_{spec.dtype.upper()}"),
        "tensor_shape": {"dim": dims, "unknown_rank": False},
        "name": spec.name,
    }
