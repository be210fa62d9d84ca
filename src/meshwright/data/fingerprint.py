"""Short texts that tell arrays apart, for processes that compare what they read."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from ..arrays.values import as_numpy
from .rows import HostRows, LocalBatch

_SAMPLED = 1 << 14  # elements of an array that its fingerprint is made of, about


def fingerprint(array: np.ndarray) -> str:
    """Eight digits that depend on values from all rows, or on evenly spread ones, and all columns.

    >>> rows = np.zeros([32768, 784], "uint8")
    >>> before = fingerprint(rows)
    >>> rows[:, 500] = 7
    >>> fingerprint(rows) == before
    False
    """
    sample = array.flat[:: _stride(array.size)]
    if array.dtype.hasobject:
        return f"{zlib.crc32(repr(sample.tolist()).encode()):08x}"
    return f"{zlib.crc32(np.ascontiguousarray(sample).tobytes()):08x}"


def _stride(size: int) -> int:
    """About ``size / 16384``, without a factor in common with ``size``.

    With one it would be a multiple of a dim sooner or later, and miss columns.
    """
    stride = max(1, size // _SAMPLED)
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def arrays_text(value: Any) -> str | None:
    """Shape, dtype and fingerprint of arrays on the host; ``None`` for any other data.

    >>> arrays_text(np.zeros([2, 3], "float32"))
    '(2, 3) float32 a3c1ca20'
    >>> arrays_text("a dataset") is None
    True
    """
    leaves = jax.tree.leaves(value)
    if not leaves or not all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return None
    return ", ".join(f"{leaf.shape} {leaf.dtype} {fingerprint(leaf)}" for leaf in leaves)


def noting_first(batches: Iterable[Any], facts: dict[str, str]) -> Iterator[Any]:
    """The same batches; once the first was taken, ``facts`` describes it.

    A batch of this process's own rows is left out, for others have other rows. Of rows that are
    read by number, the numbers are described.

    >>> facts = {}
    >>> [batch.shape for batch in noting_first([np.zeros([2, 3], "float32")], facts)], facts
    ([(2, 3)], {'first batch': '(2, 3) float32 a3c1ca20'})
    """
    for number, batch in enumerate(batches):
        if number == 0 and not isinstance(batch, LocalBatch):
            text = arrays_text(jax.tree.map(_to_compare, batch))
            facts |= {} if text is None else {"first batch": text}
        yield batch


def _to_compare(leaf: Any) -> Any:
    if isinstance(leaf, HostRows):
        return np.asarray(leaf.numbers)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return leaf  # the layouts of its pieces are compared elsewhere
    return as_numpy(leaf)
