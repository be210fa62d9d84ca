"""The collectives of a step in the words of its model: what each moves, for which layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..equal_layers import grouped, pattern, without_numbers
from ..jaxprs.lines import SourceLine, number_in
from ..layouts.params import Placed
from ..layouts.placement import Placement
from .collectives import Collective
from .origins import origins_of
from .remedies import remedy


@dataclass(frozen=True)
class Transfer:
    """One collective operation of a step.

    ``bytes_per_device`` are those of its arrays in one device, each of the ``count`` times that a
    step runs it (``None`` where a loop does not tell). ``paths`` are the places in the model that
    it works for, those of the most bytes first, or the nearest one if it belongs to none itself;
    ``lines`` the lines of the user's code that those were written in (``"model.py:12"``), and
    ``variables`` those whose values it moves, by path. ``remedy`` is empty, or, where the
    collective is unexpected, says what would remove it.
    """

    kind: str
    axes: tuple[str, ...]
    bytes_per_device: int
    count: int | None
    paths: tuple[str, ...]
    phases: tuple[str, ...]
    dtypes: tuple[str, ...]
    variables: tuple[str, ...] = ()
    remedy: str = ""
    lines: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The first place in the model, or variable, that it works for; may be empty."""
        return next(iter((*self.variables, *self.paths)), "")

    @property
    def places(self) -> tuple[str, ...]:
        """The variables that it moves, or else the places that it works for."""
        return self.variables or self.paths

    @property
    def is_unexpected(self) -> bool:
        return bool(self.remedy)

    @property
    def bytes_per_step(self) -> int | None:
        """Bytes of one device in a whole step, loops multiplied out."""
        return None if self.count is None else self.count * self.bytes_per_device


@dataclass(frozen=True)
class Rows:
    """Collectives that are alike: of one place, or of equal layers and as many bytes for each.

    ``alike`` has a tuple for each place or layer.
    """

    alike: tuple[tuple[Transfer, ...], ...]

    @property
    def all(self) -> tuple[Transfer, ...]:
        return tuple(transfer for some in self.alike for transfer in some)

    @property
    def first(self) -> Transfer:
        return self.alike[0][0]

    @property
    def count(self) -> int | None:
        """How often a step runs them, all together."""
        counts = [transfer.count for transfer in self.all]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def nbytes(self) -> int:
        """Bytes of one device in one step; those of a loop of unknown length count once."""
        return moved_bytes(self.all)

    @property
    def places(self) -> tuple[str, ...]:
        """What they are for, with stars for the numbers in which equal layers differ."""
        return tuple(map(pattern, zip(*(some[0].places for some in self.alike), strict=True)))


def alike(every: Iterable[Transfer]) -> list[Rows]:
    """Collectives in rows, those with most bytes first: of each place together, and then of places
    that differ in their numbers alone and move as much."""

    def what(transfer: Transfer) -> tuple[object, ...]:
        return transfer.is_unexpected, transfer.kind, transfer.axes, transfer.phases, transfer.lines

    def layer(row: Rows) -> tuple[object, ...]:
        places = tuple(map(without_numbers, row.first.places))
        return what(row.first), places, row.count, row.nbytes

    rows = [Rows((tuple(some),)) for some in grouped(every, lambda e: (what(e), e.places))]
    layers = grouped(rows, layer)
    joined = [Rows(tuple(some for row in rows for some in row.alike)) for rows in layers]
    return sorted(joined, key=lambda row: -row.nbytes)


def moved_bytes(every: Iterable[Transfer]) -> int:
    """Bytes of one device in one step; those of a loop of unknown length count once."""
    return sum(
        collective.bytes_per_device
        if collective.bytes_per_step is None
        else collective.bytes_per_step
        for collective in every
    )


def transfers(
    collectives: Iterable[Collective],
    variables: Sequence[Placed | None],
    placement: Placement,
    lines: Sequence[SourceLine] = (),
) -> tuple[Transfer, ...]:
    """The collectives in the model's words. ``variables`` says which each argument is, if any, and
    ``lines`` which line of the source a number stands for."""
    return tuple(_transfer(collective, variables, placement, lines) for collective in collectives)


def _transfer(
    collective: Collective,
    variables: Sequence[Placed | None],
    placement: Placement,
    lines: Sequence[SourceLine],
) -> Transfer:
    origins = [origins_of(name)[0] for name in collective.op_names]
    moved = [_variable(variables, number) for number in collective.arguments]
    result = _variable(variables, collective.result)
    # What copies a variable is named after it, whatever scope it was traced under.
    parts = zip(collective.arrays, origins, moved, strict=True)
    unplaced = [
        (array.nbytes, o.path) for array, o, variable in parts if variable is None and o.path
    ]
    places = [path for _, path in sorted(unplaced, key=lambda part: -part[0])]
    paths = [variable.info.path for variable in (*moved, result) if variable is not None]
    if not places and not paths:
        nearest = _variable(variables, collective.near[0])
        paths = [] if nearest is None else [nearest.info.path]
        places = [path for path in [origins_of(collective.near[1])[0].path] if path]
    return Transfer(
        kind=collective.kind,
        axes=collective.axes,
        bytes_per_device=collective.bytes_per_device,
        count=collective.count,
        paths=tuple(dict.fromkeys(places)),
        phases=tuple(dict.fromkeys(origin.phase for origin in origins)),
        dtypes=collective.dtypes,
        variables=tuple(dict.fromkeys(paths)),
        remedy=remedy(collective, origins[0], moved[0], result, variables, placement),
        lines=_lines(collective, lines),
    )


def _lines(collective: Collective, lines: Sequence[SourceLine]) -> tuple[str, ...]:
    """The lines that its arrays come from, those of the most bytes first."""
    parts = sorted(
        zip(collective.arrays, collective.op_names, strict=True), key=lambda p: -p[0].nbytes
    )
    numbers = [number_in(name) for _, name in parts]
    numbers_there = [line for line in numbers if line is not None and line < len(lines)]
    return tuple(dict.fromkeys(str(lines[number]) for number in numbers_there))


def _variable(variables: Sequence[Placed | None], number: int | None) -> Placed | None:
    """The variable that an argument is; a step returns its state in the order it takes it in."""
    return None if number is None or number >= len(variables) else variables[number]
