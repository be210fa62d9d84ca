"""What a value is of the rows of a batch: a sum over them, or something in which they meet.

Equations are followed from the rows on, and an answer is given only where it is certain. A mean is
a sum of rows that is divided by a number, as any other sum may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .links import How
from .primitives import inner_jaxprs, links_of, opened
from .slices import Var
from .walk import LOOPS


@dataclass(frozen=True)
class Rows:
    """A value with the rows along one dim, each of which depends on its own row alone."""

    dim: int


@dataclass(frozen=True)
class Sum:
    """A sum over rows; ``scales`` are the numbers that its terms are multiplied by, ``None`` for
    one that is not known."""

    scales: frozenset[float | None]

    @property
    def is_plain(self) -> bool:
        """Whether it is certain that nothing is divided by the number of rows."""
        return self.scales == {1.0}


@dataclass(frozen=True)
class Meeting:
    """Something that is neither by row nor a sum over rows, made by this kind of equation."""

    kind: str


@dataclass(frozen=True)
class _Unknown:
    """Of a batch, and no more is known."""


Of = Rows | Sum | Meeting | _Unknown | None  # None of what no row is read for
_UNKNOWN = _Unknown()
_ONE_BY_ONE = frozenset(  # of which a value of a sum is the sum of values
    ("neg", "convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim",
     "transpose", "copy", "copy_p", "reduce_sum", "slice", "name", "reduce_precision",
     "optimization_barrier", "stop_gradient", "real")
)  # fmt: skip
_BENDS = frozenset(
    ("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sqrt", "rsqrt", "cbrt", "square",
     "integer_pow", "pow", "abs", "sign", "max", "min", "erf", "sin", "cos", "clamp",
     "polynomial")
)  # fmt: skip
_MEETS = frozenset(
    ("reduce_max", "reduce_min", "argmax", "argmin", "reduce_prod", "sort", "cumsum", "cummax",
     "cummin", "cumprod", "cumlogsumexp")
)  # fmt: skip


def of_rows(eqns: Sequence[Any], rows: Mapping[Var, int], output: Any) -> Sum | Meeting | None:
    """What a value is of the rows that variables have along a dim; ``None`` if it is not known.

    >>> import jax, jax.numpy as jnp
    >>> def what(f):
    ...     jaxpr = jax.make_jaxpr(f)(jnp.ones([4, 3])).jaxpr
    ...     return of_rows(jaxpr.eqns, {jaxpr.invars[0]: 0}, jaxpr.outvars[0])
    >>> what(lambda x: jnp.sum(x**2)).is_plain, what(lambda x: jnp.mean(x**2)).is_plain
    (True, False)
    >>> what(lambda x: jnp.sum(x) / jnp.sum(x > 0)), what(lambda x: jnp.sum(x @ x.T))
    (Meeting(kind='div'), Meeting(kind='dot_general'))
    """
    values: dict[Var, Of] = {var: Rows(dim) for var, dim in rows.items()}
    _follow(eqns, values)
    result = None if hasattr(output, "val") else values.get(output)
    return result if isinstance(result, Sum | Meeting) else None


def _follow(eqns: Sequence[Any], values: dict[Var, Of]) -> None:
    for eqn in eqns:
        read = [None if hasattr(atom, "val") else values.get(atom) for atom in eqn.invars]
        if any(of is not None for of in read):
            values.update(zip(eqn.outvars, _results(eqn, read), strict=True))


def _results(eqn: Any, read: list[Of]) -> list[Of]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    inner = [] if name in LOOPS else [j for of in inner_jaxprs(eqn).values() for j in of]
    if len(inner) == 1:
        called = opened(inner[0])
        values = dict(zip(called.invars, read, strict=True))
        _follow(called.eqns, values)
        return [None if hasattr(v, "val") else values.get(v) for v in called.outvars]
    if met := [of for of in read if isinstance(of, Meeting)]:
        return [met[0]] * count
    if any(isinstance(of, _Unknown) for of in read):
        return [_UNKNOWN] * count
    sums = [of for of in read if isinstance(of, Sum)]
    if sums:
        return [_of_sums(eqn, name, read, sums)] * count
    return _by_row(eqn, name, read)


def _of_sums(eqn: Any, name: str, read: list[Of], sums: list[Sum]) -> Of:
    """What is made of sums over rows, maybe with rows beside them."""
    if any(isinstance(of, Rows) for of in read):
        is_known = name in ("add", "sub", "mul", "div")
        return Meeting(name) if is_known else _UNKNOWN
    if name in _ONE_BY_ONE:
        return sums[0]
    if name in ("add", "sub"):
        return Sum(frozenset().union(*(of.scales for of in sums)))
    if name == "mul" and len(sums) == 1:
        return _scaled(sums[0], eqn, 1 - read.index(sums[0]))
    if name == "div" and len(sums) == 1 and read[0] is sums[0]:
        return _scaled(sums[0], eqn, 1)
    return Meeting(name) if name in ("mul", "div") or name in _BENDS else _UNKNOWN


def _scaled(of: Sum, eqn: Any, by: int) -> Sum:
    """A sum times, or by, another operand, whose value may be known."""
    atom = eqn.invars[by]
    number = float(atom.val) if hasattr(atom, "val") and atom.aval.shape == () else None
    if eqn.primitive.name == "div" and number:
        number = 1 / number
    if number is None:
        return Sum(frozenset([None]))
    return Sum(frozenset(None if scale is None else scale * number for scale in of.scales))


def _by_row(eqn: Any, name: str, read: list[Of]) -> list[Of]:
    """What is made of rows alone."""
    places = [(n, of.dim) for n, of in enumerate(read) if isinstance(of, Rows)]
    links = links_of(eqn)
    through = {link for link in links if not set(places).isdisjoint(link.ins)}
    if len(through) > 1 and all(link.how is How.EACH for link in through):
        return [Meeting(name)] * len(eqn.outvars)  # rows with other rows
    if len(through) != 1:
        return [_UNKNOWN] * len(eqn.outvars)
    (link,) = through
    if name in _MEETS and link.how is not How.EACH:
        return [Meeting(name)] * len(eqn.outvars)
    if link.how is How.SUM and not link.outs:
        return [Sum(frozenset([1.0]))] * len(eqn.outvars)
    is_kept = link.how is How.EACH or (link.how is How.MERGE and link.ins[0] in places)
    dims = dict(link.outs[:1] if link.how is How.MERGE else link.outs)
    if not is_kept or len(dims) != len(eqn.outvars):
        return [_UNKNOWN] * len(eqn.outvars)
    return [Rows(dims[n]) for n in range(len(eqn.outvars))]
