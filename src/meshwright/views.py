"""How values show themselves in a notebook.

A value says only that it can be viewed. What its view is stands in one registry, which the front
door of the package points at, so that no value knows of pictures and tables, and none is loaded
before something is shown.
"""

from __future__ import annotations

import importlib
from typing import Any

_registry: list[str] = []  # the module whose `view_of(value)` makes the HTML


def register_views(module: str) -> None:
    """Name the module that makes views, by its function ``view_of(value) -> str | None``."""
    _registry[:] = [module]


class Viewable:
    """A value with a view: HTML in a notebook, ``str(value)`` in a terminal of IPython."""

    def _repr_html_(self) -> str | None:
        if not _registry:
            return None
        return importlib.import_module(_registry[0]).view_of(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(type(self).__name__ if cycle else str(self))
