"""Numbers with their units, as people read them: one formatter of bytes, one of seconds."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: int) -> str:
    """Bytes with a binary unit, three figures.

    >>> bytes_text(401408), bytes_text(512), bytes_text(0), bytes_text(85899345920)
    ('392 KiB', '512 B', '0 B', '80 GiB')
    """
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_BYTES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {_BYTES[unit]}" if value < 999.5 else f"{value:.0f} {_BYTES[unit]}"


def count_text(count: float, of: str = "") -> str:
    """A large number, three figures, with a decimal prefix.

    >>> count_text(640), count_text(41234), count_text(41.23e9, of="FLOP/s")
    ('640', '41.2k', '41.2 GFLOP/s')
    """
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= 0.9995 * size:
            return f"{count / size:.3g}{' ' * bool(of)}{prefix}{of}"
    return f"{count:.3g}{' ' * bool(of)}{of}"


def seconds_text(seconds: float) -> str:
    """A short time, three figures; minutes and hours from 100 seconds on.

    >>> seconds_text(0.0123456), seconds_text(12.3e-6), seconds_text(4.2), seconds_text(7384)
    ('12.3 ms', '12.3 µs', '4.2 s', '2:03:04')
    """
    if seconds >= 99.95:
        return clock_text(seconds)
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e9 * seconds:.3g} ns"


def clock_text(seconds: float) -> str:
    """A duration in whole seconds, minutes and hours.

    >>> clock_text(4.2), clock_text(84), clock_text(7384)
    ('4s', '1:24', '2:03:04')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
