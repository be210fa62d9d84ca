"""What a page is made of: the macros of ``templates/elements.html``, called from here.

Their results are elements; any other text is escaped when a template shows it, always.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jinja2
from markupsafe import Markup

Kind = Literal["num", "path", "dims", "word", "words", "name"]


@functools.cache
def environment() -> jinja2.Environment:
    """The templates."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("meshwright.display"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@functools.cache
def macro(template: str, name: str) -> Any:
    """A macro of a template."""
    return getattr(environment().get_template(template).module, name)


@functools.cache
def source(name: str) -> Markup:
    """The text of a file beside the templates, such as a style sheet."""
    loader = environment().loader
    assert loader is not None
    return Markup(loader.get_source(environment(), name)[0])


def element(name: str, /, *values: Any, **more: Any) -> Markup:
    """An element, by the macro of its name.

    >>> element("path", "block_0/<b>")
    Markup('block_0/<wbr/>&lt;b&gt;')
    """
    return macro("elements.html", name)(*values, **more)


class Part(NamedTuple):
    """A part of a bar; ``paint`` is one of the paints of page.css, ``text`` its size in words."""

    name: str
    size: float
    text: str
    paint: str


class Column(NamedTuple):
    """A column of a table: its heading, and what it holds.

    Numbers stand at the right, paths break anywhere, dims and a word stay on a line, words have
    room, names are bold.
    """

    title: str
    kind: Kind | None = None


class Cell(NamedTuple):
    """What a cell of a table shows, and the number by which it is sorted instead of its text."""

    text: str
    key: float | None = None
