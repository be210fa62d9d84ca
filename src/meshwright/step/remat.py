"""Recompute: parts of the forward pass done again in the backward pass, to keep less in memory.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). ``"none"`` leaves it to
XLA. ``"block"`` keeps the outputs of blocks and computes what is inside them again, one block at a
time: each is a ``jax.checkpoint`` of its own, whose backward pass begins when its gradient has
come. ``"selective"`` keeps what products and convolutions with weights yield, too, and computes the
rest of a block again: normalization, activations, and attention, whose scores take most of the
memory and little of the time (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022). Front ends and users mark outputs by :func:`block_output`; where none is
marked, each turn of a loop is a block. Any other word names a policy of
``jax.checkpoint_policies`` that takes no arguments, such as ``"nothing_saveable"``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from .. import _compat
from ..jaxprs.blocks import BLOCK, has_blocks, has_marks, has_turns, is_mark
from ..jaxprs.edits import shapes_of
from ..jaxprs.flops import equation_flops
from ..jaxprs.slices import variables
from ..program import Arrays, Aux, Batch, Program, TrainState
from .remat_stretches import ByLayers, Cut, Equations, Stretch, but_gathered, in_stretches

BY_BLOCK = ("block", "selective")  # ways that take one block at a time


def block_output(value: Any) -> Any:
    """Mark an array as the output of a block: ``remat="block"`` and ``"selective"`` keep it.

    ``value`` is an array, or a pytree of arrays, and is returned unchanged.

    >>> import jax.numpy as jnp
    >>> block_output(jnp.ones(3)).shape
    (3,)
    """
    return checkpoint_name(value, BLOCK)


def recomputing(program: Program, remat: str) -> Program:
    """The program with its loss recomputed as ``remat`` says when it is differentiated."""
    if remat == "none":
        return program
    cut = blocks(remat) if remat in BY_BLOCK else whole(policy_of(remat))

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        def of_arrays(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
            return program.loss(params, whole, batch, training)

        return in_stretches(of_arrays, cut, by_layers=_of_blocks(remat))(params, whole, batch)

    return replace(program, loss=loss)


def _of_blocks(remat: str) -> ByLayers:
    return lambda jaxpr, _: (with_blocks(jaxpr) if remat in BY_BLOCK else jaxpr, ())


def with_blocks(jaxpr: Any) -> Any:
    """An open jaxpr with each turn of its outer loops marked as a block, if no output is marked."""
    return jaxpr if has_marks(jaxpr) else _with_turns(jaxpr)


def _with_turns(jaxpr: Any) -> Any:
    return jaxpr.replace(eqns=[_with_turn(eqn) for eqn in jaxpr.eqns])


def _with_turn(eqn: Any) -> Any:
    if has_turns(eqn):
        changed = _with_carry_marked(eqn)
    elif eqn.primitive.name == "jit":
        changed = _with_turns(eqn.params["jaxpr"].jaxpr)
    else:
        return eqn
    closed = eqn.params["jaxpr"].replace(jaxpr=changed)
    return eqn.replace(params={**eqn.params, "jaxpr": closed})


def _with_carry_marked(loop: Any) -> Any:
    """The function of a loop, with a mark on what a turn hands on to the next."""
    body, (_, carried) = loop.params["jaxpr"].jaxpr, _compat.scan_counts(loop)
    produced = {var for eqn in body.eqns for var in eqn.outvars}
    handed_on = dict.fromkeys(variables(body.outvars[:carried]))
    marks = _marks_of([var for var in handed_on if var in produced])
    handed = [
        var if hasattr(var, "val") or var not in marks else marks[var].outvars[0]
        for var in body.outvars[:carried]
    ]
    return body.replace(
        eqns=[*body.eqns, *marks.values()], outvars=[*handed, *body.outvars[carried:]]
    )


def _marks_of(marked: Sequence[Any]) -> dict[Any, Any]:
    """The equation that marks each variable.

    They are traced together: JAX keeps the trace of a function, so that two marks of one shape,
    each traced by itself, would make one and the same variable.
    """
    marks = jax.make_jaxpr(lambda *values: [block_output(value) for value in values])
    eqns = marks(*shapes_of(marked)).jaxpr.eqns
    return {var: mark.replace(invars=[var]) for var, mark in zip(marked, eqns, strict=True)}


def blocks(remat: str) -> Cut:
    """A stretch for each block, up to the last one; all in one where there are none.

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
        if works and is_mark(eqn):
            parts.append(Stretch(start, number + 1, policy))
            start, works = number + 1, False
    return parts


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
    if remat == "none":
        return jax.checkpoint_policies.everything_saveable

    policies = jax.checkpoint_policies
    if remat not in BY_BLOCK:
        return getattr(policies, remat)
    outputs = policies.save_only_these_names(BLOCK)
    return outputs if remat == "block" else policies.save_from_both_policies(outputs, _of_weights)


def _of_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether it is a product that sums over all rows alike, as those with weights do."""
    if primitive.name == "dot_general":
        _, batch_dims = params["dimension_numbers"]
        return batch_dims == ((), ())
    return primitive.name == "conv_general_dilated"


def _policy_names() -> list[str]:
    """The policies themselves, not the functions that make one of arguments."""
    policies = vars(jax.checkpoint_policies).items()
    return [name for name, value in policies if callable(value) and _is_policy(value)]


def _is_policy(value: Any) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(value).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds
