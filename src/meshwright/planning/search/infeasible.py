"""When nothing fits: how near the nearest came, and what would make it fit, each thing tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...errors import PlanError
from ...targets.hardware import Hardware
from ...targets.target import Target
from ...units import bytes_text
from ..graph import Graph, GraphTensor
from .branch_and_bound import search
from .candidates import Candidate
from .choices import EVERY_REMAT
from .facts import batch_dim
from .request import Request, Space

_TRY_S = 3.0  # for each change that is tried
_DOUBLINGS = 6  # of devices
_EVERY_ZERO = (0, 1, 2, 3)


@dataclass(frozen=True)
class _Tried:
    """What is tried, and with what."""

    name: str
    graph: Graph
    target: Target
    space: Space


def no_plan(request: Request, limit_bytes: int) -> PlanError:
    """The error for a problem that no layout fits, with the changes that would help."""
    graph, target, hardware, space = request.graph, request.target, request.hardware, request.space
    nearest = _smallest(_Tried("", graph, target, space), hardware)
    if nearest is None:
        return PlanError("no layout was found within the time limit. Raise limit_s=.")
    remedies = tuple(_remedies(graph, target, hardware, limit_bytes, space))
    peak = nearest.cost.peak_bytes
    listed = "".join(f"\n- {remedy}" for remedy in remedies)
    ways = (
        f" What would make it fit:{listed}"
        if remedies
        else f" {_tried_ways(space)} were tried; none is enough."
    )
    return PlanError(
        f"no layout keeps within {bytes_text(limit_bytes)} on {target}. The nearest takes "
        f"{bytes_text(peak)}, {bytes_text(peak - limit_bytes)} too much: {nearest.layouts}.{ways}",
        peak,
        limit_bytes,
        remedies,
    )


def _tried_ways(space: Space) -> str:
    ways = ["More devices"]
    ways += ["ZeRO"] * (len(space.zero) > 1) + ["recomputing"] * (len(space.remat) > 1)
    return f"{', '.join(ways)} and smaller batches"


def none_in_time(
    candidates: Iterable[Candidate], limit_bytes: int | None, limit_s: float
) -> PlanError:
    """The error for a search that ends at its time limit with nothing that fits."""
    way_out = "Give the search more time with limit_s=, or name a mesh with axes=."
    nearest = min(candidates, key=lambda candidate: candidate.cost.peak_bytes, default=None)
    if nearest is None or limit_bytes is None:
        return PlanError(f"no layout was found within {limit_s:g} s. {way_out}")
    peak = nearest.cost.peak_bytes
    return PlanError(
        f"no layout that keeps within {bytes_text(limit_bytes)} was found within {limit_s:g} s. "
        f"The nearest so far takes {bytes_text(peak)}, {bytes_text(peak - limit_bytes)} too much: "
        f"{nearest.layouts}. {way_out}",
        peak,
        limit_bytes,
    )


def _remedies(
    graph: Graph, target: Target, hardware: Hardware, limit_bytes: int, space: Space
) -> Iterator[str]:
    """Changes that are enough; of more devices and smaller batches the least of them."""
    result = set()
    for tried in _changes(graph, target, space):
        kind = tried.name.split()[0]
        if kind in result or _least_bytes(tried) > limit_bytes:
            continue
        answer = _smallest(tried, hardware)
        if answer is not None and answer.cost.peak_bytes <= limit_bytes:
            result.add(kind)
            yield f"{tried.name}: {bytes_text(answer.cost.peak_bytes)} with {answer.layouts}"


def _changes(graph: Graph, target: Target, space: Space) -> Iterator[_Tried]:
    if space.axes is not None:
        yield _Tried("another mesh", graph, target, replace(space, axes=None))
    if tuple(space.zero) != _EVERY_ZERO:
        yield _Tried("ZeRO", graph, target, replace(space, zero=_EVERY_ZERO))
    if "block" not in space.remat:  # which holds the least
        yield _Tried("remat", graph, target, replace(space, remat=EVERY_REMAT))
    rows = _rows(graph)
    more = tuple(k for k in (1, 2, 4, 8, 16, 32, 64) if rows % k == 0)
    if not set(more) <= set(space.accumulate):
        name = f"accumulate up to {max(more)} micro-batches"
        yield _Tried(name, graph, target, replace(space, accumulate=more))
    grown = target
    for _ in range(_DOUBLINGS if space.axes is None else 0):
        if grown.slices > 1:
            grown = replace(grown, slices=2 * grown.slices)
        else:
            grown = Target(grown.kind, (*grown.topology[:-1], 2 * grown.topology[-1]))
        yield _Tried(f"more devices, {grown}", graph, grown, space)
    while rows > 1 and rows % 2 == 0:
        rows //= 2
        yield _Tried(f"smaller batch, {rows} rows", with_rows(graph, rows), target, space)


def _least_bytes(tried: _Tried) -> float:
    """What one device holds at the least: its share of all parameters and their slots."""
    kept = (t.nbytes for t in tried.graph.tensors if t.role in ("parameter", "slot"))
    return sum(kept) / tried.target.num_devices


def _smallest(tried: _Tried, hardware: Hardware) -> Candidate | None:
    result = search(
        tried.graph,
        tried.target,
        hardware,
        objective="memory",
        space=tried.space,
        keep=1,
        limit_s=_TRY_S,
    )
    return result.candidates[0] if result.candidates else None


def _rows(graph: Graph) -> int:
    batch = batch_dim(graph)
    return 1 if batch is None else graph.dims[batch].size


def with_rows(graph: Graph, rows: int) -> Graph:
    """The same step for a batch of another size: what has its dim grows or shrinks with it.

    >>> from ..graph import GraphDim
    >>> one = Graph((GraphDim("b", 8, "b"),), (GraphTensor("x", (0,), (8,), 4, "input"),), ())
    >>> with_rows(one, 2).tensors[0].shape
    (2,)
    """
    batch = batch_dim(graph)
    if batch is None:
        return graph
    share = rows / graph.dims[batch].size
    dims = tuple(
        replace(dim, size=rows) if place == batch else dim for place, dim in enumerate(graph.dims)
    )

    def tensor(declared: GraphTensor) -> GraphTensor:
        shape = tuple(
            rows if dim == batch else size
            for dim, size in zip(declared.dims, declared.shape, strict=True)
        )
        return replace(declared, shape=shape)

    operations = tuple(
        replace(operation, flops=operation.flops * share)
        if any(batch in graph.tensors[t].dims for t in (*operation.operands, *operation.results))
        else operation
        for operation in graph.operations
    )
    return Graph(dims, tuple(map(tensor, graph.tensors)), operations)
