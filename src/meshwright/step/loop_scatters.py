"""Gradients of stacked weights, summed over devices one layer at a time, where they are made.

The backward pass of a ``jax.lax.scan`` over stacked weights makes the gradient of one layer in each
step, and that of ``w[i]`` pads the gradient of a layer with zeros. Left to itself, XLA sums each
over the devices and keeps all of them whole until the loop ends and the optimizer takes its pieces,
which levels 1 and 2 of ZeRO are there to avoid. At level 3 the weights are gathered in the loop,
and so are their gradients scattered; see ``layer_gathers.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from .. import _compat
from ..jaxprs.edits import constraint_on
from ..jaxprs.primitives import CHECKPOINTS
from ..layouts.layout import Layout
from ..program import Arrays, Aux, Batch, TrainState
from .gradient import Gradient
from .layer_gathers import Slices, slices_of, stacked

Var = Any


def scattering_in_loops(
    gradient: Gradient, layouts: Sequence[tuple[Layout, Layout]], axes: tuple[str, ...]
) -> Gradient:
    """The same gradient, whose loops over layers sum that of each layer to its pieces.

    ``layouts`` has, for each parameter in the order of their paths, the layouts while it is used
    and while it is shared out over ``axes``.
    """

    def run(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Aux, Arrays]:
        closed, shapes = jax.make_jaxpr(gradient, return_shape=True)(params, whole, batch)
        aux, grads = shapes
        first = len(jax.tree.leaves(aux))
        lies = {
            first + number: slices_of(*layouts[number], params[path].shape, axes)
            for number, path in enumerate(sorted(grads))
        }
        changed = _changed(closed.jaxpr, {n: s for n, s in lies.items() if s is not None})
        leaves = jax.tree.leaves((params, whole, batch))
        results = jaxpr_as_fun(closed.replace(jaxpr=changed))(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _changed(jaxpr: Any, results: Mapping[int, Slices]) -> Any:
    """An open jaxpr whose loops make these of its results in pieces."""
    made_by = {var: number for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    wanted: dict[int, dict[int, Slices]] = {}
    for result, slices in results.items():
        for var in _terms(jaxpr.outvars[result], jaxpr, made_by):
            number = made_by[var]
            wanted.setdefault(number, {})[jaxpr.eqns[number].outvars.index(var)] = slices
    eqns = list[Any]()
    for number, eqn in enumerate(jaxpr.eqns):
        eqns += _in_pieces(eqn, wanted[number]) if number in wanted else [eqn]
    return jaxpr.replace(eqns=eqns)


def _terms(result: Var, jaxpr: Any, made_by: Mapping[Var, int]) -> list[Var]:
    """What a gradient is the sum of, casts apart."""
    terms, waiting = list[Var](), [result]
    while waiting:
        var = waiting.pop()
        if hasattr(var, "val") or var not in made_by:
            continue
        eqn = jaxpr.eqns[made_by[var]]
        if eqn.primitive.name in ("add_any", "convert_element_type"):
            waiting += eqn.invars
        else:
            terms.append(var)
    return terms


def _in_pieces(eqn: Any, results: Mapping[int, Slices]) -> list[Any]:
    """Equations that make these results of one in pieces, where they are gradients of layers."""
    name, inner = eqn.primitive.name, eqn.params.get("jaxpr")
    if name in CHECKPOINTS | {"jit"}:
        is_closed = hasattr(inner, "jaxpr")
        changed = _changed(inner.jaxpr if is_closed else inner, results)
        changed = inner.replace(jaxpr=changed) if is_closed else changed
        return [eqn.replace(params={**eqn.params, "jaxpr": changed})]
    if name == "scan":
        return _in_steps(eqn, results)
    return _in_place(eqn, *results.values()) if name == "pad" else [eqn]


def _in_steps(eqn: Any, results: Mapping[int, Slices]) -> list[Any]:
    """A loop that makes these of its results in pieces, and equations that lay them out as ZeRO
    does."""
    carried = _compat.scan_counts(eqn)[1]
    made = {number: slices for number, slices in results.items() if number >= carried}
    if not made or eqn.effects:
        return [eqn]
    inner = eqn.params["jaxpr"]
    body, outvars, after = inner.jaxpr, list(eqn.outvars), list[Any]()
    layers, body_results = list(body.eqns), list(body.outvars)
    for number, slices in made.items():
        layer = _laid(body_results[number], slices.piece, eqn)
        layers.append(layer)
        body_results[number] = layer.outvars[0]
        pieces = _laid(outvars[number], slices.pieces, eqn)
        shared = _laid(pieces.outvars[0], slices.shared, eqn)
        (unused,) = shared.outvars  # a variable of the right shape for what the loop makes
        after += [pieces.replace(invars=[unused]), shared.replace(outvars=[outvars[number]])]
        outvars[number] = unused
    changed = inner.replace(jaxpr=body.replace(eqns=layers, outvars=body_results))
    return [eqn.replace(outvars=outvars, params={**eqn.params, "jaxpr": changed}), *after]


def _in_place(eqn: Any, slices: Slices) -> list[Any]:
    """The gradient of a layer that is taken by its number, among zeros for the others."""
    (value, zero), (result,) = eqn.invars, eqn.outvars
    layer_dims, dims = value.aval.shape, result.aval.shape
    if layer_dims != (1, *dims[1:]) or layer_dims == dims:
        return [eqn]
    layer = _laid(value, stacked(slices.piece), eqn)
    pieces = _laid(result, slices.pieces, eqn)
    (unused,) = pieces.outvars
    padded = eqn.replace(invars=[layer.outvars[0], zero], outvars=[unused])
    return [layer, padded, pieces.replace(invars=[unused], outvars=[result])]


def _laid(var: Var, layout: Layout, like: Any) -> Any:
    """An equation that lays a variable out."""
    sharding = layout.sharding
    return constraint_on(var, sharding.mesh, sharding.spec, like)
