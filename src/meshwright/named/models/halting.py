"""Halting: how often each position goes through one block (adaptive computation time)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...errors import DimError
from ...layouts.dim_rules import Dim
from ..array import NamedArray
from ..elementwise import cast, logical_and, sigmoid, where
from ..layers.dense import dense
from ..layers.initialisers import Normal
from ..layers.layer import Params, as_dim, filled, in_dtype, ones, under_rules, without
from ..layers.losses import weighted_mean
from ..operation import operation

# ``output``, the mean so far; and of each position ``left``, the weight that is not given out yet,
# ``rest``, what was left before its last turn, and ``turns``, how many it took.
Halted = dict[str, NamedArray]


@dataclass(frozen=True)
class Halting:
    """Each position goes through a block as often as it needs, up to the number of layers.

    After each turn it halts with a chance, the logistic function of one number that is learned.
    What comes out is the mean of what the block gave at every turn, weighted with these chances; a
    position takes its last turn when they add up to ``1 - epsilon``, and that turn has the rest of
    the weight. ``cost`` times the mean number of turns (and of that rest, which has a gradient) is
    added to the loss. Every device computes all turns, since positions lie side by side in one
    array: what is saved is what the model learns not to use. (Graves 2016; in the Universal
    Transformer, Dehghani et al. 2019.)

    Parameters are ``kernel``, of ``d_model``, and ``bias``, which begins at 1: with few turns.

    >>> import jax
    >>> from meshwright.named.models import Transformer
    >>> model = Transformer(
    ...     "length:8 vocab:16 d_model:8 d_ff:16 heads:2 d_kv:4 layers:4",
    ...     shared_layers=True,
    ...     halting=Halting("d_model:8"),
    ... )
    >>> sorted(jax.eval_shape(model.init, jax.random.key(0))["stack"])
    ['halting', 'layer_0']
    """

    d_model: str | Dim
    cost: float = 0.01
    epsilon: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise DimError(f"epsilon must be from 0 to 1; received {self.epsilon!r}.")

    @property
    def _d_model(self) -> Dim:
        return as_dim(self.d_model, "d_model")

    @under_rules
    def init(self, key: Any) -> Params:
        start = Normal(self._d_model.size**-0.5)
        return {"kernel": start(key, (self._d_model,), ()), "bias": ones(())}

    @under_rules
    def begun(self, x: NamedArray) -> Halted:
        """Before the first turn of an input."""
        per_position = without(x.dims, [self._d_model])
        wide = jnp.promote_types(x.dtype, jnp.float32)
        full = {"output": (0.0, x.dims), "left": (1.0, per_position), "rest": (1.0, per_position)}
        full["turns"] = (0.0, per_position)
        return {name: filled(dims, value, wide) for name, (value, dims) in full.items()}

    @under_rules
    def turn(self, params: Params, x: NamedArray, halted: Halted) -> Halted:
        """After one more turn, which gave ``x``."""
        return _turn(self, params, x, halted)

    @under_rules
    def result(self, x: NamedArray, halted: Halted) -> NamedArray:
        """What comes out after the last turn, which gave ``x``: all that is left halts there."""
        return _result(x, halted)

    @under_rules
    def loss(self, halted: Halted, present: NamedArray | None = None) -> NamedArray:
        """What the turns cost; those of padding, where it is known, are free."""
        return self.cost * weighted_mean(halted["turns"] + halted["rest"], present)


@operation
def _turn(layer: Halting, params: Params, x: NamedArray, halted: Halted) -> Halted:
    remaining = halted["left"]
    wide = in_dtype(x, remaining.dtype)
    chance = sigmoid(dense(wide, params["kernel"], ()) + params["bias"])
    going = remaining > 0
    last = remaining - chance <= layer.epsilon
    weight = where(logical_and(going, last), remaining, where(going, chance, 0.0))
    return {
        "output": halted["output"] + wide * weight,
        "left": remaining - weight,
        "rest": where(going, remaining, halted["rest"]),
        "turns": halted["turns"] + cast(going, remaining.dtype),
    }


@operation
def _result(x: NamedArray, halted: Halted) -> NamedArray:
    return in_dtype(halted["output"] + halted["left"] * in_dtype(x, halted["left"].dtype), x.dtype)
