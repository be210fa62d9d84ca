"""API keys: who may ask. Keys are compared by their digests and are never written anywhere."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import ServingError
from .answers import problem_response
from .problems import UnauthorizedError

_OPEN = ("/v2/health/live", "/v2/health/ready", "/health", "/ping")  # what a load balancer asks
_SHORTEST = 16


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; lines that begin with # are left out.

    Raises ServingError for a file without keys, for short keys, and for one that others may read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        is_open = path.stat().st_mode & 0o007
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(f"cannot read the API keys in {path}: {error}.") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if is_open:
        raise ServingError(f"{path} holds API keys and everybody can read it: chmod 600 {path}")
    check_keys(keys, f"{path}")
    return keys


def check_keys(keys: Iterable[str], place: str) -> None:
    """Raise ServingError for missing and for short keys."""
    found = list(keys)
    if not found:
        raise ServingError(f"{place} has no API key. Write one a line: openssl rand -hex 32")
    if wrong := [n for n, key in enumerate(found, 1) if len(key) < _SHORTEST or not key.isascii()]:
        raise ServingError(
            f"API key {wrong[0]} of {place} must have at least {_SHORTEST} ASCII characters: "
            f"openssl rand -hex 32"
        )


class ApiKeys:
    """ASGI middleware that asks for ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``.

    Health checks stay open. The body of a request without a key is never read.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope) or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError(
            "this server asks for an API key. Send Authorization: Bearer KEY, or X-API-Key: KEY."
        )
        await problem_response(error, scope)(scope, receive, send)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        return scope["path"].removeprefix(scope.get("root_path", "")) in _OPEN

    def _knows(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        key = key if kind.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(key.strip())
        return any(hmac.compare_digest(digest, known) for known in self._digests)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
