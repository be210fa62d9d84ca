"""Calls an ASGI app as a server does, without one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn


@contextmanager
def listening(app: Any) -> Iterator[int]:
    """The port of a server of this process that runs the app, for clients that need a socket."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


@dataclass
class Answered:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Call:
    """One request: its body in parts, and when the client leaves."""

    method: str
    path: str
    body: bytes | list[bytes] = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    leaves: asyncio.Event | None = None
    stalls: bool = False  # the body never ends

    async def to(self, app: Any) -> Answered:
        parts = [self.body] if isinstance(self.body, bytes) else list(self.body)
        path, _, query = self.path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in self.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if parts:
                body = parts.pop(0)
                more = bool(parts or self.stalls)
                return {
                    "type": "http.request",
                    "body": body,
                    "more_body": more,
                }
            await (self.leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app(scope, receive, send)
        start, *rest = sent
        headers = {k.decode().lower(): v.decode() for k, v in start["headers"]}
        return Answered(start["status"], headers, b"".join(event["body"] for event in rest))


def call(app: Any, method: str, path: str, body: Any = b"", **headers: str) -> Answered:
    """One request, with the app's lifespan around it; names of headers take _ for -."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def once() -> Answered:
        async with running(app):
            return await Call(method, path, body, named).to(app)

    return asyncio.run(once())


@asynccontextmanager
async def running(app: Any) -> Any:
    async with app.router.lifespan_context(app):
        yield app
