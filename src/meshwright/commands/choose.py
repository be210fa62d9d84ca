"""``meshwright choose``: the planner's layout, and why."""

from __future__ import annotations

import click

from .group import traceback_option
from .options import batch_size_option, build_argument, target_option, timeout_option


@click.command()
@build_argument
@target_option
@click.option("--mesh", "mesh_text", help='Keep to this mesh: "data=4,model=2".')
@click.option(
    "--objective",
    type=click.Choice(["time", "memory"]),
    default="time",
    help="The least time of a step, or the least bytes at the peak.",
)
@click.option(
    "--memory-gb", type=click.FloatRange(0, min_open=True), help="Take no more of a device, in GB."
)
@batch_size_option
@click.option(
    "--verify",
    type=click.IntRange(0),
    default=0,
    help="Compile so many of the best, and rank them by their dry runs.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="To search for.",
)
@timeout_option
@click.option("--html", metavar="FILE", help="Write the alternatives as a page for a browser, too.")
@click.option("--save", metavar="FILE", help="Write the plan to a JSON file, for mw.Plan.load.")
@traceback_option
def choose(
    build: str,
    target: str,
    mesh_text: str | None,
    objective: str,
    memory_gb: float | None,
    batch_size: int | None,
    verify: int,
    seconds: float,
    timeout: float,
    html: str | None,
    save: str | None,
) -> None:
    """Choose mesh, layouts, ZeRO, micro-batches and recompute for a model on a machine; tell why.

    BUILD is what `meshwright plan` takes; layouts that it returns are not looked at.

    \b
    meshwright choose train:build --target h100:8
    meshwright choose train:build --target v5e:4x4 --memory-gb 14 --verify 3 --save plan.json
    """
    from ..plan_command import check_folders
    from ..plan_command import choose as chosen
    from ..planning.files import write

    check_folders(html, save)
    found = chosen(
        build,
        target,
        mesh_text,
        batch_size,
        objective=objective,
        memory_limit=None if memory_gb is None else round(1e9 * memory_gb),
        verify=verify,
        limit_s=seconds,
        timeout_s=timeout,
    )
    click.echo(str(found))
    if html is not None:
        write(html, found.to_html(), "the page")
    if save is not None:
        found.save(save)
