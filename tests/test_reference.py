"""The reference: examples of every name, and the errors that each raises."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from test_docs import ERRORS, PUBLIC, _docstring, _in_reference

import meshwright as mw

# Names of the reference besides `mw.*`, until each has an example. The set may only shrink.
WITHOUT_EXAMPLE = {
    "named.models.beam_search",
    "named.models.greedy",
    "ps.PerWorkerDataset",
    "ps.PerWorkerValues",
    "ps.RemoteValue",
    "ps.SidecarEvaluator",
    "testing.Equivalence",
}


def resolved(name: str) -> Any:
    value: Any = mw
    for part in name.split("."):
        value = getattr(value, part)
    return value


IN_ROOMS = [
    name
    for name in (full.removeprefix("meshwright.") for full in _in_reference())
    if "." in name
    and (inspect.isroutine(resolved(name)) or inspect.isclass(resolved(name)))
    and getattr(resolved(name), "__module__", "").startswith("meshwright")
]


def documentation(value: Any) -> str:
    own = inspect.getdoc(value) or ""
    if isinstance(value, type) and "__init__" in vars(value):
        own += "\n" + (inspect.getdoc(value.__init__) or "")
    return own


def test_the_names_of_rooms_have_examples() -> None:
    without = {name for name in IN_ROOMS if ">>> " not in documentation(resolved(name))}
    assert len(IN_ROOMS) > 150
    assert without == WITHOUT_EXAMPLE


# What is raised


def raised_in(function: Any) -> set[str]:
    """The library's errors that the body of a function raises itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    called = [ast.unparse(error.func) for error in raised if isinstance(error, ast.Call)]
    return {name.rpartition(".")[2] for name in called} & set(ERRORS)


def functions_of(name: str) -> Iterator[tuple[str, Any, str]]:
    """The functions that a public name stands for, and the text that says what they raise."""
    value = getattr(mw, name)
    if inspect.isfunction(value):
        yield name, value, _docstring(name)
    if not isinstance(value, type):
        return
    for member, raw in vars(value).items():
        function = getattr(raw, "__func__", None) or getattr(raw, "fget", None) or raw
        makes = member in ("__init__", "__new__", "__post_init__")
        written = inspect.isfunction(function) and not function.__code__.co_filename.startswith("<")
        if written and (makes or not member.startswith("_")):  # not what dataclasses generate
            text = _docstring(name) if makes else inspect.getdoc(function) or ""
            yield f"{name}.{member}", function, text


def unnamed(functions: Iterator[tuple[str, Any, str]]) -> set[tuple[str, str]]:
    """Errors that a function raises and that no sentence with "raise" names."""
    return {
        (name, error)
        for name, function, text in functions
        for error in raised_in(function)
        if not re.search(rf"[Rr]aises?\b[^>]*\b{error}\b", text)
    }


def test_docstrings_name_the_errors_that_bodies_raise() -> None:
    names = [name for name in PUBLIC if name not in ERRORS]
    assert {fault for name in names for fault in unnamed(functions_of(name))} == set()


def test_an_error_that_no_sentence_names_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(size: int) -> None:
        """Do something. Raises :class:`MeshError` for nothing."""
        raise mw.errors.LayoutError(f"{size}")

    monkeypatch.setattr(mw, "wrong", wrong, raising=False)
    assert unnamed(functions_of("wrong")) == {("wrong", "LayoutError")}
