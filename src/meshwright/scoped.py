"""Context variables that have a value while a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextlib.contextmanager
def scoped(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set a context variable while the block runs; afterwards it has the value it had before.

    >>> depth = ContextVar("depth", default=0)
    >>> with scoped(depth, 3):
    ...     depth.get()
    3
    >>> depth.get()
    0
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
