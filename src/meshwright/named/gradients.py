"""Gradients: of functions with named results, custom, recomputed, reversed and clipped.

``jax.grad`` itself takes named arguments as it is; :func:`grad` also takes a named loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import DimError, ModelError
from ..layouts.dim_rules import text_of
from ..step.remat import BY_BLOCK, check_remat
from .array import NamedArray, as_named, spread
from .operation import callback, is_named, operation


def grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """``jax.grad`` of a function whose result is a named array without dims, or a number.

    Gradients are named and lie as the arguments that they belong to. Raises :class:`DimError` if
    the result has dims.

    >>> from meshwright.named import named, reduce_sum, square
    >>> grad(lambda x: reduce_sum(square(x)))(named(jnp.arange(3.0), "io:3")).array
    Array([0., 2., 4.], dtype=float32)
    """
    both = value_and_grad(function, argnums, has_aux=has_aux)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        value, gradients = both(*args, **options)
        return (gradients, value[1]) if has_aux else gradients

    return call


def value_and_grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """``jax.value_and_grad``, as :func:`grad`; the value is what the ``function`` returned.

    >>> import meshwright.named as mn
    >>> loss = mn.value_and_grad(lambda x: mn.reduce_sum(mn.square(x)))
    >>> value, gradient = loss(mn.named([1.0, 2.0], "io:2"))
    >>> print(value.array, gradient.array)
    5.0 [2. 4.]
    """

    def bare(*args: Any, **options: Any) -> tuple[Any, Any]:
        result = callback(function)(*args, **options)
        if has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise ModelError(
                "with has_aux=True the function returns two things, the value and what goes with "
                f"it; received {type(result).__name__}."
            )
        value = as_named(result[0] if has_aux else result)
        if value.dims:
            raise DimError(
                f"the result has dims [{text_of(value.dims)}]; a gradient is that of one number. "
                "Reduce it with reduce_sum or reduce_mean."
            )
        return value.array, result

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        (_, result), gradients = jax.value_and_grad(bare, argnums, has_aux=True)(*args, **options)
        return result, gradients

    return operation(call)


def custom_gradient(
    function: Callable[..., Any], backward: Callable[[tuple[Any, ...], Any, Any], Any]
) -> Callable[..., Any]:
    """A function with a custom gradient: ``backward(inputs, result, gradient)``.

    ``backward`` gets the inputs, what the function made of them, and the gradient of that; it
    returns the gradients of the inputs, or ``None`` for one of zero. What a gradient is taken of
    has to be an input. Raises :class:`DimError` that names every gradient whose dims are not those
    of its input. (Mesh-TensorFlow's ``custom_gradient``, on ``jax.custom_vjp``.)

    >>> from meshwright.named import named, reduce_sum, sign
    >>> straight_through = custom_gradient(sign, lambda inputs, result, gradient: gradient)
    >>> x = named(jnp.array([-2.0, 3.0]), "io:2")
    >>> grad(lambda x: reduce_sum(straight_through(x)))(x).array
    Array([1., 1.], dtype=float32)
    """
    run = jax.custom_vjp(callback(function))

    def forward(*inputs: Any) -> tuple[Any, Any]:
        result = callback(function)(*inputs)
        return result, (inputs, result)

    def back(residuals: Any, gradient: Any) -> Any:
        inputs, result = residuals
        gradients = callback(backward)(inputs, result, gradient)
        several = gradients if isinstance(gradients, tuple) else (gradients,)
        if len(several) != len(inputs):
            raise ModelError(
                f"custom_gradient: the backward function returns {len(several)} gradients for "
                f"{len(inputs)} inputs. Return one for each, None where it is zero."
            )
        return _fitting(several, inputs)

    run.defvjp(forward, back)

    @functools.wraps(function)
    def call(*inputs: Any) -> Any:
        return run(*inputs)

    return operation(call)


def remat(
    function: Callable[..., Any], policy: str | Callable[..., Any] = "nothing_saveable"
) -> Callable[..., Any]:
    """The function, with what is inside it computed again in the backward pass, and not kept.

    ``policy`` says what is still kept: one of ``jax.checkpoint_policies`` that takes no
    arguments, by name, or any policy. Raises :class:`ModelError` for another name. (Chen et al.
    2016; Mesh-TensorFlow's ``recompute_grad``, on ``jax.checkpoint``.)

    >>> import meshwright.named as mn
    >>> layer = mn.remat(lambda x: mn.tanh(mn.sin(x)), "dots_saveable")
    >>> print(mn.grad(lambda x: mn.reduce_sum(layer(x)))(mn.named([0.0], "io:1")).array)
    [1.]
    """
    if isinstance(policy, str):
        if policy in ("none", *BY_BLOCK) or check_remat(policy):
            raise ModelError(
                f"unknown policy {policy!r}: expected one of jax.checkpoint_policies that takes no "
                "arguments, such as 'nothing_saveable' or 'dots_saveable', or the policy itself."
            )
        policy = getattr(jax.checkpoint_policies, policy)
    again = jax.checkpoint(callback(function), policy=policy)  # type: ignore[arg-type]

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return again(*args, **options)

    return operation(call)


def reversible(blocks: Sequence[Callable[[Any, NamedArray], NamedArray]]) -> Callable[..., Any]:
    """A stack of residual blocks that keeps nothing between them for the backward pass.

    It is called with the parameters of each block and two arrays; each block turns ``x1, x2`` into
    ``x2, x1 + block(params, x2)``. The backward pass finds a block's inputs again by subtraction,
    so memory does not grow with depth, and each block is computed twice. What a gradient is taken
    of has to be in the parameters. Raises :class:`DimError` for a block whose result has other dims
    than what it is added to. (Gomez et al. 2017, "The Reversible Residual Network";
    Mesh-TensorFlow's ``reversible_half_residual_and_swap``.)

    >>> from meshwright.named import named, tanh
    >>> halves = reversible([lambda w, x: tanh(x * w)] * 2)
    >>> x, w = named(jnp.ones(2), "io:2"), named(jnp.zeros(2), "io:2")
    >>> [y.array.tolist() for y in halves([w, w], x, 2 * x)]
    [[1.0, 1.0], [2.0, 2.0]]
    """
    blocks = tuple(blocks)

    @jax.custom_vjp
    def run(params: Any, x1: NamedArray, x2: NamedArray) -> tuple[NamedArray, NamedArray]:
        for i, (block, some) in enumerate(zip(blocks, params, strict=True)):
            x1, x2 = x2, x1 + _added(block, i, x1)(some, x2)
        return x1, x2

    def forward(params: Any, x1: NamedArray, x2: NamedArray) -> Any:
        result = run(params, x1, x2)
        return result, (params, result)

    def backward(residuals: Any, gradients: Any) -> Any:
        params, result = residuals
        # Without the barrier XLA keeps the last block's values, which it can see are the same.
        y1, y2 = jax.lax.optimization_barrier(result)
        g1, g2 = gradients
        of_params = []
        for i, block in reversed(list(enumerate(blocks))):
            added, pulled = jax.vjp(_added(block, i, y2), params[i], y1)
            of_some, of_x2 = pulled(g2)
            of_params.append(of_some)
            y1, y2 = y2 - added, y1
            g1, g2 = g2, g1 + of_x2
        return type(params)(of_params[::-1]), g1, g2

    run.defvjp(forward, backward)

    def reversible_stack(params: Sequence[Any], x1: NamedArray, x2: NamedArray) -> Any:
        if len(params) != len(blocks):
            raise ModelError(
                f"reversible: {len(blocks)} blocks take as many parameters, one each; "
                f"received {len(params)}."
            )
        return run(list(params), x1, x2)

    return operation(reversible_stack)


@operation
def clip_activation_gradient(x: NamedArray, rms: float) -> NamedArray:
    """The array as it is; the gradient that reaches it is made smaller if it is large.

    Its root mean square over all elements is then at most ``rms``, its direction what it was.
    ``x`` is the array. Raises :class:`ModelError` for an ``rms`` below 0. (Mesh-TensorFlow's
    operation.)

    >>> import meshwright.named as mn
    >>> def loss(x):
    ...     return mn.reduce_sum(mn.clip_activation_gradient(x, 0.5) * 8)
    >>> print(mn.grad(loss)(mn.named([1.0, 2.0], "io:2")).array)
    [0.5 0.5]
    """

    if isinstance(rms, (int, float)) and not rms >= 0:
        raise ModelError(
            f"clip_activation_gradient: rms={rms!r} is the largest root mean square, at least 0."
        )

    def backward(inputs: Any, result: Any, gradient: NamedArray) -> NamedArray:
        wide = gradient.array.astype(jnp.promote_types(gradient.dtype, jnp.float32))
        largest = jnp.maximum(jnp.max(jnp.abs(wide)), jnp.finfo(wide.dtype).tiny)
        # What explodes is to be clipped, so no square may overflow.
        root_mean_square = largest * jnp.sqrt(jnp.mean(jnp.square(wide / largest)))
        clipped = wide * jnp.minimum(1, rms / root_mean_square)
        return NamedArray(clipped.astype(gradient.dtype), gradient.dims)

    return custom_gradient(lambda x: x, backward)(x)


def _added(
    block: Callable[[Any, NamedArray], NamedArray], place: int, to: NamedArray
) -> Callable[[Any, NamedArray], NamedArray]:
    """The block, with its result's dims and type those of what it is added to."""

    def call(params: Any, x: NamedArray) -> NamedArray:
        y = callback(block)(params, x)
        if set(y.dims) != set(to.dims):
            raise DimError(
                f"reversible: block {place} gives [{text_of(y.dims)}], which is added to "
                f"[{text_of(to.dims)}]; a residual block's result has the dims of its sum."
            )
        return NamedArray(spread(y, to.dims).astype(to.dtype), to.dims)

    return call


def _fitting(gradients: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients with dims in the order of their inputs'."""
    faults: list[str] = []

    def in_order(place: int, path: Any, x: Any, gradient: Any) -> Any:
        if gradient is None or not is_named(x):
            return gradient  # None is zero for JAX
        if not is_named(gradient):
            if jnp.shape(gradient) == x.array.shape:
                return gradient
            gradient = as_named(gradient)
        if set(x.dims) == set(gradient.dims):
            return NamedArray(spread(gradient, x.dims), x.dims)
        what = f"input {place}{jax.tree_util.keystr(path)} [{text_of(x.dims)}]"
        faults.append(f"custom_gradient: {what} has the gradient [{text_of(gradient.dims)}].")
        return gradient

    def is_like(x: Any, gradient: Any) -> bool:
        try:
            parts = jax.tree.structure(x, is_leaf=is_named).flatten_up_to(gradient)
        except (TypeError, ValueError):
            return False
        return not any(isinstance(part, list | tuple | dict) for part in parts)

    def ordered(place: int, x: Any, gradient: Any) -> Any:
        ordered_leaf = functools.partial(in_order, place)
        if gradient is None:
            return None
        if not is_like(x, gradient):
            faults.append(
                f"custom_gradient: the gradient of input {place} is a {type(gradient).__name__} "
                f"of another form than the input, which is a {type(x).__name__}."
            )
            return gradient
        return jax.tree_util.tree_map_with_path(ordered_leaf, x, gradient, is_leaf=is_named)

    pairs = zip(inputs, gradients, strict=True)
    in_dims = tuple(ordered(place, x, gradient) for place, (x, gradient) in enumerate(pairs))
    if faults:
        raise DimError("\n".join(faults) + "\nA gradient has the dims of its input.")
    return in_dims
