"""Parameter servers: asynchronous training with the parameters on servers of their own.

``wire`` and ``server`` need NumPy, ZeroMQ and msgpack alone: a server never loads JAX or Keras, so
what people use of this room is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazily

if TYPE_CHECKING:
    from .coordinator.values import PerWorkerDataset as PerWorkerDataset
    from .coordinator.values import PerWorkerValues as PerWorkerValues
    from .coordinator.values import RemoteValue as RemoteValue
    from .options import InputOptions as InputOptions
    from .options import Tables as Tables
    from .shared.variables import Variable as Variable
    from .training import Embedding as Embedding
    from .training import Half as Half
    from .training import InputContext as InputContext
    from .training import SidecarEvaluator as SidecarEvaluator
    from .training import TopK as TopK
    from .training import table_of as table_of

_LAZY = {  # name -> the part of this room that it lives in
    **dict.fromkeys(("PerWorkerDataset", "PerWorkerValues", "RemoteValue"), "coordinator.values"),
    **dict.fromkeys(
        ("Embedding", "Half", "InputContext", "SidecarEvaluator", "TopK", "table_of"), "training"
    ),
    **dict.fromkeys(("InputOptions", "Tables"), "options"),
    "Variable": "shared.variables",
}


__getattr__ = lazily(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
