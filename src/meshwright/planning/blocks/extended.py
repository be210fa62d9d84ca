"""The report on all equal blocks of a step, from those on one and on two of them.

Every figure is taken to grow by the same with each block: ``q(1) + (n - 1) (q(2) - q(1))``. Bytes
that follow from shapes and layouts are those of the whole step, and not extended at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ...hlo.peak import LiveTensor
from ...hlo.schedule import Times
from ...hlo.traffic import Transfer
from ..estimate import Estimate, Heavy, Sums, with_shares
from .fewer import Reduced
from .heights import Heights, Peak, peak_with

if TYPE_CHECKING:
    from ..report import DryRun, Memory

Row = TypeVar("Row")

_UNSEEN = 1.02  # the compiler's figure over ours, above which it holds what we do not see


@dataclass(frozen=True)
class Blocks:
    """How many equal blocks a step has, and what they are called, where not all were compiled.

    ``compiled_s`` is what the compiler took for one and for two of them; ``whole_s`` what it would
    have taken for all, if that grows alike.
    """

    count: int
    names: tuple[str, ...]
    compiled_s: tuple[float, float] = (0.0, 0.0)

    @property
    def whole_s(self) -> float:
        return max(float(Line(*self.compiled_s, self.count).of), sum(self.compiled_s))

    @property
    def saved_s(self) -> float:
        """Seconds of the compiler that were spared; not below zero."""
        return max(0.0, self.whole_s - sum(self.compiled_s))

    def __str__(self) -> str:
        return (
            f"of {self.count} equal blocks ({self.names[0]} … {self.names[-1]}), one and two were "
            "compiled, and the difference stands for each of the others"
        )


@dataclass(frozen=True)
class Line:
    """A figure with one block and with two, and how many there are."""

    one: float
    two: float
    count: int

    @property
    def of(self) -> float:
        """The figure with all of them."""
        return self.one + (self.count - 1) * (self.two - self.one)


def figure(one: float, two: float, count: int) -> int:
    """A figure in whole numbers, with all blocks; below what two need it does not come.

    >>> figure(10, 13, 5)
    22
    """
    return round(max(Line(one, two, count).of, two))


# Memory


def memory(
    runs: tuple[DryRun, DryRun], heights: Sequence[Heights | None], repeats: Reduced
) -> tuple[Memory, int, tuple[LiveTensor, ...]]:
    """The memory of a device with all blocks, how much of it is temporary at the peak, and what."""
    count = repeats.count
    rest = [_always_there(run) for run in runs]
    temporary = [(report.peak_bytes or 0) - some for report, some in zip(runs, rest, strict=True)]
    alive = [run.alive_bytes for run in runs]
    most_alive, arrays = figure(alive[0], alive[1], count), runs[1].tensors
    if heights[0] is not None and heights[1] is not None:
        peak = peak_with(heights[0], heights[1], count)
        most_alive, arrays = peak.nbytes, _tensors(peak, repeats)
    shared = [a - b for a, b in zip(temporary, alive, strict=True)]  # below zero, for the most part
    each_alike = runs[1].target.platform == "cpu"
    most = most_alive + (round(Line(shared[0], shared[1], count).of) if each_alike else shared[1])
    padding = [run.memory.padding_bytes or 0 for run in runs]
    whole = replace(
        runs[1].memory,
        padding_bytes=figure(padding[0], padding[1], count),
        temporary_bytes=(runs[1].memory.temporary_bytes or 0) + most - temporary[1],
        peak_bytes=most + figure(rest[0], rest[1], count),
        peak_is=f"{runs[1].memory.peak_is}, extended from one and two blocks",
    )
    return whole, most_alive, arrays


def is_understood(two: DryRun) -> bool:
    """Whether the arrays that are alive explain the compiler's figure for two blocks.

    They do not where much of a small step lies in a memory on the chip: the compiler counts that
    too, and with more blocks there is no room for them in it.
    """
    if two.target.platform == "cpu":
        return True
    return (two.peak_bytes or 0) - _always_there(two) <= _UNSEEN * two.alive_bytes


def _always_there(run: DryRun) -> int:
    """The bytes of the peak that are not temporary arrays; XLA for CPU adds new outputs to them."""
    memory = run.memory
    if run.target.platform == "cpu":
        return (memory.peak_bytes or 0) - (memory.temporary_bytes or 0)
    return memory.argument_bytes + (memory.padding_bytes or 0)


def _tensors(peak: Peak, repeats: Reduced) -> tuple[LiveTensor, ...]:
    """The arrays at the peak, each under the name of its block; the last one is the second here.

    An array that is larger than what a block adds is there once, whatever block it is named after.
    """
    arrays: list[LiveTensor] = []
    for tensor, block in peak.tensors:
        blocks = [block]
        if block == peak.many and tensor.nbytes <= peak.more_bytes:
            blocks = [*range(repeats.count - 1)] if block == 0 else [*range(1, repeats.count)]
        elif block == 1:
            blocks = [repeats.count - 1]
        for other in blocks:
            path = tensor.origin.path
            if block is not None and other is not None:
                path = repeats.renaming(block, other)(path)
            arrays.append(replace(tensor, origin=replace(tensor.origin, path=path)))
    return tuple(sorted(arrays, key=lambda tensor: -tensor.nbytes))


# Collectives


def transfers(
    one: Sequence[Transfer], two: Sequence[Transfer], repeats: Reduced
) -> tuple[Transfer, ...]:
    """Those of two blocks, and for each more what the second one added, under its own names."""
    before, added = Counter(one) - Counter(two), Counter(two) - Counter(one)
    was = _pairs(before.elements(), added)
    result: list[Transfer] = []
    second: list[Transfer] = []
    for transfer in two:
        if was.get(transfer):
            result.append(_merged(was[transfer].pop(), transfer, repeats))
            continue
        result.append(transfer)
        if added[transfer]:
            added[transfer] -= 1
            second.append(transfer)
    return (*result, *_repeated(second, repeats, _named_transfer))


def _pairs(before: Iterable[Transfer], added: Counter[Transfer]) -> dict[Transfer, list[Transfer]]:
    """Of those that two blocks have and one has not: what they were there, with fewer bytes."""
    pairs: dict[Transfer, list[Transfer]] = {}
    for old in sorted(before, key=lambda transfer: -transfer.bytes_per_device):
        grown = [
            new
            for new, times in added.items()
            if times > 0
            and (new.kind, new.axes) == (old.kind, old.axes)
            and new.bytes_per_device >= old.bytes_per_device
        ]
        if grown:
            new = min(
                grown,
                key=lambda transfer: (transfer.bytes_per_device, transfer.phases != old.phases),
            )
            added[new] -= 1
            pairs.setdefault(new, []).append(old)
    return pairs


def _merged(one: Transfer, two: Transfer, repeats: Reduced) -> Transfer:
    """What XLA merges of all blocks grows with each of them."""
    more = [
        (repeats.renaming(1, block), variable)
        for block in range(2, repeats.count)
        for variable in (set(two.variables) - set(one.variables))
    ]
    variables = dict.fromkeys([*two.variables, *sorted(name(variable) for name, variable in more)])
    counts = (one.count, two.count)
    count = None if None in counts else figure(one.count or 0, two.count or 0, repeats.count)
    nbytes = figure(one.bytes_per_device, two.bytes_per_device, repeats.count)
    return replace(two, bytes_per_device=nbytes, count=count, variables=tuple(variables))


def _named_transfer(transfer: Transfer, name: Callable[[str], str]) -> Transfer:
    variables, paths = (tuple(map(name, some)) for some in (transfer.variables, transfer.paths))
    return replace(transfer, variables=variables, paths=paths)


def _repeated(
    rows: Sequence[Row], repeats: Reduced, named: Callable[[Row, Callable[[str], str]], Row]
) -> list[Row]:
    """The rows again for the third block, and for each one after it."""
    names = [repeats.renaming(1, block) for block in range(2, repeats.count)]
    return [named(row, name) for name in names for row in rows]


# Layers and time


def _is_of_second(path: str, repeats: Reduced) -> bool:
    """Whether a path is of the second block alone: the first one's has another name."""
    return repeats.renaming(1, 0)(path) != path


def estimate(one: Estimate, two: Estimate, repeats: Reduced) -> Estimate:
    """Every sum extended, and the shares that follow from them."""
    count = repeats.count

    def line(name: str) -> Any:
        pair = getattr(one, name), getattr(two, name)
        return None if None in pair else max(Line(pair[0], pair[1], count).of, pair[1])

    numbers = ("flops", "recompute_flops", "bytes", "compute_s", "memory_s", "waiting_s")
    numbers += ("overlap_s", "step_time_s")
    whole = replace(two, **{name: line(name) for name in numbers})
    spoken = dict(one.communication_s)
    talk = [
        (axes, None if s is None else max(Line(spoken.get(axes) or 0.0, s, count).of, s))
        for axes, s in two.communication_s
    ]

    def named(entry: Any, name: Callable[[str], str]) -> Any:
        return replace(entry, layer=name(entry.layer))

    layers = [layer for layer in two.layers if _is_of_second(layer.layer, repeats)]
    heavy: list[Heavy] = [row for row in two.heaviest if _is_of_second(row.layer, repeats)]
    rows = [*two.layers, *_repeated(layers, repeats, named)]
    heaviest = [*two.heaviest, *_repeated(heavy, repeats, named)]
    whole = replace(
        whole,
        bytes=round(whole.bytes),
        communication_s=tuple(sorted(talk, key=lambda pair: -(pair[1] or 0.0))),
        layers=tuple(sorted(rows, key=lambda row: (-row.flops, -row.bytes, row.layer))),
        heaviest=tuple(sorted(heaviest, key=lambda entry: -entry.time_s)[: len(two.heaviest)]),
        sums=_sums(one.sums, two.sums, count),
    )
    return with_shares(whole)


def _sums(one: Sums | None, two: Sums | None, count: int) -> Sums | None:
    if one is None or two is None:
        return None

    def line(a: float | None, b: float | None) -> Any:
        return None if a is None or b is None else max(Line(a, b, count).of, b)

    times = {name: line(spent, vars(two.times)[name]) for name, spent in vars(one.times).items()}
    return Sums(
        own_flops=line(one.own_flops, two.own_flops),
        split_flops=line(one.split_flops, two.split_flops),
        done_flops=line(one.done_flops, two.done_flops),
        times=Times(**times),
        least_flops=line(one.least_flops, two.least_flops),
        elements=line(one.elements, two.elements),
    )
