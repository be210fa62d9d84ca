"""Where the variables of a model lie, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .columns import Columns, Line, Paragraphs, paragraphs

if TYPE_CHECKING:
    from ...layouts.explain import Explanation
    from ...layouts.placement import Placed

_HEADINGS = ("variable", "dims", "layout", "bytes per device", "why")


def explanation_text(explanation: Explanation) -> Paragraphs:
    """Every variable, and the bytes of all on a device."""
    total = (
        "total",
        "",
        f"on {explanation.mesh.axes_text}",
        f"{explanation.bytes_per_device:,}",
        "",
    )
    rows = [_HEADINGS, *map(explanation_row, explanation.placed), total]
    table = Columns(rows, right=(3,), indent=0)
    head, *body, foot = str(table).splitlines()
    rule = "-" * max(len(line) for line in (head, *body, foot))
    return paragraphs(Line(head, "bold"), rule, body, rule, Line(foot, "bold"))


def explanation_row(placed: Placed) -> tuple[str, ...]:
    """A variable under the headings of the table."""
    dims = "x".join(map(str, placed.info.dims)) or "scalar"
    if placed.names is not None and placed.names.rank:
        dims = " ".join(map(str, placed.names.of(placed.info.dims)))
    layout = str(placed.layout.unbound())
    return placed.info.path, dims, layout, f"{placed.bytes_per_device:,}", placed.reason
