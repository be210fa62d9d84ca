"""Sums made in the type that is wanted of them, before they are rounded to a narrower one.

A gradient computed in bfloat16 is summed over the devices in bfloat16 and then made float32, for
XLA adds in the type that it is given. Here the product, convolution or sum yields float32 itself,
so what travels and is added is float32: as exact as on one device, at twice the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..jaxprs.edits import count_uses, edited

_PRODUCTS = ("dot_general", "conv_general_dilated")
_MOVES = ("transpose", "reshape", "squeeze", "rev")  # say nothing of the type


def summed_in(function: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """The same function of pytrees; sums that are made ``dtype`` afterwards are made in it.

    >>> import jax, jax.numpy as jnp
    >>> def product(x, y):
    ...     return (x @ y).astype("float32")
    >>> x = jnp.ones([4, 4], "bfloat16")
    >>> print(jax.make_jaxpr(summed_in(product, "float32"))(x, x).eqns[0].outvars[0].aval.dtype)
    float32
    """
    return edited(function, lambda jaxpr: _widened(jaxpr, dtype))


def _widened(jaxpr: Any, dtype: str) -> Any:
    uses = count_uses(jaxpr)
    makes = {var: number for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    eqns: list[list[Any]] = [[eqn] for eqn in jaxpr.eqns]
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "convert_element_type" or str(eqn.params["new_dtype"]) != dtype:
            continue
        chain = _chain(eqn.invars[0], jaxpr.eqns, makes, uses)
        wide = None
        for link in chain:
            eqns[link] = _wide(jaxpr.eqns[link], eqn, wide)
            wide = eqns[link][-1].outvars[0]
        if chain:  # the last of them yields what was converted
            last = eqns[chain[-1]]
            last[-1] = last[-1].replace(outvars=eqn.outvars)
            eqns[number] = []
    return jaxpr.replace(eqns=[eqn for group in eqns for eqn in group])


def _wide(eqn: Any, convert: Any, operand: Any | None) -> list[Any]:
    """The equations that yield the same as ``eqn`` in the type of ``convert``."""
    dtype = convert.params["new_dtype"]
    outvars = [_var_like(eqn.outvars[0], dtype)]
    if operand is not None:
        return [eqn.replace(invars=[operand, *eqn.invars[1:]], outvars=outvars)]
    if eqn.primitive.name in _PRODUCTS:
        params = {**eqn.params, "preferred_element_type": dtype}
        return [eqn.replace(params=params, outvars=outvars)]
    before = _var_like(eqn.invars[0], dtype)
    return [
        convert.replace(invars=eqn.invars, outvars=[before]),
        eqn.replace(invars=[before], outvars=outvars),
    ]


def _var_like(var: Any, dtype: Any) -> Any:
    from jax.extend.core import Var

    return Var(var.aval.update(dtype=dtype))


def _chain(var: Any, eqns: list[Any], makes: dict[Any, int], uses: Any) -> list[int]:
    """The sum that ``var`` was moved from, and the moves after it; empty if there is none."""
    chain: list[int] = []
    while (number := makes.get(var)) is not None and uses[var] == 1:
        eqn = eqns[number]
        chain.append(number)
        if eqn.primitive.name in (*_PRODUCTS, "reduce_sum"):
            return chain[::-1]
        if eqn.primitive.name not in _MOVES:
            return []
        var = eqn.invars[0]
    return []
