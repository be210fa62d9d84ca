"""What a plan for serving is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ..errors import PlanError

Aim = Literal["latency", "throughput"]
AIMS = get_args(Aim)
OWN = "own"  # the precision that a model has


@dataclass(frozen=True)
class ServingGoal:
    """What a plan for serving is for, where ``objective="latency"`` alone does not say enough.

    ``aim`` is ``"latency"``, the least of the smallest batch, or ``"throughput"``, the most rows
    per second of the largest. ``rows`` are the sizes of batches, 1 or more each. ``precisions`` are
    those to compare: ``"own"``, ``"bfloat16"``, ``"float16"``, ``"int8"``; by default the model's
    own and bfloat16, the own alone on CPUs and for a :class:`~meshwright.Program`. Raises
    :class:`~meshwright.PlanError` for any other.

    >>> import meshwright as mw
    >>> mw.ServingGoal("latency", rows=[1, 4]).rows
    (1, 4)
    """

    aim: Aim
    rows: Sequence[int] = (1, 8, 32)
    precisions: Sequence[str] | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.aim not in AIMS:
            faults.append(f"aim must be 'latency' or 'throughput'; received {self.aim!r}.")
        object.__setattr__(self, "rows", tuple(self.rows))
        if not self.rows or any(rows < 1 for rows in self.rows):
            faults.append(f"rows must be sizes of batches, 1 or more; received {self.rows!r}.")
        if self.precisions is not None:
            names = tuple(dict.fromkeys(self.precisions))
            object.__setattr__(self, "precisions", names)
            if not names or set(names) - {OWN, "bfloat16", "float16", "int8"}:
                faults.append(
                    f"precisions must list one or more of {OWN!r}, 'bfloat16', 'float16' and "
                    f"'int8'; received {list(names)!r}."
                )
        if faults:
            raise PlanError("\n".join(faults))


def goal_of(objective: object) -> ServingGoal | None:
    """The goal that an objective of a plan says; ``None`` for those of training steps."""
    if isinstance(objective, ServingGoal):
        return objective
    return ServingGoal(cast(Aim, objective)) if objective in AIMS else None
