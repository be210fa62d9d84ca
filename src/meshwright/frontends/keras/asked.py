"""Layouts that a model itself asks for, noted on its variables by ``mw.keras.layers``."""

from __future__ import annotations

from typing import Any

from ...layouts.layout import Layout


def ask_layout(variable: Any, layout: Layout) -> None:
    """Note the layout that a variable's layer was given for it."""
    variable._meshwright_layout = layout


def asked_layout(variable: Any) -> Layout | None:
    """The layout that was noted on a variable, if any."""
    return getattr(variable, "_meshwright_layout", None)
