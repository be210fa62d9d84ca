"""Warnings that point at the user's line, however deep in the library they arise."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

from .errors import MeshwrightWarning

_HERE = str(Path(__file__).parent)
_PASSED_THROUGH = ("keras", "jax")  # whose loops and wrappers call back into the library


def warn(text: str) -> None:
    """Issue a :class:`~meshwright.MeshwrightWarning` at the first line outside the library.

    (``warnings.warn(..., skip_file_prefixes=)`` does so from Python 3.12 on.)
    """
    warnings.warn(text, MeshwrightWarning, stacklevel=_depth())


def _depth() -> int:
    """The ``stacklevel``, seen from the caller, of the innermost frame of the user's."""
    skipped = (_HERE, contextlib.__file__, *map(_folder, _PASSED_THROUGH))
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame, depth = frame.f_back, depth + 1
    return depth


def _folder(package: str) -> str:
    """The folder of a package that is loaded; of another one, a name that no file begins with."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return "\0" if file is None else str(Path(file).parent)
