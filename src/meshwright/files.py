"""Files that a person keeps: one rule for writing them, and the kind that each one carries."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

from .errors import DataError

Kind = Literal["plan", "dry-run lock"]
_WRITERS: dict[str, str] = {
    "plan": "`meshwright plan --save` or Plan.save",
    "dry-run lock": "`meshwright dry-run --save`",
}


def check_writable(path: str | Path, what: str) -> None:
    """Raise :class:`~meshwright.DataError` if :func:`write` could not write this file.

    Nothing is created, so a command can check first, before minutes of searching or compiling.

    >>> check_writable("a/new/folder/plan.json", "the plan")
    """
    if fault := _fault(Path(path).absolute()):
        raise DataError(f"cannot write {what} to {str(path)!r}: {fault}. Choose another path.")


def _fault(path: Path) -> str:
    if path.is_dir():
        return "it is a folder"
    if path.exists():
        return "" if os.access(path, os.W_OK) else "permission denied"
    folder = next(parent for parent in path.parents if os.path.lexists(parent))
    if not folder.is_dir():
        return f"{str(folder)!r} is not a folder"
    return "" if os.access(folder, os.W_OK) else f"permission denied in {str(folder)!r}"


def write(path: str | Path, text: str, what: str) -> None:
    """Write a text; folders that are missing are made.

    Raises :class:`~meshwright.DataError`, which calls the text ``what``, if it cannot be written.
    """
    check_writable(path, what)
    with writing(path, what):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def writing(path: str | Path, what: str) -> Iterator[None]:
    """Raise :class:`~meshwright.DataError` where the block cannot write ``what`` there."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot write {what} to {str(path)!r}: {reason}.") from error


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Write a file aside; it takes its name, and the place of a former one, when it is complete.

    What is written survives a crash of the machine. After an error the former file is as it was.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def wrong_kind(read: Mapping[str, Any], expected: Kind) -> str:
    """What is wrong with the kind of a file that was read; empty where it is the expected one.

    >>> wrong_kind({"kind": "plan"}, "plan")
    ''
    >>> print(wrong_kind({"kind": "plan"}, "dry-run lock"))
    expected a dry-run lock (written by `meshwright dry-run --save`), received a plan (written by
    `meshwright plan --save` or Plan.save)
    """
    received = read.get("kind")
    if received == expected:
        return ""
    fact = f"expected a {expected} (written by {_WRITERS[expected]}), received "
    if received is None:
        return fact + "a file without a kind"
    writer = f" (written by {_WRITERS[received]})" if received in _WRITERS else ""
    return f"{fact}a {received}{writer}"
