"""What an agent learns of a process from outside: whether it is stopped, where its Python is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from .failure import main_stack

_LOOK_EVERY_S = 0.05
_STACK_S = 1.0


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal; only Linux says so."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def stack_from(path: Path, ask: Callable[[], None]) -> str:
    """The stack that a rank writes to this file when asked; empty if it does not do so soon."""
    known, before = len(_read(path)), b""
    ask()
    until_s = time.monotonic() + _STACK_S
    while time.monotonic() < until_s:
        time.sleep(_LOOK_EVERY_S)
        new = _read(path)[known:]
        if new and new == before:  # it is whole
            break
        before = new
    return main_stack(before.decode(errors="replace"))


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
