"""How many floating-point operations a traced step asks for: those of products and convolutions.

Everything else (activations, losses, the optimizer) is small beside them and left out, as is usual
for "model FLOPs"; what a recomputing step does twice is counted twice.
"""

from __future__ import annotations

import math
from typing import Any

from .._compat import devices_by_hand
from .jaxprs import jaxprs_inside

_UNSEEN = ("custom_call", "ffi_call", "pallas_call")


def model_flops(jaxpr: Any) -> float | None:
    """Operations of one call, on all devices together; ``None`` where that cannot be known.

    It cannot be for loops that end by a condition on values, and for kernels written by hand.

    >>> import jax, jax.numpy as jnp
    >>> model_flops(jax.make_jaxpr(lambda x: x @ x)(jnp.ones([64, 64]))) == 2 * 64**3
    True
    """
    total = 0.0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        flops = equation_flops(eqn)
        if flops is None:
            return None
        total += flops
    return total


def equation_flops(eqn: Any) -> float | None:
    """The same of one equation of a jaxpr, with what it calls."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        return product_flops(eqn)
    if name == "conv_general_dilated":
        return _convolution(eqn)
    if name in _UNSEEN:
        return None
    inner = [model_flops(each) for each in jaxprs_inside(eqn)]
    known = [flops for flops in inner if flops is not None]
    if len(known) < len(inner):
        return None
    if name == "while":
        return 0.0 if sum(known) == 0 else None
    if name == "cond":
        return max(known, default=0.0)
    if name == "shard_map":
        return devices_by_hand(eqn) * sum(known)
    return (params["length"] if name == "scan" else 1) * sum(known)


def product_flops(eqn: Any) -> float:
    """Floating-point operations of one ``dot_general``."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    return 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)


def _convolution(eqn: Any) -> float:
    """Each output element takes one product per element of its filter.

    The gradient of a strided one is a convolution over rows with zeros between: they do not count.
    """
    filters = eqn.invars[1].aval.shape
    features = filters[eqn.params["dimension_numbers"].rhs_spec[0]]
    per_output = math.prod(filters) / features / math.prod(eqn.params["lhs_dilation"])
    return 2.0 * per_output * math.prod(eqn.outvars[0].aval.shape)
