"""Gradients made smaller for the wire, on the worker; what is lost now is added to the next.

Half precision as in Horovod. ``TopK`` sends the largest values alone (Deep Gradient Compression,
Lin and others, 2018). Error feedback (Seide and others, 2014) keeps on the worker what a push left
out, and adds it to that worker's next gradient, so that nothing is lost for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ClusterError
from ...step.compression import TopK

_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Half:
    """Send gradients in ``dtype``, ``"float16"`` or ``"bfloat16"``.

    ``feedback`` keeps what rounding took for the next step. Raises
    :class:`~meshwright.ClusterError` for another type.

    >>> Half("bfloat16")
    Half(dtype='bfloat16', feedback=True)
    """

    dtype: str
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in _HALVES:
            raise ClusterError(f"Half(dtype) must be one of {_HALVES}; received {self.dtype!r}.")


Compression = TopK | Half


def compression(choice: str | Compression | None) -> Compression | None:
    """The value that ``"float16"`` or ``"bfloat16"`` stands for; values as they are.

    Raises :class:`~meshwright.ClusterError` for anything else.

    >>> compression("bfloat16")
    Half(dtype='bfloat16', feedback=True)
    """
    if choice is None or isinstance(choice, TopK | Half):
        return choice
    if choice not in _HALVES:
        raise ClusterError(
            f"unknown compression={choice!r}: expected 'float16', 'bfloat16', TopK(share) or None."
        )
    return Half(choice)


@dataclass(frozen=True, eq=False)
class Packed:
    """A gradient as it travels: arrays, the codec that servers undo, and what was left out."""

    arrays: tuple[np.ndarray, ...]
    options: dict[str, Any]
    residual: np.ndarray | None


def pack_gradient(
    how: Compression, gradient: np.ndarray, before: np.ndarray | None = None
) -> Packed:
    """A float32 gradient in fewer bytes; ``before`` is what the last step left out.

    >>> packed = pack_gradient(TopK(0.5), np.array([3, -1, 0.5, -4], "float32"))
    >>> [array.tolist() for array in packed.arrays], packed.residual.tolist()
    ([[0, 3], [3.0, -4.0]], [0.0, -1.0, 0.5, 0.0])
    """
    if before is not None:
        gradient = gradient + before
    if isinstance(how, TopK):
        return _top(how, gradient)
    return _half(how, gradient)


def _top(how: TopK, gradient: np.ndarray) -> Packed:
    flat = gradient.reshape(-1)
    count = max(1, round(how.share * flat.size)) if flat.size else 0
    if count < flat.size:
        places = np.argpartition(np.abs(flat), flat.size - count)[flat.size - count :]
        places.sort()
    else:
        places = np.arange(flat.size)
    residual = None
    if how.feedback:
        residual = flat.copy()
        residual[places] = 0
        residual = _finite(residual).reshape(gradient.shape)
    return Packed((places.astype(np.int32), flat[places]), {"codec": "topk"}, residual)


def _half(how: Half, gradient: np.ndarray) -> Packed:
    import ml_dtypes

    if how.dtype == "float16":
        # What is too large for it becomes its largest; error feedback brings the rest.
        most = np.float32(np.finfo(np.float16).max)
        clipped = np.where(np.isinf(gradient), gradient, np.clip(gradient, -most, most))
        sent = clipped.astype(np.float16)
        arrived = sent.astype(np.float32)
    else:
        rounded = gradient.astype(ml_dtypes.bfloat16)
        arrived = rounded.astype(np.float32)
        sent = rounded.view(np.uint16)  # servers know NumPy's own types alone
    residual = None
    if how.feedback:
        with np.errstate(invalid="ignore"):  # of infinities
            residual = _finite(gradient - arrived)
    return Packed((sent,), {"codec": how.dtype}, residual)


def _finite(residual: np.ndarray) -> np.ndarray:
    """Without what is not finite, which would be in every later gradient."""
    return np.where(np.isfinite(residual), residual, np.float32(0))
