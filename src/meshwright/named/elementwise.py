"""Element-wise operations: dims are matched by name, missing ones are broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import DimError
from ..layouts.dim_rules import Dims, DimsLike, text_of
from .array import NamedArray, as_named, spread, union
from .operation import named_operation, operation
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
    if result.shape != (shape := tuple(dim.size for dim in dims)):
        result = jnp.broadcast_to(result, shape)
    lie = [x._laid for x, own in zip(arrays, several, strict=True) if own and own == dims]
    return NamedArray(result, dims, lie[0] if lie and all(by is lie[0] for by in lie) else None)


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


def _unary(name: str, function: Callable[..., Any], says: str) -> Callable[..., NamedArray]:
    def call(x: Any, **options: Any) -> NamedArray:
        return apply(lambda a: function(a, **options), x, what=name)

    return named_operation(call, name, f"{says}, of each element; dims stay.")


def _binary(name: str, function: Callable[..., Any], says: str) -> Callable[..., NamedArray]:
    def call(x: Any, y: Any, *, out: DimsLike | None = None) -> NamedArray:
        return apply(function, x, y, out=out, what=name)

    return named_operation(call, name, f"{says}, {_BY_NAME}")


_BY_NAME = (
    "element by element; dims are matched by name, missing ones are broadcast."
    "\n\n``out`` may give the result's dims another order: ``'io batch'``."
)

exp = _unary("exp", jnp.exp, "The exponential")
log = _unary("log", jnp.log, "The natural logarithm")
log1p = _unary("log1p", jnp.log1p, "The logarithm of one more")
sqrt = _unary("sqrt", jnp.sqrt, "The square root")
rsqrt = _unary("rsqrt", jax.lax.rsqrt, "One over the square root")
square = _unary("square", jnp.square, "The square")
reciprocal = _unary("reciprocal", jnp.reciprocal, "One over the value")
sin = _unary("sin", jnp.sin, "The sine")
cos = _unary("cos", jnp.cos, "The cosine")
tanh = _unary("tanh", jnp.tanh, "The hyperbolic tangent")
sigmoid = _unary("sigmoid", jax.nn.sigmoid, "The logistic function")
relu = _unary("relu", jax.nn.relu, "The larger of the value and zero")
leaky_relu = _unary("leaky_relu", jax.nn.leaky_relu, "The value, or a small part of it below zero")
elu = _unary("elu", jax.nn.elu, "The exponential linear unit")
selu = _unary("selu", jax.nn.selu, "The scaled exponential linear unit")
gelu = _unary("gelu", jax.nn.gelu, "The Gaussian error linear unit")
swish = _unary("swish", jax.nn.swish, "The value times its logistic function")
softplus = _unary("softplus", jax.nn.softplus, "The logarithm of one plus the exponential")
absolute = _unary("absolute", jnp.abs, "The absolute value")
negative = _unary("negative", jnp.negative, "The value with its sign changed")
sign = _unary("sign", jnp.sign, "The sign")
floor = _unary("floor", jnp.floor, "The largest whole number that is not above")
ceil = _unary("ceil", jnp.ceil, "The smallest whole number that is not below")
is_finite = _unary("is_finite", jnp.isfinite, "Whether the value is finite")
logical_not = _unary("logical_not", jnp.logical_not, "The opposite truth value")
stop_gradient = _unary("stop_gradient", jax.lax.stop_gradient, "The value, held as constant")

add = _binary("add", jnp.add, "The sum")
subtract = _binary("subtract", jnp.subtract, "The difference")
multiply = _binary("multiply", jnp.multiply, "The product")
divide = _binary("divide", jnp.divide, "The quotient")
floor_divide = _binary("floor_divide", jnp.floor_divide, "The quotient, rounded down")
mod = _binary("mod", jnp.mod, "The remainder, of the divisor's sign")
power = _binary("power", jnp.power, "The first to the power of the second")
minimum = _binary("minimum", jnp.minimum, "The smaller")
maximum = _binary("maximum", jnp.maximum, "The larger")
equal = _binary("equal", jnp.equal, "Whether the two are equal")
not_equal = _binary("not_equal", jnp.not_equal, "Whether the two differ")
less = _binary("less", jnp.less, "Whether the first is smaller")
less_equal = _binary("less_equal", jnp.less_equal, "Whether the first is not larger")
greater = _binary("greater", jnp.greater, "Whether the first is larger")
greater_equal = _binary("greater_equal", jnp.greater_equal, "Whether the first is not smaller")
logical_and = _binary("logical_and", jnp.logical_and, "Whether both hold")
logical_or = _binary("logical_or", jnp.logical_or, "Whether one of them holds")


@operation
def where(condition: Any, x: Any, y: Any, *, out: DimsLike | None = None) -> NamedArray:
    """``x`` where the condition holds and ``y`` elsewhere; dims are matched by name."""
    return apply(jnp.where, condition, x, y, out=out, what="where")


@operation
def cast(x: Any, dtype: Any) -> NamedArray:
    """The array with another element type."""
    return apply(lambda a: a.astype(dtype), x, what="cast")


@operation
def clip(x: Any, low: Any, high: Any) -> NamedArray:
    """Each element, moved between ``low`` and ``high``."""
    return apply(jnp.clip, x, low, high, what="clip")


@operation
def elementwise(function: Callable[..., Any], *xs: Any, out: DimsLike | None = None) -> NamedArray:
    """Any function of bare arrays that works element by element and broadcasts as NumPy's do.

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
