"""One line of JSON for each request, with its id: the logger ``meshwright.serving``.

Paths, statuses and times are logged. Headers, queries and bodies may hold secrets and never are.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answers import REQUEST_ID, problem_response
from .problems import ClientGoneError

LOGGER = logging.getLogger("meshwright.serving")
_encode = json.JSONEncoder(default=str).encode
_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_QUIET = ("/v2/health/live", "/v2/health/ready", "/health", "/ping", "/metrics")


class JsonLines(logging.Formatter):
    """A record as one line of JSON; what belongs to a request is in its fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encode(line)


class RequestLog:
    """ASGI middleware: gives a request its id, logs it, and answers unexpected errors.

    An id that the client sends is kept if it is plain; it comes back as ``X-Request-Id``.
    """

    def __init__(self, app: ASGIApp, observe: Any) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A state of this request alone: that of the lifespan is shared.
        identity = id_of(Headers(scope=scope).get(REQUEST_ID, ""))
        state = scope["state"] = {**scope.get("state", {}), "request_id": identity}
        start, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = state["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            has_left = isinstance(error, ClientGoneError)
            if not has_left:
                LOGGER.exception("unexpected error", extra={"fields": _who(state)})
            if status == 0:
                await problem_response(error, scope)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - start
            self._observe(state.get("contract", "other"), status, seconds)
            self._log(scope, state, status, seconds)

    @staticmethod
    def _log(scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
        quiet = status < 400 and scope["path"] in _QUIET
        level = logging.DEBUG if quiet else logging.WARNING if status >= 500 else logging.INFO
        if not LOGGER.isEnabledFor(level):
            return
        code, message = state.get("problem", ("", ""))
        fields = {
            **_who(state),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
            **({"error_code": code, "error": message} if code else {}),
        }
        LOGGER.log(level, "request", extra={"fields": fields})


def id_of(identity: str) -> str:
    """The id of a request: what its client calls it, where that is plain, or a new one.

    >>> id_of("mine-1"), len(id_of("not plain"))
    ('mine-1', 32)
    """
    return identity if _ID.fullmatch(identity) else uuid.uuid4().hex


def _who(state: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("request_id", "contract", "model", "version", "rows")
    return {key: state[key] for key in keys if key in state}
