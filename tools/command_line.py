"""Writes the help of every command into docs/reference/command_line.md; a test compares both.

python tools/command_line.py
"""

from __future__ import annotations

import re
from pathlib import Path

import click
from click.testing import CliRunner

from meshwright.cli import main as cli

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "command_line.md"
_HELP = re.compile(r"(?<=<!-- help -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(updated(PAGE.read_text()))


def updated(page: str) -> str:
    """The page with the help of the installed commands."""
    context = click.Context(cli)
    names = cli.list_commands(context)
    parts = [_section("meshwright"), *(_section(f"meshwright {name}") for name in names)]
    return _HELP.sub(lambda _: "\n" + "\n\n".join(parts) + "\n\n", page)


def _section(command: str) -> str:
    words = command.split()[1:]
    result = CliRunner().invoke(cli, [*words, "--help"], prog_name="meshwright", terminal_width=80)
    assert result.exit_code == 0, result.output
    return f"### {command}\n\n```text\n{result.output.rstrip()}\n```"


if __name__ == "__main__":
    main()
