"""What of a jaxpr's equations depends on what."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

Var = Any


def is_literal(atom: Any) -> bool:
    """Whether it is a value that is written into the jaxpr, and no variable."""
    return hasattr(atom, "val")


def variables(atoms: Iterable[Any]) -> list[Var]:
    """The atoms that are not literals."""
    return [atom for atom in atoms if not is_literal(atom)]


def read_instead(atoms: Sequence[Any], instead: Mapping[Var, Var]) -> list[Any]:
    """The atoms, with other variables in place of some."""
    return [atom if is_literal(atom) else instead.get(atom, atom) for atom in atoms]


def reached(eqns: Iterable[Any], inputs: Iterable[Var]) -> set[Var]:
    """All that depends on these variables, and they themselves.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1.0, x * y))(1.0, 2.0).jaxpr
    >>> [var in reached(jaxpr.eqns, jaxpr.invars[1:]) for var in jaxpr.outvars]
    [False, True]
    """
    result = set(inputs)
    for eqn in eqns:
        if not result.isdisjoint(variables(eqn.invars)):
            result.update(eqn.outvars)
    return result


def needed(eqns: Sequence[Any], outputs: Iterable[Any]) -> list[int]:
    """The numbers of the equations that these variables are computed by, in order.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: (x + 1.0, x * 2.0))(1.0).jaxpr
    >>> needed(jaxpr.eqns, jaxpr.outvars[1:])
    [1]
    """
    wanted, numbers = set(variables(outputs)), list[int]()
    for number in reversed(range(len(eqns))):
        if not wanted.isdisjoint(eqns[number].outvars):
            numbers.append(number)
            wanted.update(variables(eqns[number].invars))
    return numbers[::-1]


def needed_behind(
    eqns: Sequence[Any], makers: Mapping[Var, int], outputs: Iterable[Any], stops: Container[Var]
) -> list[int]:
    """The numbers of the equations that compute these variables from ``stops``, in order.

    ``makers`` says which equation makes a variable, so that of a long jaxpr only what is needed is
    looked at.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: jax.numpy.sin(x + 1.0) * 2.0)(1.0).jaxpr
    >>> makers = {var: n for n, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    >>> needed_behind(jaxpr.eqns, makers, jaxpr.outvars, {jaxpr.eqns[0].outvars[0]})
    [1, 2]
    """
    numbers, waiting = set[int](), [var for var in variables(outputs) if var not in stops]
    while waiting:
        number = makers.get(waiting.pop())
        if number is not None and number not in numbers:
            numbers.add(number)
            waiting += [var for var in variables(eqns[number].invars) if var not in stops]
    return sorted(numbers)
