"""Stacked bars, drawn by the page's style sheet: each part has a colour and a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .markup import Html, tag

_LABELLED = 0.12  # the share of a bar from which on a part bears its name


class Part(NamedTuple):
    """A part of a bar; ``paint`` is one of the paints of page.css, ``text`` its size in words."""

    name: str
    size: float
    text: str
    paint: str


def bar(parts: Sequence[Part], whole: float, label: str, limit: float | None = None) -> Html:
    """Parts side by side, ``whole`` being the full width; ``limit`` marks a place on it."""
    drawn = [
        tag(
            "span",
            tag("b", part.name) if part.size / whole >= _LABELLED else None,
            class_=f"part p-{part.paint}",
            style=f"width:{_percent(part.size / whole)}",
            title=f"{part.name}: {part.text}",
        )
        for part in parts
        if part.size > 0
    ]
    at = None if limit is None else f"left:{_percent(min(1.0, limit / whole))}"
    mark = None if at is None else tag("i", class_="limit", style=at)
    told = "; ".join(f"{part.name} {part.text}" for part in parts if part.size > 0)
    return tag("div", drawn, mark, class_="bar", role="img", aria_label=f"{label}: {told}")


def key(names: Sequence[tuple[str, str]]) -> Html:
    """What the paints mean: pairs of a name and a paint."""
    return tag("ul", [tag("li", swatch(paint), name) for name, paint in names], class_="key")


def swatch(paint: str) -> Html:
    """A sample of a paint."""
    return tag("i", class_=f"swatch p-{paint}", aria_hidden="true")


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
