"""Which mesh axes can reach which dims of every intermediate of a traced function.

The partitioner carries the axes of the inputs' layouts through a program, forwards and backwards,
along dims that belong together: the rows of an image, of its convolution, of what is added to it.
Here the same is followed on the jaxpr, without a device: dims that belong together share a class
(union-find), as in Shardy's factors and Mesh-TensorFlow's named dims; a reshape keeps the factors
of what it merges, so that it can be undone. Where a primitive is not known, every dim of its
operands is taken to reach every dim of its results: too many axes cost speed, too few are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import _compat
from .link_rows import elementwise
from .links import How, Place
from .primitives import TABLE, inner_jaxprs, links_of, opened, shape_of
from .union_find import United

Cut = tuple[tuple[str, int], ...]  # axes that cut a dim together, each into how many pieces
Cuts = frozenset[Cut]


class Factor(United):
    """A factor of the size of some dim; united with others, it shares the cuts that reach it.

    ``sure`` cuts come along the data; ``feeble`` ones come backwards into what a reshape or a
    contraction merged, and give way where their axis already cuts another dim of the same value.
    """

    __slots__ = ("feeble", "size", "sure")

    def __init__(self, size: int, sure: Cuts = frozenset()) -> None:
        super().__init__()
        self.size = size
        self.sure = sure
        self.feeble: Cuts = frozenset()


Dim = tuple[Factor, ...]  # slowest first; the product of their sizes is the dim's
Dims = tuple[Dim, ...]


class Flow(NamedTuple):
    """Cuts go from the sources, all together, to the target; and back, feebly, what is new there.

    ``share`` says that the target is one of two factors that a source falls into: the size of the
    slower one, and which of the two it is.
    """

    sources: Dim
    target: Factor
    share: tuple[int, int] | None = None
    feeble: bool = False


@dataclass(eq=False)
class Scope:
    """What is known of one jaxpr at one place where it is called."""

    dims: dict[Any, Dims] = field(default_factory=dict)  # variable -> dims
    inner: dict[int, dict[str, list[Scope]]] = field(default_factory=dict)  # by equation, param

    def of(self, atom: Any) -> Dims:
        """The dims of a variable; a literal's are reached by nothing."""
        return fresh(atom.aval) if hasattr(atom, "val") else self.dims[atom]


def fresh(aval: Any, cuts: Sequence[Cut] = ()) -> Dims:
    """New dims for a value that is cut so, one entry per dim."""
    shape = getattr(aval, "shape", ())
    if not shape:
        return ()
    sure = [frozenset([cut] if cut else []) for cut in cuts] or [frozenset()] * len(shape)
    return tuple((Factor(size, reach),) for size, reach in zip(shape, sure, strict=True))


def sure_cuts(dim: Dim) -> Cuts:
    """The cuts that reach a dim along the data; factors of one dim are cut together."""
    return _together([factor.root().sure for factor in dim])


def feeble_cuts(dim: Dim) -> Cuts:
    """The cuts that may reach a dim backwards."""
    return frozenset().union(*(factor.root().feeble for factor in dim))


def pieces(cut: Cut) -> int:
    """Into how many pieces a cut makes a dim."""
    return math.prod(number for _, number in cut)


def _together(reaches: Sequence[Cuts]) -> Cuts:
    """One cut from those of several factors; of a single one, its own."""
    reaches = [reach for reach in reaches if reach]
    if len(reaches) <= 1:
        return reaches[0] if reaches else frozenset()
    most: dict[str, int] = {}
    for cut in sorted(cut for reach in reaches for cut in reach):
        for axis, number in cut:
            most[axis] = max(number, most.get(axis, 1))
    return frozenset([tuple(most.items())])


def follow(jaxpr: Any, cuts: Sequence[Sequence[Cut]]) -> Scope:
    """Follow the cuts of the inputs (per input, per dim) through an open jaxpr."""
    tracker = _Tracker()
    invars = [fresh(v.aval, dim_cuts) for v, dim_cuts in zip(jaxpr.invars, cuts, strict=True)]
    scope = tracker.visit(jaxpr, invars)
    tracker.settle()
    return scope


class _Tracker:
    """Visits jaxprs and keeps what has to be settled once all of them are seen."""

    def __init__(self) -> None:
        self.flows: list[Flow] = []

    # Ties between dims

    def tie(self, one: Dim, other: Dim) -> None:
        """Two dims that are laid out alike."""
        if one is other:
            return
        if len(one) == len(other) == 1:
            self._unite(one[0].root(), other[0].root())
        elif [f.size for f in one] == [f.size for f in other]:
            for a, b in zip(one, other, strict=True):
                self._unite(a.root(), b.root())
        else:
            self.flow(one, other, feeble=True)
            self.flow(other, one, feeble=True)

    def flow(self, sources: Dim, targets: Dim, **how: Any) -> None:
        """Cuts of the sources may reach the targets."""
        if sources:
            self.flows += [Flow(sources, target, **how) for target in targets]

    def like(self, dim: Dim, size: int) -> Dim:
        """A dim, perhaps of another size, that is laid out as ``dim``."""
        if math.prod(factor.size for factor in dim) == size:
            return dim
        new = (Factor(size),)
        if len(dim) == 1:
            self.tie(dim, new)
        else:
            self.flow(dim, new)
        return new

    def _unite(self, one: Factor, other: Factor) -> None:
        if one is not other:
            other.parent = one
            one.sure |= other.sure
            one.feeble |= other.feeble

    def settle(self) -> None:
        """Let the cuts flow until nothing changes."""
        while sum(self._pour(flow) for flow in self.flows):  # all of them, each time
            pass

    def _pour(self, flow: Flow) -> bool:
        target = flow.target.root()
        sources = [factor.root() for factor in flow.sources]
        before = [(factor.sure, factor.feeble) for factor in (target, *sources)]
        sure = _together([factor.sure for factor in sources])
        feeble = frozenset().union(*(factor.feeble for factor in sources))
        if flow.share is not None:
            size, which = flow.share
            sure, feeble = (
                frozenset(filter(None, (_deal(cut, size)[which] for cut in cuts)))
                for cuts in (sure, feeble)
            )
        if flow.feeble:
            sure, feeble = frozenset(), feeble | sure
        target.sure |= sure
        target.feeble |= feeble - target.sure
        axes = {axis for factor in sources for cut in factor.sure for axis, _ in cut}
        for cut in target.sure | target.feeble:
            if not axes.intersection(axis for axis, _ in cut):
                for factor in sources:
                    factor.feeble |= {cut}
        return before != [(factor.sure, factor.feeble) for factor in (target, *sources)]

    # Jaxprs

    def visit(self, jaxpr: Any, invars: Sequence[Dims]) -> Scope:
        scope = Scope()
        scope.dims.update((v, fresh(v.aval)) for v in jaxpr.constvars)
        scope.dims.update(zip(jaxpr.invars, invars, strict=True))
        for index, eqn in enumerate(jaxpr.eqns):
            outs = self._outs(scope, index, eqn)
            scope.dims.update(zip(eqn.outvars, outs, strict=True))
        return scope

    def _outs(self, scope: Scope, index: int, eqn: Any) -> list[Dims]:
        ins = [scope.of(v) for v in eqn.invars]
        inner = inner_jaxprs(eqn)
        if inner:
            scope.inner[index], outs = _CONTROL.get(eqn.primitive.name, _call)(self, eqn, ins)
            return outs
        return self._through(eqn, ins)

    # Equations that hold no jaxprs

    def _through(self, eqn: Any, ins: list[Dims]) -> list[Dims]:
        """The dims of the results, by the links of the equation."""
        shapes = [shape_of(var) for var in eqn.outvars]
        if TABLE.get(eqn.primitive.name) is elementwise:  # most equations
            full = [dims for dims, var in zip(ins, eqn.invars, strict=True) if shape_of(var)]
            if all(shape_of(var) in (shapes[0], ()) for var in (*eqn.invars, *eqn.outvars)):
                return self._alike(full or [fresh(eqn.outvars[0].aval)]) * len(shapes)
        out: dict[Place, Dim] = {}
        for link in links_of(eqn):
            dims = [ins[operand][dim] for operand, dim in link.ins]
            sizes = [shapes[result][dim] for result, dim in link.outs]
            if link.how is How.EACH and len(dims) == 1:
                operand, dim = link.ins[0]
                if sizes[0] == eqn.invars[operand].aval.shape[dim]:  # nothing to tie
                    out.update((place, dims[0]) for place in link.outs)
                    continue
            if link.how is How.MERGE:
                factors = [factor for dim in dims for factor in dim if factor.size != 1]
                out.update(zip(link.outs, self._split(factors, sizes), strict=True))
            elif link.how is How.ANY:
                factors = [factor for dim in dims for factor in dim]
                out.update(zip(link.outs, self._any_to_any(factors, sizes), strict=True))
            elif dims:
                for place, size in zip(link.outs, sizes, strict=True):
                    earlier = [out[place]] if place in out else []
                    out[place] = self._together(dims, size, link.how is How.EACH, earlier)
                for other in () if link.outs else dims[1:]:
                    self.tie(dims[0], other)
        return [
            tuple(out.get((result, dim)) or (Factor(size),) for dim, size in enumerate(shape))
            for result, shape in enumerate(shapes)
        ]

    def _alike(self, every: Sequence[Dims]) -> list[Dims]:
        """The dims of values that are laid out alike: those of the first one."""
        first, *others = every
        for other in others:
            if other is not first:
                for one, its in zip(first, other, strict=True):
                    self.tie(one, its)
        return [first]

    def _together(
        self, dims: Sequence[Dim], size: int, spreads: bool, earlier: Sequence[Dim]
    ) -> Dim:
        """The dim of a result, of that size, that all of these lie as; a dim of one element
        ``spreads`` over those of others."""
        full = [dim for dim in dims if math.prod(factor.size for factor in dim) == size]
        first, *others = full if spreads and full else dims
        new = self.like(first, size)
        for other in (*others, *earlier):
            self.tie(new, other)
        return new

    def _split(self, sources: list[Factor], sizes: list[int]) -> list[Dim]:
        """Deal the factors out to dims of these sizes; where they do not fit, any may reach any."""
        rest = list(sources)
        out: list[Dim] = []
        for size in sizes:
            dim: list[Factor] = []
            while size > 1 and rest:
                factor = rest.pop(0)
                if size % factor.size == 0:
                    dim.append(factor)
                    size //= factor.size
                elif factor.size % size == 0:
                    slow, fast = Factor(size), Factor(factor.size // size)
                    self.flow((factor,), (slow,), share=(size, 0))
                    self.flow((factor,), (fast,), share=(size, 1))
                    dim.append(slow)
                    rest.insert(0, fast)
                    size = 1
                else:
                    return self._any_to_any(sources, sizes)
            out.append(tuple(dim) if dim else (Factor(size),))
        return out

    def _any_to_any(self, sources: list[Factor], sizes: Sequence[int]) -> list[Dim]:
        out = [(Factor(size),) for size in sizes]
        for dim in out:
            self.flow(tuple(sources), dim)
        return out


def _deal(cut: Cut, size: int) -> tuple[Cut, Cut]:
    """How a cut is shared by a factor of this size and a faster one beside it.

    Shardy cuts a factor of 2 by a part of an axis of 4, and the next factor by the rest of it.
    Where the sizes do not allow that, both factors are taken to be reached by the whole cut.
    """
    slow, fast = [], []
    for axis, number in cut:
        if size % number == 0:
            slow.append((axis, number))
            size //= number
        elif number % size == 0:
            slow += [(axis, size)] if size > 1 else []
            fast.append((axis, number // size))
            size = 1
        else:
            return cut, cut
    return tuple(slow), tuple(fast)


# Equations that hold jaxprs


def _call(t: _Tracker, eqn: Any, ins: list[Dims]) -> tuple[dict[str, list[Scope]], list[Dims]]:
    ((key, (called,)),) = inner_jaxprs(eqn).items()
    scope = t.visit(opened(called), ins)
    return {key: [scope]}, _results(opened(called), scope)


def _cond(t: _Tracker, eqn: Any, ins: list[Dims]) -> tuple[dict[str, list[Scope]], list[Dims]]:
    branches = [opened(branch) for branch in eqn.params["branches"]]
    scopes = [t.visit(branch, ins[1:]) for branch in branches]
    first, *others = (_results(b, s) for b, s in zip(branches, scopes, strict=True))
    for other in others:
        _tie_all(t, first, other)
    return {"branches": scopes}, first


def _while(t: _Tracker, eqn: Any, ins: list[Dims]) -> tuple[dict[str, list[Scope]], list[Dims]]:
    in_cond, in_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = ins[in_cond + in_body :]
    body = opened(eqn.params["body_jaxpr"])
    cond_scope = t.visit(opened(eqn.params["cond_jaxpr"]), [*ins[:in_cond], *carry])
    body_scope = t.visit(body, ins[in_cond:])
    _tie_all(t, carry, _results(body, body_scope))
    return {"cond_jaxpr": [cond_scope], "body_jaxpr": [body_scope]}, carry


def _scan(t: _Tracker, eqn: Any, ins: list[Dims]) -> tuple[dict[str, list[Scope]], list[Dims]]:
    first, carried = _compat.scan_counts(eqn)
    last = first + carried
    body = opened(eqn.params["jaxpr"])
    scope = t.visit(body, [*ins[:last], *(dims[1:] for dims in ins[last:])])
    results = _results(body, scope)
    _tie_all(t, ins[first:last], results[:carried])
    steps: Dim = ins[last][0] if len(ins) > last else (Factor(eqn.params["length"]),)
    for dims in ins[last:]:
        t.tie(steps, dims[0])
    return {"jaxpr": [scope]}, [*ins[first:last], *((steps, *ys) for ys in results[carried:])]


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}


def _results(jaxpr: Any, scope: Scope) -> list[Dims]:
    return [scope.of(v) for v in jaxpr.outvars]


def _tie_all(t: _Tracker, some: Sequence[Dims], others: Sequence[Dims]) -> None:
    for one, other in zip(some, others, strict=True):
        for a, b in zip(one, other, strict=True):
            t.tie(a, b)
