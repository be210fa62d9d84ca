"""Names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package; ``where`` says in which of its modules each name lives.

    Where a name stands for a whole module, its place ends with a colon: ``"frontends.keras:"``.
    """

    def getattr_(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, whole, _ = where[name].partition(":")
        value = importlib.import_module(f".{module}", package)
        if not whole:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_
