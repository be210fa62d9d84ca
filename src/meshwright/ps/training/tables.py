"""Tables that lie on the servers and travel by rows: what a step knows of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Taken(NamedTuple):
    """What a lookup returns: ``rows`` of shape (*ids.shape, dim), and which ids are not padding.

    The rows of padding are 0. ``present`` has the shape of the ids.
    """

    rows: Any
    present: Any


Take = Callable[[str, Any], Taken]  # (name of the table, ids) -> what is looked up


@dataclass(frozen=True)
class Table:
    """A table of rows on the servers; ``rows`` is ``None`` where they are made on first use.

    ``padding_id`` stands for "no id": its row is 0, and is never read or trained.
    """

    name: str
    rows: int | None
    dim: int
    dtype: str = "float32"
    in_model: bool = True  # a parameter of the model by this path; else it is on the servers alone
    padding_id: int | None = None
    trains: bool = True  # else its rows are read, and neither changed nor made


Note = Callable[[str, int, Any], None]  # (name of the table, its number of rows, ids)


class Lookups(Protocol):
    """Which tables travel by rows, and how their lookups are caught while a model is traced."""

    tables: tuple[Table, ...]

    def watching(self, note: Note) -> AbstractContextManager[Any]:
        """Let every lookup of tables that travel whole tell its ids, while the block runs."""
        ...

    def taking(self, take: Take) -> AbstractContextManager[Any]:
        """Let every lookup of these tables ask ``take`` while the block runs."""
        ...


class NoLookups:
    """Every parameter travels whole."""

    tables: tuple[Table, ...] = ()

    def watching(self, note: Note) -> AbstractContextManager[Any]:
        """Nothing is looked up."""
        del note
        return nullcontext()

    def taking(self, take: Take) -> AbstractContextManager[Any]:
        """Nothing is caught."""
        del take
        return nullcontext()
