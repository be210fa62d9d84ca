"""Bytes, seconds and FLOPs in words: every table, page and message writes them the same way."""

from __future__ import annotations

UNKNOWN = "unknown"


def in_words(nbytes: int | float | None) -> str:
    """A number of bytes in binary units.

    >>> in_words(5), in_words(1536), in_words(-3 * 2**30), in_words(None)
    ('5 B', '1.50 KiB', '-3.00 GiB', 'unknown')
    """
    if nbytes is None:
        return UNKNOWN
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def ms(time_s: float | None) -> str:
    """Seconds in milliseconds, or in microseconds where they are few.

    >>> ms(0.0123456), ms(0.0000123), ms(0.0), ms(None)
    ('12.346 ms', '12.3 µs', '0 ms', 'unknown')
    """
    if time_s is None:
        return UNKNOWN
    if not time_s:
        return "0 ms"
    return f"{1e3 * time_s:,.3f} ms" if abs(time_s) >= 1e-3 else f"{1e6 * time_s:,.1f} µs"


def flops_text(flops: float) -> str:
    """FLOPs with a decimal unit, three figures.

    >>> flops_text(1.5e12), flops_text(0)
    ('1.5 TFLOP', '0 FLOP')
    """
    value = float(flops)
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 999.5 or unit == "P":
            return f"{value:.3g} {unit}FLOP"
        value /= 1000
    raise AssertionError("the last unit takes all")


def percent(share: float | None) -> str:
    """A share in percent.

    >>> percent(0.5), percent(None)
    ('50.0%', 'unknown')
    """
    return UNKNOWN if share is None else f"{share:.1%}"
