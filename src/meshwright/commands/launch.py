"""``meshwright launch``: a program as the chief of a cluster on this machine."""

from __future__ import annotations

from typing import Any

import click

from .group import traceback_option


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@click.option("--workers", type=int, default=2, show_default=True, help="Workers to start.")
@click.option("--ps", type=int, default=1, show_default=True, help="Parameter servers to start.")
@click.option("--evaluator", is_flag=True, help="Run the program as the evaluator, too.")
@click.option("--quiet", is_flag=True, help="Do not show what the tasks print.")
@click.option("--max-restarts", type=int, default=10, show_default=True, help="Per task, in a row.")
@click.option("--worker-devices", type=int, help="CPU devices to make in each worker.")
@click.argument("program", nargs=-1, required=True, metavar="PROGRAM [ARGUMENTS]...")
@traceback_option
def launch(program: tuple[str, ...], quiet: bool, **numbers: Any) -> None:
    """Run a Python program as the chief of a cluster on this machine; its exit code is returned.

    The program joins by `mw.ParameterServer(mw.run_task())`. When it ends, all tasks end.

    \b
    meshwright launch --workers 2 --ps 2 train.py --epochs 3
    """
    from ..launch.script import run_launched

    raise SystemExit(run_launched(program, logs=not quiet, **numbers))
