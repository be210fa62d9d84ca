"""The whole check: one device, its noise, then every mesh."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import MeshError, MeshwrightError, MeshwrightWarning
from ..layouts.mesh import Mesh, create_mesh

if TYPE_CHECKING:
    from .judging import Equivalence

MeshLike = Mesh | Mapping[str, int] | str


def check(
    build: Callable[[], Any],
    meshes: Sequence[MeshLike] | MeshLike,
    layouts: Mapping[str, Any] | None = None,
    *,
    steps: int = 5,
    seed: int = 0,
    rtol: float | None = None,
    double: bool = False,
    **options: Any,
) -> Equivalence:
    """Train what ``build`` makes on one device and under each mesh, and compare everything.

    See :func:`meshwright.testing.assert_equivalent`, which raises where this only reports.
    """
    from .. import _compat
    from .cases import setups
    from .judging import Equivalence, judge
    from .runs import OneDevice, under_mesh

    with _compat.double_precision() if double else contextlib.nullcontext():
        bound = [_bound(mesh) for mesh in _listed(meshes)]
        more: dict[str, Any] = {"layouts": layouts, "options": options}
        oracle = OneDevice(build, seed, double, **more)
        variants = setups(oracle.case, bound)
        tolerance = oracle.tolerance(rtol)
        one = oracle.run(steps)
        again = oracle.run_again(steps, tolerance.eps, seed)
        results = []
        for setup in variants:
            with _warnings_under(setup.mesh) as warned:
                run = under_mesh(build, setup, seed, double, steps, oracle.is_pure, **more)
            notes = (*setup.notes, *warned)
            results.append(judge(setup.mesh, run, one, again, tolerance, notes))
    return Equivalence(oracle.name, steps, tolerance, one.losses, tuple(results))


@contextlib.contextmanager
def _warnings_under(mesh: Mesh) -> Iterator[list[str]]:
    """Collects Meshwright's warnings; an error says under which mesh it happened."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeshwrightWarning)
        try:
            yield texts
        except MeshwrightError as error:
            error.add_note(f"This happened under the mesh {mesh.axes_text}.")
            raise
    for warning in caught:
        if issubclass(warning.category, MeshwrightWarning):
            texts.append(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


def _listed(meshes: Sequence[MeshLike] | MeshLike) -> Sequence[MeshLike]:
    return [meshes] if isinstance(meshes, Mesh | Mapping | str) else meshes


def _bound(like: MeshLike) -> Mesh:
    """The mesh on the first of the devices. Raises :class:`MeshError` if there are too few."""
    import jax

    mesh = Mesh.from_string(like) if isinstance(like, str) else like
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    if not mesh.is_abstract:
        return mesh
    there = jax.devices()
    if len(there) < mesh.size:
        raise MeshError(
            f"the mesh {mesh.axes_text} needs {mesh.size} devices; {len(there)} are available. "
            f"Call meshwright.virtual_devices({mesh.size}) before JAX is first used."
        )
    return create_mesh(mesh.axes, devices=there[: mesh.size])
