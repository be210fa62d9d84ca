"""Which meshes are tried: all ways to write a number of devices as a product."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...hlo.groups import Axes
from ...hlo.links import links_of
from ...targets.hardware import Hardware
from ...targets.target import Target

_ALL_COUNTS_UP_TO = 16  # of more devices, only numbers that divide theirs are tried


def meshes(
    target: Target, hardware: Hardware, max_axes: int = 3, fewer: bool = True, stages: Axes = ()
) -> tuple[Axes, ...]:
    """Meshes of all devices of a target, then of fewer down to one; axes are ``a``, ``b``, ``c``.

    Of meshes whose axes have the same sizes and lie on the same links, one is tried. On a torus
    there are no more axes than the torus has dims, cores of a chip counting as one: they would
    share links, of which the closed forms know nothing. ``stages`` is an axis that is there
    already, before the others.

    >>> from ...targets.hardware import hardware_of
    >>> h100 = Target.of("h100:8")
    >>> [[size for _, size in axes] for axes in meshes(h100, hardware_of(h100), fewer=False)]
    [[8], [4, 2], [2, 2, 2]]
    """
    result: dict[tuple[object, ...], Axes] = {}
    most = target.num_devices // math.prod(size for _, size in stages)
    max_axes = max(1, min(max_axes, _torus_dims(target) - len(stages)))
    for count in _counts(most) if fewer else (most,):
        for sizes in _products(count, max_axes):
            axes = tuple(zip("abcdefgh", sizes, strict=False))
            links = links_of(target, hardware, (*stages, *axes))[len(stages) :]
            lies = [(e.size, e.link, e.lanes, e.inside) for e in links]
            result.setdefault(tuple(sorted(lies, key=str)), axes)
    return tuple(result.values())


def _torus_dims(target: Target) -> int:
    """How many axes can lie apart from each other; as many as one likes but on a TPU.

    Cores of a chip count as a dim, and so does the network between slices.
    """
    if target.platform != "tpu":
        return 8
    dims = sum(size > 1 for size in target.topology)
    cores = target.devices_per_slice > math.prod(target.topology)
    return max(1, dims + cores + (target.slices > 1))


def _counts(most: int) -> tuple[int, ...]:
    every = range(most, 0, -1)
    return tuple(c for c in every if most <= _ALL_COUNTS_UP_TO or most % c == 0)


def _products(count: int, length: int) -> Iterator[tuple[int, ...]]:
    """Ordered products of up to ``length`` factors above one, the larger factors first."""
    if count == 1:
        yield ()
    elif length:
        for first in range(count, 1, -1):
            if count % first == 0:
                for rest in _products(count // first, length - 1):
                    yield (first, *rest)
