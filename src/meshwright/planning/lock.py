"""A lock file for layouts: what a dry run said, kept as JSON; ``changes.py`` says what got worse.

The idea is that of lock files of package managers: the file is checked in, a change of it is read
as a diff, and continuous integration fails where a step came to cost more than the file says.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..files import write, wrong_kind

if TYPE_CHECKING:
    from ..targets.hardware import Hardware
    from .report import DryRun

VERSION = 1
EXACT = ("parameter_bytes", "slot_bytes", "state_bytes", "input_bytes", "gradient_bytes")
COMPILED = ("padding_bytes", "temporary_bytes", "peak_bytes")
STEP = ("step_time_s", "flops", "mfu")
_DIGITS = 6  # of a number in the file that is not whole
_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin")}


@dataclass(frozen=True, order=True)
class LockedCollective:
    """All collectives of one kind, over the same axes, for the same place in the model.

    ``count`` is how many of them one step runs and ``bytes_per_step`` what they move in one device,
    both ``None`` where a loop does not tell.
    """

    kind: str
    axes: tuple[str, ...]
    path: str
    unexpected: bool
    count: int | None
    bytes_per_step: int | None

    def __str__(self) -> str:
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        prefix = "unexpected " if self.unexpected else ""
        return f"{prefix}{self.kind}{over}" + (f" for {self.path}" if self.path else "")


@dataclass(frozen=True, order=True)
class LockedLayout:
    """Where a parameter lies, and the bytes that one device holds of it."""

    path: str
    layout: str  # "[unsharded, model]"
    bytes_per_device: int


@dataclass(frozen=True)
class Lock:
    """What a dry run said, for a file. ``memory`` holds the bytes of one device, line by line.

    ``collectives`` is ``None`` for a step that the compiler refused. ``blocks`` says how many equal
    blocks there are where one and two of them were compiled, for all; else it is ``None``.
    ``analytic`` is true where nothing was compiled, and the planner's model said it. ``step`` holds
    its time, FLOPs of one device and MFU, by the numbers of ``hardware``; it is empty in files of
    before these were kept.
    """

    name: str
    target: str
    mesh: tuple[tuple[str, int], ...]
    versions: tuple[tuple[str, str], ...]
    fits: bool | None
    memory: tuple[tuple[str, int | None], ...]
    collectives: tuple[LockedCollective, ...] | None
    layouts: tuple[LockedLayout, ...]
    blocks: int | None = None
    analytic: bool = False
    step: tuple[tuple[str, float | None], ...] = ()
    hardware: str = ""

    def to_json(self) -> str:
        """The text of a file: one line for each thing that may change, in a stable order.

        >>> lock = Lock("net", "cpu:8", (("batch", 8),), (), True, (("peak_bytes", 5),), (), ())
        >>> Lock.from_json(lock.to_json()) == lock
        True
        """
        head = {
            "kind": "dry-run lock",
            "version": VERSION,
            "name": self.name,
            "target": self.target,
            "mesh": dict(self.mesh),
            "versions": dict(self.versions),
            "fits": self.fits,
        }
        if self.blocks is not None:
            head["blocks"] = self.blocks
        if self.analytic:
            head["analytic"] = True
        lines = [_pair(key, value) for key, value in head.items()]
        if self.step or self.hardware:
            lines.append(_pair("hardware", self.hardware))
            lines.append(_block("step", "{}", [_pair(*line) for line in self.step]))
        lines.append(_block("memory", "{}", [_pair(*line) for line in self.memory]))
        rows = [json.dumps(vars(collective)) for collective in self.collectives or ()]
        has_collectives = self.collectives is not None
        lines.append(
            _block("collectives", "[]", rows) if has_collectives else _pair("collectives", None)
        )
        lines.append(_block("layouts", "{}", [_locked_layout(layout) for layout in self.layouts]))
        return "{\n  " + ",\n  ".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Lock:
        """What :meth:`to_json` wrote. Raises :class:`~meshwright.DataError` for anything else."""
        try:
            return _lock(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"not a readable dry-run lock: {_reason(error)}. Write it again with `meshwright "
                "dry-run --save`, or restore it from version control."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the file. Raises :class:`~meshwright.DataError` if it cannot be written."""
        write(path, self.to_json(), "the dry-run lock")

    @classmethod
    def load(cls, path: str | Path) -> Lock:
        """Read a file. Raises :class:`~meshwright.DataError` if there is none, or a broken one."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(
                f"cannot read a dry-run lock from {str(path)!r}: {error.strerror}. Write one with "
                "`meshwright dry-run ... --save FILE`."
            ) from error
        except (UnicodeDecodeError, DataError) as error:
            raise DataError(f"{str(path)!r}: {error}") from error


def lock_of(run: DryRun) -> Lock:
    """What is kept of a dry run."""
    memory = tuple((line, getattr(run.memory, line)) for line in (*EXACT, *COMPILED))
    layouts = sorted(
        LockedLayout(
            entry.info.path,
            str(entry.layout.unbound()),
            entry.bytes_per_device,
        )
        for entry in run.placed
        if entry.info.role == "parameter"
    )
    return Lock(
        name=run.name,
        target=str(run.target),
        mesh=run.axes,
        versions=_versions("" if run.is_analytic else run.target.platform),
        fits=run.fits,
        memory=memory,
        collectives=None if run.refusal else _grouped(run),
        layouts=tuple(layouts),
        blocks=None if run.blocks is None else run.blocks.count,
        analytic=run.is_analytic,
        step=tuple((line, _rounded(getattr(run, line))) for line in STEP),
        hardware="" if run.hardware is None else _identity(run.hardware),
    )


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.{_DIGITS}g}")


def _identity(hardware: Hardware) -> str:
    """Its name and a digest of its numbers: times by others are not compared."""
    numbers = repr(replace(hardware, sources=()))
    return f"{hardware.name} {hashlib.sha256(numbers.encode()).hexdigest()[:8]}"


def _grouped(run: DryRun) -> tuple[LockedCollective, ...]:
    alike: dict[tuple[str, tuple[str, ...], str, bool], list[Any]] = {}
    for collective in run.collectives:
        key = collective.kind, collective.axes, collective.path, collective.is_unexpected
        alike.setdefault(key, []).append(collective)
    return tuple(
        LockedCollective(
            *key,
            count=_sum(same.count for same in alike[key]),
            bytes_per_step=_sum(same.bytes_per_step for same in alike[key]),
        )
        for key in sorted(alike)
    )


def _sum(numbers: Iterable[int | None]) -> int | None:
    counts = list(numbers)
    return None if None in counts else sum(number or 0 for number in counts)


def _versions(platform: str) -> tuple[tuple[str, str], ...]:
    fields_read = {}
    for package in ("jax", "jaxlib", *_COMPILERS.get(platform, ())):
        try:
            fields_read[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(fields_read.items())


# The file


def _pair(key: str, value: Any) -> str:
    return f"{json.dumps(key)}: {json.dumps(value)}"


def _locked_layout(locked: LockedLayout) -> str:
    return _pair(
        locked.path, {"layout": locked.layout, "bytes_per_device": locked.bytes_per_device}
    )


def _block(name: str, brackets: str, rows: Sequence[str]) -> str:
    begin, end = brackets
    inner = ",".join(f"\n    {row}" for row in rows) + "\n  " * bool(rows)
    return f"{json.dumps(name)}: {begin}{inner}{end}"


def _lock(read: Any) -> Lock:
    if not isinstance(read, dict):
        raise TypeError(f"expected a JSON object, received {type(read).__name__}")
    if fault := wrong_kind(read, "dry-run lock"):
        raise ValueError(fault)
    if read["version"] != VERSION:
        raise ValueError(f"expected version {VERSION}, received {read['version']!r}")
    return Lock(
        name=_as(str, read["name"]),
        target=_as(str, read["target"]),
        mesh=tuple((axis, _as(int, size)) for axis, size in read["mesh"].items()),
        versions=tuple(
            (package, _as(str, version)) for package, version in read["versions"].items()
        ),
        fits=None if read["fits"] is None else _as(bool, read["fits"]),
        memory=tuple((line, _number(read["memory"][line])) for line in read["memory"]),
        collectives=None
        if read["collectives"] is None
        else tuple(_read_collective(saved) for saved in read["collectives"]),
        layouts=tuple(
            LockedLayout(path, _as(str, saved["layout"]), _as(int, saved["bytes_per_device"]))
            for path, saved in read["layouts"].items()
        ),
        blocks=_number(read.get("blocks")),
        analytic=_as(bool, read.get("analytic", False)),
        step=tuple((line, _real(value)) for line, value in read.get("step", {}).items()),
        hardware=_as(str, read.get("hardware", "")),
    )


def _read_collective(saved: Mapping[str, Any]) -> LockedCollective:
    return LockedCollective(
        kind=_as(str, saved["kind"]),
        axes=tuple(_as(str, axis) for axis in saved["axes"]),
        path=_as(str, saved["path"]),
        unexpected=_as(bool, saved["unexpected"]),
        count=_number(saved["count"]),
        bytes_per_step=_number(saved["bytes_per_step"]),
    )


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, received {value!r}")
    return value


def _number(value: Any) -> int | None:
    return None if value is None else _as(int, value)


def _real(value: Any) -> float | None:
    return float(value) if type(value) is int else None if value is None else _as(float, value)


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else f"{error}".rstrip(".")
