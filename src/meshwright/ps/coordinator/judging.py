"""What a dispatcher concludes from its queue and its workers. Pure: time comes in."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...errors import ExhaustedError, TaskError
from .data import ElementSource
from .members import Worker
from .queue import Step, StepQueue

_PATIENCE_S = 0.05  # wait of a step behind another before an idle worker gets it


def report(
    queue: StepQueue, workers: Mapping[str, Worker], waits_for: str, now_s: float
) -> list[str]:
    """How much is queued, what each worker does, and what else is waited for."""
    lines = [f"{queue.num_queued} steps are queued, {queue.num_running} handed out"]
    for worker in workers.values():
        steps = list(queue.members[worker.name].steps.values())
        names = dict.fromkeys(step.call.function.name for step in steps)
        having = f"; has {len(steps)} steps ({', '.join(names)})" if steps else ""
        lines.append(f"{worker.report(now_s)}{having}")
    for member in queue.members.values():
        if member.lost:
            lines.append(f"{member.name} was declared dead, and is not fenced yet")
    if waits_for:
        lines.append(f"the coordinator waits for {waits_for}")
    if not workers:
        lines.append("there is no worker")
    return lines


def steps_to_recall(
    queue: StepQueue, sent_s: Mapping[int, float], recalled: Collection[int], now_s: float
) -> dict[str, list[Step]]:
    """Steps that wait behind a long one while a worker has nothing to do, by their workers.

    After an error, everything that may not have begun.
    """
    by_worker: dict[str, list[Step]] = {}
    for step in queue.to_cancel() or queue.behind():
        waited_s = now_s - sent_s.get(step.number, now_s)
        patience_s = 0.0 if step.only_here else _PATIENCE_S
        if waited_s >= patience_s and step.number not in recalled:
            assert step.worker is not None
            by_worker.setdefault(step.worker, []).append(step)
    return by_worker


def fits_worker(sources: Mapping[str, ElementSource], step: Step, task: str) -> bool:
    """Whether a worker has, as far as is known, elements for a step."""
    own = [sources[key] for key in step.call.iterators]
    return not any(source.passes_on and source.dry(task) for source in own)


def ran_dry(step: Step) -> ExhaustedError:
    """The error of a step for which no worker has an element."""
    return ExhaustedError(
        f"the dataset has no more elements on any worker ({', '.join(step.call.iterators)}). "
        "Schedule fewer steps, or repeat the dataset."
    )


def given_up(step: Step, task: str) -> TaskError:
    """The error of a step that has lost too many workers."""
    return TaskError(
        f"a call of {step.call.function.name} was begun {step.attempt} times, and each time its "
        f"worker was lost, the last time {task}. It may be what ends them: look at what the "
        "workers print, and how much memory they need.",
        task,
    )
