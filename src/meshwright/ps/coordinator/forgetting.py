"""What the program is done with is dropped on the workers as well."""

from __future__ import annotations

from collections.abc import Collection

from ..wire.message import Message
from .calls import Packer
from .members import Worker
from .queue import StepQueue

_MANY_QUEUED = 4096  # steps, through which is not looked for the functions that they need

Told = list[tuple[str, Message]]  # worker's name, and what it is told


def forgotten(packer: Packer, queue: StepQueue, workers: Collection[Worker]) -> Told:
    """The messages to workers about iterators and functions that the program has dropped."""
    return [*_iterators(packer, workers), *_functions(packer, queue, workers)]


def _iterators(packer: Packer, workers: Collection[Worker]) -> Told:
    told: Told = []
    while packer.dropped:
        key = packer.dropped.pop()
        packer.forget(key)
        for worker in workers:
            if key in worker.iterators:
                worker.iterators.remove(key)
                told.append((worker.name, Message("forget", {"key": key})))
    return told


def _functions(packer: Packer, queue: StepQueue, workers: Collection[Worker]) -> Told:
    """Those that no step needs; the others at another time."""
    if not packer.forgotten or queue.num_queued > _MANY_QUEUED:
        return []
    needed = {step.call.function.key for step in queue.under_way()}
    needed |= {function.key for function, _ in packer.datasets.values()}
    gone = {key for key in packer.forgotten if key not in needed}
    packer.forgotten = [key for key in packer.forgotten if key in needed]
    known = [(worker.name, worker.forget(gone)) for worker in workers]
    return [(name, Message("forget", {"functions": keys})) for name, keys in known if keys]
