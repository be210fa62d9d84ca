"""The dry run of a step without compiling anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...equal_layers import merged, short_list
from ...errors import LayoutError, TargetError
from ...layouts.placement import Placement
from ...program import Batch
from ...targets.hardware import Hardware
from ...targets.target import Target
from ..abstract_step import AbstractStep, HasSteps
from ..graph import Graph
from ..reading import sizes
from ..report import DryRun, Memory
from ..search.choices import Choices
from ..search.cost import cost_of
from ..search.terms import resting_bytes
from ..traced_graph import notes_of_unknown
from .assignment import Assignment, assignment_of, graph_alone
from .estimate import estimate_of
from .operation_costs import operation_costs, transfers_of

_RESTING = ("parameter", "slot", "state", "input")
_PEAK_IS = "the planner's model: arrays alive at one time"


def report_of(
    model: Any,
    batch: Batch,
    strategy: HasSteps | Placement,
    described: AbstractStep,
    target: Target,
    hardware: Hardware,
    why: str,
) -> DryRun:
    """What the planner's model says of a step under its layout; ``why`` nothing is compiled.

    Bytes of state and inputs are exact; the peak, collectives and times are closed forms, as
    :func:`~meshwright.plan` uses them. Raises :class:`~meshwright.TargetError` for a layout that
    the model does not know.
    """
    graph = graph_alone(model, batch, strategy, described)
    return report_of_graph(graph, described, target, hardware, why)


def report_of_graph(
    graph: Graph, described: AbstractStep, target: Target, hardware: Hardware, why: str
) -> DryRun:
    """The same of a graph of the step as one device would take it."""
    try:
        assignment = assignment_of(graph, described, target, hardware)
    except LayoutError as error:
        raise TargetError(
            f"{why}. Without a compiler only the planner's estimate is possible, and it failed for "
            f"{described.program.name!r}:\n{error}"
        ) from error
    if not described.has_gradients:
        assignment = replace(assignment, gathers=())  # no variable gets a new value
    costs = operation_costs(assignment, described.placement)
    nbytes = sizes(described)
    return DryRun(
        name=described.program.name,
        target=target,
        axes=described.placement.mesh.axes,
        memory=Memory(
            **nbytes,
            peak_bytes=_peak(assignment, nbytes),
            peak_is=_PEAK_IS,
            available_bytes=hardware.memory_bytes,
        ),
        collectives=transfers_of(costs, described.placed),
        estimate=estimate_of(assignment, costs, target, hardware),
        notes=_notes(assignment, described),
        placed=described.placed,
        hardware=hardware,
        not_compiled=why,
    )


def _notes(assignment: Assignment, described: AbstractStep) -> tuple[str, ...]:
    notes = notes_of_unknown(assignment.problem.graph)
    if assignment.gathers:
        notes.append(
            "where a variable lies whole and its dims do not, it is taken to be cut for nothing; a "
            "compiler may gather what it meets instead"
        )
    if assignment.shared:
        notes.append(
            "variables that lie along the axes of the batch's rows are taken to be gathered before "
            "they are used, as by ZeRO 3; a compiler may sum partial results instead"
        )
    if assignment.before_use:
        paths = [assignment.problem.graph.tensors[it.tensor].path for it in assignment.before_use]
        notes.append(
            "weights that rules lay along an axis which other dims beside theirs lie along are "
            f"taken to be gathered before they are used ({short_list(merged(paths))}); a compiler "
            "may move activations instead, which can take several times as long, and more memory"
        )
    if described.how.sums is not None:
        notes.append("gradients are counted in the type that they are computed in")
    return tuple(notes)


def _peak(assignment: Assignment, nbytes: dict[str, int]) -> int:
    """That of the model, in which state and inputs lie as their dims do, with how they lie."""
    problem = assignment.problem
    modelled = sum(
        int(resting_bytes(assignment.lay, problem.pieces[problem.piece_of[place]])[0])
        for place, tensor in enumerate(problem.graph.tensors)
        if tensor.role in _RESTING
    )
    exact = sum(nbytes.values()) - nbytes["gradient_bytes"]
    peak = cost_of(problem, assignment.setting, assignment.masks, assignment.choices).peak_bytes
    temporary = peak - modelled + _copies(assignment)
    return max(temporary, _at_end(assignment)) + exact


def _copies(assignment: Assignment) -> int:
    """Parameters that are gathered as they lie along axes that their dims do not.

    On CPU all are there at once, elsewhere one after the other.
    """
    problem = assignment.problem
    copies = [
        int(resting_bytes(replace(assignment.lay, choices=Choices()), piece)[0])
        for gather in assignment.before_use
        for piece in [problem.pieces[problem.piece_of[gather.tensor]]]
    ]
    return sum(copies) if problem.platform == "cpu" else max(copies, default=0)


def _at_end(assignment: Assignment) -> int:
    """Gradients, and new values that cannot be written over the old ones, as those are larger."""
    if not assignment.gathers:
        return 0
    problem = assignment.problem
    new = [problem.pieces[problem.piece_of[gather.tensor]] for gather in assignment.gathers]
    gradients = [
        problem.pieces[problem.piece_of[place]]
        for place, tensor in enumerate(problem.graph.tensors)
        if tensor.role == "parameter"
    ]
    return sum(int(resting_bytes(assignment.lay, piece)[0]) for piece in (*new, *gradients))
