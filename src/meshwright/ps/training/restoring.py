"""A checkpoint of ``fit`` in a model and its tables, on any number of servers, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from ... import _compat
from ...checkpoint import CheckpointInfo, read_checkpoint, restore_state
from ...errors import ModelError
from ...frontends.keras.checkpoint_names import LastingNames
from ...frontends.keras.program import KerasVariables, read_state, write_state
from ...program import TrainState
from ..coordinator.coordinator import ClusterCoordinator
from .embeddings import KerasLookups, building
from .saving import check_tables_of
from .server_variables import ServerVariables
from .table_files import restore_rows_here


def restore_model(strategy: Any, model: keras.Model, directory: str | Path) -> int:
    """Give a model its values and the servers its tables, from the newest checkpoint of ``fit``.

    Returns the checkpoint's step. The optimizer's slots stay as they are: a run that is to go on
    does so with ``fit(checkpoint=)``. Raises :class:`~meshwright.CheckpointError` for a checkpoint
    of another model, and :class:`~meshwright.ModelError` for a model that is not built.
    """
    with building():
        if not (_compat.has_its_variables(model) or _compat.build_as_declared(model)):
            raise ModelError(
                f"model {model.name!r} is not built, so its variables are not known: give it "
                "keras.Input, or predict with it first."
            )
    variables, info = KerasVariables.of(model), read_checkpoint(directory)
    on_servers = ServerVariables(
        strategy, model.name, variables, lookups := KerasLookups(model, variables, None)
    )
    tables = on_servers.of_tables(list(lookups.served))
    source = check_tables_of(info, tables) if tables else None
    restore_weights(info, model, variables)
    if tables:
        coordinator = ClusterCoordinator(strategy)
        args = (str(source), tables)
        coordinator.fetch(coordinator.schedule(restore_rows_here, args))
    return info.step


def restore_weights(info: CheckpointInfo, model: keras.Model, variables: KerasVariables) -> None:
    """Give a model the values of a checkpoint; its optimizer keeps its slots."""
    names, before = LastingNames.of(model, variables), read_state(variables)
    like = names.to_checkpoint(TrainState(before.params, before.state, {}, {}))
    restored = names.from_checkpoint(restore_state(info, like))
    write_state(variables, before._replace(params=restored.params, state=restored.state))
