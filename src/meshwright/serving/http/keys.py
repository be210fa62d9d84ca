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
    """The keys of a file, one per line; lines that begin with # are left out.

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
    result = list(keys)
    if not result:
        raise ServingError(f"{place} has no API key. Write one per line: openssl rand -hex 32")
    if wrong := [n for n, key in enumerate(result, 1) if len(key) < _SHORTEST or not key.isascii()]:
        raise ServingError(
            f"API key {wrong[0]} of {place} must have at least {_SHORTEST} ASCII characters: "
            f"openssl rand -hex 32"
        )


class Known:
    """The keys that may ask, by their digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def refuse(self, authorization: str, key: str) -> None:
        """Raise UnauthorizedError unless ``Bearer KEY``, or the key itself, is one of them."""
        kind, _, bearer = authorization.partition(" ")
        digest = _digest((bearer if kind.lower() == "bearer" else key).strip())
        if not any(hmac.compare_digest(digest, own) for own in self._digests):
            raise UnauthorizedError(
                "this server asks for an API key. Send Authorization: Bearer KEY, or X-API-Key: "
                "KEY."
            )


class ApiKeys:
    """ASGI middleware that asks for ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``.

    Health checks stay open. The body of a request without a key is never read.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = Known(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope):
            headers = Headers(scope=scope)
            try:
                self._keys.refuse(headers.get("authorization", ""), headers.get("x-api-key", ""))
            except UnauthorizedError as error:
                await problem_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        return scope["path"].removeprefix(scope.get("root_path", "")) in _OPEN


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
