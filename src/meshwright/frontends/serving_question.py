"""The request for a plan that serves, and how it ranks plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import PlanError
from ..layouts.mesh import Mesh
from ..planning.goals import ServingGoal
from ..planning.search.plan import Option, Plan
from ..targets.hardware import Hardware
from ..targets.target import Target


@dataclass(frozen=True, kw_only=True)
class Question:
    """The request for a plan that serves."""

    target: Target
    goal: ServingGoal
    hardware: Hardware
    memory_limit: int | None = None
    axes: Mesh | Mapping[str, int] | str | None = None
    verify: int = 0
    limit_s: float = 10.0
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        faults = []
        if self.verify < 0:
            faults.append(f"verify must be a number of plans, 0 or more; received {self.verify!r}.")
        if self.memory_limit is not None and self.memory_limit < 1:
            faults.append(f"memory_limit must be 1 byte or more; received {self.memory_limit!r}.")
        if faults:
            raise PlanError("\n".join(faults))

    @property
    def planned_rows(self) -> int:
        """The batch that layouts are chosen for."""
        return min(self.goal.rows) if self.goal.aim == "latency" else max(self.goal.rows)

    @property
    def limit_bytes(self) -> int | None:
        """What a device may hold."""
        return self.hardware.memory_bytes if self.memory_limit is None else self.memory_limit

    def copies(self, plan: Plan) -> int:
        """How many copies of the model the target has room for."""
        return self.target.num_devices // plan.chosen.num_devices

    def rank(self, plan: Plan) -> float:
        """Less is better: seconds of a batch, or seconds of a row with all copies at work."""
        time_s = time_s_of(plan.chosen)
        if time_s is None:
            return float("inf")
        if self.goal.aim == "latency":
            return time_s
        return (plan.chosen.interval_s or time_s) / self.copies(plan)


def time_s_of(option: Option) -> float | None:
    """Seconds of a batch: by a compiler's dry run, where there was one."""
    return option.time_s if option.dry_run_time_s is None else option.dry_run_time_s
