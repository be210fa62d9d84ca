"""Elements of a page as text. Whatever is not an element already is escaped, always."""

from __future__ import annotations

import html
from collections.abc import Iterable

_EMPTY = ("meta", "link", "br", "wbr", "img")  # elements without an end


class Html(str):
    """Text that is an element already, and is not escaped again."""

    __slots__ = ()


Child = str | Iterable["Child"] | None


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """One element. Attributes of ``None`` are left out; ``class_`` and ``data_v`` spell dashes.

    >>> tag("p", "a < b", tag("b", "c"), class_="note", hidden=None)
    '<p class="note">a &lt; b<b>c</b></p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{joined(children)}</{name}>")


def joined(children: Child) -> Html:
    """Children one after the other, texts escaped and ``None`` left out.

    >>> joined(["1 & 2", None, [tag("i", "x")]])
    '1 &amp; 2<i>x</i>'
    """
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, str):
        return Html(html.escape(children, quote=False))
    return Html("".join(joined(child) for child in children))


def breakable(path: str) -> Html:
    """A path that a line may break after a slash.

    >>> breakable("block/up")
    'block/<wbr/>up'
    """
    first, *others = path.split("/")
    return joined([first, [["/", tag("wbr"), part] for part in others]])


def section(name: str, title: str, *children: Child) -> Html:
    """A part of the page that links lead to, with its heading."""
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *children, id=name, aria_labelledby=f"{name}-title")
