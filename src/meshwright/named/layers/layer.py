"""What layers have in common: parameters outside, ``rules=``, and inputs that must fit.

A layer is a frozen dataclass of dims and choices. ``init(key)`` makes its parameters, a dict of
named arrays; calling it with them and an input computes. Nothing is kept inside, so every layer
works under ``jit``, ``grad``, ``scan`` and ``jax.checkpoint`` as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp

from ...errors import DimError
from ...layouts.dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from ..array import NamedArray, using
from ..operation import checked, checks_of, operation

Params = dict[str, Any]  # named arrays, and dicts of them
_F = TypeVar("_F", bound=Callable[..., Any])


class Layer(Protocol):
    """What a model takes as a feed-forward layer: :class:`FeedForward` is one.

    A layer with a loss of its own, such as the balance of a mixture of experts, returns a tuple
    that begins ``(output, loss)``. That loss is a named array without dims; it is added to the
    model's. A layer that differs between training and evaluation in more than dropout takes
    ``training=`` by this name: models then ask their caller for it. A layer that takes
    ``present=`` gets a mask of the tokens that are not padding, where the model has one.

    >>> import meshwright.named as mn
    >>> class Scale:
    ...     def init(self, key):
    ...         return {"scale": mn.named(jnp.full([4], 2.0), "d_model:4")}
    ...
    ...     def __call__(self, params, x, *, key=None):
    ...         return x * params["scale"]
    >>> layer = Scale()
    >>> layer(layer.init(None), mn.named(jnp.ones([4]), "d_model:4")).array.tolist()
    [2.0, 2.0, 2.0, 2.0]
    """

    def init(self, key: Any) -> Params: ...

    def __call__(
        self, params: Params, x: NamedArray, *, key: Any = None
    ) -> NamedArray | tuple[NamedArray, ...]: ...


def takes(layer: Any, option: str) -> bool:
    """Whether a layer has an option of this name, such as ``training``."""
    return option in inspect.signature(layer.__call__).parameters


def under_rules(function: _F) -> _F:
    """Give a function ``rules=``, which are in force while it runs: the context's explicit twin."""
    checks = checks_of(function)

    @functools.wraps(function)
    def call(*args: Any, rules: Any = None, **options: Any) -> Any:
        args, options = checked(checks, args, options)
        if rules is None:
            return function(*args, **options)
        with using(rules):
            return function(*args, **options)

    return call  # type: ignore[return-value]


def as_dim(dim: str | Dim, what: str) -> Dim:
    """One dim, from ``"d_model:64"`` or itself. Raises :class:`DimError` for none or several."""
    dims = as_dims(dim) if isinstance(dim, (str, Dim)) else ()
    if len(dims) != 1:
        raise DimError(f"{what} is one dim, such as 'd_model:64'; received {dim!r}.")
    return dims[0]


def pick(
    dims: DimsLike, names: Iterable[str], what: str, spare: Iterable[str] = ()
) -> dict[str, Dim]:
    """Dims by name; those that are ``spare`` may be missing.

    Raises :class:`DimError` that lists every name that is missing or unknown.
    """
    by_name, names = {dim.name: dim for dim in as_dims(dims)}, tuple(names)
    missing = [name for name in names if name not in by_name and name not in spare]
    unknown = [name for name in by_name if name not in names]
    if missing or unknown:
        faults = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
        faults += [f"has no use for {', '.join(map(repr, unknown))}"] if unknown else []
        raise DimError(
            f"{what} {' and '.join(faults)} in [{text_of(by_name.values())}]: "
            f"its dims are {', '.join(map(repr, names))}."
        )
    return by_name


def fit(x: NamedArray, what: str, *, needs: Dims = (), makes: Dims = ()) -> None:
    """Raise :class:`DimError` if the input lacks what a layer sums over, or has what it makes."""
    have = {dim.name: dim for dim in x.dims}
    lacks = [dim for dim in needs if dim.name not in have]
    other = [dim for dim in needs if dim.name in have and have[dim.name] != dim]
    twice = [dim for dim in makes if dim.name in have and dim not in needs]
    faults = [f"it lacks {text_of(lacks)}"] if lacks else []
    faults += [f"its {have[dim.name]} should be {dim}" for dim in other]
    faults += [f"it has {text_of(twice)} already, which the layer makes"] if twice else []
    if faults:
        raise DimError(
            f"{what} does not fit its input [{text_of(x.dims)}]: {'; '.join(faults)}. "
            "Rename or resize the input's dims, or the layer's."
        )


def without(dims: Dims, others: Iterable[Dim]) -> Dims:
    """The dims that are not among ``others``, in order."""
    others = tuple(others)
    return tuple(dim for dim in dims if dim not in others)


def in_dtype(x: NamedArray, dtype: Any) -> NamedArray:
    """The array in this element type, and itself where it has it."""
    return x if x.dtype == dtype else NamedArray(x.array.astype(dtype), x.dims)


def widened(x: NamedArray) -> NamedArray:
    """The array in float32, or in its own type where that is wider."""
    return in_dtype(x, jnp.promote_types(x.dtype, jnp.float32))


@operation
def filled(dims: DimsLike, value: float, dtype: Any = None) -> NamedArray:
    """An array that holds one value, of its own type or of this one."""
    dims = as_dims(dims)
    return NamedArray(jnp.full([dim.size for dim in dims], value, dtype), dims)


@operation
def zeros(dims: DimsLike) -> NamedArray:
    dims = as_dims(dims)
    return NamedArray(jnp.zeros([dim.size for dim in dims], jnp.float32), dims)


@operation
def ones(dims: DimsLike) -> NamedArray:
    dims = as_dims(dims)
    return NamedArray(jnp.ones([dim.size for dim in dims], jnp.float32), dims)
