"""From one layout to another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..errors import TopologyError, TracingError
from ..layouts.layout import MATCH, UNSHARDED, Layout
from ..layouts.mesh import Mesh
from .default import LayoutLike, bound
from .layout_of import fetch_layout
from .tracing import concrete_of, is_tracing, refuse_shard_map
from .values import array_in, host_array, rank_of


def relayout(x: Any, layout: LayoutLike) -> jax.Array:
    """The same values, laid out so; from any layout, any mesh, or from the host.

    ``x``: a JAX array, a Keras variable, NumPy, a list or a scalar, the same in every process.
    ``MATCH`` keeps a dim as it is. Inside ``jit`` this tells the compiler where the value lies, on
    the mesh of the ``jit`` (the same axes over other devices are found there by JAX itself, when it
    compiles). XLA refuses a ``lax.cond`` whose branches end in different layouts, as an INTERNAL
    error; a training step of this library takes it, in another ``jit`` relayout the result instead.
    Differentiable: eagerly the gradient comes back in the layout of ``x``. NumPy's
    64-bit types become JAX's 32-bit ones, as everywhere in JAX.

    Raises :class:`LayoutError` where the layout does not fit, :class:`ArrayError` for what is no
    array of numbers or for integers too big for JAX's type, :class:`TracingError` for another mesh
    inside ``jit`` and for any inside ``shard_map``, :class:`TopologyError` for a mesh without
    devices.

    >>> import numpy as np
    >>> from meshwright import create_mesh
    >>> mesh = create_mesh({"batch": 4, "model": 2})
    >>> x = relayout(np.arange(8.0).reshape(4, 2), Layout(["batch", "model"], mesh))
    >>> y = relayout(x, Layout([UNSHARDED, MATCH], mesh))
    >>> print(fetch_layout(y), np.array_equal(x, y))
    [unsharded, model] on batch=4, model=2 @ cpu:0-7 True
    """
    target = bound(layout)
    refuse_shard_map()
    value = array_in(x)
    if value is None:
        value = host_array(x)
    target.check(np.shape(value), "the array")
    return _place(value, target)


def relayout_like(x: Any, like: Any) -> jax.Array:
    """``x`` in the layout and on the mesh of ``like``, whose dtype and dims do not matter.

    Raises as :func:`relayout` and :func:`fetch_layout` do.

    >>> import numpy as np
    >>> from meshwright import create_mesh
    >>> like = relayout(np.zeros(8), Layout(["batch"], create_mesh({"batch": 8})))
    >>> print(fetch_layout(relayout_like(np.arange(16), like)))
    [batch] on batch=8 @ cpu:0-7
    """
    return relayout(x, fetch_layout(like))


def copy_to_mesh(x: Any, layout: LayoutLike | Mesh) -> jax.Array:
    """Copy ``x`` to a mesh: in a ``layout``, or whole on each device if that is a mesh.

    With a layout it is :func:`relayout`, and raises as that does.

    >>> from meshwright import create_mesh
    >>> print(fetch_layout(copy_to_mesh([1.0, 2.0], create_mesh({"batch": 8}))))
    [unsharded] on batch=8 @ cpu:0-7
    """
    if isinstance(layout, Mesh):
        layout = Layout.replicated(layout, rank_of(x))
    return relayout(x, layout)


def _place(value: Any, target: Layout) -> jax.Array:
    """``value``, NumPy or a JAX array of fitting dims, in this layout."""
    mesh = target.bound_mesh()
    if mesh.is_abstract:
        if not is_tracing():
            mesh.bound_devices()
        return _constrain(jnp.asarray(value), target)
    if isinstance(value, np.ndarray):
        target = target.matching(Layout.replicated(None, target.rank))
        moved = _from_host(value, target)
    else:
        concrete = concrete_of(value)
        if concrete is None:
            return _constrain(value, target)
        target = _matched(target, concrete)
        moved = _move(value, concrete, target)
    # A constant of a traced function comes back traced, and lies nowhere unless it is constrained.
    return _constrain(moved, target) if concrete_of(moved) is None else moved


def _matched(target: Layout, concrete: jax.Array) -> Layout:
    if MATCH not in target.specs:
        return target
    matched = target.matching(Layout.from_sharding(concrete.sharding, concrete.ndim))
    matched.check(concrete.shape, "the array")
    return matched


def _move(value: Any, concrete: jax.Array, target: Layout) -> jax.Array:
    """To another sharding by JAX itself, or, where that cannot, through the memory of the hosts.

    ``value`` is ``concrete``, or a tracer of it.
    """
    there = target.sharding
    here, to_here = concrete.is_fully_addressable, there.is_fully_addressable
    same_devices = concrete.sharding.device_set == there.device_set
    if (here and to_here) or (same_devices and not here and not to_here):
        return jax.device_put(value, there)
    if isinstance(value, Tracer):
        raise TracingError(
            f"an array that lies on {sorted(d.id for d in concrete.sharding.device_set)} cannot "
            f"move to {target.mesh}, in other processes, under grad. Move it before."
        )
    if jnp.issubdtype(concrete.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(concrete)
        trailing = [UNSHARDED] * (data.ndim - target.rank)
        moved = _move(data, data, Layout([*target.specs, *trailing], target.mesh))
        return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(concrete))
    return _from_host(np.array(_whole(concrete)), target)


def _whole(x: jax.Array) -> Any:
    """All of ``x`` in this process; every process that holds a piece of it must ask."""
    if x.is_fully_addressable:
        return x
    if not x.addressable_shards:
        raise TopologyError(
            f"process {jax.process_index()} holds no piece of the array, so it cannot lay it out "
            "on a mesh that it takes part in. Bring the values to every process first, "
            "with jax.experimental.multihost_utils.broadcast_one_to_all."
        )
    mesh = Layout.from_sharding(x.sharding, x.ndim).bound_mesh()
    everywhere = Layout.replicated(mesh, x.ndim).sharding
    return jax.jit(lambda whole: whole, out_shardings=everywhere)(x).addressable_data(0)


def _from_host(value: np.ndarray, target: Layout) -> jax.Array:
    sharding = target.sharding
    if sharding.is_fully_addressable or is_tracing():
        return jax.device_put(value, sharding)
    # device_put would compare the whole value between the processes at each call.
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def _constrain(value: Any, target: Layout) -> jax.Array:
    """The layout of a traced value, as a constraint to the compiler."""
    _check_traced_mesh(value, target)
    entries = {UNSHARDED: None, MATCH: PartitionSpec.UNCONSTRAINED}
    spec = PartitionSpec(*(entries.get(s, s) if isinstance(s, str) else s for s in target.specs))
    sharding = NamedSharding(target.bound_mesh().jax_mesh, spec)
    try:
        return jax.lax.with_sharding_constraint(value, sharding)
    except ValueError as error:
        if not _compat.lies_on_other_devices(error):
            raise
        raise _other_mesh("devices that the array does not lie on", target) from error


def _check_traced_mesh(value: Any, target: Layout) -> None:
    present = jax.typeof(value).sharding.mesh
    axes = tuple(zip(present.axis_names, present.axis_sizes, strict=True))
    if axes and axes != target.bound_mesh().axes:
        text = ", ".join(f"{axis}={size}" for axis, size in axes)
        raise _other_mesh(f"another mesh than the array's ({text})", target)


def _other_mesh(what: str, target: Layout) -> TracingError:
    return TracingError(
        f"{target} names {what}. Inside jit or vmap an array stays on its mesh: relayout it to the "
        "other mesh outside, between two jitted functions."
    )
