"""Shows docstrings on the documentation site: a Griffe extension that zensical.toml names.

Our docstrings are prose with ``code`` and doctests. Markdown would take ``>>>`` for quotations, so
doctests become code blocks. Sphinx roles such as ``:class:`Mesh` `` become links to what is in the
reference, else code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":(?:\w+:)?(?:class|func|meth|mod|attr|data|exc):`~?([^`]*)`")
_REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
_LINKED = {
    name
    for page in _REFERENCE.glob("*.md")
    for name in re.findall(r"^::: meshwright\.(\w+)$", page.read_text(), re.MULTILINE)
}
_LITERAL = re.compile(r"::\n\n((?: {4}[^\n]*\n|\n)+)")


class Docstrings(griffe.Extension):
    """Turn every docstring into Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one function, class or module."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """The docstring with doctests in fences and Sphinx roles as links or code."""
    text = _ROLE.sub(_shown, text)
    text = _LITERAL.sub(lambda literal: f":\n\n{literal[1]}", text + "\n").rstrip("\n")
    return "\n\n".join(_fenced(paragraph) for paragraph in re.split(r"\n\s*\n", text))


def _shown(role: re.Match[str]) -> str:
    name = role[1].rpartition(".")[2]
    return f"[`{name}`][meshwright.{name}]" if name in _LINKED else f"`{name}`"


def _fenced(paragraph: str) -> str:
    if not paragraph.lstrip().startswith(">>> "):
        return paragraph
    return f"```pycon\n{paragraph}\n```"
