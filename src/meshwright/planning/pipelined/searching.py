"""The search among pipelines: sizes of the stage axis, micro-batches, schedules; and for each size
the layouts of one stage on its devices.

One stage is a smaller model, so the search of the mesh's rest is that of any step. What it finds is
costed by the tick table of each schedule. Alpa (Zheng et al., 2022) splits
the two levels likewise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...stages.deal import Deal
from ...stages.pipeline import Pipeline
from ...stages.setting import runs_alone
from ..analytic.assignment import Assignment
from ..graph import Graph
from ..search.branch_and_bound import search_for
from ..search.candidates import Candidate
from ..search.choices import Choices, Layouts, Remat
from ..search.classics import classics
from ..search.cost import masks_of
from ..search.request import Request
from ..search.setting import setting_of
from ..search.staged import AXIS, Found
from .cost import PipelineCost, StageWork, Staging, pipeline_cost
from .sections import Section, sections_of

_SIZES = 6  # of the stage axis, that are tried at most, the smallest first
_TIMES = (1, 2, 4, 8, 16)  # micro-batches per stage
_REPEATS = (2, 4)
_REMAT: tuple[Remat, ...] = "none", "block"
_KEEP = 12  # layouts of a stage, that are costed with every schedule
_ROOM = 0.9  # of a device, for what a stage holds beside its buffers


class Short(NamedTuple):
    """The graph of a model with fewer of its equal blocks, and the paths of their parameters."""

    graph: Graph
    block_paths: frozenset[str]


class _Stage(NamedTuple):
    """The search for one stage with a number of blocks, and the section of each operation."""

    request: Request
    block_paths: frozenset[str]
    sections: Sequence[Section]


@dataclass(frozen=True, eq=False)
class Cut:
    """A model as stages: how many equal blocks it has, and what one passes on to the next.

    ``with_blocks`` gives the model with fewer of them; ``row_bytes`` are the bytes that one row of
    the batch has in each array that is passed on, and ``flops`` those of the forward pass before
    the blocks, of one block, and after them: what a step deals its blocks by. ``may_share_loss``
    says whether all stages may compute what comes after the blocks, and ``is_even`` whether each
    stage has as many blocks and one run of them, as with layers of a loop. ``frozen_bytes`` lie on
    every device.
    """

    count: int
    with_blocks: Callable[[int], Short]
    row_bytes: tuple[float, ...]
    flops: tuple[float, float, float] = (0.0, 1.0, 0.0)
    may_share_loss: bool = False
    is_even: bool = False
    frozen_bytes: int = 0

    def deal(self, stages: int, pipeline: Pipeline, skips: bool) -> Deal:
        """The blocks of each run, as a step has them."""
        model = self.count, stages, pipeline.repeats, self.flops, skips
        may_share = self.may_share_loss and pipeline.schedule != "zero_bubble"
        if self.is_even:
            even = Deal.even(self.count, stages)
            many = pipeline.micro_batches
            return even.or_shared(even, self.flops, skips, many) if may_share else even
        if may_share:
            return Deal.fastest(*model, pipeline.micro_batches)
        return Deal.best(*model)


def pipelines(cut: Cut, request: Request, limit_s: float) -> list[Found]:
    """The pipelines that fit, the fastest first; one for each size of the stage axis."""
    deadline_s = time.monotonic() + limit_s
    sizes = list(_sizes(request, cut))[:_SIZES]
    best = []
    for place, size in enumerate(sizes):
        seconds = (deadline_s - time.monotonic()) / (len(sizes) - place)
        options = list(_of_size(request, cut, size, max(0.5, seconds)))
        best += sorted(options, key=_time_s)[:1]
    return sorted(best, key=_time_s)


def _time_s(option: Found) -> float:
    return option.cost.step_time_s or 0.0


def _sizes(request: Request, cut: Cut) -> Iterator[int]:
    devices = request.target.num_devices
    for size in range(2, min(cut.count, devices) + 1):
        if devices % size == 0 and not (cut.is_even and cut.count % size):
            yield size


def _of_size(request: Request, cut: Cut, size: int, limit_s: float) -> Iterator[Found]:
    """The pipelines with this number of stages that fit."""
    blocks = -(-cut.count // size)
    graph, paths = cut.with_blocks(blocks)
    counts = tuple(size * times for times in _TIMES)
    room = None if request.limit_bytes is None else round(_ROOM * request.limit_bytes)
    space = replace(
        request.space, axes=None, fewer_devices=False, zero=(0, 1), accumulate=counts,
        remat=_REMAT,
    )  # fmt: skip
    stage = replace(request, graph=graph, limit_bytes=room, space=space, stages=((AXIS, size),))
    batch = stage.problem.batch
    rows = 0 if batch is None else stage.problem.units[batch].size
    counts = tuple(count for count in counts if rows and rows % count == 0)
    if not counts:
        return
    stage = replace(stage, space=replace(space, accumulate=counts))
    result = search_for(stage, _KEEP, limit_s, classics(stage, fsdp_zero=1).values())
    deadline_s = time.monotonic() + limit_s
    stages = {blocks: _Stage(stage, paths, sections_of(graph, paths))}

    def with_places(places: int) -> _Stage:
        if places not in stages:
            graph, paths = cut.with_blocks(places)
            stages[places] = _Stage(replace(stage, graph=graph), paths, sections_of(graph, paths))
        return stages[places]

    every = list(_by_count(result.candidates, counts[::-1]))
    for place, layouts in enumerate(every):
        for cost, pipeline, remat in _scheduled(with_places, layouts, cut, size, rows):
            if request.limit_bytes is None or cost.peak_bytes <= request.limit_bytes:
                yield Found(_with_stages(layouts, size, pipeline, remat), cost)
        if place + 1 >= 2 * len(counts) and time.monotonic() > deadline_s:
            return


def _by_count(candidates: Iterable[Candidate], counts: Sequence[int]) -> Iterator[Layouts]:
    """Each layout that was found with each number of micro-batches, the best layout first."""
    of_one = dict.fromkeys(
        replace(layouts, choices=Choices(layouts.choices.zero)) for layouts, _ in candidates
    )
    for layouts in of_one:
        for count in counts:
            yield replace(layouts, choices=replace(layouts.choices, accumulate=count))


def _scheduled(
    with_places: Callable[[int], _Stage], layouts: Layouts, cut: Cut, size: int, rows: int
) -> Iterator[tuple[PipelineCost, Pipeline, Remat]]:
    """The layouts of a stage with every schedule that can run them, and each kind of remat."""
    blocks, count = -(-cut.count // size), layouts.choices.accumulate
    assignment = _assigned(with_places(blocks).request, layouts)
    over = int(assignment.lay.batch[0])
    pieces = int(assignment.setting.size_of[over])
    is_skipping = runs_alone(dict(assignment.setting.axes), AXIS, assignment.named(over))
    if rows % (count * pieces):
        return
    sent = tuple(round(nbytes * rows / count / pieces) for nbytes in cut.row_bytes)
    works: dict[int, tuple[Assignment, StageWork]] = {}
    may_repeat = 1 if cut.is_even else blocks
    for pipeline, remat in _schedules(count, size, may_repeat, is_skipping):
        deal = cut.deal(size, pipeline, is_skipping)
        places = deal.most * pipeline.repeats
        request, paths, sections = with_places(places)
        filled = tuple(own_blocks / deal.most for own_blocks in deal.sizes) if is_skipping else ()
        rest = sent, is_skipping, filled, cut.count, deal.shares_loss, cut.frozen_bytes
        staging = Staging(pipeline, size, places, paths, *rest)
        if places not in works:
            own = assignment if places == blocks else _assigned(request, layouts)
            works[places] = own, StageWork.of(own, staging, sections)
        own, work = works[places]
        target, hardware = request.target, request.hardware
        cost = pipeline_cost(own, staging, target, hardware, remat == "block", work)
        yield cost, pipeline, remat


def _assigned(request: Request, layouts: Layouts) -> Assignment:
    """Layouts of a stage on the whole mesh, whose first axis is the stages'."""
    masks = masks_of(request.problem, layouts.axes, dict(layouts.rules))
    full = {unit: mask << 1 for unit, mask in masks.items()}
    axes = (*request.stages, *layouts.axes)
    setting = setting_of(axes, request.target, request.hardware)
    choices = Choices(min(1, layouts.choices.zero), layouts.choices.accumulate)
    return Assignment(request.problem, setting, choices, full, ())


def _schedules(
    count: int, size: int, blocks: int, is_skipping: bool
) -> Iterator[tuple[Pipeline, Remat]]:
    """Those that run, with each kind of remat.

    Zero-bubble runs only without remat, and where stages skip what they have no work for.
    """
    if is_skipping:
        yield Pipeline(AXIS, count, "zero_bubble"), "none"
    for remat in _REMAT:
        yield Pipeline(AXIS, count), remat
        yield Pipeline(AXIS, count, remat_stages=False), remat
        yield Pipeline(AXIS, count, "gpipe"), remat
        for repeats in _REPEATS:
            if blocks % repeats == 0 and count % size == 0:
                yield Pipeline(AXIS, count, "circular", repeats), remat
                yield Pipeline(AXIS, count, "circular", repeats, remat_stages=False), remat


def _with_stages(layouts: Layouts, size: int, pipeline: Pipeline, remat: Remat) -> Layouts:
    choices = Choices(layouts.choices.zero, 1, remat, pipeline)
    axes = tuple(axis for axis in layouts.axes if axis[1] > 1)
    names = {name for name, _ in axes}
    rules = tuple((family, along) for family, along in layouts.rules if names.intersection(along))
    return Layouts(((AXIS, size), *axes), rules, choices)
