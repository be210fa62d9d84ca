"""Wrong requests, and which status each error has: one table, by class.

Those of the engine are in the library's tree of errors; those that only HTTP knows are here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from ...errors import (
    DeadlineError,
    ModelFailedError,
    NotReadyError,
    OverloadedError,
    RequestError,
    UnknownModelError,
)


class BodyTooLargeError(RequestError):
    """A body, or what it decompresses to, is larger than the limit."""


class SlowBodyError(RequestError):
    """A body did not arrive in time."""


class MediaTypeError(RequestError):
    """A content type or a content encoding is not supported."""


class UnauthorizedError(RequestError):
    """A request has no API key, or an unknown one."""


class ClientGoneError(RequestError):
    """The client closed the connection; nothing reads the answer."""


_STATUS = (  # the first class that fits decides
    (BodyTooLargeError, 413, "body_too_large"),
    (SlowBodyError, 408, "body_too_slow"),
    (MediaTypeError, 415, "unsupported_media_type"),
    (UnauthorizedError, 401, "unauthorized"),
    (ClientGoneError, 499, "client_gone"),
    (UnknownModelError, 404, "unknown_model"),
    (RequestError, 400, "bad_request"),
    (OverloadedError, 429, "overloaded"),
    (DeadlineError, 504, "deadline_exceeded"),
    (NotReadyError, 503, "not_ready"),
    (ModelFailedError, 500, "model_failed"),
)


def status_of(error: BaseException) -> tuple[int, str]:
    """The status of an error, and its name in the body; 500 for an unexpected one.

    >>> status_of(MediaTypeError("text/plain")), status_of(KeyError("x"))
    ((415, 'unsupported_media_type'), (500, 'internal_error'))
    """
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            return status, code
    return 500, "internal_error"


def refuse(faults: Iterable[str]) -> None:
    """Raise one error for all faults of a request; none for none."""
    problems = list(faults)
    if len(problems) == 1:
        raise RequestError(problems[0])
    if problems:
        lines = "".join(f"\n  {fault}" for fault in problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise RequestError(f"{len(problems)} faults in the request:{lines}{more}")


_VALUE = re.compile(r"\b(value|id) \S+ (?=is out)")


def without_values(message: str) -> str:
    """The message as it is logged: values of a body stay out of the log.

    >>> without_values("input 'x': value 300 is outside the range of uint8, 0 to 255.")
    "input 'x': value is outside the range of uint8, 0 to 255."
    """
    return _VALUE.sub(r"\1 ", message)


def short(value: object, most: int = 60) -> str:
    """A value of a request as messages show it: never longer than a line.

    >>> short("a" * 100, 10), short(None)
    ("'aaaaaa...", 'null')
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value[: most + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= most else text[: most - 3] + "..."
