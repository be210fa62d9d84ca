"""Arrays from nested lists of JSON or from raw bytes, checked against what a model takes.

A value never changes silently: 1.5 for an integer, "1" for a number, null, 300 for
uint8 and 1e300 for float32 are faults. Types of 64 bits are accepted where 32 hold every value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..api import TensorSpec
from ..ranges import in_dtype, limits_of, narrower, outside
from .json_text import kind_of
from .problems import short

_ELEMENTS = 1 << 14  # that become arrays at once, which no other thread interrupts
_WORDS = {int: "integer", float: "float", bool: "boolean", str: "string", type(None): "null"}


def dtype_of(name: str) -> np.dtype:
    """The dtype of a name, small floats too.

    >>> dtype_of("bfloat16").itemsize
    2
    """
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def array_of(value: Any, spec: TensorSpec, faults: list[str], flat: bool = False) -> Any:
    """The array of nested lists, or ``None`` and its fault in ``faults``.

    With ``flat``, rows may come as flat lists of all their elements, in row-major order.

    >>> faults = []
    >>> array_of([[1, 2.5]], TensorSpec("x", "float32", (None, 2)), faults).dtype
    dtype('float32')
    >>> array_of([[1, None]], TensorSpec("x", "int32", (None, 2)), faults)
    >>> faults
    ["input 'x': expected int32 values; received null."]
    """
    if not isinstance(value, list):
        faults.append(f"input {spec.name!r}: expected an array of rows; received {kind_of(value)}.")
        return None
    if (joined := _in_pieces(value, spec, flat)) is not None:
        return joined
    return _array_of(value, spec, faults, flat)


def _in_pieces(value: list[Any], spec: TensorSpec, flat: bool) -> np.ndarray | None:
    """The array of many rows, a part at a time, so that other threads run in between.

    ``None`` where they are few, or do not fit; faults are those of all rows together.
    """
    rows = max(1, _ELEMENTS // max(1, _loose(value[:1]).size))
    if len(value) <= rows:
        return None
    faults: list[str] = []
    parts = []
    for start in range(0, len(value), rows):
        parts.append(_array_of(value[start : start + rows], spec, faults, flat))
        if faults or parts[-1].shape[1:] != parts[0].shape[1:]:
            return None
    return np.concatenate(parts)


def _array_of(value: list[Any], spec: TensorSpec, faults: list[str], flat: bool) -> Any:
    loose = _loose(value)
    dtype = dtype_of(spec.dtype)
    allowed = (int,) if dtype.kind in "iu" else (bool,) if dtype.kind == "b" else (float, int)
    if wrong := {type(each) for each in loose.ravel()}.difference(allowed):
        faults.append(_unexpected(spec, wrong))
        return None
    if flat and (shape := filled(spec, len(loose), loose.size // max(1, len(loose)))):
        loose = loose.reshape(shape) if loose.ndim < 3 else loose
    if fault := shape_fault(loose.shape, spec):
        faults.append(fault)
        return None
    return _cast(loose, spec, dtype, faults)


def _loose(value: list[Any]) -> np.ndarray:
    """An array of Python's own values: text takes no room in it, and ragged rows stay lists."""
    try:
        return np.array(value, dtype=object)
    except ValueError:  # ragged, in a way that NumPy does not take even so
        loose = np.empty(len(value), dtype=object)
        loose[:] = value
        return loose


def _unexpected(spec: TensorSpec, wrong: set[type]) -> str:
    if wrong & {list, dict}:
        what = "rows that differ in length or depth" if list in wrong else "an object"
        return f"input {spec.name!r}: expected {shape_text(spec)}; received {what}."
    words = sorted(_WORDS.get(kind, kind.__name__) for kind in wrong)
    return f"input {spec.name!r}: expected {spec.dtype} values; received {', '.join(words)}."


def _cast(loose: np.ndarray, spec: TensorSpec, dtype: np.dtype, faults: list[str]) -> Any:
    try:
        if dtype.kind in "iub":
            return loose.astype(dtype)
        array, fault = in_dtype(loose.astype(np.float64), dtype)
    except OverflowError:
        array, fault = None, _wide_fault(loose, dtype)
    if fault:
        faults.append(f"input {spec.name!r}: {fault}.")
        return None
    return array


def _wide_fault(loose: np.ndarray, dtype: np.dtype) -> str:
    """The fault of Python's numbers, one of which NumPy has no type for."""
    least, most = limits_of(dtype)
    return outside(short(next(x for x in loose.ravel() if not least <= x <= most)), dtype)


def raw_array(
    raw: memoryview, dtype: str, shape: Sequence[int], spec: TensorSpec, faults: list[str]
) -> Any:
    """The array of little-endian bytes, without a copy where they have the input's own type; or
    ``None`` and its fault."""
    if fault := shape_fault(tuple(shape), spec):
        faults.append(fault)
        return None
    if spec.dtype not in (dtype, narrower(dtype)):
        faults.append(f"input {spec.name!r}: expected {spec.dtype}; received {dtype}.")
        return None
    kind = dtype_of(dtype).newbyteorder("<")
    if (size := math.prod(shape) * kind.itemsize) != len(raw):
        faults.append(
            f"input {spec.name!r}: {dtype} of shape {list(shape)} takes {size:,} bytes; received "
            f"{len(raw):,}."
        )
        return None
    array, fault = in_dtype(np.frombuffer(raw, kind).reshape(shape), dtype_of(spec.dtype))
    if fault:
        faults.append(f"input {spec.name!r}: {fault}.")
        return None
    return array


def shape_fault(shape: tuple[int, ...], spec: TensorSpec) -> str:
    """What is wrong with a shape; nothing for one that fits."""
    if not shape[0]:
        return f"input {spec.name!r}: expected at least one row; received none."
    fits = len(shape) == len(spec.shape) and all(
        expected in (None, size) for size, expected in zip(shape, spec.shape, strict=True)
    )
    if not fits:
        return f"input {spec.name!r}: expected {shape_text(spec)}; received {list(shape)}."
    return ""


def shape_text(spec: TensorSpec) -> str:
    """The shape that is expected, as messages show it.

    >>> shape_text(TensorSpec("x", "float32", (None, 28, None)))
    'shape [rows, 28, any]'
    """
    dims = ["any" if size is None else str(size) for size in spec.shape[1:]]
    return f"shape [{', '.join(['rows', *dims])}]"


def filled(spec: TensorSpec, rows: int, elements: int) -> tuple[int, ...] | None:
    """The shape of ``rows`` flat rows of ``elements`` each, where it is the one that fits."""
    sizes = [size for size in spec.shape[1:] if size is not None]
    unknown = len(spec.shape) - 1 - len(sizes)
    if not unknown and math.prod(sizes) == elements:
        return (rows, *sizes)
    return None


def check_names(inputs: Mapping[str, Any], specs: Sequence[TensorSpec], faults: list[str]) -> None:
    """Faults for inputs that are missing or unknown."""
    names = [spec.name for spec in specs]
    if unknown := [name for name in inputs if name not in names]:
        faults.append(f"unknown input {_names(unknown)}. The model takes {_names(names)}.")
    if missing := [name for name in names if name not in inputs]:
        faults.append(f"missing input {_names(missing)}. The model takes {_names(names)}.")


def check_rows(arrays: Mapping[str, Any], faults: list[str]) -> None:
    """A fault for inputs that differ in their rows."""
    rows = {name: len(array) for name, array in arrays.items() if array is not None}
    if len(set(rows.values())) > 1:
        text = ", ".join(f"{name!r} has {count}" for name, count in rows.items())
        faults.append(f"all inputs must have the same number of rows: {text}.")


def sole(specs: Sequence[TensorSpec], faults: list[str]) -> TensorSpec | None:
    """The only input of a model, for contracts that may leave its name out."""
    if len(specs) == 1:
        return specs[0]
    names = _names([spec.name for spec in specs])
    faults.append(f"the model takes {len(specs)} inputs, {names}: name each of them.")
    return None


def _names(names: Sequence[Any]) -> str:
    return ", ".join(short(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
