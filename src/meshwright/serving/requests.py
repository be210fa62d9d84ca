"""Requests as arrays: checked against the model's inputs, stacked into batches, cut out again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 and the float8 types by name from here on
import numpy as np

from ..errors import RequestError
from .api import TensorSpec
from .ranges import in_dtype

Lengths = tuple[int, ...]  # of the ragged dims of all inputs, in order
_SMALL_BYTES = 64 * 2**10  # of a request's array


@dataclass(eq=False)
class Request:
    """Rows that wait for their answer; ``future`` gets the outputs and the version."""

    arrays: list[np.ndarray]
    rows: int
    lengths: Lengths  # as it came
    padded: Lengths  # as it is computed: requests of one batch agree in these
    deadline_s: float | None = None  # by time.monotonic
    arrived_s: float = field(default_factory=time.monotonic)
    future: Future[Any] = field(default_factory=Future)

    def give(self, answer: Any) -> None:
        """Answer it, unless it has failed meanwhile."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Fail it, unless it has ended."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


def checked(
    inputs: Mapping[str, Any],
    specs: Sequence[TensorSpec],
    lengths: Sequence[int] = (),
    max_rows: int | None = None,
) -> Request:
    """The request of these inputs. Raises :class:`RequestError` that lists every fault.

    Example:
        >>> spec = TensorSpec("x", "float32", (None, 2))
        >>> checked({"x": [[1, 2], [3, 4]]}, [spec]).rows
        2
        >>> checked({"y": [[1.0, 2.0]]}, [spec])
        Traceback (most recent call last):
        ...
        meshwright.errors.RequestError: 2 faults in the request:
          input 'x' is missing: expected x float32[rows, 2]
          input 'y' is unknown; the inputs are x
    """
    if not isinstance(inputs, Mapping):
        expected = ", ".join(map(str, specs))
        raise RequestError(
            f"expected inputs by name, a mapping of {expected}; received {type(inputs).__name__}. "
            f"Pass {{{specs[0].name!r}: rows}}."
        )
    if ready := _ready(inputs, specs, max_rows):
        return ready
    faults = list[str]()
    arrays = list[np.ndarray]()
    for spec in specs:
        if spec.name not in inputs:
            faults.append(f"input {spec.name!r} is missing: expected {spec}")
            continue
        array = _array(inputs[spec.name], spec, faults)
        if array is not None:
            arrays.append(array)
    names = [spec.name for spec in specs]
    faults += [
        f"input {name!r} is unknown; the inputs are {', '.join(names)}"
        for name in inputs
        if name not in names
    ]
    rows = {array.shape[0] for array in arrays}
    if len(rows) > 1:
        counts = ", ".join(f"{s.name}: {a.shape[0]}" for s, a in zip(specs, arrays, strict=False))
        faults.append(f"inputs differ in their rows ({counts})")
    if 0 in rows:
        faults.append("the request has no rows")
    if max_rows is not None and rows and max(rows) > max_rows:
        faults.append(
            f"the request has {max(rows)} rows; at most {max_rows} are accepted at once: "
            "send it in parts"
        )
    ragged = () if faults else _ragged(arrays, specs)
    padded = tuple(_next(size, lengths) for size in ragged)
    if None in padded:
        faults.append(f"a ragged dim is {max(ragged)} long; the longest accepted is {lengths[-1]}")
    if faults:
        raise refusal(faults)
    return Request(arrays, arrays[0].shape[0], ragged, tuple(n for n in padded if n is not None))


def refusal(faults: Sequence[str]) -> RequestError:
    """The error that lists all faults of a request.

    >>> print(refusal(["a is missing", "b is unknown"]))
    2 faults in the request:
      a is missing
      b is unknown
    """
    lines = "".join(f"\n  {fault}" for fault in faults)
    several = f"{len(faults)} faults in the request:{lines}"
    return RequestError(faults[0] if len(faults) == 1 else several)


def _ready(
    inputs: Mapping[str, Any], specs: Sequence[TensorSpec], max_rows: int | None
) -> Request | None:
    """The request of arrays that are what the specs say, as nearly all are; ``None`` for others."""
    if len(inputs) != len(specs):
        return None
    arrays: list[Any] = [inputs.get(spec.name) for spec in specs]
    if not all(map(_is_exact, arrays, specs)):
        return None
    rows = len(arrays[0])
    is_accepted = rows > 0 and (max_rows is None or rows <= max_rows)
    if not is_accepted or any(len(array) != rows for array in arrays):
        return None
    return Request(arrays, rows, (), ())


def _is_exact(array: Any, spec: TensorSpec) -> bool:
    return (
        type(array) is np.ndarray
        and array.ndim == len(spec.shape)
        and array.shape[1:] == spec.shape[1:]
        and array.dtype == np.dtype(spec.dtype)
        and array.flags.c_contiguous
    )


def stacked(
    requests: Sequence[Request], specs: Sequence[TensorSpec], rows: int, pad_value: float
) -> list[np.ndarray]:
    """The inputs of a batch of ``rows`` rows; the first row stands in for those that are added."""
    padded = iter(requests[0].padded)
    batch = []
    for number, spec in enumerate(specs):
        dims = tuple(next(padded) if size is None else size for size in spec.shape[1:])
        parts = [request.arrays[number] for request in requests]
        if len(parts) == 1 and parts[0].shape == (rows, *dims):
            batch.append(parts[0])
            continue
        array = np.empty((rows, *dims), spec.dtype)
        if all(part.shape[1:] == dims for part in parts):
            end = _fill(array, parts)
        else:
            array.fill(pad_value)
            end = 0
            for part in parts:
                begin, end = end, end + part.shape[0]
                array[(slice(begin, end), *map(slice, part.shape[1:]))] = part
        array[end:] = array[:1]
        batch.append(array)
    return batch


def _fill(array: np.ndarray, parts: Sequence[np.ndarray]) -> int:
    """Copy rows one after the other into an array; how many there are.

    NumPy lets other threads run during each copy of some hundred numbers, and then waits for its
    turn, which under load takes ten times as long as the copy. Joining bytes does not.
    """
    end = sum(part.shape[0] for part in parts)
    if max(part.nbytes for part in parts) > _SMALL_BYTES:
        np.concatenate(parts, out=array[:end])
    else:
        joined = b"".join([part.tobytes() for part in parts])
        array[:end] = np.frombuffer(joined, array.dtype).reshape(end, *array.shape[1:])
    return end


def _array(value: Any, spec: TensorSpec, faults: list[str]) -> np.ndarray | None:
    """The value in the dtype of its input; ``None``, and a fault more, where it does not fit."""
    what = f"input {spec.name!r}"
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        faults.append(f"{what} is not an array of numbers: {error}")
        return None
    fits = array.ndim == len(spec.shape) and all(
        wanted in (None, size) for size, wanted in zip(array.shape, spec.shape, strict=True)
    )
    if not fits:
        faults.append(f"{what} has shape {array.shape}: expected {spec}")
    dtype = np.dtype(spec.dtype)
    if not _casts(array.dtype, dtype):
        faults.append(f"{what} has dtype {array.dtype}: expected {spec.dtype}")
        return None
    narrow, fault = in_dtype(array, dtype)
    if fault:
        faults.append(f"{what}: {fault}")
    return np.ascontiguousarray(narrow) if fits and not fault else None


def _casts(dtype: np.dtype, wanted: np.dtype) -> bool:
    """Whether values keep their meaning: floats stay floats, integers become either."""
    have, want = _kind(dtype), _kind(wanted)
    if want == "float":
        return have in ("float", "integer")
    return dtype == wanted or have == want == "integer"


def _kind(dtype: np.dtype) -> str:
    if dtype.kind in "iu":
        return "integer"
    if dtype.kind == "f" or "float" in dtype.name:
        return "float"
    return dtype.name


def _ragged(arrays: Sequence[np.ndarray], specs: Sequence[TensorSpec]) -> Lengths:
    return tuple(
        size
        for array, spec in zip(arrays, specs, strict=True)
        for size, expected in zip(array.shape[1:], spec.shape[1:], strict=True)
        if expected is None
    )


def _next(size: int, lengths: Sequence[int]) -> int | None:
    """The smallest length that is enough; without lengths, the size itself."""
    if not lengths:
        return size
    return next((length for length in lengths if length >= size), None)
