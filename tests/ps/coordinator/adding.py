"""What workers that are killed are given to do, and what must come of it.

Every worker imports this module each time that it starts: Keras and JAX stay out of it, and so does
pytest. They took most of the time of a start.
"""

from __future__ import annotations

import time


class Totals:
    """Two variables on two servers, and two inputs: every step adds to all."""

    def __init__(self, strategy, coordinator, pause_s: float = 0.0, delay_s: float = 0.0) -> None:
        self.coordinator = coordinator
        self.first = strategy.variable(0, dtype="int64", name="first")
        self.second = strategy.variable(0, dtype="int64", name="second")
        self.shared = strategy.variable(0, dtype="int64", name="shared")
        self.local = strategy.variable(0, dtype="int64", name="local")
        servers = [v.shards[0].server for v in (self.first, self.second)]
        assert servers == [0, 1]
        self.count = 0
        self._shared = iter(range(10**9))
        self._local = iter(coordinator.create_per_worker_dataset(lambda: range(10**9)))
        first, second, shared, local = self.first, self.second, self.shared, self.local

        def step(numbers, own_numbers):
            if delay_s:
                slow_down(delay_s)
            time.sleep(pause_s)
            first.assign_add(1)
            second.assign_add(1)
            shared.assign_add(next(numbers))
            local.assign_add(next(own_numbers))

        self._step = step

    def schedule(self, count: int) -> None:
        for _ in range(count):
            self.coordinator.schedule(self._step, args=(self._shared, self._local))
        self.count += count

    def check(self, limit_s: float) -> None:
        """Every step was applied once on each server, and got an element of its own."""
        self.coordinator.join(limit_s)
        n = self.count
        assert self.first.read() == self.second.read() == n
        assert self.shared.read() == self.local.read() == n * (n - 1) // 2


def slow_down(delay_s: float) -> None:
    """On a worker: wait between the pushes to the first and to the second server."""
    from meshwright.ps.worker.context import current

    channel = current().servers.channels[1]
    if getattr(channel, "slowed", False):
        return
    send = channel.send

    def later(message):
        if message.kind == "push":
            time.sleep(delay_s)
        return send(message)

    channel.send, channel.slowed = later, True
