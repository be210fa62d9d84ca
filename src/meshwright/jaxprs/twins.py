"""The same equation in two traces of a function, for fewer and for more rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Dim = int | None  # the dim along which the large value goes on; None where both are equal


class RowsMixError(Exception):
    """Some value of the small trace is not the beginning of the large one's; says which."""


class Pair:
    """The same equation in both traces."""

    def __init__(self, small: Any, large: Any, pairs: dict[Any, Any]) -> None:
        self.name: str = small.primitive.name
        if self.name != large.primitive.name or len(small.outvars) != len(large.outvars):
            raise RowsMixError(f"{self.name} is {large.primitive.name} for more rows")
        if small.effects or large.effects:
            raise RowsMixError(f"{self.name} has an effect")
        self.small, self.large = small, large
        self.dims = [
            dim_of_atoms(a, b, pairs) for a, b in zip(small.invars, large.invars, strict=True)
        ]
        self.outs = [
            dim_of(a, b, self.name) for a, b in zip(small.outvars, large.outvars, strict=True)
        ]

    @property
    def params(self) -> dict[str, Any]:
        """Of the equation in the small trace."""
        return self.small.params

    def shape(self, operand: int) -> tuple[int, ...]:
        """The shape of an operand in the small trace."""
        return shape_of(self.small.invars[operand])

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the first result in the small trace."""
        return shape_of(self.small.outvars[0])

    def mixes(self, how: str) -> RowsMixError:
        """The exception for this equation."""
        return RowsMixError(f"{self.name} {how}")

    def need(self, held: bool, how: str) -> None:
        """Raise unless it holds."""
        if not held:
            raise self.mixes(how)

    def need_outs(self, dim: Dim) -> None:
        """Every result goes on along this dim."""
        self.need(all(out == dim for out in self.outs), "moves the rows elsewhere")

    def one(self, *operands: int) -> Dim:
        """The dim of the first operand; the others (all, if none are named) must be equal."""
        others = range(1, len(self.dims))
        self.need(all(self.dims[i] is None for i in operands or others), "of two cut operands")
        return self.dims[0]

    def same(self, *names: str) -> None:
        """These parameters, or all, are the same in both traces."""
        for name in names or self.params:
            if not _same(self.small.params[name], self.large.params[name]):
                raise self.mixes(f"depends on the number of rows by {name}")


def dim_of_atoms(small: Any, large: Any, pairs: dict[Any, Any]) -> Dim:
    """The dim along which one operand goes on in the large trace."""
    from jax.extend.core import Literal

    if isinstance(small, Literal) or isinstance(large, Literal):
        if not (isinstance(small, Literal) and isinstance(large, Literal)):
            raise RowsMixError("the function has another form for more rows")
        if not _same(small.val, large.val):
            raise RowsMixError(f"the literal {small.val} is {large.val} for more rows")
        return None
    if pairs.get(small) is not large:
        raise RowsMixError("the function has another form for more rows")
    return dim_of(small, large, "a value")


def dim_of(small: Any, large: Any, what: str) -> Dim:
    """The dim in which two variables differ; raises if it is more than one, or their type."""
    a, b = shape_of(small), shape_of(large)
    same_type = len(a) == len(b) and str(_dtype(small)) == str(_dtype(large))
    differing = [d for d, (m, n) in enumerate(zip(a, b, strict=same_type)) if m != n]
    if not same_type or len(differing) > 1:
        raise RowsMixError(f"{what} is {small.aval} and {large.aval} for more rows")
    return differing[0] if differing else None


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable."""
    return tuple(getattr(atom.aval, "shape", ()))


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)


def check_constants(small: Sequence[Any], large: Sequence[Any]) -> None:
    """Raise :class:`RowsMixError` unless the constants of two jaxprs are the same."""
    if not _same(tuple(small), tuple(large)):
        raise RowsMixError("a constant depends on the number of rows")


def _same(small: Any, large: Any) -> bool:
    """Whether parameters, literals or constants are the same."""
    import jax
    import numpy as np

    if small is large:
        return True
    if isinstance(small, tuple | list) and isinstance(large, tuple | list):
        return len(small) == len(large) and all(map(_same, small, large))
    if isinstance(small, np.ndarray | jax.Array) and isinstance(large, np.ndarray | jax.Array):
        if jax.numpy.issubdtype(small.dtype, jax.dtypes.prng_key):
            small, large = jax.random.key_data(small), jax.random.key_data(large)
        return small.dtype == large.dtype and np.array_equal(small, large)
    if hasattr(small, "eqns") or hasattr(small, "jaxpr"):
        constants = (tuple(getattr(jaxpr, "consts", ())) for jaxpr in (small, large))
        return str(small) == str(large) and _same(*constants)
    return type(small) is type(large) and bool(small == large or small != small)
