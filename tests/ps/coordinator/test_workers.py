"""The whole path with processes: the classic sample, errors, elastic workers."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from clusters import WAIT_S, add_up, check_exhausted, trained_on, wait_for_workers

from meshwright.errors import CancelledError, UnreachableError
from meshwright.ps.worker.context import current

pytestmark = pytest.mark.alone


@pytest.mark.full_for("1")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_classic_sample(workers):
    with trained_on(workers) as (_, strategy, coordinator):
        total = strategy.variable(0.0)

        add_up(coordinator, total, iter([1.0, 2.0, 3.0, 4.0, 5.0]))
        for sharding in ("dynamic", "static"):
            total.assign(0.0)
            numbers = iter(
                coordinator.create_per_worker_dataset(lambda: [1.0, 2.0, 3.0, 4.0, 5.0], sharding)
            )
            add_up(coordinator, total, numbers)
            check_exhausted(coordinator, numbers)
        if workers == 1:
            check_order(coordinator)


def check_order(coordinator):
    """One worker takes elements in order, however many each function takes."""
    dataset = coordinator.create_per_worker_dataset(lambda: range(1000))
    counts = [1] * 60 + [k % 3 for k in range(60)]

    def take(elements, count):
        return [next(elements) for _ in range(count)]

    for elements in (iter(range(1000)), iter(dataset)):
        values = [coordinator.schedule(take, args=(elements, count)) for count in counts]
        taken = [one for value in coordinator.fetch(values) for one in value]
        assert taken == list(range(sum(counts)))


def test_an_error_is_raised_at_once_while_another_function_runs():
    with trained_on(2, 1) as (_, strategy, coordinator):
        total = strategy.variable(0)
        wait_for_workers(coordinator, 2)

        def slow():
            total.assign_add(1)
            time.sleep(3.0)

        def bad():
            time.sleep(0.7)  # all are scheduled by then
            raise ValueError("bad")

        slow_one, failing = coordinator.schedule(slow), coordinator.schedule(bad)
        behind = [coordinator.schedule(slow) for _ in range(4)]
        begun_s = time.monotonic()
        with pytest.raises(ValueError, match="bad"):
            coordinator.join()
        assert time.monotonic() - begun_s < 2.0
        assert failing.done()
        coordinator.schedule(total.assign_add, args=(10,)).fetch(WAIT_S)  # usable at once
        coordinator.join(WAIT_S)  # waits for what runs
        assert slow_one.fetch() is None
        for value in behind:
            with pytest.raises(CancelledError):
                value.fetch(WAIT_S)
        assert total.read() == 11


@pytest.mark.full
def test_errors_large_values_long_steps_and_one_more_worker():
    with trained_on(2) as (cluster, strategy, coordinator):
        total = strategy.variable(0.0)
        big = np.arange(300_000, dtype="float32")

        def where(array):
            total.assign_add(1.0)
            return current().index, array[::-1]

        index, turned = coordinator.schedule(where, args=(big,)).fetch(WAIT_S)
        assert index in (0, 1)
        np.testing.assert_array_equal(turned, big[::-1])

        def bad():
            total.assign_add(100.0)
            raise ZeroDivisionError("on purpose")

        def sleepy(seconds):
            time.sleep(seconds)
            return os.getpid()

        coordinator.schedule(bad)
        with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
            coordinator.join(WAIT_S)
        assert "in worker:" in caught.value.__notes__[0]
        assert total.read() == 1.0

        # A step that waits behind a long one goes to the worker that has nothing to do.
        begun_s = time.monotonic()
        long = coordinator.schedule(sleepy, args=(3.0,))
        short = [coordinator.schedule(sleepy, args=(0.05,)) for _ in range(5)]
        coordinator.fetch(short, WAIT_S)
        assert time.monotonic() - begun_s < 2.5
        with pytest.raises(UnreachableError, match=r"(?s)worker:\d.*step \d+.*sleepy"):
            coordinator.join(0.1)
        assert long.fetch(WAIT_S) in {cluster.pid("worker:0"), cluster.pid("worker:1")}

        cluster.add_worker()
        wait_for_workers(coordinator, 3)
        pids = coordinator.fetch([coordinator.schedule(sleepy, args=(0.3,)) for _ in range(3)])
        assert len(set(pids)) == 3
        cluster.remove_worker()
        coordinator.schedule(sleepy, args=(0.0,)).fetch(WAIT_S)
        assert coordinator.stats()["parameter_bytes"] == 8  # the first value, and one read


@pytest.mark.full
def test_a_worker_that_is_told_to_end_finishes_what_it_does_and_leaves():
    with trained_on(1, 1, dead_after_s=60.0) as (cluster, strategy, coordinator):
        total = strategy.variable(np.int64(0))

        def slowly():
            time.sleep(0.02)
            total.assign_add(1)

        wait_for_workers(coordinator, 1)
        for _ in range(60):
            coordinator.schedule(slowly)
        time.sleep(0.3)
        cluster.kill("worker:0", signal.SIGTERM)
        coordinator.join(WAIT_S)
        assert total.read() == 60
        ends = [event for event in cluster.events if event.what in ("ended", "died")]
        assert [(event.what, event.exit_code) for event in ends] == [("ended", 0)]
        assert not [
            line for line in cluster._supervisor._logs.last_lines("worker:0") if "Traceback" in line
        ]
