"""Finds the function ``build`` that a command is given as ``module:name``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import MeshwrightError, ModelError


def find_build(text: str) -> Callable[[], Any]:
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
