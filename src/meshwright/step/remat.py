"""Recompute: parts of the forward pass done again in the backward pass, to keep less in memory.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). ``"none"`` leaves it to
XLA. ``"block"`` keeps the outputs of blocks and computes what is inside them again, one block at a
time: each is a ``jax.checkpoint`` of its own, whose backward pass begins when its gradient has
come. ``"selective"`` keeps what products and convolutions with weights yield, too, and computes the
rest of a block again: normalization, activations, and attention, whose scores take most of the
memory and little of the time (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022). Front ends and users mark outputs by :func:`block_output`. Any other
word names a policy of ``jax.checkpoint_policies`` that takes no arguments, such as
``"nothing_saveable"``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..jaxprs.edits import equations
from ..jaxprs.flops import equation_flops
from ..program import Arrays, Aux, Batch, Program, TrainState
from .remat_stretches import Cut, Equations, Stretch, but_gathered, in_stretches

BY_BLOCK = ("block", "selective")  # ways that take one block at a time
_BLOCK = "block output"
_CUT_INSIDE = ("jit", "scan")  # calls and loops whose function may hold the blocks


def block_output(value: Any) -> Any:
    """Mark an array as the output of a block: ``remat="block"`` and ``"selective"`` keep it.

    ``value`` is an array, or a pytree of arrays, and is returned unchanged.

    >>> import jax.numpy as jnp
    >>> block_output(jnp.ones(3)).shape
    (3,)
    """
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(value, _BLOCK)


def recomputing(program: Program, remat: str) -> Program:
    """The program with its loss recomputed as ``remat`` says when it is differentiated."""
    if remat == "none":
        return program
    cut = blocks(remat) if remat in BY_BLOCK else whole(policy_of(remat))

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        def of_arrays(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
            return program.loss(params, whole, batch, training)

        return in_stretches(of_arrays, cut)(params, whole, batch)

    return replace(program, loss=loss)


def blocks(remat: str) -> Cut:
    """A stretch for each block, up to the last one; all in one where no output is marked.

    What multiplies nothing costs little to compute again, so it belongs to the next block.
    """
    policy = None if remat == "block" else but_gathered(policy_of(remat))

    def cut(traced: Equations) -> list[Stretch]:
        return _blocks(traced, policy) or whole(policy)(traced)

    return cut


def whole(policy: Callable[..., Any] | None) -> Callable[[Equations], list[Stretch]]:
    """Everything in one stretch."""
    return lambda traced: [Stretch(0, len(traced.rest), policy)]


def _blocks(traced: Equations, policy: Callable[..., Any] | None) -> list[Stretch]:
    parts: list[Stretch] = []
    start, works = 0, False
    for number, eqn in enumerate(traced.rest):
        if has_blocks(eqn):
            before = [Stretch(start, number, policy)] if works else []
            inside = functools.partial(_blocks, policy=policy)
            of_blocks = Stretch(number, number + 1, policy or policy_of("block"), inside=inside)
            parts += [*before, of_blocks]
            start, works = number + 1, False
        works = works or equation_flops(eqn) != 0
        if works and _is_mark(eqn):
            parts.append(Stretch(start, number + 1, policy))
            start, works = number + 1, False
    return parts


def has_blocks(eqn: Any) -> bool:
    """Whether it is a call or a loop with outputs of blocks inside."""
    is_cut = eqn.primitive.name in _CUT_INSIDE
    return is_cut and any(map(_is_mark, equations(eqn.params["jaxpr"])))


def _is_mark(eqn: Any) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == _BLOCK


def check_remat(remat: str) -> list[str]:
    """A sentence if there is no such way to recompute, with the nearest names.

    >>> print(check_remat("nothing_savable")[0])
    remat='nothing_savable': say 'none', 'block', 'selective' or a policy; the nearest: 'noth...
    """
    if remat in ("none", *BY_BLOCK):
        return []
    names = _policy_names()
    if remat in names:
        return []
    near = difflib.get_close_matches(str(remat).lower(), ["none", *BY_BLOCK, *names], n=2)
    return [
        f"remat={remat!r}: say 'none', 'block', 'selective' or a policy; "
        f"{'the nearest' if near else 'policies'}: {', '.join(map(repr, near or names))}."
    ]


def policy_of(remat: str) -> Any:
    """What is kept for the backward pass, as ``jax.checkpoint`` takes it; everything for "none"."""
    import jax

    if remat == "none":
        return jax.checkpoint_policies.everything_saveable

    policies = jax.checkpoint_policies
    if remat not in BY_BLOCK:
        return getattr(policies, remat)
    outputs = policies.save_only_these_names(_BLOCK)
    return outputs if remat == "block" else policies.save_from_both_policies(outputs, _of_weights)


def _of_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether it is a product that sums over all rows alike, as those with weights do."""
    if primitive.name == "dot_general":
        _, batch_dims = params["dimension_numbers"]
        return batch_dims == ((), ())
    return primitive.name == "conv_general_dilated"


def _policy_names() -> list[str]:
    """The policies themselves, not the functions that make one of arguments."""
    import jax

    policies = vars(jax.checkpoint_policies).items()
    return [name for name, value in policies if callable(value) and _is_policy(value)]


def _is_policy(value: Any) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(value).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds
