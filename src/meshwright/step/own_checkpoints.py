"""Checkpoints that a model has of its own, kept under a ``jax.checkpoint`` around them.

JAX applies the policy of an outer checkpoint inside of inner ones, too: under one that keeps all
but gathered parameters, what a model says to compute again (``jax.checkpoint``, Flax's
``nn.remat``, Keras' ``RematScope``) would be kept.
"""

from __future__ import annotations

from typing import Any

import jax

from .. import _compat
from ..jaxprs.edits import call_of
from ..jaxprs.primitives import CHECKPOINTS


def with_own_checkpoints(jaxpr: Any) -> Any:
    """An open jaxpr into whose checkpoints no policy around it reaches."""
    return jaxpr.replace(eqns=[_apart(eqn) if _is_own(eqn) else eqn for eqn in jaxpr.eqns])


def _is_own(eqn: Any) -> bool:
    return eqn.primitive.name in CHECKPOINTS and not eqn.effects


def _apart(eqn: Any) -> Any:
    """A checkpoint as a function with a gradient of its own: it keeps what its own policy says."""

    def run(*args: Any) -> list[Any]:
        return _compat.evaluate(eqn, list(args))

    unit = jax.custom_vjp(run)
    unit.defvjp(lambda *args: jax.vjp(run, *args), lambda pull, gradients: pull(gradients))
    return call_of(unit, eqn)
