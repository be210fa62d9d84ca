"""``meshwright launch``: a program as the chief of a cluster on this machine."""

from __future__ import annotations

from typing import Any

import click

from .config import config_option
from .group import Command, argument, option, traceback_option


@click.command(
    cls=Command,
    short_help="Run a program on a local cluster.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@option(
    "--workers",
    type=int,
    default=2,
    show_default=True,
    help="Number of workers to start.",
)
@option(
    "--ps",
    type=int,
    default=1,
    show_default=True,
    help="Number of parameter servers to start.",
)
@option("--evaluator", is_flag=True, help="Also run the program as the evaluator.")
@option("--quiet", is_flag=True, help="Hide the output of workers and servers.")
@option(
    "--max-restarts",
    type=int,
    default=10,
    show_default=True,
    help="Consecutive restarts allowed per task.",
)
@option("--worker-devices", type=int, help="CPU devices to make in each worker.")
@argument("program", nargs=-1, required=True, metavar="PROGRAM [ARGUMENTS]...")
@config_option
@traceback_option
def launch(program: tuple[str, ...], quiet: bool, **numbers: Any) -> None:
    """Run a Python program as the chief of a cluster on this machine.

    The program joins the cluster by `mw.ParameterServer(mw.run_task())`. When it ends, all tasks
    end. Exits with the program's exit code.

    \b
    meshwright launch --workers 2 --ps 2 train.py --epochs 3
    """
    from ..launch.script import run_launched

    raise SystemExit(run_launched(program, logs=not quiet, **numbers))
