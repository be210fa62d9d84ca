"""How long a step of a pipeline takes: its tick table, with what each pass of a stage takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...stages.table import TickTable, Work


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch: in all runs of a stage's blocks, and before and after them.

    ``blocks_backward`` leaves out the gradients of weights, ``blocks_weights``. ``enter`` is what
    comes before the blocks and ``at_input`` its gradients, for which it is computed again;
    ``at_loss`` is what comes after them with its gradients. A backward pass computes its blocks
    again as often as ``recomputes`` says. A stage ``skips`` what it has no work for, where it may.
    ``send`` is the time of one transfer to a neighbour; what it takes longer than the work beside
    it is waited for, or all of it where nothing ``overlaps``. ``filled`` says how full of blocks
    each run is: run ``r`` is stage ``r % stages``'s. ``shares_loss`` says whether all stages
    compute what comes after the blocks, each for its micro-batches.
    """

    enter: float
    blocks_forward: float
    blocks_backward: float
    blocks_weights: float
    at_loss: float
    at_input: float
    send: float
    recomputes: int
    waits_for_loss: bool  # the last stage computes itself in its backward pass only
    skips: bool
    overlaps: bool = True
    filled: tuple[float, ...] = ()
    shares_loss: bool = False


class Tick(NamedTuple):
    """Seconds of work and of waiting for transfers."""

    work: float
    waiting: float


def step_s(table: TickTable, passes: Passes) -> Tick:
    """Seconds of all ticks: a tick is as long as the work of its busiest stage.

    >>> from meshwright.stages.table import table_of
    >>> even = Passes(0, 1, 1, 1, 0, 0, send=0, recomputes=0, waits_for_loss=False, skips=True)
    >>> step_s(table_of("1f1b", stages=4, micro_batches=16), even)
    Tick(work=57.0, waiting=0.0)
    """
    ticks = [_tick(table, row, passes) for row in table.ticks]
    if table.stages == 1:
        return Tick(sum(tick.work for tick in ticks), 0.0)
    return Tick(*(sum(of) for of in zip(*ticks, strict=True)))


def _tick(table: TickTable, row: tuple[tuple[Work, ...], ...], passes: Passes) -> Tick:
    by_stage = [of_stage(table, stage, works, passes) for stage, works in enumerate(row)]
    if not passes.skips:  # all stages compute what any of them has work for
        every = {work.kind for works in row for work in works}
        by_stage = [together(table, every, passes)]
    work = max(sum(of) for of in by_stage)
    if not passes.overlaps:
        return Tick(work, 2 * passes.send)
    forward, backward = (max(of[at] for of in by_stage) for at in (0, 1))
    return Tick(work, max(0.0, passes.send - backward) + max(0.0, passes.send - forward))


def of_stage(
    table: TickTable, stage: int, works: tuple[Work, ...], passes: Passes
) -> tuple[float, float]:
    """Seconds that a stage works forward and backward in one tick."""
    forward = backward = 0.0
    for work in works:
        is_first = stage == 0 and work.repeat == 0
        is_last = stage == table.stages - 1 and work.repeat == table.repeats - 1
        share = passes.filled[work.repeat * table.stages + stage] if passes.filled else 1.0
        if work.kind == "forward":
            run = 0.0 if is_last and passes.waits_for_loss else passes.blocks_forward
            forward += share * run / table.repeats + passes.enter * is_first
        elif work.kind == "backward":
            backward += share * _backward(table, passes)
            backward += passes.at_loss * (is_last and not passes.shares_loss)
            backward += passes.at_input * is_first
        elif work.kind == "loss":
            backward += passes.at_loss
        else:
            backward += share * passes.blocks_weights / table.repeats
    return forward, backward


def _backward(table: TickTable, passes: Passes) -> float:
    run = passes.blocks_backward + passes.recomputes * passes.blocks_forward
    run += 0.0 if table.splits_backward else passes.blocks_weights
    return run / table.repeats


def together(table: TickTable, kinds: set[str], passes: Passes) -> tuple[float, float]:
    """Seconds forward and backward where every stage computes all kinds of passes."""
    forward = backward = 0.0
    if "forward" in kinds:
        forward = passes.enter + passes.blocks_forward / table.repeats
    if "backward" in kinds:
        backward = _backward(table, passes) + passes.at_input
    if ("loss" if passes.shares_loss else "backward") in kinds:
        backward += passes.at_loss
    if "weights" in kinds:
        backward += passes.blocks_weights / table.repeats
    return forward, backward
