"""What several commands read out of the texts of their options."""

from __future__ import annotations

import json
from typing import Any

import click


def rule(text: str, option: str = "--rule") -> tuple[str, str]:
    """A pattern for paths and the axes of its layout, out of ``hidden.*kernel:unsharded,model``."""
    pattern, colon, axes = text.rpartition(":")
    if not (colon and pattern and axes):
        raise click.BadParameter(
            f"{text!r} is not pattern:layout, such as hidden.*kernel:unsharded,model.",
            param_hint=option,
        )
    return pattern, axes.strip("[] ")


def option(text: str) -> tuple[str, Any]:
    """A name and its value, out of ``zero=3``."""
    name, sign, value = text.partition("=")
    if not (sign and name.isidentifier()):
        raise click.BadParameter(
            f"{text!r} is not name=value, such as zero=3.", param_hint="--option"
        )
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value  # a bare word, such as an axis
