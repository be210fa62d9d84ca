"""The command ``meshwright check``: make the devices, find ``build``, check, print."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from .. import _compat
from ..errors import LayoutError
from ..layout import Layout
from ..mesh import Mesh
from ..topology import virtual_devices
from .check import check
from .finding import find_build
from .judging import Equivalence
from .table import closing, mesh_lines, opening


def run(
    build: str,
    mesh_texts: Sequence[str],
    rules: Sequence[tuple[str, str]],
    options: Mapping[str, Any],
    rows: int | None,
    double: bool,
    **how: Any,
) -> bool:
    """Check and print; whether every mesh trains as one device does."""
    meshes = [Mesh.from_string(text).abstract() for text in mesh_texts]
    layouts = {pattern: Layout.from_string(f"[{axes}]") for pattern, axes in rules}
    if taken := sorted(options.keys() & {"layouts", "steps", "seed", "rtol", "double"}):
        raise LayoutError(f"--option {taken[0]} is an option of the command: --{taken[0]}.")
    _make_devices(meshes)
    with _compat.double_precision() if double else contextlib.nullcontext():
        found = find_build(build)  # its module may make arrays
        _make_devices(meshes)  # the module may have asked for fewer
        verdict = check(found, meshes, layouts, double=double, **how, **options)
    _print(verdict, rows)
    return verdict.equal


def _make_devices(meshes: Sequence[Mesh]) -> None:
    if not _compat.jax_is_running():
        virtual_devices(max(mesh.size for mesh in meshes))


def _print(found: Equivalence, rows: int | None) -> None:
    import click

    click.echo(opening(found))
    for each in found.meshes:
        first, *others = mesh_lines(each, rows)
        wrong = {variable.path for variable in each.beyond}
        click.echo()
        click.secho(first, fg="green" if each.equal else "red", bold=True)
        for line in others:
            is_wrong = line.split(maxsplit=1)[0] in wrong if line.strip() else False
            click.secho(line, fg="red" if is_wrong else None)
    click.secho("\n" + closing(found), fg="green" if found.equal else "red")
