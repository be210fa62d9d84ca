"""The global random generators of Python and NumPy as JSON values; shuffles are drawn from them."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def read_randomness() -> dict[str, Any]:
    """The states of ``random`` and of ``numpy.random``.

    >>> before = read_randomness()
    >>> drawn = random.random()
    >>> write_randomness(before)
    >>> random.random() == drawn
    True
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, _packed(words), gauss],
        "numpy": [kind, _packed(keys), int(position), int(has_gauss), float(cached)],
    }


def write_randomness(state: Mapping[str, Any]) -> None:
    """Set both generators to what :func:`read_randomness` read."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(_unpacked(words).tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, _unpacked(keys), *rest))


def _packed(words: Any) -> str:

    return base64.b64encode(np.asarray(words, "<u4").tobytes()).decode()


def _unpacked(text: str) -> Any:

    return np.frombuffer(base64.b64decode(text), "<u4").astype(np.uint32)
