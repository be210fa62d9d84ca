"""The mesh that layouts without one mean."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Any

import jax

from ..errors import LayoutError, MeshError, TopologyError
from ..layouts.layout import Layout, Specs, as_layout
from ..layouts.mesh import Mesh

LayoutLike = Layout | Specs
_DEFAULT_MESHES: ContextVar[tuple[Mesh, ...]] = ContextVar("default_meshes", default=())


class default_mesh(contextlib.ContextDecorator):
    """Layouts without a mesh mean this one, inside the ``with`` block or the decorated function.

    That, and nothing else: all functions of this room bind unbound layouts and bare specs to it.
    Blocks nest, an exception leaves them as well, and each thread has its own. Arrays that plain
    ``jnp`` makes inside lie on one device as ever, and join arrays on any mesh freely;
    ``jax.set_mesh`` would put them on the mesh, but then no array on another mesh could be touched.
    Raises :class:`MeshError` for anything but a :class:`Mesh`.

    >>> from meshwright import create_mesh, fetch_layout, relayout
    >>> with default_mesh(create_mesh({"batch": 8})):
    ...     print(fetch_layout(relayout(range(16), ["batch"])))
    [batch] on batch=8 @ cpu:0-7
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = as_mesh(mesh, "default_mesh")

    def __enter__(self) -> Mesh:
        _DEFAULT_MESHES.set((*_DEFAULT_MESHES.get(), self.mesh))
        return self.mesh

    def __exit__(self, *raised: object) -> None:
        _DEFAULT_MESHES.set(_DEFAULT_MESHES.get()[:-1])


def get_default_mesh() -> Mesh | None:
    """The mesh of the innermost :class:`default_mesh` of this thread, or ``None``.

    >>> with default_mesh(Mesh({"batch": 8})):
    ...     print(get_default_mesh())
    batch=8
    """
    return next(reversed(_DEFAULT_MESHES.get()), None)


def bound(layout: LayoutLike) -> Layout:
    """The layout on its mesh, or on the default mesh; raises :class:`LayoutError` if none is."""
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


def as_mesh(mesh: Any, asker: str) -> Mesh:
    """The mesh; raises :class:`MeshError` in the name of the function that asks."""
    if isinstance(mesh, Mesh):
        return mesh
    raise MeshError(
        f"{asker} takes a meshwright Mesh; received {mesh!r}. "
        "Mesh.from_jax(mesh) makes one from a JAX mesh."
    )


def own_devices(mesh: Mesh, asker: str) -> tuple[Any, ...]:
    """This process's devices of a mesh; raises :class:`TopologyError` if it has none."""
    mesh.bound_devices()
    if mesh.is_remote:
        raise TopologyError(
            f"{asker}: process {jax.process_index()} has no device of the mesh ({mesh}). "
            "Call it only in processes that have one."
        )
    return mesh.local_devices
