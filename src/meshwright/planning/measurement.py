"""What a training step was seen to take where it ran: a value, to be shown beside a dry run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ..units import bytes_text, seconds_text
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

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.axes)
        times = self.step_times_s
        held = self.parameter_bytes + self.slot_bytes + self.state_bytes + self.input_bytes
        least, most = seconds_text(min(times)), seconds_text(max(times))
        lines = [
            f"{self.name} on {self.device} ({mesh}), {len(times)} steps",
            f"  step         {seconds_text(self.step_time_s)}, {least} to {most}",
            f"  arrays       {held:,} bytes ({bytes_text(held)}) of one device",
        ]
        if self.peak_bytes is not None:
            peak = f"{self.peak_bytes:,} bytes ({bytes_text(self.peak_bytes)})"
            lines.append(f"  peak         {peak}: {self.peak_is}")
        for each in self.collectives or ():
            lines.append(
                f"  {each.kind:20} over {', '.join(each.axes)}: {each.count:g} in a step, "
                f"{seconds_text(each.time_s)}"
            )
        return "\n".join(lines)
