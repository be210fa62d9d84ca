"""``meshwright dry-run``: what a training step would cost on machines that need not be present."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .config import config_option
from .group import Command, option, traceback_option
from .options import (
    batch_size_option,
    build_argument,
    hardware_option,
    layout_option,
    mesh_option,
    strategy_option,
    target_option,
    timeout_option,
)
from .texts import LockFile, NewFile, PriceText, SizesText
from .typed import refuse_with, refuse_without

if TYPE_CHECKING:
    from ..layouts.layout import Layout
    from ..layouts.mesh import Mesh
    from ..planning.lock import Lock
    from ..serving.options import Precision
    from ..targets.hardware import Hardware
    from ..targets.target import Target
    from .planning import DryRunOptions


# Options that mean something with --serve alone, and those that mean nothing there.
_OF_SERVING = ("pipeline", "rows", "precision", "qps", "p99_ms")
_OF_STEPS = ("html", "trace", "measure", "save", "before", "tolerance")


@click.command("dry-run", cls=Command, short_help="Report what a step costs on a target.")
@build_argument
@target_option
@mesh_option('The mesh: "batch=4,model=2".  [default: all devices on one axis, "batch"]')
@layout_option
@option("--zero", type=click.IntRange(0, 3), help="ZeRO level.")
@batch_size_option
@hardware_option
@strategy_option(layouts="--layout")
@timeout_option
@option("--no-cache", is_flag=True, help="Compile again, and do not keep the result.")
@option(
    "--no-compile",
    is_flag=True,
    help="Use the planner's analytic model instead of a compiler.",
)
@option("--html", type=NewFile("the report"), metavar="FILE", help="Also write the report as HTML.")
@option(
    "--trace",
    type=NewFile("the trace"),
    metavar="FILE",
    help="Also write the step's timeline for Perfetto.",
)
@option(
    "--price",
    type=PriceText(),
    metavar="NUMBER|FILE",
    help="Price of a device-hour, or a TOML file with one by target (h100 = 2.5): also report the "
    "cost of a step, of samples and of tokens; with --serve, of a million rows.",
)
@option(
    "--serve",
    is_flag=True,
    help="Report what serving takes: the forward pass of batches of --rows rows.",
)
@option(
    "--pipeline",
    metavar="AXIS",
    help="Cut the served model into stages over this axis of the mesh, as `meshwright serve` does.",
)
@option(
    "--rows",
    type=SizesText(),
    metavar="ROWS,...",
    help="Sizes of the batches for --serve.  [default: 1,8,32]",
)
@option(
    "--precision",
    type=click.Choice(["bfloat16", "float16", "int8"]),
    help="With --serve: convert the weights, as `meshwright serve --precision` does.",
)
@option(
    "--qps",
    type=click.FloatRange(0, min_open=True),
    metavar="NUMBER",
    help="With --serve: also report the devices for this many rows per second.",
)
@option(
    "--p99-ms",
    type=click.FloatRange(0, min_open=True),
    metavar="NUMBER",
    help="With --qps: the longest that a request may take, in milliseconds.",
)
@option(
    "--measure",
    is_flag=True,
    help="Also run the step on this machine and compare; for cpu:N, and for accelerators that are "
    "here.",
)
@option(
    "--save",
    type=NewFile("the dry-run lock"),
    metavar="FILE",
    help="Write a lock file (JSON) for --check.",
)
@option(
    "--check",
    "before",
    type=LockFile(),
    metavar="FILE",
    help="Fail if memory, a collective or a layout is worse than in this lock file.",
)
@option(
    "--tolerance",
    type=click.FloatRange(0),
    help="Relative growth of bytes, FLOPs and step time, or fall of MFU, that --check allows.  "
    "[default: 0; 0.01 for the compiler's]",
)
@config_option
@traceback_option
def dry_run(
    build: str,
    target: Target,
    mesh: Mesh | None,
    layouts: tuple[tuple[tuple[str, Layout], ...], ...],
    zero: int | None,
    batch_size: int | None,
    hardware: Hardware | str | None,
    options: tuple[tuple[str, Any], ...],
    timeout: float,
    no_cache: bool,
    no_compile: bool,
    html: Path | None,
    trace: Path | None,
    price: float | Mapping[str, float] | None,
    serve: bool,
    pipeline: str | None,
    rows: tuple[int, ...] | None,
    precision: Precision | None,
    qps: float | None,
    p99_ms: float | None,
    measure: bool,
    save: Path | None,
    before: Lock | None,
    tolerance: float | None,
) -> None:
    """Compile a model's training step for a target and report what it costs there.

    The target's devices need not be present. BUILD is a function without arguments. It returns
    (model, batch) or (model, batch, layouts), where the model is a compiled Keras model or a
    Program. A Keras model is built as shapes only, so its size does not matter. With --serve a
    Keras model alone will do; of a batch (x, y) the model gets x, and any other batch as it is.

    \b
    meshwright dry-run train:build --target v5p:2x2x2 --mesh batch=4,model=2
    meshwright dry-run train.py:build --target cpu:8 --zero 3 --batch-size 1024 --measure
    meshwright dry-run train:build --target h100:8 --save layouts.lock.json
    meshwright dry-run train:build --target h100:8 --check layouts.lock.json
    meshwright dry-run train:build --target v5p:2x2x1 --mesh model=4 --serve --qps 500 --p99-ms 50

    Without a compiler for GPUs, and with --no-compile, all figures come from the planner's analytic
    model, and the report says so.

    Exits with status 0 if the step fits, may not fit or if that is unknown, and with 1 if it does
    not fit or if --check finds something worse.
    """
    if no_cache:
        os.environ["MESHWRIGHT_CACHE"] = "off"
    from .planning import DryRunOptions

    _check_options(serve, measure, qps, before)
    request = DryRunOptions(
        build,
        target,
        mesh,
        dict(chain(*layouts)),
        zero,
        batch_size,
        dict(options),
        compile=not no_compile,
        hardware=hardware,
    )
    if serve:
        passes = _report_serving(request, timeout, rows, precision, pipeline, qps, p99_ms, price)
    else:
        passes = _report_step(
            request, timeout, measure, html, trace, price, save, before, tolerance
        )
    raise SystemExit(0 if passes else 1)


def _check_options(serve: bool, measure: bool, qps: float | None, before: Lock | None) -> None:
    """Refuse options that mean nothing beside, or without, others."""
    ctx = click.get_current_context()
    if serve:
        refuse_with(ctx, _OF_STEPS, "--serve")
    else:
        refuse_without(ctx, _OF_SERVING, "--serve")
    if measure:
        refuse_with(ctx, ("hardware",), "--measure, which measures this machine")
    if qps is None:
        refuse_without(ctx, ("p99_ms",), "--qps")
    if before is None:
        refuse_without(ctx, ("tolerance",), "--check")


def _report_serving(
    request: DryRunOptions,
    timeout: float,
    rows: tuple[int, ...] | None,
    precision: Precision | None,
    pipeline: str | None,
    qps: float | None,
    p99_ms: float | None,
    price: float | Mapping[str, float] | None,
) -> bool:
    """Print what serving takes; false if it does not fit."""
    from ..display.text.columns import print_text
    from .planning import run_serving

    report = run_serving(request, rows or (1, 8, 32), timeout, precision, pipeline)
    print_text(report)
    if qps is not None:
        print_text(report.devices_for(qps, None if p99_ms is None else p99_ms / 1e3))
    if price is not None:
        costs = report.price_per_million(price)
        known = "no known amount: no batch fits, or its time is unknown"
        print_text(f"a million rows cost {known if costs is None else f'{costs:.4g}'}")
    return report.fits is not False


def _report_step(
    request: DryRunOptions,
    timeout: float,
    measure: bool,
    html: Path | None,
    trace: Path | None,
    price: float | Mapping[str, float] | None,
    save: Path | None,
    before: Lock | None,
    tolerance: float | None,
) -> bool:
    """Print what a step takes; false if it does not fit, or is worse than the lock file."""
    from ..display.text.columns import print_text
    from ..planning.lock import lock_of
    from .planning import checked, run, run_here

    if measure:
        report, beside = run_here(request, timeout, html)
    else:
        report, beside = run(request, timeout, html), None
    sections: list[object] = [report]
    if price is not None:
        sections.append(report.price(price))
    if trace is not None:
        report.save_trace(trace)
    if beside is not None:
        sections.append(beside)
    is_worse = False
    if before is not None:
        changes, is_worse = checked(report, before, tolerance)
        sections.append(changes)
    print_text(*sections)
    if save is not None:
        lock_of(report).save(save)
    return not is_worse and report.fits is not False
