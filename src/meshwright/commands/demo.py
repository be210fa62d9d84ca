"""``meshwright demo``: the same model on digits under three kinds of parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .group import Command, option, traceback_option


@click.command(cls=Command, short_help="Train on digits under three kinds of parallelism.")
@option(
    "--data",
    type=click.Path(path_type=Path),
    help="MNIST as an .npz file.  [default: Keras' cache, a download, or the digits shipped here]",
)
@option("--epochs", type=click.IntRange(1), help="Number of epochs of each run.  [default: 3]")
@option("--runs", metavar="RUNS", help='Runs to make: "a,b,c".')
@option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write the picture to.",
)
@option("--quick", is_flag=True, help="Train on a few digits for one epoch.")
@traceback_option
def demo(**options: Any) -> None:
    """Train on handwritten digits under three kinds of parallelism, changing only the layout."""
    from .. import demo as demonstration

    demonstration.main(**{name: value for name, value in options.items() if value is not None})
