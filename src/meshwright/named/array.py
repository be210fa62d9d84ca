"""The named array: a ``jax.Array`` whose dims have names, and a pytree, which all of JAX takes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import _compat
from ..errors import ArrayError, DimError
from ..layouts.dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from .arguments import bare_array
from .rules import BoundRules, bound, in_force, inside_operation, under


@jax.tree_util.register_pytree_with_keys_class
class NamedArray:
    """A ``jax.Array`` and a name for each of its dims; made by :func:`named`.

    ``array`` and ``dims`` lead back. Operators are element-wise and match dims by name. Inside
    ``jax.vmap`` and ``jax.lax.scan`` the leading dim is the one that is taken away.

    >>> import meshwright.named as mn
    >>> x, y = mn.named([1, 2], "batch:2"), mn.named([10, 20], "io:2")
    >>> (x + y).shape, (x + y).array.tolist()
    ({'batch': 2, 'io': 2}, [[11, 21], [12, 22]])
    """

    __slots__ = ("_dims", "_rules", "array")
    array: Any
    _dims: Dims
    _rules: BoundRules | None  # the rules that the array is known to lie by

    def __init__(self, array: Any, dims: Dims, rules: BoundRules | None = None) -> None:
        self.array, self._dims, self._rules = array, dims, rules

    @property
    def dims(self) -> Dims:
        """The dims, outermost first. Raises :class:`DimError` if they are not the array's."""
        dims, shape = self._dims, self.array.shape
        if len(shape) < len(dims):
            dims = dims[len(dims) - len(shape) :]  # vmap and scan take the leading dim away
        if shape != tuple([dim.size for dim in dims]):  # a list: it is asked for very often
            raise DimError(
                f"the array has shape {tuple(shape)} and is named [{text_of(self._dims)}]: "
                "a function that knows no names, such as jax.vmap or jax.tree.map, has changed its "
                "shape. Use meshwright.named's own, or name it again: named(x.array, ...)."
            )
        return dims

    @property
    def dtype(self) -> Any:
        """The element type."""
        return self.array.dtype

    @property
    def shape(self) -> dict[str, int]:
        """Sizes by name.

        >>> named(jnp.ones([8, 2]), "batch:8 io:2").shape
        {'batch': 8, 'io': 2}
        """
        return {dim.name: dim.size for dim in self.dims}

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.array.size

    def dim(self, name: str | Dim) -> Dim:
        """The dim of this name. Raises :class:`DimError` if there is none, or of another size."""
        return find(self.dims, name)

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.array,), self._dims

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        return ((jax.tree_util.GetAttrKey("array"), self.array),), self._dims

    @classmethod
    def tree_unflatten(cls, dims: Dims, children: Any) -> NamedArray:
        return cls(children[0], dims)

    def __repr__(self) -> str:
        dtype = getattr(self.array, "dtype", "?")
        return f"NamedArray([{text_of(self._dims)}], {dtype})\n{self.array!r}"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.array, dtype)

    def __jax_array__(self) -> Any:
        # Not an error at once: an operator of a JAX array asks as well, and then leaves it to ours.
        return _ForJax(self)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __float__(self) -> float:
        return float(self.array)

    def __int__(self) -> int:
        return int(self.array)

    __hash__ = None  # type: ignore[assignment]

    if TYPE_CHECKING:  # operators, which elementwise.py gives, and x[...], which indexing.py does
        __array_ufunc__: Any

        def __add__(self, other: Any) -> NamedArray: ...
        def __sub__(self, other: Any) -> NamedArray: ...
        def __mul__(self, other: Any) -> NamedArray: ...
        def __truediv__(self, other: Any) -> NamedArray: ...
        def __floordiv__(self, other: Any) -> NamedArray: ...
        def __mod__(self, other: Any) -> NamedArray: ...
        def __pow__(self, other: Any) -> NamedArray: ...
        def __and__(self, other: Any) -> NamedArray: ...
        def __or__(self, other: Any) -> NamedArray: ...
        def __radd__(self, other: Any) -> NamedArray: ...
        def __rsub__(self, other: Any) -> NamedArray: ...
        def __rmul__(self, other: Any) -> NamedArray: ...
        def __rtruediv__(self, other: Any) -> NamedArray: ...
        def __rfloordiv__(self, other: Any) -> NamedArray: ...
        def __rmod__(self, other: Any) -> NamedArray: ...
        def __rpow__(self, other: Any) -> NamedArray: ...
        def __rand__(self, other: Any) -> NamedArray: ...
        def __ror__(self, other: Any) -> NamedArray: ...
        def __lt__(self, other: Any) -> NamedArray: ...
        def __le__(self, other: Any) -> NamedArray: ...
        def __gt__(self, other: Any) -> NamedArray: ...
        def __ge__(self, other: Any) -> NamedArray: ...
        def __neg__(self) -> NamedArray: ...
        def __abs__(self) -> NamedArray: ...
        def __invert__(self) -> NamedArray: ...
        def __getitem__(self, where: Any) -> NamedArray: ...

        # methods.py
        def __matmul__(self, other: Any) -> NamedArray: ...
        def __rmatmul__(self, other: Any) -> NamedArray: ...
        def sum(self, over: Any = None, *, rules: Any = None) -> NamedArray: ...
        def mean(self, over: Any = None, *, rules: Any = None) -> NamedArray: ...
        def max(self, over: Any = None, *, rules: Any = None) -> NamedArray: ...
        def min(self, over: Any = None, *, rules: Any = None) -> NamedArray: ...
        def prod(self, over: Any = None, *, rules: Any = None) -> NamedArray: ...
        def all(self, over: Any = None, *, rules: Any = None) -> NamedArray: ...
        def any(self, over: Any = None, *, rules: Any = None) -> NamedArray: ...
        def argmax(self, over: Any, *, rules: Any = None) -> NamedArray: ...
        def argmin(self, over: Any, *, rules: Any = None) -> NamedArray: ...
        def reshape(self, dims: Any, *, rules: Any = None) -> NamedArray: ...
        def rename(self, names: Any, new: Any = None, *, rules: Any = None) -> NamedArray: ...
        def transpose(self, order: Any, *, rules: Any = None) -> NamedArray: ...
        def broadcast(self, dims: Any, *, rules: Any = None) -> NamedArray: ...
        def astype(self, dtype: Any, *, rules: Any = None) -> NamedArray: ...
        def item(self) -> Any: ...


class _ForJax:
    """A named array as JAX's functions see it: they cannot use it, and the error says what can."""

    def __init__(self, x: NamedArray) -> None:
        self._x = x

    def __jax_array__(self) -> Any:
        return self._x.array  # jnp.asarray alone asks again

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __str__(self) -> str:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise DimError(
            f"a function of jax.numpy received the named array [{text_of(self._x._dims)}] and does "
            "not know names. Use the function of meshwright.named (mn.exp, mn.elementwise(function,"
            " x)), or take the bare array, x.array."
        )


def named(array: Any, dims: DimsLike, *, rules: Any = None) -> NamedArray:
    """The array with names for its dims, laid out by the rules in force.

    ``dims`` is a string such as ``"batch:64 io:16"``, or dims. Raises :class:`ArrayError` if sizes
    and shape differ, and for what no array can be made of.

    >>> x = named(jnp.ones([8, 2]), "batch:8 io:2")
    >>> x.dims
    (Dim(name='batch', size=8), Dim(name='io', size=2))
    """
    array = array.array if isinstance(array, NamedArray) else bare_array(array)
    dims = as_dims(dims)
    if array.shape != tuple(dim.size for dim in dims):
        raise ArrayError(
            f"the array has shape {tuple(array.shape)}, which is not [{text_of(dims)}]."
        )
    x = NamedArray(array, dims)
    if inside_operation.get():
        return x
    with using(rules):
        return lay_out(x, "array")


def using(rules: Any) -> Any:
    """The context of an explicit ``rules=``; of none, that which is there."""
    return contextlib.nullcontext() if rules is None else under(bound(rules))


def lay_out(x: NamedArray, what: str) -> NamedArray:
    """The array where the rules in force put it. Raises :class:`LayoutError` if they cannot."""
    bound = in_force()
    if bound is None or x._rules is bound:
        return x
    dims = x.dims
    layout = bound.layout(dims, what)
    if bound.only_check or (bound.mesh.is_abstract and not isinstance(x.array, Tracer)):
        return x
    return NamedArray(_placed(x.array, layout.sharding), dims, bound)


def _placed(array: Any, sharding: Any) -> Any:
    if isinstance(array, Tracer):
        return _constrained(array, sharding)
    return jax.device_put(array, sharding)


# JAX traces and differentiates it once for all arrays of the same kind, and writes it out.
@functools.partial(_compat.jit_inlined, static_argnums=1)
def _constrained(array: Any, sharding: Any) -> Any:
    return jax.lax.with_sharding_constraint(array, sharding)


def as_named(x: Any) -> NamedArray:
    """A named array as it is; a scalar as one without dims.

    Raises :class:`DimError` for an array without names, and :class:`ArrayError` for what is none.
    """
    if isinstance(x, NamedArray):
        if (bound := in_force()) is not None:
            bound.see(x._dims)  # a dim may be summed over, and be in no result
        return x
    array = bare_array(x)
    if array.ndim:
        raise DimError(
            f"an array of shape {tuple(array.shape)} has no names for its dims: "
            "name them with named(array, 'batch:64 io:16')."
        )
    return NamedArray(array, ())


def name_of(dim: str | Dim) -> str:
    """The name of a dim that may come with its size."""
    return dim.name if isinstance(dim, Dim) else dim


def find(dims: Sequence[Dim], name: str | Dim) -> Dim:
    """The dim of this name, and size if one is given. Raises :class:`DimError` if there is none."""
    label = name_of(name)
    for dim in dims:
        if dim.name == label:
            if isinstance(name, Dim) and name.size != dim.size:
                raise DimError(
                    f"dim {label!r} has size {dim.size} in [{text_of(dims)}], not {name.size}."
                )
            return dim
    raise DimError(f"there is no dim {label!r} in [{text_of(dims)}].")


def position(dims: Sequence[Dim], name: str | Dim) -> int:
    """Where the dim of this name stands. Raises :class:`DimError` if there is none."""
    return list(dims).index(find(dims, name))


def union(*several: Sequence[Dim], what: str) -> Dims:
    """All dims in order of appearance. Raises :class:`DimError` for a name with two sizes."""
    first: dict[str, Dim] = {}
    for dims in several:
        for dim in dims:
            if first.setdefault(dim.name, dim) != dim:
                arrays = ", ".join(f"[{text_of(own)}]" for own in several)
                raise DimError(
                    f"{what}: dim {dim.name!r} has size {first[dim.name].size} and size {dim.size} "
                    f"in {arrays}. Dims of one name are one dim; rename one of them."
                )
    return tuple(first.values())


def spread(x: NamedArray, dims: Sequence[Dim]) -> Any:
    """The bare array with its dims in this order, and of size 1 where it lacks one."""
    have = x.dims
    if have == dims:
        return x.array
    place = {dim.name: i for i, dim in enumerate(have)}
    order = [place[dim.name] for dim in dims if dim.name in place]
    array = x.array if order == sorted(order) else jnp.transpose(x.array, order)
    shape = tuple(have[place[d.name]].size if d.name in place else 1 for d in dims)
    return array if array.shape == shape else jnp.reshape(array, shape)
