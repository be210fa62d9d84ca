"""A sheet as one self-contained SVG: each mesh, and beside it the tensors cut over it.

Every tensor stands over its mesh: the colour of a piece above is the colour of the devices below
that hold it. No scripts, no fonts, no links, so the file can stand in a README or a report.
"""

from __future__ import annotations

from .canvas import Canvas, text_width, wrap_text
from .key import KEY, draw_key
from .painting import LEGEND, draw_sample
from .palette import INK, PAPER, RULE, SOFT
from .sheet import Items, Section, Sheet, as_sheet
from .tensor import COLUMN, Frame, draw_tensor
from .tiling import Tiling
from .words import copies_text, dims_text, specs_text

_MARGIN, _GUTTER = 32.0, 18.0
_MOST_COLUMNS = 4


def draw_svg(items: Items, title: str = "") -> str:
    """The text of an SVG file that shows how tensors lie on their meshes.

    ``items`` is a :class:`Sheet`, a :class:`Section`, a :class:`Drawn` or a sequence of the last
    two. Raises :class:`LayoutError` for a layout that is unbound or does not fit.

    >>> from meshwright import Layout, Mesh
    >>> from meshwright.display.drawing import Drawn
    >>> layout = Layout([None, "model"], Mesh({"batch": 4, "model": 2}))
    >>> kernel = Drawn("kernel", (784, 128), layout)
    >>> draw_svg(kernel, title="One kernel").startswith("<svg")
    True
    """
    sheet = as_sheet(items, title)
    longest = max((len(section.tensors) for section in sheet.sections), default=0)
    columns = min(longest, _MOST_COLUMNS)
    width = 2 * _MARGIN + KEY + columns * (COLUMN + _GUTTER)
    canvas = Canvas()
    y = _heading(canvas, sheet, width)
    for section in sheet.sections:
        y = _section(canvas, section, columns, width, y)
    height = _legend(canvas, width, y) if columns else y
    name = sheet.title or "Layouts of tensors on a mesh"
    return canvas.finish(width, height, name, _description(sheet), PAPER, RULE)


def _heading(canvas: Canvas, sheet: Sheet, width: float) -> float:
    y = 20.0
    for line in wrap_text(sheet.title, width - 2 * _MARGIN, 22, bold=True):
        y += 26
        canvas.text(_MARGIN, y, line, 22, font_weight=700, fill=INK)
    for line in wrap_text(sheet.note, width - 2 * _MARGIN, 14):
        y += 22
        canvas.text(_MARGIN, y, line, 14, fill=SOFT)
    return y + 18 if sheet.title or sheet.note else y


def _section(canvas: Canvas, section: Section, columns: int, width: float, y: float) -> float:
    if section.title or section.note:
        y = _section_heading(canvas, section, width, y)
    tilings = [Tiling.of(tensor) for tensor in section.tensors]
    starts = range(0, max(len(tilings), 1), max(columns, 1))
    rows = [tilings[start : start + columns] for start in starts]
    for number, row in enumerate(rows):
        frame = Frame.around(section.mesh, row)
        if number == 0:
            draw_key(canvas, section, frame, _MARGIN, y)
        for place, tiling in enumerate(row):
            x = _MARGIN + KEY + _GUTTER + place * (COLUMN + _GUTTER)
            draw_tensor(canvas, tiling, frame, x, y)
        y += frame.height + 26
    return y + 4


def _section_heading(canvas: Canvas, section: Section, width: float, y: float) -> float:
    canvas.line([(_MARGIN, y), (width - _MARGIN, y)], stroke=RULE)
    room = width - 2 * _MARGIN
    y += 8
    for line in wrap_text(section.title, room, 16, bold=True):
        y += 20
        canvas.text(_MARGIN, y, line, 16, font_weight=700, fill=INK)
    title_and_note = text_width(section.title, 16, bold=True) + text_width(section.note, 14)
    if section.title and section.note and title_and_note + 24 <= room:
        canvas.text(width - _MARGIN, y, section.note, 14, text_anchor="end", fill=SOFT)
        return y + 14
    for line in wrap_text(section.note, room, 14):
        y += 20
        canvas.text(_MARGIN, y, line, 14, fill=SOFT)
    return y + 14


def _legend(canvas: Canvas, width: float, y: float) -> float:
    """What the colours, stripes and bars mean; returns the height of the picture."""
    canvas.line([(_MARGIN, y), (width - _MARGIN, y)], stroke=RULE)
    x, y = _MARGIN, y + 28
    for sample, text in LEGEND.items():
        needed = 28 + text_width(text, 13)
        if x > _MARGIN and x + needed > width - _MARGIN:
            x, y = _MARGIN, y + 24
        draw_sample(canvas, sample, x, y)
        canvas.text(x + 28, y, text, 13, fill=SOFT)
        x += needed + 20
    return y + 24


def _description(sheet: Sheet) -> str:
    """The picture in words, for readers that cannot see it."""
    sentences = []
    for section in sheet.sections:
        title = f"{section.title}: " if section.title else ""
        sentences.append(f"{title}mesh {section.mesh}.")
        for tensor in section.tensors:
            tiling = Tiling.of(tensor)
            sentences.append(
                f"{tensor.name}, {dims_text(tensor.dims)}, {specs_text(tensor.layout)}: "
                f"{copies_text(tiling)}."
            )
    return " ".join(sentences)
