"""What a graph says that devices tell each other, for dims that lie along axes: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.planning.graph import Graph, GraphTensor, Joint, Operation

Kind = Literal["sum", "gather", "move"]


@dataclass(frozen=True)
class Volume:
    """One sum over devices, gather or move: ``elements`` of one device, each of ``times`` times.

    Those of a sum are of the piece that is summed, those of a gather of the array when it is
    gathered, and those of a move of the piece before. ``operation`` is a place in
    :attr:`Graph.operations`.
    """

    kind: Kind
    operation: int
    axis: str
    elements: int
    itemsize: int
    times: int = 1

    @property
    def bytes_per_device(self) -> int:
        """Bytes in one device, all times together."""
        return self.elements * self.itemsize * self.times


def communication(
    graph: Graph, axes: Mapping[str, int], lies: Mapping[str, str]
) -> tuple[Volume, ...]:
    """What is summed, gathered and moved where dims lie along axes.

    ``axes`` are the sizes of the mesh's axes and ``lies`` the axis of each dim, by name, that is
    split. The volumes are those of Mesh-TensorFlow (Shazeer et al. 2018, section 4): a product over
    a dim that is split ends with a sum of its result's pieces.
    """
    split = {number: lies[dim.name] for number, dim in enumerate(graph.dims) if dim.name in lies}
    return tuple(
        volume
        for number, operation in enumerate(graph.operations)
        for volume in _of(graph, number, operation, axes, split)
    )


def _of(
    graph: Graph,
    number: int,
    operation: Operation,
    axes: Mapping[str, int],
    split: Mapping[int, str],
) -> Iterator[Volume]:
    def volume(kind: Kind, axis: str, place: int, more: int) -> Volume:
        tensor = graph.tensors[place]
        elements = _piece(tensor, axes, split) * more
        return Volume(kind, number, axis, elements, tensor.itemsize, operation.times)

    for dim in operation.summed:
        if dim in split:
            for place in operation.results:
                yield volume("sum", split[dim], place, 1)
    for dim in operation.whole:
        for place in operation.operands:
            if dim in split and dim in graph.tensors[place].dims:
                yield volume("gather", split[dim], place, axes[split[dim]])
    for joint in operation.joints:
        yield from _moves(joint, volume, axes, split)


def _moves(
    joint: Joint,
    volume: Callable[[Kind, str, int, int], Volume],
    axes: Mapping[str, int],
    split: Mapping[int, str],
) -> Iterator[Volume]:
    before, expected = split.get(joint.source), split.get(joint.target)
    if before is None or before == expected:
        return  # each device has all of it, or what it is asked for
    if expected is None:
        yield volume("gather", before, joint.tensor, axes[before])
    else:
        yield volume("move", before, joint.tensor, 1)


def _piece(tensor: GraphTensor, axes: Mapping[str, int], split: Mapping[int, str]) -> int:
    """Elements of one device."""
    pieces = math.prod(axes[split[dim]] for dim in tensor.dims if dim is not None and dim in split)
    return math.prod(tensor.shape) // pieces
