"""How values look: as text, in a notebook, as a page.

A value asks for its view here and knows of no picture or table. The views are in one table of the
room ``display``, which the front door of the package names; none is loaded before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

Kind = Literal["text", "notebook", "page", "trace", "picture"]
_rooms: list[str] = []


def register_views(room: str) -> None:
    """Name the module whose ``VIEWS[kind]`` says by class which ``"module:function"`` draws it."""
    _rooms[:] = [room]


def view_of(value: object, kind: Kind, *more: object) -> Any:
    """The value as ``kind``; its class, or the nearest base that has such a view, decides.

    ``None`` for a value without one. ``more`` is passed on to the function that draws it.
    A text is something to print; the other kinds are strings.

    >>> from meshwright import Mesh
    >>> view_of(Mesh({"batch": 2}), "notebook").startswith('<div class="mw-view">')
    True
    """
    if not _rooms:
        return None
    package = __name__.partition(".")[0]
    views = importlib.import_module(_rooms[0]).VIEWS[kind]
    for base in type(value).__mro__:
        if place := views.get(f"{base.__module__}.{base.__qualname__}".removeprefix(f"{package}.")):
            module, _, function = place.partition(":")
            draw = getattr(importlib.import_module(f"{package}.{module}"), function)
            return draw(value, *more)
    return None


class Viewable:
    """A value with a view: text, and HTML in a notebook."""

    def __str__(self) -> str:
        text = view_of(self, "text")
        return repr(self) if text is None else str(text)

    def __rich__(self) -> Any:
        text = view_of(self, "text")
        return str(self) if text is None else text

    def _repr_html_(self) -> str | None:
        return view_of(self, "notebook")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(type(self).__name__ if cycle else str(self))

    def _page(self, *more: object) -> str:
        page = view_of(self, "page", *more)
        assert page is not None, f"{type(self).__name__} has no page"
        return page
