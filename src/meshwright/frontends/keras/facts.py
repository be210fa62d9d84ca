"""What ``fit`` is about to do, as texts that the processes of a group compare."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras

from ... import _compat
from ...data import LocalRows, OwnBatches, ShardedRows
from ...data.fingerprint import arrays_text
from ...run.facts import fields_text, seed_facts
from ...run.options import Data, Schedule, Validation
from ...run.saver import Saver

if TYPE_CHECKING:
    from .sharded import Sharded

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fit_facts(
    strategy: Sharded,
    model: keras.Model,
    data: Data,
    validation: Validation,
    schedule: Schedule,
    saver: Saver,
) -> dict[str, str]:
    """Mesh, layouts and options, the model as Keras describes it, the data and the seeds."""
    return {
        **_placement_facts(strategy),
        "options": fields_text(strategy.how),
        "batch size": str(data.batch_size),
        "steps per epoch": str(data.steps),
        "shuffle": str(data.shuffle),
        "epochs": f"{schedule.initial_epoch} to {schedule.epochs}",
        "checkpoint": str(saver.checkpoints.directory) if saver.checkpoints else "none",
        **_model_facts(model),
        **seed_facts({"keras": _compat.global_seed()}),
        **_data_facts(data, validation.data),
    }


def pass_facts(strategy: Sharded, model: keras.Model, data: Data) -> dict[str, str]:
    """What ``evaluate`` or ``predict`` is about to do."""
    return {
        **_placement_facts(strategy),
        "batch size": str(data.batch_size),
        "steps": str(data.steps),
        **_model_facts(model),
        **_data_facts(data),
    }


def _placement_facts(strategy: Sharded) -> dict[str, str]:
    return {"mesh": repr(strategy.mesh), "strategy": fields_text(strategy.placement)}


def _data_facts(data: Data, validation: Any = None) -> dict[str, str]:
    """The arrays that all processes read; rows of this process's own are not compared."""
    if isinstance(data.x, ShardedRows | OwnBatches):
        return {"data x": repr(data.x)}
    if isinstance(data.x, LocalRows):
        return {}
    texts = {
        "data x": arrays_text(data.x),
        "data y": arrays_text(data.y),
        "data sample_weight": arrays_text(data.sample_weight),
        "validation data": arrays_text(validation),
    }
    return {name: text for name, text in texts.items() if text is not None}


def _model_facts(model: keras.Model) -> dict[str, str]:
    facts = {}
    for layer in _compat.layers_inside(model):
        facts[f"layer {layer.path} ({type(layer).__name__})"] = _config(layer.get_config)
    for variable in model.variables:
        facts[f"variable {variable.path}"] = f"{tuple(variable.shape)} {variable.dtype}"
    if getattr(model, "optimizer", None) is not None:
        facts["optimizer"] = _config(model.optimizer.get_config)
    return facts


def _config(describe: Callable[[], Mapping[str, Any]]) -> str:
    """A configuration as a JSON object; empty where the user's class has none."""
    try:
        config = {key: value for key, value in describe().items() if key != "name"}
    except Exception:
        return "{}"
    return json.dumps(config, default=lambda value: _ADDRESS.sub("", repr(value)), sort_keys=True)
