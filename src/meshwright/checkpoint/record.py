"""What is known of a checkpoint without its arrays: read from its files, with no device at all."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..equal_layers import merged
from ..errors import CheckpointError

PARTS = ("params", "state", "slots", "metrics")  # the fields of a TrainState
KEY = "meshwright"  # where the record stands among Orbax' own metadata
_FORMAT = 2  # 1 had no packed arrays
_ORBAX_FILE = "_CHECKPOINT_METADATA"
_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?")
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")  # gs://bucket, and pathlib's form of it, gs:/bucket


@dataclass(frozen=True)
class SavedArray:
    """One array of a checkpoint: its part of the state, its path, its whole (logical) dims."""

    part: str
    path: str
    dims: tuple[int, ...]
    dtype: str

    @property
    def key(self) -> str:
        """The name of the array in the checkpoint's files."""
        return f"{self.part}/{self.path}"

    def __str__(self) -> str:
        return f"{self.path} {self.dims} {self.dtype}"


@dataclass(frozen=True)
class Position:
    """Where a run stands in its data.

    ``epoch`` is the epoch under way and ``batches`` how many of its batches were trained on.
    ``random`` is the randomness that the data is drawn from again, and ``data`` the state of a
    dataset's own iterator, where it offers one.

    >>> Position(epoch=2, batches=30)
    Position(epoch=2, batches=30, random=None, data=None)
    """

    epoch: int = 0
    batches: int = 0
    random: Mapping[str, Any] | None = None
    data: Any = None


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint as described by its files; ``print`` it for a table.

    ``directory`` holds its files. ``step`` is the number of batches trained on, ``arrays``
    describes every array, and ``packed`` names those that the files hold as one. ``layout`` is a
    description of the mesh and the layouts that it was written under; any other can read it.
    ``position`` is where the run stood in its data, ``notes`` is what the writer added: history and
    logs of the epochs before, for example. ``dtype`` is the type that weights were rounded to, if
    they were.

    >>> CheckpointInfo(Path("runs/mnist/12"), step=12, arrays=()).position.epoch
    0
    """

    directory: Path
    step: int
    arrays: tuple[SavedArray, ...]
    layout: str = ""
    position: Position = field(default_factory=Position)
    notes: Mapping[str, Any] = field(default_factory=dict)
    packed: tuple[str, ...] = ()  # keys of the arrays that its files hold as one, in order
    dtype: str | None = None  # that the weights were rounded to, where the writer asked for it

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return sum(math.prod(array.dims) * _itemsize(array.dtype) for array in self.arrays)

    def __str__(self) -> str:
        at = f"step {self.step}, epoch {self.position.epoch} after {self.position.batches} batches"
        lines = [f"{self.directory}: {at}, {self.nbytes:,} bytes", f"written under {self.layout}"]
        for part in PARTS:
            inside = [array for array in self.arrays if array.part == part]
            lines += [f"{part}: {len(inside)} arrays"] * bool(inside)
            lines += [f"  {text}" for text in inside]
        return "\n".join(line for line in lines if line != "written under ")


def read_checkpoint(directory: str | Path, step: int | None = None) -> CheckpointInfo:
    """What a checkpoint holds, read without devices and without its arrays.

    ``directory`` is that of a run, whose newest complete checkpoint is meant (or the one of
    ``step``), or of one checkpoint. Raises :class:`~meshwright.CheckpointError` if there is none.

    >>> import tempfile, numpy as np, meshwright as mw
    >>> state = mw.TrainState({"w": np.ones([4, 2], "float32")}, {}, {}, {})
    >>> directory = tempfile.mkdtemp()
    >>> with mw.Checkpoints(directory) as checkpoints:
    ...     checkpoints.save(7, state)
    >>> info = mw.read_checkpoint(directory)
    >>> info.step, info.nbytes, str(info.arrays[0])
    (7, 32, 'w (4, 2) float32')
    """
    directory = as_directory(directory)
    if step is None and (alone := _read(directory)) is not None:
        return alone
    info = newest(directory, step)
    if info is None:
        raise CheckpointError(_absent(directory, step))
    return info


def as_directory(directory: Any) -> Path:
    """The path of a directory. Raises :class:`CheckpointError` for a value that is not a path."""
    if not isinstance(directory, str | os.PathLike):
        raise CheckpointError(
            f"expected the path of a directory, such as 'runs/first'; received {directory!r}."
        )
    if not os.fspath(directory):
        raise CheckpointError(
            "expected the path of a directory, such as 'runs/first'; received an empty one. None "
            "stands for no checkpoints."
        )
    if _ADDRESS.match(os.fspath(directory)):
        raise CheckpointError(
            f"{os.fspath(directory)!r} is an address and not the path of a directory. Mount the "
            "object store, and name the directory where it is mounted."
        )
    return Path(directory)


def list_checkpoints(directory: Path) -> list[CheckpointInfo]:
    """The complete checkpoints of a run, oldest first."""
    return [info for path in _complete_paths(directory) if (info := _read(path)) is not None]


def readable_checkpoints(directory: Path) -> list[CheckpointInfo]:
    """The same without those whose record cannot be read: a run goes on beside a damaged one."""
    infos = []
    for path in _complete_paths(directory):
        with suppress(CheckpointError):
            infos += [info for info in (_read(path),) if info is not None]
    return infos


def newest(directory: Path, step: int | None = None) -> CheckpointInfo | None:
    """The newest complete checkpoint of a run, or the newest one of a step.

    Others are not looked at. Raises :class:`CheckpointError` where its record cannot be read.
    """
    for path in reversed(list(_complete_paths(directory))):
        is_wanted = step is None or _step_of(path) == step
        if is_wanted and (info := _read(path)) is not None:
            return info
    return None


def written_as(path: Path, file: str = _ORBAX_FILE) -> tuple[int, int] | None:
    """What tells a checkpoint from another one that was written later under the same path.

    ``None`` where there is none. ``file`` is one that each of them has.
    """
    try:
        stat = (path / file).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def newest_paths(directory: Path) -> list[Path]:
    """The complete checkpoints of a run, newest first, or the one that this is; none is read."""
    if (directory / _ORBAX_FILE).exists():
        return [directory]
    return [p for p in reversed(list(_complete_paths(directory))) if (p / _ORBAX_FILE).exists()]


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return -1 if match is None else int(match[1])


def path_for(directory: Path, step: int, names: set[str]) -> Path:
    """The path of a new checkpoint; one that is there already is never written over."""
    name, again = f"step_{step}", 0
    while name in names:
        again += 1
        name = f"step_{step}.{again}"
    return directory / name


def complete_names(directory: Path) -> set[str]:
    """The names of complete checkpoints, which are not read."""
    return {path.name for path in _complete_paths(directory)}


def is_complete_name(name: str) -> bool:
    """Whether a directory of this name is a complete checkpoint: Orbax renames when it is."""
    return _NAME.fullmatch(name) is not None


def is_leftover_name(name: str) -> bool:
    """Whether this is what a writer left behind that was killed while writing or removing."""
    begin = _NAME.match(name)
    return begin is not None and not is_complete_name(name)


def _complete_paths(directory: Path) -> Iterator[Path]:
    paths = list(directory.iterdir()) if directory.is_dir() else []
    named = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    for _, path in sorted(named, key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0))):
        yield path


def _read(path: Path) -> CheckpointInfo | None:
    """The record of one checkpoint; ``None`` where there is none of ours."""
    file = path / _ORBAX_FILE
    try:
        text = file.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror}. Let this user read the checkpoint, or name "
            "another one."
        ) from error
    except UnicodeDecodeError as error:
        raise _damaged(file, "it is not text") from error
    try:
        record = (json.loads(text).get("custom_metadata") or {}).get(KEY)
        return None if record is None else from_record(path, record)
    except CheckpointError:
        raise
    except json.JSONDecodeError as error:
        raise _damaged(file, f"its JSON ends or breaks at character {error.pos:,}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(file, "what it says of the checkpoint is incomplete") from error


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is damaged: {why}. Remove {file.parent.name}, or name an earlier checkpoint."
    )


def to_record(info: CheckpointInfo) -> dict[str, Any]:
    """The checkpoint's description as JSON values."""
    return {
        "format": _FORMAT,
        "step": info.step,
        "layout": info.layout,
        "arrays": [[a.part, a.path, list(a.dims), a.dtype] for a in info.arrays],
        "position": asdict(info.position),
        "notes": dict(info.notes),
        "packed": list(info.packed),
        "dtype": info.dtype,
    }


def from_record(path: Path, record: Mapping[str, Any]) -> CheckpointInfo:
    """The description that :func:`to_record` made."""
    if record["format"] > _FORMAT:
        raise CheckpointError(
            f"{path} was written in format {record['format']}, and this version of Meshwright "
            f"reads formats up to {_FORMAT}. Upgrade Meshwright."
        )
    return CheckpointInfo(
        directory=path,
        step=record["step"],
        arrays=tuple(SavedArray(a, b, tuple(dims), t) for a, b, dims, t in record["arrays"]),
        layout=record["layout"],
        position=Position(**record["position"]),
        notes=record["notes"],
        packed=tuple(record.get("packed", ())),
        dtype=record.get("dtype"),
    )


_FROZEN = "Frozen weights are state, not params: restore first, then freeze or unfreeze layers."


def check_same(info: CheckpointInfo, expected: list[SavedArray]) -> None:
    """Raise :class:`CheckpointError` that lists every missing or different array.

    Arrays of the wanted parts that were not asked for are listed too. Weights that were rounded
    when they were saved may be wanted in any floating-point type.
    """
    saved = {array.key: array for array in info.arrays}
    keys = {array.key for array in expected}
    parts = {array.part for array in expected}
    extra = [array for array in saved.values() if array.part in parts and array.key not in keys]
    faults = []
    for array in expected:
        stored = saved.get(array.key)
        if stored is None:
            faults.append(
                f"  {array.part} {array} is not in the checkpoint{_nearest(array, extra)}"
            )
        elif stored != array and not _is_rounded(info, stored, array):
            faults.append(f"  {array.part} {array} was saved as {stored.dims} {stored.dtype}")
    faults += [f"  {array.part} {array} is in the checkpoint only" for array in extra]
    if faults:
        lacking = {array.path for array in expected if array.key not in saved}
        is_frozen = not lacking.isdisjoint(array.path for array in info.arrays)  # or was
        raise CheckpointError(
            f"{len(faults)} array(s) of {info.directory} differ from what is to be restored; "
            "nothing was changed.\n"
            + "\n".join(merged(faults))
            + "\nBuild and compile the model as it "
            "was when the checkpoint was written, or restore only some parts of it (parts=...)."
            + (f" {_FROZEN}" if is_frozen else "")
        )


def _is_rounded(info: CheckpointInfo, array: SavedArray, expected: SavedArray) -> bool:
    as_expected = replace(array, dtype=expected.dtype) == expected
    return as_expected and array.dtype == info.dtype and "float" in expected.dtype


def _nearest(expected: SavedArray, others: list[SavedArray]) -> str:
    names = [other.path for other in others if other.part == expected.part]
    near = difflib.get_close_matches(expected.path, names, n=2, cutoff=0.5)
    return f" (near: {', '.join(near)})" if near else ""


def _absent(directory: Path, step: int | None) -> str:
    if directory.is_file():
        return f"{directory} is a file, and not a directory with checkpoints."
    if not directory.is_dir():
        return f"there is no directory {directory}."
    steps = [_step_of(path) for path in _complete_paths(directory)]
    if steps and step is None:
        return (
            f"{directory} holds no checkpoint that Meshwright wrote: those of steps {steps} have "
            "no record of it, or were removed while they were read. Name the directory of a run "
            "that has saved one with Meshwright."
        )
    if steps:
        return f"{directory} has no checkpoint of step {step}; it has those of steps {steps}."
    half = [path.name for path in directory.iterdir() if is_leftover_name(path.name)]
    besides = f" {len(half)} was never finished: {half[0]}." if half else ""
    return (
        f"{directory} holds no complete checkpoint.{besides} Name the directory of a run that has "
        "saved one, or one of its checkpoints."
    )


def _itemsize(dtype: str) -> int:
    """Bytes of one element: the digits of a dtype's name are its bits.

    >>> [_itemsize(dtype) for dtype in ("float32", "bfloat16", "float8_e4m3fn", "bool")]
    [4, 2, 1, 1]
    """
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1
