"""What a device holds in the course of a step, instruction by instruction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...hlo.alive import Alive
from ...hlo.text import parse
from ...units import bytes_text
from .markup import Html, tag

if TYPE_CHECKING:
    from ..report import DryRun

SLOTS = 400
_WIDE, _HIGH = 800, 160  # of the picture, in its own units


def heights_of(text: str) -> list[int]:
    """Bytes of temporary arrays at each instruction of a program, in the order of its schedule;
    while a loop runs, those of the moment at which it holds most."""
    module = parse(text)
    each = Alive(module).at_each(module.computations[module.entry])
    return [held + within for _, held, within in each]


def in_slots(heights: Sequence[int], slots: int = SLOTS) -> list[int]:
    """The most of each of ``slots`` equal parts, fewer if there are not as many heights.

    >>> in_slots([1, 5, 2, 3], 2)
    [5, 3]
    """
    count = min(slots, len(heights))
    edges = [len(heights) * i // count for i in range(count + 1)] if count else []
    return [max(heights[a:b]) for a, b in itertools.pairwise(edges)]


def course_picture(run: DryRun) -> Html | None:
    """Memory over the schedule; none where nothing was compiled."""
    if run.compiled is None or not run.tensors:
        return None
    always = run.memory.argument_bytes + (run.memory.padding_bytes or 0)
    heights = in_slots(heights_of(run.compiled.text))
    whole = always + max(heights)
    drawn = tag(
        "svg",
        tag("title", f"Bytes of one device over the schedule, at most {bytes_text(whole)}"),
        tag("path", d=_steps([0] * len(heights), [always] * len(heights), whole), class_="f-blue"),
        tag("path", d=_steps([always] * len(heights), heights, whole), class_="f-sky"),
        viewBox=f"0 0 {_WIDE} {_HIGH}",
        preserveAspectRatio="none",
        role="img",
        class_="course",
    )
    told = (
        f"Memory in the course of a step, in the order of its instructions, to {bytes_text(whole)} "
        "by our own reading of the schedule. At the foot is what is always there: state, inputs "
        "and padding."
    )
    if run.blocks is not None:
        told += f" It shows two of {run.blocks.count} equal blocks."
    return tag("figure", tag("figcaption", told), drawn)


def _steps(feet: Sequence[int], heights: Sequence[int], whole: int) -> str:
    """A closed shape that is as high as each height, over its feet."""
    unit, wide = _HIGH / max(1, whole), _WIDE / len(heights)
    at = [_HIGH - unit * (foot + height) for foot, height in zip(feet, heights, strict=True)]
    top = "".join(f"V{y:.1f}h{wide:.3f}" for y in at)
    return f"M0 {_HIGH - unit * feet[0]:.1f}{top}V{_HIGH - unit * feet[-1]:.1f}z"
