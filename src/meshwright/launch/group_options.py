"""How a synchronous group is started, watched and started again: a value, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ClusterError
from .elastic import Elastic
from .limits import SCRIPT_S, seconds_faults

_RESTARTS = 10  # without a newer checkpoint, where the number of processes may change


@dataclass(frozen=True)
class GroupOptions:
    """How a group is started, watched and started again.

    ``processes`` is how many run on each host, or the most of them where ``least_processes`` is
    given; ``nodes`` and ``least_nodes`` say the same of hosts. Raises
    :class:`~meshwright.errors.ClusterError`, naming every invalid number.
    """

    processes: int = 1
    devices: int | None = None  # CPU devices to make in each process
    log_dir: Path | None = None
    stall_s: float = 10.0
    join_s: float = 60.0
    script_s: float = SCRIPT_S
    agree: bool = True
    nodes: int = 1  # hosts, on each of which so many processes are started
    rendezvous: str = ""  # host:port, where there are several
    least_processes: int | None = None
    least_nodes: int | None = None
    max_restarts: int | None = None  # 10 where the number of processes or hosts may change, else 0
    discovery: Path | None = None  # a script that lists hosts
    standby: bool = True  # keep a process ready for each place, where the group is started again

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be {least} or more; received {value}."
            for name, value, least in (
                ("processes", self.processes, 1),
                ("nodes", self.nodes, 1),
                ("devices", 1 if self.devices is None else self.devices, 1),
                ("max_restarts", self.max_restarts or 0, 0),
            )
            if value < least
        ]
        faults += [
            f"{name} must be from 1 to {most}; received {least}."
            for name, least, most in (
                ("the least number of processes", self.least_processes, self.processes),
                ("the least number of nodes", self.least_nodes, self.nodes),
            )
            if least is not None and not 1 <= least <= most
        ]
        faults += seconds_faults(stall_s=self.stall_s, join_s=self.join_s, script_s=self.script_s)
        if self.nodes > 1 and not self.rendezvous:
            faults.append("several nodes need --rendezvous host:port, the same on each of them.")
        if self.nodes > 1 and (self.least_processes is not None or self.discovery):
            faults.append(
                "with several nodes the number of nodes may change (--nodes MIN:MAX), and not that "
                "of the processes on each."
            )
        if self.discovery is not None and self.least_processes is None:
            faults.append("--host-discovery-script needs --processes MIN:MAX.")
        if faults:
            raise ClusterError("\n".join(faults))

    @property
    def is_elastic(self) -> bool:
        """Whether the number of processes may change."""
        return self.least_processes is not None or self.least_nodes is not None

    @property
    def restarts(self) -> int:
        """How often the group may be started again without a newer checkpoint."""
        if self.max_restarts is not None:
            return self.max_restarts
        return _RESTARTS if self.is_elastic else 0

    def rule(self) -> Elastic:
        """The rule by which the group is started again."""
        least = self.processes if self.least_processes is None else self.least_processes
        return Elastic(least, self.processes, self.restarts)
