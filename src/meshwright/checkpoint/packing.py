"""Small arrays as one: a training state has many, and a file format's work is per array.

Slots of biases and scales, counters and metrics are bytes one behind the other in one array. What
is large or split over devices stays an array of its own, and so do parameters, which others may
want to read with Orbax alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from .record import SavedArray

PACKED = "packed"  # the name of the one array
_SMALL_BYTES = 2**20
_MOST_BYTES = 64 * 2**20  # whoever wants one of the small arrays reads them all


def pack(arrays: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arrays with the small ones in one, and the names of those, in order.

    >>> import numpy as np
    >>> arrays = {"params/w": np.ones(8), "slots/w": np.ones([2], "int16"), "slots/n": np.ones([])}
    >>> packed, names = pack(arrays)
    >>> names, {name: array.shape for name, array in packed.items()}
    (('slots/w', 'slots/n'), {'params/w': (8,), 'packed': (12,)})
    """
    import numpy as np

    small, total = list[str](), 0
    for key, array in arrays.items():
        if _is_small(key, array) and total + array.nbytes <= _MOST_BYTES:
            total += array.nbytes
            small.append(key)
    if len(small) < 2:
        return arrays, ()
    bytes_of_all = b"".join(arrays[key].tobytes() for key in small)
    others = {key: array for key, array in arrays.items() if key not in set(small)}
    return others | {PACKED: np.frombuffer(bytes_of_all, np.uint8)}, tuple(small)


def _is_small(key: str, array: Any) -> bool:
    import numpy as np

    is_whole_here = isinstance(array, np.ndarray)
    return is_whole_here and array.nbytes <= _SMALL_BYTES and not key.startswith("params/")


def unpack(packed: Any, arrays: Sequence[SavedArray]) -> dict[str, Any]:
    """Each of the small arrays, which stand in this order, by its name."""
    import jax.numpy as jnp
    import numpy as np

    found = {}
    for each, (begin, end) in zip(arrays, _places(arrays), strict=True):
        values = np.frombuffer(packed[begin:end].tobytes(), jnp.dtype(each.dtype))
        found[each.key] = values.reshape(each.dims)
    return found


def packed_bytes(arrays: Sequence[SavedArray]) -> int:
    """How long the one array is."""
    return max((end for _, end in _places(arrays)), default=0)


def _places(arrays: Sequence[SavedArray]) -> Iterator[tuple[int, int]]:
    import jax.numpy as jnp

    end = 0
    for each in arrays:
        begin, end = end, end + math.prod(each.dims) * jnp.dtype(each.dtype).itemsize
        yield begin, end
