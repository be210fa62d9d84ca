"""The signature of a batch: shapes and dtypes of its arrays, and how they are nested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...errors import BatchError


@dataclass(frozen=True)
class Signature:
    """What a step is compiled for: one batch is like another if their signatures are equal.

    >>> import numpy as np
    >>> batch = {"age": np.zeros([8, 1], "float32"), "id": np.zeros([8], "int64")}
    >>> print(Signature.of((batch, np.zeros([8], "float32"))))
    8x1 float32, 8 int32, 8 float32
    """

    arrays: tuple[tuple[tuple[int, ...], str], ...]  # (dims, dtype on devices)
    tree: str

    @classmethod
    def of(cls, batch: Any) -> Signature:
        """That of a batch on the host. Raises :class:`~meshwright.BatchError` for other leaves."""
        leaves, tree = jax.tree.flatten(batch)
        return cls(tuple(_described(leaf) for leaf in leaves), str(tree))

    @property
    def rows(self) -> int | None:
        """The first dim, where all arrays have the same; else ``None``."""
        firsts = {dims[0] if dims else None for dims, _ in self.arrays}
        return firsts.pop() if len(firsts) == 1 else None

    def with_rows(self, rows: int) -> Signature:
        """The same with another number of rows."""
        return Signature(tuple(((rows, *d[1:]), t) for d, t in self.arrays), self.tree)

    def __str__(self) -> str:
        return ", ".join(
            f"{'x'.join(map(str, dims)) or 'scalar'} {dtype}" for dims, dtype in self.arrays
        )


def _described(leaf: Any) -> tuple[tuple[int, ...], str]:
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if array.dtype == object or array.dtype.kind in "US":
        raise BatchError(
            f"batches must hold arrays of numbers; received {type(leaf).__name__} of dtype "
            f"{array.dtype}. Convert strings to numbers in dataset_fn."
        )
    return tuple(array.shape), jax.dtypes.canonicalize_dtype(array.dtype).name


def on_devices(leaf: Any) -> np.ndarray:
    """A leaf of a batch with the dtype that it has on devices."""
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
