"""``meshwright calibrate``: how fast the devices of this machine are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .group import Command, option, traceback_option
from .options import seconds_option, target_option
from .texts import NewFile

if TYPE_CHECKING:
    from ..targets.target import Target


@click.command(cls=Command, short_help="Measure this machine for estimates.")
@target_option
@option(
    "--save",
    type=NewFile("the hardware"),
    metavar="FILE",
    help="Write the numbers (TOML) to a file, for --hardware.  [default: print them]",
)
@seconds_option("--timeout", 300.0, "Time limit in seconds.")
@traceback_option
def calibrate(target: Target, save: Path | None, timeout: float) -> None:
    """Measure the devices of this machine: products, convolutions, memory, and what a call costs.

    Nothing else should run meanwhile. With the file, `meshwright dry-run` and `plan` estimate on
    any machine by these numbers:

    \b
    meshwright calibrate --target h100:1 --save h100.toml
    meshwright dry-run train:build --target h100:8 --hardware h100.toml
    """
    from ..files import write
    from ..targets.calibrate import calibrate as measure

    text = measure(target, timeout_s=timeout).to_toml()
    if save is None:
        click.echo(text)
    else:
        write(save, text + "\n", "the hardware")
