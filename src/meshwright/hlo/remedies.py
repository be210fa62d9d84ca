"""Which collectives are unexpected, and what would remove them.

Three kinds of gathers are *unexpected*: of a weight that its layout splits though ZeRO does not
share it out; of the new value of a variable, which devices that hold it whole have computed in
pieces; and of an activation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..layouts.layout import UNSHARDED
from ..layouts.params import Placed
from ..layouts.placement import Placement
from .collectives import Collective
from .origins import Origin


def remedy(
    collective: Collective,
    origin: Origin,
    moved: Placed | None,
    target: Placed | None,
    variables: Sequence[Placed | None],
    placement: Placement,
) -> str:
    """What would remove a collective; empty where it is wanted.

    ``moved`` is the variable that it copies and ``target`` the one whose new value it makes, if
    there is one.
    """
    if collective.kind != "all-gather" or collective.elements <= 1:
        return ""
    if moved is not None:
        return _of_variable(moved, collective.axes, placement)
    if target is not None:
        return _of_new_value(target, collective, placement)
    if origin.phase == "other" or not origin.path or _has_own_layout(origin, placement):
        return ""
    weights = [v for v in variables if v is not None and _is_weight_of(v, origin.path)]
    if origin.phase != "forward" and any(_has_size(weight, collective) for weight in weights):
        return ""  # a gradient, which is wanted whole where its weight is
    return _of_activation(collective, origin, weights, placement)


def _of_variable(variable: Placed, axes: tuple[str, ...], placement: Placement) -> str:
    split = [axis for axis in axes if axis in variable.layout.axes]
    shared = placement.batch_axes if placement.zero == 3 else ()
    if not split or set(split) <= set(shared):
        return ""
    info, layout = variable.info, variable.layout.unbound()
    return (
        f"{info.path} lies as {layout} ({variable.reason}) and is gathered whole along "
        f"{_named(split)}: its layer takes it whole. Split what meets it along {_named(split)} "
        "too, the weights before it or activations={...}, or leave it unsharded."
    )


def _of_new_value(variable: Placed, collective: Collective, placement: Placement) -> str:
    shared = placement.batch_axes if placement.zero in (1, 2) else ()
    if set(collective.axes) <= set(shared) or set(collective.axes) & set(variable.layout.axes):
        return ""
    path = variable.info.owner or variable.info.path
    return (
        f"{path} lies whole along {_named(collective.axes)}, yet it is updated in pieces there and "
        f"gathered after. Split it: layouts[{path!r}] = {_split_layout(variable, collective)}."
    )


def _split_layout(variable: Placed, collective: Collective) -> str:
    specs = [_spec(variable, dim) for dim in range(len(variable.info.dims))]
    as_it_lies = collective.arrays[0].dims == variable.layout.local_dims(variable.stored_dims)
    dim, axes = collective.gathered_dim, collective.axes
    if as_it_lies and dim is not None and specs[dim] is None:
        specs[dim] = axes[0] if len(axes) == 1 else axes
        return repr(specs)
    return f"[..., {_named(collective.axes)}, ...]"


def _of_activation(
    collective: Collective, origin: Origin, weights: Sequence[Placed], placement: Placement
) -> str:
    array = collective.arrays[0]
    dims = "x".join(map(str, array.dims))
    what = f"an activation of {origin.path} ({array.dtype} {dims}, {origin.phase}) is gathered"
    if set(collective.axes) & set(placement.batch_axes):
        first = placement.batch_axes[0]
        return (
            f"{what}, rows of the batch among it, along {_named(collective.axes)}. Say that they "
            f"stay apart: activations={{{origin.path!r}: [{first!r}, ...]}}."
        )
    size = None if collective.gathered_dim is None else array.dims[collective.gathered_dim]
    for weight in weights:
        if set(collective.axes) & set(weight.layout.axes):
            continue  # an axis splits one dim of an array, and no second one
        for dim, of_dim in enumerate(weight.info.dims):
            if len(weight.info.dims) > 1 and of_dim == size and _spec(weight, dim) is None:
                specs = [_spec(weight, i) for i in range(len(weight.info.dims))]
                specs[dim] = collective.axes[0] if len(collective.axes) == 1 else collective.axes
                return (
                    f"{what}, as {weight.info.path} takes it whole along "
                    f"{_named(collective.axes)}. Split that, too: "
                    f"layouts[{weight.info.path!r}] = {specs!r}."
                )
    return (
        f"{what}, as it is needed whole along {_named(collective.axes)}. Say how it lies: "
        f"activations={{{origin.path!r}: [...]}}."
    )


def _spec(variable: Placed, dim: int) -> str | tuple[str, ...] | None:
    spec = variable.layout.specs[dim]
    return None if spec == UNSHARDED else spec


def _has_own_layout(origin: Origin, placement: Placement) -> bool:
    """Whether ``activations`` have a layout for the outputs of this layer."""
    scopes = origin.path.split("/")
    spellings = ["/".join(scopes[:end]) for end in range(len(scopes), 0, -1)]
    return placement.activation_layout(spellings) is not None


def _is_weight_of(variable: Placed, path: str) -> bool:
    spellings = (variable.info.path, *variable.info.spellings)
    return variable.info.role == "parameter" and any(
        f"/{path}/" in f"/{spelling}" for spelling in spellings
    )


def _has_size(variable: Placed, collective: Collective) -> bool:
    local = math.prod(variable.layout.local_dims(variable.stored_dims))
    return collective.elements in (math.prod(variable.stored_dims), local)


def _named(axes: Iterable[str]) -> str:
    return " and ".join(repr(axis) for axis in axes)
