"""Options as they were typed on the command line, and those that do not go together."""

from __future__ import annotations

import click
from click.core import ParameterSource


def _is_typed(ctx: click.Context, name: str) -> bool:
    """Whether an option is on the command line, and not from a file or a default."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def typed(ctx: click.Context, names: tuple[str, ...]) -> str:
    """Those of these options that are on the command line, as they are written there."""
    words = []
    for param in ctx.command.params:
        if param.name in names and _is_typed(ctx, str(param.name)):
            is_off = ctx.params[str(param.name)] is False
            words.append((param.secondary_opts if is_off else param.opts)[0])
    return ", ".join(words)


def is_default(ctx: click.Context, name: str) -> bool:
    """Whether an option has its default: no command line, file or environment sets it."""
    return ctx.get_parameter_source(name) is ParameterSource.DEFAULT


def refuse_without(ctx: click.Context, names: tuple[str, ...], needed: str) -> None:
    """Options that mean something beside another one alone."""
    refuse(ctx, fault_of(ctx, names, f"only valid with {needed}"))


def refuse_with(ctx: click.Context, names: tuple[str, ...], mode: str) -> None:
    """Options of the command line that mean nothing beside another one."""
    refuse(ctx, fault_of(ctx, names, f"not supported with {mode}"))


def fault_of(ctx: click.Context, names: tuple[str, ...], fault: str) -> str:
    """What is wrong with those of these options that are on the command line; else nothing."""
    wrong = typed(ctx, names)
    return f"{wrong}: {fault}." if wrong else ""


def refuse(ctx: click.Context, *faults: str) -> None:
    """Raise those faults that there are, all at once."""
    if lines := [fault for fault in faults if fault]:
        raise click.UsageError("\n".join(lines), ctx)


def as_typed(ctx: click.Context, names: tuple[str, ...]) -> list[str]:
    """Options with their values, as another launcher takes them."""
    words = []
    for param in ctx.command.params:
        value = ctx.params.get(str(param.name))
        if param.name not in names or value is None:
            continue
        if isinstance(value, bool):
            words.append((param.opts if value else param.secondary_opts)[0])
        else:
            words += [param.opts[0], str(value)]
    return words
