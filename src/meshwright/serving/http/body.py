"""Reads the body of a request within its limits, compressed or not.

TensorFlow Serving was brought down by 100 kB of zeros under gzip (tensorflow/serving#4136): here
bytes are counted as they come out, and what all requests hold together has a limit, too.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ...errors import NotReadyError, OverloadedError, RequestError
from ...units import bytes_text
from .limits import Limits
from .problems import BodyTooLargeError, ClientGoneError, MediaTypeError, SlowBodyError, short

_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_STEP = 1 << 20  # bytes that are decompressed at once
_MOST_MEMBERS = 256  # of a compressed body: each costs a copy of what follows


class Pending:
    """Bytes of all bodies that are held at the moment."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes = 0
        self._lock = threading.Lock()  # large bodies are decompressed in other threads

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return self._bytes

    def take(self, count: int) -> None:
        """Hold more. Raises OverloadedError where that exceeds the limit of all requests."""
        with self._lock:
            if self._bytes + count > self._limits.pending_bytes:
                raise OverloadedError(
                    f"the server holds {bytes_text(self._bytes)} of requests, and its limit is "
                    f"{bytes_text(self._limits.pending_bytes)}. Try again later."
                )
            self._bytes += count

    def release(self, count: int) -> None:
        """Hold less."""
        with self._lock:
            self._bytes -= count


class Held:
    """The share of one request in :class:`Pending`; released when its block ends."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._bytes = 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._pending.release(self._bytes)

    def take(self, count: int) -> None:
        """Hold more of it."""
        self._pending.take(count)
        self._bytes += count


async def read_body(request: Request, limits: Limits, reserved: Held) -> bytes:
    """The body, decompressed.

    Raises BodyTooLargeError, SlowBodyError, MediaTypeError, ClientGoneError, or OverloadedError;
    NotReadyError where the server ends meanwhile.
    """
    window = _window(request.headers.get("content-encoding", ""))
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and len(announced) < 20 and int(announced) > limits.body_bytes:
        raise _too_large(limits, f"Content-Length is {announced} bytes")
    try:
        async with asyncio.timeout(limits.read_s):
            body = await _received(request, limits, reserved.take)
    except TimeoutError:
        raise SlowBodyError(
            f"the body did not arrive within {limits.read_s:g} s. Send it faster, or in parts."
        ) from None
    except ClientDisconnect:
        raise ClientGoneError("the client left before its body was read.") from None
    except asyncio.CancelledError:
        if not getattr(request.app.state, "draining", False):
            raise
        raise NotReadyError(
            "the server ended before all of the body had arrived. Send the request again."
        ) from None
    if window is None:
        return body
    if len(body) < _STEP // 64:
        return decompressed(body, window, limits, reserved.take)
    return await asyncio.to_thread(decompressed, body, window, limits, reserved.take)


def _window(encoding: str) -> int | None:
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return None
    if kind not in _WINDOWS:
        raise MediaTypeError(
            f"content encoding {short(encoding)} is not supported. Send gzip, deflate or none."
        )
    return _WINDOWS[kind]


async def _received(request: Request, limits: Limits, take: Callable[[int], None]) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        if not part:
            continue
        size += len(part)
        if size > limits.body_bytes:
            raise _too_large(limits, "more bytes than that arrived")
        take(len(part))
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decompressed(body: bytes, window: int, limits: Limits, take: Callable[[int], None]) -> bytes:
    """All members of a compressed body, stopping as soon as they are too large.

    >>> import gzip
    >>> decompressed(gzip.compress(b"abc"), 31, Limits(), lambda size: None)
    b'abc'
    """
    parts: list[bytes] = []
    size = members = 0
    while body:
        members += 1
        if members > _MOST_MEMBERS:
            raise RequestError(
                f"the compressed body has more than {_MOST_MEMBERS} members. Compress it as one."
            )
        member: Any = zlib.decompressobj(window)
        rest = body
        while rest or not member.eof:
            try:
                part = member.decompress(rest, _STEP)
            except zlib.error as error:
                raise RequestError(
                    f"the compressed body cannot be read: {error}. Check Content-Encoding."
                ) from None
            size += len(part)
            if size > limits.body_bytes:
                raise _too_large(limits, "the body decompresses to more than that")
            take(len(part))
            parts.append(part)
            rest = member.unconsumed_tail
            if member.eof:
                break
            if not part and not rest:
                raise RequestError("the compressed body ends too early. Send all of it.")
        body = member.unused_data
    return b"".join(parts)


def _too_large(limits: Limits, fact: str) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"a body may have {bytes_text(limits.body_bytes)}; {fact}. Send fewer rows in a request, "
        f"or binary tensors instead of JSON."
    )
