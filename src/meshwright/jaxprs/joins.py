"""Which dims of a step's arrays are one, and which ones an equation needs whole or sums over.

Read from the links of each equation. What is in no row of the table joins nothing and is done
whole: a missing row costs communication in a plan, and never makes a false one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .factors import Dim, Dims, Factors, age, label, leaves
from .link_rows import elementwise
from .links import How, Link, Place
from .primitives import TABLE, links_of, shape_of


class Joins:
    """What one equation does with dims: ``outs`` are those of its results.

    ``ins`` are the dims of the operands, and ``tensors`` their numbers, in the order in which
    they were made: a gradient comes after the value that it is of. ``backward`` says whether this
    is of the backward pass. ``summed`` and ``whole`` are dims, and ``joints`` say of an operand, by
    place, that a dim of it is treated as another one.
    """

    def __init__(
        self,
        factors: Factors,
        eqn: Any,
        ins: Sequence[Dims],
        tensors: Sequence[int],
        backward: bool = False,
    ) -> None:
        self.summed: list[Dim] = []
        self.whole: list[Dim] = []
        self.joints: list[tuple[int, Dim, Dim]] = []
        self._factors, self._eqn, self._tensors = factors, eqn, tensors
        self._name: str = eqn.primitive.name
        self._by_age = TABLE.get(self._name) is elementwise
        self._ins = {(n, d): dim for n, dims in enumerate(ins) for d, dim in enumerate(dims)}
        self._shapes = [shape_of(var) for var in eqn.outvars]
        self._operand_shapes = [shape_of(var) for var in eqn.invars]
        self._out: dict[Place, Dim] = {}
        links = links_of(eqn)
        for link in links:
            self._take(link)
        self._as_xla_does(links, backward)
        self.outs: list[Dims] = [
            tuple(
                [
                    self._out[number, d] if (number, d) in self._out else factors.new(size)
                    for d, size in enumerate(shape)
                ]
            )
            for number, shape in enumerate(self._shapes)
        ]
        if sum(map(bool, ins)) > 1:
            self.outs = [self._distinct(dims, ins) for dims in self.outs]

    def _take(self, link: Link) -> None:
        how = link.how
        if how is How.EACH or how is How.AT:
            dim = self._elementwise(link)
            for out in link.outs:
                self._out[out] = dim
        elif how is How.SUM:
            self.summed.append(self._all_one(link.ins))
        elif how is How.MERGE:
            self._reshape(link)
        elif how is How.GROUPS:
            self._group(link)
        else:
            if how is How.WHOLE:
                self._all_one(link.ins)
            self.whole += [self._ins[place] for place in link.ins]
            if how is How.ALONG:
                self._along(link)

    # Links, by how

    def _elementwise(self, link: Link) -> Dim:
        """One dim of the results. Where operands do not agree, it is that of the first one; of
        elementwise work that of the one that was made first, a value rather than a gradient; of
        two gradients, the dim that was met first."""
        if len(link.ins) == 1:
            return self._ins[link.ins[0]]
        size = self._size(link.outs[0])
        full = [place for place in link.ins if self._shape(place) == size]
        if not full:
            return self._factors.new(size)
        dims = [self._ins[place] for place in full]
        if not self._by_age:
            return self._all_one(full)
        if not all(dims):
            return ()
        if self._name == "add_any":
            target = min(dims, key=age)
        else:
            target = self._ins[min(full, key=lambda place: self._tensors[place[0]])]
        for place, dim in zip(full, dims, strict=True):
            self._join(target, place[0], dim)
        return target

    def _all_one(self, places: Sequence[Place]) -> Dim:
        """The first of these dims that may be split; the others are the same."""
        target: Dim = ()
        for place in places:
            dim = self._ins[place]
            self._join(target, place[0], dim)
            target = target or dim
        return target

    def _along(self, link: Link) -> None:
        """A dim of the results that is as large as that of an operand is the same."""
        size = self._size(link.outs[0])
        full = [place for place in link.ins if self._shape(place) == size]
        dim = self._all_one(full) if full else self._factors.new(size)
        for out in link.outs:
            self._out.setdefault(out, dim)

    def _reshape(self, link: Link) -> None:
        """The slowest of dims that are merged carries on, or the slowest of a dim that is split."""
        new = self._factors.new
        operand_dims = [self._ins[place] or new(self._shape(place)) for place in link.ins]
        out = [new(self._size(place)) for place in link.outs]
        merged, split = (tuple(f for dim in dims for f in dim) for dims in (operand_dims, out))
        tied = self._factors.tie(merged, split)
        carried = {label(dim) for dim in out} if tied else set()
        self.whole += [dim for dim in operand_dims if label(dim) not in carried]
        self._out.update(zip(link.outs, out, strict=True))

    def _group(self, link: Link) -> None:
        """Groups of both dims lie alike; what follows is about one group of the first."""
        (dim, other), new = (self._ins[place] for place in link.ins), self._factors.new
        insides = [new(max(1, _size_of(whole) // link.size)) for whole in (dim, other)]
        groups = new(link.size)
        tied = [
            self._factors.tie(whole, groups + inside)
            for whole, inside in zip((dim, other), insides, strict=True)
        ]
        if not all(tied):
            self.whole += [dim, other]
        self._ins[link.ins[0]] = insides[0]

    def _as_xla_does(self, links: Sequence[Link], backward: bool) -> None:
        """Where it is not the links that say what moves, but the compiler of JAX 0.10."""
        if self._name == "dot_general" and backward and self._tensors[0] > self._tensors[1]:
            self._keep_value(links)
        elif self._name == "top_k":  # for CPUs at least, all other dims are gathered, too
            self.whole += self._ins.values()
        elif self._name == "conv_general_dilated" and self._eqn.params["batch_group_count"] > 1:
            (rows, *_) = next(link.ins for link in links if link.how is How.GROUPS)
            if self._ins[rows]:  # both operands are gathered, and summed over even so
                self.whole += next(
                    [self._ins[place] for place in link.ins]
                    for link in links
                    if link.how is How.SUM
                )

    def _keep_value(self, links: Sequence[Link]) -> None:
        """In the gradient of a kernel the value keeps its dim, and its gradient finds the kernel's;
        products that share dims are those of attention, where the second operand has the keys."""
        free = [link for link in links if link.outs]
        if any(len(link.ins) > 1 for link in free):
            return
        mine, yours = ([link for link in free if link.ins[0][0] == side] for side in (0, 1))
        other = {factor for link in yours for factor in leaves(self._ins[link.ins[0]])}
        for link in mine:
            dim = self._ins[link.ins[0]]
            if not other.isdisjoint(leaves(dim)):
                target = self._factors.new_like(dim)
                self.joints.append((0, dim, target))
                self._out[link.outs[0]] = target

    # Dims

    def _shape(self, place: Place) -> int:
        return self._operand_shapes[place[0]][place[1]]

    def _size(self, out: Place) -> int:
        return self._shapes[out[0]][out[1]]

    def _join(self, target: Dim, operand: int, operand_dim: Dim) -> None:
        """A dim of an operand is the same as ``target``, or has to be moved there."""
        if self._factors.tie(target, operand_dim):
            return
        if [f.size for f in leaves(target)] == [f.size for f in leaves(operand_dim)]:
            self.joints.append((operand, operand_dim, target))
        else:
            self.whole.append(operand_dim)

    def _distinct(self, dims: Dims, ins: Sequence[Dims]) -> Dims:
        """The dims of a result without one that it has twice. The last operand that has the dim
        comes second, and is the one that is moved."""
        out = self._factors.distinct(dims)
        for repeated, target in zip(dims, out, strict=True) if out is not dims else ():
            if repeated is not target:
                for operand in reversed(range(len(ins))):
                    if any(label(dim) is label(repeated) for dim in ins[operand] if dim):
                        self.joints.append((operand, repeated, target))
                        break
        return out


def _size_of(dim: Dim) -> int:
    return math.prod(factor.size for factor in dim)
