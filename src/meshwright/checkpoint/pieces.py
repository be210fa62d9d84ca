"""Pieces of a host's memory: a mark, the length of the header, the header, the values.

A piece that is being written has no mark, so it is never taken for a whole one.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..launch.memory import PIECES, piece_name
from .holders import Box

_MARK_BYTES = 16  # step + 1, or 0 while it is written; length of the header


def write_piece(path: Path, step: int, header: dict[str, Any], values: Iterable[Any]) -> None:
    """Write arrays behind a header; what was there before is lost at once."""
    text = json.dumps(header).encode()
    with path.open("r+b") as file:
        file.write(bytes(_MARK_BYTES))
        file.flush()  # from here on it is not complete
        file.write(text)
        for value in values:
            file.write(memoryview(value.reshape(-1).view("uint8")))
        file.truncate()
        file.flush()
        file.seek(0)
        file.write((step + 1).to_bytes(8, "little") + len(text).to_bytes(8, "little"))


def _header(path: Path) -> tuple[dict[str, Any], int] | None:
    """The header of a piece of memory and where its values begin; ``None`` if it is unfinished."""
    with path.open("rb") as file:
        mark = file.read(_MARK_BYTES)
        if not any(mark[:8]):
            return None
        length = int.from_bytes(mark[8:], "little")
        return json.loads(file.read(length)), _MARK_BYTES + length


def oldest(memory: Path, place: int, run: str) -> Path:
    """The piece of this rank that is needed least."""

    def age(path: Path) -> tuple[int, int]:
        header = _header(path)
        if header is None or header[0]["run"] != run:
            return (-1, -1)
        step, generation = header[0]["key"]
        return (step, generation)

    return min((memory / piece_name(place, piece) for piece in range(PIECES)), key=age)


def _headers(memory: Path, run: str) -> Iterator[tuple[Path, dict[str, Any], int]]:
    for path in sorted(memory.iterdir()):
        header = _header(path)
        if header is not None and header[0]["run"] == run:
            yield path, *header


Held = dict[tuple[int, int], tuple[str, dict[str, list[Box]]]]  # record and boxes, by key


def held_in(memory: Path, run: str) -> Held:
    """What a host's memory holds of a run."""
    held: Held = {}
    for _, header, _ in _headers(memory, run):
        step, generation = header["key"]
        _, boxes = held.setdefault((step, generation), (header["record"], {}))
        for key, box, _ in header["pieces"]:
            boxes.setdefault(key, []).append(_as_box(box))
    return held


def held_as_json(held: Held) -> list[Any]:
    """The same as a value of JSON."""
    return [[*key, record, boxes] for key, (record, boxes) in held.items()]


def read_held(text: str) -> Held:
    """What :func:`held_as_json` made, from text."""
    return {
        (step, generation): (record, {k: [_as_box(b) for b in of_k] for k, of_k in boxes.items()})
        for step, generation, record, boxes in json.loads(text)
    }


def _as_box(box: list[list[int]]) -> Box:
    return tuple((begin, end) for begin, end in box)


class PieceReader:
    """Reads the pieces of one copy in the memory of this host."""

    def __init__(self, memory: Path, run: str, key: tuple[int, int]) -> None:
        self._at: dict[tuple[str, Box], tuple[Path, int]] = {}
        self._dtypes: dict[str, str] = {}
        for path, header, begin in _headers(memory, run):
            if tuple(header["key"]) != key:
                continue
            for array in json.loads(header["record"])["arrays"]:
                self._dtypes[f"{array[0]}/{array[1]}"] = array[3]
            for name, box, offset in header["pieces"]:
                self._at[name, _as_box(box)] = (path, begin + offset)

    def read(self, key: str, box: Box) -> Any:
        """One piece; ``None`` where this host does not hold it."""
        if (key, box) not in self._at:
            return None
        path, offset = self._at[key, box]
        shape = tuple(end - begin for begin, end in box)
        dtype = jnp.dtype(self._dtypes[key])
        if not math.prod(shape):
            return np.empty(shape, dtype)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            return np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape).copy()
