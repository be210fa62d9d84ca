"""Which devices talk to each other in a collective, in XLA's three spellings and in our axes."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence

from ..indices import ravel, unravel
from ..topology import across_slices

Groups = tuple[tuple[int, ...], ...]  # positions of devices in the mesh, row-major
Axes = tuple[tuple[str, int], ...]  # (name, size) of the axes of a mesh, slowest first

_LIST = re.compile(r"\{(?:\{[\d,\s]*\},?\s*)*\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[([^\]]*)\](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?(?:\s*\{([^}]*)\})?"
)


@functools.lru_cache(maxsize=1024)
def parse_groups(text: str, num_devices: int) -> Groups:
    """The groups that a text begins with; one group of all where it names none.

    Lists (``{{0,1},{2,3}}``), iota (``[2,2]<=[4]``, ``[2,2]<=[2,2]T(1,0)``: counted up, reshaped,
    transposed, cut into rows) and XLA's own mesh (``mesh['a'=2,'b'=2] {'b'}``). Raises
    :class:`ValueError` for anything else.

    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['axis_0'=2,'axis_1'=2] {'axis_1'}", 4)
    ((0, 1), (2, 3))
    """
    if result := _LIST.match(text):
        groups = re.findall(r"\{([\d,\s]+)\}", result[0])
        return tuple(_numbers(group) for group in groups) or (tuple(range(num_devices)),)
    if result := _IOTA.match(text):
        shape, dims, order = _numbers(result[1]), _numbers(result[2]), _numbers(result[3] or "")
        return _rows(_transposed(dims, order or tuple(range(len(dims)))), shape[-1])
    if result := _MESH.match(text):
        return _mesh_groups(result[1], result[2], result[3])
    raise ValueError(f"replica groups in an unknown spelling: {text[:80]!r}.")


def groups_between_slices(text: str, axes: Axes) -> Groups:
    """The groups of a transfer between TPU slices, whose first axes span them.

    Slices are counted from 1, and devices of each from 0: ``"{1,2}x{0:7}"``, or device 3 of slice 2
    as 200003 in ``{{100003,200003}}`` and ``{{100003->200003}}``.

    >>> groups_between_slices('"{1,2}x{0:1}"', (("dcn", 2), ("batch", 2)))
    ((0, 2), (1, 3))
    >>> groups_between_slices("{{100000,200000},{100001,200001}}", (("batch", 4),))
    ((0, 2), (1, 3))
    """
    if result := re.match(r'"?\{([\d,]+)\}x\{(\d+):(\d+)\}', text):
        devices = range(int(result[2]), int(result[3]) + 1)
        members = [[(i - 1, device) for i in _numbers(result[1])] for device in devices]
    else:
        groups = re.findall(r"\{(\d+(?:(?:,|->)\d+)+)\}", text)
        members = [[(i // 100_000 - 1, i % 100_000) for i in _numbers(group)] for group in groups]
    slices = 1 + max((index for group in members for index, _ in group), default=0)
    sizes = [size for _, size in axes]
    spans = across_slices(sizes, slices)
    within = [size // span for size, span in zip(sizes, spans, strict=True)]

    def position(index: int, device: int) -> int:
        here = unravel(device, within)
        outer = unravel(index, spans)
        at = [o * size + i for o, size, i in zip(outer, within, here, strict=True)]
        return ravel(at, sizes)

    return tuple(tuple(position(*member) for member in group) for group in members)


def axes_of(groups: Groups, axes: Axes) -> tuple[str, ...]:
    """The axes along which the members of a group lie apart.

    >>> axes_of(((0, 1), (2, 3)), (("batch", 2), ("model", 2)))
    ('model',)
    """
    apart = set()
    for group in groups:
        coords = [_coords(position, axes) for position in group]
        for i, (name, _) in enumerate(axes):
            if len({coord[i] for coord in coords}) > 1:
                apart.add(name)
    return tuple(name for name, _ in axes if name in apart)


def _coords(position: int, axes: Axes) -> tuple[int, ...]:
    return unravel(position, [size for _, size in axes])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _rows(flat: Sequence[int], length: int) -> Groups:
    return tuple(tuple(flat[i : i + length]) for i in range(0, len(flat), length))


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """``arange(prod(dims)).reshape(dims).transpose(order)``, flat."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    return [
        sum(i * strides[dim] for i, dim in zip(at, order, strict=True))
        for at in itertools.product(*(range(dims[dim]) for dim in order))
    ]


def _mesh_groups(axes_text: str, ids: str | None, named: str | None) -> Groups:
    """``'a'=2,'b'=4`` and ``'b':(1)2``: the part of axis b of size 2 that has 1 before it."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes_text)}
    sub_axes = re.findall(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?", named or "")
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}  # (axis, size before the part) -> dim
    for name, size in sizes.items():
        cuts = {1, size}
        for other, before, part in sub_axes:
            if other == name and part:
                cuts |= {int(before), int(before) * int(part)}
        edges = sorted(cuts)
        for before, after in itertools.pairwise(edges) if size > 1 else [(1, 1)]:
            place[name, before] = len(dims)
            dims.append(after // before)
    grouped = [
        dim
        for name, before, part in sub_axes
        for dim in _parts(place, dims, name, int(before or 1), int(part or sizes[name]))
    ]
    order = [dim for dim in range(len(dims)) if dim not in grouped] + grouped
    length = math.prod(dims[dim] for dim in grouped)
    devices = _device_ids(ids, math.prod(dims))
    return _rows([devices[i] for i in _transposed(dims, order)], length)


def _parts(
    place: dict[tuple[str, int], int], dims: list[int], name: str, before: int, size: int
) -> list[int]:
    """The dims that a part of an axis was cut into."""
    result = []
    while size > 1:
        dim = place[name, before]
        result.append(dim)
        before, size = before * dims[dim], size // dims[dim]
    return result


def _device_ids(text: str | None, count: int) -> Sequence[int]:
    if not text:
        return range(count)
    if result := re.match(r"(?:<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        dims, order = _numbers(result[1]), _numbers(result[2] or "")
        return _transposed(dims, order or tuple(range(len(dims))))
    return _numbers(text)
