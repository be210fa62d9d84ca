"""The gradient of a program's loss, with the sums and products in it as a mesh wants them.

The gradient of a kernel comes out of differentiation as the transpose of a product. Where the rows
of a batch are split, the sum over the devices stands between the two, so XLA cannot join them:
every device goes through the whole gradient once more, against the grain of its memory. On CPU that
was a fifth of a step of a dense net. :func:`in_order` computes the product the other way round.

A gradient computed in bfloat16 is summed over the devices in bfloat16 and then made float32, for
XLA adds in the type that it is given. With :func:`summed_in` the product, convolution or sum yields
float32 itself: as exact as on one device, at twice the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ModelError
from ..jaxprs.branches import with_free_results
from ..jaxprs.edits import count_uses, edited
from ..jaxprs.primitives import MOVES, PRODUCTS
from ..program import Arrays, Aux, Batch, Program, TrainState
from .platform import traced_for
from .pooling import pooled_by_comparison

Gradient = Callable[[Arrays, TrainState, Batch], tuple[Aux, Arrays]]


def gradient(
    program: Program, share: float = 1.0, *, sums: str | None = None, splits_rows_only: bool = False
) -> Gradient:
    """The pure function ``(params, state, batch) -> (aux, gradients)`` of the training loss.

    ``share`` is how much of the loss counts; ``sums`` is the element type in which gradients are
    summed, where it is not the one they are computed in. Where ``splits_rows_only``, a mesh splits
    no dim of images but their rows in the batch, and gradients of pooling are taken as is best.
    """

    def loss(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
        value, aux = program.loss(params, whole, batch, True)
        return value if share == 1 else share * value, aux

    def differentiated(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Aux, Arrays]:
        import jax

        check_dtypes(params)
        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, whole, batch)
        return aux, grads

    def edit(jaxpr: Any) -> Any:
        if splits_rows_only and traced_for() == "cpu":
            jaxpr = pooled_by_comparison(jaxpr)
        return with_free_results(_ordered(jaxpr))

    derivative = edited(differentiated, edit)
    return derivative if sums is None else summed_in(derivative, sums)


def check_dtypes(params: Arrays) -> None:
    """Raise :class:`~meshwright.ModelError` for parameters that have no gradient."""
    import jax.numpy as jnp

    fixed = [
        f"{path} ({value.dtype})"
        for path, value in params.items()
        if not jnp.issubdtype(value.dtype, jnp.inexact)
    ]
    if fixed:
        raise ModelError(
            f"parameters must be floating-point numbers to be trained; received {', '.join(fixed)}."
            " Leave them out of params (flax.nnx.split, equinox.partition): the loss can close over"
            " those that never change, and takes the others as jax_program(..., state=...)."
        )


# Products the other way round


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
    return edited(function, _ordered)


def _ordered(jaxpr: Any) -> Any:
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
    sharding = product.params.get("out_sharding")
    if sharding is not None and any(sharding.spec):  # an explicitly sharded product stays as it is
        return False
    (contracted, _), (shared, _) = product.params["dimension_numbers"]
    first = len(shared)
    free = product.invars[0].aval.ndim - len(contracted)
    rank = len(permutation)
    return tuple(permutation) == (*range(first), *range(free, rank), *range(first, free))


def _other_way_round(product: Any, outvars: list[Any]) -> Any:
    params = dict(product.params)
    params["dimension_numbers"] = tuple(pair[::-1] for pair in params["dimension_numbers"])
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    return product.replace(invars=product.invars[::-1], outvars=outvars, params=params)


# Sums in a wider type


def summed_in(function: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """The same function of pytrees; sums that are converted to ``dtype`` are computed in it.

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
    """The equations that compute ``eqn`` in the type that ``convert`` converts to."""
    dtype = convert.params["new_dtype"]
    outvars = [_var_like(eqn.outvars[0], dtype)]
    if operand is not None:
        return [eqn.replace(invars=[operand, *eqn.invars[1:]], outvars=outvars)]
    if eqn.primitive.name in PRODUCTS:
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
        if eqn.primitive.name in PRODUCTS | {"reduce_sum"}:
            return chain[::-1]
        if eqn.primitive.name not in MOVES:
            return []
        var = eqn.invars[0]
    return []
