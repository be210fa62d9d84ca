"""How a model is served: batches, waiting, limits. A value, checked when it is made."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..errors import ModelError

Precision = Literal["bfloat16", "float16", "int8"]
_SLOWER = 1.1  # of the seconds of a row in a smaller batch, which a larger one may take
_SAVES = 0.9  # of the seconds of one padded batch, which several smaller ones must stay below
PRECISIONS = ("bfloat16", "float16", "int8")


@dataclass(frozen=True)
class ServeOptions:
    """The options of :class:`~meshwright.Server` for one model.

    Example:
        >>> ServeOptions(max_rows=8).sizes(shards=2)
        (2, 4, 8)
    """

    max_rows: int = 32
    buckets: tuple[int, ...] = ()  # rows; empty: up to max_rows, while larger ones are faster
    lengths: tuple[int, ...] = ()  # sizes that ragged dims are padded to; empty: as they come
    pad_value: float = 0  # what ragged dims are padded with
    wait_s: float = 0.0  # how long the oldest request waits for others while the devices are idle
    queue_rows: int = 1024  # rows that may wait; more are refused
    timeout_s: float | None = None  # of requests that say none
    finite: bool = False
    precision: Precision | None = None
    follow_s: float | None = None  # seconds between looks at the run's checkpoints
    in_flight: int | None = None  # batches under way at once; None: 1, or one more than stages

    def __post_init__(self) -> None:
        faults = [
            f"{name}={value!r}: expected whole numbers, each larger than the one before and at "
            "least 1"
            for name in ("buckets", "lengths")
            if not _are_rising(value := getattr(self, name))
        ]
        faults += [
            f"{name}={value!r}: expected a whole number, at least 1"
            for name in ("max_rows", "queue_rows", "in_flight")
            if not (_is_size(value := getattr(self, name)) or (name, value) == ("in_flight", None))
        ]
        faults += [
            f"{name}={value!r}: expected seconds, at least 0"
            for name in ("wait_s", "timeout_s", "follow_s")
            if not (_is_time(value := getattr(self, name)) or (value is None and name != "wait_s"))
        ]
        if self.precision not in (None, *PRECISIONS):
            names = ", ".join(map(repr, PRECISIONS))
            faults.append(f"precision={self.precision!r}: expected one of {names}, or None")
        if not faults and self.queue_rows < max(self.buckets or (self.max_rows,)):
            faults.append(f"queue_rows={self.queue_rows} is less than the rows of one batch")
        if faults:
            raise ModelError("\n".join(faults) + ".")

    @classmethod
    def of(cls, options: dict[str, Any]) -> ServeOptions:
        """From keyword arguments; raises :class:`ModelError` for unknown ones."""
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in names]:
            raise ModelError(
                f"unknown option(s) of a server: {', '.join(unknown)}. Known: {', '.join(names)}."
            )
        given = {name: options[name] for name in ("buckets", "lengths") if name in options}
        return cls(**{**options, **{name: _sizes(value) for name, value in given.items()}})

    def sizes(self, shards: int) -> tuple[int, ...]:
        """The rows of batches, each of which divides over the pieces of the batch."""
        sizes = self.buckets or _rising(self.max_rows)
        return tuple(sorted({-(-size // shards) * shards for size in sizes}))


def worthwhile(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """The sizes of batches, by the seconds that one takes, without large ones that are slower.

    A size is left out where its rows take longer, each, than in a smaller batch: on CPUs caches
    overflow, and waiting for more rows is then waiting for less.

    >>> worthwhile({1: 0.17, 8: 0.6, 16: 0.9, 32: 3.3})
    (1, 8, 16)
    """
    sizes = sorted(seconds)
    while len(sizes) > 1:
        *smaller, largest = sizes
        if seconds[largest] / largest <= _SLOWER * min(seconds[n] / n for n in smaller):
            break
        sizes = smaller
    return tuple(sizes)


def at_once(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """How many rows the next batch takes of those that wait, by their number.

    ``seconds`` are those of a batch of each size. Rows are padded to the next size, unless smaller
    batches one after the other take clearly less time: the first of them, the largest, is answered
    sooner, too.

    >>> at_once({1: 1.0, 4: 3.0, 8: 6.0})  # of 5 rows 4 and then 1, in 4 seconds rather than 6
    (0, 1, 1, 3, 4, 4, 4, 7, 8)
    """
    best, first = [0.0], [0]  # the least seconds for so many rows, and the largest batch of these
    counts = [0]
    for rows in range(1, max(seconds) + 1):
        ways = [
            (took + best[max(rows - size, 0)], -max(size, first[max(rows - size, 0)]))
            for size, took in seconds.items()
        ]
        least, largest = min(ways)
        best.append(least)
        first.append(-largest)
        padded = seconds[min(size for size in seconds if size >= rows)]
        counts.append(min(rows, -largest) if least < _SAVES * padded else rows)
    return tuple(counts)


def _rising(largest: int) -> tuple[int, ...]:
    """Powers of two, and from 8 on what is halfway between them, so that less is padded.

    >>> _rising(32)
    (1, 2, 4, 8, 12, 16, 24, 32)
    """
    powers = [1 << n for n in range(largest.bit_length())]
    halfway = [3 * size // 2 for size in powers if size >= 8]
    return tuple(size for size in sorted({*powers, *halfway, largest}) if size <= largest)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _sizes(value: Any) -> Any:
    """Sizes as a tuple, ``None`` as an empty one; anything else is left for the check."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) else value


def _are_rising(sizes: Any) -> bool:
    is_tuple = isinstance(sizes, tuple) and all(map(_is_size, sizes))
    return is_tuple and all(a < b for a, b in itertools.pairwise(sizes))
