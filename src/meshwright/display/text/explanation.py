"""Where the variables of a model lie, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...units import bytes_text, share_text
from .columns import Columns, Line, Paragraphs, paragraphs
from .ticks import tick_table_text

if TYPE_CHECKING:
    from ...layouts.explain import Explanation
    from ...layouts.params import Placed
    from ...stages.shares import StageShare

STAGE_HEADINGS = ("stage", "has", "FLOPs", "weights and slots")
_SHOWN = 3  # branches of a device
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
    parts = [Line(head, "bold"), rule, body, rule, Line(foot, "bold")]
    if not explanation.stages:
        return paragraphs(*parts)
    kind = explanation.stages[0].kind
    stages = Columns(
        [(kind, *STAGE_HEADINGS[1:]), *map(stage_row, explanation.stages)], right=(2, 3)
    )
    ticks = explanation.ticks
    shares = [share.flops_share for share in explanation.stages]
    more = ("", tick_table_text(ticks, shares).parts) if ticks is not None else ()
    layers = Columns([("layer", kind), *explanation.layers])
    notes = [f"note: {note}" for note in explanation.notes]
    return paragraphs(*parts, "", stages, "", layers, *more, *(("", notes) if notes else ()))


def stage_row(share: StageShare) -> tuple[str, str, str, str]:
    """A stage of a pipeline, what it has, its share of the FLOPs, and what only it holds."""
    name = f"{share.kind} {share.stage}"
    return name, _has(share), share_text(share.flops_share), bytes_text(share.held_bytes)


def _has(share: StageShare) -> str:
    if share.spans:
        more = f" and {len(share.spans) - _SHOWN} more" * (len(share.spans) > _SHOWN)
        return ", ".join(share.spans[:_SHOWN]) + more
    if not share.blocks:
        first, *_, last = (*share.params, *share.params) or ("no weights",) * 2
        return first if first == last else f"{first} to {last}"
    blocks = share.blocks
    first, last = min(blocks), max(blocks)
    in_turn = len(blocks) > 1 and last - first == len(blocks) - 1
    text = f"{first} to {last}" if in_turn else ", ".join(map(str, blocks))
    before = "what comes before, " * share.before
    part = f"1/{share.after_of} of " * (share.after_of > 1)
    after = f", {part}what comes after" * share.after
    return f"{before}block{'s' * (len(blocks) > 1)} {text}{after}"


def explanation_row(placed: Placed) -> tuple[str, ...]:
    """A variable under the headings of the table."""
    dims = "x".join(map(str, placed.info.dims)) or "scalar"
    if placed.names is not None and placed.names.rank:
        dims = " ".join(map(str, placed.names.of(placed.info.dims)))
    layout = str(placed.layout.unbound())
    return placed.info.path, dims, layout, f"{placed.bytes_per_device:,}", placed.reason
