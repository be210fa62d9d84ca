"""What changed since a lock file was written, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...planning.changes import count_text
from ...units import quantity_text
from .columns import Line, Paragraphs, paragraphs

if TYPE_CHECKING:
    from ...planning.changes import Finding
    from ...planning.lock import Lock

_STYLES = {"worse": "red", "better": "green"}


def finding_text(change: Finding) -> str:
    """One change in one line."""
    text = f"{change.verdict:8}{change.what:12}{change.name}: "
    if change.unit == "none":
        return text + change.detail
    before, now = (
        count_text(value) if change.unit == "count" else quantity_text(value, change.unit)
        for value in (change.before, change.now)
    )
    text += f"{before} -> {now}"
    if change.before and change.now is not None:
        text += f" ({(change.now - change.before) / change.before:+.1%})"
    return text + (f", {change.detail}" if change.detail else "")


def changes_text(before: Lock, changes: Sequence[Finding], notes: Sequence[str]) -> Paragraphs:
    """All changes under a verdict."""
    count = sum(change.verdict == "worse" for change in changes)
    things = "1 thing" if count == 1 else f"{count} things"
    verdict = f"{things} got worse than the lock file" if count else "nothing got worse"
    return paragraphs(
        Line(f"{verdict} (written for {before.target}, {before.name})", "bold"),
        [Line(f"  {change}", _STYLES.get(change.verdict, "")) for change in changes],
        [f"note: {note}" for note in notes],
    )
