"""What a server's page shows: its models with their tensors and figures, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...views import Viewable
from ..api import Models, ModelStatus, TensorSpec
from .looking import every


@dataclass(frozen=True)
class Served:
    """One version of one model."""

    status: ModelStatus
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Overview(Viewable):
    """All models of a server."""

    ready: bool
    models: tuple[Served, ...]
    compared: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by model
    address: str = "http://localhost:8000"  # as the reader of the page reaches it


def overview_of(models: Models, address: str = Overview.address) -> Overview:
    """The figures of this moment."""
    served = [Served(model.status(), model.inputs, model.outputs) for model in every(models)]
    compared = {name: models.compared(name) for name in models.names()}
    return Overview(models.ready, tuple(served), compared, address)
