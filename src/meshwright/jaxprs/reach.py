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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .united import United

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
        from jax.extend.core import Literal

        return fresh(atom.aval) if isinstance(atom, Literal) else self.dims[atom]


def fresh(aval: Any, cuts: Sequence[Cut] = ()) -> Dims:
    """New dims for a value that is cut so, one entry per dim."""
    shape = getattr(aval, "shape", ())
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
    invars = [fresh(v.aval, given) for v, given in zip(jaxpr.invars, cuts, strict=True)]
    scope = tracker.visit(jaxpr, invars)
    tracker.settle()
    return scope


def is_pointwise(eqn: Any) -> bool:
    """Whether each element of the results depends on the same element of the operands only."""
    if eqn.primitive.name in _MOVING or inner_jaxprs(eqn):
        return False
    shapes = {getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars)} - {()}
    return len(shapes) <= 1


def inner_jaxprs(eqn: Any) -> dict[str, list[Any]]:
    """The (closed) jaxprs that an equation runs on whole arrays, by parameter.

    Those that run on shards or blocks (``shard_map``, Pallas), and the scalar functions of
    reductions and scatters, are none of them.
    """
    if eqn.primitive.name == "scan":
        return {"jaxpr": [eqn.params["jaxpr"]]}
    if eqn.primitive.name == "while":
        return {key: [eqn.params[key]] for key in ("cond_jaxpr", "body_jaxpr")}
    if eqn.primitive.name == "cond":
        return {"branches": list(eqn.params["branches"])}
    for key in ("jaxpr", "call_jaxpr"):
        called = eqn.params.get(key)
        if eqn.primitive.name not in _ON_PIECES and _fits_call(opened(called), eqn):
            return {key: [called]}
    return {}


def opened(jaxpr: Any) -> Any:
    """The open jaxpr of a closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


_ON_PIECES = {"shard_map", "pallas_call", "core_map", "mpmd_map", "run_state", "run_scoped"}


def _fits_call(jaxpr: Any, eqn: Any) -> bool:
    if not hasattr(jaxpr, "eqns"):
        return False
    pairs = (jaxpr.invars, eqn.invars), (jaxpr.outvars, eqn.outvars)
    return all(
        [getattr(v.aval, "shape", None) for v in inside]
        == [getattr(v.aval, "shape", None) for v in outside]
        for inside, outside in pairs
    )


class _Tracker:
    """Visits jaxprs and keeps what has to be settled once all of them are seen."""

    def __init__(self) -> None:
        self.flows: list[Flow] = []

    # Ties between dims

    def tie(self, one: Dim, other: Dim) -> None:
        """Two dims that are laid out alike."""
        if one is other:
            return
        if [f.size for f in one] == [f.size for f in other] or len(one) == len(other) == 1:
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
        known = {axis for factor in sources for cut in factor.sure for axis, _ in cut}
        for cut in target.sure | target.feeble:
            if not known.intersection(axis for axis, _ in cut):
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
        rule = _RULES.get(eqn.primitive.name)
        if rule is None and eqn.params.get("axes") and eqn.primitive.name.startswith(_REDUCING):
            rule = _reduce
        return (rule or _in_place)(self, eqn, ins)


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


Rule = Callable[[_Tracker, Any, list[Dims]], list[Dims]]


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
    first = eqn.params["num_consts"]
    last = first + eqn.params["num_carry"]
    body = opened(eqn.params["jaxpr"])
    scope = t.visit(body, [*ins[:last], *(dims[1:] for dims in ins[last:])])
    results = _results(body, scope)
    carried = last - first
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


# Equations by primitive


def _in_place(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    """Dims stay at their place: pointwise, and windows, slices, sorts and so on along dims."""
    outs = []
    for var in eqn.outvars:
        shape = getattr(var.aval, "shape", ())
        alike = [dims for dims in ins if len(dims) == len(shape)]
        if not alike or not shape:
            outs.append(_anywhere(t, var, ins))
            continue
        spreads = eqn.primitive.name not in _MOVING  # dims of size 1, over those of the others
        outs.append(tuple(map(_at_one_place(t, spreads), shape, *alike)))
    return outs


def _at_one_place(t: _Tracker, spreads: bool) -> Callable[..., Dim]:
    """The dim of a result, of that size, from the operands' dims at its place."""

    def out(size: int, *dims: Dim) -> Dim:
        full = [dim for dim in dims if math.prod(factor.size for factor in dim) == size]
        first, *others = full if spreads and full else dims
        new = t.like(first, size)
        for other in others:
            t.tie(new, other)
        return new

    return out


def _anywhere(t: _Tracker, var: Any, ins: list[Dims]) -> Dims:
    """Every dim of the operands may reach every dim of the result."""
    sources = tuple(factor for dims in ins for dim in dims for factor in dim)
    out = fresh(var.aval)
    for dim in out:
        t.flow(sources, dim)
    return out


def _new(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    return [fresh(var.aval) for var in eqn.outvars]


def _reduce(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    gone = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    (*_, one) = [dims for dims in ins if dims] or [()]
    kept = tuple(dim for i, dim in enumerate(one) if i not in gone)
    return [kept for _ in eqn.outvars]


def _squeeze(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    return [tuple(dim for i, dim in enumerate(ins[0]) if i not in eqn.params["dimensions"])]


def _transpose(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    return [tuple(ins[0][i] for i in eqn.params["permutation"])]


def _stack(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    first, *others = ins
    for other in others:
        _tie_all(t, [first], [other])
    axis = eqn.params["axis"]
    return [(*first[:axis], (Factor(len(ins)),), *first[axis:])]


def _unstack(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    axis = eqn.params["axis"]
    return [ins[0][:axis] + ins[0][axis + 1 :] for _ in eqn.outvars]


def _leading(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    """The first dims are the first operand's; dims behind them are made or used up."""
    out = fresh(eqn.outvars[0].aval)
    return [(*ins[0][: len(out)], *out[len(ins[0]) :])]


def _each_by_itself(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    return ins


def _broadcast(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    out = list(fresh(eqn.outvars[0].aval))
    given = eqn.invars[0].aval.shape
    for i, place in enumerate(eqn.params["broadcast_dimensions"]):
        if given[i] == eqn.params["shape"][place]:
            out[place] = ins[0][i]
    return [tuple(out)]


def _dot_general(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    contracted, batch = eqn.params["dimension_numbers"]
    left, right = ins
    for pairs in (contracted, batch):
        for i, j in zip(*pairs, strict=True):
            t.tie(left[i], right[j])
    free = [
        dim
        for dims, one, two in ((left, contracted[0], batch[0]), (right, contracted[1], batch[1]))
        for i, dim in enumerate(dims)
        if i not in one and i not in two
    ]
    return [(*(left[i] for i in batch[0]), *free)]


def _conv(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    numbers = eqn.params["dimension_numbers"]
    left, right = ins
    shape = eqn.outvars[0].aval.shape
    out: list[Dim] = [()] * len(shape)
    for place, dim in ((0, left[numbers.lhs_spec[0]]), (1, right[numbers.rhs_spec[0]])):
        out[numbers.out_spec[place]] = t.like(dim, shape[numbers.out_spec[place]])
    t.tie(left[numbers.lhs_spec[1]], right[numbers.rhs_spec[1]])
    if eqn.params["feature_group_count"] > 1:
        t.tie(left[numbers.lhs_spec[1]], out[numbers.out_spec[1]])
    for i, j, k in conv_places(eqn):
        rows, window, results = left[i], right[j], shape[k]
        if eqn.invars[1].aval.shape[j] > results:  # as in the gradient of a kernel
            t.tie(rows, window)
            out[k] = (Factor(results),)
        else:
            out[k] = t.like(rows, results)
    return [tuple(out)]


def conv_places(eqn: Any) -> Iterator[tuple[int, int, int]]:
    """For each spatial dim of a convolution: where operand, kernel and result have it."""
    numbers = eqn.params["dimension_numbers"]
    return zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)


def _reshape(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    out: list[Dim] = []
    before = [(dim, math.prod(f.size for f in dim)) for dim in ins[0]]
    for sources, sizes in _groups(before, eqn.outvars[0].aval.shape):
        out += _split(t, sources, sizes)
    return [tuple(out)]


def _groups(
    before: list[tuple[Dim, int]], after: Sequence[int]
) -> Iterator[tuple[list[Factor], list[int]]]:
    """The smallest runs of dims, before and after, that hold the same elements."""
    rest = list(before)
    sizes: list[int] = []
    sources: list[Factor] = []
    taken = 1
    for place, size in enumerate(after):
        sizes.append(size)
        wanted = math.prod(sizes)
        while rest and (taken < wanted or place == len(after) - 1 or rest[0][1] == 0):
            dim, length = rest.pop(0)
            sources += [factor for factor in dim if factor.size != 1]
            taken *= length
        if taken == wanted:
            yield sources, sizes
            sources, sizes, taken = [], [], 1
    if sizes:
        yield sources, sizes


def _split(t: _Tracker, sources: list[Factor], sizes: list[int]) -> list[Dim]:
    """Deal the factors out to dims of these sizes; where they do not fit, any may reach any."""
    left = list(sources)
    out: list[Dim] = []
    for size in sizes:
        dim: list[Factor] = []
        while size > 1 and left:
            factor = left.pop(0)
            if size % factor.size == 0:
                dim.append(factor)
                size //= factor.size
            elif factor.size % size == 0:
                slow, fast = Factor(size), Factor(factor.size // size)
                t.flow((factor,), (slow,), share=(size, 0))
                t.flow((factor,), (fast,), share=(size, 1))
                dim.append(slow)
                left.insert(0, fast)
                size = 1
            else:
                return _any_to_any(t, sources, sizes)
        out.append(tuple(dim) if dim else (Factor(size),))
    return out


def _any_to_any(t: _Tracker, sources: list[Factor], sizes: list[int]) -> list[Dim]:
    out = [(Factor(size),) for size in sizes]
    for dim in out:
        t.flow(tuple(sources), dim)
    return out


def _gather(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    numbers = eqn.params["dimension_numbers"]
    operand, indices = ins[:2]
    shape = eqn.outvars[0].aval.shape
    batching = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = iter([dim for i, dim in enumerate(operand) if i not in gone])
    rows = iter(list(enumerate(indices[:-1])))
    out: list[Dim] = []
    for place, size in enumerate(shape):
        if place in numbers.offset_dims:
            out.append(t.like(next(windows), size))
            continue
        i, dim = next(rows)
        out.append(dim)
        if i in batching:
            t.tie(dim, operand[batching[i]])
    return [tuple(out)]


def _scatter(t: _Tracker, eqn: Any, ins: list[Dims]) -> list[Dims]:
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = ins
    batching = dict(
        zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = iter([dim for i, dim in enumerate(operand) if i not in gone])
    rows = iter(list(enumerate(indices[:-1])))
    for place, dim in enumerate(updates):
        if place in numbers.update_window_dims:
            t.tie(dim, next(windows))
            continue
        i, row = next(rows)
        t.tie(dim, row)
        if i in batching:
            t.tie(row, operand[batching[i]])
    return [operand]


_RULES: dict[str, Rule] = {
    "iota": _new,
    "reduce": _reduce,
    "squeeze": _squeeze,
    "stack": _stack,
    "unstack": _unstack,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "reshape": _reshape,
    "gather": _gather,
    "optimization_barrier": _each_by_itself,
    **dict.fromkeys(("random_bits", "random_split", "random_unwrap", "random_wrap"), _leading),
    **dict.fromkeys(
        ("scatter", "scatter_add", "scatter-add", "scatter_mul", "scatter_min", "scatter_max"),
        _scatter,
    ),
}

_REDUCING = ("reduce_", "argmax", "argmin")

# Primitives that move data along a dim though the shapes may be the same before and after.
_MOVING = {
    *_RULES,
    *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "sort", "fft", "top_k"),
    *("pad", "slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "shard_map"),
    *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
    *("select_and_gather_add", "select_and_scatter", "select_and_scatter_add"),
    *("cholesky", "triangular_solve", "householder_product", "pallas_call", "custom_linear_solve"),
}
