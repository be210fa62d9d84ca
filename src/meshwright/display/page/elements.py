"""What a page is made of: values that the macros of ``templates/elements.html`` draw as HTML."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jinja2
from markupsafe import Markup as Markup

Kind = Literal["num", "path", "dims", "word", "words", "name"]


class Element:
    """A value that a template draws by the macro of its name; texts in it are escaped."""

    def __html__(self) -> str:
        return macro("elements.html", type(self).__name__.lower())(self)


Child = str | Element | Markup


@functools.cache
def environment() -> jinja2.Environment:
    """The templates; whatever is not an element is escaped, always."""
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


@dataclass(frozen=True)
class Path(Element):
    """A path, after whose slashes a line may break."""

    text: str


@dataclass(frozen=True)
class Code(Element):
    """A text of code."""

    text: str


@dataclass(frozen=True)
class Folded(Element):
    """A text that unfolds to more."""

    first: str
    note: str
    rest: str


@dataclass(frozen=True)
class Lines(Element):
    """One under the other; a last one may be small."""

    lines: Sequence[Child]
    small: str = ""


class Part(NamedTuple):
    """A part of a bar; ``paint`` is one of the paints of page.css, ``text`` its size in words."""

    name: str
    size: float
    text: str
    paint: str


@dataclass(frozen=True)
class Bar(Element):
    """Parts side by side, ``whole`` being the full width; ``limit`` marks a place on it."""

    parts: Sequence[Part]
    whole: float
    label: str
    limit: float | None = None


@dataclass(frozen=True)
class Bars(Element):
    """Bars under each other, in one cell of a table."""

    bars: Sequence[Bar]


@dataclass(frozen=True)
class Chart(Element):
    """Bars with a name and a text each: ``rows`` holds ``(name, bar, text)``.

    ``key`` says what the paints mean: pairs of a name and a paint.
    """

    caption: str
    rows: Sequence[tuple[str, Bar, str]]
    key: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Key(Element):
    """What the paints mean: pairs of a name and a paint."""

    names: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Swatch(Element):
    """A name with a sample of its paint."""

    name: str
    paint: str


class Column(NamedTuple):
    """A column: its heading, and what it holds.

    Numbers stand at the right, paths break anywhere, dims and a word stay on a line, words have
    room, names are bold.
    """

    title: str
    kind: Kind | None = None


class Cell(NamedTuple):
    """What a cell shows, and the number by which it is sorted where its text will not do."""

    shown: Child
    key: float | None = None


@dataclass(frozen=True)
class Table(Element):
    """A table that a reader can sort and filter; without scripts, and in print, it is whole.

    On a screen it has the first ``shown`` rows, and the rest on demand; with ``None`` its order
    means something, and it is not sorted. ``marks`` says of each row whether it is to stand out.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell | Child]]
    shown: int | None = 20
    marks: Sequence[bool] = ()

    @property
    def body(self) -> list[tuple[bool, list[tuple[Column, Cell]]]]:
        """Every row: whether it is marked, and its cells with their columns."""
        marks = [*self.marks, *[False] * (len(self.rows) - len(self.marks))]
        return [
            (mark, [(c, x if isinstance(x, Cell) else Cell(x)) for c, x in _pairs(self, row)])
            for mark, row in zip(marks, self.rows, strict=True)
        ]


def _pairs(table: Table, row: Sequence[Cell | Child]) -> Any:
    return zip(table.columns, row, strict=True)


def names(texts: Sequence[str], common: str) -> Child:
    """A path that stands for several, which unfold."""
    return Path(common) if len(texts) == 1 else Folded(common, "", ", ".join(texts))
