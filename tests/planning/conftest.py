"""Dry runs are compiled as users compile them: what XLA fuses is part of what they tell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def _emitters_as_they_come() -> Iterator[None]:
    """The process that compiles is not told of older emitters, as this one is."""
    flags = os.environ["XLA_FLAGS"].split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", " ".join(f for f in flags if "fusion_emitters" not in f))
        yield


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """Several tests ask for the same step, and the processes of a run share what is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        steps = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "steps"
        patch.setenv("MESHWRIGHT_CACHE", str(steps))
        yield
