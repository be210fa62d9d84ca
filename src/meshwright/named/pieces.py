"""What each device does on its own pieces: the few places where XLA would gather an operand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ..layouts.dim_rules import Dim, Dims
from ..layouts.mesh import Mesh
from .array import NamedArray
from .rules import in_force

Split = Mapping[str, str]  # the axis along which the dims of a name are cut


def split_of(*several: Sequence[Dim]) -> Split:
    """Which of these dims the rules in force cut, and along which axis.

    A dim that does not divide is whole, and an axis is the first dim's that asks for it: an
    invalid layout of a result is reported when the result is laid out.
    """
    bound = in_force()
    if bound is None or bound.only_check:
        return {}
    split: dict[str, str] = {}
    mapped_axes = _mapped_axes()
    for dim in (dim for dims in several for dim in dims):
        axes = bound.rules.axes(dim.name)
        if len(axes) != 1:  # those along several axes are left to XLA
            continue
        (axis,) = axes
        if axis in mapped_axes or axis in split.values() or bound.mesh[axis] == 1:
            continue
        if dim.size and not dim.size % bound.mesh[axis]:
            split[dim.name] = axis
    return split


def on_pieces(
    function: Callable[..., Sequence[Any]],
    xs: Sequence[NamedArray],
    split: Split,
    outs: Sequence[Dims],
    split_outs: Split | None = None,
    **options: Hashable,
) -> list[NamedArray]:
    """A function of bare arrays, run by each device on its pieces of them.

    ``split`` says how the arrays are cut, and the results, whose dims are ``outs``, unless
    ``split_outs`` does. If nothing is cut, the function gets the arrays as they are. Other axes are
    left to XLA. A function that a module defines, with hashable ``options``, is traced once per
    shape.
    """
    after = split if split_outs is None else split_outs
    arrays, call = [x.array for x in xs], functools.partial(function, **options)
    axes = frozenset({*split.values(), *after.values(), *_mapped_axes()})
    if axes:
        specs = tuple(_spec(x.dims, split) for x in xs), tuple(_spec(dims, after) for dims in outs)
        call = _sharded(function, tuple(options.items()), current_mesh(), axes, *specs)
        in_part = not axes.issuperset(current_mesh().axes) and current_mesh().platform == "cpu"
        if in_part and any(array.dtype == jnp.bfloat16 for array in arrays):
            call = functools.partial(_in_32_bits, call)
    return [NamedArray(array, dims) for array, dims in zip(call(*arrays), outs, strict=True)]


def _in_32_bits(call: Callable[..., Sequence[Any]], *arrays: Any) -> list[Any]:
    """The results of a call, of which bfloat16 arrays are float32 inside.

    XLA's CPU compiler ends the process at sums of bfloat16 over some axes of a mesh, which
    gradients have where there are none forward.
    """
    results = jax.eval_shape(call, *arrays)
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
    return [y.astype(one.dtype) for y, one in zip(call(*wide), results, strict=True)]


def held_whole(x: NamedArray, name: str) -> NamedArray:
    """The array with one dim whole on every device: a gather, if the rules cut it."""
    if name not in split_of(x.dims) or not isinstance(x.array, Tracer):
        return x  # outside jit, XLA finds its way by itself
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if dim.name == name else free for dim in x.dims))
    sharding = NamedSharding(current_mesh().jax_mesh, spec)
    return NamedArray(jax.lax.with_sharding_constraint(x.array, sharding), x.dims)


def current_mesh() -> Mesh:
    """The mesh of the rules in force, where there are some."""
    bound = in_force()
    assert bound is not None, "split_of cuts nothing where there are no rules"
    return bound.mesh


@functools.lru_cache(maxsize=1024)
def _sharded(
    function: Any, options: Any, mesh: Mesh, axes: frozenset[str], befores: Any, afters: Any
) -> Any:
    call = lambda *arrays: tuple(function(*arrays, **dict(options)))  # noqa: E731
    return jax.jit(
        jax.shard_map(call, mesh=mesh.jax_mesh, in_specs=befores, out_specs=afters, axis_names=axes)
    )


def _mapped_axes() -> frozenset[str]:
    """The axes of dims that ``vmap`` maps over: arrays lie along them, though their dims do not."""
    bound = in_force()
    if bound is None or bound.only_check:
        return frozenset()
    return frozenset(axis for dim in bound.mapped for axis in bound.rules.axes(dim.name))


def _spec(dims: Sequence[Dim], split: Split) -> PartitionSpec:
    return PartitionSpec(*(split.get(dim.name) for dim in dims))
