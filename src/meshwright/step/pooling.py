"""Gradients of maximum pooling, which XLA's CPU compiler takes four times longer for than need be.

It selects and scatters window by window. Where windows do not overlap, the same comes of comparing
every element with the maximum of its window, in loops that are fused: a step of a small
convolutional net took less than half the time. Of several equal maxima the first gets the gradient,
as before.
"""

from __future__ import annotations

from typing import Any

from ..jaxprs.edits import call_of


def pooled_by_comparison(jaxpr: Any) -> Any:
    """The jaxpr with such gradients taken by comparison.

    >>> import jax, jax.numpy as jnp
    >>> from meshwright.jaxprs.edits import edited
    >>> def pool(x):
    ...     return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID").sum()
    >>> x = jnp.array([1.0, 3.0, 4.0, 4.0])
    >>> print(edited(jax.grad(pool), pooled_by_comparison)(x))
    [0. 1. 1. 0.]
    """
    return jaxpr.replace(eqns=[_compared(e) if _is_apart(e) else e for e in jaxpr.eqns])


def _is_apart(eqn: Any) -> bool:
    """Whether an equation is the gradient of a maximum over windows that lie side by side."""
    if eqn.primitive.name != "select_and_scatter_add":
        return False
    import jax.numpy as jnp

    params, operand = eqn.params, eqn.invars[1].aval
    window, dims = params["window_dimensions"], operand.shape
    return (
        params["select_prim"].name == "ge"
        and jnp.issubdtype(operand.dtype, jnp.floating)
        and tuple(params["window_strides"]) == tuple(window)
        and not any(before or after for before, after in params["padding"])
        and all(size % across == 0 for size, across in zip(dims, window, strict=True))
    )


def _compared(eqn: Any) -> Any:
    """One equation, a call, that yields the same."""
    import jax

    window = tuple(eqn.params["window_dimensions"])

    def pooling_gradient(source: Any, operand: Any) -> Any:
        return _by_comparison(source, operand, window)

    return call_of(jax.jit(pooling_gradient), eqn).replace(ctx=eqn.ctx)


def _by_comparison(source: Any, operand: Any, window: tuple[int, ...]) -> Any:
    import jax
    import jax.numpy as jnp

    pairs = [(size // across, across) for size, across in zip(operand.shape, window, strict=True)]
    split = [size for pair in pairs for size in pair]
    inner = tuple(range(1, len(split), 2))  # the dims of a window
    x = operand.reshape(split)
    number = jnp.zeros([1] * len(split), "int32")
    for dim in inner:
        number = number * split[dim] + jax.lax.broadcasted_iota("int32", split, dim)
    is_largest = x == x.max(inner, keepdims=True)
    first = jnp.where(is_largest, number, jnp.iinfo("int32").max).min(inner, keepdims=True)
    spread = source.reshape([size if i % 2 == 0 else 1 for i, size in enumerate(split)])
    return jnp.where(number == first, spread, 0).astype(source.dtype).reshape(operand.shape)
