"""Optimizers of their own for tables that travel by rows: Adagrad for tables, Adam for the rest.

As TPUEmbedding's ``TableConfig(optimizer=)``. Such a table is a group of its own on the servers,
and its slots stay there: they are saved with the table, and not among the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from ...errors import ModelError
from ...program import Arrays
from ..server.optimizers import twin_of
from .embeddings import KerasLookups, serialized
from .gradients import ROWS, Clip
from .local import Local
from .optimizers import TakenApart, take_apart


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

    ``loss_scale`` is the factor by which the model's optimizer has scaled the loss.
    Raises :class:`~meshwright.ModelError` for an optimizer that servers do not have, and for one
    beside tables that do not travel by rows.
    """
    own = {name: layer.optimizer for name, layer in lookups.served.items()}
    chosen = {table.name: own.get(table.name) or choice for table in lookups.tables}
    if choice is not None and not lookups.tables:
        raise ModelError(
            "Tables(optimizer=) was given, but no table of this model travels by rows. Name the "
            "layers of the tables in Tables(embeddings=), or leave the optimizer out."
        )
    if local is not None and any(one is not None for one in chosen.values()):
        raise ModelError(
            "local= trains the whole model on the worker: leave Tables(optimizer=) out."
        )
    return {
        name: _of(name, one, loss_scale, in_rounds)
        for name, one in chosen.items()
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
