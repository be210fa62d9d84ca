"""What the head of each message must hold, checked where it comes in.

A peer can send anything. Behind the check, code may rely on every field and its type.
"""

from __future__ import annotations

import re
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
PERIOD = Kind("seconds above 0, an hour at most", lambda v: NUMBER.fits(v) and 0 < v <= 3600)
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


# What each message to a server must hold, by its kind.

ANY_MESSAGE: Fields = {"id": optional(INT)}
_NAMES = list_of(TEXT)
_INIT = record(
    kind=TEXT,
    params=optional(MAP),
    seed=optional(INT),
    rows=optional(row(COUNT, COUNT)),
    full_shape=optional(list_of(COUNT)),
    hash=optional(BOOL),
)
_UPDATE = row(TEXT, TEXT, COUNT, optional(MAP))
_CONFIG = record(class_name=TEXT, config=optional(MAP))

_SERVER: dict[str, Fields] = {
    "hello": {},
    "create": {"name": TEXT, "shape": list_of(COUNT), "dtype": TEXT, "init": _INIT},
    "read": {"names": _NAMES, "round": optional(INT), "at_least": optional(ANY)},
    "lookup": {"name": TEXT, "make": optional(BOOL)},
    "push": {
        "updates": list_of(_UPDATE),
        "step": optional(INT),
        "done_below": optional(INT),
        "seen": optional(INT),
        "round": optional(INT),
        "of": optional(INT),
        "then_read": optional(_NAMES),
    },
    "optimizer": {
        "group": TEXT,
        "config": _CONFIG,
        "names": _NAMES,
        "compensation": optional(BOOL),
        "wholes": optional(mapping(TEXT, TEXT)),
        "exclude_from_weight_decay": optional(_NAMES),
    },
    "rate": {"group": TEXT, "learning_rate": NUMBER},
    "slots": {"names": _NAMES},
    "load": {
        "values": optional(_NAMES),
        "tables": optional(_NAMES),
        "slots": optional(list_of(row(TEXT, _NAMES))),
        "steps": optional(mapping(TEXT, COUNT)),
    },
    "keys": {"name": TEXT},
    "piece": {"name": TEXT, "start": COUNT, "stop": COUNT},
    "changes": {"name": TEXT, "life": optional(TEXT), "mark": optional(COUNT)},
    "put": {"name": TEXT, "slots": _NAMES, "scalars": MAP, "steps": COUNT},
    "round": {"round": INT, "of": INT},
    "norms": {},
    "clip": {"round": INT, "totals": mapping(TEXT, NUMBER)},
    "fence": {"incarnation": TEXT},
    "snapshot": {"path": TEXT},
    "restore": {"path": TEXT},
    "stats": {},
    "stop": {},
}
_ANY_TO_SERVER: Fields = {**ANY_MESSAGE, "incarnation": optional(TEXT)}
TO_SERVER = {kind: {**_ANY_TO_SERVER, **fields} for kind, fields in _SERVER.items()}

# These decide who may work, which files are written, and whether the server runs at all.
RESERVED = frozenset({"fence", "snapshot", "restore", "stop"})

# What each message to a coordinator must hold.

_task = re.compile(r"[a-z]+:\d{1,9}")
TASK = Kind("a task such as 'worker:0'", lambda v: type(v) is str and bool(_task.fullmatch(v)))
_PID = Kind("a process id", lambda v: COUNT.fits(v) and 0 < v < 1 << 31)

_USED = list_of(row(TEXT, COUNT))  # iterator's key, how many elements the step took
# Server, applied, version, staleness, dropped, generation, base.
_SAID = row(COUNT, BOOL, INT, INT, BOOL, COUNT, INT)
_OPTIMIZER = row(MAP, list_of(TEXT), MAP)  # config, variables, options of gradients
_RESULT = row(INT, INT, ANY, row(COUNT, COUNT), list_of(_SAID), _USED, NUMBER, list_of(_OPTIMIZER))

TO_COORDINATOR: dict[str, Fields] = {
    "join": {"task": TASK, "incarnation": TEXT, "pid": _PID, "host": TEXT},
    "results": {"results": list_of(_RESULT), "restarts": list_of(row(COUNT, COUNT, COUNT))},
    "failed": {"step": INT, "attempt": INT, "used": _USED, "error": MAP},
    "passed": {"step": INT, "attempt": INT},
    "recalled": {"steps": list_of(INT)},
    "next": {
        "key": TEXT,
        "step": INT,
        "used": COUNT,
        "missing": optional(INT),
        "before": list_of(row(INT, COUNT)),
    },
    "alive": {"what": TEXT, "step": optional(INT), "for_s": NUMBER},
    "leave": {},
}
# A server's sign of life; a worker's is "alive" above.
BEAT: Fields = {"task": TASK, "pid": _PID, "every_s": PERIOD}
