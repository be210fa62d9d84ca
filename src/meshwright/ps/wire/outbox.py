"""What a channel has sent and has no answer to, and what has yet to leave; opens no socket."""

from __future__ import annotations

from collections import deque

from .message import Frames, Message

WINDOW_MESSAGES = 64  # requests of one channel that wait for their answers: then send waits
WINDOW_BYTES = 256 << 20
KEPT_MESSAGES = 1024  # without an answer, while there is no connection

# A number (none: it gets no answer), the message, and its frames where they may leave unchanged.
Entry = tuple[int | None, Message, Frames | None]


class Outbox:
    """The requests without an answer, by number, and the queue of what waits for the socket.

    >>> outbox = Outbox()
    >>> outbox.ask(1, Message("read"))
    >>> outbox.answered(1), outbox.answered(1)
    (True, False)
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Message] = {}
        self.queue: deque[Entry] = deque()
        self._waiting_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether one more request of ``num_bytes`` may be sent; the only one always may."""
        small = self._waiting_bytes + num_bytes <= WINDOW_BYTES
        return not self.waiting or (small and len(self.waiting) < WINDOW_MESSAGES)

    def ask(self, number: int, message: Message) -> None:
        """Remember a request."""
        self.waiting[number] = message
        self._waiting_bytes += message.num_bytes

    def answered(self, number: int) -> bool:
        """Forget a request; ``False`` where none of this number waits."""
        message = self.waiting.pop(number, None)
        if message is None:
            return False
        self._waiting_bytes -= message.num_bytes
        return True

    def drop_told(self) -> None:
        """Forget the oldest message that needs no answer, where too many are kept."""
        if len(self.queue) < KEPT_MESSAGES:
            return
        for entry in self.queue:
            if entry[0] is None:
                self.queue.remove(entry)
                return

    def begin_anew(self, number: int, hello: Message | None) -> None:
        """Queue for a new connection: ``hello``, what got no answer, and what never left."""
        queued = {number for number, _, _ in self.queue}
        never_left = [(n, m, None) for n, m, _ in self.queue if n is None or n in self.waiting]
        again = [(n, m, None) for n, m in self.waiting.items() if n not in queued]
        self.queue = deque([*again, *never_left])
        if hello is not None:
            self.queue.appendleft((number, hello, None))
