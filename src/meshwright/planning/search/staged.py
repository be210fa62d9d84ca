"""Pipelines among the answers of the search: values, and who looks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .choices import Layouts
from .request import Request

if TYPE_CHECKING:
    from ..pipelined.cost import PipelineCost

AXIS = "stage"


class Found(NamedTuple):
    """A pipeline over the first axis of ``layouts``, with those of its stages, and its cost."""

    layouts: Layouts
    cost: PipelineCost


PipelinesOf = Callable[[Request, float], list[Found]]  # that fit, the best first; in some seconds
