"""Parameter servers and workers as the tasks of a barrier stage of Spark; the driver is the chief.

The tasks agree on their addresses by the barrier. Each then reports to the driver, at a listener
that only holders of the cluster's keys can use, and runs until the driver sends it away.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from ..errors import ClusterError, TaskError
from .addresses import join_address, to_bind, to_connect
from .cluster import DescribedCluster
from .doors import Entrance, Visit, packed
from .keeper import TaskKeeper
from .keys import Keys
from .processes import free_port
from .settings import TaskSettings
from .spec import ClusterSpec, Task

_POLL_MS = 200
_END_S = 10.0  # in which tasks end their processes; then Spark cancels the stage
_ORPHAN_S = 60.0


def reason_of(error: Exception) -> str:
    """Why Spark has ended a stage, in one line."""
    return str(getattr(error, "java_exception", error)).splitlines()[0]


@dataclass(frozen=True)
class SparkCluster(DescribedCluster):
    """Tasks of a barrier stage, which is lost as a whole when one of Spark's own tasks dies."""

    stage: Stage | None = None
    reception: Reception | None = None

    def check(self, job: str | None = None) -> None:
        """Raise :class:`~meshwright.TaskError` when Spark has ended the stage."""
        assert self.stage is not None
        assert self.reception is not None
        reason = self.stage.reason
        if self.reception.moved:
            reason = "one of its tasks has died, and Spark has started all of them again"
        if reason:
            raise TaskError(f"Spark has ended the stage of the servers and workers: {reason}.")


class Stage(threading.Thread):
    """Runs the barrier stage; ``reason`` is why Spark has ended it."""

    def __init__(self, sc: Any, part: Part) -> None:
        super().__init__(name="meshwright-spark", daemon=True)
        self._sc, self._part = sc, part
        self._group = f"meshwright-{secrets.token_hex(8)}"
        self.reason = ""

    def run(self) -> None:
        """Run it to its end."""
        count = len(self._part.tasks)
        try:
            self._sc.setJobGroup(self._group, "Meshwright parameter servers", True)
            rows = self._sc.parallelize(range(count), count)
            rows.barrier().mapPartitions(self._part).collect()
        except Exception as error:  # of Py4J, or of Spark's own serializers
            self.reason = reason_of(error)

    def end(self) -> None:
        """Wait until the tasks have ended; cancel those that have not."""
        self.join(_END_S)
        if self.is_alive():
            self._sc.cancelJobGroup(self._group)
            self.join(_END_S)


@dataclass(frozen=True)
class Part:
    """What each task of the stage does: ``tasks[i]`` is that of partition ``i``."""

    tasks: tuple[Task, ...]
    chief: str
    driver: str
    keys: Keys
    devices: int | None

    def spec(self, addresses: Sequence[str]) -> ClusterSpec:
        """The cluster in which the tasks listen at these addresses."""
        jobs: dict[str, list[str]] = {"chief": [self.chief]}
        for task, address in zip(self.tasks, addresses, strict=True):
            jobs.setdefault(task.job, []).append(address)
        return ClusterSpec(jobs)

    def __call__(self, _: Iterable[Any]) -> Iterator[None]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        index = context.partitionId()
        host = context.getTaskInfos()[index].address.rpartition(":")[0] or "127.0.0.1"
        addresses = context.allGather(join_address(host, free_port()))
        task = self.tasks[index]
        settings = TaskSettings(task, self.spec(addresses), orphan_s=_ORPHAN_S)
        visit = Visit(to_connect(self.driver), self.keys, f"the driver at {self.driver}", 0)
        keeper = TaskKeeper()
        try:
            keeper.start(settings, self.keys.of(task.job), self.devices)
            visit.socket.send(packed({"task": index, "addresses": list(addresses)}))
            while not visit.socket.poll(_POLL_MS):
                visit.check()
            msgpack.unpackb(visit.socket.recv())
        finally:
            keeper.stop()
            visit.close()
        yield from ()


class Reception(threading.Thread):
    """Where the tasks report: a thread that sends them away when :meth:`close` is called.

    Spark runs a failed stage again, and its tasks then have other addresses: these are sent away
    at once, for servers cannot move. ``moved`` says so.
    """

    def __init__(self, address: str, keys: Keys, count: int) -> None:
        super().__init__(name="meshwright-reception", daemon=True)
        self.addresses: list[str] = []
        self.complete = threading.Event()
        self.moved = False
        self._count, self._closing = count, threading.Event()
        self._senders: dict[bytes, int] = {}  # and the numbers of their tasks
        self._entrance = Entrance(keys)
        try:
            self._entrance.bind(to_bind(address))
        except BaseException:
            self._entrance.close()
            raise

    def run(self) -> None:
        """Receive reports until it is closed."""
        with contextlib.closing(self._entrance):
            while not self._closing.is_set():
                if self._entrance.socket.poll(_POLL_MS) and (report := self._entrance.receive()):
                    self._take(*report)
            for sender in self._senders:
                self._send_away(sender)

    def close(self) -> None:
        """Send all tasks away."""
        self._closing.set()
        self.join()

    @property
    def present(self) -> int:
        """How many tasks have reported."""
        return len(self._senders)

    def _take(self, sender: bytes, message: Mapping[str, Any]) -> None:
        if message["task"] in self._senders.values():
            self.moved = True
            self._send_away(sender)
            return
        self._senders[sender], self.addresses = message["task"], message["addresses"]
        if len(self._senders) == self._count:
            self.complete.set()

    def _send_away(self, sender: bytes) -> None:
        self._entrance.socket.send_multipart([sender, packed({"end": True})])


@contextlib.contextmanager
def servers_on_spark(
    sc: Any, workers: int, ps: int, devices: int | None, start_s: float
) -> Iterator[SparkCluster]:
    """A cluster whose tasks run in a barrier stage; it ends with the ``with`` block."""
    tasks = [Task("ps", i) for i in range(ps)] + [Task("worker", i) for i in range(workers)]
    host, keys = sc.getConf().get("spark.driver.host"), Keys.make()
    chief, driver = (join_address(host, free_port()) for _ in range(2))
    part = Part(tuple(tasks), chief, driver, keys, devices)
    stage, reception = Stage(sc, part), Reception(driver, keys, len(tasks))
    reception.start()
    stage.start()
    try:
        _await(stage, reception, len(tasks), start_s)
        yield SparkCluster(part.spec(reception.addresses), keys, devices, stage, reception)
    finally:
        reception.close()
        stage.end()


def _await(stage: Stage, reception: Reception, count: int, start_s: float) -> None:
    """Wait until all tasks have reported."""
    until_s = time.monotonic() + start_s
    while not reception.complete.wait(_POLL_MS / 1000):
        if not stage.is_alive():
            reason = stage.reason or "one of its tasks has died."
            raise ClusterError(f"Spark has not run the servers and workers: {reason}")
        if time.monotonic() > until_s:
            raise ClusterError(
                f"{reception.present} of {count} servers and workers have reported to the driver "
                f"within {start_s:g} s. Spark must run {count} tasks at once, and their hosts must "
                "reach spark.driver.host."
            )
