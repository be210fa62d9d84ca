"""A Keras optimizer taken apart: what its servers do, and what is done before gradients are pushed.

The servers run the optimizer's own rule on the shards that they hold. Clipping by norms needs whole
gradients, which only a worker has, so it is done there; but where a round of gradients makes one
update, it is their mean that is clipped, and the servers do it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import keras

from ... import _compat
from ...errors import ModelError
from ...merging import merged
from ...program import Arrays
from ..server.optimizers import twin_of

_NORMS = ("clipnorm", "global_clipnorm")


@dataclass(frozen=True, eq=False)
class TakenApart:
    """``config`` is what the servers get, as Keras writes it; ``clip`` what a worker does."""

    config: dict[str, Any]
    clip: Callable[[Arrays], Arrays] | None
    without_decay: frozenset[str] = field(default_factory=frozenset)  # paths of parameters


def take_apart(optimizer: Any, params: dict[str, Any], *, in_rounds: bool = False) -> TakenApart:
    """An optimizer of Keras for parameters by path; ``in_rounds``: for means of gradients.

    Raises :class:`~meshwright.ModelError` that names all parameters with constraints: those are
    applied after the update, where only parts of a parameter are seen.
    """
    if constrained := [path for path, v in params.items() if v.constraint is not None]:
        raise ModelError(
            "constraints are not supported on parameter servers, which hold parameters in parts. "
            "Remove kernel_constraint= and similar arguments; these parameters have one: "
            f"{', '.join(merged(constrained))}."
        )
    written: Any = keras.optimizers.serialize(optimizer)
    config = dict(written["config"])
    if any(config.get(norm) for norm in _NORMS) and config.get("gradient_accumulation_steps"):
        twin_of(written)  # refuses it, and says why
    clip = None
    if not in_rounds:
        clip = _clip(
            config.get("clipnorm"), config.get("global_clipnorm"), config.get("loss_scale_factor")
        )
    if clip is not None:
        config.update(dict.fromkeys((*_NORMS, "loss_scale_factor")))
    decayed = _decays(optimizer, params)
    return TakenApart(
        {**written, "config": config},
        clip,
        frozenset() if not config.get("weight_decay") else frozenset(set(params) - decayed),
    )


def _clip(
    each: float | None, together: float | None, loss_scale: float | None
) -> Callable[[Arrays], Arrays] | None:
    """As Keras clips: each gradient to a norm, or all of them together, the loss unscaled."""
    if each is None and together is None:
        return None

    def clip(grads: Arrays) -> Arrays:
        if loss_scale is not None:
            grads = {path: grad / loss_scale for path, grad in grads.items()}
        if each is not None:
            return {path: _to_norm(grad, _norm(grad), each) for path, grad in grads.items()}
        assert together is not None
        whole = jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in grads.values()))
        return {path: _to_norm(grad, whole, together) for path, grad in grads.items()}

    return clip


def _norm(grad: Any) -> Any:
    return jnp.sqrt(jnp.sum(jnp.square(grad)))


def _to_norm(grad: Any, norm: Any, most: float) -> Any:
    return grad * most / jnp.maximum(norm, most)


def _decays(optimizer: Any, params: dict[str, Any]) -> set[str]:
    """The parameters whose weights decay; ``exclude_from_weight_decay`` may have named others."""
    return {path for path, v in params.items() if _compat.decays(optimizer, v)}
