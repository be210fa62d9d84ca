"""A small writer of SVG: shapes, texts, and an estimate of how wide a text will be."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

SANS = "'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "ui-monospace, Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace"

Point = tuple[float, float]

# Widths in em of a common sans-serif, rounded up: the reader's font is not known here.
_NARROW, _WIDE = frozenset("ijl.,:;|!'()[]ftIr /–·"), frozenset("mwMWGOQ@%")
_MONO_EM = 0.605


def text_width(text: str, size: float, bold: bool = False, mono: bool = False) -> float:
    """About how many pixels a text of this font size takes, rather more than less."""
    if mono:
        return len(text) * size * _MONO_EM
    ems = sum(
        0.36 if c in _NARROW else 0.9 if c in _WIDE else 0.72 if c.isupper() else 0.58 for c in text
    )
    return ems * size * (1.06 if bold else 1.0)


def clip_text(text: str, width: float, size: float, bold: bool = False, mono: bool = False) -> str:
    """The text, or its end after an ellipsis where it is too wide: the end of a path tells most."""
    clipped = text
    while "/" in clipped.lstrip("…/") and text_width(clipped, size, bold, mono) > width:
        clipped = "…/" + clipped.lstrip("…/").partition("/")[2]
    while len(clipped) > 1 and text_width(clipped, size, bold, mono) > width:
        clipped = "…" + clipped.lstrip("…")[1:]
    return clipped


def wrap_path(path: str, width: float, size: float, bold: bool = False) -> list[str]:
    """A path in one line or in two, broken after slashes; of a longer one the end.

    >>> wrap_path("net/encoder/block_0/attention/query/kernel", 166, 15, bold=True)
    ['…/block_0/attention/', 'query/kernel']
    """
    parts = re.findall(r"[^/]*/|[^/]+$", path)
    if text_width(path, size, bold) <= width or len(parts) < 2:
        return [clip_text(path, width, size, bold)]
    lasts = ["".join(parts[cut:]) for cut in range(1, len(parts))]
    last = next((text for text in lasts if text_width(text, size, bold) <= width), lasts[-1])
    first = path[: len(path) - len(last) - 1]
    room = width - text_width("/", size, bold)
    return [clip_text(first, room, size, bold) + "/", clip_text(last, width, size, bold)]


def wrap_text(
    text: str, width: float, size: float, bold: bool = False, mono: bool = False
) -> list[str]:
    """The text in as many lines as it needs, broken after spaces and plus signs."""
    lines: list[str] = []
    for word in re.findall(r"[^ +]*[ +]|[^ +]+", text):
        if lines and text_width((lines[-1] + word).rstrip(), size, bold, mono) <= width:
            lines[-1] += word
        else:
            lines.append(word)
    return [line.rstrip() for line in lines]


class Canvas:
    """Collects the elements of one picture.

    ``name`` must be unique on a page with several, because the names of their paints begin with it.
    """

    def __init__(self, name: str = "mw") -> None:
        self._name = name
        self._body: list[str] = []
        self._definitions: dict[str, str] = {}

    def rect(self, x: float, y: float, width: float, height: float, **style: object) -> None:
        """A rectangle; ``rx`` rounds its corners."""
        self._add("rect", {"x": x, "y": y, "width": width, "height": height, **style})

    def polygons(self, shapes: Iterable[Iterable[Point]], title: str = "", **style: object) -> None:
        """Closed shapes of one style; ``title`` appears when the reader points at them."""
        path = "".join(_closed(shape) for shape in shapes)
        self._add("path", {"d": path, **style}, title=title)

    def line(self, points: Sequence[Point], **style: object) -> None:
        """An open line through the points."""
        path = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        self._add("path", {"d": path, "fill": "none", **style})

    def text(
        self, x: float, y: float, text: str, size: float, turned: bool = False, **style: object
    ) -> None:
        """A text with its baseline at ``y``; ``turned`` makes it read upwards."""
        turn = {"transform": f"rotate(-90 {_number(x)} {_number(y)})"} if turned else {}
        self._add("text", {"x": x, "y": y, "font-size": size, **turn, **style}, text)

    def hatch(self, fill: str, pale: str) -> str:
        """The paint of stripes in ``fill`` on ``pale``, to be used as a fill."""
        name = f"{self._name}-{fill[1:]}"
        self._definitions[name] = (
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{pale}"/>'
            f'<rect width="1.4" height="6" fill="{fill}" opacity="0.6"/></pattern>'
        )
        return f"url(#{name})"

    def finish(
        self, width: float, height: float, title: str, description: str, paper: str, rim: str
    ) -> str:
        """The whole file, on a sheet of paper of its own: it shall read on any background."""
        w, h = _number(width), _number(height)
        definitions = "".join(f"{definition}\n" for definition in self._definitions.values())
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" '
            f'viewBox="0 0 {w} {h}" role="img" font-family={quoteattr(SANS)}>\n'
            f"<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n"
            f"<defs>\n{definitions}</defs>\n"
            f'<rect x="0.5" y="0.5" width="{_number(width - 1)}" height="{_number(height - 1)}" '
            f'rx="10" fill="{paper}" stroke="{rim}"/>\n' + "\n".join(self._body) + "\n</svg>\n"
        )

    def _add(
        self, tag: str, attributes: dict[str, object], text: str = "", title: str = ""
    ) -> None:
        written = " ".join(
            f"{key.replace('_', '-')}={quoteattr(_number(value))}"
            for key, value in attributes.items()
            if value is not None
        )
        inner = f"<title>{escape(title)}</title>" if title else escape(text)
        self._body.append(f"<{tag} {written}>{inner}</{tag}>" if inner else f"<{tag} {written}/>")


def _closed(shape: Iterable[Point]) -> str:
    """One closed shape as steps from corner to corner, in tenths of a pixel to save room."""
    tenths = [(round(10 * x), round(10 * y)) for x, y in shape]
    steps = [
        f"{_number((x - px) / 10)} {_number((y - py) / 10)}"
        for (px, py), (x, y) in itertools.pairwise(tenths)
    ]
    x, y = tenths[0]
    return f"M{_number(x / 10)} {_number(y / 10)}l{' '.join(steps)}z"


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
