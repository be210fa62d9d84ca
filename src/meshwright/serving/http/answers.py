"""Responses: an answer's bytes, or an error as one shape of JSON for every contract."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from ...errors import OverloadedError
from .contracts.request import Reply
from .json_text import written
from .problems import status_of, without_values

REQUEST_ID = "x-request-id"


def json_response(value: Any, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(written(value), status, media_type="application/json")


def reply_response(reply: Reply, version: str) -> Response:
    """The answer of a model; the header names the version of the weights."""
    headers = {**reply.headers, "X-Model-Version": version}
    return Response(reply.body, 200, headers, reply.media_type)


def problem_response(
    error: BaseException, scope: Scope, kind: tuple[int, str] | None = None
) -> Response:
    """An error: fact, values and way out for what the client did, one line for what failed here.

    ``kind`` is the status and its name, where the class of the error does not say them. The key
    ``error`` is where Triton's, TensorFlow Serving's and MLflow's clients look for the message.
    """
    status, code = kind or status_of(error)
    message = str(error)
    if code == "internal_error":
        message = "the server failed to answer this request. Its log has the traceback."
    state = scope.setdefault("state", {})
    state["problem"] = (code, without_values(message))
    body = {"error": message, "error_code": code, "request_id": state.get("request_id", "")}
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 503:
        headers["Retry-After"] = "1"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(written(body), status, headers, "application/json")
