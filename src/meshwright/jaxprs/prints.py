"""Steps without what they print: no function of ``jax.debug`` hands on a value.

They only talk to the host, so a step without them computes the same; but such a call belongs to
the process that traced it, and no other can load the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .edits import equations
from .primitives import PRINTS


def has_prints(jaxpr: Any) -> bool:
    """Whether a jaxpr, or one inside of it, prints."""
    return any(map(_prints, equations(jaxpr)))


def without_prints(function: Callable[..., Any], *args: Any) -> Callable[..., Sequence[Any]]:
    """The function of the leaves of ``args``, arrays or their shapes; it prints nothing."""
    import jax
    from jax.extend.core import jaxpr_as_fun

    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *flat: function(*jax.tree.unflatten(tree, flat)))(*leaves)
    effects = {e for eqn in equations(closed) if _prints(eqn) for e in eqn.effects}
    return jaxpr_as_fun(_silent(closed, frozenset(effects)))


def _prints(eqn: Any) -> bool:
    return eqn.primitive.name in PRINTS


def _silent(value: Any, effects: frozenset[Any]) -> Any:
    """A jaxpr, open or closed, or several, without prints and their effects; others unchanged."""
    if type(value) in (tuple, list):
        return type(value)(_silent(one, effects) for one in value)
    inner = getattr(value, "jaxpr", value)  # of an open one, JAX 0.12 says itself
    if not hasattr(inner, "eqns"):
        return value
    kept = [_without(eqn, effects) for eqn in inner.eqns if not _prints(eqn)]
    silent = inner.replace(eqns=kept, effects=inner.effects - effects)
    return silent if inner is value else value.replace(jaxpr=silent)


def _without(eqn: Any, effects: frozenset[Any]) -> Any:
    if not eqn.effects & effects:
        return eqn
    params = {name: _silent(value, effects) for name, value in eqn.params.items()}
    return eqn.replace(params=params, effects=eqn.effects - effects)
