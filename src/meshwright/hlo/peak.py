"""Which arrays a compiled step holds in memory when it holds most.

Read from the schedule of the program: an array is alive from where it is made to where it is read
for the last time. Elementwise work, and sums over devices, put their results where an operand lies
that is not read afterwards. The compiler lets more arrays share memory, and pads some: the sum is
near its own figure, and not the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .origins import Origin, Sources, origins_of
from .text import Array, Computation, Instruction, Module

_VIEWS = ("bitcast", "get-tuple-element", "opt-barrier", "tuple", "while")
_IN_PLACE = (
    *("add", "convert", "divide", "maximum", "multiply", "select", "subtract", "tanh"),
    *("all-reduce", "all-reduce-start"),
)
_NO_MEMORY = ("parameter", "constant", "iota", "partition-id", "replica-id", "after-all", *_VIEWS)


_Held = tuple[Computation, Instruction, int]  # and which of its results
_Alive = list[_Held]


@dataclass(frozen=True)
class LiveTensor:
    """One array that is alive at the peak. ``origin`` is where in the model it was made, or the
    nearest place to that.

    ``argument`` is the number of the step's argument of which it is a copy, or ``None``.
    """

    array: Array
    origin: Origin
    argument: int | None = None

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


def alive_at_peak(module: Module) -> tuple[LiveTensor, ...]:
    """The temporary arrays of a program where they need most memory, the largest first.

    >>> from .text import parse
    >>> text = '''
    ... ENTRY %main (p: f32[4]) -> f32[4] {
    ...   %p = f32[4]{0} parameter(0)
    ...   %wide = f32[8]{0} concatenate(%p, %p), dimensions={0}, metadata={op_name="jvp(a)/join"}
    ...   ROOT %sum = f32[4]{0} add(%p, %p)
    ... }'''
    >>> [(live.array.dims, live.origin.path) for live in alive_at_peak(parse(text))]
    [((8,), 'a')]
    """
    peaks = Alive(module)
    return in_words(peaks.of(module.computations[module.entry]), Sources(module))


def in_words(alive: _Alive, sources: Sources) -> tuple[LiveTensor, ...]:
    """The arrays that are alive, the largest first."""
    tensors = (_tensor(inside, instruction, place, sources) for inside, instruction, place in alive)
    return tuple(sorted(tensors, key=lambda tensor: -tensor.nbytes))


def _tensor(
    inside: Computation, instruction: Instruction, place: int, sources: Sources
) -> LiveTensor:
    argument, op_name = sources.of_result(inside, instruction, place)
    origin, *_ = origins_of(op_name)
    if not origin.path and argument is None:  # such as a gathered variable
        if instruction.opcode.startswith("all-gather"):
            argument, _ = sources.of(inside, instruction.operands[0])
        if argument is None:
            argument, nearest = sources.near(inside, instruction)
            origin = replace(origin, path=origins_of(nearest)[0].path)
    return LiveTensor(instruction.results[place], origin, argument)


class Alive:
    """The arrays alive in each computation, those of what it runs included."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known_by_name: dict[str, _Alive] = {}

    def of(self, inside: Computation) -> _Alive:
        if inside.name not in self._known_by_name:
            self._known_by_name[inside.name] = self._alive_in(inside)
        return self._known_by_name[inside.name]

    def _alive_in(self, inside: Computation) -> _Alive:
        whole = [nbytes + within for _, nbytes, within in self.at_each(inside)]
        return self.at(inside, whole.index(max(whole))) if whole else []

    def at(self, inside: Computation, place: int, *, within: bool = True) -> _Alive:
        """The arrays held at an instruction, and those held within what it runs."""
        for at, _, alive in self._states(inside):
            if at == place:
                own = [one for some in alive.values() for one in some]
                return own + (self._within(inside.instructions[at]) if within else [])
        return []

    def at_each(self, inside: Computation) -> Iterator[tuple[Instruction, int, int]]:
        """``(instruction, bytes held, bytes that what it runs holds besides)``, by the schedule."""
        for at, nbytes, _ in self._states(inside):
            instruction = inside.instructions[at]
            yield instruction, nbytes, _nbytes(self._within(instruction))

    def _states(self, inside: Computation) -> Iterator[tuple[int, int, Mapping[str, _Alive]]]:
        """``(place, bytes, what made the arrays that are held)`` at each instruction."""
        ends = _ends(inside)
        in_place = self._results_in_place(inside)
        alive: dict[str, _Alive] = {}  # by the name of what made it
        dies: dict[int, list[str]] = {}
        nbytes = 0
        for at, instruction in enumerate(inside.instructions):
            new = [
                (inside, instruction, i)
                for i in _allocated(instruction)
                if (instruction.name, i) not in in_place
            ]
            for name in _taken_over(inside, at, new, alive, ends):
                nbytes -= _nbytes(alive.pop(name))
            if new:
                alive[instruction.name] = new
                dies.setdefault(ends[instruction.name], []).append(instruction.name)
                nbytes += _nbytes(new)
            yield at, nbytes, alive
            for name in dies.get(at, ()):
                nbytes -= _nbytes(alive.pop(name, []))

    def _within(self, instruction: Instruction) -> _Alive:
        """What the computations that it runs hold; a fusion holds nothing."""
        if instruction.opcode == "fusion" or instruction.opcode.endswith(
            ("-start", "-done", "-update")
        ):
            return []
        runs = [self.of(self._module.computations[name]) for name in instruction.called]
        return max(runs, key=_nbytes, default=[])

    def _results_in_place(self, inside: Computation) -> set[tuple[str, int]]:
        """What is written where an argument lies: donated arrays, and what goes around a loop.

        Each is the name of an instruction and which of its results.
        """
        root = inside.root
        if inside.name == self._module.entry:
            donated = self._module.donated
        else:
            donated = frozenset(range(len(root.operands)))
        names = root.operands if root.opcode == "tuple" else (root.name,)
        return set(_made_by(inside, [n for i, n in enumerate(names) if i in donated]))


def _nbytes(alive: _Alive) -> int:
    return sum(instruction.results[place].nbytes for _, instruction, place in alive)


def _allocated(instruction: Instruction) -> list[int]:
    """Which results of an instruction take room in the main memory of the device."""
    if instruction.opcode in _NO_MEMORY or instruction.goes_on:
        return []
    begin, end, count = 0, len(instruction.results), len(instruction.operands)
    if instruction.opcode == "copy-start":  # (result, operand, ...)
        end = 1
    elif instruction.opcode.endswith("-start") and end >= 2 * count:
        begin, end = count, 2 * count  # (operands, results, ...)
    results = instruction.results
    return [i for i in range(begin, end) if results[i].space == 0 and results[i].nbytes]


def _taken_over(
    inside: Computation,
    at: int,
    new: _Alive,
    alive: Mapping[str, _Alive],
    ends: Mapping[str, int],
) -> set[str]:
    """The names of what made the operands in whose memory an instruction puts its results."""
    instruction = inside.instructions[at]
    can = instruction.opcode in _IN_PLACE or instruction.attribute(r"kind=(kLoop)") is not None
    if not new or not can:
        return set()
    sizes = [one[1].results[one[2]].nbytes for one in new]
    names: set[str] = set()
    for name, _ in _made_by(inside, list(instruction.operands)):
        dying = alive.get(name, [])
        if len(dying) == 1 and ends[name] == at and _nbytes(dying) in sizes:
            sizes.remove(_nbytes(dying))
            names.add(name)
    return names


def _ends(inside: Computation) -> Mapping[str, int]:
    """Name -> the place where its memory is read for the last time, through views of it."""
    ends: dict[str, int] = {}
    for at in range(len(inside.instructions) - 1, -1, -1):
        instruction = inside.instructions[at]
        end = max(ends.get(instruction.name, at), at)
        ends[instruction.name] = end
        handed_on = end if _is_view(instruction) else at
        for operand in instruction.operands:
            ends[operand] = max(ends.get(operand, 0), handed_on)
    return ends


def _is_view(instruction: Instruction) -> bool:
    return instruction.opcode in _VIEWS or instruction.goes_on


def _made_by(inside: Computation, names: list[str]) -> Iterator[tuple[str, int]]:
    """The instructions, and which of their results, that made these values, through views."""
    for name in names:
        place = 0
        instruction = inside.by_name.get(name)
        while instruction is not None and _is_view(instruction) and len(instruction.operands) == 1:
            if instruction.opcode == "get-tuple-element":
                place = int(instruction.attribute(r"index=(\d+)") or 0)
            instruction = inside.by_name.get(instruction.operands[0])
        if instruction is not None:
            yield instruction.name, place
