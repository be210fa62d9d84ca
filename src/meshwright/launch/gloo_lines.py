"""The lines that Gloo prints while processes connect, taken out of a task's output."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BEGINNING = "[Gloo] Rank "
_WORDS = re.compile(
    r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : "
)


class WithoutGloo:
    """Leaves out what Gloo prints; it has no setting for that.

    Gloo prints a line in parts, and a process with several devices connects them in several
    threads. So the parts of two lines may be mixed, and a line of the program may stand among
    them: words and numbers of Gloo are left out until each line that began has had its end.

    >>> lines = WithoutGloo()
    >>> lines.of(["[Gloo] Rank [Gloo] Rank 0 is connected to 1 peer ranks. ", "loss 0.5", "01"])
    ['loss 0.5']
    >>> lines.of(["01"])
    ['01']
    """

    def __init__(self) -> None:
        self._open = 0  # lines of Gloo whose end is still to come

    def of(self, lines: Iterable[str]) -> list[str]:
        """The lines that are the program's own."""
        return [own for line in lines if (own := self._own(line)) is not None]

    def _own(self, line: str) -> str | None:
        self._open += line.count(_BEGINNING)
        rest = _WORDS.sub("", line)
        if rest.strip(" 0123456789"):
            return rest
        if rest == line and not self._open:
            return line
        self._open = max(self._open - 1, 0)
        return None
