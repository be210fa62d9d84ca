"""Tables that lie on the servers and travel by rows: what a step knows of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

Take = Callable[[str, Any], Any]  # (name of the table, ids) -> rows of shape (*ids.shape, dim)


@dataclass(frozen=True)
class Table:
    """A table of rows on the servers; ``rows`` is ``None`` where they are made on first use."""

    name: str
    rows: int | None
    dim: int
    dtype: str = "float32"
    in_model: bool = True  # a parameter of the model by this path; else it is on the servers alone


class Lookups(Protocol):
    """Which tables travel by rows, and how their lookups are caught while a model is traced."""

    tables: tuple[Table, ...]

    def taking(self, take: Take) -> AbstractContextManager[Any]:
        """Let every lookup of these tables ask ``take`` while the block runs."""
        ...


class NoLookups:
    """Every parameter travels whole."""

    tables: tuple[Table, ...] = ()

    def taking(self, take: Take) -> AbstractContextManager[Any]:
        """Nothing is caught."""
        del take
        return nullcontext()
