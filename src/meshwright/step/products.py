"""Products computed the way round in which they are wanted, not computed and then transposed.

The gradient of a kernel comes out of differentiation as the transpose of a product. Where the rows
of a batch are split, the sum over the devices stands between the two, so XLA cannot join them:
every device goes through the whole gradient once more, against the grain of its memory. On CPU that
was a fifth of a step of a dense net.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..jaxprs.edits import count_uses, edited


def in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of pytrees, with no transposed product where one the other way round does.

    >>> import jax, jax.numpy as jnp
    >>> def transposed(x, y):
    ...     return (x @ y).T
    >>> x, y = jnp.ones([2, 3]), jnp.ones([3, 4])
    >>> [e.primitive.name for e in jax.make_jaxpr(transposed)(x, y).eqns]
    ['dot_general', 'transpose']
    >>> [e.primitive.name for e in jax.make_jaxpr(in_order(transposed))(x, y).eqns]
    ['dot_general']
    """
    return edited(function, ordered)


def ordered(jaxpr: Any) -> Any:
    """The same of an open jaxpr."""
    uses = count_uses(jaxpr)
    products = {
        eqn.outvars[0]: number
        for number, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive.name == "dot_general" and uses[eqn.outvars[0]] == 1
    }
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        number = products.get(eqn.invars[0]) if eqn.primitive.name == "transpose" else None
        if number is not None and _swaps_sides(jaxpr.eqns[number], eqn.params["permutation"]):
            eqn, eqns[number] = _other_way_round(jaxpr.eqns[number], eqn.outvars), None
        eqns.append(eqn)
    return jaxpr.replace(eqns=[eqn for eqn in eqns if eqn is not None])


def _swaps_sides(product: Any, permutation: tuple[int, ...]) -> bool:
    """Whether a transposition only puts the right operand's dims before the left one's."""
    asked = product.params.get("out_sharding")
    if asked is not None and any(asked.spec):  # an explicitly sharded product stays as it is
        return False
    (contracted, _), (shared, _) = product.params["dimension_numbers"]
    first = len(shared)
    left = product.invars[0].aval.ndim - len(contracted)
    rank = len(permutation)
    return tuple(permutation) == (*range(first), *range(left, rank), *range(first, left))


def _other_way_round(product: Any, outvars: list[Any]) -> Any:
    params = dict(product.params)
    params["dimension_numbers"] = tuple(pair[::-1] for pair in params["dimension_numbers"])
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    return product.replace(invars=product.invars[::-1], outvars=outvars, params=params)
