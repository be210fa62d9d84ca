"""What following a step writes down: arrays and operations over factors that may yet be joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .blocks import has_blocks, has_turns
from .factors import Dim, Dims, Factors
from .joins import Joins
from .primitives import shape_of
from .products import Product


class Value(NamedTuple):
    """What a variable holds: its dims, and its place among the arrays, if it is one of them.

    ``dims`` is ``None`` for what depends on no argument, such as zeros: its layout is what its
    reader wants. Values of one ``number`` are equal; 0 is that of no other.
    """

    dims: Dims | None
    tensor: int | None
    number: int = 0


CONSTANT = Value(None, None)


class Tensor(NamedTuple):
    """An array of the step."""

    path: str
    dims: Dims
    shape: tuple[int, ...]
    itemsize: int
    role: str
    twin: int | None = None


class Move(NamedTuple):
    """An array, by place, of which a dim is treated as another one."""

    tensor: int
    source: Dim
    target: Dim


@dataclass
class Equation:
    """What one equation does, ``times`` times; ``between_groups`` as in ``flops.py``, ``rate`` as
    in ``products.py``.

    ``block`` is the loop that it is in, if turns of that are blocks; what the loop stacks is
    ``is_kept`` if it stands for what one block hands on to the next.
    """

    kind: str
    path: str
    operands: list[int]
    results: list[int]
    flops: float = 0.0
    summed: Sequence[Dim] = ()
    whole: Sequence[Dim] = ()
    moved: Sequence[Move] = ()
    times: int = 1
    between_groups: float = 0.0
    block: str = ""
    is_backward: bool = False
    is_kept: bool = False
    product: Product | None = None
    rate: str = "product"


@dataclass
class Record:
    """All of a step, in the order in which it was traced.

    With ``turns_are_blocks`` no output of a block is marked, and loops over layers say where they
    are.
    """

    factors: Factors = field(default_factory=Factors)
    tensors: list[Tensor] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)  # number -> the first array that has it
    turns_are_blocks: bool = False
    loops: int = 0

    def number(self, key: Any = None) -> int:
        """The number of the values that are computed in this way; a new one for ``None``."""
        new = len(self.numbers) + 1
        return self.numbers.setdefault((None, new) if key is None else key, new)

    def block(self, loop: Any) -> str:
        """A name for a loop whose turns are blocks, or that has blocks inside; empty for others."""
        if not (has_turns(loop) if self.turns_are_blocks else has_blocks(loop)):
            return ""
        self.loops += 1
        return f"loop {self.loops}"

    def value(
        self, atom: Any, dims: Dims, path: str, role: str = "activation", number: int = 0
    ) -> Value:
        """A new value; those of one element are not among the arrays."""
        shape = shape_of(atom)
        dims = self.factors.distinct(dims)
        self.factors.keep_apart(dims)
        number = number or self.number()
        if math.prod(shape) <= 1:
            return Value(dims, None, number)
        itemsize = int(getattr(atom.aval.dtype, "itemsize", 8))
        twin = self.first.get(number)
        self.tensors.append(Tensor(path, dims, shape, itemsize, role, twin))
        self.first.setdefault(number, len(self.tensors) - 1)
        return Value(dims, len(self.tensors) - 1, number)

    def dims(self, atom: Any, value: Value) -> Dims:
        """The dims of what is read; those of a constant are new each time."""
        return self.factors.new_dims(shape_of(atom)) if value.dims is None else value.dims

    def add(
        self,
        kind: str,
        path: str,
        operands: Sequence[Value],
        results: Sequence[Value],
        joins: Joins | None = None,
        **more: Any,
    ) -> None:
        """Note an operation, unless none of its operands and results is among the arrays."""
        sources = _places(operands)
        targets = _places(results)
        if not sources and not targets and not more.get("flops"):
            return
        if joins is not None:
            moved = [
                Move(tensor, dim, target)
                for operand, dim, target in joins.joints
                if (tensor := operands[operand].tensor) is not None
            ]
            more |= {"summed": joins.summed, "whole": joins.whole, "moved": moved}
        self.equations.append(Equation(kind, path, sources, targets, **more))

    def carry(self, kind: str, path: str, before: Value, new: Value, times: int = 1) -> Value:
        """The result replaces a value, as in a loop, so it has to be laid out as that value is."""
        if before.dims is None or new.dims is None or new.tensor is None:
            return before
        moved = [
            Move(new.tensor, dim, target)
            for target, dim in zip(before.dims, new.dims, strict=True)
            if not self.factors.tie(target, dim)
        ]
        if not moved:
            return Value(before.dims, new.tensor, new.number)
        self.tensors.append(
            self.tensors[new.tensor]._replace(path=path, dims=before.dims, twin=None)
        )
        result = len(self.tensors) - 1
        self.equations.append(
            Equation(kind, path, [new.tensor], [result], moved=moved, times=times)
        )
        return Value(before.dims, result)


def _places(values: Sequence[Value]) -> list[int]:
    return list(dict.fromkeys(v.tensor for v in values if v.tensor is not None))
