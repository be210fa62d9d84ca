"""How the program tells of errors: one message, and the traceback for whom asks."""

from __future__ import annotations

import os
import traceback
from typing import Any

import click

from ..errors import MeshwrightError

_TRACEBACK_VARIABLE = "MESHWRIGHT_TRACEBACK"


class Group(click.Group):
    """Prints the errors that Meshwright raises on purpose as one message, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MeshwrightError as error:
            if ctx.meta.get(_TRACEBACK_VARIABLE) or os.environ.get(_TRACEBACK_VARIABLE):
                click.echo(traceback.format_exc(), err=True, nl=False)
            else:
                told = [str(error), *getattr(error, "__notes__", ())]
                click.echo("Error: " + "\n".join(told), err=True)
            ctx.exit(2)


def _remember_traceback(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_TRACEBACK_VARIABLE] = True


traceback_option = click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,
    callback=_remember_traceback,
    help=f"Show the traceback of an error ({_TRACEBACK_VARIABLE}=1 does so, too).",
)
