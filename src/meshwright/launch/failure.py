"""Why a group was ended: which of its processes failed, where it was, and the message about it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ProcessError

_LAST_FRAMES = 24


@dataclass(frozen=True)
class Failure:
    """One process that failed.

    >>> failure = Failure(1, 4, "n01", 4711, "input", 12, "is stuck in 'input' after step 12")
    >>> print(failure.text())
    rank 1 of 4 (host n01, pid 4711) is stuck in 'input' after step 12.
    """

    rank: int
    processes: int
    host: str
    pid: int
    section: str
    step: int
    what: str
    stack: str = ""  # where its Python was, innermost first, or the traceback of what it raised
    lines: tuple[str, ...] = ()  # the last that it printed
    exit_code: int = 1
    uncounted_s: float = 0.0  # in code of the program's own, before any step was counted

    def text(self) -> str:
        """The failure in words, with stack and last lines."""
        at = f" (host {self.host}, pid {self.pid})" if self.pid else f" (host {self.host})"
        parts = [f"rank {self.rank} of {self.processes}{at} {self.what}."]
        if self.lines:
            parts += ["Its last lines:", *(f"    {line}" for line in self.lines)]
        if self.stack:
            title = "Its traceback:" if self.section == "failed" else "Its Python stack:"
            parts += [title, *(f"    {line}" for line in self.stack.splitlines())]
        return "\n".join(parts)

    def error(self) -> ProcessError:
        """What the other processes raise."""
        return ProcessError(
            f"{self.text()}\nThe other processes of the group cannot go on without it.",
            rank=self.rank,
            host=self.host,
            pid=self.pid,
            section=self.section,
            step=self.step,
            stack=self.stack,
        )

    def write(self, path: Path) -> None:
        """Write it to a file that is never seen half written."""
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(path)

    @classmethod
    def read(cls, path: Path) -> Failure | None:
        """What :meth:`write` wrote, if it did."""
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return cls(**{**values, "lines": tuple(values["lines"])})


def main_stack(dump: str) -> str:
    """The stack of the main thread in what ``faulthandler`` wrote, innermost first.

    >>> main_stack('Thread 0x1 (most recent call first):\\n  File "b.py", line 2 in g\\n\\n'
    ...            'Current thread 0x2 (most recent call first):\\n  File "a.py", line 1 in f\\n')
    '  File "a.py", line 1 in f'
    """
    blocks = [b.splitlines() for b in dump.split("\n\n") if b.strip()]
    if not blocks:
        return ""
    current = [b for b in blocks if b[0].startswith("Current thread")]
    return "\n".join((current or blocks)[-1][1 : 1 + _LAST_FRAMES])
