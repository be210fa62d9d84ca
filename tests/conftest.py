"""Compile the many small programs of these tables quickly; leave slow tests to the full tier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# LLVM's own optimizations take half the time of a test here; they come after XLA has partitioned
# the program, so the laws are about the same program without them.
_QUICKLY = "--xla_backend_optimization_level=0"

if _QUICKLY not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICKLY}".strip()

_SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that ``slow.txt`` names is marked ``full``."""
    for item in items:
        if item.nodeid in _SLOW:
            item.add_marker(pytest.mark.full)
