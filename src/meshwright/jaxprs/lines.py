"""Which line of the user's code each operation of a step comes from, for reports and plans.

A compiled program keeps the name scopes that its operations were traced under, also through
gradients and where XLA merges several. So while a step is traced for planning, each operation of
the model is put under one more scope, which has the number of its line. Numbers go by order of
appearance: lines that move in a file change no number, and no program.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sysconfig
import traceback
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from .. import _compat
from ..scoped import scoped
from .edits import jaxprs_inside
from .primitives import CHECKPOINTS, CONTROL_FLOW

_SCOPE = re.compile(r"mw_line_(\d+)_")
_HERE = Path(__file__).parent.parent
# Libraries that models are written with; what else is installed may be the user's own.
_LIBRARIES = (
    *("jax", "jaxlib", "keras", "flax", "equinox", "haiku", "optax", "numpy", "einops"),
    *("diffrax", "jaxtyping", "beartype", "chex", "torch", "tensorflow"),
)
# Frames outside these files belong to the caller of the step, not to the model.
_ASKERS = ("step", "planning", "run", "equivalence", "commands")
_OUTSIDE = tuple(str(_HERE / room) + os.sep for room in _ASKERS)
_FRONT = ("jax.py", "named.py", "keras/program.py", "keras/hooks.py")
_CALLERS = tuple(str(_HERE / "frontends" / name) for name in _FRONT)
_BODIES = CONTROL_FLOW | CHECKPOINTS | {"shard_map"}


class SourceLine(NamedTuple):
    """A line of the user's code, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """As people find it: the file from here, or its last two parts, and the line."""
        path = Path(self.file)
        if path.is_absolute():
            here = Path.cwd()
            path = path.relative_to(here) if path.is_relative_to(here) else Path(*path.parts[-2:])
        return f"{path.as_posix()}:{self.line}"


class Lines:
    """The lines that were met while a step was traced, by number."""

    def __init__(self) -> None:
        self._numbers: dict[SourceLine, int] = {}

    def number(self, line: SourceLine) -> int:
        """The number of a line, a new one where it was not met before."""
        return self._numbers.setdefault(line, len(self._numbers))

    def all(self) -> tuple[SourceLine, ...]:
        """Every line, in the order of its number."""
        return tuple(self._numbers)


_current: ContextVar[Lines | None] = ContextVar("lines", default=None)


def noting(lines: Lines) -> contextlib.AbstractContextManager[None]:
    """Note in ``lines`` where the operations come from that are traced inside."""
    return scoped(_current, lines)


def noted(closed: Any) -> Any:
    """A traced function with each operation under the number of its line; outside of
    :func:`noting` as it is."""
    lines = _current.get()
    return closed if lines is None else closed.replace(jaxpr=_noted(closed.jaxpr, lines))


def number_in(op_name: str) -> int | None:
    """The number of the line in a path of name scopes, the innermost; ``None`` without any.

    >>> number_in("jit(step)/transpose(jvp(mw_line_3_))/ffn/mw_line_12_/dot"), number_in("a/dot")
    (12, None)
    """
    numbers = _SCOPE.findall(op_name)
    return int(numbers[-1]) if numbers else None


def without_number(op_name: str) -> str:
    """A path of name scopes without those of lines.

    >>> without_number("jit(step)/jvp(mw_line_3_)/ffn/mw_line_12_/dot")
    'jit(step)/jvp()/ffn/dot'
    """
    return re.sub(r"/mw_line_\d+_(?=[/)]|$)|mw_line_\d+_/?", "", op_name)


def _noted(jaxpr: Any, lines: Lines) -> Any:
    return jaxpr.replace(eqns=[_with_number(eqn, lines) for eqn in jaxpr.eqns])


def _with_number(eqn: Any, lines: Lines) -> Any:
    """The equation under the number of its line, and those inside it under theirs."""
    line = line_of(eqn)
    if _is_of_the_user(eqn):
        eqn = eqn.replace(params={k: _inside(v, lines) for k, v in eqn.params.items()})
    return eqn if line is None else _compat.under_scope(eqn, f"mw_line_{lines.number(line)}_")


def _inside(value: Any, lines: Lines) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_inside(part, lines) for part in value)
    if hasattr(value, "jaxpr"):
        return value.replace(jaxpr=_noted(value.jaxpr, lines))
    return _noted(value, lines) if hasattr(value, "eqns") else value


def _is_of_the_user(eqn: Any) -> bool:
    """Whether the lines inside are those of this call: a function that a library has compiled is
    traced once, and keeps the lines of its first caller."""
    if eqn.primitive.name in _BODIES:
        return True
    name = eqn.params.get("name")
    first = next((one for inner in jaxprs_inside(eqn) for one in inner.eqns[:1]), None)
    if not isinstance(name, str) or first is None:
        return False
    line = line_of(first)
    return line is not None and line.function.rpartition(".")[2] == name


def line_of(eqn: Any) -> SourceLine | None:
    """The innermost line of the user's that an equation was traced under."""
    for file, function, line in _compat.frames_of(eqn):
        if _is_outside(file):
            return None
        if not _is_library(file):
            return SourceLine(file, line, function)
    return None


def lines_raised(error: BaseException) -> list[SourceLine]:
    """The lines of the user's code that an error, or its cause, came through, outermost first."""
    cause = error.__cause__ or error.__context__
    lines = lines_raised(cause) if cause is not None else []
    if lines:
        return lines
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if _is_outside(file):
            lines = []
        elif not _is_library(file):
            lines.append(SourceLine(file, line, frame.f_code.co_qualname))
    return lines


def where_raised(error: BaseException) -> SourceLine | None:
    """The innermost line of the user's model that an error, or its cause, came through, if any."""
    return next(reversed(lines_raised(error)), None)


def user_lines(error: BaseException) -> list[str]:
    """Those lines as a traceback shows them, in short: ``train.py:12, in build: x = rows[3]``."""
    rows = []
    for line in lines_raised(error):
        text = linecache.getline(line.file, line.line).strip()
        rows.append(f"{line}, in {line.function}" + (f": {text}" if text else ""))
    return rows


def _is_outside(file: str) -> bool:
    return file.startswith(_OUTSIDE) or file in _CALLERS


@functools.cache
def _is_library(file: str) -> bool:
    if file.startswith((str(_HERE) + os.sep, "<frozen")):
        return True
    _, installed, inside = file.replace(os.sep, "/").rpartition("-packages/")
    if installed:
        return inside.partition("/")[0] in _LIBRARIES
    return file.startswith(sysconfig.get_paths()["stdlib"] + os.sep)
