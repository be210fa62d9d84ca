"""Mixture of experts: feed-forward layers of which each token passes through one or two.

Tokens are sent to experts and fetched back. Where experts lie along the axis of the tokens
(``batch:all;experts:all``), that is an all-to-all each way; where they lie along another one, each
device sends to its own experts, and answers are summed. No weight and no token is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import ModelError
from ..layouts.dim_rules import Dims, DimsLike, as_dims
from .array import NamedArray
from .contraction import einsum
from .dispatch import Dispatch, Post
from .elementwise import cast, relu, where
from .gating import Gating, route
from .layers.initialisers import VarianceScaling
from .layers.layer import Params, fit, in_dtype, under_rules, without
from .shapes import broadcast, reshape, transpose


class Mixed(NamedTuple):
    """What a mixture of experts says: ``output, loss, dropped``.

    >>> from meshwright.named import named
    >>> layer = MixtureOfExperts("d_model:8", "d_ff:16", Gating("experts:4", choose="switch"))
    >>> x = named(jnp.ones([2, 6, 8]), "batch:2 length:6 d_model:8")
    >>> mixed = jax.eval_shape(lambda key: layer(layer.init(key), x), jax.random.key(0))
    >>> mixed.output.shape, mixed.dropped.shape
    ({'batch': 2, 'length': 6, 'd_model': 8}, {'batch': 2, 'length': 6})
    """

    output: NamedArray
    loss: NamedArray  # no dims; its own part of the model's loss
    dropped: NamedArray  # the tokens' dims, int32: how many of a token's choices found no place


@dataclass(frozen=True)
class MixtureOfExperts:
    """A feed-forward layer of many experts, of which each token goes to one or two.

    ``gating`` says how they are chosen. Parameters are the kernels ``up`` and ``down`` of all
    experts and a ``router``. A token that finds no place gets zeros, so it passes a residual
    connection as it is. Output, loss and what was dropped depend on no rules: groups are the
    model's own. (GShard, Switch Transformer and Mesh-TensorFlow; in the last they depend on the
    mesh.)

    Several gatings make a hierarchy: a token goes to one or two sets of experts, and in each to
    experts of it; a second choice, to one of them. Each level's experts may lie along an axis of
    their own.

    ``dispatch="einsum"`` sends tokens by products with one-hot arrays, which suits devices whose
    products are cheap; ``"gather"`` picks them by their places, with less arithmetic.
    Both give the same.

    >>> from meshwright.named import named
    >>> layer = MixtureOfExperts("d_model:8", "d_ff:16", Gating("experts:4", choose="switch"))
    >>> params = layer.init(jax.random.key(0))
    >>> x = named(jnp.ones([2, 6, 8]), "batch:2 length:6 d_model:8")
    >>> output, loss, dropped = layer(params, x)
    >>> output.shape, dropped.array.tolist()  # all tokens are alike: the first 4 find a place
    ({'batch': 2, 'length': 6, 'd_model': 8}, [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]])
    """

    d_model: DimsLike
    d_ff: DimsLike
    gating: Gating | Sequence[Gating]
    dispatch: Dispatch = "einsum"
    activation: Callable[[NamedArray], NamedArray] = relu

    def __post_init__(self) -> None:
        object.__setattr__(self, "gating", self.levels)
        if self.dispatch not in ("einsum", "gather"):
            raise ModelError(f"dispatch must be 'einsum' or 'gather'; received {self.dispatch!r}.")
        if not self.levels:
            raise ModelError("gating=(): a mixture of experts has one Gating or more.")
        as_dims((*self._experts, *as_dims(self.d_model), *as_dims(self.d_ff)))

    @property
    def levels(self) -> tuple[Gating, ...]:
        """One gating for each level of the hierarchy."""
        return (self.gating,) if isinstance(self.gating, Gating) else tuple(self.gating)

    @property
    def _experts(self) -> Dims:
        return tuple(level.dim for level in self.levels)

    @under_rules
    def init(self, key: Any) -> Params:
        d_model, d_ff = as_dims(self.d_model), as_dims(self.d_ff)
        up, down, *routers = jax.random.split(key, 2 + len(self.levels))
        params = {
            "up": _kernel(up, self._experts, d_model, d_ff),
            "down": _kernel(down, self._experts, d_ff, d_model),
        }
        for i, (level, router) in enumerate(zip(self.levels, routers, strict=True)):
            params[_router(i)] = _kernel(router, self._experts[:i], d_model, (level.gate,))
        return params

    @under_rules
    def __call__(
        self,
        params: Params,
        x: NamedArray,
        *,
        key: Any = None,
        training: bool | None = None,
        present: NamedArray | None = None,
    ) -> Mixed:
        """``present`` says which tokens there are; those of padding go nowhere.

        Without ``training``, a key means training. Raises :class:`DimError` for an input that lacks
        ``d_model``, or has a dim that the layer makes.
        """
        d_model = as_dims(self.d_model)
        makes = [
            dim
            for level in self.levels
            for dim in (level.dim, level.gate, level.places(level.dim, True))
        ]
        fit(x, "mixture of experts", needs=d_model, makes=(*makes, *as_dims(self.d_ff)))
        may = None
        if present is not None:
            may = broadcast(where(present, 2, 0), without(x.dims, d_model))
        return self._mixed(
            0, params, x, may, key, key is not None if training is None else training
        )

    def _mixed(
        self,
        i: int,
        params: Params,
        x: NamedArray,
        may: NamedArray | None,
        key: Any,
        training: bool,
    ) -> Mixed:
        """The output for these tokens; level ``i`` sends each to some experts."""
        if i == len(self.levels):
            return self._expert_outputs(params, x)
        level, stack, d_model = self.levels[i], self._experts[:i], as_dims(self.d_model)
        tokens = (*stack, *without(x.dims, (*stack, *d_model)))
        outer, group = level.groups(tokens[i:])
        groups = (*stack, *outer)
        here, further = (None, None) if key is None else jax.random.split(key)
        grouped = _reshaped(x, (*tokens, *d_model), (*groups, group, *d_model))
        routed = route(
            level,
            params[_router(i)],
            grouped,
            d_model,
            group,
            may=None if may is None else _reshaped(may, tokens, (*groups, group)),
            key=here,
            training=training,
        )
        places = level.places(group, training)
        post = Post(routed.choices, groups, group, level.dim, level.gate, places, self.dispatch)
        is_last = i + 1 == len(self.levels)
        numbers = None if is_last else post.send_numbers()
        inner = self._mixed(i + 1, params, post.send(grouped), numbers, further, training)
        output = _reshaped(
            post.fetch(inner.output), (*groups, group, *d_model), (*tokens, *d_model)
        )
        dropped = routed.dropped
        if not is_last:
            later = post.fetch(cast(inner.dropped, jnp.float32), weighed=False)
            dropped = dropped + cast(later, jnp.int32)
        dropped = _reshaped(dropped, (*groups, group), tokens)
        return Mixed(transpose(output, x.dims), routed.loss + inner.loss, dropped)

    def _expert_outputs(self, params: Params, x: NamedArray) -> Mixed:
        """What the experts say to those that they were sent."""
        d_model, d_ff = as_dims(self.d_model), as_dims(self.d_ff)
        up, down = (in_dtype(params[name], x.dtype) for name in ("up", "down"))
        hidden = self.activation(einsum([x, up], (*without(x.dims, d_model), *d_ff)))
        none = NamedArray(jnp.zeros([], jnp.float32), ())
        return Mixed(einsum([hidden, down], x.dims), none, none)


def _reshaped(x: NamedArray, order: Dims, dims: Dims) -> NamedArray:
    """The elements in the order of some dims, under others."""
    x = x if x.dims == order else transpose(x, order)
    return x if order == dims else reshape(x, dims)


def _router(i: int) -> str:
    return "router" if i == 0 else f"router_{i + 1}"


def _kernel(key: Any, stack: Dims, inputs: Dims, outputs: Dims) -> NamedArray:
    """One kernel for each of the experts."""
    return transpose(
        VarianceScaling()(key, inputs, (*stack, *outputs)), (*stack, *inputs, *outputs)
    )
