"""Errors as messages: what one task raises is raised again, as the same class, where it was asked.

Only Python's own exceptions and those of :mod:`meshwright.errors` are rebuilt, by name and from
plain values. Every other one becomes a :class:`~meshwright.errors.ScheduledError` that names its
type. Nothing is unpickled, so a task cannot be made to run a peer's code by an error.
"""

from __future__ import annotations

import builtins
import traceback
from typing import Any, NoReturn

from ... import errors
from .message import Message

KIND = "error"
_ROOMS = {"builtins": builtins, "meshwright.errors": errors}
_MOST_LETTERS = 20_000  # of a traceback; its end says most
_MOST_NOTES = 20  # the last ones
_MOST_LEVELS = 20  # of lists in an error's arguments; a deeper one may hold itself
_PLAIN = (type(None), bool, int, float, str, bytes)


def failure(error: BaseException, task: str = "") -> Message:
    """The message that describes an error; ``task`` is the one in which it was raised.

    >>> error = rebuilt(failure(KeyError("depth"), "worker:1"))
    >>> print(repr(error), *error.__notes__, sep="\\n")
    KeyError('depth')
    in worker:1:
      KeyError: 'depth'
    """
    kind = type(error)
    head: dict[str, Any] = {
        "room": kind.__module__,
        "type": kind.__qualname__,
        "text": _text(error),
        "task": task,
        "traceback": _text(_traceback(error)),
        "notes": [_text(note)[-_MOST_LETTERS:] for note in _notes(error)[-_MOST_NOTES:]],
    }
    if _is_plain(_arguments(error)):
        head["args"] = _sendable(_arguments(error))
    head["attributes"] = {
        name: _sendable(value)
        for name, value in vars(error).items()
        if name != "__notes__" and _is_plain(value)
    }
    return Message(KIND, head)


def raise_failure(message: Message) -> NoReturn:
    """Raise the error that a message describes, with the remote traceback as a note."""
    raise rebuilt(message)


def rebuilt(message: Message) -> Exception:
    """The error that a message of kind ``"error"`` describes, to be raised or kept.

    Its notes are those that it had, and then the remote traceback. Whatever the message holds,
    this returns an error.
    """
    head = message.head
    task = str(head.get("task", ""))
    error = _of_the_same_class(head)
    if error is None:
        where = f" in {task}" if task else ""
        error = errors.ScheduledError(
            f"{head.get('room')}.{head.get('type')} was raised{where}: {head.get('text')}. "
            "This class is not rebuilt here; the note below is the traceback of that task.",
            task,
        )
    notes = head.get("notes")
    for note in notes if isinstance(notes, list) else ():
        error.add_note(str(note))
    lines = "\n  ".join(str(head.get("traceback", "")).splitlines())
    error.add_note(f"in {task or 'another task'}:\n  {lines}")
    return error


def _of_the_same_class(head: Any) -> Exception | None:
    room = _ROOMS.get(str(head.get("room")))
    kind = getattr(room, str(head.get("type")), None) if room else None
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or "args" not in head:
        return None  # not SystemExit and its like: they would end the task that asked
    try:
        if room is builtins:
            return kind(*head["args"])
        # Ours may ask more of __init__ than the message; an OSError is not made as others are.
        error = (OSError if issubclass(kind, OSError) else kind).__new__(kind)
        error.args = tuple(head["args"])
        error.__dict__.update(
            (str(name), tuple(value) if isinstance(value, list) else value)
            for name, value in head.get("attributes", {}).items()
            if not _is_of_the_class(kind, str(name))
        )
    except Exception:
        return None
    return error


def _is_of_the_class(kind: type[Exception], name: str) -> bool:
    """Whether a name belongs to the class and must not be set: a method, or one of Python's."""
    return name.startswith("__") or callable(getattr(kind, name, None))


def _notes(error: BaseException) -> list[Any]:
    notes = getattr(error, "__notes__", None)
    return list(notes) if isinstance(notes, list | tuple) else []


def _traceback(error: BaseException) -> str:
    """The traceback without the error's own notes, which travel beside it."""
    report = traceback.TracebackException.from_exception(error)
    report.__notes__ = None  # type: ignore[attr-defined]
    return "".join(report.format())[-_MOST_LETTERS:].rstrip()


def _arguments(error: BaseException) -> list[Any]:
    """What the class is to be called with: an ``OSError`` keeps its file apart from ``args``."""
    if isinstance(error, OSError) and len(error.args) == 2 and error.filename is not None:
        return [*error.args, error.filename, None, error.filename2]
    return list(error.args)


def _is_plain(value: object, level: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return level < _MOST_LEVELS and all(_is_plain(one, level + 1) for one in value)
    return type(value) in _PLAIN and not (isinstance(value, int) and abs(value) >= 1 << 63)


def _sendable(value: Any) -> Any:
    """A plain value as msgpack takes it: a text of UTF-8, a list in the place of a tuple."""
    if isinstance(value, (list, tuple)):
        return [_sendable(one) for one in value]
    return _text(value) if isinstance(value, str) else value


def _text(value: object) -> str:
    """Text that can travel, whatever ``__str__`` does: of a file's name, half a character too."""
    try:
        text = str(value)
    except Exception as error:
        text = f"<str() of it raised {type(error).__name__}>"
    return text.encode("utf-8", "backslashreplace").decode()
