"""Which steps move to another worker, and which no worker can do: pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...errors import ExhaustedError, TaskError
from .data import Source
from .queue import Step, StepQueue

PATIENCE_S = 0.05  # a step waits so long behind another before an idle worker is given it
MOST_ATTEMPTS = 10  # of a step, before it is taken for what ends its workers


def steps_to_recall(
    queue: StepQueue, sent_s: Mapping[int, float], recalled: Collection[int], now_s: float
) -> dict[str, list[Step]]:
    """Steps that wait behind a long one while a worker has nothing to do, by their workers.

    After an error, everything that may not have begun.
    """
    wanted: dict[str, list[Step]] = {}
    for step in queue.to_cancel() or queue.behind():
        waited_s = now_s - sent_s.get(step.number, now_s)
        patience_s = 0.0 if step.only_here else PATIENCE_S
        if waited_s >= patience_s and step.number not in recalled:
            assert step.worker is not None
            wanted.setdefault(step.worker, []).append(step)
    return wanted


def fits(sources: Mapping[str, Source], step: Step, task: str) -> bool:
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
        f"step {step.number} ({step.call.function.name}) was begun {step.attempt} times, and "
        f"each time its worker was lost, the last time {task}. It may be what ends them: look "
        "at what the workers print, and how much memory they need.",
        task,
    )
