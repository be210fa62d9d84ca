"""How many floating-point operations a traced step asks for: those of products and convolutions.

Everything else (activations, losses, the optimizer) is small beside them and left out, as is usual
for "model FLOPs"; what a recomputing step does twice is counted twice.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._compat import devices_by_hand, without_dead_code
from .edits import jaxprs_inside

_UNSEEN = ("custom_call", "ffi_call", "pallas_call")


def model_flops(jaxpr: Any, *, in_padding: bool = True) -> float | None:
    """Operations of one call, on all devices together; ``None`` where that cannot be known.

    It cannot be for loops that end by a condition on values, and for kernels written by hand.
    Places of a convolution's window that lie on padding count, as is usual, unless ``in_padding``
    is false.

    >>> import jax, jax.numpy as jnp
    >>> model_flops(jax.make_jaxpr(lambda x: x @ x)(jnp.ones([64, 64]))) == 2 * 64**3
    True
    """
    total = 0.0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        flops = equation_flops(eqn, in_padding=in_padding)
        if flops is None:
            return None
        total += flops
    return total


def least_flops(jaxpr: Any) -> float | None:
    """The fewest operations that a compiler can leave of one call: those of what its results
    depend on, without padding."""
    return model_flops(without_dead_code(jaxpr), in_padding=False)


def equation_flops(eqn: Any, *, in_padding: bool = True) -> float | None:
    """The same of one equation of a jaxpr, with what it calls."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        return product_flops(eqn)
    if name == "ragged_dot_general":
        return _ragged_product(eqn)
    if name == "conv_general_dilated":
        return _convolution(eqn) * (1.0 if in_padding else _share_on_elements(eqn))
    if name in _UNSEEN:
        return None
    inner = [model_flops(jaxpr, in_padding=in_padding) for jaxpr in jaxprs_inside(eqn)]
    countable = [flops for flops in inner if flops is not None]
    if len(countable) < len(inner):
        return None
    if name == "while":
        return 0.0 if sum(countable) == 0 else None
    if name == "cond":
        return max(countable, default=0.0)
    if name == "shard_map":
        return devices_by_hand(eqn) * sum(countable)
    return (params["length"] if name == "scan" else 1) * sum(countable)


def product_flops(eqn: Any) -> float:
    """Floating-point operations of one ``dot_general``."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    return 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)


def _ragged_product(eqn: Any) -> float:
    """Each row is multiplied by the weights of its own group; what a compiler multiplies beside
    that, where it has no kernel for groups, does not count.

    The gradient by the weights sums over the rows of a group, so that no row counts for two.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    is_summed = bool({*numbers.lhs_ragged_dimensions} & {*contracted})
    groups = eqn.outvars[0].aval.shape[0] if is_summed else 1
    return 2.0 * depth * math.prod(eqn.outvars[0].aval.shape) / max(1, groups)


def flops_between_groups(eqn: Any) -> float:
    """What a compiler computes in vain of a convolution whose rows are in groups, if it convolves
    each group with every other one too, and keeps those of a group with itself.

    The gradient by a depthwise filter is such a convolution, and XLA for CPU computes it so.
    """
    groups = eqn.params.get("batch_group_count", 1)
    return (groups - 1) * (equation_flops(eqn, in_padding=False) or 0.0) if groups > 1 else 0.0


def _convolution(eqn: Any) -> float:
    """Each output element takes one product per element of its filter.

    The gradient of a strided one is a convolution over rows with zeros between: they do not count.
    """
    filters = eqn.invars[1].aval.shape
    features = filters[eqn.params["dimension_numbers"].rhs_spec[0]]
    per_output = math.prod(filters) / features / math.prod(eqn.params["lhs_dilation"])
    return 2.0 * per_output * math.prod(eqn.outvars[0].aval.shape)


def _share_on_elements(eqn: Any) -> float:
    """The share of the places of its window that lie on elements of the image."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    image, filters = (var.aval.shape for var in eqn.invars[:2])
    results = eqn.outvars[0].aval.shape
    share = 1.0
    for i, (low, _) in enumerate(params["padding"]):
        size, out = image[numbers.lhs_spec[2 + i]], results[numbers.out_spec[2 + i]]
        window, spread = filters[numbers.rhs_spec[2 + i]], params["lhs_dilation"][i]
        outputs = params["window_strides"][i] * np.arange(out)[:, None]
        at = outputs + params["rhs_dilation"][i] * np.arange(window)[None, :] - low
        on = (at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)
        # What lies between the rows of a dilated image is left out of the whole already.
        share *= on.sum() * spread / max(1, on.size)
    return min(1.0, float(share))
