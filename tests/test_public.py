"""The public list: every name is found, and the three places that list them agree."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import meshwright as mw

TREE = ast.parse(Path(mw.__file__).read_text())


def names_imported(body: list[ast.stmt]) -> dict[str, str]:
    """Public name -> the room that it is imported from."""
    return {
        alias.asname or alias.name: node.module or ""
        for node in body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }


def names_for_type_checkers() -> dict[str, str]:
    (block,) = (
        node
        for node in TREE.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return names_imported(block.body)


def names_at_run_time() -> dict[str, str]:
    # A module that is offered as a whole is written `from .frontends import keras`.
    modules = {name: room.rpartition(".")[0] for name, room in mw._LAZY_MODULES.items()}
    return {**mw._LAZY, **modules}


EAGER = {name for name in names_imported(TREE.body) if not name.startswith("settle_")}
PUBLIC = sorted(EAGER | set(names_at_run_time()))


def test_type_checkers_and_the_lazy_table_know_the_same_names_in_the_same_rooms():
    assert names_for_type_checkers() == names_at_run_time()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_found(name):
    assert getattr(mw, name) is not None
    assert name in dir(mw)


def test_a_name_is_either_imported_at_once_or_lazily():
    assert not EAGER & set(names_at_run_time())


def test_every_name_is_declared_as_public():
    # `X as X` is how a package tells type checkers that a name is meant for its users.
    for node in ast.walk(TREE):
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                used_here = (alias.asname or "").startswith("_")
                assert alias.asname == alias.name or used_here, alias.name


def test_every_error_is_public_and_stands_in_one_tree():
    from meshwright import errors

    mine = {name: member for name, member in vars(errors).items() if isinstance(member, type)}
    assert set(mine) <= set(PUBLIC)
    for name, cls in mine.items():
        assert issubclass(cls, mw.MeshwrightError | UserWarning | SystemExit), name
        assert name in (errors.__doc__ or ""), f"{name} is not drawn"
        assert cls.__doc__


def test_public_functions_and_classes_say_what_they_are():
    # A Protocol or a NamedTuple has a docstring as well; only constants have none.
    for name in PUBLIC:
        value = getattr(mw, name)
        if not isinstance(value, str):
            assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_a_misspelt_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'meshwright' has no attribute 'Shraded'"):
        mw.Shraded  # noqa: B018


def test_type_checkers_see_that_the_package_has_types():
    assert Path(mw.__file__).with_name("py.typed").is_file()


@pytest.mark.parametrize("name", ["plan", "dry_run", "measure"])
def test_every_argument_has_a_name_and_a_type(name):
    parameters = inspect.signature(getattr(mw, name)).parameters.values()
    assert {parameter.kind for parameter in parameters} == {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }
    assert not [
        parameter.name
        for parameter in parameters
        if parameter.annotation in (parameter.empty, "Any")
    ]
    assert sum(parameter.default is not parameter.empty for parameter in parameters) <= 8
