"""Convolutions that are products: XLA's partitioner computes them wrong where pieces are mapped.

Mapped over pieces of rows, a convolution whose kernel has pieces too becomes one in groups, split
between groups. Where each window is one place, or all of them, XLA takes it, or its derivative, for
a product and forgets the groups (jaxlib 0.10.2).
"""

from __future__ import annotations

from typing import Any, Literal

Kind = Literal["one", "all", "spread"]


def is_product(eqn: Any) -> bool:
    """Whether an equation is a convolution whose windows are one place, or all places, each."""
    if eqn.primitive.name != "conv_general_dilated" or eqn.params["batch_group_count"] > 1:
        return False
    return None not in _kinds(eqn)


def product(eqn: Any, left: Any, right: Any) -> Any:
    """The result of such a convolution, as a product for each group of features."""
    import jax
    import jax.numpy as jnp

    params, numbers, kinds = eqn.params, eqn.params["dimension_numbers"], _kinds(eqn)
    groups = params["feature_group_count"]
    kept, summed, spread = (
        [place for place, of in enumerate(kinds) if of == kind] for kind in ("one", "all", "spread")
    )
    left = jnp.transpose(left, numbers.lhs_spec)  # rows, features, places
    right = jnp.transpose(right, numbers.rhs_spec)  # features out, features in, windows
    left = left.reshape(left.shape[0], groups, -1, *left.shape[2:])
    right = right.reshape(groups, -1, *right.shape[1:])
    right = jnp.flip(right, [3 + place for place in spread])
    left = left.squeeze([3 + place for place in spread])
    right = right.squeeze([3 + place for place in kept])
    alone = [place for place in range(len(kinds)) if place not in spread]
    of_left = [2, *[3 + alone.index(place) for place in summed]]
    alone = [place for place in range(len(kinds)) if place not in kept]
    of_right = [2, *[3 + alone.index(place) for place in summed]]
    out = jax.lax.dot_general(
        left,
        right,
        ((of_left, of_right), ([1], [0])),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )  # groups, rows, places kept, features, places spread
    out = jnp.moveaxis(out, (0, 2 + len(kept)), (1, 2))
    out = out.reshape(out.shape[0], -1, *out.shape[3:])
    out = jnp.expand_dims(out, [out.ndim + number for number in range(len(summed))])
    places = [*kept, *spread, *summed]
    out = jnp.transpose(out, [0, 1, *[2 + places.index(place) for place in range(len(kinds))]])
    return jnp.transpose(out, sorted(range(out.ndim), key=lambda dim: numbers.out_spec[dim]))


def _kinds(eqn: Any) -> list[Kind | None]:
    """How the windows of every place lie: each is one place, or all of them, or one place is spread
    over a whole window; else ``None``."""
    (left, right), params = eqn.invars, eqn.params
    numbers = params["dimension_numbers"]
    along = zip(
        [left.aval.shape[dim] for dim in numbers.lhs_spec[2:]],
        [right.aval.shape[dim] for dim in numbers.rhs_spec[2:]],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    return [_kind(*of) for of in along]


def _kind(
    size: int, window: int, stride: int, padding: tuple[int, int], apart: int, dilation: int
) -> Kind | None:
    if (apart > 1 and size > 1) or (dilation > 1 and window > 1):
        return None
    if tuple(padding) == (0, 0):
        if window == 1 and (stride == 1 or size == 1):
            return "one"
        return "all" if window == size else None
    is_spread = size == 1 and stride == 1 and tuple(padding) == (window - 1, window - 1)
    return "spread" if is_spread else None
