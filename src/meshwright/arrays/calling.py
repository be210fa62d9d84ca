"""Calling a function so that its results are made directly in a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..errors import ArrayError, DivisibilityError, LayoutError, TracingError
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from .default import LayoutLike, bound
from .layout_of import fetch_layout
from .relayouts import relayout
from .tracing import concrete_of, is_tracing, refuse_shard_map
from .values import host_array


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
    >>> from meshwright import create_mesh, UNSHARDED
    >>> layout = Layout([UNSHARDED, "model"], create_mesh({"batch": 4, "model": 2}))
    >>> kernel = call_with_layout(jax.random.normal, layout, jax.random.key(0), (784, 128))
    >>> kernel.addressable_shards[0].data.shape
    (784, 64)
    """
    if layout is None:
        return fn(*args, **kwargs)
    target = bound(layout)
    if is_tracing():
        refuse_shard_map()
        result = fn(*args, **kwargs)
        _check_results(result, target)
        return jax.tree.map(lambda leaf: relayout(leaf, target), result)
    return _call_compiled(fn, target, (args, kwargs))


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
        return host_array(leaf)
    concrete = concrete_of(leaf)
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
