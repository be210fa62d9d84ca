"""Tables of recorded results in docs/explanation/plans.md, by the scripts that record them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "plans.md"


def _between(script: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?<=<!-- made by benchmarks/{re.escape(script)} -->\n).*?(?=<!-- end -->)", re.DOTALL
    )


def shown(script: str) -> str:
    """The table of a script as the page has it."""
    found = _between(script).search(PAGE.read_text())
    assert found is not None, f"{PAGE.name} has no place for {script}"
    return found[0].strip()


def show(script: str, table: str) -> None:
    """Put the table of a script into the page."""
    text = PAGE.read_text()
    PAGE.write_text(_between(script).sub(lambda _: f"\n{table}\n\n", text, count=1))
