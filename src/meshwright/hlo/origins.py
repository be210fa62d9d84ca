"""Where in the model an operation of a compiled program comes from.

XLA keeps for most instructions the scopes that they were traced under, as one text: ``op_name``.
Transformations of JAX wrap names in it: ``transpose(jvp(dense))`` is the backward pass of a scope
``dense``. What is merged has several, ``jit(step)/(a/dot:b/dot)``, and what only moves a value has
none of use: that is followed to the argument of the program that it copies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..jaxprs.scopes import layer_of, parts, phase_of
from .text import Computation, Instruction, Module

_MOVES = (
    "bitcast",
    "bitcast-convert",
    "convert",
    "copy",
    "copy-done",
    "copy-start",
    "dynamic-slice",
    "reshape",
    "slice",
    "slice-done",
    "slice-start",
    "transpose",
)
_NEAR = 64  # instructions that are looked at for one with a layer


@dataclass(frozen=True)
class Origin:
    """A place in the model, ``"encoder/dense"``, and the part of the step that it is run in.

    ``path`` is empty where the operation belongs to no layer; ``phase`` is one of ``PHASES``.
    """

    path: str
    phase: str


def origins_of(op_name: str) -> tuple[Origin, ...]:
    """The places in the model that an ``op_name`` names, each once.

    >>> origins_of("jit(traced)/transpose(jvp(block))/query/abc,cd->abd/dot_general")
    (Origin(path='block/query', phase='backward'),)
    >>> [origin.path for origin in origins_of("jit(traced)/jvp(block)/(key/dot_general:value/add)")]
    ['block/key', 'block/value']
    """
    names = _spread(op_name)
    return tuple(dict.fromkeys(Origin(layer_of(name), phase_of(name)) for name in names))


def _spread(op_name: str) -> list[str]:
    """The names that XLA has merged into one."""
    scopes = parts(op_name)
    for place, scope in enumerate(scopes):
        if scope.startswith("(") and scope.endswith(")"):
            around = ["/".join(scopes[:place]), "/".join(scopes[place + 1 :])]
            return [
                name
                for part in parts(scope[1:-1], ":")
                for name in _spread("/".join(filter(None, [around[0], part, around[1]])))
            ]
    return [op_name]


class Sources:
    """Follows values of a program back to what made them."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._callers = {
            called: (computation, instruction)
            for computation in module.computations.values()
            for instruction in computation.instructions
            for called in instruction.called
        }

    def _caller(self, inside: Computation) -> tuple[Computation | None, Instruction | None]:
        """The instruction that runs a computation, and the computation around it."""
        return self._callers.get(inside.name, (None, None))

    def of(self, inside: Computation, name: str) -> tuple[int | None, str]:
        """Which argument of the program a value is a copy of, if any, and its ``op_name``."""
        op_name = ""
        at: tuple[Computation, str] | None = (inside, name)
        for _ in range(256):  # a value is not handed on more often
            if at is None:
                return None, op_name
            inside, name = at
            instruction = inside.by_name.get(name)
            if instruction is None:
                return None, op_name
            op_name = op_name or op_name_of(instruction)
            if instruction.opcode == "parameter" and inside.name == self._module.entry:
                return int(instruction.operands[0]), op_name
            at = self._before(inside, instruction)
        return None, op_name

    def joined(self, inside: Computation, name: str) -> tuple[str, ...]:
        """The values that a value is put together from end to end, as XLA for GPUs does before it
        sums several at once; else the value itself."""
        instruction = inside.by_name.get(name)
        if instruction is None or instruction.opcode != "fusion":
            return (name,)
        fused = self._module.computations[instruction.called[0]]
        parts = [fused.by_name[part] for part in fused.root.operands if part in fused.by_name]
        plain = fused.root.opcode == "concatenate" and len(fused.root.results[0].dims) == 1
        if not plain or any(part.opcode != "parameter" for part in parts):
            return (name,)
        return tuple(
            self._flat(inside, instruction.operands[int(part.operands[0])]) for part in parts
        )

    def _flat(self, inside: Computation, name: str) -> str:
        """The value of which this is another view, with dims of its own."""
        instruction = inside.by_name.get(name)
        while (
            instruction is not None
            and instruction.opcode == "bitcast"
            and instruction.operands[0] in inside.by_name
        ):
            name = instruction.operands[0]
            instruction = inside.by_name[name]
        return name

    def of_result(
        self, inside: Computation, instruction: Instruction, place: int
    ) -> tuple[int | None, str]:
        """The same of one result of an instruction that has several."""
        one = self._item(inside, instruction.name, place) if len(instruction.results) > 1 else None
        argument, name = self.of(*one) if one is not None else (None, "")
        return (argument, name) if name else self.of(inside, instruction.name)

    def result(self, inside: Computation, instruction: Instruction) -> int | None:
        """Which result of the program a value becomes, if any: as it is or, outside of the model's
        own work, as what is added to the argument of the same number."""
        if inside.name != self._module.entry:
            return None
        ways, place = self._handed_on(inside, instruction)
        if place is not None or phase_of(op_name_of(instruction)) != "other":
            return place
        changed = [
            (user, name)
            for name in ways
            for user in inside.users_of(name)
            if user.results and user.results[0].dims == inside.by_name[name].results[0].dims
        ]
        for user, name in changed:
            _, place = self._handed_on(inside, user)
            others = [self.of(inside, one)[0] for one in user.operands if one != name]
            if place is not None and place in others:
                return place
        return None

    def _handed_on(
        self, inside: Computation, instruction: Instruction
    ) -> tuple[list[str], int | None]:
        """The names under which a value is handed on as it is, and the result that it becomes."""
        ways = [instruction.name]
        for name in ways:
            for user in inside.users_of(name):
                if user is inside.root and user.opcode == "tuple":
                    return ways, user.operands.index(name)
                if user.opcode in _MOVES or user.opcode.endswith("-done"):
                    ways.append(user.name)
        return ways, None

    def near(self, inside: Computation, instruction: Instruction) -> tuple[int | None, str]:
        """For what has no layer of its own: an argument of the program, or the ``op_name`` of an
        instruction in a layer, that is nearest among what takes the value and what it is made of.
        """
        around, call = self._caller(inside)
        while call is not None and around is not None and call.opcode == "fusion":
            inside, instruction = around, call
            around, call = self._caller(inside)
        return (
            self._nearest(inside, instruction, forward=True)
            or self._nearest(inside, instruction)
            or (None, "")
        )

    def _nearest(
        self, inside: Computation, instruction: Instruction, forward: bool = False
    ) -> tuple[int | None, str] | None:
        ways = [instruction]
        for way in ways:
            names = [user.name for user in inside.users_of(way.name)] if forward else way.operands
            for name in names:
                other = inside.by_name.get(name)
                if other is None or other.opcode == "tuple" or other in ways:
                    continue
                argument, op_name = self.of(inside, name)
                if layer_of(op_name) or (argument is not None and not forward):
                    return argument, op_name
                ways.append(other)
            if len(ways) > _NEAR:
                return None
        return None

    def _before(
        self, inside: Computation, instruction: Instruction
    ) -> tuple[Computation, str] | None:
        """The value that this one only hands on."""
        if instruction.opcode in _MOVES or _is_put_together(instruction):
            return inside, instruction.operands[0]
        if instruction.opcode == "parameter":
            return self._handed_in(inside, int(instruction.operands[0]))
        if instruction.opcode == "fusion":
            fused = self._module.computations[instruction.called[0]]
            return fused, fused.root.name
        if instruction.opcode == "get-tuple-element":
            index = int(instruction.attribute(r"index=(\d+)") or 0)
            return self._item(inside, instruction.operands[0], index)
        return None

    def _handed_in(self, inside: Computation, number: int) -> tuple[Computation, str] | None:
        around, call = self._caller(inside)
        if around is None or call is None or call.opcode == "while":
            return None
        return (around, call.operands[number]) if number < len(call.operands) else None

    def _item(self, inside: Computation, name: str, index: int) -> tuple[Computation, str] | None:
        """An item of a tuple: of one made here, of a sum of several arrays, of a fusion, or of
        what a loop began with."""
        instruction = inside.by_name.get(name)
        while instruction is not None and instruction.opcode in ("opt-barrier", "copy", "bitcast"):
            instruction = inside.by_name.get(instruction.operands[0])
        if instruction is None:
            return None
        reduces = instruction.opcode.startswith(("all-reduce", "reduce-scatter"))
        if instruction.opcode == "tuple" or (reduces and index < len(instruction.operands)):
            return inside, instruction.operands[index]
        if instruction.opcode == "fusion":
            fused = self._module.computations[instruction.called[0]]
            return self._item(fused, fused.root.name, index)
        if instruction.opcode == "parameter":
            around, call = self._caller(inside)
            if around is not None and call is not None and call.opcode == "while":
                return self._item(around, call.operands[0], index)
        return None


def _is_put_together(instruction: Instruction) -> bool:
    """Whether it is a view of slices that lie end to end: TPUs fetch large arrays in four."""
    return instruction.attribute(r'custom_call_target="(ConcatBitcast)"') is not None


def op_name_of(instruction: Instruction) -> str:
    """The ``op_name`` of an instruction, without what our own way of compiling puts before it."""
    name = instruction.attribute(r'op_name="([^"]*)"') or ""
    return re.sub(r"^jit\(call\)/call_exported/?", "", name)
