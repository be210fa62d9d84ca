"""Parts of a target that are targets of their own: fewer nodes or slices, or a smaller grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..errors import TargetError
from .target import Target


def smaller_parts(target: Target) -> Iterator[Target]:
    """Parts that divide a target, each half of the one before or so: of a TPU slice, slices.

    >>> [str(part) for part in smaller_parts(Target.of("v5p:2x2x2"))]
    ['v5p:1x2x2', 'v5p:1x1x2', 'v5p:1x1x1']
    """
    counts = range(target.num_devices - 1, 0, -1)
    fewer = next((count for count in counts if _divides(target, count)), None)
    if fewer is not None:
        part = target.part(fewer)
    elif target.platform == "tpu" and max(target.topology) % 2 == 0:
        dim = target.topology.index(max(target.topology))
        halved = [size // 2 if place == dim else size for place, size in enumerate(target.topology)]
        part = replace(target, topology=tuple(halved))
    else:
        return
    yield part
    yield from smaller_parts(part)


def _divides(target: Target, count: int) -> bool:
    if target.num_devices % count:
        return False
    try:
        target.part(count)
    except TargetError:
        return False
    return True


def part_with(target: Target, count: int) -> Target | None:
    """A part with this number of devices; ``None`` where no target has it."""
    parts = (target, *smaller_parts(target))
    return next((part for part in parts if part.num_devices == count), None)
