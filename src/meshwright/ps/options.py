"""Options of training on parameter servers that belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Sharding = Literal["dynamic", "static", "copy"]


@dataclass(frozen=True)
class Tables:
    """Which Embedding layers of a model travel by rows, and what trains them.

    ``embeddings`` is the least number of bytes of a table that does, or the names of layers, or
    ``None`` for none. ``optimizer`` is one of Keras', for all of these tables that have none of
    their own; without it, the model's.

    >>> Tables(embeddings=["users"])
    Tables(embeddings=('users',), optimizer=None)
    """

    embeddings: int | Sequence[str] | None = 4 << 20  # of smaller tables, rows would save nothing
    optimizer: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.embeddings, list):
            object.__setattr__(self, "embeddings", tuple(self.embeddings))


@dataclass(frozen=True)
class InputOptions:
    """How batches are dealt to workers: TensorFlow's name, and what ``DistributedDataset`` does.

    With ``sharding="dynamic"`` each batch goes to one worker, on demand; with ``"static"`` each
    worker has a share of the batches of its own, with ``"copy"`` all of them. ``seed`` is that of
    the order in which arrays are shuffled, alike on every worker.

    >>> InputOptions(sharding="static")
    InputOptions(sharding='static', seed=0)
    """

    sharding: Sharding = "dynamic"
    seed: int = 0
