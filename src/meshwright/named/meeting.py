"""Products whose result is renamed on the way out, with the communication that this asks for.

A dim that one name splits and the other leaves whole lies differently before and after. Sums over
a split dim are then scattered to where the new name wants them, in place of being summed on every
device and cut; and a dim that is in the product's way is gathered just before it. Backwards, the
one is the other (sequence parallelism, Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..layouts.dim_rules import Dim, Dims
from .array import NamedArray, union
from .pieces import on_pieces, split_of

Product = Callable[..., Any]  # of arrays, the dims to keep, and options: a bare array


@dataclass(frozen=True)
class Meeting:
    """What renaming asks of a product over ``every`` dim that keeps some of them.

    ``gathered`` are dims, by their old names, that would lie along the axis of another dim of the
    product; ``scattered`` are dims whose new name lies along the axis that a sum is split over.
    Both say that axis.
    """

    names: Mapping[str, str]
    split: Mapping[str, str]
    gathered: dict[str, str]
    scattered: dict[str, str]

    @staticmethod
    def of(every: Dims, out_dims: Dims, names: Mapping[str, str]) -> Meeting:
        """The meeting of these dims under the rules in force."""
        if not names:
            return _AS_IT_IS
        axis = {dim.name: _axis(dim) for dim in every}
        gathered, scattered = dict[str, str](), dict[str, str]()
        for dim in (dim for dim in out_dims if dim.name in names):
            others = {axis[other.name] for other in every if other != dim}
            summed = {axis[other.name] for other in every if other not in out_dims}
            old, new = axis[dim.name], _axis(dim.renamed(names[dim.name]))
            if old is not None:
                if old in others:
                    gathered[dim.name] = old
            elif new is not None and new in summed and new not in scattered.values():
                scattered[dim.name] = new
        split = {name: cut for name, cut in axis.items() if cut is not None}
        return Meeting(names, split if gathered or scattered else {}, gathered, scattered)

    def renamed(self, dims: Dims) -> Dims:
        """Dims as they are in the product: those that are gathered have their new names."""
        return tuple(
            dim.renamed(self.names[dim.name]) if dim.name in self.gathered else dim for dim in dims
        )

    def product(
        self, product: Product, arrays: Sequence[NamedArray], out_dims: Dims, **options: Any
    ) -> Any:
        """The bare array of the product: each device's, of its own pieces, where that helps."""
        if not self.split:
            return product(arrays, out_dims, **options)
        (result,) = on_pieces(
            _local,
            arrays,
            self.split,
            [out_dims],
            self._after(out_dims),
            product=product,
            dims=tuple(tuple(dim.name for dim in x.dims) for x in arrays),
            equal=self._equal(arrays),
            out_dims=tuple(dim.name for dim in out_dims),
            gathered=tuple(self.gathered.items()),
            scattered=tuple(self.scattered.items()),
            summed=self._summed(arrays, out_dims),
            **options,
        )
        return result.array

    def _after(self, out_dims: Dims) -> dict[str, str]:
        """How the result is cut."""
        stays = {dim.name: self.split[dim.name] for dim in out_dims if dim.name in self.split}
        return {name: stays[name] for name in stays if name not in self.gathered} | self.scattered

    def _equal(self, arrays: Sequence[NamedArray]) -> tuple[tuple[str, ...], ...]:
        """For each array the axes along which it is equal on all devices, and another one not."""
        cut = [{self.split[d.name] for d in x.dims if d.name in self.split} for x in arrays]
        return tuple(tuple(sorted(set[str]().union(*cut) - axes)) for axes in cut)

    def _summed(self, arrays: Sequence[NamedArray], out_dims: Dims) -> tuple[str, ...]:
        """Axes over which sums are split that are not scattered."""
        summed = {dim.name for x in arrays for dim in x.dims if dim not in out_dims}
        axes = {self.split[name] for name in summed if name in self.split}
        return tuple(sorted(axes - {*self.scattered.values()}))


_AS_IT_IS = Meeting({}, {}, {}, {})


def _local(
    *arrays: Any,
    product: Product,
    dims: tuple[tuple[str, ...], ...],
    equal: tuple[tuple[str, ...], ...],
    out_dims: tuple[str, ...],
    gathered: tuple[tuple[str, str], ...],
    scattered: tuple[tuple[str, str], ...],
    summed: tuple[str, ...],
    **options: Any,
) -> list[Any]:
    pieces = zip(arrays, dims, equal, strict=True)
    xs = [_gathered(x, names, gathered, axes) for x, names, axes in pieces]
    every = {dim.name: dim for dim in union(*(x.dims for x in xs), what="einsum")}
    array = product(xs, tuple(every[name] for name in out_dims), **options)
    for name, axis in scattered:
        array = jax.lax.psum_scatter(
            array, axis, scatter_dimension=out_dims.index(name), tiled=True
        )
    return [jax.lax.psum(array, summed) if summed else array]


def _gathered(x: Any, names: Any, gathered: Any, equal: tuple[str, ...]) -> NamedArray:
    for name, axis in gathered:
        if name in names:
            x = jax.lax.all_gather(x, axis, axis=names.index(name), tiled=True)
    if equal:  # said aloud, so that the sum of its gradient over them is taken once, at the end
        x = jax.lax.pcast(x, equal, to="varying")
    return NamedArray(x, tuple(map(Dim, names, x.shape)))


def _axis(dim: Dim) -> str | None:
    return split_of([dim]).get(dim.name)
