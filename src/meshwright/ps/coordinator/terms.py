"""What a strategy tells the dispatcher of its coordinator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..shared.consistency import Consistency


@dataclass(frozen=True)
class Terms:
    """The cluster as it is expected, and how far its workers may be apart."""

    num_servers: int
    num_workers: int
    consistency: Consistency
    heartbeat_s: float
    dead_after_s: float
    settings: dict[str, Any] = field(default_factory=dict)  # sent to every worker
    at_once: bool = False
    noted: Callable[[Any], None] = lambda note: None  # a worker has told servers an optimizer
    gone: Callable[[str, int], bool] = lambda task, pid: False  # the launcher saw a process end
    replace: Callable[[str, int], bool] = lambda task, pid: False  # the launcher starts a new one
