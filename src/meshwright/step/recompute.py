"""Recompute: parts of the forward pass done again in the backward pass, to keep less in memory.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). ``"none"`` leaves it to
XLA. ``"block"`` keeps the outputs of blocks and computes what is inside them again, one block at a
time: each is a ``jax.checkpoint`` of its own, whose backward pass begins when its gradient has
come. Front ends and users mark outputs by :func:`block_output`. Any other word names a policy of
``jax.checkpoint_policies`` that takes no arguments, such as ``"nothing_saveable"``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..program import Arrays, Aux, Batch, Program, TrainState
from .flops import equation_flops
from .jaxprs import equations
from .stretches import Equations, Stretch, in_stretches

_BLOCK = "block output"
_CALLS = ("jit", "scan")


def block_output(value: Any) -> Any:
    """The array, marked as the output of a block: ``remat="block"`` keeps it."""
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(value, _BLOCK)


def recomputing(program: Program, remat: str) -> Program:
    """The program with its loss recomputed as ``remat`` says when it is differentiated."""
    if remat == "none":
        return program
    cut = blocks if remat == "block" else whole(policy_of(remat))

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        def of_arrays(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
            return program.loss(params, whole, batch, training)

        return in_stretches(of_arrays, cut)(params, whole, batch)

    return replace(program, loss=loss)


def blocks(found: Equations) -> list[Stretch]:
    """A stretch for each block, up to the last one; all in one where no output is marked.

    What multiplies nothing costs little to compute again, so it belongs to the next block.
    """
    cut = _blocks(found)
    return cut or whole(None)(found)


def whole(policy: Callable[..., Any] | None) -> Callable[[Equations], list[Stretch]]:
    """Everything in one stretch."""
    return lambda found: [Stretch(0, len(found.rest), policy)]


def _blocks(found: Equations) -> list[Stretch]:
    parts: list[Stretch] = []
    start, works = 0, False
    for number, eqn in enumerate(found.rest):
        if eqn.primitive.name in _CALLS and any(map(_is_mark, equations(eqn.params["jaxpr"]))):
            before = [Stretch(start, number)] if works else []
            of_blocks = Stretch(number, number + 1, policy_of("block"), inside=_blocks)
            parts += [*before, of_blocks]
            start, works = number + 1, False
        works = works or equation_flops(eqn) != 0
        if works and _is_mark(eqn):
            parts.append(Stretch(start, number + 1))
            start, works = number + 1, False
    return parts


def _is_mark(eqn: Any) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == _BLOCK


def check_remat(remat: str) -> list[str]:
    """A sentence if there is no such way to recompute, with the nearest names.

    >>> check_remat("nothing_savable")[0]
    "remat='nothing_savable': say 'none', 'block' or a policy; the nearest: 'nothing_saveable', ..."
    """
    if remat in ("none", "block"):
        return []
    names = _policy_names()
    if remat in names:
        return []
    near = difflib.get_close_matches(str(remat), names, n=2) or names
    return [
        f"remat={remat!r}: say 'none', 'block' or a policy; the nearest: "
        f"{', '.join(map(repr, near))}."
    ]


def policy_of(remat: str) -> Any:
    """What is kept for the backward pass, as ``jax.checkpoint`` takes it; everything for "none"."""
    import jax

    if remat == "none":
        return jax.checkpoint_policies.everything_saveable

    policies = jax.checkpoint_policies
    return policies.save_only_these_names(_BLOCK) if remat == "block" else getattr(policies, remat)


def _policy_names() -> list[str]:
    """The policies themselves, not the functions that make one of arguments."""
    import jax

    found = vars(jax.checkpoint_policies).items()
    return [name for name, value in found if callable(value) and _is_policy(value)]


def _is_policy(value: Any) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(value).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds
