"""Parameters that several commands share: a model, a machine, layouts, rows, time limits."""

from __future__ import annotations

from typing import Any

import click

from .group import argument, option
from .texts import BuildText, HardwareText, LayoutsText, MeshText, OptionText, TargetText

build_argument = argument("build", type=BuildText(), metavar="MODULE:BUILD")
target_option = option(
    "--target",
    type=TargetText(),
    required=True,
    metavar="TARGET",
    help="The machine: v5p:2x2x2, h100:2x8, cpu:8.",
)
hardware_option = option(
    "--hardware",
    type=HardwareText(),
    metavar="measured|FILE",
    help="Estimate by rates that were measured on such a chip (of a CPU, on this one), or by a "
    "TOML file of `meshwright calibrate`.  [default: published numbers]",
)
layout_option = option(
    "--layout",
    "layouts",
    type=LayoutsText(),
    multiple=True,
    metavar="PATTERN:LAYOUT",
    help='Layouts added to those of BUILD: "hidden.*kernel:unsharded,model". Repeat, or join by '
    '";".',
)
batch_size_option = option(
    "--batch-size",
    type=click.IntRange(1),
    help="Rows of the global batch.  [default: those of BUILD's batch]",
)


def seconds_option(name: str, default: float, purpose: str) -> Any:
    """A time limit; ``purpose`` is its help."""
    seconds = click.FloatRange(0, min_open=True)
    return option(name, type=seconds, default=default, help=purpose)


timeout_option = seconds_option("--timeout", 3600.0, "Time limit for compiling, in seconds.")


def mesh_option(purpose: str, required: bool = False) -> Any:
    """``--mesh`` for one mesh; ``purpose`` is its help."""
    return option("--mesh", type=MeshText(), required=required, metavar="MESH", help=purpose)


def strategy_option(**options: str) -> Any:
    """``--option name=value``, but for the names that are options of the command."""
    return option(
        "--option",
        "options",
        type=OptionText(options),
        multiple=True,
        metavar="NAME=VALUE",
        help="A further argument of the strategy, as JSON: accumulate=4, remat=block, batch=data. "
        "Repeat for more.",
    )
