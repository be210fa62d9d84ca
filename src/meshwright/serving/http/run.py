"""Runs the app on uvicorn until a signal, and leaves without losing a request.

On SIGTERM the server first says that it is not ready and closes each connection with its next
answer, for ``drain_s``, while it still answers; then it stops listening, answers what it has read,
and ends. A second signal ends it at once.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import MeshwrightError, ServingError
from .log import LOGGER, JsonLines
from .protocol import BoundedProtocol

LOOPBACK = "127.0.0.1"
_KEEP_ALIVE_S = 75  # longer than the idle time of common load balancers, so that they close first
_BACKLOG = 2048
# A thread that has computed a batch waits so long for the one that reads requests; Python's own
# 5 ms are longer than many answers take.
_SWITCH_S = 0.0005
_LEAST_DRAIN_S = 0.2  # for connections that were just accepted and not yet read


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and how it ends.

    ``fd`` is a listening socket that a parent process holds open, as systemd and supervisors do:
    what arrives between two servers waits in it. ``certificate`` and ``private_key`` are PEM files.
    """

    host: str = LOOPBACK
    port: int = 8000
    fd: int | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    drain_s: float = 0.0
    answer_s: float = 60.0  # for requests that were read before the end

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise ServingError("TLS needs both a certificate and its private key, as PEM files.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.fd is None and self.host in (LOOPBACK, "localhost", "::1")


def run(make_app: Callable[[], Starlette], listening: Listening) -> None:
    """Serve until SIGTERM or SIGINT.

    The address is taken before the app is made, and listened on once its models are ready: until
    then connections are refused, as start-up probes expect. Raises ServingError where the address
    cannot be taken, and what the start of the models raises.
    """
    _log_as_json()
    bound = _bound(listening)
    app = make_app()
    config = uvicorn.Config(
        CloseWhileDraining(app),
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        backlog=_BACKLOG,
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(listening.answer_s) + 1,
        http=BoundedProtocol,
        ssl_certfile=listening.certificate,
        ssl_keyfile=listening.private_key,
    )
    server = _Server(config, app, listening)
    app.state.address = address(listening, bound)
    logging.getLogger("uvicorn").handlers[0].addFilter(lambda _: not _has_message(app))
    try:
        with bound:
            server.run(sockets=[bound])
    except SystemExit:  # of uvicorn, where the models do not start
        if getattr(app.state, "failure", None) is None:
            raise
    if (failure := getattr(app.state, "failure", None)) is not None:
        raise failure


def _has_message(app: Starlette) -> bool:
    """Whether the server ends by an error whose message says all, so that its traceback does not
    belong in the log."""
    return isinstance(getattr(app.state, "failure", None), MeshwrightError)


def address(listening: Listening, bound: socket.socket) -> str:
    """The URL that clients use on this machine."""
    scheme = "https" if listening.certificate else "http"
    host, port = bound.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{port}"


def _bound(listening: Listening) -> socket.socket:
    """A listening socket, before anything is loaded: a port that is taken is an error at once."""
    if listening.fd is not None:
        try:
            return socket.socket(fileno=listening.fd)
        except OSError as error:
            raise ServingError(
                f"fd {listening.fd} is not a socket: {error.strerror}. Pass the number of a "
                "listening socket, or --host and --port."
            ) from error
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((listening.host, listening.port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ServingError(
            f"cannot listen on {listening.host}:{listening.port}: {error}. "
            f"Choose another --port, or 0 for any that is free."
        ) from error
    return bound


class CloseWhileDraining:
    """ASGI middleware: while the app drains, each connection ends with its answer."""

    def __init__(self, app: Starlette) -> None:
        self._app: ASGIApp = app
        self._state = app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and is_draining(self._state):
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        await self._app(scope, receive, closing if scope["type"] == "http" else send)


def is_draining(state: Any) -> bool:
    """Whether the server has been asked to end."""
    return getattr(state, "draining", False)


class _Server(uvicorn.Server):
    """uvicorn's server, which goes on answering for a while after the first SIGTERM."""

    def __init__(self, config: uvicorn.Config, app: Starlette, listening: Listening) -> None:
        super().__init__(config)
        self._state = app.state
        self._drain_s = max(listening.drain_s, _LEAST_DRAIN_S)
        self._has_successor = listening.fd is not None
        self._ends_s: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first SIGTERM drains; whatever comes after it, or another signal, ends."""
        if sig != signal.SIGTERM or self._ends_s is not None:
            super().handle_exit(sig, frame)
            return
        self._state.draining = True
        self._ends_s = time.monotonic() + self._drain_s
        LOGGER.info("draining", extra={"fields": {"drain_s": self._drain_s}})

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the models, then listen."""
        await super().startup(sockets)
        if self.started:
            _spare_the_collector()
            sys.setswitchinterval(_SWITCH_S)
            LOGGER.info("listening", extra={"fields": {"address": self._state.address}})

    async def on_tick(self, counter: int) -> bool:
        """Asked ten times a second whether to end."""
        if self._ends_s is not None:
            if self._has_successor:  # which accepts what waits in the socket
                for listener in self.servers:
                    listener.close()
            self.should_exit |= time.monotonic() >= self._ends_s
        return await super().on_tick(counter)


def _spare_the_collector() -> None:
    """Leave what start-up has made out of Python's garbage collections.

    A full collection looks at every object of JAX and Keras and stops all requests meanwhile,
    100 ms and more at a time.
    """
    gc.collect()
    gc.freeze()


def _log_as_json() -> None:
    """The server's lines go to standard error, uvicorn's among them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("meshwright.serving", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
