"""The mesh of a step, in place of the one that a program has set for itself by ``jax.set_mesh``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..errors import MeshError
from .mesh import Mesh


def in_place_of_context(mesh: Mesh) -> contextlib.AbstractContextManager[object]:
    """Trace on ``mesh`` where ``jax.set_mesh`` has set one with axes of the type ``Explicit``.

    Those of :func:`jax.make_mesh` are. JAX then refuses arrays on any other mesh, and those of a
    step lie on its own. A mesh whose axes are ``Auto`` stays, as layouts inside the model may name
    its axes. Raises :class:`~meshwright.MeshError` where the two have different numbers of devices.

    >>> import jax
    >>> with jax.set_mesh(jax.make_mesh((8,), ("x",))), in_place_of_context(Mesh({"batch": 8})):
    ...     print(jax.sharding.get_abstract_mesh().axis_names)
    ('batch',)
    """
    import jax

    context = jax.sharding.get_abstract_mesh()
    if not _is_explicit(context):
        return contextlib.nullcontext()
    if context.size != mesh.size:
        raise MeshError(
            f"jax.set_mesh has set a mesh of {context.size} devices ({Mesh.from_jax(context)}), "
            f"and the layouts are on one of {mesh.size} ({mesh}). Call Meshwright outside of it, "
            "or inside `with jax.set_mesh(None):`."
        )
    own = mesh.jax_mesh if mesh.is_abstract else mesh.jax_mesh.abstract_mesh
    return jax.sharding.use_abstract_mesh(own)


@contextlib.contextmanager
def outside_of_context() -> Iterator[None]:
    """Leave such a mesh where a step is traced for other devices; a decorator, too.

    >>> import jax
    >>> with jax.set_mesh(jax.make_mesh((8,), ("x",))), outside_of_context():
    ...     print(jax.sharding.get_abstract_mesh().axis_names)
    ()
    """
    import jax

    explicit = _is_explicit(jax.sharding.get_abstract_mesh())
    with jax.set_mesh(None) if explicit else contextlib.nullcontext():
        yield


def _is_explicit(context: Any) -> bool:
    import jax

    return jax.sharding.AxisType.Explicit in context.axis_types
