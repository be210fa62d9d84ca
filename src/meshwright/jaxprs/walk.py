"""Follows a traced step, equation by equation, through calls and loops."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import _compat
from .blocks import is_mark
from .factors import Dim
from .flops import equation_flops, flops_between_groups
from .joins import Joins
from .primitives import inner_jaxprs, opened, shape_of
from .products import product_of, rate_of
from .record import CONSTANT, Record, Value
from .scopes import layer_of
from .slices import variables
from .takes import is_of_one_entry

LOOPS = ("scan", "while", "cond", "store")  # kinds of operations beside those of the table

_SMALL = 4096  # elements


class At(NamedTuple):
    """A place in the program: the scopes around it, how often it runs, and the block it is in, if
    that is a turn of a loop."""

    scopes: str = ""
    times: int = 1
    block: str = ""

    @property
    def is_backward(self) -> bool:
        """Whether it is of the backward pass."""
        return "transpose(" in self.scopes

    @property
    def path(self) -> str:
        """The layer that it belongs to."""
        return _layer(f"{self.scopes}/")

    def within(self, eqn: Any) -> At:
        """The place inside of an equation that is at this place."""
        own = str(eqn.source_info.name_stack)
        return self._replace(scopes=f"{self.scopes}/{own}") if own else self

    def repeated(self, times: int) -> At:
        """The same, inside of a loop."""
        return self._replace(times=self.times * times)


_layer = functools.lru_cache(maxsize=None)(layer_of)


def follow(record: Record, jaxpr: Any, values: Sequence[Value], at: At) -> list[Value]:
    """Follow an open jaxpr with these arguments; gives its results."""
    environment: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
    environment.update((var, _constant(record, var)) for var in jaxpr.constvars)
    for eqn in jaxpr.eqns:
        operands = [_read(record, environment, atom) for atom in eqn.invars]
        environment.update(zip(eqn.outvars, _equation(record, eqn, operands, at), strict=True))
    return [_read(record, environment, atom) for atom in jaxpr.outvars]


def _constant(record: Record, var: Any) -> Value:
    """A small array that the function closes over has the layout that its reader wants."""
    shape = shape_of(var)
    if math.prod(shape) <= _SMALL:
        return CONSTANT._replace(number=record.number(var))
    return record.value(var, record.factors.new_dims(shape), "constant", "state")


def _read(record: Record, environment: dict[Any, Value], atom: Any) -> Value:
    if not hasattr(atom, "val"):
        return environment[atom]
    literal = ("literal", str(atom.val), str(atom.aval))
    return CONSTANT._replace(number=record.number(literal))


def _equation(record: Record, eqn: Any, operands: list[Value], at: At) -> list[Value]:
    name, at = eqn.primitive.name, at.within(eqn)
    if name == "shard_map" and eqn.params["mesh"].size == 1:
        return follow(record, opened(eqn.params["jaxpr"]), operands, at)
    if inner_jaxprs(eqn):
        return _WITH_INNER.get(name, _call)(record, eqn, operands, at)
    flops = _flops(eqn)
    numbers = _numbers(record, eqn, operands)
    if not flops and all(value.dims is None for value in operands) and not eqn.effects:
        return [CONSTANT._replace(number=number) for number in numbers]
    dims = [record.dims(atom, value) for atom, value in zip(eqn.invars, operands, strict=True)]
    tensors = [-1 if value.tensor is None else value.tensor for value in operands]
    joins = Joins(record.factors, eqn, dims, tensors, at.is_backward)
    path = at.path
    results = [
        record.value(var, out, path, number=number)
        for var, out, number in zip(eqn.outvars, joins.outs, numbers, strict=True)
    ]
    more = {"flops": flops, "between_groups": flops_between_groups(eqn), **_where(at)}
    more |= {"product": product_of(eqn, dims, joins.outs[0]), "rate": rate_of(eqn)} if flops else {}
    record.add(_kind(eqn, operands), path, operands, results, joins, **more)
    return results


def _kind(eqn: Any, operands: Sequence[Value]) -> str:
    """What takes one entry by a number that is written into the step is a slice."""
    by_number = is_of_one_entry(eqn) and operands[1].dims is None
    return "slice" if by_number else eqn.primitive.name


def _where(at: At) -> dict[str, Any]:
    return {"times": at.times, "block": at.block, "is_backward": at.is_backward}


def _numbers(record: Record, eqn: Any, operands: Sequence[Value]) -> list[int]:
    """What an equation makes of the same values in the same way has the same numbers."""
    if eqn.effects or not all(value.number for value in operands):
        return [record.number() for _ in eqn.outvars]
    way = eqn.primitive.name, str(eqn.params), tuple(value.number for value in operands)
    return [record.number((way, place)) for place in range(len(eqn.outvars))]


def _flops(eqn: Any) -> float:
    """The FLOPs of one equation; 0.0 where they cannot be known."""
    return equation_flops(eqn) or 0.0


# Equations that hold jaxprs


def _call(record: Record, eqn: Any, operands: list[Value], at: At) -> list[Value]:
    ((called,),) = inner_jaxprs(eqn).values()
    return follow(record, opened(called), operands, at)


def _cond(record: Record, eqn: Any, operands: list[Value], at: At) -> list[Value]:
    """The branch of most FLOPs counts; dims are joined through all of them."""
    before = len(record.equations)
    results: list[list[Value]] = []
    heaviest: list[Any] = []
    for branch in eqn.params["branches"]:
        results.append(follow(record, opened(branch), operands[1:], at))
        operations = record.equations[before:]
        del record.equations[before:]
        heaviest = max(heaviest, operations, key=lambda some: sum(d.flops * d.times for d in some))
    record.equations += heaviest
    path = at.path
    outs = []
    for var, *ways in zip(eqn.outvars, *results, strict=True):
        ways = [way for way in ways if way.dims is not None]
        dims = ways[0].dims if ways else None
        out = record.value(
            var, record.factors.new_dims(shape_of(var)) if dims is None else dims, path
        )
        for way in ways:
            record.carry("cond", path, out, way, at.times)
        outs.append(out)
        record.add("cond", path, ways, [out], times=at.times)
    return outs


def _while(record: Record, eqn: Any, operands: list[Value], at: At) -> list[Value]:
    """A loop of unknown length, counted once."""
    in_cond, in_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    first = in_cond + in_body
    path = at.path
    carry = _begun(record, eqn.invars[first:], operands[first:], path)
    follow(record, opened(eqn.params["cond_jaxpr"]), [*operands[:in_cond], *carry], at)
    outs = follow(record, opened(eqn.params["body_jaxpr"]), [*operands[in_cond:first], *carry], at)
    return _ended(record, "while", path, carry, outs, at.times)


def _scan(record: Record, eqn: Any, operands: list[Value], at: At) -> list[Value]:
    """Dims are joined through what is carried and through the arrays that are scanned."""
    (first, carried), length = _compat.scan_counts(eqn), eqn.params["length"]
    last = first + carried
    body = opened(eqn.params["jaxpr"])
    path, at = at.path, at._replace(block=at.block or record.block(eqn))
    inside = at.repeated(length)
    carry = _begun(record, eqn.invars[first:last], operands[first:last], path)
    steps = record.factors.new(length)
    slices = [
        _slice(record, var, value, steps, path, at)
        for var, value in zip(body.invars[last:], operands[last:], strict=True)
    ]
    outs = follow(record, body, [*operands[:first], *carry, *slices], inside)
    ended = _ended(record, "scan", path, carry, outs[:carried], inside.times)
    stacked = [
        _stacked(record, var, inner, value, steps, path, at, is_kept)
        for var, inner, value, is_kept in zip(
            eqn.outvars[carried:],
            body.outvars[carried:],
            outs[carried:],
            _kept(body, carried) if at.block else [False] * len(eqn.outvars[carried:]),
            strict=True,
        )
    ]
    return [*ended, *stacked]


def _kept(body: Any, carried: int) -> list[bool]:
    """Of what a loop stacks: whether it stands for what one block hands on to the next, which is
    what a turn begins with and what is marked inside. The arrays are known by their shapes."""
    handed = variables(body.outvars[:carried])
    marked = [eqn.outvars[0] for eqn in body.eqns if is_mark(eqn) and eqn.outvars[0] not in handed]
    wanted = Counter(shape_of(var) for var in (*handed, *marked))
    result = []
    for var in body.outvars[carried:]:
        result.append(wanted[shape_of(var)] > 0)
        wanted[shape_of(var)] -= 1
    return result


def _begun(record: Record, atoms: Sequence[Any], values: Sequence[Value], path: str) -> list[Value]:
    """What a loop carries, as it begins; zeros are an array there."""
    return [
        record.value(atom, record.dims(atom, value), path) if value.dims is None else value
        for atom, value in zip(atoms, values, strict=True)
    ]


def _ended(
    record: Record,
    kind: str,
    path: str,
    carry: Sequence[Value],
    outs: Sequence[Value],
    times: int,
) -> list[Value]:
    """What a loop carries, as it ends: it lies as it did before."""
    return [
        record.carry(kind, path, before, new, times)
        for before, new in zip(carry, outs, strict=True)
    ]


def _slice(record: Record, var: Any, value: Value, steps: Dim, path: str, at: At) -> Value:
    """What one turn of a loop reads of an array: the dim of turns is needed whole."""
    if value.dims is None:
        return CONSTANT
    along, *rest = value.dims
    record.factors.tie(steps, along)
    one = record.value(var, tuple(rest), path)
    record.add("scan", path, [value], [one], whole=[along], **_where(at))
    return one


def _stacked(
    record: Record,
    var: Any,
    inner: Any,
    value: Value,
    steps: Dim,
    path: str,
    at: At,
    is_kept: bool,
) -> Value:
    """What all turns of a loop give, one beside the other."""
    one = record.value(var, (steps, *record.dims(inner, value)), path)
    record.add("scan", path, [value], [one], is_kept=is_kept, **_where(at))
    return one


_WITH_INNER = {"cond": _cond, "scan": _scan, "while": _while}
