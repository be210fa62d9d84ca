"""An exported step, as a value that travels: the coordinator makes it, and workers run it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import BatchError
from ...layouts.mesh import Mesh
from .gradients import Parts
from .signature import Signature


@dataclass(frozen=True)
class Filling:
    """How a batch is filled up that does not divide: those arrays that ``grow`` get ``rows``."""

    rows: int
    grow: tuple[bool, ...]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The arrays with their first rows behind them: whatever is finite stays so.

        >>> Filling(4, (True, False))([np.array([1, 2, 3]), np.array([7, 8, 9])])
        [array([1, 2, 3, 1]), array([7, 8, 9])]
        """
        return [
            np.take(leaf, np.arange(self.rows) % len(leaf), axis=0) if grows else leaf
            for leaf, grows in zip(leaves, self.grow, strict=True)
        ]


@dataclass(frozen=True)
class FindIds:
    """What finds the ids that a batch looks up; empty where no table travels by rows.

    ``leaves`` says of each lookup which array of the batch its ids are, where they are one as it
    is; then nothing need run to find them. The others are computed from the arrays ``read``.
    """

    code: bytes = b""
    leaves: tuple[int | None, ...] = ()
    read: tuple[int, ...] = ()


@dataclass(frozen=True)
class Code:
    """The step for one signature of batches.

    ``filling`` is done to a batch first, where it is given.
    """

    gradients: bytes
    measures: bytes
    ids: FindIds = FindIds()
    local: bytes = b""  # a whole step with the model's own optimizer, where that was asked for
    filling: Filling | None = None
    outputs: bytes = b""  # the outputs alone, where they were asked for


@dataclass(frozen=True)
class AnyRows:
    """The step for batches that are ``like`` one but for their number of rows.

    ``even`` is for multiples of the shards of rows, ``uneven`` for other numbers; where one is
    missing, ``why_not`` says why.
    """

    like: Signature
    even: Code | None
    uneven: Code | None = None
    why_not: str = ""

    def code_for(self, signature: Signature, row_shards: int) -> Code | None:
        """The code for batches like this, if it is one of these."""
        rows = signature.rows
        if rows is None or signature != self.like.with_rows(rows):
            return None
        return self.uneven if rows % row_shards else self.even


@dataclass(frozen=True)
class Exported:
    """A program's step, exported; a value that may travel.

    ``any_rows`` are the steps for any number of rows, one for each structure of batches.
    ``lookup_tables`` names the table of every lookup, in order. With a ``mesh`` the step is for
    several devices, and ``row_shards`` is into how many shards they cut rows.
    """

    name: str
    parts: Parts
    codes: tuple[tuple[Signature, Code], ...]
    lookup_tables: tuple[str, ...] = ()
    any_rows: tuple[AnyRows, ...] = ()
    mesh: Mesh | None = None
    row_shards: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all code."""
        return sum(map(len, self._code))

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal code on equal devices."""
        parts = [*self._code, repr(self.mesh).encode()]
        return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()

    @property
    def _code(self) -> list[bytes]:
        codes = [code for _, code in self.codes]
        codes += [code for free in self.any_rows for code in (free.even, free.uneven) if code]
        return [
            part
            for c in codes
            for part in (c.gradients, c.measures, c.ids.code, c.local, c.outputs)
        ]

    def code_for(self, signature: Signature) -> Code:
        """The code for batches like this. Raises :class:`~meshwright.BatchError` if none fits."""
        for exported_for, code in self.codes:
            if exported_for == signature:
                return code
        for free in self.any_rows:
            if (code := free.code_for(signature, self.row_shards)) is not None:
                return code
        first, rows = self.codes[0][0], signature.rows
        alike = [free for free in self.any_rows if rows and free.like.with_rows(rows) == signature]
        if rows is not None and not alike and any(free.even for free in self.any_rows):
            raise BatchError(
                f"unexpected batch: model {self.name!r} was exported for {first} ({first.tree}); "
                f"received {signature} ({signature.tree}). Only the number of rows may differ."
            )
        why_not = next((free.why_not for free in alike or self.any_rows), "")
        raise BatchError(
            f"unexpected batch: model {self.name!r} was exported for {first}; received {signature}."
            + (f" It takes no other number of rows: {why_not}." if why_not else "")
            + " Make all batches alike, and drop a smaller last one in dataset_fn."
        )
