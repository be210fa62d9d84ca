"""``/invocations``, which SageMaker and MLflow both call; media type and keys say which.

MLflow's keys are ``dataframe_split``, ``dataframe_records``, ``instances`` and ``inputs``;
SageMaker sends whatever its container reads: JSON, CSV and ``.npy`` most often. Nothing is ever
unpickled.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...api import Answer, TensorSpec
from ..json_text import check_text, kind_of, parsed, written
from ..limits import Limits
from ..problems import MediaTypeError, refuse, short
from ..tensors import array_of, check_names, check_rows, filled, raw_array, sole
from . import tf_serving
from .request import Reply, Request

JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
_FORMS = ("dataframe_split", "dataframe_records", "instances", "inputs")


def read(
    body: bytes, media_type: str, accept: str, specs: Sequence[TensorSpec], limits: Limits
) -> Request:
    """The arrays of a request. Raises RequestError with all its faults."""
    kind = media_type.partition(";")[0].strip().lower() or JSON
    faults: list[str] = []
    readers = {JSON: _from_json, CSV: _from_csv, NPY: _from_npy}
    if kind not in readers:
        raise MediaTypeError(
            f"content type {short(kind)} is not supported. Send {', '.join(readers)}."
        )
    inputs = readers[kind](body, specs, limits, faults)
    refuse(faults)
    return Request(inputs, _accepted(accept))


def _accepted(accept: str) -> str:
    """The first media type that the client accepts and that can be written."""
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    for kind in kinds:
        if kind in (JSON, CSV, NPY):
            return kind
    if not any(kinds) or {"*/*", "application/*"} & set(kinds):
        return JSON
    raise MediaTypeError(f"cannot answer with {short(accept)}. Accept {JSON}, {CSV} or {NPY}.")


# JSON


def _from_json(
    body: bytes, specs: Sequence[TensorSpec], limits: Limits, faults: list[str]
) -> dict[str, Any]:
    value = parsed(body, limits)
    if isinstance(value, list):  # SageMaker's clients leave the key out
        return tf_serving.rows(value, specs, limits, faults)
    keys = value.keys() if isinstance(value, dict) else set()
    forms = [form for form in _FORMS if form in keys]
    if len(forms) != 1:
        received = short(sorted(keys)) if keys else kind_of(value)
        faults.append(f"expected one of the keys {', '.join(_FORMS)}; received {received}.")
        return {}
    if value.get("params"):
        faults.append("params are not supported: the model takes its inputs alone.")
    if unknown := keys - {*_FORMS, "params"}:
        faults.append(f"unknown key {short(sorted(unknown)[0])} in the request.")
    readers = {
        "dataframe_split": _split,
        "dataframe_records": _records,
        "instances": tf_serving.rows,
        "inputs": tf_serving.columns,
    }
    return readers[forms[0]](value[forms[0]], specs, limits, faults)


def _split(
    value: Any, specs: Sequence[TensorSpec], limits: Limits, faults: list[str]
) -> dict[str, Any]:
    """``{"columns": [...], "data": [[...], ...]}``, as pandas' ``to_dict(orient="split")``."""
    columns, data = (
        (value.get("columns"), value.get("data")) if isinstance(value, dict) else (None, None)
    )
    if not (isinstance(columns, list) and all(isinstance(name, str | int) for name in columns)):
        faults.append("dataframe_split must have 'columns', an array of names.")
    elif not isinstance(data, list):
        faults.append(f"dataframe_split must have 'data', an array of rows; has {kind_of(data)}.")
    elif wrong := [n for n, row in enumerate(data) if _width(row) != len(columns)]:
        faults.append(
            f"row {wrong[0]} of dataframe_split must have {len(columns)} values, one a column."
        )
    else:
        return _frame([str(name) for name in columns], data, specs, faults)
    return {}


def _width(row: Any) -> int:
    return len(row) if isinstance(row, list) else -1


def _records(
    value: Any, specs: Sequence[TensorSpec], limits: Limits, faults: list[str]
) -> dict[str, Any]:
    """``[{column: value}, ...]``; the columns are those of the first record, in its order."""
    if not (isinstance(value, list) and value and all(isinstance(row, dict) for row in value)):
        faults.append("dataframe_records must be an array of objects, and have at least one.")
        return {}
    columns = list(value[0])
    if wrong := [n for n, row in enumerate(value) if row.keys() != value[0].keys()]:
        faults.append(f"record {wrong[0]} does not have the columns of record 0.")
        return {}
    return _frame(columns, [[row[name] for name in columns] for row in value], specs, faults)


def _frame(
    columns: list[str], data: list[list[Any]], specs: Sequence[TensorSpec], faults: list[str]
) -> dict[str, Any]:
    """Columns by the names of the inputs; else all columns are the elements of the only input."""
    names = {spec.name for spec in specs}
    if names & set(columns) or len(specs) > 1:
        columns_by_name = {name: [row[at] for row in data] for at, name in enumerate(columns)}
        if len(columns_by_name) < len(columns):
            faults.append("a column is named twice.")
        check_names(columns_by_name, specs, faults)
        arrays = {
            spec.name: array_of(columns_by_name[spec.name], spec, faults, flat=True)
            for spec in specs
            if spec.name in columns_by_name
        }
        check_rows(arrays, faults)
        return arrays
    return {specs[0].name: array_of(data, specs[0], faults, flat=True)}


# CSV


def _from_csv(
    body: bytes, specs: Sequence[TensorSpec], limits: Limits, faults: list[str]
) -> dict[str, Any]:
    """Rows of numbers, under a line of names or not."""
    check_text(body, limits)
    spec = sole(specs, faults)
    try:
        lines = [row for row in csv.reader(io.StringIO(body.decode("utf-8"))) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        faults.append(f"the body is not CSV in UTF-8: {error}.")
        return {}
    if spec is None:
        return {}
    if lines and not any(map(_is_number, lines[0])):
        names = lines.pop(0)
        if not lines:
            faults.append(
                f"the only line of the CSV, {short(','.join(names))}, holds no number, so it was "
                "taken for the names of columns, and no rows follow. Send rows of numbers with "
                "commas between columns and a point in decimals."
            )
            return {}
    wrong = [n for n, line in enumerate(lines) if not all(map(_is_number, line))]
    if wrong:
        faults.append(f"row {wrong[0]} of the CSV has a value that is not a number.")
        return {}
    whole = spec.dtype.startswith(("int", "uint"))
    data = [[_number(cell, whole) for cell in line] for line in lines]
    return {spec.name: array_of(data, spec, faults, flat=True)}


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(cell: str, whole: bool) -> int | float:
    """A whole number stays exact where the input takes whole numbers."""
    if whole:
        try:
            return int(cell)
        except ValueError:
            pass
    return float(cell)


# .npy


def _from_npy(
    body: bytes, specs: Sequence[TensorSpec], limits: Limits, faults: list[str]
) -> dict[str, Any]:
    """One array. Only its header is parsed; its size must be that of the bytes which follow."""
    spec = sole(specs, faults)
    stream = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the format")
        reader = np.lib.format.read_array_header_1_0
        if version == (2, 0):
            reader = np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(stream)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        faults.append(f"the body is not an .npy file: {short(str(error), 200)}.")
        return {}
    if fortran or dtype.byteorder == ">" or dtype.hasobject:
        faults.append(".npy must hold little-endian numbers in C order: np.ascontiguousarray(x).")
    if spec is None or faults:
        return {}
    rest = memoryview(body)[stream.tell() :]
    if len(shape) == 2 and (fits := filled(spec, *shape)):
        shape = fits
    return {spec.name: raw_array(rest, dtype.name, shape, spec, faults)}


# Answers


def write(request: Request, answer: Answer) -> Reply:
    """An answer in the media type that the client accepts."""
    if request.form == JSON:
        return Reply(written({"predictions": tf_serving.by_column(answer.outputs)}))
    if len(answer.outputs) != 1:
        names = ", ".join(map(repr, answer.outputs))
        raise MediaTypeError(f"{request.form} holds one output; the model has {names}. Use {JSON}.")
    array = next(iter(answer.outputs.values()))
    if array.dtype.kind == "V":  # bfloat16 and the like are unknown to readers of either
        array = array.astype(np.float32)
    if request.form == NPY:
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.ascontiguousarray(array), allow_pickle=False)
        return Reply(stream.getvalue(), NPY)
    rows = array.reshape(len(array), -1).tolist()
    text = "\n".join(",".join(map(repr, row)) for row in rows)
    return Reply(f"{text}\n".encode(), CSV)
