"""Reads the text of optimized HLO: computations and instructions.

Only what a walk over the compiled step needs, from the text that XLA prints for every platform.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_WORDS = {"pred": "bool", "s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}
_CALLS = re.compile(
    r"\b(?:calls|body|condition|true_computation|false_computation)=%([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclass(frozen=True)
class Array:
    """Element type and dims of one array; of one device's piece, once the program is split."""

    dtype: str  # as JAX writes it: "float32", "bfloat16"
    dims: tuple[int, ...]
    bits: int  # of one element
    space: int = field(default=0, compare=False)  # of memory; 0 is the device's main one

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        return -(-self.elements * self.bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. ``operands`` are names, or the text of a literal."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression that is found in the attributes."""
        result = re.search(pattern, self.attributes)
        return None if result is None else result[1]

    @property
    def goes_on(self) -> bool:
        """Whether it ends, or takes further, what another instruction began."""
        return self.opcode.endswith(("-done", "-update"))

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs; not the scalar function of a reduction."""
        names = []
        for one, several in _CALLS.findall(self.attributes):
            names += [one] if one else re.findall(r"%([\w.\-]+)", several)
        return tuple(names)


@dataclass(frozen=True)
class Computation:
    """A list of instructions; in a compiled program, in the order in which they are issued."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def _users(self) -> Mapping[str, list[int]]:
        """Name -> places of the instructions that take it."""
        users: dict[str, list[int]] = {instruction.name: [] for instruction in self.instructions}
        for place, listed in enumerate(self.instructions):
            for operand in listed.operands:
                if operand in users:
                    users[operand].append(place)
        return users

    def last_use(self, place: int) -> int:
        """The place of the last instruction that reads what the one at ``place`` makes.

        What only passes a value on (a copy, a view, an item of a tuple) is followed.
        """
        last, following = place, [place]
        while following:
            for user in self._users[self.instructions[following.pop()].name]:
                last = max(last, user)
                if _passes_on(self.instructions[user]):
                    following.append(user)
        return last

    def users_of(self, name: str) -> tuple[Instruction, ...]:
        """The instructions that take a value, in the order of the schedule."""
        return tuple(self.instructions[place] for place in self._users.get(name, ()))

    @property
    def root(self) -> Instruction:
        return next(
            (instruction for instruction in self.instructions if instruction.is_root),
            self.instructions[-1],
        )


@dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: Mapping[str, Computation]
    entry: str
    is_scheduled: bool
    donated: frozenset[int] = frozenset()  # results that lie in the memory of an argument

    @functools.cached_property
    def _loops(self) -> Mapping[str, tuple[Instruction, Computation]]:
        """Name of a loop's body -> the loop, and the computation that it is in."""
        return {
            instruction.attribute(r"body=%([\w.\-]+)") or "": (instruction, inside)
            for inside in self.computations.values()
            for instruction in inside.instructions
            if instruction.opcode == "while"
        }

    def loop_around(self, body: str) -> tuple[Instruction, Computation] | None:
        """The loop that runs a computation as its body, and the computation that it is in."""
        return self._loops.get(body)


def _passes_on(instruction: Instruction) -> bool:
    views = ("bitcast", "copy", "copy-start", "get-tuple-element", "tuple")
    return instruction.opcode in views or instruction.goes_on


def parse(text: str) -> Module:
    """The program that a text spells. Raises :class:`ValueError` for text without an entry."""
    computations: dict[str, Computation] = {}
    entry, name, lines = None, None, []
    for line in text.splitlines():
        if name is None:
            result = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if result is not None:
                name, lines = result[2], []
                entry = name if result[1] else entry
        elif line.startswith("}"):
            parsed = filter(None, map(_instruction, lines))
            computations[name] = Computation(name, tuple(_with_items(parsed)))
            name = None
        else:
            lines.append(line)
    if entry is None:
        raise ValueError("the text holds no entry computation, so it is not HLO.")
    is_scheduled = "is_scheduled=true" in text.partition("\n")[0]
    return Module(computations, entry, is_scheduled, _donated_results(text))


def _donated_results(text: str) -> frozenset[int]:
    """The results that lie in an argument's memory, by the first line of a program."""
    first = text.partition("\n")[0]
    _, _, aliases = first.partition("input_output_alias={")
    return frozenset(int(i) for i in re.findall(r"\{(\d+)\}: \(\d+, \{\}", aliases))


def _with_items(parsed: Iterable[Instruction]) -> Iterator[Instruction]:
    """Has an instruction for every item of a tuple: ``%x#1`` is how newer dumps write its use."""
    results: dict[str, tuple[Array, ...]] = {}
    for instruction in parsed:
        for operand in instruction.operands:
            name, _, index = operand.partition("#")
            if index and operand not in results:
                results[operand] = results.get(name, ())[int(index) :][:1]
                item = f", index={index}"
                yield Instruction(operand, "get-tuple-element", results[operand], (name,), item)
        results[instruction.name] = instruction.results
        yield instruction


def _instruction(line: str) -> Instruction | None:
    result = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if result is None:
        return None
    shape, rest = _shape_and_rest(line[result.end() :])
    opcode, _, rest = rest.partition("(")
    inner, attributes = _until_closed(rest)
    named = re.findall(r"%([\w.\-]+(?:#\d+)?)", inner)
    operands = named or [operand.strip() for operand in inner.split(",") if operand.strip()]
    return Instruction(
        result[2], opcode.strip(), arrays(shape), tuple(operands), attributes, bool(result[1])
    )


def _shape_and_rest(text: str) -> tuple[str, str]:
    if text.startswith("("):
        inner, rest = _until_closed(text[1:])
        return inner, rest
    shape, _, rest = text.partition(" ")
    return shape, rest


def _until_closed(text: str) -> tuple[str, str]:
    """What stands before the bracket that closes, and after it."""
    depth = 1
    for result in re.finditer(r"[()]", text):
        depth += 1 if result[0] == "(" else -1
        if depth == 0:
            return text[: result.start()], text[result.end() :]
    return text, ""


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape as HLO writes it, tuples flattened.

    >>> [(a.dtype, a.dims) for a in arrays("(bf16[8,4]{1,0:T(8,128)(2,1)S(1)}, s32[])")]
    [('bfloat16', (8, 4)), ('int32', ())]
    """
    result = re.findall(r"\b([a-z]\w*)\[([^\]]*)\](?:\{[^}]*?S\((\d+)\)\})?", shape)
    return tuple(
        Array(_dtype(kind), tuple(map(int, re.findall(r"\d+", dims))), _bits(kind), int(space or 0))
        for kind, dims, space in result
    )


def _dtype(kind: str) -> str:
    result = re.fullmatch(r"(bf|[sufc])(\d+)(\w*)", kind)
    if result is None:
        return _WORDS.get(kind, kind)
    letters, number, variant = result.groups()
    return f"{_WORDS[letters]}{number}{'_' if variant else ''}{variant}"


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    result = re.search(r"\d+", kind)
    return int(result[0]) if result else 0
