"""Finds the function ``build`` that a command names as ``module:name``."""

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
from ..jaxprs.lines import user_lines
from ..planning.faults import as_model_error, in_short

_FEW = 8  # functions that a sentence lists


def find_build(text: str) -> Callable[[], Any]:
    """The function that ``module:name`` or ``file.py:name`` means. Raises :class:`ModelError`.

    What the function itself raises becomes a :class:`ModelError` with the lines of its code alone.
    """
    place, name = check_place(text)
    module = _module(place)
    function = getattr(module, name, None)
    if callable(function):
        user_code = as_model_error(
            f"{text} cannot build the model", " (--traceback shows all of it)"
        )
        return user_code(function)
    functions = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
    fault = "has no function" if function is None else "has a value, not a function, named"
    raise ModelError(f"{place} {fault} {name!r}. {_those_of(functions, name)}.")


def _those_of(functions: list[str], name: str) -> str:
    """The functions of a module, or the nearest of many."""
    if len(functions) <= _FEW:
        return f"Its functions: {', '.join(functions) or 'none'}"
    near = difflib.get_close_matches(name, functions, n=3, cutoff=0.4)
    if near:
        return f"It has {len(functions)}; the nearest: {', '.join(near)}"
    return f"It has {len(functions)}: {', '.join(functions[:_FEW])}, ..."


def check_place(text: str) -> tuple[str, str]:
    """Module or file, and function, of ``module:name``; the module is looked for, not imported.

    Raises :class:`ModelError` for another text, or if there is no such module or file.
    """
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise ModelError(f"expected module:function, such as train:build; received {text!r}.")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ModelError(f"no file {place} in {Path.cwd()}.")
        return place, name
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    top = place.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise ModelError(_not_found(place, top))
    return place, name


def _not_found(place: str, missing: str) -> str:
    file = f"{place.replace('.', '/')}.py"
    return (
        f"no module {missing!r} in {Path.cwd()}, and none is installed. Name a module that can be "
        f"imported from here, or a file: {file}:build."
    )


def _module(place: str) -> Any:
    try:
        return _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except MeshwrightError:
        raise
    except SystemExit as error:
        raise ModelError(
            f"importing {place} ended the program: {in_short(error)} ({_where(error)}). Put what "
            "only a script does under if __name__ == '__main__'."
        ) from error
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            raise ModelError(_not_found(place, str(error.name))) from error
        words = error.msg if isinstance(error, SyntaxError) else str(error)
        failure = ModelError(
            f"importing {place} failed: {type(error).__name__}: {words} ({_where(error)})."
            + (_as_module(place) if "no known parent package" in words else "")
        )
        for line in user_lines(error)[:-1]:
            failure.add_note(f"  {line}")
        raise failure from error


def _as_module(place: str) -> str:
    """The way out for a file that imports others of its package by dots."""
    path = Path(place).resolve()
    if not path.is_relative_to(here := Path.cwd()):
        return " Name it as a module, in the folder that holds its package."
    return f" Name it as a module: {'.'.join(path.relative_to(here).with_suffix('').parts)}:build."


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # it is a .py file
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}, line {error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}"
