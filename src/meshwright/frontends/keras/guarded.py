"""Right gradients for Keras models however they are split; see ``step/spatial.py`` for why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras

from ... import _compat
from ...layouts.layout import Layout
from ...layouts.placement import Placement
from ...step.spatial import guard
from .batches import putter
from .paths import model_infos


def stateless_call(
    original: Callable[..., Any],
    placement: Placement,
    model: keras.Model,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Keras' ``stateless_call``, with right gradients however its arguments are split.

    ``args`` are values of trainable and other variables, then the model's inputs.
    """
    trained, others, *inputs = args
    layouts = (
        _parameter_layouts(placement, model),
        _variable_layouts(model.non_trainable_variables),
        _input_layouts(placement, model, tuple(inputs)),
    )
    if _is_safe(placement, layouts):
        return original(model, *args, **kwargs)

    def forward(trained: Any, others: Any, inputs: Any) -> Any:
        results = original(model, trained, others, *inputs, **kwargs)
        return results, _compat.masks_of(results)

    results, masks = guard(forward, layouts)(trained, others, tuple(inputs))
    _compat.set_masks(results, masks)
    return results


def _parameter_layouts(placement: Placement, model: keras.Model) -> list[Layout | None]:
    """How parameters lie while they are used, which at level 3 of ZeRO is not how they are kept."""
    if placement.zero < 3:
        return _variable_layouts(model.trainable_variables)
    infos = model_infos(model)
    used = [infos[id(variable)] for variable in model.trainable_variables]
    return [each.unpadded for each in placement.with_zero(0).place(used)]


def _variable_layouts(variables: list[Any]) -> list[Layout | None]:
    return [_noted(variable) for variable in variables]


def _noted(variable: Any) -> Layout | None:
    sharding = _compat.variable_layout(variable)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return Layout.from_sharding(sharding, len(variable.shape))


def _input_layouts(placement: Placement, model: keras.Model, inputs: tuple[Any, ...]) -> Any:
    """The layouts of the first input argument; Keras passes all inputs of a model in it."""
    if not inputs:
        return ()
    first = putter(placement, model).layouts(inputs[0])
    return (first, *jax.tree.map(lambda _: None, inputs[1:]))


def _is_safe(placement: Placement, layouts: Any) -> bool:
    """Whether rows of the batch alone are split, over the whole mesh: that never went wrong."""
    trained, others, inputs = layouts
    if any(layout.axes for layout in jax.tree.leaves((trained, others))):
        return False
    return all(
        layout.axes == layout.dim_axes(0) and layout.total_shards == placement.mesh.size
        for layout in jax.tree.leaves(inputs)
    )
