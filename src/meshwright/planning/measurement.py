"""What a training step was seen to take where it ran: a value, to be shown beside a dry run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ..views import Viewable


@dataclass(frozen=True)
class SeenCollective:
    """All collectives of one kind over the same axes, as a profiler saw them in one step.

    ``count`` and ``time_s`` are those of one device: how often it took part, and how long that
    took, what it waited for the others among it. ``bytes_per_step`` are those of the arrays, by
    the executable that ran, and ``None`` where a loop in it does not tell.
    """

    kind: str
    axes: tuple[str, ...]
    count: float
    bytes_per_step: int | None
    time_s: float


@dataclass(frozen=True)
class Measured(Viewable):
    """What steps of training took on devices that are here; :func:`~meshwright.measure` makes it.

    ``name`` is the model's, ``axes`` has the name and size of each axis of the mesh, ``device`` is
    the kind of device as JAX names it, of a ``platform`` such as ``"cpu"``. ``parameter_bytes``,
    ``slot_bytes``, ``state_bytes`` and ``input_bytes`` are those of the device that holds most.
    ``step_times_s`` has each measured step, waited for. ``peak_bytes`` is the figure that
    ``peak_is`` names. ``collectives`` is ``None`` where no profiler recorded any.

    >>> axes, times_s = (("batch", 8),), (0.01, 0.012, 0.011)
    >>> seen = Measured("net", "cpu", "cpu", axes, 1024, 2048, 0, 512, None, "unknown", times_s)
    >>> seen.step_time_s
    0.011
    """

    name: str
    platform: str  # "cpu", "tpu", "gpu"
    device: str  # as JAX names the kind of device
    axes: tuple[tuple[str, int], ...]
    parameter_bytes: int
    slot_bytes: int
    state_bytes: int
    input_bytes: int
    peak_bytes: int | None
    peak_is: str
    step_times_s: tuple[float, ...]
    collectives: tuple[SeenCollective, ...] | None = None

    @property
    def step_time_s(self) -> float:
        """The median of the steps."""
        return statistics.median(self.step_times_s)
