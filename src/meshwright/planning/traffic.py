"""The collectives of a step in the words of its model: what each moves, for which layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..placement import Placed, Placement
from ..step.lines import SourceLine, number_in
from .collectives import Collective
from .origins import origins_of
from .remedies import remedy


@dataclass(frozen=True)
class Transfer:
    """One collective operation of a step.

    ``bytes_per_device`` are those of its arrays in one device, each of the ``count`` times that a
    step runs it (``None`` where a loop does not tell). ``paths`` are the places in the model that
    it works for, those of the most bytes first, ``lines`` the lines of the user's code that those
    were written in (``"model.py:12"``), and ``variables`` those whose values it moves, by path.
    ``remedy`` is empty, or, where the collective is unexpected, says what would remove it.
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
    def is_unexpected(self) -> bool:
        return bool(self.remedy)

    @property
    def bytes_per_step(self) -> int | None:
        """Bytes of one device in a whole step, loops multiplied out."""
        return None if self.count is None else self.count * self.bytes_per_device


def transfers(
    collectives: Iterable[Collective],
    variables: Sequence[Placed | None],
    placement: Placement,
    lines: Sequence[SourceLine] = (),
) -> tuple[Transfer, ...]:
    """The collectives in the model's words. ``variables`` says which each argument is, if any, and
    ``lines`` which line of the source a number stands for."""
    return tuple(_transfer(each, variables, placement, lines) for each in collectives)


def _transfer(
    each: Collective,
    variables: Sequence[Placed | None],
    placement: Placement,
    lines: Sequence[SourceLine],
) -> Transfer:
    origins = [origins_of(name)[0] for name in each.op_names]
    moved = [_variable(variables, number) for number in each.arguments]
    made = _variable(variables, each.result)
    # What copies a variable is named after it, whatever scope it was traced under.
    parts = zip(each.arrays, origins, moved, strict=True)
    found = [(array.nbytes, o.path) for array, o, variable in parts if variable is None and o.path]
    places = [path for _, path in sorted(found, key=lambda part: -part[0])]
    known = [variable.info.path for variable in (*moved, made) if variable is not None]
    return Transfer(
        kind=each.kind,
        axes=each.axes,
        bytes_per_device=each.bytes_per_device,
        count=each.count,
        paths=tuple(dict.fromkeys(places)),
        phases=tuple(dict.fromkeys(origin.phase for origin in origins)),
        dtypes=each.dtypes,
        variables=tuple(dict.fromkeys(known)),
        remedy=remedy(each, origins[0], moved[0], made, variables, placement),
        lines=_lines(each, lines),
    )


def _lines(each: Collective, lines: Sequence[SourceLine]) -> tuple[str, ...]:
    """The lines that its arrays come from, those of the most bytes first."""
    parts = sorted(zip(each.arrays, each.op_names, strict=True), key=lambda p: -p[0].nbytes)
    numbers = [number_in(name) for _, name in parts]
    known = [each for each in numbers if each is not None and each < len(lines)]
    return tuple(dict.fromkeys(str(lines[number]) for number in known))


def _variable(variables: Sequence[Placed | None], number: int | None) -> Placed | None:
    """The variable that an argument is; a step returns its state in the order it takes it in."""
    return None if number is None or number >= len(variables) else variables[number]
