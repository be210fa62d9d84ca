"""Numbers as the page writes them, the same as the terminal does."""

from __future__ import annotations

from ..tables import flops_text as flops_text
from ..tables import in_words as in_words

UNKNOWN = "unknown"


def ms(time_s: float | None) -> str:
    """Seconds in milliseconds.

    >>> ms(0.25), ms(None)
    ('250.000 ms', 'unknown')
    """
    return UNKNOWN if time_s is None else f"{1e3 * time_s:,.3f} ms"


def percent(share: float | None) -> str:
    """A share in percent.

    >>> percent(0.5)
    '50.0%'
    """
    return UNKNOWN if share is None else f"{share:.1%}"


def bytes_cell(nbytes: int | None) -> str:
    """Bytes for people, or that nobody knows."""
    return UNKNOWN if nbytes is None else in_words(nbytes)


def spelled(axes: tuple[str, ...]) -> str:
    """Axes of a mesh as one text.

    >>> spelled(("batch", "model")), spelled(())
    ('batch, model', '-')
    """
    return ", ".join(axes) or "-"
