"""The command ``meshwright check``: make the devices, find ``build``, check, print."""

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
from .table import closing, mesh_lines, opening


def run(
    build: str,
    meshes: Sequence[Mesh],
    layouts: Mapping[str, Layout],
    options: Mapping[str, Any],
    rows: int | None,
    double: bool,
    **how: Any,
) -> bool:
    """Check and print; whether every mesh trains as one device does."""
    meshes = [mesh.abstract() for mesh in meshes]
    _make_devices(meshes)
    with _compat.double_precision() if double else contextlib.nullcontext():
        function = find_build(build)  # its module may make arrays
        _make_devices(meshes)  # the module may have asked for fewer
        result = check(_guarded(function, build), meshes, layouts, double=double, **how, **options)
    _print(result, rows)
    return result.equal


def _guarded(function: Callable[[], Any], name: str) -> Callable[[], Any]:
    """The function, whose own errors come with its lines and without those of the program."""

    def guarded() -> Any:
        with told_as(f"{name} cannot build the model", " (--traceback shows all of it)"):
            return function()

    return guarded


def _make_devices(meshes: Sequence[Mesh]) -> None:
    if not _compat.jax_is_running():
        virtual_devices(max(mesh.size for mesh in meshes))


def _print(result: Equivalence, rows: int | None) -> None:
    import click

    click.echo(opening(result))
    for each in result.meshes:
        first, *others = mesh_lines(each, rows)
        wrong = {variable.path for variable in each.beyond}
        click.echo()
        click.secho(first, fg="green" if each.equal else "red", bold=True)
        for line in others:
            is_wrong = line.split(maxsplit=1)[0] in wrong if line.strip() else False
            click.secho(line, fg="red" if is_wrong else None)
    click.secho("\n" + closing(result), fg="green" if result.equal else "red")
