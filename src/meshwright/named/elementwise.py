"""Element-wise operations: dims are matched by name, missing ones are broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArrayError, DimError
from ..layouts.dim_rules import Dims, DimsLike, text_of
from .arguments import dtype_of
from .array import NamedArray, as_named, spread, union
from .operation import example, named_operation, operation
from .reductions import dims_among


def joined(*several: Dims, what: str) -> Dims:
    """The dims of an element-wise result, in Mesh-TensorFlow's order.

    Of two, those of the one that has the other's in order; else the first's and then what is new.
    """
    result: Dims = several[0] if several else ()
    for dims in several[1:]:
        together = union(result, dims, what=what)
        result = dims if len(together) == len(dims) and _in_order(result, dims) else together
    return result


def _in_order(some: Sequence[Any], of: Sequence[Any]) -> bool:
    rest = iter(of)
    return all(element in rest for element in some)


def apply(
    function: Callable[..., Any], *xs: Any, out: DimsLike | None = None, what: str = "result"
) -> NamedArray:
    """A function of bare arrays that broadcasts as NumPy's do, applied by name."""
    arrays = [x if _is_plain(x) else as_named(x) for x in xs]
    several = [() if _is_plain(x) else x.dims for x in arrays]
    dims = joined(*several, what=what)
    if out is not None:
        dims = _ordered(dims, dims_among(out, dims), what)
    result = function(*(x if _is_plain(x) else spread(x, dims) for x in arrays))
    if getattr(result, "shape", None) != (shape := tuple(dim.size for dim in dims)):
        have = {dim for own in several for dim in own}
        _check_result(result, tuple(dim.size if dim in have else 1 for dim in dims), what)
        result = jnp.broadcast_to(result, shape)
    lie = [x._rules for x, own in zip(arrays, several, strict=True) if own and own == dims]
    return NamedArray(result, dims, lie[0] if lie and all(by is lie[0] for by in lie) else None)


def _check_result(result: Any, shape: tuple[int, ...], what: str) -> None:
    """Raise :class:`ArrayError` for what no function of each element gives."""
    if getattr(result, "shape", None) != shape:
        gives = type(result).__name__
        if hasattr(result, "shape"):
            gives = f"an array of shape {tuple(result.shape)}"
        raise ArrayError(
            f"{what}: the function gives {gives} where its operands together have shape {shape}: "
            "it is to give one array, of a number for each element. Reductions and products have "
            "functions of their own, such as reduce_sum and einsum."
        )


def _is_plain(x: Any) -> bool:
    """Python's own numbers stay what they are: they change no element type."""
    return isinstance(x, (bool, int, float, complex))


def _ordered(dims: Dims, out: Dims, what: str) -> Dims:
    missing = [dim for dim in dims if dim not in out]
    if missing:
        raise DimError(
            f"{what}: out=[{text_of(out)}] lacks {text_of(missing)}, which the operands have. "
            "Name every dim; their order is free."
        )
    return out


def _unary(
    name: str, function: Callable[..., Any], says: str, values: str, result: str
) -> Callable[..., NamedArray]:
    def call(x: Any, **options: Any) -> NamedArray:
        return apply(lambda a: function(a, **options), x, what=name)

    sample = example(f"mn.{name}({_named(values)})", result)
    return named_operation(call, name, f"{says}, of each element of ``x``; dims stay.{sample}")


def _binary(
    name: str, function: Callable[..., Any], says: str, first: str, second: str, result: str
) -> Callable[..., NamedArray]:
    def call(x: Any, y: Any, *, out: DimsLike | None = None) -> NamedArray:
        return apply(function, x, y, out=out, what=name)

    sample = example(f"mn.{name}({_named(first)}, {_named(second)})", result)
    return named_operation(call, name, f"{says}, {_BY_NAME}{sample}")


def _named(values: str) -> str:
    return f"mn.named([{values}], 'x:{values.count(',') + 1}')"


_BY_NAME = (
    "element by element; dims of ``x`` and ``y`` are matched by name, missing ones are broadcast."
    "\n\n``out`` may give the result's dims another order: ``'io batch'``."
)

exp = _unary("exp", jnp.exp, "The exponential", "0.0, 1.0", "[1.   2.72]")
log = _unary("log", jnp.log, "The natural logarithm", "1.0, 10.0", "[0.  2.3]")
log1p = _unary("log1p", jnp.log1p, "The logarithm of one more", "0.0, 1.0", "[0.   0.69]")
sqrt = _unary("sqrt", jnp.sqrt, "The square root", "4.0, 9.0", "[2. 3.]")
rsqrt = _unary("rsqrt", jax.lax.rsqrt, "One over the square root", "4.0, 1.0", "[0.5 1. ]")
square = _unary("square", jnp.square, "The square", "-3.0, 2.0", "[9. 4.]")
reciprocal = _unary("reciprocal", jnp.reciprocal, "One over the value", "4.0, 0.5", "[0.25 2.  ]")
sin = _unary("sin", jnp.sin, "The sine", "0.0, 1.0", "[0.   0.84]")
cos = _unary("cos", jnp.cos, "The cosine", "0.0, 2.0", "[ 1.   -0.42]")
tanh = _unary("tanh", jnp.tanh, "The hyperbolic tangent", "0.0, 1.0", "[0.   0.76]")
sigmoid = _unary("sigmoid", jax.nn.sigmoid, "The logistic function", "0.0, 2.0", "[0.5  0.88]")
relu = _unary("relu", jax.nn.relu, "The larger of the value and zero", "-1.0, 2.0", "[0. 2.]")
leaky_relu = _unary(
    "leaky_relu",
    jax.nn.leaky_relu,
    "The value, or a small part of it below zero",
    "-2.0, 2.0",
    "[-0.02  2.  ]",
)
elu = _unary("elu", jax.nn.elu, "The exponential linear unit", "-1.0, 2.0", "[-0.63  2.  ]")
selu = _unary(
    "selu", jax.nn.selu, "The scaled exponential linear unit", "-1.0, 2.0", "[-1.11  2.1 ]"
)
gelu = _unary("gelu", jax.nn.gelu, "The Gaussian error linear unit", "-1.0, 1.0", "[-0.16  0.84]")
swish = _unary(
    "swish",
    jax.nn.swish,
    "The value times its logistic function",
    "-2.0, 2.0",
    "[-0.24  1.76]",
)
softplus = _unary(
    "softplus",
    jax.nn.softplus,
    "The logarithm of one plus the exponential",
    "0.0, 1.0",
    "[0.69 1.31]",
)
absolute = _unary("absolute", jnp.abs, "The absolute value", "-3.0, 2.0", "[3. 2.]")
negative = _unary(
    "negative", jnp.negative, "The value with its sign changed", "-3.0, 2.0", "[ 3. -2.]"
)
sign = _unary("sign", jnp.sign, "The sign", "-3.0, 2.0", "[-1.  1.]")
floor = _unary(
    "floor", jnp.floor, "The largest whole number that is not above", "-1.5, 1.5", "[-2.  1.]"
)
ceil = _unary(
    "ceil", jnp.ceil, "The smallest whole number that is not below", "-1.5, 1.5", "[-1.  2.]"
)
is_finite = _unary(
    "is_finite", jnp.isfinite, "Whether the value is finite", "1.0, jnp.inf", "[ True False]"
)
logical_not = _unary(
    "logical_not", jnp.logical_not, "The opposite truth value", "True, False", "[False  True]"
)

add = _binary("add", jnp.add, "The sum", "1, 2", "10, 20", "[11 22]")
subtract = _binary("subtract", jnp.subtract, "The difference", "10, 20", "1, 2", "[ 9 18]")
multiply = _binary("multiply", jnp.multiply, "The product", "2, 3", "4, 5", "[ 8 15]")
divide = _binary("divide", jnp.divide, "The quotient", "1, 6", "4, 3", "[0.25 2.  ]")
floor_divide = _binary(
    "floor_divide", jnp.floor_divide, "The quotient, rounded down", "7, -7", "2, 2", "[ 3 -4]"
)
mod = _binary("mod", jnp.mod, "The remainder, of the divisor's sign", "7, -7", "3, 3", "[1 2]")
power = _binary(
    "power", jnp.power, "The first to the power of the second", "2.0, 3.0", "3.0, 2.0", "[8. 9.]"
)
minimum = _binary("minimum", jnp.minimum, "The smaller", "1, 5", "3, 3", "[1 3]")
maximum = _binary("maximum", jnp.maximum, "The larger", "1, 5", "3, 3", "[3 5]")
equal = _binary("equal", jnp.equal, "Whether the two are equal", "1, 2", "1, 3", "[ True False]")
not_equal = _binary(
    "not_equal", jnp.not_equal, "Whether the two differ", "1, 2", "1, 3", "[False  True]"
)
less = _binary("less", jnp.less, "Whether the first is smaller", "1, 3", "2, 3", "[ True False]")
less_equal = _binary(
    "less_equal", jnp.less_equal, "Whether the first is not larger", "1, 3", "2, 2", "[ True False]"
)
greater = _binary(
    "greater", jnp.greater, "Whether the first is larger", "1, 3", "2, 3", "[False False]"
)
greater_equal = _binary(
    "greater_equal",
    jnp.greater_equal,
    "Whether the first is not smaller",
    "1, 3",
    "2, 3",
    "[False  True]",
)
logical_and = _binary(
    "logical_and",
    jnp.logical_and,
    "Whether both hold",
    "True, False",
    "True, True",
    "[ True False]",
)
logical_or = _binary(
    "logical_or",
    jnp.logical_or,
    "Whether one of them holds",
    "True, False",
    "False, False",
    "[ True False]",
)


@operation
def stop_gradient(x: Any) -> NamedArray:
    """The array ``x`` as a constant: no gradient goes through it.

    >>> import meshwright.named as mn
    >>> x = mn.named([2.0, 3.0], "x:2")
    >>> print(mn.grad(lambda x: mn.reduce_sum(x * mn.stop_gradient(x)))(x).array)
    [2. 3.]
    """
    return apply(jax.lax.stop_gradient, x, what="stop_gradient")


@operation
def where(condition: Any, x: Any, y: Any, *, out: DimsLike | None = None) -> NamedArray:
    """``x`` where the ``condition`` holds and ``y`` elsewhere; dims are matched by name.

    ``out`` may give the result's dims another order.

    >>> import meshwright.named as mn
    >>> x = mn.named([-1.0, 2.0], "x:2")
    >>> print(mn.where(x > 0, x, 0.0).array)
    [0. 2.]
    """
    return apply(jnp.where, condition, x, y, out=out, what="where")


@operation
def cast(x: Any, dtype: Any) -> NamedArray:
    """The array ``x`` with another element type, ``dtype``.

    >>> import meshwright.named as mn
    >>> print(mn.cast(mn.named([1.5, 2.0], "x:2"), "int32").array)
    [1 2]
    """
    dtype = dtype_of(dtype)
    return apply(lambda a: a.astype(dtype), x, what="cast")


@operation
def clip(x: Any, low: Any, high: Any) -> NamedArray:
    """Each element of ``x``, moved between ``low`` and ``high``.

    >>> import meshwright.named as mn
    >>> print(mn.clip(mn.named([-1.0, 0.5, 3.0], "x:3"), 0.0, 1.0).array)
    [0.  0.5 1. ]
    """
    return apply(jnp.clip, x, low, high, what="clip")


@operation
def elementwise(function: Callable[..., Any], *xs: Any, out: DimsLike | None = None) -> NamedArray:
    """Any function of bare arrays that works element by element and broadcasts as NumPy's do.

    Raises :class:`ArrayError` for one that gives anything but a number for each element.

    >>> from meshwright.named import named
    >>> print(elementwise(jnp.hypot, named(jnp.ones(2) * 3, "x:2"), 4.0).array)
    [5. 5.]
    """
    return apply(function, *xs, out=out, what="elementwise")


_OPERATORS = {
    "add": add, "sub": subtract, "mul": multiply, "truediv": divide, "floordiv": floor_divide,
    "mod": mod, "pow": power, "and": logical_and, "or": logical_or,
}  # fmt: skip
_COMPARISONS = {
    "eq": equal, "ne": not_equal, "lt": less, "le": less_equal, "gt": greater, "ge": greater_equal,
}  # fmt: skip


def _give_operators() -> None:
    """``x + y`` and the like: the operations of this file, as methods of a named array."""
    for name, function in {**_OPERATORS, **_COMPARISONS}.items():
        setattr(NamedArray, f"__{name}__", _forward(function))
    for name, function in _OPERATORS.items():
        setattr(NamedArray, f"__r{name}__", _backward(function))
    for name, function in {"neg": negative, "abs": absolute, "invert": logical_not}.items():
        setattr(NamedArray, f"__{name}__", lambda self, function=function: function(self))
    NamedArray.__array_ufunc__ = _of_numpy  # also what a NumPy number left of an operator asks


def _of_numpy(self: NamedArray, ufunc: Any, method: str, *xs: Any, **options: Any) -> Any:
    """NumPy's functions: those of each element by name, as here; of all elements, their number."""
    function = getattr(jnp, ufunc.__name__, None)
    if method == "__call__" and function and ufunc.signature is None and not options:
        return elementwise(function, *xs)
    if method == "reduce" and options.get("axis") is None:
        return ufunc.reduce(np.asarray(self), **options)
    return NotImplemented


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(self, other)


def _backward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(other, self)


_give_operators()
