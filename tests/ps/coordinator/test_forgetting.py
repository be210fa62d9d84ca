"""Functions and datasets that the program is done with are not kept."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.strategy import ParameterServer

WAIT_S = 20.0


def held(coordinator: ClusterCoordinator) -> tuple[int, ...]:
    """How many functions there are: with the coordinator, of its workers, and on the worker."""
    gc.collect()
    packer, dispatcher = coordinator._packer, coordinator._dispatcher
    deadline_s = time.monotonic() + WAIT_S
    while packer.forgotten or packer.dropped:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    (worker,) = dispatcher.workers.values()
    runner: Any = dispatcher.links._runner  # type: ignore[union-attr]
    parts = packer._functions, worker.functions, runner._packed, runner._functions
    return (*map(len, parts), len(packer.sources), len(runner._datasets))


def test_functions_that_are_gone_are_forgotten_everywhere():
    with ParameterServer() as strategy:
        coordinator = ClusterCoordinator(strategy)
        total = strategy.variable(0.0)

        def add_first_of(array: np.ndarray):
            return lambda: total.assign_add(array[0])

        for number in range(20):
            coordinator.schedule(add_first_of(np.full(50_000, number, "float32")))
        coordinator.join(WAIT_S)
        assert total.read() == 190
        assert held(coordinator) == (0, 0, 0, 0, 0, 0)


def test_a_function_that_is_kept_travels_once_and_one_that_is_queued_is_not_forgotten():
    with ParameterServer() as strategy:
        coordinator = ClusterCoordinator(strategy)

        def slowly():
            time.sleep(0.01)

        for _ in range(20):
            coordinator.schedule(lambda: time.sleep(0.01))  # the program has it no more
            coordinator.schedule(slowly)
        coordinator.join(WAIT_S)
        assert held(coordinator) == (1, 1, 1, 1, 0, 0)


def test_datasets_of_workers_are_forgotten_with_what_makes_them():
    with ParameterServer() as strategy:
        coordinator = ClusterCoordinator(strategy)

        def take(batches):
            return next(batches)

        for _ in range(20):
            batches = iter(coordinator.create_per_worker_dataset(lambda: iter([1, 2])))
            assert coordinator.fetch(coordinator.schedule(take, (batches,))) == 1
            del batches
        assert held(coordinator) == (1, 1, 1, 1, 0, 0)


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> int:
        return self.number


def test_methods_and_what_cannot_be_watched():
    class Adder:
        def __init__(self, number: int) -> None:
            self.number = number

        def value(self) -> int:
            return self.number

    with ParameterServer() as strategy:
        coordinator = ClusterCoordinator(strategy)
        for number in range(20):
            adder = Adder(number)
            values = [coordinator.schedule(adder.value) for _ in range(2)]
            assert coordinator.fetch(values) == [number, number]
        del adder
        assert held(coordinator)[:2] == (0, 0)
        for number in range(20):  # these take no weak references, and are kept
            assert coordinator.fetch(coordinator.schedule(Slotted(number))) == number
        assert held(coordinator)[0] == 20
