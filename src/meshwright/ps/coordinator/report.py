"""What every task does now, in lines: for a person who waits and wonders."""

from __future__ import annotations

from collections.abc import Mapping

from .members import Worker
from .queue import StepQueue


def lines(
    queue: StepQueue, workers: Mapping[str, Worker], waits_for: str, now_s: float
) -> list[str]:
    """How much is queued, what each worker does, and what else is waited for."""
    told = [f"{queue.num_queued} steps are queued, {queue.num_running} handed out"]
    for worker in workers.values():
        steps = list(queue.members[worker.name].steps.values())
        names = dict.fromkeys(step.call.function.name for step in steps)
        having = f"; has {len(steps)} steps ({', '.join(names)})" if steps else ""
        told.append(f"{worker.told(now_s)}{having}")
    for member in queue.members.values():
        if member.lost:
            told.append(f"{member.name} was declared dead, and is not fenced yet")
    if waits_for:
        told.append(f"the coordinator waits for {waits_for}")
    if not workers:
        told.append("there is no worker")
    return told
