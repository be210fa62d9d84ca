"""A dry run as tables of plain text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..hlo.alike import grouped, pattern, without_numbers
from ..hlo.traffic import alike
from ..units import bytes_text, flops_text, seconds_text, share_text

if TYPE_CHECKING:
    from ..hlo.alive import LiveTensor
    from ..hlo.traffic import Transfer
    from ..targets.target import Target
    from .estimate import Estimate
    from .report import DryRun, Memory

_ROWS = 12


def of_dry_run(run: DryRun) -> str:
    """The report as a terminal shows it."""
    axes = ", ".join(f"{axis}={size}" for axis, size in run.axes)
    parts = [
        f"{run.name} on {run.target} ({axes}): {_verdict(run)}",
        *([f"by the {by_the_model(run)}"] if run.is_analytic else []),
        *(f"error: {error}" for error in run.errors),
        "memory of one device\n" + _memory(run.memory),
    ]
    if run.refusal:
        parts.append("the compiler says\n" + _indented(run.refusal.strip()))
    if run.tensors:
        title = f"largest of the temporary arrays at the peak, {bytes_text(run.alive_bytes)} in all"
        parts.append(_titled(title, _tensors(run.tensors)))
    if run.compiled is not None or run.is_analytic:
        parts.append(_titled("collectives of one step", _transfers(run.collectives)))
    if run.estimate is not None:
        parts.append(_titled("time of one step, estimated", _time(run)))
    if run.unexpected:
        rows = [(f"! {remedy}",) for remedy in remedies_of(run.unexpected)]
        parts.append(_titled("unexpected, and what would remove it", laid_out(_first(rows), ())))
    parts += [f"note: {note}" for note in run.notes]
    return "\n\n".join(parts)


def by_the_model(run: DryRun) -> str:
    """That nothing was compiled, why, and what the figures are worth."""
    return (
        f"analytic model alone, nothing was compiled: {run.not_compiled}.\nBytes of state and "
        "inputs are exact; peak, collectives and times are closed forms, which the compiler may "
        "better or miss."
    )


def _verdict(run: DryRun) -> str:
    free = run.memory.free_bytes
    if run.fits is None:
        return "fit unknown: device memory not known"
    if run.fits:
        return f"fits, with {bytes_text(free or 0)} to spare"
    return "does not fit" + ("" if free is None else f", by {bytes_text(-free)}")


def memory_rows(memory: Memory) -> list[tuple[str, int | None, str]]:
    """Each figure of the memory of a device: its name, its bytes, and what it is."""
    return [
        ("parameters", memory.parameter_bytes, "exact"),
        ("slots", memory.slot_bytes, "exact"),
        ("other state", memory.state_bytes, "exact"),
        ("inputs", memory.input_bytes, "exact"),
        ("padding of tiles", memory.padding_bytes, "what the device adds to these"),
        ("temporaries", memory.temporary_bytes, "the compiler's temp_size_in_bytes"),
        ("gradients", memory.gradient_bytes, "if all live at once, among the temporaries"),
        ("peak", memory.peak_bytes, memory.peak_is),
        ("available", memory.available_bytes, "in one device"),
    ]


def _memory(memory: Memory) -> str:
    rows = memory_rows(memory)
    told = [(name, f"{n:,}", bytes_text(n), why) for name, n, why in rows if n is not None]
    return laid_out(told, right=(1, 2))


def _time(run: DryRun) -> str:
    found = run.estimate
    assert found is not None
    rows = [
        (
            "step time",
            seconds_text(found.step_time_s),
            f"bound by {found.bound_by}" * bool(found.bound_by),
        ),
        ("compute", seconds_text(found.compute_s), f"{flops_text(found.flops)} in one device"),
        ("memory", seconds_text(found.memory_s), f"{bytes_text(found.bytes)} read and written"),
    ]
    for axes, time_s in found.communication_s:
        rows.append(("collectives", seconds_text(time_s), f"over {', '.join(axes)}"))
    if found.overlap_s:
        rows.append(("", seconds_text(found.overlap_s), "of them beside other work"))
    if found.mfu is not None:
        rows.append(("model FLOPs", share_text(found.mfu), "of the peak"))
    rows.append(("replicated", *replicated(found)))
    if run.fed is not None and run.samples_per_s:
        rows.append(("samples", f"{run.samples_per_s:,.0f} /s", f"{run.fed.rows:,} in a step"))
    if run.fed is not None and run.tokens_per_s:
        rows.append(("tokens", f"{run.tokens_per_s:,.0f} /s", f"{run.fed.tokens:,} in a step"))
    if found.missing:
        rows.append(("unknown", "", ", ".join(found.missing) + how_to_know(found.target)))
    return laid_out(rows, right=(1,))


def replicated(found: Estimate) -> tuple[str, str]:
    """How much of the work more than one device does, and of what that is a share."""
    if found.replicated_share is None:
        return "unknown", "as the model's own FLOPs are not"
    return share_text(found.replicated_share), "of all devices' FLOPs, which others compute as well"


def _tensors(tensors: Sequence[LiveTensor]) -> str:
    alike: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for each in tensors:
        dims = "x".join(map(str, each.array.dims)) or "scalar"
        where = each.origin.path or "-"
        alike[where, each.origin.phase, dims, each.array.dtype].append(each.nbytes)
    rows = []
    for keys in grouped(alike, lambda key: (without_numbers(key[0]), key[1:], len(alike[key]))):
        sizes = [size for key in keys for size in alike[key]]
        where = pattern([key[0] for key in keys])
        rows.append((sum(sizes), (f"{len(sizes)} x", where, *keys[0][1:], bytes_text(sum(sizes)))))
    rows = [row for _, row in sorted(rows, key=lambda each: -each[0])]
    return laid_out(_first(rows), right=(0, 5))


def _transfers(transfers: Sequence[Transfer]) -> str:
    if not transfers:
        return "  none"
    rows = []
    for row in alike(transfers):
        first, known = row.first, row.count is not None
        rows.append(
            (
                "!" if first.is_unexpected else "",
                first.kind,
                ", ".join(first.axes),
                f"{row.count}" if known else "?",
                bytes_text(row.nbytes) + ("" if known else " each time"),
                ", ".join(first.phases),
                _in_short(row.places),
                _in_short(first.lines),
            )
        )
    heading = ("", "kind", "axes", "count", "bytes per device", "when", "for", "written in")
    told = [heading, *rows]
    if not any(each.lines for each in transfers):
        told = [row[:-1] for row in told]
    return laid_out([told[0], *_first(told[1:])], right=(3, 4))


def _in_short(names: Sequence[str]) -> str:
    """The first two, and how many more there are."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more or "-"


def remedies_of(unexpected: Iterable[Transfer]) -> dict[str, list[Transfer]]:
    """What would remove the collectives that were not asked for, and the line, where it is known;
    once for all equal layers, with stars for their numbers."""
    found: dict[str, list[Transfer]] = defaultdict(list)
    for each in unexpected:
        written = f" Written in {_in_short(each.lines)}." if each.lines else ""
        found[each.remedy + written].append(each)
    return {
        pattern(texts): [each for text in texts for each in found[text]]
        for texts in grouped(found, without_numbers)
    }


def _first(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The first rows, and one that says how many there are besides."""
    if len(rows) <= _ROWS:
        return list(rows)
    more = f"... and {len(rows) - _ROWS} more"
    return [*rows[:_ROWS], (*("",) * (len(rows[0]) - 1), more)]


def _titled(title: str, table: str) -> str:
    return f"{title}\n{table}"


def laid_out(rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> str:
    """Rows as columns; those with the numbers ``right`` end together."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return _indented("\n".join(line.rstrip() for line in lines))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def how_to_know(target: Target) -> str:
    """What to do where the numbers of a machine are missing, after their names."""
    if target.platform != "cpu":
        return ". Pass them as hardware=."
    return f". hardware=mw.calibrate({str(target)!r}), or --measure in the terminal, measures them."
