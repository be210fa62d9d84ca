"""How often a loop of a compiled program runs, read from its condition, its body and its begin.

XLA notes the number for CPU and GPU. For TPU it is left to read: a counter begins at a constant,
changes by a constant in each round, and is compared with a bound. The bound may lie in the tuple
that the loop hands on, the step need not be one (products that a collective is spread over,
``windowed_dot_general``, count by 2), and each of them may be inside a fusion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .text import Computation, Instruction, Module

_SAME = ("bitcast", "convert", "copy", "copy-done", "copy-start", "reshape")
_MOST = 256  # a value is not handed on more often
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}


@dataclass(frozen=True)
class _Place:
    """A value: its name, the computation that it is in, and which item of it, if it is a tuple.

    ``caller`` is the fusion or call that runs the computation, and where that is.
    """

    inside: Computation
    name: str
    item: int | None = None
    caller: tuple[_Place, Instruction] | None = None


@dataclass(frozen=True)
class _Number:
    """A constant, or with ``item`` what that item of the loop's tuple holds and a constant."""

    plus: int
    item: int | None = None


def trip_count(module: Module, loop: Instruction, inside: Computation) -> int | None:
    """How often the body of a ``while`` runs; ``None`` where the text does not say."""
    noted = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if noted is not None:
        return int(noted)
    return _Loop(module, loop, inside).trips()


class _Loop:
    def __init__(self, module: Module, loop: Instruction, inside: Computation) -> None:
        self._module = module
        self._begin = _Place(inside, loop.operands[0])
        self._condition = module.computations[loop.attribute(r"condition=%([\w.\-]+)") or ""]
        self._body = module.computations[loop.attribute(r"body=%([\w.\-]+)") or ""]

    def trips(self) -> int | None:
        compared = self._follow(_Place(self._condition, self._condition.root.name))
        if compared is None or compared[1].opcode != "compare":
            return None
        place, compare = compared
        direction = compare.attribute(r"direction=(\w+)") or ""
        left, right = (self._number(replace(place, name=operand)) for operand in compare.operands)
        if left is None or right is None:
            return None
        if left.item is None or (right.item is not None and self._step(left.item) == 0):
            left, right, direction = right, left, _MIRRORED[direction]
        return self._counted(left, right, direction)

    def _counted(self, counter: _Number, bound: _Number, direction: str) -> int | None:
        end = self._at_begin(bound)
        begin = self._at_begin(counter)
        step = None if counter.item is None else self._step(counter.item)
        if bound.item is not None and self._step(bound.item) != 0:
            return None
        if begin is None or end is None or step is None:
            return None
        return rounds(begin, step, direction, end)

    def _at_begin(self, number: _Number) -> int | None:
        if number.item is None:
            return number.plus
        start = self._number(replace(self._begin, item=number.item))
        if start is not None and start.item is not None:
            start = self._from_outside(start)
        return None if start is None else start.plus + number.plus

    def _from_outside(self, number: _Number) -> _Number | None:
        """What the loop around this one hands to each of its rounds, if that stays the same."""
        outer = self._module.loop_around(self._begin.inside.name)
        if outer is None or number.item is None:
            return None
        around = _Loop(self._module, *outer)
        start = around._at_begin(number) if around._step(number.item) == 0 else None
        return None if start is None else _Number(start)

    def _step(self, item: int) -> int | None:
        """By how much a round changes an item of the tuple; ``None`` where it is not a constant."""
        new = self._number(_Place(self._body, self._body.root.name, item))
        return None if new is None or new.item != item else new.plus

    def _number(self, place: _Place) -> _Number | None:
        result = self._follow(place)
        if result is None:
            return None
        place, instruction = result
        if instruction.opcode == "constant":
            whole = re.fullmatch(r"-?\d+", instruction.operands[0])
            return _Number(int(whole[0])) if whole else None
        if instruction.opcode == "parameter":
            return None if place.item is None else _Number(0, place.item)
        if instruction.opcode in ("add", "subtract"):
            parts = [self._number(replace(place, name=operand)) for operand in instruction.operands]
            return _sum(*parts, sign=1 if instruction.opcode == "add" else -1)
        return None

    def _follow(self, place: _Place) -> tuple[_Place, Instruction] | None:
        """What makes a value, through all that only hands it on."""
        for _ in range(_MOST):
            instruction = place.inside.by_name.get(place.name)
            before = None if instruction is None else self._before(place, instruction)
            if instruction is None or before is None:
                return None if instruction is None else (place, instruction)
            place = before
        return None

    def _before(self, place: _Place, instruction: Instruction) -> _Place | None:
        if instruction.opcode in _SAME or instruction.opcode in (
            "opt-barrier",
            "optimization-barrier",
        ):
            return replace(place, name=instruction.operands[0])
        if instruction.opcode == "get-tuple-element":
            index = int(instruction.attribute(r"index=(\d+)") or 0)
            return replace(place, name=instruction.operands[0], item=index)
        if instruction.opcode == "tuple" and place.item is not None:
            return replace(place, name=instruction.operands[place.item], item=None)
        if instruction.opcode in ("fusion", "call"):
            called = instruction.attribute(r"(?:calls|to_apply)=%([\w.\-]+)") or ""
            run = self._module.computations.get(called)
            return (
                None
                if run is None
                else _Place(run, run.root.name, place.item, (place, instruction))
            )
        if instruction.opcode == "parameter" and place.caller is not None:
            around, call = place.caller
            return replace(
                around, name=call.operands[int(instruction.operands[0])], item=place.item
            )
        if instruction.opcode == "while" and place.item is not None:
            earlier = _Loop(self._module, instruction, place.inside)
            unchanged = earlier._step(place.item) == 0
            return replace(place, name=instruction.operands[0]) if unchanged else None
        return None


def _sum(left: _Number | None, right: _Number | None, *, sign: int) -> _Number | None:
    if left is None or right is None or (left.item is not None and right.item is not None):
        return None
    if right.item is not None and sign < 0:
        return None  # a bound less the counter: no compiler writes it so
    item = left.item if right.item is None else right.item
    return _Number(left.plus + sign * right.plus, item)


def rounds(begin: int, step: int, direction: str, end: int) -> int | None:
    """How often a counter passes the comparison with ``end`` before it fails; ``None`` if it never
    does.

    >>> rounds(0, 2, "LT", 7), rounds(8, -3, "GT", 0), rounds(1, 1, "LE", 4), rounds(0, 0, "LT", 1)
    (4, 3, 4, None)
    """
    if direction in ("LE", "GE"):
        return rounds(begin, step, *(("LT", end + 1) if direction == "LE" else ("GT", end - 1)))
    if direction == "EQ":
        return 0 if begin != end else 1 if step else None
    if direction == "GT":
        return rounds(-begin, -step, "LT", -end)
    way = end - begin
    if direction == "NE":
        reaches = way == 0 or (step != 0 and way % step == 0 and way // step > 0)
        return way // step if reaches and way else 0 if reaches else None
    if way <= 0:
        return 0
    return -(-way // step) if step > 0 else None
