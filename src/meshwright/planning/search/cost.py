"""What a step costs under one assignment of axes, by closed forms alone: nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...errors import DivisibilityError, LayoutError
from ...hlo.groups import Axes
from ...targets.hardware import Hardware, hardware_of
from ...targets.target import Target
from ..graph import Graph
from .choices import PLAIN, Choices, Cost, Term
from .compact import Compact, Piece, Work, compact
from .moments import alive
from .setting import Setting, setting_of
from .terms import Lay, Spent, Values, parameter_spent, resting_bytes, room_bytes, work_spent

Rules = Mapping[str, Sequence[str]]


def cost(
    graph: Graph,
    axes: Axes,
    rules: Rules,
    choices: Choices = PLAIN,
    *,
    target: Target | str,
    hardware: Hardware | None = None,
) -> Cost:
    """What one step costs where families of dims lie along axes as ``rules`` say.

    Each operation takes the longer of its arithmetic and its memory traffic, shared by the devices
    along whose axes its dims are split; collectives come on top (``links.py``). The peak is that
    of the arrays alive in the order in which the step was traced. Raises
    :class:`~meshwright.LayoutError` for an assignment that cannot be, with every fault.

    >>> from ..graph import GraphDim, GraphTensor, Operation
    >>> b, i = GraphDim("batch", 64, "batch"), GraphDim("in", 16, "in")
    >>> tensors = (GraphTensor("x", (0, 1), (64, 16), 4, "input"), GraphTensor("s", (1,), (16,), 4))
    >>> graph = Graph((b, i), tensors, (Operation("reduce_sum", "", (0,), (1,), summed=(0,)),))
    >>> cost(graph, (("data", 8),), {"batch": ["data"]}, target="h100:8").peak_bytes
    576
    """
    target = Target.of(target)
    problem = compact(graph, target.platform, target.kind)
    setting = setting_of(axes, target, hardware or hardware_of(target))
    masks = masks_of(problem, axes, rules)
    if faults := list(faults_of(problem, axes, masks, choices)):
        alone = DivisibilityError if all(map(_is_of_sizes, faults)) else LayoutError
        raise alone("\n".join(map(str, faults)))
    return cost_of(problem, setting, masks, choices)


def cost_of(problem: Compact, setting: Setting, masks: Mapping[int, int], choices: Choices) -> Cost:
    """The same of a graph made small, with sets of axes for its units."""
    lay = Lay(problem, setting, choices, {u: np.array([m]) for u, m in masks.items()}, rows=1)
    terms = tuple(_terms(lay))
    compute_s = sum(term.compute_s for term in terms)
    communication_s = sum(term.communication_s for term in terms)
    is_known = not setting.missing
    return Cost(
        time_s=compute_s + communication_s if is_known else None,
        compute_s=compute_s if is_known else None,
        communication_s=communication_s if is_known else None,
        peak_bytes=int(np.max(alive(problem, choices) @ weights(lay))) if problem.works else 0,
        terms=terms,
    )


def masks_of(problem: Compact, axes: Axes, rules: Rules) -> dict[int, int]:
    """Sets of axes per unit. Raises :class:`~meshwright.LayoutError` for unknown names."""
    bits = {name: 1 << bit for bit, (name, _) in enumerate(axes)}
    families = {unit.family for unit in problem.units}
    faults = [
        f"unknown family of dims {family!r}; known are {', '.join(sorted(families))}."
        for family in rules
        if family not in families
    ]
    faults += [
        f"{family!r} lies along axis {axis!r}, which the mesh does not have."
        for family, along in rules.items()
        for axis in along
        if axis not in bits
    ]
    if faults:
        raise LayoutError("\n".join(faults))
    return {
        place: sum(bits[axis] for axis in set(rules.get(unit.family, ())))
        for place, unit in enumerate(problem.units)
    }


def faults_of(
    problem: Compact, axes: Axes, masks: Mapping[int, int], choices: Choices
) -> Iterator[LayoutError]:
    """Why an assignment cannot be: axes that meet, sizes that do not divide."""
    for unit, mask in masks.items():
        if mask and not divides(problem, axes, unit, mask, choices.accumulate):
            dim = problem.units[unit]
            yield DivisibilityError(
                f"dim {dim.family!r} (size {dim.size}) does not divide over "
                f"{_named(axes, mask)}{_micro(problem, unit, choices)}."
            )
    for one, other in sorted(problem.clashes):
        both = masks.get(one, 0) & masks.get(other, 0)
        if both and one <= other:
            names = f"{problem.units[one].family!r} and {problem.units[other].family!r}"
            yield LayoutError(
                f"dims {names} meet in one array or operation, and both lie along "
                f"{_named(axes, both)}; an axis can split one of them."
            )


def divides(problem: Compact, axes: Axes, unit: int, mask: int, accumulate: int) -> bool:
    """Whether a unit can be split over a set of axes, with its micro-batches if it is the batch."""
    size = accumulate if unit == problem.batch else 1
    for bit, (_, axis_size) in enumerate(axes):
        size *= axis_size if mask >> bit & 1 else 1
    return problem.units[unit].size % size == 0


def weights(lay: Lay) -> np.ndarray:
    """Bytes of each column of :func:`alive`; one assignment only."""
    every = columns(lay.problem, lay.choices)
    return np.array([int(held_bytes(lay, column)[0]) for column in every], np.int64)


def columns(problem: Compact, choices: Choices) -> list[Piece | Work]:
    """What each column of :func:`alive` counts; of works, the copies that they hold."""
    result: list[Piece | Work] = [*problem.pieces, *problem.works]
    if choices.accumulate > 1:
        pieces = [problem.pieces[place] for place, _ in problem.parameters]
        result += [replace(piece, kind="accumulator") for piece in pieces]
    return result


def held_bytes(lay: Lay, column: Piece | Work) -> Values:
    """Bytes that one of a column takes in one device."""
    return room_bytes(lay, column) if isinstance(column, Work) else resting_bytes(lay, column)


def _terms(lay: Lay) -> Iterator[Term]:
    problem = lay.problem
    for work, count, path in zip(problem.works, problem.counts, problem.paths, strict=True):
        yield _term(work.kind, path, count, work_spent(lay, work), _collective(lay, work))
    for place, count in problem.parameters:
        shape = "x".join(map(str, problem.pieces[place].shape))
        spent = parameter_spent(lay, problem.pieces[place])
        yield _term("zero", f"parameters of {shape}", count, spent, "all-gather")


def _collective(lay: Lay, work: Work) -> str:
    """What most of an operation's communication is."""
    if not lay.union(work.summed).any():
        return "all-gather"
    kinds = {lay.problem.pieces[place].kind for place in work.results}
    scatters = kinds <= {"gradient", "layer gradient"} and lay.choices.zero >= 1
    return "reduce-scatter" if scatters else "all-reduce"


def _term(kind: str, path: str, count: int, spent: Spent, collective: str) -> Term:
    compute_s, communication_s, nbytes = (count * float(figure[0]) for figure in spent)
    shown_collective = collective if nbytes else ""
    return Term(kind, path, compute_s, communication_s, nbytes, shown_collective)


def bytes_by_kind(
    problem: Compact, setting: Setting, masks: Mapping[int, int], choices: Choices
) -> dict[str, int]:
    """What the peak is made of: bytes of parameters, slots, activations, ..., and copies."""
    lay = Lay(problem, setting, choices, {u: np.array([m]) for u, m in masks.items()}, rows=1)
    sizes, counts = weights(lay), alive(problem, choices)
    at_peak = counts[int(np.argmax(counts @ sizes))] * sizes
    result: dict[str, int] = {}
    for column, nbytes in zip(columns(problem, choices), at_peak, strict=True):
        kind = "copy" if isinstance(column, Work) else column.kind
        result[kind] = result.get(kind, 0) + int(nbytes)
    return result


def _named(axes: Axes, mask: int) -> str:
    names = [f"{name!r} (size {size})" for bit, (name, size) in enumerate(axes) if mask >> bit & 1]
    return f"axis {' x '.join(names)}"


def _micro(problem: Compact, unit: int, choices: Choices) -> str:
    split = unit == problem.batch and choices.accumulate > 1
    return f" and {choices.accumulate} micro-batches" if split else ""


def _is_of_sizes(fault: LayoutError) -> bool:
    return isinstance(fault, DivisibilityError)
