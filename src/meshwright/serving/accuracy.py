"""How far answers in fewer bits are from those of the model's own types, on a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """Of one output over a sample: differences, and how often the largest entry is the same.

    Example:
        >>> one, other = np.array([[1.0, 2.0]]), np.array([[1.5, 2.0]])
        >>> print(Difference.of("logits", one, other))
        logits: largest difference 0.5, mean 0.25 (values up to 2); the same class in 100.0%
    """

    output: str
    largest: float
    mean: float
    scale: float  # the largest value of the model's own answers
    same_class: float | None  # share of rows; None where rows are not vectors

    @classmethod
    def of(cls, output: str, own: np.ndarray, other: np.ndarray) -> Difference:
        """Of two answers to the same rows."""
        a, b = own.astype("float64"), other.astype("float64")
        gaps = np.abs(a - b)
        is_vector = a.ndim == 2 and a.shape[1] > 1
        same = float(np.mean(a.argmax(1) == b.argmax(1))) if is_vector else None
        return cls(output, float(gaps.max()), float(gaps.mean()), float(np.abs(a).max()), same)

    def __str__(self) -> str:
        same = "" if self.same_class is None else f"; the same class in {self.same_class:.1%}"
        text = f"{self.output}: largest difference {self.largest:.3g}, mean {self.mean:.3g}"
        return f"{text} (values up to {self.scale:.3g}){same}"


def differences(
    names: Sequence[str], own: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> tuple[Difference, ...]:
    """Of each output, in order."""
    return tuple(Difference.of(name, own[name], other[name]) for name in names)
