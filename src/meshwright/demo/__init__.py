"""``meshwright demo``: the same digits under three parallelisms, by changing only the layout."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import MeshwrightError, _compat, topology
from ..data.datasets import Digits, mnist, shipped_subset
from ..display.drawing import Sheet, draw_svg
from .jobs import BATCH_SIZE, Job, chosen
from .screen import progress_of, show_plan, show_results
from .training import NOT_DRAWN, Result, run

DEVICES = 8
_EPOCHS = 3
_FOLDER = "runs/demo"
_QUICK_TRAIN, _QUICK_TEST = 2048, 500


def main(
    data: str | os.PathLike[str] | None = None,
    epochs: int | None = None,
    runs: str | Sequence[str] = "a,b,c",
    out: str | os.PathLike[str] | None = None,
    quick: bool = False,
) -> None:
    """Train on eight virtual CPU devices, print a table and write a picture into ``out``.

    ``data``: an ``mnist.npz``; :func:`meshwright.data.datasets.mnist` finds one by default.
    ``quick``: one epoch on a few of the digits, to see that all works. Raises
    :class:`~meshwright.DataError` for a file that cannot be read, and
    :class:`~meshwright.MeshwrightError` for a run that does not exist, for no epochs and for an
    ``out`` that is a file.
    """
    jobs = chosen(runs)
    epochs = (1 if quick else _EPOCHS) if epochs is None else epochs
    if epochs < 1:
        raise MeshwrightError(f"epochs must be at least 1; received {epochs}.")
    folder = Path(out or _FOLDER)
    if folder.exists() and not folder.is_dir():
        raise MeshwrightError(
            f"{folder} is not a folder. Choose another for the picture with --out."
        )
    console = Console()
    with console.status("Looking for the digits ..."):
        digits = _few(data) if quick else mnist(data)
    show_plan(console, digits, jobs)
    results = _train(console, jobs, digits, epochs)
    picture = _write_picture(results, folder)
    show_results(console, results, digits)
    console.print(f"Picture of the layouts: {picture}", soft_wrap=True, highlight=False)
    for model in [result.model for result in results if result.model][:1]:
        model.save(folder / f"{model.name}.keras")
        command = f"meshwright serve {shlex.quote(str(folder / model.name))}.keras"
        console.print(f"Serve it: {command} --mesh batch=8", soft_wrap=True, highlight=False)


def _train(console: Console, jobs: list[Job], digits: Digits, epochs: int) -> list[Result]:
    devices = eight_devices()
    steps_per_epoch = -(-len(digits.x_train) // BATCH_SIZE)
    with progress_of(console, jobs, epochs, steps_per_epoch) as watchers:
        return [run(job, digits, epochs, devices, [watchers[job.name]]) for job in jobs]


def eight_devices() -> list[Any]:
    """Eight CPU devices, made now if JAX is not running yet."""
    if not _compat.jax_is_running():
        topology.virtual_devices(DEVICES)
    return topology.devices("cpu")[:DEVICES]


def _few(data: str | os.PathLike[str] | None) -> Digits:
    """Enough digits to see that all works; without a path no network is asked."""
    digits = shipped_subset() if data is None else mnist(data)
    return replace(
        digits,
        x_train=digits.x_train[:_QUICK_TRAIN],
        y_train=digits.y_train[:_QUICK_TRAIN],
        x_test=digits.x_test[:_QUICK_TEST],
        y_test=digits.y_test[:_QUICK_TEST],
    )


def _write_picture(results: list[Result], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / "layouts.svg").resolve()
    sections = tuple(result.picture for result in results)
    sheet = Sheet("The digits under three parallelisms", sections, note=NOT_DRAWN)
    path.write_text(draw_svg(sheet), encoding="utf-8")
    return path
