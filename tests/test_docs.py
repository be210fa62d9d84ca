"""The documentation: its code runs, its links lead somewhere, and its reference is complete."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
import meshwright.errors

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# Code


def code_of(page: Path) -> str:
    blocks = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return "\n".join(blocks.findall(page.read_text()))


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page)], ids=page_id)
def test_the_code_of_each_page_runs(page: Path, tmp_path: Path) -> None:
    code = code_of(page)
    if page == README:  # the subset is enough to see that it runs
        code = re.sub(r"\bmnist\b", "shipped_subset", code)
    code = code.replace('mw.calibrate("cpu:8")', "None")  # a minute, and its doctest is run as well
    env = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "NPROC")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env=env,
    )
    assert "MeshwrightWarning" not in run.stderr
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("folder", ["tutorials", "guides", "coming_from"])
def test_tutorials_and_guides_show_code_that_runs(folder: str) -> None:
    without = {p.stem for p in (DOCS / folder).glob("*.md") if not code_of(p)}
    assert without <= {"lock_file", "platforms"}  # of which all is in the terminal


# Links and pages


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    root = DOCS if DOCS in page.parents else ROOT  # a page of the site links within it
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    targets = [(page.parent / link).resolve() for link in links]
    assert [str(t) for t in targets if not t.exists() or not t.is_relative_to(root)] == []


def _pages_in(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else _pages_in(target)


def test_the_navigation_has_every_page_once() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text())
    pages = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert sorted(_pages_in(site["project"]["nav"])) == pages


def test_the_command_line_page_is_what_help_prints() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from command_line import PAGE, updated
    finally:
        sys.path.pop(0)
    page = PAGE.read_text()
    assert updated(page) == page, "run python tools/command_line.py"


# The reference

PUBLIC = sorted(
    set(re.findall(r" as (?!_)(\w+)\n", Path(mw.__file__).read_text()))
    - {"keras", "named", "ps", "testing"}  # rooms with lists of their own
)
ERRORS = [
    name
    for name, value in vars(meshwright.errors).items()
    if isinstance(value, type) and value.__module__ == "meshwright.errors"
]


def _in_reference() -> list[str]:
    pages = (DOCS / "reference").glob("*.md")
    return [name for page in pages for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.M)]


def test_the_reference_has_every_public_name_once() -> None:
    names = [name.removeprefix("meshwright.") for name in _in_reference()]
    assert len(names) == len(set(names))
    assert [name for name in PUBLIC if name not in names] == []
    ps = set(vars(mw.ps)["_LAZY"])
    assert {f"ps.{name}" for name in ps} <= set(names)


def test_every_name_of_the_named_language_is_on_its_pages() -> None:
    import meshwright.named as mn

    public = {
        name
        for name, value in vars(mn).items()
        if not name.startswith("_") and (getattr(value, "__module__", "") or "").startswith("mesh")
    }
    assert len(public) > 50
    guide = set(re.findall(r"\w+", (DOCS / "guides" / "named.md").read_text()))
    assert public - guide == set()
    assert {f"meshwright.named.{name}" for name in public} <= set(_in_reference())


def test_every_name_in_the_reference_exists() -> None:
    for name in _in_reference():
        value: Any = mw
        for part in name.split(".")[1:]:
            value = getattr(value, part)


def _docstring(name: str) -> str:
    """The docstring of a public name; of a class with that of its ``__init__``."""
    value = getattr(mw, name)
    own = inspect.getdoc(value) or ""
    if isinstance(value, type) and "__init__" in vars(value):
        own += "\n" + (inspect.getdoc(value.__init__) or "")
    return own


def undocumented(name: str) -> list[str]:
    """Arguments of a public name that its docstring does not name."""
    try:
        parameters = inspect.signature(getattr(mw, name)).parameters.values()
    except ValueError:  # an exception without arguments of its own
        return []
    text = _docstring(name)
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [one for one in names if not re.search(rf"``[^`]*\b{one}\b[^`]*``", text)]


FUNCTIONS_AND_CLASSES = [name for name in PUBLIC if not isinstance(getattr(mw, name), str)]


@pytest.mark.parametrize("name", FUNCTIONS_AND_CLASSES)
def test_every_public_name_has_a_summary_its_arguments_and_an_example(name: str) -> None:
    text = _docstring(name)
    summary = text.partition("\n\n")[0]
    assert re.match(r"[A-Z`].*[.:]$", summary, re.DOTALL), summary
    if name not in ERRORS:  # users do not make these; their examples are on docs/errors.md
        assert undocumented(name) == []
        assert ">>> " in text
    value = getattr(mw, name)
    members = vars(value).items() if isinstance(value, type) else ()
    assert [
        member
        for member, function in members
        if not member.startswith("_")
        and (callable(function) or isinstance(function, property | classmethod | staticmethod))
        and not inspect.getdoc(function)
    ] == []


def test_an_argument_that_no_sentence_names_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def incomplete(mesh: Any, size: int) -> None:
        """Do something with ``mesh``."""

    monkeypatch.setattr(mw, "incomplete", incomplete, raising=False)
    assert undocumented("incomplete") == ["size"]


def test_every_error_is_on_the_page_of_errors_with_a_way_out() -> None:
    text = (DOCS / "errors.md").read_text()
    sections = dict(re.findall(r"^##+ (\w+)\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE))
    assert [name for name in ERRORS if name not in sections] == []
    base = {"MeshwrightError", "MeshwrightWarning"}
    assert [n for n in ERRORS if n not in base and "**Way out:**" not in sections[n]] == []
    assert [name for name in ERRORS if name not in PUBLIC] == []
    table = re.findall(r"^\| \[`(\w+)`\]\(#", text, re.MULTILINE)
    assert sorted(table) == sorted(set(ERRORS) - base)


# The files of the project


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert "version" not in project


def test_contributing_shows_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    source = ROOT / "src" / "meshwright"
    rooms = {path.parent.name for path in source.glob("*/__init__.py")}
    assert {room for room in rooms if f"`{room}/`" not in text} == set()
