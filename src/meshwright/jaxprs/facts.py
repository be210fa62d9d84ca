"""What one equation does with named dims, written down by the rule of its primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .factors import Dim, Dims, Factors, label, leaves


class Facts:
    """What a rule reads of an equation, and what it tells of it.

    ``ins`` are the dims of the operands, and ``made`` the order in which they were made: a gradient
    comes after the value that it is of. ``backward`` says whether this is of the backward pass.
    ``summed`` and ``whole`` are dims, and ``joints`` say of an operand, by place, that a dim of it
    is taken for another one.
    """

    def __init__(
        self,
        factors: Factors,
        eqn: Any,
        ins: Sequence[Dims],
        made: Sequence[int],
        backward: bool = False,
    ) -> None:
        self.factors = factors
        self.eqn = eqn
        self.ins = ins
        self.made = made
        self.backward = backward
        self.summed: list[Dim] = []
        self.whole: list[Dim] = []
        self.joints: list[tuple[int, Dim, Dim]] = []

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    def shape(self, operand: int) -> tuple[int, ...]:
        """The shape of an operand."""
        return shape_of(self.eqn.invars[operand])

    def out_shape(self, result: int = 0) -> tuple[int, ...]:
        """The shape of a result."""
        return shape_of(self.eqn.outvars[result])

    def new(self, size: int) -> Dim:
        return self.factors.new(size)

    def join(self, wanted: Dim, operand: int, given: Dim) -> None:
        """A dim of an operand is the same as ``wanted``, or has to be moved there."""
        if self.factors.tie(wanted, given):
            return
        if [f.size for f in leaves(wanted)] == [f.size for f in leaves(given)]:
            self.joints.append((operand, given, wanted))
        else:
            self.whole.append(given)

    def moved(self, operand: int, given: Dim) -> Dim:
        """A new dim that a dim of an operand is moved to."""
        wanted = self.factors.new_like(given)
        self.joints.append((operand, given, wanted))
        return wanted

    def kept(self, operand: int, place: int, size: int) -> Dim:
        """The dim of a result that is a dim of an operand, where it has all of it.

        Where it has less or more of it, the operand is needed whole and the dim is a new one.
        """
        dim = self.ins[operand][place]
        if self.shape(operand)[place] == size:
            return dim
        self.whole.append(dim)
        return self.new(size)

    def distinct(self, outs: Sequence[Dims]) -> list[Dims]:
        """The results without a dim that one of them has twice."""
        return [self._distinct(dims) for dims in outs]

    def _distinct(self, dims: Dims) -> Dims:
        out = self.factors.distinct(dims)
        for given, wanted in zip(dims, out, strict=True):
            if given is not wanted:
                self._move(given, wanted)
        return out

    def _move(self, given: Dim, wanted: Dim) -> None:
        """The last operand that has the dim comes second, and is the one that is moved."""
        for operand in reversed(range(len(self.ins))):
            if any(label(dim) is label(given) for dim in self.ins[operand] if dim):
                self.joints.append((operand, given, wanted))
                return


Rule = Callable[[Facts], list[Dims]]  # gives the dims of the results


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or a literal; none for anything else."""
    return tuple(getattr(atom.aval, "shape", ()))
