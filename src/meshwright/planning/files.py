"""Files that planning writes for a person to keep."""

from __future__ import annotations

from pathlib import Path

from ..errors import DataError


def check_folder(path: str | Path, what: str) -> None:
    """Raise :class:`DataError` if no file can be there: said before minutes of compiling."""
    if not Path(path).absolute().parent.is_dir():
        raise DataError(
            f"{what} cannot be written to {str(path)!r}, as there is no such folder. Make the "
            "folder, or name another."
        )


def write(path: str | Path, text: str, what: str) -> None:
    """Write a text. Raises :class:`DataError` that calls it ``what`` if it cannot be written."""
    check_folder(path, what)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{what} cannot be written to {str(path)!r}: {error.strerror}. Name a file that may be "
            "written."
        ) from error
