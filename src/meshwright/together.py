"""Errors of several checks, raised as one, so that a user hears of all faults at once."""

from __future__ import annotations

from .errors import MeshwrightError


class Faults:
    """Notes the errors of checks; :meth:`refuse` raises them together.

    >>> from meshwright.errors import MeshError
    >>> faults = Faults()
    >>> for axis in ("", "rows"):
    ...     with faults:
    ...         raise MeshError(f"axis {axis!r} has no size.")
    >>> faults.refuse()
    Traceback (most recent call last):
        ...
    meshwright.errors.MeshError: axis '' has no size.
    axis 'rows' has no size.
    """

    def __init__(self) -> None:
        self.errors: list[MeshwrightError] = []

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, MeshwrightError):
            return False
        self.errors.append(error)
        return True

    def refuse(self) -> None:
        """Raise what was noted, as one error of the first one's class; equal ones once."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            notes: dict[str, list[str]] = {}
            for error in self.errors:
                notes.setdefault(str(error), []).extend(getattr(error, "__notes__", ()))
            lines = [line for text, own in notes.items() for line in (text, *own)]
            first = self.errors[0]
            raise type(first)("\n".join(lines)) from first
