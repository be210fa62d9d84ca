"""Lay arrays out on a mesh, take them apart, put them together, wait for them.

A distributed array is a ``jax.Array`` and nothing else, so ``np.asarray``, ``jax.jit`` and
``jax.grad`` take it as it is. Names and meanings are those of TensorFlow DTensor. A layout may be
given unbound, or as bare specs, inside :class:`default_mesh`; a Keras variable stands for the array
that it holds.
"""

from __future__ import annotations

import contextlib
import functools
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .errors import (
    ArrayError,
    DivisibilityError,
    LayoutError,
    MeshError,
    TopologyError,
    TracingError,
)
from .layout import MATCH, UNSHARDED, Layout, Specs, as_layout
from .mesh import Mesh

LayoutLike = Layout | Specs

_SMALL_PART_BYTES = 1 << 20
_BUSY = "still waits for work on its own devices. Allow it more time with timeout_s."
_ALONE = (
    "still waits for the other processes of the mesh. See that each is alive and comes to this "
    "barrier, or allow more time with timeout_s."
)
_NO_ARRAY = "{} cannot lie on a mesh: it takes numbers or booleans of one shape."
_DEFAULT_MESHES: ContextVar[tuple[Mesh, ...]] = ContextVar("default_meshes", default=())

# The default mesh


class default_mesh(contextlib.ContextDecorator):
    """Layouts without a mesh mean this one, inside the ``with`` block or the decorated function.

    That, and nothing else: all functions of this room bind unbound layouts and bare specs to it.
    Blocks nest, an exception leaves them as well, and each thread has its own. Arrays that plain
    ``jnp`` makes inside lie on one device as ever, and join arrays on any mesh freely;
    ``jax.set_mesh`` would put them on the mesh, but then no array on another mesh could be touched.
    Raises :class:`MeshError` for anything but a :class:`Mesh`.

    >>> from meshwright import create_mesh
    >>> with default_mesh(create_mesh({"batch": 8})):
    ...     print(fetch_layout(relayout(range(16), ["batch"])))
    [batch] on batch=8 @ cpu:0-7
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = _as_mesh(mesh, "default_mesh")

    def __enter__(self) -> Mesh:
        _DEFAULT_MESHES.set((*_DEFAULT_MESHES.get(), self.mesh))
        return self.mesh

    def __exit__(self, *raised: object) -> None:
        _DEFAULT_MESHES.set(_DEFAULT_MESHES.get()[:-1])


def get_default_mesh() -> Mesh | None:
    """The mesh of the innermost :class:`default_mesh` of this thread, if there is one."""
    return next(reversed(_DEFAULT_MESHES.get()), None)


# From one layout to another


def relayout(x: Any, layout: LayoutLike) -> jax.Array:
    """The same values, laid out so; from any layout, any mesh, or from the host.

    ``x``: a JAX array, a Keras variable, NumPy, a list or a scalar, the same in every process.
    ``MATCH`` keeps a dim as it is. Inside ``jit`` this tells the compiler where the value lies, on
    the mesh of the ``jit`` (the same axes over other devices are found there by JAX itself, when it
    compiles). Differentiable: eagerly the gradient comes back in the layout of ``x``. NumPy's
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
    target = _bound(layout)
    _refuse_shard_map()
    value = _array_in(x)
    if value is None:
        value = _host_array(x)
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
    """``x`` on a mesh: in a layout, or whole on each device where only a mesh is given.

    With a layout it is :func:`relayout`, and raises as that does.

    >>> from meshwright import create_mesh
    >>> print(fetch_layout(copy_to_mesh([1.0, 2.0], create_mesh({"batch": 8}))))
    [unsharded] on batch=8 @ cpu:0-7
    """
    if isinstance(layout, Mesh):
        layout = Layout.replicated(layout, _rank(x))
    return relayout(x, layout)


def call_with_layout(
    fn: Callable[..., Any], layout: LayoutLike | None, *args: Any, **kwargs: Any
) -> Any:
    """``fn(*args, **kwargs)``, with every array of the result made directly in the layout.

    ``fn`` is traced and compiled for the layout at each call, so that each device can make its own
    piece. JAX and NumPy arrays among the arguments are traced; all else reaches ``fn`` as it is.
    Arguments that lie on one device are copied to the mesh. Inside ``jit`` the result is laid out
    by :func:`relayout`; with ``layout=None`` this is a plain call.

    Raises :class:`LayoutError` that lists every result which the layout does not fit,
    :class:`ArrayError` for arguments on another mesh, :class:`TracingError` if ``fn`` needs values.

    >>> import jax
    >>> from meshwright import create_mesh
    >>> layout = Layout([UNSHARDED, "model"], create_mesh({"batch": 4, "model": 2}))
    >>> kernel = call_with_layout(jax.random.normal, layout, jax.random.key(0), (784, 128))
    >>> kernel.addressable_shards[0].data.shape
    (784, 64)
    """
    if layout is None:
        return fn(*args, **kwargs)
    target = _bound(layout)
    if _is_tracing():
        _refuse_shard_map()
        result = fn(*args, **kwargs)
        _check_results(result, target)
        return jax.tree.map(lambda leaf: relayout(leaf, target), result)
    return _call_compiled(fn, target, (args, kwargs))


# What the layout of an array is


def fetch_layout(x: Any) -> Layout:
    """The layout of an array or a Keras variable; one device counts as a mesh of one.

    JAX's meshes have no name, so the mesh comes back without one. Raises :class:`ArrayError` for
    what is no ``jax.Array``, :class:`TracingError` inside ``jit``, where the compiler has yet to
    decide (axes that JAX calls explicit are known there and answered).

    >>> import jax.numpy as jnp
    >>> print(fetch_layout(jnp.ones((2, 3))))
    [unsharded, unsharded] on batch=1 @ cpu:0
    """
    value = _array_in(x)
    if value is None:
        raise ArrayError(
            f"{type(x).__name__} has no layout: it lies in the memory of the host. "
            "Lay it out with relayout(x, layout) first."
        )
    sharding = _known_sharding(value)
    if sharding is None:
        raise TracingError(
            "the layout of an array is not known inside jit or vmap, where the compiler has yet to "
            "choose it. Ask outside, or say what it shall be with relayout(x, layout)."
        )
    return Layout.from_sharding(sharding, value.ndim)


def check_layout(x: Any, layout: LayoutLike) -> None:
    """Raise :class:`LayoutError` with both layouts unless ``x`` lies so.

    Axes of size 1 and the name of the mesh make no difference; an abstract mesh asks for its axes
    only. Raises as :func:`fetch_layout` for what has no layout.

    >>> import jax.numpy as jnp
    >>> check_layout(jnp.ones(4), Layout(["batch"], Mesh({"batch": 8})))
    Traceback (most recent call last):
        ...
    meshwright.errors.LayoutError: the array lies as [unsharded] on batch=1 @ cpu:0, but
    [batch] on batch=8 is expected. relayout(x, layout) lays it out so.
    """
    wanted, present = _bound(layout), fetch_layout(x)
    if not _lies_as(present, wanted):
        raise LayoutError(
            f"the array lies as {present}, but {wanted} is expected. "
            "relayout(x, layout) lays it out so."
        )


def is_dtensor(x: Any) -> bool:
    """Whether ``x`` is an array, or a Keras variable with one, that lies on named axes.

    Never raises. Inside ``jit``, where layouts are not known, the answer is ``False``.

    >>> from meshwright import create_mesh
    >>> is_dtensor(relayout([1, 2], Layout(["x"], create_mesh({"x": 2}, ["cpu:0", "cpu:1"]))))
    True
    >>> is_dtensor([1, 2])
    False
    """
    try:
        value = _array_in(x)
        return value is not None and isinstance(_known_sharding(value), NamedSharding)
    except Exception:  # `value` is some other library's property, and may do anything
        return False


# Parts


def pack(parts: Iterable[Any], layout: LayoutLike, check_replicas: bool | None = None) -> jax.Array:
    """One array from this process's parts: one part per local device of the mesh, in mesh order.

    Parts have equal dims and dtypes and are copied to their devices. ``check_replicas`` compares
    those parts of this process that are copies of each other; ``None`` does so for parts of at most
    1 MiB. Raises :class:`ArrayError` that lists every part which does not fit, and
    :class:`TracingError` inside ``jit``.

    >>> from meshwright import create_mesh
    >>> mesh = create_mesh({"batch": 4, "model": 2})
    >>> x = pack([[0.0], [0.0], [1.0], [1.0], [2.0], [2.0], [3.0], [3.0]], Layout(["batch"], mesh))
    >>> x.tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    target = _bound(layout)
    devices = _own_devices(target.bound_mesh(), "pack")
    values = [_part(part) for part in parts]
    if _is_tracing() or any(isinstance(value, Tracer) for value in values):
        raise TracingError(
            "pack puts parts on devices, which has no meaning inside jit or grad. Pack outside and "
            "pass the array in; relayout(x, layout) works inside."
        )
    sharding = target.sharding
    faults = _part_faults(values, target, devices)
    if not faults and (check_replicas or (check_replicas is None and _are_small(values))):
        faults = _replica_faults(values, target)
    if faults:
        raise ArrayError("\n".join(faults))
    pieces = [jax.device_put(value, device) for value, device in zip(values, devices, strict=True)]
    dims = target.global_dims(values[0].shape)
    return jax.make_array_from_single_device_arrays(dims, sharding, pieces)


def unpack(x: Any) -> list[jax.Array]:
    """The pieces of ``x`` on this process's devices, in mesh order; :func:`pack` undoes it.

    Raises :class:`ArrayError` for what is no ``jax.Array``, :class:`TracingError` inside ``jit``.

    >>> from meshwright import create_mesh
    >>> x = relayout(range(8), Layout(["batch"], create_mesh({"batch": 4, "model": 2})))
    >>> [piece.tolist() for piece in unpack(x)]
    [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    """
    value = _array_in(x)
    if isinstance(value, Tracer):
        raise TracingError(
            "unpack looks at the pieces on the devices, which has no meaning inside jit or grad. "
            "Unpack the result outside; jax.shard_map runs a function on each piece."
        )
    devices = fetch_layout(x).bound_mesh().local_devices
    held: Any = value
    pieces = {shard.device: shard.data for shard in held.addressable_shards}
    return [pieces[device] for device in devices]


# Waiting


def barrier(mesh: Mesh, name: str = "", timeout_s: float | None = 600.0) -> None:
    """Wait until this process's devices of the mesh are idle and all its processes are here.

    First all that is in flight on these devices, then an all-reduce of ones over the mesh, whose
    sum is checked; ``name`` must be the same in every process. ``timeout_s=None`` waits for ever.
    An error of the work that was in flight is raised here; the time-out cannot cut short a host
    callback of JAX. Raises :class:`TopologyError` when time
    is up or processes disagree, :class:`TracingError` inside ``jit``.

    >>> from meshwright import create_mesh
    >>> barrier(create_mesh({"batch": 8}), "after setup", timeout_s=60)
    """
    _own_devices(_as_mesh(mesh, "barrier"), "barrier")
    if _is_tracing():
        raise TracingError(
            "barrier waits for devices, which has no meaning inside jit: it would wait once, while "
            "tracing. Call it between the steps."
        )
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    late = f"barrier {name!r} on the mesh ({mesh}): after {timeout_s} s process"
    _wait_for(_in_flight(mesh), deadline_s, f"{late} {jax.process_index()} {_BUSY}")
    jax.effects_barrier()
    answers = _roll_call(mesh)(*_ballots(mesh, name))
    _wait_for(answers, deadline_s, f"{late} {jax.process_index()} {_ALONE}")
    _check_roll_call(mesh, name, [int(answer.addressable_data(0)) for answer in answers])


# What is handed in


def _array_in(x: Any) -> jax.Array | None:
    """``x``, or the array that a Keras variable holds; ``None`` if there is neither."""
    held = x if isinstance(x, jax.Array) else getattr(x, "value", None)
    return held if isinstance(held, jax.Array) else None


def _host_array(x: Any) -> Any:
    """What is no JAX array yet, as NumPy; a list that holds tracers, as a tracer."""
    try:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)):
            return jnp.asarray(x)
        value = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise ArrayError(f"{_NO_ARRAY.format(type(x).__name__)} ({error})") from error
    if not (jnp.issubdtype(value.dtype, np.number) or jnp.issubdtype(value.dtype, np.bool_)):
        raise ArrayError(_NO_ARRAY.format(f"{type(x).__name__} of dtype {value.dtype}"))
    narrow = jax.dtypes.canonicalize_dtype(value.dtype)
    _check_integers_fit(value, narrow)
    # JAX may go on reading NumPy's memory, so that writing to `x` later would change the result.
    return np.array(value, dtype=narrow)


def _check_integers_fit(value: np.ndarray, narrow: np.dtype) -> None:
    if value.dtype == narrow or value.dtype.kind not in "iu" or not value.size:
        return
    least, most, limits = value.min(), value.max(), np.iinfo(narrow)
    if least < limits.min or most > limits.max:
        raise ArrayError(
            f"integers from {least} to {most} ({value.dtype}) do not fit {narrow}, which JAX keeps "
            "them in. Use smaller ones, or call jax.config.update('jax_enable_x64', True) first."
        )


def _rank(x: Any) -> int:
    value = _array_in(x)
    return np.ndim(_host_array(x) if value is None else value)


def _bound(layout: LayoutLike) -> Layout:
    layout = as_layout(layout)
    if layout.is_bound:
        return layout
    mesh = get_default_mesh()
    if mesh is None:
        raise LayoutError(
            f"layout {layout} is unbound and there is no default mesh. Bind it with "
            "layout.on(mesh), or work inside `with default_mesh(mesh):`."
        )
    return layout.on(mesh)


def _as_mesh(mesh: Any, asker: str) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    raise MeshError(
        f"{asker} takes a meshwright Mesh; received {mesh!r}. "
        "Mesh.from_jax(mesh) makes one from a JAX mesh."
    )


def _own_devices(mesh: Mesh, asker: str) -> tuple[Any, ...]:
    mesh.bound_devices()
    if mesh.is_remote:
        raise TopologyError(
            f"{asker}: process {jax.process_index()} has no device of the mesh ({mesh}). "
            "Call it only in processes that have one."
        )
    return mesh.local_devices


# What is known while tracing


def _is_tracing() -> bool:
    """Whether ``jit`` is tracing, so that what is computed now has no value yet."""
    return isinstance(jnp.zeros(()), Tracer)


def _concrete(value: Any) -> Any:
    """The array behind ``value``; under an eager ``grad`` there is one, inside ``jit`` none."""
    return value.to_concrete_value() if isinstance(value, Tracer) else value


def _refuse_shard_map() -> None:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        raise TracingError(
            f"inside shard_map (over {', '.join(map(repr, manual))}) each device sees its own "
            "piece, which has no layout. Call relayout before or after shard_map."
        )


def _known_sharding(value: jax.Array) -> Any:
    concrete = _concrete(value)
    if concrete is not None:
        return concrete.sharding
    traced = jax.typeof(value).sharding
    return traced if traced.mesh.are_all_axes_explicit and not traced.mesh.empty else None


def _lies_as(present: Layout, wanted: Layout) -> bool:
    here, there = present.bound_mesh(), wanted.bound_mesh()
    same_mesh = here.axes == there.axes and there.devices in (None, here.devices)
    return same_mesh and _cuts(present) == _cuts(wanted)


def _cuts(layout: Layout) -> list[list[str]]:
    mesh = layout.bound_mesh()
    return [[a for a in layout.dim_axes(dim) if mesh[a] > 1] for dim in range(layout.rank)]


# Moving


def _place(value: Any, target: Layout) -> jax.Array:
    """``value``, NumPy or a JAX array of fitting dims, in this layout."""
    mesh = target.bound_mesh()
    if mesh.is_abstract:
        if not _is_tracing():
            mesh.bound_devices()
        return _constrain(jnp.asarray(value), target)
    if isinstance(value, np.ndarray):
        target = target.matching(Layout.replicated(None, target.rank))
        moved = _from_host(value, target)
    else:
        concrete = _concrete(value)
        if concrete is None:
            return _constrain(value, target)
        target = _matched(target, concrete)
        moved = _move(value, concrete, target)
    # A constant of a traced function comes back traced, and lies nowhere unless it is constrained.
    return _constrain(moved, target) if _concrete(moved) is None else moved


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
    if sharding.is_fully_addressable or _is_tracing():
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
        if "incompatible devices" not in str(error):
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


# Calling with a layout


def _call_compiled(fn: Callable[..., Any], target: Layout, arguments: Any) -> Any:
    leaves, tree = jax.tree.flatten(arguments)
    mesh = target.bound_mesh()
    mesh.bound_devices()
    arrays = {
        i: _on_mesh(leaf, mesh)
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array | np.ndarray)
    }

    def run(arrays: dict[int, Any]) -> Any:
        args, kwargs = tree.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        result = fn(*args, **kwargs)
        _check_results(result, target)
        return result

    try:
        return jax.jit(run, out_shardings=target.sharding)(arrays)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise TracingError(
            f"call_with_layout traces {getattr(fn, '__name__', fn)!r}, which asks for the values "
            "of its arguments. Call it plainly and lay its result out by relayout(result, layout)."
        ) from error


def _on_mesh(leaf: Any, mesh: Mesh) -> Any:
    """An array that the mesh can compute with."""
    if isinstance(leaf, np.ndarray):
        return _host_array(leaf)
    concrete = _concrete(leaf)
    if concrete is None or not concrete.committed:
        return leaf
    if concrete.sharding.num_devices == 1:
        return relayout(leaf, Layout.replicated(mesh, leaf.ndim))
    present = fetch_layout(concrete)
    if present.bound_mesh().devices == mesh.devices:
        return leaf
    raise ArrayError(
        f"an argument with dims {leaf.shape} lies as {present}, and not on the mesh ({mesh}). "
        "relayout it there first."
    )


def _check_results(result: Any, target: Layout) -> None:
    faults = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        try:
            target.check(np.shape(leaf), f"result{jax.tree_util.keystr(path)}")
        except LayoutError as error:
            faults.append(error)
    if faults:
        by_size = all(isinstance(fault, DivisibilityError) for fault in faults)
        kind = DivisibilityError if by_size else LayoutError
        raise kind("\n".join(map(str, faults)))


# Checking parts


def _part(part: Any) -> Any:
    value = _array_in(part)
    return _host_array(part) if value is None else value


def _part_faults(values: Sequence[Any], target: Layout, devices: Sequence[Any]) -> list[str]:
    faults = []
    if len(values) != len(devices):
        faults.append(
            f"pack takes one part for each of this process's {len(devices)} devices of the mesh "
            f"({target.mesh}); received {len(values)}."
        )
    for i, value in enumerate(values):
        if value.ndim != target.rank:
            faults.append(
                f"part {i} has {value.ndim} dims {value.shape}, but layout {target.unbound()} has "
                f"{target.rank}: write one entry per dim."
            )
        if value.shape != values[0].shape:
            faults.append(
                f"part {i} has dims {value.shape} and part 0 {values[0].shape}; "
                "all parts of an array have the same."
            )
        if value.dtype != values[0].dtype:
            faults.append(
                f"part {i} is {value.dtype} and part 0 {values[0].dtype}; convert one with astype."
            )
    return faults


def _are_small(values: Sequence[Any]) -> bool:
    return values[0].nbytes <= _SMALL_PART_BYTES


def _replica_faults(values: Sequence[Any], target: Layout) -> list[str]:
    """Where parts that stand for the same piece of the array differ."""
    mesh = target.bound_mesh()
    offsets = dict(
        zip(
            mesh.bound_devices(),
            target.offsets(target.global_dims(values[0].shape)),
            strict=True,
        )
    )
    firsts: dict[tuple[int, ...], int] = {}
    faults = []
    for i, device in enumerate(mesh.local_devices):
        first = firsts.setdefault(offsets[device], i)
        if values[i] is not values[first]:
            faults += _difference(values, first, i)
    return faults


def _difference(values: Sequence[Any], first: int, second: int) -> list[str]:
    a, b = (_comparable(values[i]) for i in (first, second))
    differs = (a != b) & ~((a != a) & (b != b))  # NaN agrees with NaN
    if not differs.any():
        return []
    where = tuple(map(int, np.argwhere(differs)[0]))
    return [
        f"parts {first} and {second} are copies of the same piece and differ in "
        f"{int(differs.sum())} of {differs.size} elements, first at {where}: {a[where]} and "
        f"{b[where]}. Give both the same values, or let a dim lie on the axis between them."
    ]


def _comparable(value: Any) -> np.ndarray:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


# The barrier's parts


def _in_flight(mesh: Mesh) -> list[jax.Array]:
    devices = set(mesh.local_devices)
    return [a for a in jax.live_arrays(mesh.platform) if devices & _addressable(a)]


def _addressable(x: jax.Array) -> set[Any]:
    return set() if x.is_deleted() else set(x.sharding.addressable_devices)


def _wait_for(arrays: Iterable[Any], deadline_s: float | None, late: str) -> None:
    for array in arrays:
        pause_s = 1e-5
        while deadline_s is not None and not (array.is_deleted() or array.is_ready()):
            if time.monotonic() > deadline_s:
                raise TopologyError(late)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-2)
        if not array.is_deleted():
            array.block_until_ready()


def _ballots(mesh: Mesh, name: str) -> tuple[jax.Array, jax.Array]:
    """Per device a one and the number of the barrier's name. shape=(mesh.size,), dtype=int32"""
    sharding = Layout([mesh.axis_names], mesh).sharding
    number = zlib.crc32(name.encode()) & 0x7FFFFFFF

    def filled(entry: int) -> jax.Array:
        return jax.make_array_from_callback(
            (mesh.size,), sharding, lambda _: np.full(1, entry, np.int32)
        )

    return filled(1), filled(number)


@functools.lru_cache(maxsize=64)
def _roll_call(mesh: Mesh) -> Callable[..., list[jax.Array]]:
    def count(ones: jax.Array, numbers: jax.Array) -> list[jax.Array]:
        return [ones.sum(), numbers.min(), numbers.max()]

    return jax.jit(count, out_shardings=Layout.replicated(mesh, 0).sharding)


def _check_roll_call(mesh: Mesh, name: str, answers: Sequence[int]) -> None:
    count, least, most = answers
    if count != mesh.size:
        raise TopologyError(
            f"barrier {name!r}: the sum of ones over the mesh ({mesh}) is {count} and not "
            f"{mesh.size}. Collectives do not work between these devices."
        )
    if least != most:
        raise TopologyError(
            f"barrier {name!r}: another process is at a barrier of another name. Every process "
            "must come to the same barriers in the same order."
        )
