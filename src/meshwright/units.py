"""Numbers with their units, as people read them: one formatter each of bytes, seconds and FLOPs.

Everything that prints such numbers takes it from here: pictures, tables, pages, messages.
Three significant figures; ``None`` is what is unknown.
"""

from __future__ import annotations

from typing import Literal

UNKNOWN = "unknown"
Unit = Literal["bytes", "seconds", "FLOP", "share", "count"]
_BINARY = ("KiB", "MiB", "GiB", "TiB")
_DECIMAL = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def bytes_text(count: float | None) -> str:
    """Bytes with a binary unit, three figures; below a KiB all of them.

    >>> bytes_text(401408), bytes_text(1000), bytes_text(0), bytes_text(85899345920)
    ('392 KiB', '1000 B', '0 B', '80 GiB')
    >>> bytes_text(-1536), bytes_text(None)
    ('-1.5 KiB', 'unknown')
    """
    if count is None:
        return UNKNOWN
    if abs(count) < 1024:
        return f"{count:.0f} B"
    size = float(count)
    for unit in _BINARY:
        size /= 1024
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size:,.0f} {_BINARY[-1]}"


def count_text(count: float, of: str = "") -> str:
    """A large number, three figures, with a decimal prefix.

    >>> count_text(640), count_text(41234), count_text(41.23e9, of="FLOP/s")
    ('640', '41.2k', '41.2 GFLOP/s')
    """
    space = " " if of else ""
    for size, prefix in _DECIMAL:
        if abs(count) >= 0.9995 * size:
            return f"{count / size:.3g}{space}{prefix}{of}"
    return f"{count:.3g}{space}{of}"


def flops_text(count: float | None) -> str:
    """FLOPs with a decimal prefix, three figures.

    >>> flops_text(1.5e12), flops_text(0), flops_text(None)
    ('1.5 TFLOP', '0 FLOP', 'unknown')
    """
    return UNKNOWN if count is None else count_text(count, of="FLOP")


def share_text(share: float | None) -> str:
    """A share in percent.

    >>> share_text(0.5), share_text(None)
    ('50.0%', 'unknown')
    """
    return UNKNOWN if share is None else f"{share:.1%}"


def seconds_text(seconds: float | None) -> str:
    """A duration, three figures; minutes and hours from 100 seconds on.

    >>> seconds_text(0.0123456), seconds_text(12.3e-6), seconds_text(4.2), seconds_text(7384)
    ('12.3 ms', '12.3 µs', '4.2 s', '2:03:04')
    >>> seconds_text(0), seconds_text(None)
    ('0 s', 'unknown')
    """
    if seconds is None:
        return UNKNOWN
    if not seconds:
        return "0 s"
    if abs(seconds) >= 99.95:
        return clock_text(seconds)
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e9 * seconds:.3g} ns"


def clock_text(seconds: float) -> str:
    """A duration in whole seconds, minutes and hours.

    >>> clock_text(4.2), clock_text(84), clock_text(7384), clock_text(-100)
    ('4s', '1:24', '2:03:04', '-1:40')
    """
    sign, whole = "-" * (seconds < 0), abs(round(seconds))
    if whole < 60:
        return f"{sign}{whole}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return sign + (f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}")


def quantity_text(value: float | None, unit: Unit) -> str:
    """A number in its unit.

    >>> quantity_text(2048, "bytes"), quantity_text(0.5, "seconds"), quantity_text(12345.6, "count")
    ('2 KiB', '500 ms', '12,346')
    """
    if value is None:
        return UNKNOWN
    if unit == "count":
        return f"{value:,.0f}"
    texts = {"bytes": bytes_text, "seconds": seconds_text, "FLOP": flops_text, "share": share_text}
    return texts[unit](value)
