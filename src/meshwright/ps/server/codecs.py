"""How a gradient was made smaller for the wire, undone.

Half precision as in Horovod's compression; the largest values alone as in Deep Gradient Compression
(Lin and others, 2018), where the worker keeps what it left out and adds it to its next gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ...errors import ArrayError


def decode_gradient(
    codec: str | None, arrays: Sequence[np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
    """The gradient of ``shape`` that these arrays hold.

    ``None``: one array as it is. ``"float16"``: one array of them. ``"bfloat16"``: one array of
    their bits, as ``uint16``. ``"topk"``: places in the flat array (integers), and values there.
    Raises :class:`~meshwright.errors.ArrayError` where they do not fit.
    """
    if codec not in CODECS:
        names = ", ".join(repr(name) for name in CODECS)
        raise ArrayError(f"unknown gradient codec {codec!r}; expected one of {names}.")
    count, decode = CODECS[codec]
    if len(arrays) != count:
        raise ArrayError(f"codec {codec!r} takes {count} arrays; received {len(arrays)}.")
    gradient = decode(arrays, shape)
    if gradient.shape != shape:
        raise ArrayError(
            f"expected a gradient of shape {list(shape)}; received {list(gradient.shape)}."
        )
    return gradient


def _plain(arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return arrays[0]


def _half(arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return arrays[0].astype(np.float32)


def _brain(arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    if arrays[0].dtype.itemsize != 2:
        raise ArrayError(f"codec 'bfloat16' takes its 16 bits as uint16, not {arrays[0].dtype}.")
    bits = arrays[0].view(np.uint16).astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def _top(arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    places, values = arrays
    size = math.prod(shape)
    if places.ndim != 1 or places.shape != values.shape or places.dtype.kind not in "iu":
        raise ArrayError(
            "codec 'topk' takes places and values of one dim and the same size, not "
            f"{places.dtype}{list(places.shape)} and {values.dtype}{list(values.shape)}."
        )
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < size:
        raise ArrayError(f"codec 'topk' names places outside an array of {size} elements.")
    gradient = np.zeros(size, np.float32)
    gradient[places] = values
    return gradient.reshape(shape)


CODECS: dict[str | None, tuple[int, Callable[[Sequence, tuple[int, ...]], np.ndarray]]] = {
    None: (1, _plain),
    "float16": (1, _half),
    "bfloat16": (1, _brain),
    "topk": (2, _top),
}
