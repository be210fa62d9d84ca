"""What an equation does, as a number: equal for equations that do the same to arrays alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_LONGEST = 64  # elements of an array in a parameter that is compared by its values


def signs_of(eqns: Sequence[Any]) -> np.ndarray:
    """A number per equation; the names of its variables and its name scopes do not count.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(jnp.sin(x))))(1.0)
    >>> signs_of(jaxpr.eqns).tolist()
    [0, 1, 0]
    """
    numbers: dict[Any, int] = {}
    words: dict[int, tuple[Any, str]] = {}  # the object as well, so that its id stays its own
    return np.array([numbers.setdefault(_sign(eqn, words), len(numbers)) for eqn in eqns], int)


def _sign(eqn: Any, words: dict[int, tuple[Any, str]]) -> tuple[Any, ...]:
    params = tuple((name, _word(value, words)) for name, value in sorted(eqn.params.items()))
    return (
        eqn.primitive.name,
        params,
        tuple(_atom(invar) for invar in eqn.invars),
        tuple(str(outvar.aval) for outvar in eqn.outvars),
    )


def _atom(atom: Any) -> str:
    literal = f"={atom.val!r}" if hasattr(atom, "val") else ""
    return f"{atom.aval}{literal}"


def _word(value: Any, words: dict[int, tuple[Any, str]]) -> str:
    """A parameter in words; those of jaxprs are long, and many equations share one."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if id(value) not in words:
        words[id(value)] = value, _in_words(value, words)
    return words[id(value)][1]


def _in_words(value: Any, words: dict[int, tuple[Any, str]]) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_word(part, words) for part in value)})"
    if isinstance(value, np.ndarray) and value.size <= _LONGEST:
        return repr(value.tolist())
    if callable(value) and not isinstance(value, type):  # a rule of differentiation
        inner = getattr(value, "f", value)
        return f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner))}"
    return _ADDRESS.sub("", str(value))
