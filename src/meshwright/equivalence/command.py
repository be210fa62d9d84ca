"""The command ``meshwright check``: find ``build``, make the devices, check, print."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import _compat
from ..errors import LayoutError, MeshwrightError, ModelError
from ..layout import Layout
from ..mesh import Mesh
from ..topology import virtual_devices
from .check import check
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
        found = _found(build)  # its module may make arrays
        _make_devices(meshes)  # the module may have asked for fewer
        verdict = check(found, meshes, layouts, double=double, **how, **options)
    _print(verdict, rows)
    return verdict.equal


def _make_devices(meshes: Sequence[Mesh]) -> None:
    if not _compat.jax_is_running():
        virtual_devices(max(mesh.size for mesh in meshes))


def _found(text: str) -> Callable[[], Any]:
    """The function that ``module:name`` or ``file.py:name`` means. Raises :class:`ModelError`."""
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise ModelError(f"{text!r} is not module:function, such as train:build.")
    sys.path.insert(0, str(Path.cwd()))
    module = _module(place)
    found = getattr(module, name, None)
    if callable(found):
        return found
    functions = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
    near = difflib.get_close_matches(name, functions, n=3, cutoff=0.4) or functions[:8]
    what = "has nothing called" if found is None else "has no function but a value called"
    raise ModelError(f"{place} {what} {name!r}. Functions there: {', '.join(near) or 'none'}.")


def _module(place: str) -> Any:
    try:
        return _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except MeshwrightError:
        raise
    except Exception as error:
        top = place.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name in (place, top):
            raise ModelError(
                f"there is no module {error.name!r} here ({Path.cwd()}) nor among what is "
                "installed. Name one that can be imported from here, or a file: "
                f"{place.replace('.', '/')}.py:build."
            ) from error
        raise ModelError(
            f"importing {place} failed: {type(error).__name__}: {error} ({_where(error)})."
        ) from error


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"there is no file {path} here ({Path.cwd()}).")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # it is a .py file
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _where(error: Exception) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}, line {error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}"


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
