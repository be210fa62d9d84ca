"""One request from bytes to bytes: read, predict, write; cancelled where the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ...errors import MeshwrightError, RequestError
from ..api import Answer, Models, ServedModel
from .answers import problem_response, reply_response
from .body import Held, Pending, read_body
from .contracts import open_inference
from .contracts.request import Reply, Request
from .limits import Limits
from .looking import check_version
from .problems import ClientGoneError, short

T = TypeVar("T")
TIMEOUT = "x-request-timeout"  # seconds
# Bytes. Larger bodies are read, and larger answers written, in another thread, so that small ones
# need not wait.
_LARGE = 1 << 17
_TEXT_TIMES = 15  # its own size that JSON takes more while it is read: an object for each number
_BINARY = ("application/octet-stream", "application/x-npy")

Read = Callable[[HttpRequest, bytes, ServedModel], Request]
Write = Callable[[Request, Answer, ServedModel], Reply]


async def answer(
    http: HttpRequest,
    models: Models,
    name: str,
    version: str | None,
    read: Read,
    write: Write,
    limits: Limits,
    pending: Pending,
) -> Response:
    """Answer a request for a prediction, or say why not."""
    state = http.scope["state"]
    try:
        model = models.model(name, version)
        state["model"], state["version"] = model.name, model.version
        timeout_s = _header_timeout(http, limits)
        with Held(pending) as reserved:
            body = await read_body(http, limits, reserved)
            if _is_text(http):
                reserved.take(min(_TEXT_TIMES * len(body), limits.pending_bytes - len(body)))
            if len(body) > _LARGE:
                request = await asyncio.to_thread(read, http, body, model)
            else:
                request = read(http, body, model)
            state["rows"] = len(next(iter(request.inputs.values()), ()))
            timeout_s = min(timeout_s, request.timeout_s or timeout_s)
            await asyncio.sleep(0)  # what is read in one turn of the loop shares a batch
            predicted = await unless_gone(
                model.predict(request.inputs, timeout_s=timeout_s), http.receive
            )
            state["version"] = predicted.version
            check_version(model.name, version, predicted)
            if sum(array.nbytes for array in predicted.outputs.values()) > _LARGE:
                reply = await asyncio.to_thread(write, request, predicted, model)
            else:
                reply = write(request, predicted, model)
            return reply_response(reply, predicted.version)
    except MeshwrightError as error:
        return problem_response(error, http.scope)


def _is_text(http: HttpRequest) -> bool:
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    return open_inference.HEADER not in http.headers and kind not in _BINARY


def _header_timeout(http: HttpRequest, limits: Limits) -> float:
    text = http.headers.get(TIMEOUT)
    if text is None:
        return limits.request_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise RequestError(f"{TIMEOUT} must be a number of seconds; received {short(text)}.")
    return min(seconds, limits.request_s)


async def unless_gone(work: Coroutine[Any, Any, T], receive: Callable[[], Awaitable[Any]]) -> T:
    """The result, unless the client closes the connection first: then the work is cancelled.

    Raises ClientGoneError.
    """
    task = asyncio.current_task()
    assert task is not None
    watch = asyncio.ensure_future(_disconnected(receive))

    def leave(watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            task.cancel()

    watch.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.done() and task.uncancel() == 0:  # by the watch alone
            raise ClientGoneError("the client left before its answer was ready.") from None
        raise
    finally:
        watch.remove_done_callback(leave)  # an answer that is there is sent
        watch.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
