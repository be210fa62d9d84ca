"""What the head of a message must hold, checked where it comes in.

A peer can send anything. Behind the check, code may rely on every field and its type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ProtocolError
from .message import Message

_MOST_FAULTS = 5
_MOST_LETTERS = 60


@dataclass(frozen=True)
class Kind:
    """A type of value: its name in words, and whether a value has it."""

    name: str
    fits: Callable[[Any], bool]
    required: bool = True


Fields = Mapping[str, Kind]


def optional(kind: Kind) -> Kind:
    """The same, or ``None``, or no such field at all."""
    return Kind(f"{kind.name} or None", lambda v: v is None or kind.fits(v), required=False)


def list_of(kind: Kind) -> Kind:
    """A list of any length."""
    fits = kind.fits
    return Kind(f"a list of ({kind.name})", lambda v: _is_list(v) and all(map(fits, v)))


def row(*kinds: Kind) -> Kind:
    """A list with exactly these kinds of items."""
    checks = tuple(kind.fits for kind in kinds)

    def fits(value: Any) -> bool:
        if not _is_list(value) or len(value) != len(checks):
            return False
        return all(check(item) for check, item in zip(checks, value, strict=True))

    return Kind(f"[{', '.join(kind.name for kind in kinds)}]", fits)


def mapping(key: Kind, item: Kind) -> Kind:
    """A mapping of any size."""

    def fits(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        return all(key.fits(k) and item.fits(v) for k, v in value.items())

    return Kind(f"a mapping from {key.name} to {item.name}", fits)


def record(**fields: Kind) -> Kind:
    """A mapping with these fields; others are let through."""

    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and not any(_faults(value, fields))

    listed = ", ".join(f"{name}: {kind.name}" for name, kind in fields.items())
    return Kind(f"a mapping with {listed}", fits)


def _is_list(value: Any) -> bool:
    return type(value) is list or type(value) is tuple


def _is_int(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


ANY = Kind("any value", lambda v: True)
BOOL = Kind("a boolean", lambda v: type(v) is bool)
INT = Kind("a 64-bit integer", _is_int)
COUNT = Kind("a non-negative integer", lambda v: _is_int(v) and v >= 0)
NUMBER = Kind("a number", lambda v: type(v) is float or _is_int(v))
TEXT = Kind("a string", lambda v: type(v) is str)
MAP = Kind("a mapping", lambda v: isinstance(v, Mapping))


def check(message: Message, fields: Fields, task: str) -> None:
    """Raise :class:`~meshwright.errors.ProtocolError` where the head lacks fields, or has others.

    ``task`` is the one that received it. The error names the first faults.

    >>> check(Message("read", {"names": ["w"]}), {"names": list_of(TEXT)}, "ps:0")
    >>> check(Message("read", {"names": 3}), {"names": list_of(TEXT)}, "ps:0")
    Traceback (most recent call last):
    ...
    meshwright.errors.ProtocolError: message 'read' to ps:0 is invalid: names must be a list of \
(a string); received 3.
    """
    faults = _faults(message.head, fields)
    if faults:
        listed = "; ".join(faults[:_MOST_FAULTS])
        raise ProtocolError(f"message {message.kind!r} to {task} is invalid: {listed}.", task)


def _faults(head: Mapping[str, Any], fields: Fields) -> list[str]:
    faults = []
    for name, kind in fields.items():
        if name not in head:
            if kind.required:
                faults.append(f"{name} is missing")
        elif not kind.fits(head[name]):
            received = repr(head[name])
            if len(received) > _MOST_LETTERS:
                received = received[:_MOST_LETTERS] + "..."
            faults.append(f"{name} must be {kind.name}; received {received}")
    return faults
