"""Errors of a model's own code, with the line that raised them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax

from .. import _compat
from ..errors import MeshwrightError, ModelError, Preempted
from ..jaxprs.lines import user_lines, where_raised

_MOST = 600  # characters of somebody else's message


@contextlib.contextmanager
def as_model_error(what: str, way_out: str = "") -> Iterator[None]:
    """Tell an error of the user's code inside as a :class:`~meshwright.ModelError`.

    >>> try:
    ...     with as_model_error("the step of 'net' cannot be traced"):
    ...         raise TypeError("no such operand")
    ... except ModelError as error:
    ...     print(error)
    the step of 'net' cannot be traced (...): TypeError: no such operand
    """
    try:
        yield
    except (MeshwrightError, Preempted):
        raise
    except (Exception, SystemExit) as error:
        line = where_raised(error)
        place = "" if line is None else f" ({line}, in {line.function})"
        failure = ModelError(f"{what}{place}: {in_short(error)}{way_out}")
        for outer in user_lines(error):
            failure.add_note(f"  {outer}")
        raise failure from error


def tracing(name: str) -> contextlib.AbstractContextManager[None]:
    """For what is inside and traces the step of a model."""
    way_out = (
        "\nA step is traced without values: shapes and dtypes are all that it may depend on. "
        "The cause is shown in full by --traceback, or by the exception's __cause__."
    )
    return as_model_error(f"the step of {name!r} cannot be traced", way_out)


def tracing_forward(name: str, inputs: Any) -> contextlib.AbstractContextManager[None]:
    """For what is inside and traces the forward pass of a model with these ``inputs``."""
    shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", inputs)
    way_out = (
        f"\nIts inputs are {shapes}: it must take any number of rows, as those of several "
        "requests are computed together. Of a batch (x, y) it gets x, of any other, such as a "
        "dict, all."
    )
    return as_model_error(f"the forward pass of {name!r} cannot be traced", way_out)


def in_short(error: BaseException) -> str:
    """The class of an error and the first of its words, on one line.

    >>> in_short(ValueError("one" + chr(10) + "and another"))
    'ValueError: one and another'
    """
    error = _compat.own_error(error)
    words = re.sub(r"\x1b\[\d*m", "", str(error))
    words = re.split(r"\n-{5,}|\nSee https?://|\n\nArguments received", words)[0]
    words = re.sub(r"The error occurred while tracing the function .* for jit\. ?", "", words)
    words = " ".join(words.split())
    short = words if len(words) <= _MOST else f"{words[:_MOST]} ..."
    return f"{type(error).__name__}: {short}"
