"""JSON in and out: strict and fast where it can be, with bare NaN where values need it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from ...errors import RequestError
from ...units import bytes_text
from .json_pieces import dumped_in_pieces, loaded_in_pieces
from .limits import Limits
from .problems import BodyTooLargeError, refuse

_WRITE = orjson.OPT_SERIALIZE_NUMPY


def parsed(body: bytes | memoryview, limits: Limits, what: str = "the body") -> Any:
    """The value of a JSON text.

    NaN, Infinity and -Infinity are accepted as bare words, as TensorFlow Serving writes them.
    Raises RequestError for anything else that is not JSON.

    >>> parsed(b'{"instances": [1.5]}', Limits())
    {'instances': [1.5]}
    """
    check_text(body, limits)
    try:
        return loaded_in_pieces(body)
    except ValueError as error:
        fault = str(error)
    raise RequestError(f"{what} is not valid JSON: {fault}.")


def check_text(body: bytes | memoryview, limits: Limits) -> None:
    """Raise BodyTooLargeError for more text than is read."""
    if len(body) > limits.text_bytes:
        raise BodyTooLargeError(
            f"JSON or CSV may have {bytes_text(limits.text_bytes)}; received "
            f"{bytes_text(len(body))}. Send binary tensors, or fewer rows in a request."
        )


def parsed_object(
    body: bytes | memoryview, limits: Limits, what: str = "the body"
) -> dict[str, Any]:
    """The value of a JSON text that must be an object."""
    value = parsed(body, limits, what)
    if not isinstance(value, dict):
        refuse([f"{what} must be a JSON object; received {kind_of(value)}."])
    return value


def kind_of(value: Any) -> str:
    """What a value is called in JSON.

    >>> kind_of([1]), kind_of(None)
    ('an array', 'null')
    """
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def written(value: Any) -> bytes:
    """JSON of a value that may hold arrays; not finite floats are bare words.

    >>> written({"predictions": np.array([[0.1, 2.0]], "float32")})
    b'{"predictions":[[0.1,2.0]]}'
    >>> written({"predictions": np.array([np.nan])})
    b'{"predictions":[NaN]}'
    """
    is_finite = all(_finite(array) for array in _arrays(value))
    return dumped_in_pieces(value, _strict if is_finite else _loose)


def _strict(value: Any) -> bytes:
    return orjson.dumps(value, option=_WRITE, default=_plain)


def _loose(value: Any) -> bytes:
    return json.dumps(value, default=np.ndarray.tolist, separators=(",", ":")).encode()


def _arrays(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, Mapping):
        return [array for element in value.values() for array in _arrays(element)]
    if isinstance(value, list | tuple):
        return [array for element in value for array in _arrays(element)]
    return []


def _finite(array: np.ndarray) -> bool:
    return array.dtype.kind not in "fV" or bool(np.isfinite(array).all())


def _plain(value: Any) -> Any:
    """What orjson cannot write: arrays of bfloat16 and the like, and those not contiguous."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    floats = value.dtype.kind == "V" or value.dtype.name not in ("float64", "float32")
    return value.astype(np.float32).tolist() if floats and _is_float(value) else value.tolist()


def _is_float(value: np.ndarray) -> bool:
    return value.dtype.kind in "fV"
