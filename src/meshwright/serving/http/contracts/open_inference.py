"""The Open Inference protocol, version 2, over HTTP, with its extension for binary tensors.

KServe, Triton, OpenVINO's model server, Seldon and TorchServe speak it: ``/v2/models/{m}/infer``.
Binary tensors follow the JSON in the body, little-endian; a header says how long the JSON is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from ...api import Answer, ServedModel, TensorSpec
from ...ranges import narrower
from ..json_text import kind_of, parsed_object, written
from ..limits import Limits
from ..problems import refuse, short
from ..tensors import array_of, check_names, check_rows, dtype_of, raw_array
from .request import Reply, Request

HEADER = "Inference-Header-Content-Length"
_BYTES = "application/octet-stream"
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
}
_DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}


def read(
    body: bytes, header_length: str | None, specs: Sequence[TensorSpec], limits: Limits
) -> Request:
    """The arrays of a request. Raises RequestError with all its faults."""
    view = memoryview(body)
    length = _header_length(header_length, len(view))
    head = parsed_object(view[:length], limits, "the JSON of the request")
    faults: list[str] = []
    tensors = _listed(head, "inputs", limits, faults)
    parameters = _parameters(head, "the request", faults)
    refuse(faults)
    raws = _raw_parts(tensors, view[length:], faults)
    refuse(faults)
    inputs = arrays_of(tensors, raws, specs, faults)
    is_binary = _is_set(parameters, "binary_data_output", faults)
    outputs = _outputs(head, is_binary, limits, faults)
    timeout_s = _timeout_s(parameters, faults)
    identity = head.get("id", "")
    if not isinstance(identity, str) or len(identity) > 256:
        faults.append(f"id must be a string of at most 256 characters; received {short(identity)}.")
    refuse(faults)
    return Request(inputs, "binary" if is_binary else "", identity, outputs, timeout_s)


def arrays_of(
    tensors: Sequence[dict[str, Any]],
    raws: Mapping[str, memoryview | None],
    specs: Sequence[TensorSpec],
    faults: list[str],
) -> dict[str, Any]:
    """The arrays of tensors: of ``name``, ``datatype``, ``shape`` and either ``data`` or bytes."""
    by_name = {tensor["name"]: tensor for tensor in tensors}
    if len(by_name) < len(tensors):
        faults.append("an input is named twice.")
    check_names(by_name, specs, faults)
    inputs = {
        spec.name: _array(by_name[spec.name], raws[spec.name], spec, faults)
        for spec in specs
        if spec.name in by_name
    }
    check_rows(inputs, faults)
    return inputs


def _header_length(text: str | None, total: int) -> int:
    if text is None:
        return total
    if not (text.isascii() and text.isdigit() and len(text) < 16) or int(text) > total:
        fact = f"{HEADER} must be a number of bytes up to {total:,}, those of the body"
        refuse([f"{fact}; received {short(text)}."])
    return int(text)


def _listed(head: dict[str, Any], key: str, limits: Limits, faults: list[str]) -> list[Any]:
    """The tensors under a key, each an object with a name."""
    tensors = head.get(key)
    if not isinstance(tensors, list) or not tensors:
        received = "an empty array" if tensors == [] else kind_of(tensors)
        faults.append(f"{key!r} must be an array of tensors; received {received}.")
        return []
    if len(tensors) > limits.tensors:
        faults.append(f"{key!r} has {len(tensors):,} tensors; at most {limits.tensors} are read.")
        return []
    wrong = [t for t in tensors if not (isinstance(t, dict) and isinstance(t.get("name"), str))]
    if wrong:
        faults.append(f"each of {key!r} must be an object with a name; received {short(wrong[0])}.")
    return tensors


def _parameters(holder: dict[str, Any], of: str, faults: list[str]) -> dict[str, Any]:
    parameters = holder.get("parameters", {})
    if isinstance(parameters, dict):
        return parameters
    faults.append(f"parameters of {of} must be an object; received {kind_of(parameters)}.")
    return {}


def _raw_parts(
    tensors: list[dict[str, Any]], rest: memoryview, faults: list[str]
) -> dict[str, memoryview | None]:
    """The bytes of each binary tensor, in the order of the tensors."""
    parts: dict[str, memoryview | None] = {}
    at = 0
    for tensor in tensors:
        name = tensor["name"]
        size = _parameters(tensor, short(name), faults).get("binary_data_size")
        if size is None:
            parts[name] = None
        elif isinstance(size, bool) or not isinstance(size, int) or size < 0:
            faults.append(
                f"input {short(name)}: binary_data_size must be a number of bytes; received "
                f"{short(size)}."
            )
        else:
            parts[name] = rest[at : at + size]
            at += size
    if at != len(rest) and not faults:
        faults.append(
            f"binary tensors take {at:,} bytes by their binary_data_size; {len(rest):,} bytes "
            f"follow the JSON. {HEADER} must be the length of the JSON alone."
        )
    return parts


def _array(
    tensor: dict[str, Any], raw: memoryview | None, spec: TensorSpec, faults: list[str]
) -> Any:
    """The array of one input, by its datatype and shape."""
    name, datatype, shape = spec.name, tensor.get("datatype"), tensor.get("shape")
    dtype = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None or spec.dtype not in (dtype, narrower(dtype)):
        wanted = DATATYPES.get(spec.dtype, spec.dtype)
        faults.append(f"input {name!r}: expected datatype {wanted}; received {short(datatype)}.")
        return None
    if not _is_shape(shape):
        faults.append(f"input {name!r}: shape must be an array of sizes; received {short(shape)}.")
        return None
    data = tensor.get("data")
    if raw is not None:
        if data is not None:
            faults.append(f"input {name!r}: expected data or binary_data_size; received both.")
        return raw_array(raw, dtype, shape, spec, faults)
    if not isinstance(data, list):
        faults.append(
            f"input {name!r}: expected data (an array) or binary_data_size; received "
            f"{kind_of(data)}."
        )
        return None
    return _from_data(data, shape, spec, faults)


def _is_shape(shape: Any) -> TypeGuard[list[int]]:
    return isinstance(shape, list) and all(
        type(size) is int and 0 <= size < 1 << 48 for size in shape
    )


def _from_data(data: list[Any], shape: list[int], spec: TensorSpec, faults: list[str]) -> Any:
    """The array of nested lists, or of a flat list in row-major order."""
    if data and not isinstance(data[0], list) and len(shape) != 1:
        flat = array_of(data, TensorSpec(spec.name, spec.dtype, (None,)), faults)
        if flat is None:
            return None
        return raw_array(memoryview(flat.tobytes()), spec.dtype, shape, spec, faults)
    array = array_of(data, spec, faults)
    if array is not None and list(array.shape) != shape:
        faults.append(
            f"input {spec.name!r}: shape says {shape}, its data have {list(array.shape)}."
        )
    return array


def _outputs(
    head: dict[str, Any], is_binary: bool, limits: Limits, faults: list[str]
) -> dict[str, bool]:
    """The outputs that are asked for by name, and whether each is wanted as bytes."""
    if not head.get("outputs"):
        return {}
    result = {}
    for output in _listed(head, "outputs", limits, faults):
        if isinstance(output, dict):
            more = _parameters(output, "an output", faults)
            result[output.get("name")] = _is_set(more, "binary_data", faults, is_binary)
            if "classification" in more:
                faults.append("classification of an output is not supported: read its values.")
    return result


def _is_set(
    parameters: dict[str, Any], name: str, faults: list[str], otherwise: bool = False
) -> bool:
    value = parameters.get(name, otherwise)
    if not isinstance(value, bool):
        faults.append(f"{name} must be true or false; received {short(value)}.")
    return value is True


def _timeout_s(parameters: dict[str, Any], faults: list[str]) -> float | None:
    """Triton's ``timeout``, in microseconds."""
    timeout = parameters.get("timeout")
    if timeout is None:
        return None
    if type(timeout) is not int or timeout <= 0:
        faults.append(f"timeout must be a number of microseconds; received {short(timeout)}.")
        return None
    return timeout / 1e6


def write(request: Request, answer: Answer, model: str) -> Reply:
    """An answer; raises RequestError for outputs that the model does not have."""
    check_outputs(request.outputs, answer)
    outputs = request.outputs or dict.fromkeys(answer.outputs, request.form == "binary")
    tensors, raws = [], []
    for name, binary in outputs.items():
        array = np.ascontiguousarray(answer.outputs[name])
        tensor: dict[str, Any] = {
            "name": name,
            "datatype": DATATYPES.get(array.dtype.name, "FP32"),
            "shape": list(array.shape),
        }
        if binary:
            raws.append(little_endian(array).tobytes())
            tensor["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            tensor["data"] = array.reshape(-1)
        tensors.append(tensor)
    head: dict[str, Any] = {
        "model_name": model,
        "model_version": answer.version,
        "outputs": tensors,
    }
    if request.id:
        head["id"] = request.id
    text = written(head)
    if not raws:
        return Reply(text)
    return Reply(b"".join([text, *raws]), _BYTES, {HEADER: str(len(text))})


def check_outputs(names: Iterable[str], answer: Answer) -> None:
    """Raise RequestError for outputs that the model does not have."""
    if unknown := [name for name in names if name not in answer.outputs]:
        known = ", ".join(map(repr, answer.outputs))
        refuse([f"unknown output {short(unknown[0])}. The model's outputs are {known}."])


def little_endian(array: np.ndarray) -> np.ndarray:
    """The array as its bytes are sent, in a type that the protocol has a name for."""
    if array.dtype.name not in DATATYPES:  # float8 and the like have no name in this protocol
        array = array.astype(np.float32)
    return array.astype(dtype_of(array.dtype.name).newbyteorder("<"), copy=False)


def server_metadata(version: str) -> dict[str, Any]:
    """``GET /v2``."""
    return {"name": "meshwright", "version": version, "extensions": ["binary_tensor_data"]}


def model_metadata(model: ServedModel, versions: Sequence[str]) -> dict[str, Any]:
    """``GET /v2/models/{m}``."""
    return {
        "name": model.name,
        "versions": list(versions),
        "platform": "meshwright_jax",
        "inputs": [_described(spec) for spec in model.inputs],
        "outputs": [_described(spec) for spec in model.outputs],
    }


def _described(spec: TensorSpec) -> dict[str, Any]:
    shape = [-1 if size is None else size for size in spec.shape]
    return {
        "name": spec.name,
        "datatype": DATATYPES.get(spec.dtype, spec.dtype),
        "shape": shape,
    }
