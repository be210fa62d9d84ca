"""What the layout of an array is."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding

from ..errors import ArrayError, LayoutError, TracingError
from ..layouts.layout import Layout
from .default import LayoutLike, bound
from .tracing import known_sharding
from .values import array_in


def fetch_layout(x: Any) -> Layout:
    """The layout of an array or a Keras variable ``x``; one device counts as a mesh of one.

    JAX's meshes have no name, so the mesh comes back without one. Raises :class:`ArrayError` for
    anything but a ``jax.Array``, and :class:`TracingError` inside ``jit``, where the compiler has
    not chosen a layout yet (axes that JAX calls explicit are known there and returned).

    >>> import jax.numpy as jnp
    >>> print(fetch_layout(jnp.ones((2, 3))))
    [unsharded, unsharded] on batch=1 @ cpu:0
    """
    value = array_in(x)
    if value is None:
        raise ArrayError(
            f"{type(x).__name__} has no layout: it is in host memory. "
            "Lay it out with relayout(x, layout) first."
        )
    sharding = known_sharding(value)
    if sharding is None:
        raise TracingError(
            "the layout of an array is not known inside jit or vmap, where the compiler has yet to "
            "choose it. Ask outside, or say what it shall be with relayout(x, layout)."
        )
    return Layout.from_sharding(sharding, value.ndim)


def check_layout(x: Any, layout: LayoutLike) -> None:
    """Raise :class:`LayoutError` with both layouts unless ``x`` has this ``layout``.

    Axes of size 1 and the name of the mesh make no difference; an abstract mesh asks for its axes
    only. Raises as :func:`fetch_layout` for what has no layout.

    >>> import jax.numpy as jnp
    >>> from meshwright import Mesh
    >>> check_layout(jnp.ones(4), Layout(["batch"], Mesh({"batch": 8})))
    Traceback (most recent call last):
        ...
    meshwright.errors.LayoutError: expected layout [batch] on batch=8; received an array with
    layout [unsharded] on batch=1 @ cpu:0. Use relayout(x, layout).
    """
    expected, present = bound(layout), fetch_layout(x)
    if not _lies_as(present, expected):
        raise LayoutError(
            f"expected layout {expected}; received an array with layout {present}. "
            "Use relayout(x, layout)."
        )


def is_dtensor(x: Any) -> bool:
    """Whether ``x`` is an array, or a Keras variable with one, that lies on named axes.

    Never raises. Inside ``jit``, where layouts are not known, the answer is ``False``.

    >>> from meshwright import create_mesh, relayout
    >>> is_dtensor(relayout([1, 2], Layout(["x"], create_mesh({"x": 2}, ["cpu:0", "cpu:1"]))))
    True
    >>> is_dtensor([1, 2])
    False
    """
    try:
        value = array_in(x)
        return value is not None and isinstance(known_sharding(value), NamedSharding)
    except Exception:  # `value` is some other library's property, and may do anything
        return False


def _lies_as(present: Layout, expected: Layout) -> bool:
    here, there = present.bound_mesh(), expected.bound_mesh()
    same_mesh = here.axes == there.axes and there.devices in (None, here.devices)
    return same_mesh and _cuts(present) == _cuts(expected)


def _cuts(layout: Layout) -> list[list[str]]:
    mesh = layout.bound_mesh()
    return [[a for a in layout.dim_axes(dim) if mesh[a] > 1] for dim in range(layout.rank)]
