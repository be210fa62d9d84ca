"""Stacked weights of a loop over layers, gathered one layer at a time, inside the loop.

A ``jax.lax.scan`` over weights that are stacked along their first dim reads one layer of them in
each step. Gathered before the loop, they would all be whole on every device while it runs, which is
what ZeRO is there to avoid; MaxText gathers them so as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import _compat
from ..layouts.layout import Layout
from ..layouts.zero import share_out
from .remat_stretches import gathered, is_gather

Var = Any


@dataclass(frozen=True)
class Slices:
    """How a stacked parameter, or its gradient, lies: ``pieces`` in the loop; a layer of it
    ``whole`` and in a ``piece``."""

    shared: Layout  # outside of the loop
    pieces: Layout
    whole: Layout
    piece: Layout


def gathering_in_loops(
    jaxpr: Any,
    params: Mapping[Var, tuple[Layout, Layout]],
    axes: tuple[str, ...],
    keeps: Callable[[Any], Callable[..., Any] | None],
) -> Any:
    """An open jaxpr whose loops gather what they read of these parameters in each step.

    ``params`` maps variables to the layouts they have while they are used and while they are shared
    out over ``axes``. ``keeps`` gives the policy of what each step of a loop keeps for the backward
    pass, or ``None`` where something inside the loop says it.
    """
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    eqns = list[Any]()
    for eqn in jaxpr.eqns:
        before, changed = _in_steps(eqn, made_by, params, axes, keeps)
        eqns += [*before, changed]
    return jaxpr.replace(eqns=eqns)


def _in_steps(
    eqn: Any,
    made_by: Mapping[Var, Any],
    params: Mapping[Var, tuple[Layout, Layout]],
    axes: tuple[str, ...],
    keeps: Callable[[Any], Callable[..., Any] | None],
) -> tuple[list[Any], Any]:
    """The equations that spread what a loop reads, and the loop that gathers it."""
    if eqn.primitive.name != "scan" or eqn.effects:
        return [], eqn
    before, read, slots = list[Any](), list(eqn.invars), dict[int, Slices]()
    for number in range(sum(_compat.scan_counts(eqn)), len(read)):
        param = _param_of(read[number], made_by)
        if param is None or param not in params:
            continue
        slices = slices_of(*params[param], param.aval.shape, axes)
        if slices is None:
            continue
        spread = _spread(param, read[number], slices, eqn)
        before.append(spread)
        read[number], slots[number] = spread.outvars[0], slices
    if not slots:
        return [], eqn
    closed = _gathering(eqn.params["jaxpr"], slots, keeps(eqn))
    return before, eqn.replace(invars=read, params={**eqn.params, "jaxpr": closed})


def _param_of(var: Var, made_by: Mapping[Var, Any]) -> Var | None:
    """The parameter that this is, gathered and maybe cast to another type of floats."""
    import jax.numpy as jnp

    while (eqn := made_by.get(var)) is not None:
        if is_gather(eqn):
            return eqn.invars[0] if len(eqn.invars) == 1 else None
        is_float = jnp.issubdtype(var.aval.dtype, jnp.floating)
        if eqn.primitive.name != "convert_element_type" or not is_float:
            return None
        (var,) = eqn.invars
    return None


def slices_of(
    whole: Layout, shared: Layout, dims: tuple[int, ...], axes: tuple[str, ...]
) -> Slices | None:
    """How one layer lies; ``None`` where it is not shared out, and for a split or padded stack."""
    if whole == shared or len(dims) < 2 or whole.dim_axes(0) or whole.pad or shared.pad:
        return None
    mesh = whole.bound_mesh()
    layer = Layout(whole.specs[1:], mesh)
    if shared.dim_axes(0):  # layers on different devices, of which a step needs one
        piece = share_out(layer, dims[1:], axes)
        if piece is None:
            return None
    else:
        piece = Layout(shared.specs[1:], mesh)
    return Slices(shared, Layout([None, *piece.specs], mesh), layer, piece)


def _spread(param: Var, read: Var, slices: Slices, like: Any) -> Any:
    """An equation: the parameter, in the type that is read, with a piece of every layer on each
    device. Its gradient is shared out as the parameter is."""
    import jax

    pieces, shared = slices.pieces.sharding, slices.shared.sharding
    constrained = jax.lax.with_sharding_constraint

    @jax.custom_vjp
    def spread(value: Any) -> Any:
        return constrained(value.astype(read.aval.dtype), pieces)

    def backward(_: None, gradient: Any) -> tuple[Any]:
        return (constrained(constrained(gradient, pieces).astype(param.aval.dtype), shared),)

    spread.defvjp(lambda value: (spread(value), None), backward)
    shape = jax.ShapeDtypeStruct(param.aval.shape, param.aval.dtype)
    (eqn,) = jax.make_jaxpr(spread)(shape).jaxpr.eqns
    return eqn.replace(invars=[param], source_info=like.source_info)


def _gathering(closed: Any, slots: Mapping[int, Slices], policy: Callable[..., Any] | None) -> Any:
    """The function of a loop that gathers these of its arguments."""
    import jax
    from jax.extend.core import jaxpr_as_fun

    def step(*args: Any) -> Any:
        values = [
            gathered(value, slots[n].whole.sharding, slots[n].piece.sharding)
            if n in slots
            else value
            for n, value in enumerate(args)
        ]
        return jaxpr_as_fun(closed)(*values)

    shapes = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type)
        for var in closed.jaxpr.invars
    ]
    kept = step if policy is None else jax.checkpoint(step, policy=policy, prevent_cse=False)
    return jax.make_jaxpr(kept)(*shapes)
