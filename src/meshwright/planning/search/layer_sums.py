"""Gradients of layers that a step reads out of a stack by number: how XLA for CPU adds them up.

Each is put among zeros for the other layers, so that what is added is as large as the stack. XLA
for CPU writes all that are padded before it adds the first two. Of those that are scattered, as
``jnp.take`` has it, it holds three at a time: the sum so far, the next one, and zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..graph import Graph, Operation
from .facts import Facts

SCATTERS = ("scatter-add", "scatter_add")
_SCATTERED = 3  # at once


class LayerSum(NamedTuple):
    """The gradient of a stack: the operation that makes it, and how many ``terms`` are there at
    once. Those that ``wait`` are there until it is read."""

    result: int
    place: int
    terms: int
    wait: bool


def layer_sums(graph: Graph, facts: Facts) -> Iterator[LayerSum]:
    """The sums of a step, of two layers or more."""
    terms: dict[int, tuple[int, bool]] = {}  # of an array: how many, and whether they are padded
    last: dict[int, int] = {}
    for place, operation in enumerate(graph.operations):
        for t in operation.results if len(operation.results) == 1 else ():
            found = _terms(graph, operation, terms) if facts.kinds[t] == "gradient" else None
            if found is not None:
                terms[t], last[t] = found, place
                for operand in operation.operands:
                    last.pop(operand, None)
    for t, place in last.items():
        count, padded = terms[t]
        if count > 1:
            yield LayerSum(t, place, count if padded else min(count + 1, _SCATTERED), padded)


def _terms(
    graph: Graph, operation: Operation, terms: dict[int, tuple[int, bool]]
) -> tuple[int, bool] | None:
    if operation.kind == "add_any" and all(t in terms for t in operation.operands):
        added = [terms[t] for t in operation.operands]
        return sum(count for count, _ in added), any(padded for _, padded in added)
    if len(operation.operands) != 1:
        return None
    layer = graph.tensors[operation.operands[0]].shape
    dims = graph.tensors[operation.results[0]].shape
    if operation.kind == "pad" and layer == (1, *dims[1:]) != dims:
        return 1, True
    if operation.kind in SCATTERS and layer == dims[1:]:
        return 1, False
    return None
