"""Numbers as the page writes them, the same as the terminal does."""

from __future__ import annotations

from ..quantities import UNKNOWN as UNKNOWN
from ..quantities import flops_text as flops_text
from ..quantities import in_words as in_words
from ..quantities import ms as ms
from ..quantities import percent as percent


def spelled(axes: tuple[str, ...]) -> str:
    """Axes of a mesh as one text.

    >>> spelled(("batch", "model")), spelled(())
    ('batch, model', '-')
    """
    return ", ".join(axes) or "-"
