"""``meshwright demo``: the same model on digits under three kinds of parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .group import traceback_option


@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="MNIST as an .npz file; else Keras' cache, a download, or the digits shipped here.",
)
@click.option("--epochs", type=int, help="How often each run goes through the digits.")
@click.option("--runs", help='Which of the runs: "a,b,c".')
@click.option("--out", type=click.Path(path_type=Path), help="The folder for the picture.")
@click.option("--quick", is_flag=True, help="A few digits for one epoch, to see that all works.")
@traceback_option
def demo(**options: Any) -> None:
    """Train on handwritten digits under three kinds of parallelism, changing only the layout."""
    from .. import demo as demonstration

    demonstration.main(**{name: value for name, value in options.items() if value is not None})
