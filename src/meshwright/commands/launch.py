"""``meshwright launch``: a program on many processes, or as the chief of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .config import config_option
from .group import Command, argument, option, traceback_option

_OF_GROUPS = (
    "devices",
    "log_dir",
    "stall_timeout",
    "join_timeout",
    "agree",
    "nodes",
    "rendezvous",
    "hosts",
)
_OF_CLUSTERS = ("workers", "ps", "evaluator", "quiet", "max_restarts", "worker_devices")


@click.command(
    cls=Command,
    short_help="Run a program on many processes, or on a local cluster.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@option(
    "--processes",
    type=click.IntRange(min=1),
    help="Number of processes that run the program and train one model together.",
)
@option(
    "--devices",
    type=click.IntRange(min=1),
    help="CPU devices to make in each process; without it GPUs are shared out evenly.",
)
@option(
    "--nodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of hosts; run the same command on each of them.",
)
@option("--rendezvous", default="", metavar="HOST:PORT", help="Where the hosts meet: one of them.")
@option("--hosts", default="", metavar="A,B,...", help="Hosts to run on, reached by ssh.")
@option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for one log file per process.",
)
@option(
    "--stall-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds that a step or a batch may take, once several have been seen.",
)
@option(
    "--join-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds until every process must have joined.",
)
@option(
    "--agree/--no-agree",
    default=True,
    show_default=True,
    help="Compare versions, model, data and options of all processes before they train.",
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
@click.pass_context
def launch(
    ctx: click.Context, program: tuple[str, ...], processes: int | None, **options: Any
) -> None:
    """Run a Python program on several processes of this machine.

    With --processes they train one model together (data, model or any other parallelism by
    `mw.Sharded`); `import meshwright` joins them. When one fails, the others raise
    mw.ProcessError, which says which one and where, and all end.

    Without it the program is the chief of a cluster of workers and parameter servers, which it
    joins by `mw.ParameterServer(mw.run_task())`.

    Exits with the program's exit code, or with that of the first process that failed.

    \b
    meshwright launch --processes 4 --devices 2 train.py --epochs 3
    meshwright launch --processes 8 --hosts n01,n02,n03 train.py
    meshwright launch --processes 8 --nodes 3 --rendezvous n01:7777 train.py
    meshwright launch --workers 2 --ps 2 train.py --epochs 3
    """
    other = _OF_GROUPS if processes is None else _OF_CLUSTERS
    _refuse(ctx, other, processes is not None)
    if processes is None:
        from ..launch.script import run_launched

        cluster = {name: options[name] for name in _OF_CLUSTERS if name != "quiet"}
        raise SystemExit(run_launched(program, logs=not options["quiet"], **cluster))

    if options["hosts"]:
        from ..launch.hosts import run_on_hosts

        passed_on = ["--processes", str(processes), *_as_typed(ctx, (*_OF_GROUPS[:5],))]
        raise SystemExit(run_on_hosts(options["hosts"].split(","), passed_on, program))

    from ..launch.group import GroupOptions, run_group

    group = GroupOptions(
        processes,
        options["devices"],
        options["log_dir"],
        options["stall_timeout"],
        options["join_timeout"],
        options["agree"],
        options["nodes"],
        options["rendezvous"],
    )
    raise SystemExit(run_group(program, group))


def _as_typed(ctx: click.Context, names: tuple[str, ...]) -> list[str]:
    """Options with their values, as another launcher takes them."""
    typed = []
    for param in ctx.command.params:
        value = ctx.params.get(str(param.name))
        if param.name not in names or value is None:
            continue
        if isinstance(value, bool):
            typed.append((param.opts if value else param.secondary_opts)[0])
        else:
            typed += [param.opts[0], str(value)]
    return typed


def _refuse(ctx: click.Context, names: tuple[str, ...], is_group: bool) -> None:
    """Options of the command line that belong to the other kind of launch are an error."""
    of = {str(p.name): p.opts[0] for p in ctx.command.params}
    wrong = [
        of[name] for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if wrong:
        kind = "a cluster of workers and servers" if is_group else "a group (--processes N)"
        raise click.UsageError(f"{', '.join(wrong)}: only valid for {kind}.", ctx)
