"""``meshwright launch``: a program on many processes, or as the chief of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .config import config_option
from .group import Command, argument, option, traceback_option
from .options import seconds_option
from .typed import as_typed, fault_of, is_default, refuse, refuse_with, refuse_without

if TYPE_CHECKING:
    from ..launch.manifests import Job

_PASSED_ON = (
    "devices",
    "log_dir",
    "stall_timeout",
    "script_timeout",
    "join_timeout",
    "agree",
    "standby",
    "max_restarts",
)
_OF_GROUPS = (*_PASSED_ON[:-1], "nodes", "rendezvous", "hosts", "host_discovery_script")
_OF_CLUSTERS = ("workers", "ps", "evaluator", "quiet", "worker_devices")
_NOT_OF_RAY = (
    "nodes",
    "rendezvous",
    "hosts",
    "host_discovery_script",
    "log_dir",
    "agree",
    "standby",
)
_TIMES = ("stall_timeout", "script_timeout", "join_timeout")
_NOT_OF_JOBS = (*_NOT_OF_RAY[1:], *_TIMES)  # the scheduler decides
_RESTARTS_OF_TASKS = 10


class _Range(click.ParamType):
    """A number, or a least and a most one: ``4`` or ``2:8``."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        least, _, most = str(value).partition(":")
        numbers = [least, most or least]
        if not all(n.isdecimal() for n in numbers) or not 1 <= int(least) <= int(numbers[1]):
            self.fail(f"expected a number, at least 1, or two such as 2:8; received {value!r}.")
        return int(least), int(numbers[1])


@click.command(
    cls=Command,
    short_help="Run a program on many processes, or on a local cluster.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@option(
    "--processes",
    type=_Range(),
    metavar="N|MIN:MAX",
    help="Number of processes that run the program and train one model together.",
)
@option(
    "--devices",
    type=click.IntRange(min=1),
    help="CPU devices to make in each process; without it GPUs or TPU chips are shared out.",
)
@option(
    "--nodes",
    type=_Range(),
    metavar="N|MIN:MAX",
    default="1",
    help="Number of hosts; run the same command on each of them.",
)
@option("--rendezvous", default="", metavar="HOST:PORT", help="Where the hosts meet: one of them.")
@option("--hosts", default="", metavar="A,B,...", help="Hosts to run on, reached by ssh.")
@option(
    "--host-discovery-script",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Program that prints localhost:N, or with --nodes the hosts to reach by ssh; polled.",
)
@option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for one log file per process.",
)
@seconds_option(
    "--stall-timeout", 10.0, "Seconds that a step or a batch may take, once several have been seen."
)
@seconds_option(
    "--script-timeout",
    120.0,
    "Seconds that a process may do nothing, outside of training, while all others wait for it.",
)
@seconds_option("--join-timeout", 60.0, "Seconds until every process must have joined.")
@option(
    "--agree/--no-agree",
    default=True,
    help="Compare versions, model, data and options of all processes before they train.",
)
@option(
    "--standby/--no-standby",
    default=True,
    help="Where the group may start again, keep two processes per place ready for that.",
)
@option("--workers", type=int, default=2, help="Number of workers to start.")
@option("--ps", type=int, default=1, help="Number of parameter servers to start.")
@option("--evaluator", is_flag=True, help="Also run the program as the evaluator.")
@option("--quiet", is_flag=True, help="Hide the output of workers and servers.")
@option(
    "--max-restarts",
    type=click.IntRange(min=0),
    help="Consecutive restarts allowed: of each task of a cluster (10), or of a group without a "
    "newer checkpoint (10 with MIN:MAX, else 0).",
)
@option("--worker-devices", type=int, help="CPU devices to make in each worker.")
@option(
    "--write",
    type=click.Choice(["slurm", "jobset", "trainjob", "ray"]),
    help="Print a job for this scheduler that runs the program with these options; start nothing.",
)
@option("--ray", is_flag=True, help="Run --processes N as actors of the Ray cluster.")
@option("--gpus", type=click.IntRange(min=0), default=0, help="GPUs of each node of the job.")
@option("--name", default="train", help="Name of the job.")
@option("--image", default="", help="Image for the pods of the job.")
@argument("program", nargs=-1, required=True, metavar="PROGRAM [ARGUMENTS]...")
@config_option
@traceback_option
@click.pass_context
def launch(
    ctx: click.Context,
    program: tuple[str, ...],
    processes: tuple[int, int] | None,
    **options: Any,
) -> None:
    """Run a Python program on several processes of this machine.

    With --processes they train one model together (data, model or any other parallelism by
    `mw.Sharded`); `import meshwright` joins them. When one fails, the others raise
    mw.ProcessError, which names it and where it failed, and all exit. With --processes MIN:MAX or
    --max-restarts they are then restarted from the newest checkpoint.

    Without it the program is the chief of a cluster of workers and parameter servers, which it
    joins by `mw.ParameterServer(mw.run_task())`.

    Exits with the program's exit code, or with that of the first process that failed.

    \b
    meshwright launch --processes 4 --devices 2 train.py --epochs 3
    meshwright launch --processes 2:8 train.py
    meshwright launch --processes 8 --hosts n01,n02,n03 train.py
    meshwright launch --processes 8 --nodes 3 --rendezvous n01:7777 train.py
    meshwright launch --write slurm --nodes 2 --processes 4 train.py > job.sh
    meshwright launch --processes 2 doctor
    meshwright launch --workers 2 --ps 2 train.py --epochs 3

    With --write the program becomes a job of Slurm (sbatch), JobSet, Kubeflow Trainer or KubeRay
    on --nodes hosts with --processes on each: it saves at SIGTERM and is run again. The program
    `doctor` measures the connections between the processes.
    """
    fixed = None if processes is None else processes[1]
    if options["write"]:
        refuse_with(ctx, (*_NOT_OF_JOBS, *_OF_CLUSTERS, "ray"), "--write")
        _check_one_number(ctx, "--write", processes, options["nodes"])
        click.echo(_job(ctx, program, fixed, options).write(options["write"]), nl=False)
        return
    if options["ray"]:
        _run_on_ray(ctx, program, processes, options)
        return
    _check_kind(ctx, processes is not None)
    nodes = options["nodes"][1]
    if processes is None:
        status = _run_cluster(program, options)
    elif options["hosts"]:
        status = _run_on_hosts(ctx, program, processes, options)
    elif options["host_discovery_script"] and nodes > 1 and not options["rendezvous"]:
        status = _run_on_listed_hosts(ctx, program, processes, options)
    else:
        status = _run_group(program, processes, options)
    raise SystemExit(status)


def _run_cluster(program: tuple[str, ...], options: dict[str, Any]) -> int:
    from ..launch.script import run_launched

    cluster = {name: options[name] for name in _OF_CLUSTERS if name != "quiet"}
    restarts = options["max_restarts"]
    cluster["max_restarts"] = _RESTARTS_OF_TASKS if restarts is None else restarts
    return run_launched(program, logs=not options["quiet"], **cluster)


def _run_on_hosts(
    ctx: click.Context,
    program: tuple[str, ...],
    processes: tuple[int, int],
    options: dict[str, Any],
) -> int:
    from ..launch.hosts import run_on_hosts

    (least, most), (least_nodes, nodes) = processes, options["nodes"]
    if least < most or options["host_discovery_script"]:
        raise click.UsageError(
            "with --hosts the number of hosts may change (--nodes MIN:MAX), and not that of the "
            "processes on each.",
            ctx,
        )
    passed_on = ["--processes", str(most), *as_typed(ctx, _PASSED_ON)]
    least_hosts = least_nodes if least_nodes < nodes else None
    return run_on_hosts(options["hosts"].split(","), passed_on, program, least_hosts)


def _run_on_listed_hosts(
    ctx: click.Context,
    program: tuple[str, ...],
    processes: tuple[int, int],
    options: dict[str, Any],
) -> int:
    from ..launch.hosts import run_on_listed_hosts

    least, most = processes
    if least < most:
        raise click.UsageError("several hosts need one number of --processes.", ctx)
    passed_on = ["--processes", str(most), *as_typed(ctx, _PASSED_ON)]
    script = options["host_discovery_script"]
    return run_on_listed_hosts(script, passed_on, program, *options["nodes"])


def _run_group(
    program: tuple[str, ...], processes: tuple[int, int], options: dict[str, Any]
) -> int:
    from ..launch.group import run_group, run_module
    from ..launch.group_options import GroupOptions

    (least, most), (least_nodes, nodes) = processes, options["nodes"]
    group = GroupOptions(
        processes=most,
        devices=options["devices"],
        log_dir=options["log_dir"],
        stall_s=options["stall_timeout"],
        script_s=options["script_timeout"],
        join_s=options["join_timeout"],
        agree=options["agree"],
        standby=options["standby"],
        nodes=nodes,
        rendezvous=options["rendezvous"],
        least_processes=least if least < most else None,
        least_nodes=least_nodes if least_nodes < nodes else None,
        max_restarts=options["max_restarts"],
        discovery=options["host_discovery_script"],
    )
    if program == ("doctor",) and not Path("doctor").exists():
        return run_module("meshwright.fabric", group)
    return run_group(program, group)


def _job(
    ctx: click.Context, program: tuple[str, ...], processes: int | None, options: dict[str, Any]
) -> Job:
    """The job that --write prints."""
    from ..launch.manifests import Job

    max_restarts = options["max_restarts"]
    restarts = {} if max_restarts is None else {"max_restarts": max_restarts}
    return Job(
        program,
        options["nodes"][1],
        processes or 1,
        options["devices"],
        options["gpus"],
        options["name"],
        options["image"],
        **restarts,
    )


def _run_on_ray(
    ctx: click.Context,
    program: tuple[str, ...],
    processes: tuple[int, int] | None,
    options: dict[str, Any],
) -> None:
    from ..launch.on_ray import RayLauncher

    refuse_without(ctx, ("name", "image"), "--write")
    refuse_with(ctx, (*_NOT_OF_RAY, *_OF_CLUSTERS), "--ray")
    if processes is None:
        raise click.UsageError("--ray needs --processes N.", ctx)
    _check_one_number(ctx, "--ray", processes)
    resources = {"CPU": 1, **({"GPU": options["gpus"]} if options["gpus"] else {})}
    launcher = RayLauncher(
        processes[1],
        resources,
        devices=options["devices"],
        max_restarts=options["max_restarts"] or 0,
        stall_s=options["stall_timeout"],
        join_s=options["join_timeout"],
        script_s=options["script_timeout"],
    )
    launcher.run_program(program)


def _check_one_number(
    ctx: click.Context,
    mode: str,
    processes: tuple[int, int] | None,
    nodes: tuple[int, int] = (1, 1),
) -> None:
    for name, value in (("--processes", processes), ("--nodes", nodes)):
        if value is not None and value[0] < value[1]:
            raise click.UsageError(f"{name} must be one number with {mode}.", ctx)


def _check_kind(ctx: click.Context, is_group: bool) -> None:
    """Options of the command line that mean nothing in this kind of launch are an error."""
    others = _OF_CLUSTERS if is_group else _OF_GROUPS
    kind = "a cluster of workers and servers" if is_group else "a group (--processes N)"
    meeting = ""
    if is_group and ctx.params["hosts"]:
        meeting = fault_of(ctx, ("rendezvous",), "not supported with --hosts")
    elif is_group and is_default(ctx, "nodes"):
        meeting = fault_of(ctx, ("rendezvous",), "only valid with --nodes N")
    refuse(
        ctx,
        fault_of(ctx, ("gpus", "name", "image"), "only valid with --write"),
        fault_of(ctx, others, f"only valid for {kind}"),
        meeting,
    )
