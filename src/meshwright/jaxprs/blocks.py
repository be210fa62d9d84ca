"""Where the blocks of a model end: at outputs that are marked, or with each turn of a loop."""

from __future__ import annotations

from typing import Any

from .edits import equations
from .flops import equation_flops

BLOCK = "block output"  # the name of an output
_CUT_INSIDE = ("jit", "scan")  # calls and loops whose function may hold blocks


def is_mark(eqn: Any) -> bool:
    """Whether an equation marks the output of a block."""
    return eqn.primitive.name == "name" and eqn.params["name"] == BLOCK


def has_marks(jaxpr: Any) -> bool:
    """Whether outputs of blocks are marked in a jaxpr, or in one inside it."""
    return any(map(is_mark, equations(jaxpr)))


def has_blocks(eqn: Any) -> bool:
    """Whether it is a call or a loop with outputs of blocks inside."""
    return eqn.primitive.name in _CUT_INSIDE and has_marks(eqn.params["jaxpr"])


def has_turns(eqn: Any) -> bool:
    """Whether it is a loop whose turns are blocks where no output is marked: one that multiplies
    something, as loops over layers do."""
    return eqn.primitive.name == "scan" and bool(equation_flops(eqn))
