"""The whole check: one device, its noise, then every mesh."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import MeshError, MeshwrightWarning
from ..layouts.mesh import Mesh, create_mesh
from ..together import Faults
from .cases import Case, Setup, setups
from .faults import check_patterns, check_setup, under

if TYPE_CHECKING:
    from ..layouts.placement import Placement
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
    from .judging import Equivalence, judge
    from .runs import OneDevice, under_mesh

    with _compat.double_precision() if double else contextlib.nullcontext():
        faults, bound = Faults(), list[Mesh]()
        for mesh in _listed(meshes):
            with faults:
                bound.append(_bound(mesh))
        more: dict[str, Any] = {"layouts": layouts, "options": options}
        oracle = OneDevice(build, seed, double, **more)
        variants = _variants(oracle.case, bound, faults)
        tolerance = oracle.tolerance(rtol)
        one = oracle.run(steps)
        again = oracle.run_again(steps, tolerance.eps, seed)
        results = []
        for setup in variants:
            with faults, under(setup.mesh):
                with _warnings() as warned:
                    run = under_mesh(build, setup, seed, double, steps, oracle, **more)
                notes = (*setup.notes, *warned)
                results.append(judge(setup.mesh, run, one, again, tolerance, notes))
        faults.refuse()
    return Equivalence(oracle.name, steps, tolerance, one.losses, tuple(results))


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects Meshwright's warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeshwrightWarning)
        yield texts
    for warning in caught:
        if issubclass(warning.category, MeshwrightWarning):
            texts.append(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


def _variants(case: Case, meshes: Sequence[Mesh], faults: Faults) -> list[Setup]:
    """The case on every mesh. Raises what can be known before anything is trained, all at once."""
    from .runs import placement_of

    result: list[Setup] = []
    placements: list[tuple[Setup, Placement]] = []
    with faults:
        result = setups(case, meshes) if meshes else []
    for setup in result:
        with faults, under(setup.mesh):
            placements.append((setup, placement_of(case, setup)))
    if faults.errors:  # else training finds the others, and says more of them
        with faults:
            check_patterns(case, meshes[0] if meshes else Mesh({"batch": 1}))
        for setup, placement in placements:
            with faults, under(setup.mesh):
                check_setup(case, setup, placement)
        faults.refuse()
    return result


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
