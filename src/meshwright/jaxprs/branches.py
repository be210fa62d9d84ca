"""Branches of ``lax.cond`` and ``lax.switch`` that lay their results out each in its own way.

XLA refuses a conditional whose branches end in two layouts, as an internal error of its verifier.
It is only the last word of a branch that counts: behind a layout that says nothing, what a branch
has asked of its values still holds inside it, and where the result lies is left to XLA.
"""

from __future__ import annotations

from typing import Any

from .edits import constraint_on


def with_free_results(jaxpr: Any) -> Any:
    """The open jaxpr, in which no branch ends in a layout.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> mesh = mw.create_mesh({"batch": 4, "model": 2})
    >>> layouts = mw.Layout(["batch"], mesh), mw.Layout(["model"], mesh)
    >>> branches = [lambda x, lay=lay: mw.relayout(x, lay) for lay in layouts]
    >>> traced = jax.make_jaxpr(lambda x: jax.lax.cond(x[0] > 0, *branches, x))(jnp.ones(8))
    >>> cond = with_free_results(traced.jaxpr).eqns[-1]
    >>> [len(branch.jaxpr.eqns) for branch in cond.params["branches"]]
    [2, 2]
    """
    eqns = [_freed(eqn) if eqn.primitive.name == "cond" else eqn for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns)


def _freed(cond: Any) -> Any:
    branches = [
        branch.replace(jaxpr=_results_freed(with_free_results(branch.jaxpr)))
        for branch in cond.params["branches"]
    ]
    return cond.replace(params={**cond.params, "branches": tuple(branches)})


def _results_freed(jaxpr: Any) -> Any:
    constraints = {
        var: eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "sharding_constraint"
        for var in eqn.outvars
    }
    free = {
        var: _says_nothing(eqn)
        for var, eqn in constraints.items()
        if any(var is result for result in jaxpr.outvars)
    }
    return jaxpr.replace(
        eqns=[*jaxpr.eqns, *free.values()],
        outvars=[
            free[var].outvars[0] if any(var is result for result in free) else var
            for var in jaxpr.outvars
        ],
    )


def _says_nothing(constraint: Any) -> Any:
    """A constraint on the result of another that leaves every dim to XLA."""
    from jax.sharding import PartitionSpec

    (value,) = constraint.outvars
    free = [PartitionSpec.UNCONSTRAINED] * value.aval.ndim
    return constraint_on(value, constraint.params["sharding"].mesh, free, constraint)
