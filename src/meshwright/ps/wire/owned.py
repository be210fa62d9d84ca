"""Arrays that travel later than they are given: with the values that they had then."""

from __future__ import annotations

import numpy as np


def owned(array: np.ndarray) -> np.ndarray:
    """The array, or a copy where its memory may be overwritten; what is repeated stays so.

    >>> ones = np.ones(1)
    >>> kept = owned(np.broadcast_to(ones, [3]))
    >>> ones[:] = 2.0
    >>> kept, kept.strides
    (array([1., 1., 1.]), (0,))
    """
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not root.flags.writeable:  # such as one of JAX
        return array
    if 0 not in array.strides:
        return array.copy()
    once = (*(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides), ...)
    return np.broadcast_to(array[once].copy(), array.shape)
