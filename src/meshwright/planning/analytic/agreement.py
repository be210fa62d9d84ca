"""Layouts that dims can have together: which axes a dim keeps where variables lie differently."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...hlo.groups import Axes
from ..graph import Graph, GraphTensor
from ..search.compact import compact

Along = tuple[tuple[str, ...], ...]  # the axes of each dim of an array
_VARIABLES = ("parameter", "slot", "state")


def agreeing(graph: Graph, lies: Mapping[str, Along], axes: Axes) -> dict[str, Along]:
    """The same without the axes of variables that their dims cannot lie along.

    Inputs keep theirs. Of variables, those dims come first that most bytes lie along, alike in
    all layers; a dim that meets one before it in an array or operation leaves it the axis. So does
    one that does not divide, as the heads of keys that several queries share.
    """
    axes_of = _axes_of(graph, lies, dict(axes))
    dims_of = {tensor.path: tensor.dims for tensor in graph.tensors if tensor.role in _VARIABLES}
    return {
        path: tuple(
            over if dim is not None and axes_of.get(dim) == over else ()
            for dim, over in zip(dims_of[path], along, strict=True)
        )
        if path in dims_of
        else along
        for path, along in lies.items()
    }


def _axes_of(
    graph: Graph, lies: Mapping[str, Along], sizes: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    meets = _meeting(graph)
    result: dict[int, tuple[str, ...]] = {}
    for dim, over in _claims(graph, lies):
        others = {axis for other in meets[dim] for axis in result.get(other, ())}
        divides = graph.dims[dim].size % math.prod(sizes[axis] for axis in over) == 0
        if dim not in result and others.isdisjoint(over) and divides:
            result[dim] = over
    return result


def _meeting(graph: Graph) -> Mapping[int, set[int]]:
    """The dims that each dim meets, when each is one of its own."""
    dims = tuple(replace(dim, family=str(place)) for place, dim in enumerate(graph.dims))
    problem = compact(replace(graph, dims=dims))
    dim_of = {unit: dim for dim, unit in enumerate(problem.unit_of)}
    result: dict[int, set[int]] = defaultdict(set)
    for one, other in problem.clashes:
        result[dim_of[one]].add(dim_of[other])
    return result


def _claims(graph: Graph, lies: Mapping[str, Along]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Dims with the axes that an array has them along, the most important first."""
    nbytes: dict[tuple[str, int, tuple[str, ...]], float] = defaultdict(float)
    claims: dict[tuple[int, tuple[str, ...]], None] = {}
    for tensor in graph.tensors:
        for dim, axes in zip(tensor.dims, lies.get(tensor.path, ()), strict=False):
            if dim is not None and axes:
                claims[dim, axes] = None
                nbytes[_alike(graph, dim, axes)] += _weight(tensor)
    yield from sorted(claims, key=lambda claim: -nbytes[_alike(graph, *claim)])


def _alike(graph: Graph, dim: int, axes: tuple[str, ...]) -> tuple[str, int, tuple[str, ...]]:
    return graph.dims[dim].family, graph.dims[dim].size, axes


def _weight(tensor: GraphTensor) -> float:
    return tensor.nbytes if tensor.role in _VARIABLES else float("inf")
