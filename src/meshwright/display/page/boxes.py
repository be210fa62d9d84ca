"""The model as boxes in boxes: each layer opens to its arrays, its collectives and what is in it.

Equal layers are one box. It is made of ``details``, so that it needs no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...equal_layers import grouped, pattern, without_numbers
from ...hlo.traffic import moved_bytes
from ...units import bytes_text, flops_text, share_text
from ..drawing.words import dims_text, specs_text
from ..figures import axes_list
from .elements import Part, element
from .layers import PAINTS, passes

if TYPE_CHECKING:
    from ...hlo.costs import LayerCost
    from ...hlo.traffic import Transfer
    from ...layouts.params import Placed
    from ...planning.report import DryRun

_MOST = 400  # boxes; larger models are shown by their tables


@dataclass
class _Box:
    """A layer, under the last part of its path; figures are those of all that is inside."""

    name: str
    inside: dict[str, _Box] = field(default_factory=dict)
    arrays: list[Placed] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    flops: tuple[float, ...] = (0.0,) * len(PAINTS)
    bytes_per_device: int = 0

    def at(self, path: Sequence[str]) -> Iterator[_Box]:
        """The boxes on the way to a path, this one first; they are made where they are missing."""
        yield self
        if path:
            first, *rest = path
            yield from self.inside.setdefault(first, _Box(first)).at(rest)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal layers: their names differ in numbers alone."""
        return (
            without_numbers(self.name),
            self.flops,
            self.bytes_per_device,
            tuple((without_numbers(one.info.path), one.layout) for one in self.arrays),
            tuple((one.kind, one.axes, one.bytes_per_step) for one in self.transfers),
            tuple(box.key for box in self.inside.values()),
        )


def boxes_section(run: DryRun) -> dict[str, object] | None:
    """The section of boxes; none where nothing is known of layers."""
    layers = run.estimate.layers if run.estimate else ()
    whole = _boxes(run.placed, layers, run.collectives)
    if not whole.inside:
        return None
    boxes = list(_contents(whole, sum(whole.flops) or 1.0))
    count = sum(map(_count, boxes))
    return {"paints": PAINTS, "boxes": boxes} if count <= _MOST else None


def _boxes(
    placed: Iterable[Placed], layers: Iterable[LayerCost], transfers: Iterable[Transfer]
) -> _Box:
    whole = _Box("")
    for one in placed:
        path = one.info.owner or one.info.path  # slots belong to the layer of their parameter
        *_, last = boxes = list(whole.at(path.split("/")[:-1]))
        last.arrays.append(one)
        for box in boxes:
            box.bytes_per_device += one.bytes_per_device
    for layer in layers:
        for box in whole.at(_parts(layer.layer)):
            box.flops = tuple(a + b for a, b in zip(box.flops, passes(layer), strict=True))
    for transfer in transfers:
        of_variable = bool(transfer.variables)
        path = _parts(transfer.path)
        *_, last = whole.at(path[:-1] if of_variable else path)
        last.transfers.append(transfer)
    return whole


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _contents(box: _Box, whole: float, times: int = 1) -> Iterator[dict[str, Any]]:
    """What is in a box, as the template takes it; equal layers are one, with the figures of all."""
    for alike in grouped(box.inside.values(), lambda one: one.key):
        first, count = alike[0], times * len(alike)
        flops, nbytes = count * sum(first.flops), count * first.bytes_per_device
        parts = [
            Part(name, count * size, flops_text(count * size), paint)
            for (name, paint), size in zip(PAINTS, first.flops, strict=True)
        ]
        sizes = [f"{flops_text(flops)}, {share_text(flops / whole)}"] if flops else []
        sizes += [f"{bytes_text(nbytes)} of state"] if nbytes else []
        yield {
            "name": pattern([one.name for one in alike]),
            "count": len(alike),
            "sizes": sizes,
            "bar": element("bar", parts, whole, "FLOPs") if flops else None,
            "arrays": [_array(one) for one in first.arrays if one.info.role != "slot"],
            "transfers": [_transfer(some, count) for some in _alike(first.transfers)],
            "inside": list(_contents(first, whole, count)),
        }


def _array(one: Placed) -> tuple[str, str, str]:
    info = one.info
    what = f"{info.dtype} {dims_text(info.dims)}"
    return info.path.rpartition("/")[2], what, specs_text(one.layout)


def _alike(transfers: Iterable[Transfer]) -> list[list[Transfer]]:
    return grouped(transfers, lambda one: (one.kind, one.axes, one.is_unexpected))


def _transfer(some: Sequence[Transfer], count: int) -> str:
    first, nbytes = some[0], count * moved_bytes(some)
    marked = ", unexpected" if first.is_unexpected else ""
    return f"{first.kind} over {axes_list(first.axes)}: {bytes_text(nbytes)}{marked}"


def _count(box: dict[str, Any]) -> int:
    return 1 + sum(map(_count, box["inside"]))
