"""More models and versions in one server: ``--beside``, or ``[[serve.beside]]`` in a file.

An entry is a small command line of ``meshwright serve``: what it does not say, the command itself
says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from ..errors import ServingError

if TYPE_CHECKING:
    from .serving import ServeOptions

# Options of one model, beside "run", "version", "share" and "compare".
_OPTIONS = (
    "model", "mesh", "layout", "option", "plan", "pipeline", "name", "max-rows", "buckets",
    "lengths", "pad-value", "wait", "in-flight", "queue-rows", "finite", "precision", "sample",
    "reload",
)  # fmt: skip
_OWN = ("run", "version", "share", "compare")


@dataclass(frozen=True)
class Beside:
    """One more model, or version of a model, and its part of the traffic."""

    options: ServeOptions
    share: float | None = None
    compare: float = 0.0


class BesideText(click.ParamType):
    """``run=runs/new,version=2,share=0.1``, or a table of TOML as JSON."""

    name = "entry"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        try:
            entry = json.loads(value) if value.startswith("{") else _pairs(value)
        except ValueError as error:
            self.fail(f"expected key=value pairs with commas, or JSON: {error}.", param, ctx)
        if unknown := [key for key in entry if key not in (*_OWN, *_OPTIONS)]:
            names = ", ".join((*_OWN, *_OPTIONS))
            self.fail(
                f"unknown key {', '.join(unknown)}. Known keys: {names}.{_hint(entry)}", param, ctx
            )
        return entry


def _pairs(text: str) -> dict[str, str]:
    """The keys and values of one line; a value with commas is in quotes.

    >>> _pairs("run=runs/new,version=2,finite")
    {'run': 'runs/new', 'version': '2', 'finite': 'true'}
    >>> _pairs('run=runs/new,mesh="batch=2,model=2"')
    {'run': 'runs/new', 'mesh': 'batch=2,model=2'}
    """
    if text.count('"') % 2:
        raise ValueError(f"a quote has no end in {text!r}")
    parts = ["".join(part) for part in re.findall(r'((?:[^,"]|"[^"]*")*)(?:,|$)', text)]
    pairs = [part.partition("=") for part in (parts[:-1] if len(parts) > 1 else parts)]
    if not all(key.strip() for key, _, _ in pairs):
        raise ValueError(f"received {text!r}")
    values = {key.strip(): value if joined else "true" for key, joined, value in pairs}
    return {key: value.replace('"', "") for key, value in values.items()}


def _hint(entry: Mapping[str, Any]) -> str:
    """How to write what may have been cut at a comma."""
    lists = ("mesh", "buckets", "lengths", "layout", "option")
    cut = next((key for key in entry if key in lists), None)
    example = {"mesh": "batch=2,model=2", "buckets": "1,8", "lengths": "64,128"}.get(cut or "")
    return f' A value with commas goes in quotes: {cut}="{example}".' if example else ""


def models_beside(options: ServeOptions) -> tuple[Beside, ...]:
    """What the entries ask for. Raises :class:`ServingError` for one that cannot be understood."""
    return tuple(_one(options, entry) for entry in options.beside)


def _one(options: ServeOptions, entry: Mapping[str, Any]) -> Beside:
    from .serve import options_of
    from .serving import ServeOptions

    run = str(entry.get("run", options.source))
    try:
        own = ServeOptions(**options_of([run, *_words(entry)]))
        share, compare = (_part(entry, name) for name in ("share", "compare"))
    except click.ClickException as error:
        message = f"{error.format_message()}{_hint(entry)}"
        raise ServingError(f"--beside {_text(entry)}: {message}") from error
    fields = {_FIELDS.get(key, key.replace("-", "_")) for key in entry if key in _OPTIONS}
    values: dict[str, Any] = {name: getattr(own, name) for name in fields}
    is_version = "version" in entry and "name" not in entry
    if own.source.suffix == ".keras":
        values["build"] = own.build  # a file has its model; what the command names is for runs
    name = options.model_name if is_version else own.model_name
    version = str(entry["version"]) if "version" in entry else None
    whole = replace(options, **{**values, "source": own.source, "name": name, "version": version})
    return Beside(replace(whole, beside=()), share, compare or 0.0)


_FIELDS = {"model": "build", "layout": "layouts", "option": "options"}


def _words(entry: Mapping[str, Any]) -> Sequence[str]:
    """An entry as words of a command line."""
    words = []
    for key, value in entry.items():
        if key not in _OPTIONS:
            continue
        if key == "finite":
            words += ["--finite"] * (str(value).lower() == "true")
        elif isinstance(value, Mapping):
            joint = {"layout": ":", "option": "="}.get(key)
            texts = [f"{name}{joint or '='}{_json(item)}" for name, item in value.items()]
            for text in texts if joint else [",".join(texts)]:
                words += [f"--{key}", text]
        else:
            several = isinstance(value, list)
            words += [f"--{key}", ",".join(map(str, value)) if several else str(value)]
    return words


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _part(entry: Mapping[str, Any], name: str) -> float | None:
    """A part of the traffic, from 0 to 1; the engine checks its range."""
    if name not in entry:
        return None
    try:
        return float(entry[name])
    except (TypeError, ValueError):
        raise ServingError(
            f"--beside {_text(entry)}: {name} must be a number from 0 to 1; received "
            f"{entry[name]!r}."
        ) from None


def _text(entry: Mapping[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in entry.items())
