"""The command ``meshwright check``: make the devices, find ``build``, check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _compat
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..planning.faults import told_as
from ..topology import virtual_devices
from .check import check
from .finding import find_build
from .judging import Equivalence


def run(
    build: str,
    meshes: Sequence[Mesh],
    layouts: Mapping[str, Layout],
    options: Mapping[str, Any],
    double: bool,
    **how: Any,
) -> Equivalence:
    """How the model trains under every mesh, beside one device."""
    meshes = [mesh.abstract() for mesh in meshes]
    _make_devices(meshes)
    with _compat.double_precision() if double else contextlib.nullcontext():
        function = find_build(build)  # its module may make arrays
        _make_devices(meshes)  # the module may have asked for fewer
        return check(_guarded(function, build), meshes, layouts, double=double, **how, **options)


def _guarded(function: Callable[[], Any], name: str) -> Callable[[], Any]:
    """The function, whose own errors come with its lines and without those of the program."""

    def guarded() -> Any:
        with told_as(f"{name} cannot build the model", " (--traceback shows all of it)"):
            return function()

    return guarded


def _make_devices(meshes: Sequence[Mesh]) -> None:
    if not _compat.jax_is_running():
        virtual_devices(max(mesh.size for mesh in meshes))
