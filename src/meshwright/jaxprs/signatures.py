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
    return signs_and_forms(eqns)[0]


def signs_and_forms(eqns: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The same, and a number per equation for which the values of literals do not count either.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: x * 2.0 * 3.0)(1.0)
    >>> [numbers.tolist() for numbers in signs_and_forms(jaxpr.eqns)]
    [[0, 1], [0, 0]]
    """
    signs: dict[Any, int] = {}
    forms: dict[Any, int] = {}
    words: dict[int, tuple[Any, str]] = {}  # the object as well, so that its id stays its own
    pairs = []
    for eqn in eqns:
        form = forms.setdefault(_form(eqn, words), len(forms))
        pairs.append((signs.setdefault((form, _literals(eqn)), len(signs)), form))
    columns = np.array(pairs, int).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _form(eqn: Any, words: dict[int, tuple[Any, str]]) -> tuple[Any, ...]:
    return (
        eqn.primitive.name,
        tuple((name, _word(value, words)) for name, value in sorted(eqn.params.items())),
        tuple(f"{atom.aval}{'=' * hasattr(atom, 'val')}" for atom in eqn.invars),
        tuple(str(outvar.aval) for outvar in eqn.outvars),
    )


def _literals(eqn: Any) -> tuple[str, ...]:
    return tuple(repr(atom.val) for atom in eqn.invars if hasattr(atom, "val"))


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
