"""``meshwright plan``: the planner's layout, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .config import config_option
from .group import Command, option, traceback_option
from .options import (
    batch_size_option,
    build_argument,
    hardware_option,
    mesh_option,
    seconds_option,
    target_option,
    timeout_option,
)
from .texts import BytesText, NewFile, SizesText

if TYPE_CHECKING:
    from ..layouts.mesh import Mesh
    from ..targets.hardware import Hardware
    from ..targets.target import Target


@click.command(cls=Command, short_help="Choose mesh and layouts for a target, and say why.")
@build_argument
@target_option
@mesh_option('Use this mesh: "data=4,model=2".  [default: the planner chooses]')
@option(
    "--objective",
    type=click.Choice(["time", "memory", "latency", "throughput"]),
    default="time",
    help="Minimize the time of a step or the peak memory of a device; or plan serving, for the "
    "latency of the smallest batch of --rows or the throughput of the largest.",
)
@option(
    "--rows",
    type=SizesText(),
    metavar="ROWS,...",
    help="Sizes of the batches to serve.  [default: 1,8,32]",
)
@option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(["own", "bfloat16", "float16", "int8"]),
    help="Serve in this type; repeat it to compare several.  [default: own and bfloat16]",
)
@option(
    "--memory-limit",
    type=BytesText(),
    metavar="BYTES",
    help="Memory limit of a device: 14GiB.  [default: all of its memory]",
)
@batch_size_option
@hardware_option
@option(
    "--verify",
    type=click.IntRange(0),
    default=0,
    help="Compile this many of the best plans and rank them by their dry runs.",
)
@seconds_option("--seconds", 10.0, "Search time limit in seconds.")
@timeout_option
@option(
    "--html", type=NewFile("the page"), metavar="FILE", help="Also write the alternatives as HTML."
)
@option(
    "--save",
    type=NewFile("the plan"),
    metavar="FILE",
    help="Write the plan (JSON) for mw.Plan.load.",
)
@config_option
@traceback_option
def plan(
    build: str,
    target: Target,
    mesh: Mesh | None,
    objective: str,
    rows: tuple[int, ...] | None,
    precisions: tuple[str, ...],
    memory_limit: int | None,
    batch_size: int | None,
    hardware: Hardware | str | None,
    verify: int,
    seconds: float,
    timeout: float,
    html: Path | None,
    save: Path | None,
) -> None:
    """Choose mesh, layouts, ZeRO, micro-batches and remat for a model on a target, and say why.

    BUILD is a function without arguments. It returns (model, batch), where the model is a compiled
    Keras model or a Program; layouts that it returns are ignored.

    \b
    meshwright plan train:build --target h100:8
    meshwright plan train:build --target v5e:4x4 --memory-limit 14GiB --verify 3 --save plan.json
    meshwright plan train:build --target h100:8 --objective latency --rows 1,8,32 --save serve.json

    With the objectives latency and throughput the forward pass alone is planned, for
    `meshwright serve --plan serve.json`. A Keras model alone will then do; of a batch (x, y) the
    model gets x, and any other batch as it is.
    """
    from ..display.text.columns import print_text
    from ..files import write
    from .planning import choose, objective_of

    decided = choose(
        build,
        target,
        mesh,
        batch_size,
        lambda: objective_of(objective, rows, precisions, batch_size),
        hardware,
        memory_limit=memory_limit,
        verify=verify,
        limit_s=seconds,
        timeout_s=timeout,
    )
    print_text(decided)
    if html is not None:
        write(html, decided.to_html(), "the page")
    if save is not None:
        decided.save(save)
