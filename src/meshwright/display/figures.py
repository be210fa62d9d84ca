"""The figures of a dry run in words, as texts, pages and notebooks show them alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..equal_layers import grouped, pattern, short_list, without_numbers
from ..planning.verdict import Verdict, error_text
from ..units import bytes_text, flops_text, seconds_text, share_text

if TYPE_CHECKING:
    from ..hlo.traffic import Transfer
    from ..planning.estimate import Estimate
    from ..planning.report import DryRun, Memory
    from ..targets.target import Target

# How far times were off in the recorded benchmarks.
# Times of dry runs over those of the planner's model: all layouts in results/plans.json.
OF_THE_MODEL = (0.67, 1.12)
# Times that were measured over those of dry runs, on calibrated CPUs: results/ranking.json.
OF_DRY_RUNS = (0.74, 1.65)
# The same by published speeds, on one GPU: results/one_gpu_*.json.
BY_PUBLISHED = (0.9, 2.2)
SIGNS: dict[Verdict | None, tuple[str, str]] = {  # of a verdict: a sign, and its kind on a page
    "fits": ("✓", "good"),
    "may not fit": ("?", "maybe"),
    "does not fit": ("✗", "bad"),
    None: ("?", "maybe"),
}
SETTLES = "verify=1 or --verify 1 settles it"  # that an estimated plan may not fit
_ROUNDING = 1e-9  # of a step, below which a time is none
_MEMORY = {  # what each figure of the memory is
    **dict.fromkeys(("parameters", "slots", "other state", "inputs"), "exact"),
    "padding of tiles": "what the device adds to these",
    "temporaries": "the compiler's temp_size_in_bytes",
    "gradients": "if all live at once, among the temporaries",
    "available": "in one device",
}


class Figure(NamedTuple):
    """A figure: its name, its value (``None`` where unknown), that as text, and what it is."""

    name: str
    value: float | None
    text: str
    meaning: str = ""


def memory_figures(memory: Memory) -> list[Figure]:
    """Every figure of the memory of a device, in bytes."""
    meanings = {**_MEMORY, "peak": memory.peak_is}
    return [
        Figure(name, value, bytes_text(value), meanings[name]) for name, value in memory.figures
    ]


def range_text(time_s: float, is_dry_run: bool, hardware: str, target: Target | str) -> str:
    """Where a step's time may lie, by how far such times were off in the benchmarks.

    ``hardware`` is the name of the numbers that count: those that are published of a chip are
    called as the kind of target is.

    >>> range_text(0.1, is_dry_run=False, hardware="h100", target="h100:8")
    'likely 67 ms to 112 ms (dry runs of the benchmarks)'
    >>> range_text(0.1, is_dry_run=True, hardware="h100", target="h100:8")
    'likely 90 ms to 220 ms (steps measured on an H100 and an H200)'
    """
    kind = str(target).partition(":")[0]
    if not is_dry_run:
        source, (low, high) = "dry runs of the benchmarks", OF_THE_MODEL
    elif hardware == kind != "cpu":
        source, (low, high) = "steps measured on an H100 and an H200", BY_PUBLISHED
    else:
        source, (low, high) = "steps measured in the benchmarks", OF_DRY_RUNS
    return f"likely {seconds_text(low * time_s)} to {seconds_text(high * time_s)} ({source})"


def time_figures(estimate: Estimate, is_dry_run: bool = True) -> list[Figure]:
    """Where the time of a step goes, in seconds, and what it is worth; ``is_dry_run`` says whether
    a compiled step was read, or the planner's model asked."""
    bound = f"bound by {estimate.bound_by}" if estimate.bound_by else ""
    if estimate.step_time_s:
        time_s, hardware = estimate.step_time_s, estimate.hardware
        near = range_text(time_s, is_dry_run, hardware, estimate.target)
        bound = f"{bound}; {near}" if bound else near
    flops = f"{flops_text(estimate.flops)} in one device"
    if estimate.recompute_flops:
        flops += f", {flops_text(estimate.recompute_flops)} of them computed again"
    times = [
        ("step time", estimate.step_time_s, bound),
        ("compute", estimate.compute_s, flops),
        ("memory", estimate.memory_s, f"{bytes_text(estimate.bytes)} read and written"),
        *(
            ("collectives", time, f"over {axes_list(axes)}")
            for axes, time in estimate.communication_s
        ),
    ]
    if estimate.waiting_s is not None:
        times.append(("waiting", estimate.waiting_s, "for collectives that nothing hides"))
    if estimate.overlap_s and estimate.overlap_s > _ROUNDING * (estimate.step_time_s or 0.0):
        times.append(("overlap", estimate.overlap_s, "of collectives, hidden behind other work"))
    figures = [Figure(name, time, seconds_text(time), what) for name, time, what in times]
    if estimate.mfu is not None:
        figures.append(
            Figure("model FLOPs", estimate.mfu, share_text(estimate.mfu), "of the peak (MFU)")
        )
    share = estimate.replicated_share
    if share is None and estimate.mfu is not None:
        return figures  # of a pipeline, whose stages compute some passes again and leave out others
    meaning = "of all devices' FLOPs, which others compute as well"
    meaning = "as the model's own FLOPs are not" if share is None else meaning
    figures.append(Figure("replicated", share, share_text(share), meaning))
    return figures


class TensorRow(NamedTuple):
    """Temporary arrays at the peak that are alike, of equal layers together."""

    where: str
    phase: str
    dims: tuple[int, ...]
    dtype: str
    how_many: int
    nbytes: int


def tensor_rows(run: DryRun) -> list[TensorRow]:
    """The largest temporary arrays at the peak, those with most bytes first."""
    alike: dict[tuple[str, str, tuple[int, ...], str], list[int]] = defaultdict(list)
    for tensor in run.tensors:
        where = tensor.origin.path or "-"
        key = (where, tensor.origin.phase, tuple(tensor.array.dims), tensor.array.dtype)
        alike[key].append(tensor.nbytes)
    rows = []
    for keys in grouped(alike, lambda key: (without_numbers(key[0]), key[1:], len(alike[key]))):
        sizes = [size for key in keys for size in alike[key]]
        where = pattern([key[0] for key in keys])
        rows.append(TensorRow(where, *keys[0][1:], len(sizes), sum(sizes)))
    return sorted(rows, key=lambda row: -row.nbytes)


def remedies_of(unexpected: Iterable[Transfer]) -> dict[str, list[Transfer]]:
    """What would remove the unexpected collectives, and the line, where it is known; once for all
    equal layers, with stars for their numbers."""
    remedies: dict[str, list[Transfer]] = defaultdict(list)
    for collective in unexpected:
        written = f" Written in {short_list(collective.lines)}." if collective.lines else ""
        remedies[collective.remedy + written].append(collective)
    return {
        pattern(texts): [collective for text in texts for collective in remedies[text]]
        for texts in grouped(remedies, without_numbers)
    }


def fit_text(run: DryRun) -> str:
    """Whether a step fits."""
    free = run.memory.free_bytes
    match run.verdict:
        case None:
            return "fit unknown: device memory not known"
        case "fits":
            return f"fits, with {bytes_text(free or 0)} to spare"
        case "may not fit":
            of = f"{bytes_text(run.peak_bytes)} of {bytes_text(run.memory.available_bytes)}"
            return (
                f"may not fit, {of} by the estimate; a compiled dry run settles it "
                f"({error_text(run.target)})"
            )
        case "does not fit":
            return "does not fit" + ("" if free is None else f", by {bytes_text(-free)}")


def fits_text(verdict: Verdict | None) -> str:
    """
    >>> fits_text("fits"), fits_text("may not fit"), fits_text("does not fit"), fits_text(None)
    ('yes', 'maybe', 'no', 'unknown')
    """
    words = {"fits": "yes", "may not fit": "maybe", "does not fit": "no"}
    return "unknown" if verdict is None else words[verdict]


def analytic_text(run: DryRun) -> str:
    """That nothing was compiled, why, and what the figures are worth."""
    return (
        f"analytic model alone, nothing was compiled: {run.not_compiled}.\nBytes of state and "
        "inputs are exact; peak, collectives and times are closed forms, which the compiler may "
        "better or miss."
    )


def how_to_know(target: Target) -> str:
    """What to do where numbers of a machine are missing, after their names."""
    if target.platform != "cpu":
        return ". Pass them as hardware=."
    return f". hardware=mw.calibrate({str(target)!r}), or --measure in the terminal, measures them."


def axes_list(axes: Iterable[str]) -> str:
    """Names of axes.

    >>> axes_list(("batch", "model")), axes_list(())
    ('batch, model', '-')
    """
    return ", ".join(axes) or "-"
