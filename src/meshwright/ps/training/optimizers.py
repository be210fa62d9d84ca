"""A Keras optimizer taken apart: what its servers do, and what is done before gradients are pushed.

The servers run the optimizer's own rule on the shards that they hold. Clipping by norms needs whole
gradients, which only a worker has, so it is done there; but where a round of gradients makes one
update, it is their mean that is clipped, and the servers do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from ... import _compat
from ...equal_layers import merged
from ...errors import ModelError
from ...program import Arrays
from ...step.local import Local
from ..server.optimizers import twin_of
from ..worker.gradients import NORMS
from .embeddings import KerasLookups, serialized
from .gradients import ROWS, Clip


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
    if any(config.get(norm) for norm in NORMS) and config.get("gradient_accumulation_steps"):
        twin_of(written)  # refuses it, and says why
    clip = None
    if not in_rounds:
        clip = _clip(
            config.get("clipnorm"), config.get("global_clipnorm"), config.get("loss_scale_factor")
        )
    if clip is not None:
        config.update(dict.fromkeys((*NORMS, "loss_scale_factor")))
    decayed = _decays(optimizer, params)
    return TakenApart(
        {**written, "config": config},
        clip,
        frozenset() if not config.get("weight_decay") else frozenset(set(params) - decayed),
    )


def outer_of(local: Local, optimizer: Any) -> TakenApart:
    """What the servers run where ``optimizer`` takes local steps on the workers.

    Raises :class:`~meshwright.ModelError` for one whose averages would not come back from there.
    """
    if getattr(getattr(optimizer, "inner_optimizer", optimizer), "use_ema", False):
        raise ModelError(
            "local= leaves the optimizer's slots on the workers, and so the averages of the "
            "weights that use_ema=True gives the model in the end. Leave use_ema out, or local=."
        )
    return TakenApart(local.outer, None)


def _clip(
    own: float | None, together: float | None, loss_scale: float | None
) -> Callable[[Arrays], Arrays] | None:
    """As Keras clips: each gradient to a norm, or all of them together, the loss unscaled."""
    if own is None and together is None:
        return None

    def clip(grads: Arrays) -> Arrays:
        if loss_scale is not None:
            grads = {path: grad / loss_scale for path, grad in grads.items()}
        if own is not None:
            return {path: _to_norm(grad, _norm(grad), own) for path, grad in grads.items()}
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


@dataclass(frozen=True, eq=False)
class TableOptimizer:
    """The optimizer of one table as the user holds it, and what servers and workers do of it."""

    optimizer: Any
    apart: TakenApart

    @property
    def rate(self) -> float | None:
        """The learning rate where it is a number; a schedule runs on the servers."""
        return rate_of(self.optimizer)


def table_optimizers(
    lookups: KerasLookups,
    choice: Any,
    local: Local | None,
    *,
    loss_scale: float | None,
    in_rounds: bool,
) -> dict[str, TableOptimizer]:
    """By the names of the tables: a layer's own optimizer, else ``choice``, unless it is ``None``.

    As TPUEmbedding's ``TableConfig(optimizer=)``. Such a table is a group of its own on the
    servers, and its slots are saved with it, not among the model's.

    ``loss_scale`` is the factor by which the model's optimizer has scaled the loss.
    Raises :class:`~meshwright.ModelError` for an optimizer that servers do not have, and for one
    beside tables that do not travel by rows.
    """
    own = {name: layer.optimizer for name, layer in lookups.served.items()}
    of_tables = {table.name: own.get(table.name) or choice for table in lookups.tables}
    if choice is not None and not lookups.tables:
        raise ModelError(
            "Tables(optimizer=) was given, but no table of this model travels by rows. Name the "
            "layers of the tables in Tables(embeddings=), or leave the optimizer out."
        )
    if local is not None and any(one is not None for one in of_tables.values()):
        raise ModelError(
            "local= trains the whole model on the worker: leave Tables(optimizer=) out."
        )
    return {
        name: _of(name, one, loss_scale, in_rounds)
        for name, one in of_tables.items()
        if one is not None
    }


def clip_of(whole: TakenApart, tables: Mapping[str, TableOptimizer]) -> Clip | None:
    """What is done to gradients on the worker: each optimizer clips those that are its own."""
    clips = {ROWS + name: own.apart.clip for name, own in tables.items()}
    if whole.clip is None and not any(clips.values()):
        return None

    def clip(grads: Arrays) -> Arrays:
        rest = {path: grad for path, grad in grads.items() if path not in clips}
        clipped = dict(rest if whole.clip is None else whole.clip(rest))
        for path, of_table in clips.items():
            one = {path: grads[path]}
            clipped.update(one if of_table is None else of_table(one))
        return clipped

    return clip


def rate_of(optimizer: Any) -> float | None:
    """The learning rate of an optimizer where it is a number; a schedule runs on the servers."""
    scheduled = isinstance(optimizer.get_config().get("learning_rate"), dict)
    return None if scheduled else float(np.asarray(optimizer.learning_rate))


def _of(name: str, choice: Any, loss_scale: float | None, in_rounds: bool) -> TableOptimizer:
    written = serialized(choice)
    try:
        twin_of(written)
    except ModelError as error:
        raise ModelError(f"the optimizer of table {name!r}: {error}") from error
    config = {**written["config"], "loss_scale_factor": loss_scale}
    runs: Any = keras.optimizers.deserialize({**written, "config": config})
    is_made = isinstance(choice, keras.optimizers.Optimizer)
    return TableOptimizer(choice if is_made else runs, take_apart(runs, {}, in_rounds=in_rounds))
