"""What several commands are given: a model, a machine, rows, and how long to compile."""

from __future__ import annotations

import click

build_argument = click.argument("build", metavar="MODULE:BUILD")
target_option = click.option(
    "--target", required=True, help='The machine: "v5p:2x2x2", "h100:2x8", "cpu:8".'
)
batch_size_option = click.option(
    "--batch-size", type=click.IntRange(1), help="Rows of all devices; else BUILD's."
)
timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Seconds to compile.",
)
