"""What the demo shows while it runs and at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from ..data.datasets import Digits
from .jobs import Job
from .training import Result

_DEVICES = "8 virtual CPU devices"
_FULL_SET = 60_000


class _Bar(keras.callbacks.Callback):
    """Moves one bar by a step at a time."""

    def __init__(self, progress: Progress, task: TaskID, epochs: int) -> None:
        super().__init__()
        self._progress, self._task, self._epochs = progress, task, epochs

    def on_train_begin(self, logs: Any = None) -> None:
        self._progress.start_task(self._task)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._progress.advance(self._task)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._progress.update(self._task, reached=_epoch_text(epoch, self._epochs, logs))


class _Lines(keras.callbacks.Callback):
    """Prints one line per epoch, for a log file or a pipe."""

    def __init__(self, console: Console, job: Job, epochs: int) -> None:
        super().__init__()
        self._console, self._job, self._epochs = console, job, epochs

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._console.print(f"  {self._job.heading}: {_epoch_text(epoch, self._epochs, logs)}")


def _epoch_text(epoch: int, epochs: int, logs: Any) -> str:
    return f"loss {logs['loss']:.3f} after epoch {epoch + 1} of {epochs}"


@contextlib.contextmanager
def progress_of(
    console: Console, jobs: Sequence[Job], epochs: int, steps_per_epoch: int
) -> Iterator[dict[str, keras.callbacks.Callback]]:
    """For each job, by name, the callback that shows how far it is."""
    if not console.is_terminal:
        yield {job.name: _Lines(console, job, epochs) for job in jobs}
        return
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[reached]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=8) as progress:
        bars, total = {}, epochs * steps_per_epoch
        for job in jobs:
            task = progress.add_task(job.heading, start=False, total=total, reached="")
            bars[job.name] = _Bar(progress, task, epochs)
        yield bars


def show_plan(console: Console, digits: Digits, jobs: Sequence[Job]) -> None:
    """Print what will run, on which digits, and why on these."""
    source, *reasons = digits.origin.splitlines()
    console.print(f"[bold]Meshwright[/]: one model, any mesh of {_DEVICES}", highlight=False)
    console.print(f"Digits: {source}", highlight=False)
    for reason in reasons:
        console.print(reason, style="dim", highlight=False)
    console.print()
    for job in jobs:
        console.print(f"  {job.heading}: {job.split}", highlight=False)
    console.print()


def show_results(console: Console, results: Sequence[Result], digits: Digits) -> None:
    """The table of the runs, and what to know about its numbers."""
    console.print()
    console.print(_table(results))
    trained, tested = len(digits.x_train), len(digits.x_test)
    console.print(
        f"Trained on {trained:,} digits, tested on {tested:,} others. The model and its training "
        "are the same in (a) and (b): only the mesh and the layouts differ.",
        style="dim",
        highlight=False,
    )
    if trained < _FULL_SET:
        console.print(
            f"For a higher accuracy, train on all {_FULL_SET:,} digits of MNIST: "
            "meshwright demo --data mnist.npz",
            style="dim",
            highlight=False,
        )


def _table(results: Sequence[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("mesh", no_wrap=True)
    for heading in ("test\naccuracy", "test\nloss", "ms/step", "parameter\nbytes\nper device"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.job.heading,
            " ".join(f"{axis}={size}" for axis, size in result.job.axes.items()),
            f"{result.accuracy:.2%}",
            f"{result.loss:.4f}",
            f"{result.ms_per_step:.1f}",
            f"{result.parameter_bytes_per_device:,}",
        )
    return table
