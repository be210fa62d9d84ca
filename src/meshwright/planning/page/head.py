"""The top of the page: does it fit, how long does it take, what bounds it; notes at its foot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...units import UNKNOWN, bytes_text, flops_text, seconds_text, share_text
from ..tables import by_the_model
from .grid import Column, grid
from .markup import Child, Html, section, tag

if TYPE_CHECKING:
    from ..report import DryRun


def head(run: DryRun) -> Html:
    """Name, verdict and the figures that people ask for first."""
    axes = " × ".join(f"{axis}={size}" for axis, size in run.axes)
    devices = run.target.num_devices
    return tag(
        "header",
        tag("p", "Meshwright dry run", class_="over"),
        tag("h1", run.name),
        tag("p", tag("b", str(run.target)), f", {devices:,} devices, mesh {axes}", class_="under"),
        _verdict(run),
        _not_compiled(run),
        [tag("p", f"✗ Error: {error}", class_="warning") for error in run.errors],
        tag("dl", [tag("div", tag("dt", n), tag("dd", *v)) for n, v in _figures(run)]),
    )


def _verdict(run: DryRun) -> Html:
    free = run.memory.free_bytes
    if run.fits is None:
        said = "? Fit unknown: device memory not known"
        return tag("p", said, class_="verdict maybe")
    if run.fits:
        return tag("p", f"✓ Fits, with {bytes_text(free or 0)} to spare", class_="verdict good")
    by = "" if free is None else f", by {bytes_text(-free)}"
    return tag("p", f"✗ Does not fit{by}", class_="verdict bad")


def _not_compiled(run: DryRun) -> Html | None:
    said = f"By the {by_the_model(run)}"
    return tag("p", said, class_="verdict maybe") if run.is_analytic else None


def _figures(run: DryRun) -> list[tuple[str, list[Child]]]:
    memory = run.memory
    of = "" if memory.available_bytes is None else f"of {bytes_text(memory.available_bytes)}"
    figures = [
        ("peak of a device", bytes_text(memory.peak_bytes), of),
        ("time of a step", seconds_text(run.step_time_s), "estimated" if run.step_time_s else ""),
        ("MFU", share_text(run.mfu), "of the peak FLOP/s" if run.mfu is not None else ""),
        ("bound by", run.bound_by or UNKNOWN, ""),
        ("replicated", share_text(run.replicated_share), "of all devices' FLOPs"),
        ("FLOPs of a device", UNKNOWN if run.flops is None else flops_text(run.flops), "in a step"),
    ]
    if run.samples_per_s:
        figures.append(("samples per second", f"{run.samples_per_s:,.0f}", "of all devices"))
    if run.tokens_per_s:
        figures.append(("tokens per second", f"{run.tokens_per_s:,.0f}", "of all devices"))
    if run.compiled is not None or run.is_analytic:
        found = len(run.unexpected)
        says = "see their remedies" if found else "all asked for"
        figures.append(("unexpected collectives", str(found), says))
    return [
        (name, [tag("b", value), tag("small", more) if more else None])
        for name, value, more in figures
    ]


def notes_section(run: DryRun) -> Html | None:
    """What was assumed, and where the numbers of the hardware are from."""
    said = [*run.notes]
    if run.estimate is not None:
        said += run.estimate.assumptions
    sources = () if run.hardware is None else run.hardware.sources
    if not said and not sources:
        return None
    columns = (Column("number"), Column("source", "path"))
    rows = [(name, source) for name, source in sources]
    table = None
    if rows and run.hardware is not None:
        caption = f"The numbers of {run.hardware.name}, and where they are from"
        table = grid("sources-table", caption, columns, rows, shown=None)
    return section(
        "notes",
        "Notes",
        tag("ul", [tag("li", _sentence(each)) for each in said]) if said else None,
        tag("details", tag("summary", "Sources of the hardware's numbers"), table)
        if table
        else None,
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."
