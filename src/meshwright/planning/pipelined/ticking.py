"""How long a step of a pipeline takes: its tick table, with what each pass of a stage takes."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...stages.table import Kind, TickTable


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
    forward, backward = by_stage(table, passes) if passes.skips else _in_all(table, passes)
    work = float((forward + backward).max(1).sum())
    if table.stages == 1:
        return Tick(work, 0.0)
    if not passes.overlaps:
        return Tick(work, 2 * passes.send * len(table.ticks))
    hidden_s = np.stack([forward.max(1), backward.max(1)])
    return Tick(work, float(np.maximum(0.0, passes.send - hidden_s).sum()))


def by_stage(table: TickTable, passes: Passes) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that each stage works forward and backward in each tick; by tick and stage."""
    runs = table.stages, table.repeats
    is_first, is_last = np.zeros(runs), np.zeros(runs)
    is_first[0, 0] = is_last[-1, -1] = 1.0
    filled = np.reshape(passes.filled, runs[::-1]).T if passes.filled else np.ones(runs)
    left_out = is_last if passes.waits_for_loss else 0.0
    run = filled * (1 - left_out) * passes.blocks_forward / table.repeats
    seconds: dict[Kind, np.ndarray] = {
        "forward": run + passes.enter * is_first,
        "backward": filled * _backward(table, passes)
        + passes.at_loss * (0.0 if passes.shares_loss else is_last)
        + passes.at_input * is_first,
        "loss": np.full(runs, passes.at_loss),
        "weights": filled * passes.blocks_weights / table.repeats,
    }
    took = {kind: (table.counts[kind] * of).sum(2) for kind, of in seconds.items()}
    return took.pop("forward"), sum(took.values(), np.zeros(()))


def busy_s(table: TickTable, passes: Passes) -> float:
    """Seconds that the busiest stage works in a step."""
    return float(sum(by_stage(table, passes), np.zeros(())).sum(0).max())


def _backward(table: TickTable, passes: Passes) -> float:
    run = passes.blocks_backward + passes.recomputes * passes.blocks_forward
    run += 0.0 if table.splits_backward else passes.blocks_weights
    return run / table.repeats


def together(table: TickTable, kinds: Collection[Kind], passes: Passes) -> tuple[float, float]:
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


def _in_all(table: TickTable, passes: Passes) -> tuple[np.ndarray, np.ndarray]:
    """The same by tick, where all stages compute what any of them has work for."""
    every = np.stack([of.any((1, 2)) for of in table.counts.values()], 1)
    ticks = [together(table, [*itertools.compress(table.counts, at)], passes) for at in every]
    forward, backward = np.transpose(ticks)
    return forward[:, None], backward[:, None]
