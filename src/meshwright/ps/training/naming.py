"""What the variables of a model are called on the servers."""

from __future__ import annotations

import itertools
from typing import Any

from ...frontends.keras.program import KerasVariables
from .gradients import Parts


def prefix_of(strategy: Any, model: str, parts: Parts, variables: KerasVariables) -> str:
    """What the variables on the servers are named after.

    The model's name, and a number where another model of that name has other variables there.
    """
    infos = variables.infos.values()
    shapes = (parts, tuple((info.path, info.dims) for info in infos))
    known: dict[str, Any] = vars(strategy).setdefault("models_served", {})
    for number in itertools.count(1):
        prefix = model if number == 1 else f"{model}~{number}"
        if known.setdefault(prefix, shapes) == shapes:
            return prefix
    raise AssertionError
