"""What one request may ask for, and what all of them together may hold."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import ServingError

_MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bounds on requests: bytes, tensors and seconds.

    ``body_bytes`` bounds a body, before and after decompression; ``text_bytes`` what of it is JSON
    or CSV, which takes many times its size in memory while it is read; ``pending_bytes`` all bodies
    that are held at once; ``tensors`` the inputs or outputs that a request names; ``read_s`` the
    time for a body to arrive; ``request_s`` the time until an answer, which a request may shorten.

    Raises ServingError for limits that are not positive, or exclude each other.

    >>> import meshwright as mw
    >>> mw.Limits(body_bytes=1 << 20).request_s
    60.0
    """

    body_bytes: int = 64 * _MIB
    text_bytes: int = 16 * _MIB
    pending_bytes: int = 512 * _MIB
    tensors: int = 256
    read_s: float = 30.0
    request_s: float = 60.0

    def __post_init__(self) -> None:
        wrong = [
            f"{entry.name}={value!r}"
            for entry in fields(self)
            if not isinstance(value := getattr(self, entry.name), int | float) or value <= 0
        ]
        if wrong:
            raise ServingError(f"Limits must be positive numbers; received {', '.join(wrong)}.")
        if self.pending_bytes < self.body_bytes:
            raise ServingError(
                f"pending_bytes ({self.pending_bytes:,}) is smaller than body_bytes "
                f"({self.body_bytes:,}): no body of that size could be read. Raise pending_bytes."
            )
