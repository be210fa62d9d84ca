"""The page for those who come from Mesh-TensorFlow lists every public name of it."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

import meshwright as mw
import meshwright.named as mn

PAGE = Path(__file__).parents[2] / "docs" / "coming_from" / "mesh_tensorflow.md"
NAMES = Path(__file__).with_name("mesh_tensorflow_names.txt")
MODULES = {
    module: names.split()
    for module, names in (
        line.split(":") for line in NAMES.read_text().splitlines() if not line.startswith("#")
    )
}


def listed(module: str) -> list[str]:
    """The names in the left column of the table of a module."""
    _, _, rest = PAGE.read_text().partition(f"\n### `{module}`\n")
    table = re.split(r"\n#", rest)[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_listed_once(module: str) -> None:
    assert sorted(listed(module)) == sorted(MODULES[module])


def test_what_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(m[nw]\.[A-Za-z_][\w.]*\w)", PAGE.read_text()))
    assert len(named) > 100

    def is_there(path: str) -> bool:
        start, *rest = path.split(".")
        try:
            functools.reduce(getattr, rest, {"mn": mn, "mw": mw}[start])
        except AttributeError:
            return False
        return True

    assert not [path for path in sorted(named) if not is_there(path)]
