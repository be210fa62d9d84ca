"""Defaults of options from a file: ``[tool.meshwright]`` in pyproject.toml, or ``--config FILE``.

Keys are names of options without their dashes. Those at the top hold for every command that has
such an option, those in a table with a command's name for that command; the command line wins.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

_PYPROJECT = Path("pyproject.toml")
_TABLES = ("--beside",)  # whose values are tables
_JOINTS = {"--layout": ":", "--option": "="}  # between key and value of a table


def _take(ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    """Make what the file says the defaults of this command."""
    tables, place = _read(path)
    ctx.meta["meshwright.config"] = place
    commands = getattr(ctx.find_root().command, "commands", {ctx.info_name: ctx.command})
    own = tables.get(ctx.info_name or "", {})
    if not isinstance(own, Mapping):
        raise click.UsageError(f"{place}: {ctx.info_name!r} must be a table.", ctx)
    shared = {key: value for key, value in tables.items() if key not in commands}
    every = {key for command in commands.values() for key in _keys(command)}
    here = _keys(ctx.command)
    _refuse(shared, {*every, *commands}, place, ctx)
    _refuse(own, here, f"{place}, table {ctx.info_name!r}", ctx)
    values = {_key(key): value for key, value in {**shared, **own}.items()}
    ctx.default_map = {
        str(param.name): _value(param, values[key], f"{place}: {key!r}")
        for key, param in here.items()
        if key in values
    }


def _read(path: Path | None) -> tuple[Mapping[str, Any], str]:
    """The tables, and what to call the place that they are from."""
    if path is None and not _PYPROJECT.is_file():
        return {}, ""
    file = path or _PYPROJECT
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        if path is None:
            return {}, ""  # somebody else's file, which others report
        raise click.UsageError(f"{file} cannot be read as TOML: {error}.") from error
    if file.name == _PYPROJECT.name:
        return tables.get("tool", {}).get("meshwright", {}), f"{file} [tool.meshwright]"
    return tables, str(file)


def _keys(command: click.Command) -> dict[str, click.Parameter]:
    """What may be set of a command, by key."""
    left_out = ("config", "traceback", "help", "version")
    by_key = {}
    for param in command.params:
        longest = max(param.opts, key=len).lstrip("-") if param.opts else str(param.name)
        if longest not in left_out:
            by_key[_key(longest)] = param
    return by_key


def _key(name: str) -> str:
    return name.replace("_", "-")


def _refuse(table: Mapping[str, Any], keys: Iterable[str], place: str, ctx: click.Context) -> None:
    keys = sorted(keys)
    if unknown := [key for key in table if _key(key) not in keys]:
        near = difflib.get_close_matches(unknown[0], keys, n=1)
        advice = f" Did you mean {near[0]!r}?" if near else ""
        raise click.UsageError(
            f"{place}: unknown key {', '.join(map(repr, unknown))}.{advice} "
            f"Known keys: {', '.join(keys)}.",
            ctx,
        )


def _value(param: click.Parameter, value: Any, place: str) -> Any:
    """A value of TOML as the option takes it from the command line."""
    joint = _JOINTS.get(param.opts[0])
    if isinstance(value, Mapping) and joint is not None:
        return [f"{key}{joint}{_text(item)}" for key, item in value.items()]
    if isinstance(value, Mapping) and param.opts[0] in _TABLES:
        return json.dumps(value)
    if isinstance(value, Mapping):  # a mesh
        value = ",".join(f"{key}={item}" for key, item in value.items())
    several = param.multiple or param.nargs == -1
    if isinstance(value, list) and not several and str(param.metavar).endswith(",..."):
        return ",".join(_scalar(param, item, place) for item in value)
    if isinstance(value, list):
        if not several:
            raise click.UsageError(f"{place} takes one value; received a list of {len(value)}.")
        one = param if param.opts[0] in _TABLES else _one
        return [_item(one, item, place) for item in value]
    value = _scalar(param, value, place)
    return [value] if several else value


def _scalar(param: click.Parameter, value: Any, place: str) -> Any:
    """One value as text, which the option reads as it would on the command line; a flag's stays."""
    is_flag = getattr(param, "is_flag", False)
    if is_flag != isinstance(value, bool):
        expected = "true or false" if is_flag else "a text or a number"
        raise click.UsageError(
            f"{place}: expected {expected}; received {json.dumps(value, default=str)}."
        )
    if not isinstance(value, bool | int | float | str):  # a date, or a list in a list
        raise click.UsageError(f"{place}: expected a text or a number; received {value}.")
    return value if is_flag else str(value)


def _item(param: click.Parameter, value: Any, place: str) -> Any:
    """One of several values."""
    return json.dumps(value) if param is not _one else _value(_one, value, place)


_one = click.Option(["--mesh"])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


config_option = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_take,
    help="A TOML file with defaults of these options.  [default: [tool.meshwright] in "
    "./pyproject.toml]",
)
