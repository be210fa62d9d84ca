"""Jaxprs computed equation by equation, where each equation may be taken in a way of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import _compat

Values = dict[Any, Any]  # variable -> value
Take = Callable[[Any, list[Any]], Sequence[Any]]  # (equation, its operands) -> its results


def bound(jaxpr: Any, consts: Iterable[Any], args: Iterable[Any]) -> Values:
    """The values of an open jaxpr's own variables, before any equation is taken."""
    return dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))


def read(atoms: Iterable[Any], values: Values) -> list[Any]:
    """The values of variables and literals."""
    return [atom.val if hasattr(atom, "val") else values[atom] for atom in atoms]


def take(eqns: Iterable[Any], values: Values, one: Take = _compat.evaluate) -> None:
    """Take these equations in turn; what they make is added to ``values``."""
    for eqn in eqns:
        values.update(zip(eqn.outvars, one(eqn, read(eqn.invars, values)), strict=True))


def evaluated(
    jaxpr: Any, consts: Iterable[Any], args: Iterable[Any], one: Take = _compat.evaluate
) -> list[Any]:
    """The results of an open jaxpr, each of whose equations ``one`` takes.

    >>> import jax
    >>> closed = jax.make_jaxpr(lambda x: x * 2.0 + 1.0)(3.0)
    >>> def loud(eqn, operands):
    ...     print(eqn.primitive.name, *map(float, operands))
    ...     return _compat.evaluate(eqn, operands)
    >>> [float(result) for result in evaluated(closed.jaxpr, closed.consts, [3.0], loud)]
    mul 3.0 2.0
    add 6.0 1.0
    [7.0]
    """
    values = bound(jaxpr, consts, args)
    take(jaxpr.eqns, values, one)
    return read(jaxpr.outvars, values)
