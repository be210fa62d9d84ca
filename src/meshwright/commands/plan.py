"""``meshwright plan``: a dry run on machines that one does not have."""

from __future__ import annotations

import os

import click

from .group import traceback_option
from .options import batch_size_option, build_argument, target_option, timeout_option
from .texts import option, rule


@click.command()
@build_argument
@target_option
@click.option("--mesh", "mesh_text", help='The mesh: "data=4,model=2"; else "batch" over all.')
@click.option(
    "--layout",
    "layout_texts",
    multiple=True,
    help='Layouts beside those of BUILD: "hidden.*kernel:unsharded,model"; repeat, or join by ";".',
)
@click.option("--zero", type=click.IntRange(0, 3), help="The level of ZeRO.")
@batch_size_option
@click.option(
    "--option",
    "option_texts",
    multiple=True,
    help="A further argument of the strategy, in JSON: accumulate=4, remat=block, ...; repeat.",
)
@timeout_option
@click.option("--no-cache", is_flag=True, help="Compile anew, and do not keep the answer.")
@click.option(
    "--no-compile", is_flag=True, help="Take the planner's model in place of the compiler."
)
@click.option("--html", metavar="FILE", help="Write the report as a page for a browser, too.")
@click.option("--measure", is_flag=True, help="Run the step here, too; for targets such as cpu:8.")
@click.option("--save", metavar="FILE", help="Write what was found to a JSON file, for --check.")
@click.option("--check", metavar="FILE", help="Fail if anything got worse than in such a file.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    help="The share by which bytes, FLOPs and step time may grow, and MFU may shrink, under "
    "--check; else 0, and 0.01 for what the compiler says.",
)
@traceback_option
def plan(
    build: str,
    target: str,
    mesh_text: str | None,
    layout_texts: tuple[str, ...],
    zero: int | None,
    batch_size: int | None,
    option_texts: tuple[str, ...],
    timeout: float,
    no_cache: bool,
    no_compile: bool,
    html: str | None,
    measure: bool,
    save: str | None,
    check: str | None,
    tolerance: float | None,
) -> None:
    """Compile the training step of a model for machines that one does not have; tell what it costs.

    BUILD is a function without arguments that returns a compiled Keras model and a batch, or a
    Program and a batch, and layouts beside them if there are any. A Keras model is built as shapes
    only, so its size does not matter; nor do the values of the batch.

    \b
    meshwright plan train:build --target v5p:2x2x2 --mesh batch=4,model=2
    meshwright plan train.py:build --target cpu:8 --zero 3 --batch-size 1024 --measure
    meshwright plan train:build --target h100:8 --save plan.json
    meshwright plan train:build --target h100:8 --check plan.json

    Where no compiler for a GPU is installed, and with --no-compile, the figures are those of the
    planner's model alone, and the report says so.

    Ends with status 0 if the step fits, or if nobody knows, and with 1 if it does not, or if
    anything got worse than in the file of --check.
    """
    if no_cache:
        os.environ["MESHWRIGHT_CACHE"] = "off"
    from ..plan_command import Asked, check_folders, checked, run, run_here
    from ..planning.lock import Lock, lock_of

    check_folders(html, save)
    before = None if check is None else Lock.load(check)  # before minutes of compiling
    asked = Asked(
        build,
        target,
        mesh_text,
        [rule(each, "--layout") for text in layout_texts for each in text.split(";")],
        zero,
        batch_size,
        dict(option(text) for text in option_texts),
        compile=not no_compile,
    )
    here = run_here(asked, timeout, html) if measure else (run(asked, timeout, html), None)
    report, beside = here
    click.echo(str(report))
    if beside is not None:
        click.echo(f"\n{beside}")
    words, is_worse = ("", False) if before is None else checked(report, before, tolerance)
    if words:
        click.echo(f"\n{words}")
    if save is not None:
        lock_of(report).save(save)
    raise SystemExit(1 if is_worse or report.fits is False else 0)
