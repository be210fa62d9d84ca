"""Tick tables: what each stage does at each tick of a step, as values.

A tick is as long as the work of its busiest stage, for all stages pass their results on together
at its end. What a stage does forward and backward in one tick it does in this order.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np

from ..views import Viewable, view_of

Kind = Literal["loss", "forward", "backward", "weights"]
LATE_WEIGHTS = 2  # gradients of weights that had to wait, at most in one tick
_KINDS: tuple[Kind, ...] = get_args(Kind)  # as they follow each other in a tick


class Work(NamedTuple):
    """One pass of a micro-batch through a stage.

    ``repeat`` says which of the stage's runs of blocks, where a schedule goes around several times.
    ``"weights"`` is the gradient of the weights where ``"backward"`` leaves it for later, and
    ``"loss"`` what comes after the blocks, with its gradients, where all stages compute it.
    """

    kind: Kind
    micro_batch: int
    repeat: int = 0

    @property
    def chunk(self) -> Chunk:
        """The micro-batch in this run of blocks."""
        return Chunk(self.micro_batch, self.repeat)


class Chunk(NamedTuple):
    """A micro-batch in one of a stage's runs of blocks."""

    micro_batch: int
    repeat: int


Row = tuple[tuple[Work, ...], ...]  # by stage
Spans = dict[Chunk, tuple[int, int]]  # the first and last tick at which something is kept


@dataclass(frozen=True)
class TickTable(Viewable):
    """What each stage does at each tick of one step; ``print`` it for a picture of text.

    ``schedule`` names it; ``stages`` each take ``micro_batches`` through ``repeats`` runs of
    blocks. ``ticks[tick][stage]`` holds what is done then and there, in order.

    >>> table = table_of("1f1b", stages=2, micro_batches=3)
    >>> table.ticks[1]
    ((Work(kind='forward', micro_batch=1, repeat=0),), (Work(kind='forward', micro_batch=0, ...
    >>> table.in_flight
    (3, 1)
    """

    schedule: str
    stages: int
    micro_batches: int
    repeats: int
    ticks: tuple[Row, ...] = field(repr=False)

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are work of their own."""
        return any(work.kind == "weights" for _, _, work in self.works())

    @functools.cached_property
    def shares_loss(self) -> bool:
        """Whether all stages compute what comes after the blocks, each for its micro-batches."""
        return any(work.kind == "loss" for _, _, work in self.works())

    def works(self) -> Iterator[tuple[int, int, Work]]:
        """``(tick, stage, work)`` in the order in which they happen."""
        for tick, row in enumerate(self.ticks):
            for stage, works in enumerate(row):
                for work in works:
                    yield tick, stage, work

    @functools.cached_property
    def when(self) -> dict[tuple[int, Work], int]:
        """``(stage, work)`` to the tick of it."""
        return {(stage, work): tick for tick, stage, work in self.works()}

    @functools.cached_property
    def counts(self) -> dict[Kind, np.ndarray]:
        """How often a kind of work is done, by tick, stage and repeat."""
        shape = len(self.ticks), self.stages, self.repeats
        counts: dict[Kind, np.ndarray] = {kind: np.zeros(shape) for kind in _KINDS}
        for tick, stage, work in self.works():
            counts[work.kind][tick, stage, work.repeat] += 1
        return counts

    # How long it takes

    def time(
        self,
        forward: float = 1.0,
        backward: float = 1.0,
        weights: float = 1.0,
        of_stages: Sequence[float] = (),
    ) -> float:
        """How long a step takes, from the times of one micro-batch's passes through one stage.

        ``backward`` is the time of the gradients that are sent on, ``weights`` that of the weights'
        gradients; the same unit goes in and comes out. ``of_stages`` says of each stage how many
        times as long its passes take; equally long by default.

        >>> table_of("gpipe", stages=4, micro_batches=16).time(1, 2, 0)
        57.0
        """
        costs = self._costs(forward, backward, weights)
        long = of_stages or (1.0,) * self.stages
        return sum(
            max(
                times * sum(costs[work.kind] for work in works)
                for times, works in zip(long, row, strict=True)
            )
            for row in self.ticks
        )

    def idle_share(
        self,
        forward: float = 1.0,
        backward: float = 1.0,
        weights: float = 1.0,
        of_stages: Sequence[float] = (),
    ) -> float:
        """The share of a step in which a device waits, on the average over all stages.

        >>> table = table_of("zero_bubble", stages=4, micro_batches=16)
        >>> round(table.idle_share(), 3), round(table.idle_share(of_stages=[1, 1, 1, 2]), 3)
        (0.059, 0.394)
        """
        mean = sum(of_stages) / self.stages if of_stages else 1.0
        busy = mean * self.micro_batches * (forward + backward + weights)
        return 1 - busy / self.time(forward, backward, weights, of_stages)

    def _costs(self, forward: float, backward: float, weights: float) -> dict[Kind, float]:
        whole = backward if self.splits_backward else backward + weights
        runs = self.repeats
        costs = {"loss": 0.0, "forward": forward, "backward": whole, "weights": weights}
        return {kind: costs[kind] / runs for kind in _KINDS}

    # What is kept

    @functools.cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most inputs that each stage keeps at once, from arrival to the last use."""
        return tuple(most_at_once(self.lifetimes(stage)) for stage in range(self.stages))

    def lifetimes(self, stage: int) -> Spans:
        """The first and last tick at which a stage keeps the input of each chunk."""
        uses = self._last_uses[stage]
        return {chunk: (self._arrival(stage, chunk), last) for chunk, last in uses.items()}

    def kept_gradients(self, stage: int) -> Spans:
        """The same of the gradients that arrive, until they are sent on; none where one begins."""
        spans = {}
        for chunk in self._last_uses[stage]:
            sender = self.after(stage, chunk)
            if sender is not None:
                where, at = sender
                first = self.when[where, Work("backward", *at)] + 1
                spans[chunk] = first, self.when[stage, Work("backward", *chunk)]
        return spans

    def kept_results(self, stage: int) -> Spans:
        """The same of the model's results, until their gradients are taken."""
        return {
            chunk: (self.when[stage, Work("forward", *chunk)], self.when[stage, work])
            for chunk in self._last_uses[stage]
            if self.after(stage, chunk) is None
            for work in [Work("backward", *chunk)]
        }

    def kept_cuts(self, stage: int) -> Spans:
        """The same of what gradients of weights wait for; none where they do not wait."""
        spans = {
            work.chunk: (self.when[stage, Work("backward", *work.chunk)], tick)
            for tick, row in enumerate(self.ticks)
            for work in row[stage]
            if work.kind == "weights"
        }
        return {chunk: (first, last) for chunk, (first, last) in spans.items() if first < last}

    def kept_losses(self) -> Spans:
        """The same of what all stages begin the loss with, by the first chunk of each group of
        micro-batches, until its gradients go around to the last stage."""
        last = self.stages - 1
        return {
            work.chunk: (tick, self.when[last, Work("backward", *work.chunk)])
            for tick, _, work in self.works()
            if work.kind == "loss" and work.chunk == self.group_of(work.chunk)
        }

    def group_of(self, chunk: Chunk) -> Chunk:
        """The first chunk of the group whose losses are computed together, one by each stage."""
        return chunk._replace(micro_batch=chunk.micro_batch // self.stages * self.stages)

    @functools.cached_property
    def _last_uses(self) -> dict[int, dict[Chunk, int]]:
        uses: dict[int, dict[Chunk, int]] = defaultdict(dict)
        for tick, stage, work in self.works():
            uses[stage][work.chunk] = tick
        return uses

    def _arrival(self, stage: int, chunk: Chunk) -> int:
        sender = self.before(stage, chunk)
        if sender is None:
            return self.when[stage, Work("forward", *chunk)]
        where, at = sender
        return self.when[where, Work("forward", *at)] + 1

    # Who sends to whom

    def before(self, stage: int, chunk: Chunk) -> tuple[int, Chunk] | None:
        """The stage and chunk whose result this one begins with; ``None`` at the model's input."""
        if stage > 0:
            return stage - 1, chunk
        if chunk.repeat > 0:
            return self.stages - 1, chunk._replace(repeat=chunk.repeat - 1)
        return None

    def after(self, stage: int, chunk: Chunk) -> tuple[int, Chunk] | None:
        """The stage and chunk that go on with the result of this one; ``None`` at the loss."""
        if stage < self.stages - 1:
            return stage + 1, chunk
        if chunk.repeat < self.repeats - 1:
            return 0, chunk._replace(repeat=chunk.repeat + 1)
        return None

    def svg(self) -> str:
        """The table as the text of an SVG file."""
        return view_of(self, "picture")

    # Whether it can be run

    def faults(self) -> list[str]:
        """What is wrong with the table: work that is missing, done twice, or done too early."""
        return [*self._wrong_counts(), *self._too_early()]

    def _wrong_counts(self) -> Iterator[str]:
        kinds = _KINDS[1:] if self.splits_backward else _KINDS[1:3]
        counts = Counter((stage, work) for _, stage, work in self.works())
        expected = {
            (stage, Work(kind, micro, repeat))
            for stage in range(self.stages)
            for micro in range(self.micro_batches)
            for repeat in range(self.repeats)
            for kind in kinds
        }
        if self.shares_loss:
            for micro in range(self.micro_batches):
                stage = self.stages - 1 - micro % self.stages
                expected.add((stage, Work("loss", micro, self.repeats - 1)))
        for key in sorted(expected | set(counts)):
            if counts[key] != (key in expected):
                yield f"stage {key[0]} does {key[1]} {counts[key]} times"

    def _too_early(self) -> Iterator[str]:
        senders = {"forward": self.before, "backward": self.after}
        yield from self._too_early_for_losses()
        for tick, stage, work in self.works():
            of = senders.get(work.kind)
            sender = of(stage, work.chunk) if of else None
            if sender is not None:
                sent = self.when.get((sender[0], Work(work.kind, *sender[1])), tick)
                if sent >= tick:
                    yield f"stage {stage} does {work} at tick {tick}, before its input is there"
            for kind in _KINDS[1 : _order(work)]:
                if self.when.get((stage, Work(kind, *work.chunk)), tick) > tick:
                    yield f"stage {stage} does {work} at tick {tick}, before its {kind} pass"
        for tick, row in enumerate(self.ticks):
            for stage, works in enumerate(row):
                if list(works) != sorted(works, key=_order):
                    yield f"stage {stage} works backward before forward at tick {tick}"

    def _too_early_for_losses(self) -> Iterator[str]:
        last = self.stages - 1
        for tick, stage, work in self.works():
            if work.kind == "loss":
                if self.when.get((last, Work("forward", *work.chunk)), tick) >= tick:
                    yield f"stage {stage} does {work} at tick {tick}, before the blocks' result"
                if self.when.get((last, Work("backward", *work.chunk)), tick) < tick:
                    yield f"stage {stage} does {work} at tick {tick}, after its backward pass"


def most_at_once(spans: Spans) -> int:
    """How many spans of ticks, ends included, overlap at most."""
    steps: Counter[int] = Counter()
    for first, last in spans.values():
        steps[first] += 1
        steps[last + 1] -= 1
    now = most = 0
    for tick in sorted(steps):
        now += steps[tick]
        most = max(most, now)
    return most


@functools.lru_cache(maxsize=64)
def table_of(
    schedule: str, stages: int, micro_batches: int, repeats: int = 1, shares_loss: bool = False
) -> TickTable:
    """The table of a schedule; circular ones need micro-batches that divide over the stages, and
    so do those in which all stages compute what comes after the blocks.

    >>> print(*table_of("1f1b", stages=2, micro_batches=2, shares_loss=True).ticks[3])
    (Work(kind='loss', micro_batch=1, repeat=0),) (Work(kind='loss', micro_batch=0, repeat=0), \
Work(kind='backward', micro_batch=0, repeat=0))
    """
    ticks = _SCHEDULES[schedule](stages, micro_batches, repeats, shares_loss)
    return TickTable(schedule, stages, micro_batches, repeats, ticks)


# Forward and backward passes at fixed distances. A micro-batch is at stage s at a tick that is s
# later than at stage 0, and its gradient comes back as many ticks apart.


def _gpipe(stages: int, micro_batches: int, _: int, shares_loss: bool) -> tuple[Row, ...]:
    return _staggered(stages, micro_batches, 1, micro_batches + stages - 1, shares_loss)


def _one_forward_one_backward(
    stages: int, micro_batches: int, _: int, shares_loss: bool = False
) -> tuple[Row, ...]:
    return _staggered(stages, micro_batches, 1, stages - 1 + stages * shares_loss, shares_loss)


def _circular(stages: int, micro_batches: int, repeats: int, shares_loss: bool) -> tuple[Row, ...]:
    begin = stages * (repeats + shares_loss) - 1
    return _staggered(stages, micro_batches, repeats, begin, shares_loss)


def _staggered(
    stages: int, micro_batches: int, repeats: int, begin: int, shares_loss: bool
) -> tuple[Row, ...]:
    """Groups of as many micro-batches as stages, each ``repeats`` times around without a pause.

    ``begin`` is the tick at which the last stage takes its first gradient. With ``shares_loss`` the
    results of a group have gone around to all stages a tick after the last of them was made.
    """
    ticks: dict[int, list[list[Work]]] = defaultdict(lambda: [[] for _ in range(stages)])
    for stage in range(stages):
        for micro in range(micro_batches):
            group, place = divmod(micro, stages)
            for repeat in range(repeats):
                after = (group * repeats + repeat) * stages + place
                ticks[stage + after][stage].append(Work("forward", micro, repeat))
                after = (group * repeats + repeats - 1 - repeat) * stages + place
                tick = begin + stages - 1 - stage + after
                ticks[tick][stage].append(Work("backward", micro, repeat))
    for micro in range(micro_batches if shares_loss else 0):
        group, place = divmod(micro, stages)
        tick = (group * repeats + repeats + 1) * stages - 1
        ticks[tick][stages - 1 - place].append(Work("loss", micro, repeats - 1))
    rows = (ticks[tick] for tick in range(max(ticks) + 1))
    return tuple(tuple(tuple(sorted(works, key=_order)) for works in row) for row in rows)


def _order(work: Work) -> int:
    return _KINDS.index(work.kind)


# Zero bubble: 1F1B, with gradients of weights left for the ticks in which a stage has nothing else.


def _zero_bubble(stages: int, micro_batches: int, _: int, shares_loss: bool) -> tuple[Row, ...]:
    """A gradient of weights waits where it would make the tick longer: while other stages have no
    backward pass yet, or no forward pass any more. What waits is done in the ticks after a stage's
    last backward pass, two in each. No stage keeps more than the first one of 1F1B does."""
    assert not shares_loss
    rows = [list(row) for row in _one_forward_one_backward(stages, micro_batches, 1)]
    for stage in range(stages):
        waiting = list[Work]()
        for tick, row in enumerate(rows):
            kinds = {work.kind: work.micro_batch for work in row[stage]}
            if "backward" in kinds:
                weights = Work("weights", kinds["backward"])
                alone = tick < 2 * (stages - 1) or (tick >= micro_batches and "forward" in kinds)
                if alone:
                    waiting.append(weights)
                else:
                    row[stage] = *row[stage], weights
            elif tick >= micro_batches + stages - 1:
                row[stage] = tuple(waiting[:LATE_WEIGHTS])
                del waiting[:LATE_WEIGHTS]
    return tuple(map(tuple, rows))


_SCHEDULES: dict[str, Callable[[int, int, int, bool], tuple[Row, ...]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "circular": _circular,
    "zero_bubble": _zero_bubble,
}
