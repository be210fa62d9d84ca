"""Every ``python`` block in the README and in docs/ runs, page by page, in a fresh process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_of(page: Path) -> str:
    blocks = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return "\n".join(blocks.findall(page.read_text()))


def _in_turn() -> list[object]:
    """The README always; the other pages are a minute together."""
    return [
        pytest.param(page, id=page.name, marks=() if page.name == "README.md" else pytest.mark.full)
        for page in PAGES
    ]


@pytest.mark.full_for("README.md")
@pytest.mark.parametrize("page", _in_turn())
def test_the_code_of_each_page_runs(page: Path, tmp_path: Path) -> None:
    code = code_of(page)
    if page.name == "README.md":  # the subset is enough to see that it runs
        code = re.sub(r"\bmnist\b", "shipped_subset", code)
    assert code, f"{page.name} shows no code"
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_every_public_name_is_mentioned_in_the_documentation() -> None:
    import meshwright as mw

    told = "\n".join(page.read_text() for page in PAGES)
    names = [n for n in dir(mw) if not n.startswith("_") and callable(getattr(mw, n))]
    names = [n for n in names if (getattr(mw, n).__module__ or "").startswith("meshwright")]
    assert [n for n in names if n not in told] == []


def test_every_name_of_the_named_language_is_on_its_page() -> None:
    import meshwright.named as mn

    told = set(re.findall(r"\w+", (ROOT / "docs" / "named.md").read_text()))
    public = {
        name
        for name, value in vars(mn).items()
        if not name.startswith("_") and (getattr(value, "__module__", "") or "").startswith("mesh")
    }
    assert len(public) > 50
    assert public - told == set()
