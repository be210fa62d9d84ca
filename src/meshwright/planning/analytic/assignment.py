"""A layout that is given, in the planner's terms: the axes that each dim of a step lies along."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ...equal_layers import merged
from ...errors import LayoutError
from ...hlo.groups import Axes
from ...layouts.mesh import Mesh
from ...layouts.params import Placed
from ...layouts.placement import Placement
from ...layouts.placement_arguments import as_axes
from ...program import Batch, Program
from ...step.options import StepOptions
from ...targets.hardware import Hardware
from ...targets.target import Target
from ..abstract_step import AbstractStep, HasSteps, of_program
from ..faults import tracing
from ..graph import Graph
from ..search.choices import EVERY_REMAT, Choices, remat_of
from ..search.compact import Compact, compact
from ..search.cost import faults_of
from ..search.plain_layouts import rows_of_tables
from ..search.setting import Setting, setting_of
from ..search.terms import Lay
from ..traced_graph import graph_of_step, input_path
from .agreement import Along, agreeing

_MOST = 4  # lines of faults


@dataclass(frozen=True)
class WeightGather:
    """A variable that lies whole, or in larger pieces, where its dims are split.

    Each device takes its part of it for nothing; what is new of it is gathered over ``axes``, along
    the array's dim ``dim``.
    """

    placed: Placed
    tensor: int
    axes: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class UseGather:
    """A parameter that lies along ``over`` by a dim that does not, and is gathered to be used.

    Over ``moved`` of these axes, along which another of its dims lies, it is sent from one to the
    other.
    """

    tensor: int
    over: tuple[str, ...]
    moved: tuple[str, ...]

    @property
    def grows(self) -> tuple[str, ...]:
        """The axes over which a device then holds all of it."""
        return tuple(axis for axis in self.over if axis not in self.moved)


@dataclass(frozen=True, eq=False)
class Assignment:
    """A step under a layout: ``masks`` are sets of axes, of the units of ``problem``.

    ``shared`` are the paths of variables that lie along axes of the batch's rows, as all do by
    ZeRO 3; ``None`` where none is taken so. ``before_use`` are parameters that lie along axes which
    their dims do not lie along.
    """

    problem: Compact
    setting: Setting
    choices: Choices
    masks: Mapping[int, int]
    gathers: tuple[WeightGather, ...]
    shared: frozenset[str] | None = None
    before_use: tuple[UseGather, ...] = ()

    @functools.cached_property
    def lay(self) -> Lay:
        """The same as the closed forms take it."""
        masks = {unit: np.array([mask]) for unit, mask in self.masks.items()}
        return Lay(self.problem, self.setting, self.choices, masks, rows=1)

    def named(self, mask: int) -> tuple[str, ...]:
        """The axes of a set."""
        return _names(self.setting.axes, mask)


def graph_alone(
    model: Any, batch: Batch, strategy: HasSteps | Placement, described: AbstractStep
) -> Graph:
    """The graph of the step as one device would take it, all micro-batches in one."""
    placement, how = described.placement, described.how
    mesh = Mesh(dict.fromkeys(placement.mesh.axis_names, 1))
    whole = Placement.of(mesh, batch=placement.batch, unmatched="replicate")
    rows = _joined(batch, how.accumulate)
    plain = StepOptions(remat="none" if how.remat in EVERY_REMAT else how.remat)
    with tracing(described.program.name):
        if isinstance(model, Program):
            return graph_of_step(of_program(model, rows, whole, plain))
        assert not isinstance(strategy, Placement)
        return graph_of_step(strategy.from_placement(whole, plain).abstract_step(model, rows))


def _joined(batch: Batch, count: int) -> Batch:
    """The shapes of ``count`` batches in one."""
    import jax
    import numpy as np

    def shape(array: Any) -> Any:
        dtype = array.dtype if hasattr(array, "dtype") else np.asarray(array).dtype
        dims = np.shape(array)
        return jax.ShapeDtypeStruct((count * dims[0], *dims[1:]) if dims else dims, dtype)

    return jax.tree.map(shape, batch)


def assignment_of(
    graph: Graph, described: AbstractStep, target: Target, hardware: Hardware
) -> Assignment:
    """A step's graph under the layout that it is described for.

    A dim lies along the axes that any variable or input has it along. Where that cannot be, as
    variables are split along the axes of the batch's rows too (rules of Keras Hub's models do so),
    those are taken to be shared out over them as by ZeRO 3: gathered before they are used. So are
    variables that lie along other axes than a dim of theirs can, along these axes. Raises
    :class:`~meshwright.LayoutError` that lists what dims cannot say.
    """
    axes = tuple((name, size) for name, size in described.placement.mesh.axes if size > 1)
    lies = _lies(described, axes)
    try:
        return _assigned(graph, described, target, hardware, lies)
    except LayoutError:
        apart = _without_rows(lies, described)
        shared = frozenset(path for path, dims in apart.items() if dims != lies[path])
        agreed = agreeing(graph, apart, axes)
        if agreed == lies:
            raise
        stray = {path: _lost(apart[path], dims) for path, dims in agreed.items()}
    return _assigned(graph, described, target, hardware, agreed, shared or None, stray)


def _lost(before: Along, after: Along) -> tuple[str, ...]:
    kept = {axis for dim in after for axis in dim}
    return tuple(axis for dim in before for axis in dim if axis not in kept)


def _without_rows(lies: Mapping[str, Along], described: AbstractStep) -> dict[str, Along]:
    """The same, but for the axes of the batch's rows that variables lie along."""
    rows = set(described.placement.batch_axes)
    variables = {entry.info.path for entry in described.placed}
    return {
        path: tuple(tuple(axis for axis in dim if axis not in rows) for dim in dims)
        if path in variables
        else dims
        for path, dims in lies.items()
    }


def _assigned(
    graph: Graph,
    described: AbstractStep,
    target: Target,
    hardware: Hardware,
    lies: Mapping[str, Along],
    shared: frozenset[str] | None = None,
    stray: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Assignment:
    axes = tuple((name, size) for name, size in described.placement.mesh.axes if size > 1)
    along, faults = _along(graph, lies)
    faults += _of_activations(described.placement, axes)
    if faults:
        raise LayoutError(_listed(faults))
    along |= _by_names(graph, along, described.placement, axes)
    problem = compact(_in_families(graph, along), target.platform, target.kind)
    bits = {name: 1 << bit for bit, (name, _) in enumerate(axes)}
    masks = dict.fromkeys(range(len(problem.units)), 0)
    for dim, names in along.items():
        masks[problem.unit_of[dim]] = sum(bits[name] for name in names)
    problem = _with_tables(problem)
    how = described.how
    zero = 3 if shared else described.placement.zero
    choices = Choices(zero, how.accumulate, remat_of(how.remat))
    faults = list(map(str, faults_of(problem, axes, masks, choices)))
    rows = () if problem.batch is None else _names(axes, masks[problem.batch])
    over = {name for name, _ in axes} & set(described.placement.batch_axes)
    if choices.zero and set(rows) != over:
        faults.append(
            f"zero={choices.zero} shares state over {', '.join(described.placement.batch_axes)}, "
            f"and the rows of the batch lie along {', '.join(rows) or 'no axis'}."
        )
    if faults:
        raise LayoutError(_listed(faults))
    placed = {entry.info.path: entry for entry in described.placed}
    gathers = tuple(_gathers(graph, along, lies, placed, stray))
    setting = setting_of(axes, target, hardware)
    assignment = Assignment(problem, setting, choices, masks, gathers, shared)
    return replace(assignment, before_use=tuple(_before_use(assignment, stray)))


def _listed(faults: Iterable[str]) -> str:
    """A few lines of faults, equal layers as one, and how many more there are."""
    lines = merged(faults)
    more = [f"and {len(lines) - _MOST} more."] if len(lines) > _MOST else []
    return "\n".join(lines[:_MOST] + more)


def _names(axes: Axes, mask: int) -> tuple[str, ...]:
    return tuple(name for bit, (name, _) in enumerate(axes) if mask >> bit & 1)


def _lies(described: AbstractStep, axes: Axes) -> dict[str, Along]:
    """The axes of each variable, as it is laid out without ZeRO, and of each input."""
    import jax

    plain = described.placement.with_zero(0).place(entry.info for entry in described.placed)
    result: dict[str, Along] = {
        entry.info.path: tuple(entry.layout.dim_axes(dim) for dim in range(entry.layout.rank))
        for entry in plain
    }
    batch = described.batch[0] if described.how.batches > 1 else described.batch
    for path, array in jax.tree.leaves_with_path(batch):
        result[input_path(path)] = tuple(map(as_axes, array.sharding.spec))
    present = {name for name, _ in axes}
    return {
        path: tuple(tuple(axis for axis in along if axis in present) for along in dims)
        for path, dims in result.items()
    }


def _along(graph: Graph, lies: Mapping[str, Along]) -> tuple[dict[int, tuple[str, ...]], list[str]]:
    """The axes of each dim that is split, and what speaks against it."""
    result: dict[int, tuple[str, ...]] = {}
    whose: dict[int, str] = {}
    faults: list[str] = []
    for tensor in graph.tensors:
        if tensor.owner and lies.get(tensor.path) == lies.get(tensor.owner):
            continue  # a slot says what its parameter does
        for dim, axes in zip(tensor.dims, lies.get(tensor.path, ()), strict=False):
            over = "+".join(axes)
            if not axes:
                continue
            if dim is None:
                faults.append(f"{tensor.path} lies along {over} by a dim that is never split.")
            elif result.setdefault(dim, axes) != axes:
                faults.append(
                    f"dim {graph.dims[dim].name!r} lies along {'+'.join(result[dim])} in "
                    f"{whose[dim]}, and along {over} in {tensor.path}."
                )
            else:
                whose.setdefault(dim, tensor.path)
    return result, faults


def _of_activations(placement: Placement, axes: Axes) -> list[str]:
    """Layouts of activations that say more than the batch's rows do."""
    present, rows = {name for name, _ in axes}, set(placement.batch_axes)
    faults = []
    for rule in placement.activations:
        layout = placement.layout(rule.layout)
        split = [set(layout.dim_axes(dim)) & present for dim in range(layout.rank)]
        if any(split[1:]) or not set().union(*split[:1]) <= rows:
            faults.append(f"activation {rule.pattern!r} has a layout of its own.")
    return faults


def _by_names(
    graph: Graph, along: Mapping[int, tuple[str, ...]], placement: Placement, axes: Axes
) -> dict[int, tuple[str, ...]]:
    """The axes of dims that only activations have, by the rules for their names."""
    rules, present = placement.rules, {name for name, _ in axes}
    if rules is None:
        return {}
    return {
        place: over
        for place, dim in enumerate(graph.dims)
        if place not in along
        if (over := tuple(a for a in rules.axes(dim.name.partition("#")[0]) if a in present))
    }


def _in_families(graph: Graph, along: Mapping[int, tuple[str, ...]]) -> Graph:
    """The graph with families of dims that lie alike, as the planner's do."""
    first: dict[tuple[str, int], tuple[str, ...]] = {}
    dims = []
    for place, dim in enumerate(graph.dims):
        axes = along.get(place, ())
        if first.setdefault((dim.family, dim.size), axes) != axes:
            dim = replace(dim, family=f"{dim.family} over {'+'.join(axes) or 'none'}")
        dims.append(dim)
    return replace(graph, dims=tuple(dims))


def _with_tables(problem: Compact) -> Compact:
    """The same, in which rows of tables may lie along the axes of the batch's rows."""
    tables = set(rows_of_tables(problem))
    clashes = {pair for pair in problem.clashes if tables.isdisjoint(pair)}
    return replace(problem, clashes=frozenset(clashes))


def _gathers(
    graph: Graph,
    along: Mapping[int, tuple[str, ...]],
    lies: Mapping[str, Along],
    placed: Mapping[str, Placed],
    stray: Mapping[str, tuple[str, ...]],
) -> Iterator[WeightGather]:
    """Parameters and slots that are not split along an axis, though their dims are."""
    for place, tensor in enumerate(graph.tensors):
        if tensor.role not in ("parameter", "slot"):
            continue
        own = {axis for axes in lies[tensor.path] for axis in axes}
        own |= set(stray.get(tensor.path, ()))
        too_large = {
            axis: at
            for at, dim in enumerate(tensor.dims)
            for axis in (() if dim is None else along.get(dim, ()))
            if axis not in own
        }
        if too_large:
            yield WeightGather(
                placed[tensor.path], place, tuple(too_large), min(too_large.values())
            )


def _before_use(
    assignment: Assignment, stray: Mapping[str, tuple[str, ...]]
) -> Iterator[UseGather]:
    problem = assignment.problem
    for place, tensor in enumerate(problem.graph.tensors):
        if tensor.role == "parameter" and (over := stray.get(tensor.path)):
            units = problem.pieces[problem.piece_of[place]].scope
            in_use = {a for unit in units for a in assignment.named(assignment.masks[unit])}
            yield UseGather(place, over, tuple(axis for axis in over if axis in in_use))
