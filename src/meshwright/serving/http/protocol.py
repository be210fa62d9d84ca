"""uvicorn's HTTP protocol with a limit on the head of a request: its bytes, and its time.

httptools itself keeps whatever arrives, however slowly it comes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST_HEAD_BYTES = 64 << 10
_HEAD_S = 20.0


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers are too large, or do not come."""

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The first head may take as long as any."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(_HEAD_S, self._refuse, "The request came too slowly.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing waits any more."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head that has not ended."""
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self._refuse("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head has ended."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _refuse(self, message: str) -> None:
        if not self.transport.is_closing():
            self.send_400_response(message)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
