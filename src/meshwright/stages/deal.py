"""How many of the equal blocks each stage gets: evenly, or fewer for those that do more besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_WORTH_SHARING = 0.8  # of the time, for results go around to all stages and their gradients back
_WORTH = 0.9  # of the time, at which a stage may hold more blocks than an even deal gives it


@dataclass(frozen=True)
class Deal:
    """Blocks dealt to runs, in the order of the model: run ``r`` is stage ``r % stages``'s.

    Every stage stores as many places for blocks as the largest run takes, times ``repeats``. With
    ``shares_loss`` all stages compute what comes after the blocks, each for its micro-batches.

    >>> deal = Deal(stages=4, repeats=1, sizes=(3, 3, 2, 2))
    >>> deal.places
    (0, 1, 2, 3, 4, 5, 6, 7, None, 8, 9, None)
    """

    stages: int
    repeats: int
    sizes: tuple[int, ...]
    shares_loss: bool = False

    @classmethod
    def even(cls, count: int, stages: int) -> Deal:
        """As many blocks for each stage, of a number that divides.

        >>> Deal.even(8, 4).sizes
        (2, 2, 2, 2)
        """
        return cls(stages, 1, (count // stages,) * stages)

    @classmethod
    def best(
        cls,
        count: int,
        stages: int,
        repeats: int = 1,
        flops: tuple[float, float, float] = (0.0, 1.0, 0.0),
        skips: bool = True,
    ) -> Deal:
        """That with the shortest tick, by the FLOPs before the blocks, of one, and after them.

        Without ``skips`` a stage computes every place, empty or not. A place more on every stage is
        taken only where it saves a tenth of the time.

        >>> Deal.best(10, 4).sizes, Deal.best(10, 4, flops=(0, 1, 1.5)).sizes
        ((3, 3, 2, 2), (3, 3, 3, 1))
        >>> Deal.best(8, 4, flops=(0, 1, 3)).sizes
        (3, 2, 2, 1)
        """
        most = -(-count // (stages * repeats))
        even = cls._within(count, stages, repeats, flops, most)
        free = cls._within(count, stages, repeats, flops, count)
        worth = skips and free.tick_flops(flops) < _WORTH * even.tick_flops(flops)
        return free if worth else even

    @classmethod
    def fastest(
        cls,
        count: int,
        stages: int,
        repeats: int,
        flops: tuple[float, float, float],
        skips: bool,
        micro_batches: int,
    ) -> Deal:
        """The best one, or that which shares the loss if its step is a fifth shorter.

        >>> Deal.fastest(8, 4, 1, flops=(0, 1, 4), skips=True, micro_batches=16)
        Deal(stages=4, repeats=1, sizes=(2, 2, 2, 2), shares_loss=True)
        """
        before, block, _ = flops
        own = cls.best(count, stages, repeats, flops, skips)
        even = cls.best(count, stages, repeats, (before, block, 0.0), skips)
        return own.or_shared(even, flops, skips, micro_batches)

    def or_shared(
        self, even: Deal, flops: tuple[float, float, float], skips: bool, micro_batches: int
    ) -> Deal:
        """This one, or ``even`` with the loss shared if a step is then a fifth shorter."""
        shared = replace(even, shares_loss=True)
        if micro_batches % self.stages or self.stages == 1:
            return self
        took, alone = (deal.step_flops(flops, skips, micro_batches) for deal in (shared, self))
        return shared if took < _WORTH_SHARING * alone else self

    def step_flops(
        self, flops: tuple[float, float, float], skips: bool, micro_batches: int
    ) -> float:
        """FLOPs that follow each other in the forward passes of a step."""
        before, block, after = flops
        run, ends = self.most * block, before + after * (not self.shares_loss)
        ticks = micro_batches * self.repeats + self.stages - 1
        longest = self.tick_flops(flops) if skips else run + ends
        many = micro_batches if skips else ticks
        share = micro_batches // self.stages * after * self.shares_loss
        return (ticks - many) * run + many * longest + share

    @classmethod
    def _within(
        cls, count: int, stages: int, repeats: int, flops: tuple[float, float, float], most: int
    ) -> Deal:
        before, block, after = flops
        sizes = [1] * (stages * repeats)
        costs = [block] * len(sizes)
        costs[0] += before
        costs[-1] += after
        for _ in range(count - len(sizes)):
            run = min((r for r, size in enumerate(sizes) if size < most), key=costs.__getitem__)
            sizes[run] += 1
            costs[run] += block
        return cls(stages, repeats, tuple(sizes))

    def tick_flops(self, flops: tuple[float, float, float]) -> float:
        """FLOPs of the busiest run, which all others wait for."""
        before, block, after = flops
        last = len(self.sizes) - 1
        return max(
            size * block + before * (run == 0) + after * (run == last and not self.shares_loss)
            for run, size in enumerate(self.sizes)
        )

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return sum(self.sizes)

    @property
    def most(self) -> int:
        """Blocks of the largest run."""
        return max(self.sizes)

    @property
    def is_full(self) -> bool:
        """Whether all runs are of one size."""
        return len(set(self.sizes)) == 1

    @property
    def places(self) -> tuple[int | None, ...]:
        """Which block stands where in a stack, each stage's own run after run; ``None`` in places
        that are left empty."""
        firsts = [sum(self.sizes[:run]) for run in range(len(self.sizes))]
        return tuple(
            firsts[run] + place if place < self.sizes[run] else None
            for stage in range(self.stages)
            for run in range(stage, len(self.sizes), self.stages)
            for place in range(self.most)
        )

    def blocks_of(self, stage: int) -> tuple[int, ...]:
        """The blocks of one stage."""
        size = self.most * self.repeats
        places: Sequence[int | None] = self.places[stage * size : (stage + 1) * size]
        return tuple(block for block in places if block is not None)
