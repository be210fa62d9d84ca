"""Metrics of several batches at once, where each batch only adds to what was counted before.

Keras' metrics are sums: of losses, of hits, of rows. Taken batch by batch, the same operations on a
few numbers come once per batch, and on small models to start them costs more than they do. Here
what each batch adds is computed for all of them together and added once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..jaxprs.edits import count_uses
from ..jaxprs.evaluation import Values, bound, read, take
from ..jaxprs.slices import is_literal, reached, variables

Counts = dict[str, Any]
Count = Callable[[Counts, Any], tuple[Counts, Any]]


def counted(count: Count) -> Count:
    """``count(counts, batch) -> (counts, others)`` for batches stacked along a new first dim.

    Returns the last counts and the last others, as if the batches had been counted in turn, but
    for the rounding of sums; where counts are not only added to, they are.

    >>> import jax.numpy as jnp
    >>> def count(counts, rows):
    ...     hits = counts["hits"] + jnp.sum(rows > 0)
    ...     return {"hits": hits}, {"mean": hits / rows.size, "least": jnp.min(rows)}
    >>> counts, others = counted(count)({"hits": jnp.zeros([])}, jnp.arange(6.0).reshape(3, 2))
    >>> float(counts["hits"]), float(others["mean"]), float(others["least"])
    (5.0, 2.5, 4.0)
    """

    def run(counts: Counts, batches: Any) -> tuple[Counts, Any]:
        number = len(jax.tree.leaves(batches)[0])
        apart = [jax.tree.map(lambda a, i=i: a[i], batches) for i in range(number)]
        closed, shapes = jax.make_jaxpr(count, return_shape=True)(counts, apart[0])
        sums = _Sums.found_in(closed, len(counts))
        if sums is None:
            return _in_turn(count, counts, apart)
        added = jax.vmap(sums.added)(jax.tree.leaves(batches))
        results = sums.after(jax.tree.leaves(counts), added, jax.tree.leaves(apart[-1]))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _in_turn(count: Count, counts: Counts, batches: Sequence[Any]) -> tuple[Counts, Any]:
    others = None
    for batch in batches:
        counts, others = count(counts, batch)
    return counts, others


@dataclass(frozen=True, eq=False)
class _Sums:
    """A jaxpr whose first arguments are counts, and the additions that make new ones of them."""

    closed: Any
    counts: int
    additions: dict[Any, Any]  # variable of a count -> the equation that adds to it
    touched: set[Any]  # variables that depend on counts

    @classmethod
    def found_in(cls, closed: Any, counts: int) -> _Sums | None:
        """``None`` where a count is read or written in another way than by one addition."""
        jaxpr = closed.jaxpr
        if jaxpr.effects:
            return None
        uses, old = count_uses(jaxpr), jaxpr.invars[:counts]
        makes = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        touched = reached(jaxpr.eqns, old)
        additions = {}
        for before, after in zip(old, jaxpr.outvars[:counts], strict=True):
            if after is before:
                continue
            eqn = None if is_literal(after) else makes.get(after)
            if eqn is None or eqn.primitive.name != "add" or uses[before] != 1:
                return None
            others = [v for v in eqn.invars if v is not before]
            if len(others) != 1 or not touched.isdisjoint(variables(others)):
                return None
            additions[before] = eqn
        return cls(closed, counts, additions, touched)

    def added(self, batch: Sequence[Any]) -> list[Any]:
        """What one batch adds to each count that is added to."""
        env = self._bound([None] * self.counts, batch)
        untouched = [e for e in self.closed.eqns if self.touched.isdisjoint(e.outvars)]
        take(untouched, env)
        additions = self.additions.items()
        return read((next(v for v in eqn.invars if v is not old) for old, eqn in additions), env)

    def after(self, counts: Sequence[Any], added: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """All results after all batches, of which this is the last."""
        env = self._bound(counts, batch)
        for (before, eqn), some in zip(self.additions.items(), added, strict=True):
            env[eqn.outvars[0]] = env[before] + some.sum(0, dtype=some.dtype)
        rest = [eqn for eqn in self.closed.eqns if eqn.outvars[0] not in env]
        take(rest, env)
        return read(self.closed.jaxpr.outvars, env)

    def _bound(self, counts: Sequence[Any], batch: Sequence[Any]) -> Values:
        return bound(self.closed.jaxpr, self.closed.consts, [*counts, *batch])
