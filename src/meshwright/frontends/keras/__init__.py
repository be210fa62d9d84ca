"""The Keras front end: strategies as a ``keras.distribution.Distribution``, layouts on layers."""

from __future__ import annotations

import importlib
from typing import Any

from .sharded import DataParallel as DataParallel
from .sharded import Sharded as Sharded


def __getattr__(name: str) -> Any:
    if name == "layers":  # generated classes, made when somebody asks for them
        return importlib.import_module(".layers", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
