"""Which part of a model an instruction stems from, by the name scopes that JAX leaves in it."""

from __future__ import annotations

import re

PHASES = ("forward", "backward", "recompute", "other")

_WRAPPED = re.compile(r"(?:jvp|transpose|vmap)\((.*)\)")
_NO_SCOPE = re.compile(
    r"jit\(.*\)|pjit|while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|checkpoint|remat2?|shard_map|"
    r"rematted_computation|custom_[jv][vj]p_call|call_exported|mw_line_\d+_|.*->.*|"
)


def layer_of(path: str) -> str:
    """The name scopes of a path without what JAX adds for gradients, loops, calls and products.

    >>> layer_of("jit(step)/transpose(jvp(net))/block_0/bd,dh->bh/dot_general")
    'net/block_0'
    >>> layer_of("jit(step)/transpose(jvp(net))/jvp(net)/checkpoint/rematted_computation/tanh")
    'net'
    """
    scopes: list[str] = []
    for part in parts(path)[:-1]:
        scopes += [name for name in _unwrapped(part).split("/") if not _NO_SCOPE.fullmatch(name)]
    half = len(scopes) // 2  # a recomputing backward pass spells them twice
    return "/".join(scopes[:half] if half and scopes[:half] == scopes[half:] else scopes)


def phase_of(path: str) -> str:
    """Whether a path is of the ``"forward"`` or ``"backward"`` pass, or of what the backward pass
    computes again (``"recompute"``); ``"other"`` outside of gradients.

    >>> phase_of("jit(step)/jvp(net)/tanh"), phase_of("jit(step)/transpose(jvp(net))/mul")
    ('forward', 'backward')
    """
    if "rematted_computation" in path:
        return "recompute"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else "other"


def parts(path: str, sign: str = "/") -> list[str]:
    """The parts between slashes, or other signs, that stand outside of brackets."""
    pieces, depth = [""], 0
    for letter in path:
        depth += (letter == "(") - (letter == ")")
        if letter == sign and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def _unwrapped(part: str) -> str:
    while wrapped := _WRAPPED.fullmatch(part):
        part = wrapped[1]
    return part
