"""How the program reports errors: every one as a short message, the traceback on request."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..errors import MeshwrightError, MeshwrightWarning

_TRACEBACK_VARIABLE = "MESHWRIGHT_TRACEBACK"
_FAULTS = "meshwright.faults"
_CLICK = str(Path(click.__file__).parent)
WORDS = "meshwright.words"  # of a command, as they were typed

HELP = {"help_option_names": ["-h", "--help"]}


class Group(click.Group):
    """Prints errors of Meshwright, and those of the user's code, without the program's own frames.

    What is neither is a bug of ours, and keeps its traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _plain_warnings():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.meta.get(_TRACEBACK_VARIABLE) or os.environ.get(_TRACEBACK_VARIABLE):
                click.echo(traceback.format_exc(), err=True, nl=False)
            elif lines := _lines_of(error):
                click.echo("Error: " + "\n".join(lines), err=True)
            else:
                raise
            ctx.exit(2)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show those of Meshwright that no line of the user's has caused as errors are shown."""
    before = warnings.showwarning

    def show(message: Any, category: type[Warning], filename: str, *more: Any, **how: Any) -> None:
        if issubclass(category, MeshwrightWarning) and filename.startswith(_CLICK):
            click.echo(f"Warning: {message}", err=True)
        else:
            before(message, category, filename, *more, **how)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _lines_of(error: Exception) -> list[str]:
    """The message as it is shown; nothing for an error that has not met the user's code."""
    notes = _notes_of(error)
    if isinstance(error, MeshwrightError):
        return [str(error), *notes]
    from ..jaxprs.lines import user_lines

    frames = [f"  {line}" for line in user_lines(error)]
    way_out = ["(--traceback shows the whole traceback)"]
    headline = f"{type(error).__name__}: {error}".rstrip(": ")
    return [headline, *notes, *frames, *way_out] if frames else []


def _notes_of(error: Exception) -> list[str]:
    """What is noted of an error, but for what is about its traceback, which is not shown."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    if notes:
        from .. import _compat

        notes = [note for note in notes if not _compat.is_about_frames(note)]
    return notes


class Command(click.Command):
    """A command that reports all its invalid parameters at once; Click reports the first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Not left to the group: Click keeps the option that it makes at the first use.
        self.context_settings.update(HELP)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = tuple(args)
        rest = super().parse_args(ctx, args)
        faults: Sequence[click.UsageError] = ctx.meta.pop(_FAULTS, ())
        if len(faults) == 1:
            raise faults[0]
        if faults:
            messages = "".join(f"\n  {fault.format_message()}" for fault in faults)
            raise click.UsageError(f"{len(faults)} invalid parameters:{messages}", ctx)
        return rest


class _Collected(click.Parameter):
    """A parameter whose fault is kept for :class:`Command`, with the file that it came from."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            error.param, error.ctx = self, ctx
            fault: click.UsageError = error
            if ctx.get_parameter_source(self.name or "") is ParameterSource.DEFAULT_MAP:
                place = ctx.meta["meshwright.config"]
                fault = click.UsageError(f"{error.format_message()} (from {place})", ctx)
            ctx.meta.setdefault(_FAULTS, []).append(fault)
            return None


class Option(_Collected, click.Option):
    """An option of a :class:`Command`."""


class Argument(_Collected, click.Argument):
    """An argument of a :class:`Command`."""


def option(*names: str, **how: Any) -> Any:
    """``click.option`` for a :class:`Command`; its help shows the default that is given."""
    settings = {"show_default": how.get("default") not in (None, "")}
    return click.option(*names, cls=Option, **{**settings, **how})


def argument(*names: str, **how: Any) -> Any:
    """``click.argument`` for a :class:`Command`."""
    return click.argument(*names, cls=Argument, **how)


def _remember_traceback(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_TRACEBACK_VARIABLE] = True


traceback_option = click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,
    callback=_remember_traceback,
    help=f"Show the traceback of an error, as {_TRACEBACK_VARIABLE}=1 does.",
)
