"""Which optimizers run on a server, how far each can alone, and which are refused, with the reason.

``shard-local``: every element is updated by itself, so a shard needs nothing of the others.
``two-phase``: clipping by a norm needs the whole gradient. One worker's, applied as it comes, is
clipped by that worker before it pushes; the mean of a round is held by no one, and its servers say
the squares of their parts before they apply it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ....errors import ModelError
from .base import Twin
from .schedules import SCHEDULES, Schedule
from .twins import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Ftrl, Lion, Nadam, RMSprop

TWINS: dict[str, type[Twin]] = {
    "SGD": SGD,
    "RMSprop": RMSprop,
    "Adagrad": Adagrad,
    "Adadelta": Adadelta,
    "Adam": Adam,
    "AdamW": AdamW,
    "Adamax": Adamax,
    "Nadam": Nadam,
    "Ftrl": Ftrl,
    "Lion": Lion,
}

REFUSED: dict[str, str] = {
    "Lamb": "it scales by the norm of the whole variable, of which a server may hold a shard",
    "Muon": "it orthogonalizes whole matrices, of which a server may hold some rows",
    "Adafactor": "it takes means over whole rows and columns and over the whole variable",
    "LossScaleOptimizer": "it must see every gradient of a step to know whether one is infinite; "
    "use `loss_scale_factor=` of the optimizer inside",
    "MultiOptimizer": "each group of variables has an optimizer of its own here: send them one by "
    "one",
    "ScheduleFreeAdamW": "it evaluates at other values than it trains, which workers read here",
}

_IGNORED = ("name", "jit_compile", "is_legacy_optimizer")


def phase(twin: Twin) -> str:
    """``"shard-local"``, or ``"two-phase"`` where gradients are clipped by a norm first.

    >>> phase(twin_of({"class_name": "SGD", "config": {"clipnorm": 1.0}}))
    'two-phase'
    """
    by_norm = twin.clipnorm is not None or twin.global_clipnorm is not None
    return "two-phase" if by_norm else "shard-local"


def twin_of(serialized: Mapping[str, Any]) -> Twin:
    """The twin of a serialized Keras optimizer.

    Raises :class:`~meshwright.errors.ModelError` for one that cannot run on a server, and says why.

    >>> twin_of({"class_name": "Adam", "config": {"learning_rate": 0.1}}).slots
    {'momentum': 0.0, 'velocity': 0.0}
    """
    name = str(serialized.get("class_name"))
    if name in REFUSED:
        raise ModelError(
            f"optimizer {name} does not run on parameter servers: {REFUSED[name]}. "
            f"Those that do are {', '.join(TWINS)}."
        )
    module = serialized.get("module") or "keras.optimizers"
    custom = serialized.get("registered_name") not in (None, name)
    if name not in TWINS or custom or not module.startswith("keras"):
        raise ModelError(
            f"optimizer {name} of {module} has no twin for servers, which load no Keras. "
            f"Those that have are {', '.join(TWINS)}."
        )
    twin = TWINS[name](**_settings(name, serialized.get("config", {})))
    _check_clipping(name, twin)
    return twin


def _settings(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in config.items() if key not in _IGNORED}
    names = {field.name for field in dataclasses.fields(TWINS[name])}
    unknown = [f"{key}={settings[key]!r}" for key in settings if key not in names]
    if unknown:
        raise ModelError(f"the twin of {name} does not know {', '.join(unknown)}.")
    rate = settings.get("learning_rate")
    if isinstance(rate, Mapping):
        settings["learning_rate"] = Schedule.of(rate)
    if wrong := [f"{key}={settings[key]!r}" for key in settings if not _fits(key, settings[key])]:
        raise ModelError(
            f"optimizer {name} takes numbers; received {', '.join(wrong)}. The learning rate may "
            f"also be a serialized schedule: {', '.join(SCHEDULES)}."
        )
    return settings


def _fits(key: str, value: Any) -> bool:
    if key == "learning_rate":
        return isinstance(value, int | float | Schedule) and not isinstance(value, bool)
    return value is None or isinstance(value, int | float)


def _check_clipping(name: str, twin: Twin) -> None:
    if phase(twin) == "two-phase" and twin.gradient_accumulation_steps:
        raise ModelError(
            f"{name} clips the mean of {twin.gradient_accumulation_steps} gradients by its norm, "
            "and no server holds all of it. Use clipvalue, or leave out "
            "gradient_accumulation_steps."
        )
