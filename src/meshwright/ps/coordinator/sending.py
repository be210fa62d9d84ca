"""Steps as messages for a worker: functions and datasets that it lacks first, then the calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..wire.message import Message
from .calls import Packer, Scheduled
from .members import Worker
from .queue import Step, StepQueue
from .shipping import pack

Failures = list[tuple[Step, Exception]]
_MANY_QUEUED = 4096  # steps, through which is not looked for the functions that they need
Told = list[tuple[str, Message]]  # worker's name, and what it is told


def messages_for(
    packer: Packer,
    worker: Worker,
    steps: Sequence[Step],
    done_below: int,
    broken_rounds: list[tuple[int, int]],
) -> tuple[list[Message], Failures]:
    """The messages to a worker for these steps, and the steps whose elements could not be made.

    ``broken_rounds`` are all so far: the worker is sent those that it does not know.
    """
    messages: list[Message] = []
    calls: list[list[Any]] = []
    arrays: list[Any] = []
    failures: Failures = []
    for step in steps:
        scheduled: Scheduled = step.call
        try:
            elements = _elements(packer, worker, step)
        except Exception as error:  # the user's own iterator raised
            failures.append((step, error))
            continue
        messages += _lessons(packer, worker, scheduled)
        data, buffers = scheduled.packed
        span = [len(arrays), len(arrays) + len(buffers)]
        arrays.extend(buffers)
        key = scheduled.function.key
        calls.append([step.number, step.attempt, key, data, span, elements, step.round, step.of])
    if calls:
        broken = broken_rounds[worker.broken_rounds :]
        worker.broken_rounds += len(broken)
        head = {"done_below": done_below, "calls": calls, "broken": broken}
        messages.append(Message("calls", head, tuple(arrays)))
    return messages, failures


def packed_elements(packer: Packer, key: str, elements: list[Any]) -> Any:
    """Elements as they travel: indices of a worker's dataset as they are, others packed."""
    if packer.sources[key].sharding != "shared":
        return elements
    data, _ = pack(elements, what=f"an element of {key}", out_of_band=False)
    return data


def _elements(packer: Packer, worker: Worker, step: Step) -> list[list[Any]]:
    return [
        [key, packed_elements(packer, key, packer.sources[key].ahead(step.number, worker.task))]
        for key in step.call.iterators
    ]


def _lessons(packer: Packer, worker: Worker, scheduled: Scheduled) -> list[Message]:
    """What the worker must know for a call, and does not."""
    lessons: list[Message] = []
    functions = [scheduled.function]
    for key in scheduled.iterators:
        if key in packer.datasets and key not in worker.iterators:
            worker.iterators.add(key)
            function, sharding = packer.datasets[key]
            functions.append(function)
            head = {"key": key, "function": function.key, "sharding": sharding}
            lessons.append(Message("iterator", head))
    for function in functions:
        new, dropped = worker.teach(function.key)
        if new:
            data, buffers = function.packed
            head = {"key": function.key, "packed": data, "forget": dropped}
            lessons.append(Message("function", head, buffers))
    return lessons


def forgotten(packer: Packer, queue: StepQueue, workers: Collection[Worker]) -> Told:
    """The messages to workers about iterators and functions that the program has dropped."""
    return [*_iterators(packer, workers), *_functions(packer, queue, workers)]


def _iterators(packer: Packer, workers: Collection[Worker]) -> Told:
    messages: Told = []
    while packer.dropped:
        key = packer.dropped.pop()
        packer.forget(key)
        for worker in workers:
            if key in worker.iterators:
                worker.iterators.remove(key)
                messages.append((worker.name, Message("forget", {"key": key})))
    return messages


def _functions(packer: Packer, queue: StepQueue, workers: Collection[Worker]) -> Told:
    """Those that no step needs; the others at another time."""
    if not packer.forgotten or queue.num_queued > _MANY_QUEUED:
        return []
    needed = {step.call.function.key for step in queue.under_way()}
    needed |= {function.key for function, _ in packer.datasets.values()}
    unneeded = {key for key in packer.forgotten if key not in needed}
    packer.forgotten = [key for key in packer.forgotten if key in needed]
    dropped = [(worker.name, worker.forget(unneeded)) for worker in workers]
    return [(name, Message("forget", {"functions": keys})) for name, keys in dropped if keys]
