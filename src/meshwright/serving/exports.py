"""What :class:`~meshwright.DeltaExporter` writes, as a server reads it.

A folder holds exports: full ones, and deltas with what has changed since the export before. An
export is a folder with a name of its own, complete once it has that name. Its ``export.json`` says
its number and kind, and the size and checksum of every other file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..checkpoint import written_as
from ..errors import CheckpointError, ModelError
from ..program import TrainState
from .handover import Moved, handed_over

ABOUT, WEIGHTS = "export.json", "weights.npz"
Kind = Literal["full", "delta"]
_PIECE_BYTES = 1 << 20
_DTYPES = "dtypes"  # beside the arrays, whose names have a part before a slash


@dataclass(frozen=True)
class Export:
    """One export: its number, and that of the full one that it builds on, which may be itself."""

    path: Path
    number: int
    base: int

    @property
    def kind(self) -> Kind:
        """Whether it holds all rows, or those that changed."""
        return "full" if self.number == self.base else "delta"

    def __str__(self) -> str:
        return f"{self.kind} export {self.number}"


def folder_name(number: int, base: int) -> str:
    """The name of an export's folder.

    >>> folder_name(12, 10), folder_name(10, 10)
    ('delta_00000012_of_00000010', 'full_00000010')
    """
    return f"full_{base:08d}" if number == base else f"delta_{number:08d}_of_{base:08d}"


def exports_in(directory: Path) -> tuple[Export, ...]:
    """All exports of a folder, by their numbers."""
    result = []
    for path in directory.glob("*_[0-9]*"):
        kind, *numbers = path.name.replace("_of_", "_").split("_")
        if not all(number.isdecimal() for number in numbers):
            continue
        if (kind, len(numbers)) == ("full", 1):
            result.append(Export(path, int(numbers[0]), int(numbers[0])))
        elif (kind, len(numbers)) == ("delta", 2):
            result.append(Export(path, int(numbers[0]), int(numbers[1])))
    return tuple(sorted(result, key=lambda export: export.number))


def export_at(path: Path) -> Export | None:
    """The export that is this folder; ``None`` for any other."""
    return next((export for export in exports_in(path.parent) if export.path == path), None)


def fulls_in(directory: Path) -> tuple[Export, ...]:
    """The full exports of a folder, the newest first."""
    return tuple(export for export in reversed(exports_in(directory)) if export.kind == "full")


def next_after(directory: Path, present: Export) -> Export | None:
    """The export to take after this one: the newest full one, if it is later, or the next delta.

    Raises :class:`~meshwright.CheckpointError` where a delta is missing.
    """
    later = [export for export in exports_in(directory) if export.number > present.number]
    fulls = [export for export in later if export.kind == "full"]
    if fulls:
        return fulls[-1]
    if later and (later[0].number, later[0].base) != (present.number + 1, present.base):
        raise CheckpointError(
            f"{directory}: expected delta {present.number + 1} of full export {present.base}; "
            f"the next one there is delta {later[0].number} of full export {later[0].base}. What "
            "changed between them is missing. Write a full export: export(full=True)."
        )
    return later[0] if later else None


def base_written_as(export: Export) -> tuple[int, int] | None:
    """What tells the full export below from one of another run; ``None`` where it was removed."""
    return written_as(export.path.parent / folder_name(export.base, export.base), ABOUT)


# Reading one


def about_of(export: Export) -> Mapping[str, Any]:
    """What an export says of itself, once every file of it has been compared with that.

    Raises :class:`~meshwright.CheckpointError`.
    """
    try:
        about = json.loads((export.path / ABOUT).read_text(encoding="utf-8"))
        identity = (about["kind"], about["number"], about["base"])
        files = dict(about["files"])
        wrong = [name for name in files if _sum_of(export.path / name) != tuple(files[name])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{export.path} cannot be read: {type(error).__name__}: {error}. It is not served."
        ) from error
    if wrong:
        raise CheckpointError(
            f"{export.path} is damaged: {', '.join(wrong)} differ from what {ABOUT} says of them. "
            "It is not served."
        )
    if identity != (export.kind, export.number, export.base):
        raise CheckpointError(
            f"{export.path} is named {export} of full export {export.base}, and its {ABOUT} says "
            f"{identity[0]} export {identity[1]} of full export {identity[2]}. It is not served."
        )
    return about


def sums_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and checksum of each file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _sum_of(path) for path in files}


def _sum_of(path: Path) -> tuple[int, int]:
    size, check = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size, check = size + len(piece), zlib.crc32(piece, check)
    return size, check


def write_weights(folder: Path, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write arrays by part and name."""
    named = {
        f"{part}/{name}": np.asarray(value)
        for part, own in parts.items()
        for name, value in own.items()
    }
    # NumPy's files know no bfloat16: their bytes go, and their dtype beside them.
    plain = {name: a.view(f"u{a.itemsize}") if _is_odd(a) else a for name, a in named.items()}
    odd = {name: str(array.dtype) for name, array in named.items() if _is_odd(array)}
    arrays: dict[str, Any] = {_DTYPES: np.array(json.dumps(odd)), **plain}
    np.savez(folder / WEIGHTS, **arrays)


def read_weights(export: Export) -> dict[str, dict[str, np.ndarray]]:
    """The same arrays again."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    with np.load(export.path / WEIGHTS, allow_pickle=False) as file:
        odd = json.loads(str(file[_DTYPES]))
        for name in file.files:
            if name != _DTYPES:
                part, _, own = name.partition("/")
                array = file[name]
                parts.setdefault(part, {})[own] = array.view(odd[name]) if name in odd else array
    return parts


def laid_out(source: Any, parts: Mapping[str, Mapping[str, Any]]) -> tuple[TrainState, Moved]:
    """These arrays, by part and name, on the devices of a source; for its ``finished``.

    Raises :class:`~meshwright.ModelError` where weights of the model are not among them.
    """
    shapes, values, faults = source.shapes, [], []
    names = source.names or ({}, {})
    for part, own, like in zip(("params", "state"), names, shapes[:2], strict=True):
        there = {path: parts.get(part, {}).get(own.get(path, path)) for path in like}
        faults += [p for p, v in there.items() if v is None or v.shape != like[p].shape]
        values.append(there)
    if faults:
        raise ModelError(
            f"weights of model {source.name!r} that are not in the export, or have another shape "
            f"there: {', '.join(faults)}. Serve the model that was exported."
        )
    return handed_over(TrainState(values[0], values[1], {}, {}), shapes)


def _is_odd(array: np.ndarray) -> bool:
    return array.dtype.kind == "V" or array.dtype.name not in np.sctypeDict


@dataclass(frozen=True, eq=False)
class LayeredRows:
    """The tables of a full export and of the deltas after it; a batch has one of these."""

    layers: tuple[Any, ...]  # of meshwright.ps.training.table_files.SavedRows, the newest last

    def lookup(self, table: str, ids: np.ndarray) -> np.ndarray:
        """The rows of these ids, as the newest export that has them says."""
        rows = self.layers[0].first_rows(table, ids)
        left = np.arange(len(ids))
        for layer in reversed(self.layers):
            part = rows[left]
            is_settled = layer.settle(table, ids[left], part)
            rows[left] = part
            left = left[~is_settled]
        return rows

    def and_then(self, layer: Any) -> LayeredRows:
        """The same with a delta more."""
        return LayeredRows((*self.layers, layer))
