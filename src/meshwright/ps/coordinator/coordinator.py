"""The coordinator: functions are scheduled onto workers, with TensorFlow's names and rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import (
    ClusterError,
    DataError,
    ShippingError,
    TaskError,
    UnreachableError,
)
from ...warn import warn
from .calls import Packer, Scheduled
from .data import check_sharding
from .dispatcher import Dispatcher
from .losses import Loss
from .values import LOOK_S, PerWorkerDataset, PerWorkerValues, RemoteValue

if TYPE_CHECKING:
    from ..strategy import ParameterServer

_MOST_QUEUED = 262_144  # as in TensorFlow: then schedule waits
_REPORT_EVERY_S = 60.0  # a wait in which nothing happens is reported so often
_ALONE_S = 120.0  # a wait without any worker ends after so long


class ClusterCoordinator:
    """Schedules functions onto the workers of a ``strategy``; there is one per strategy.

    The first error of a function is raised by the next :meth:`schedule`, :meth:`join` or
    :meth:`done`, at once: functions that have not begun are cancelled, and the coordinator can be
    used again. Functions that run then go on: what they change counts, and the next :meth:`join`
    waits for them. The names and the rule are those of TensorFlow's ``ClusterCoordinator``. Raises
    :class:`~meshwright.ClusterError` for another strategy.

    >>> import meshwright.ps.strategy
    >>> strategy = meshwright.ps.strategy.ParameterServer()
    >>> coordinator, total = ClusterCoordinator(strategy), strategy.variable(0.0)
    >>> for x in (1.0, 2.0, 3.0, 4.0, 5.0):
    ...     _ = coordinator.schedule(total.assign_add, args=(x,))
    >>> coordinator.join()
    >>> print(total.read())
    15.0
    >>> strategy.close()
    """

    def __new__(cls, strategy: ParameterServer) -> ClusterCoordinator:
        from ..strategy import ParameterServer

        if not isinstance(strategy, ParameterServer):
            raise ClusterError(f"a coordinator takes a ParameterServer; received {strategy!r}.")
        existing = strategy.coordinator_made
        return super().__new__(cls) if existing is None else existing

    def __init__(self, strategy: ParameterServer) -> None:
        if strategy.coordinator_made is self:
            return
        self.strategy = strategy
        self._closed = False
        self._packer = Packer(strategy)
        self._dispatcher = Dispatcher(strategy.dispatcher_settings(), self._packer, strategy.refill)
        self._changed = self._dispatcher.changed
        self._queue = self._dispatcher.queue
        strategy.coordinator_made = self
        try:
            strategy.start_dispatcher(self._dispatcher)
        except BaseException:
            strategy.coordinator_made = None  # so that the next one is begun anew
            raise

    # Scheduling

    def schedule(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Queue a call, to be run by any worker, and return what will hold its result.

        Iterators among the arguments stay here: the function gets their elements one by one. An
        ``iter()`` of :meth:`create_per_worker_dataset` becomes the worker's own. What a
        function closes over is taken when it is first scheduled.

        Raises a pending error of an earlier function,
        :class:`~meshwright.errors.ShippingError` where something cannot be sent, and
        :class:`~meshwright.errors.TaskError` once the coordinator is closed.
        """
        if not isinstance(args, Sequence) or isinstance(args, str | bytes):
            raise ShippingError(
                f"args={args!r}: give the arguments of a scheduled function as a tuple, args=(x,)."
            )
        if kwargs is not None and not _names_arguments(kwargs):
            raise ShippingError(
                f"kwargs={kwargs!r}: give a scheduled function's arguments by name as a dict, "
                'kwargs={"rate": 0.1}.'
            )
        with self._changed:
            self._check_open()
            self._raise_error()
            packed_function = self._packer.function(function)
            if self._queue.num_queued >= _MOST_QUEUED:
                self._wait(lambda: self._queue.num_queued < _MOST_QUEUED, None)
                self._raise_error()
            packed, iterators = self._packer.arguments(
                packed_function, tuple(args), dict(kwargs or {})
            )
            value = RemoteValue(
                self._changed, self._queue.next_number, packed_function.name, self._check_tasks
            )
            self._queue.add(Scheduled(packed_function, packed, tuple(iterators), value, iterators))
            self._dispatcher.records.counts.scheduled += 1
            self._dispatcher.wake()
        return value

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until every scheduled function has ended, or one has raised an error.

        Raises that error at once, while other functions may still run, and
        :class:`~meshwright.errors.UnreachableError`
        after ``timeout_s``, which lists what every task does.
        """
        with self._changed:
            self._wait_until_idle(timeout_s)
            self._raise_error()

    def join_unless(self, interrupted: Callable[[], bool]) -> int:
        """Like :meth:`join`, but once ``interrupted()`` is true, steps not begun are dropped.

        It is called about once a second. Steps that were begun are waited for. Returns how many
        steps were dropped.
        """
        with self._changed:
            self._wait_until_idle(None, interrupted)
            dropped = 0
            if not self._queue.idle and self._dispatcher.broken is None:
                dropped = self._dispatcher.drop_waiting()
                self._wait_until_idle(None)
            self._raise_error()
        return dropped

    def done(self) -> bool:
        """Whether every scheduled function has ended; raises the first error of one."""
        with self._changed:
            self._raise_error()
            if not self._queue.idle:
                self._check_tasks()
            return self._queue.idle

    def fetch(self, nest: Any, timeout_s: float | None = None) -> Any:
        """The same nest of tuples, lists and dicts, with results in the place of RemoteValues."""
        if isinstance(nest, RemoteValue):
            with self._changed:
                self._dispatcher.waiting += 1
                self._dispatcher.wake()
            try:
                return nest.fetch(timeout_s)
            finally:
                with self._changed:
                    self._dispatcher.waiting -= 1
        if isinstance(nest, tuple | list):
            values = [self.fetch(one, timeout_s) for one in nest]
            return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
        if isinstance(nest, dict):
            return {key: self.fetch(one, timeout_s) for key, one in nest.items()}
        return nest

    def create_per_worker_dataset(
        self, dataset_fn: Callable[[], Any] | Any, sharding: str = "dynamic"
    ) -> PerWorkerDataset:
        """A dataset that every worker makes by calling ``dataset_fn``; ``iter()`` begins it.

        ``sharding``: ``"dynamic"`` gives each element to one step, on demand; ``"static"`` gives
        worker i of n every n-th one, and passes a step on when it has none left; ``"copy"`` gives
        every worker all of them, as TensorFlow does. The dataset must come in the same order each
        time that it is made. Raises :class:`~meshwright.DataError` unless it can be iterated over.
        """
        check_sharding(sharding)
        if not callable(dataset_fn) and not isinstance(dataset_fn, Iterable):
            raise DataError(
                "expected a dataset: something to iterate over, or a function that makes it on "
                f"each worker; received {dataset_fn!r}."
            )
        make = dataset_fn if callable(dataset_fn) else lambda: dataset_fn
        return PerWorkerDataset(make, sharding, self._begin)

    def create_per_worker_values(self, make: Callable[[], Any]) -> PerWorkerValues:
        """A value of each worker's own: ``make()`` is called there when it is first used.

        A scheduled function that gets it as an argument, or closes over it, finds its worker's.
        What a function changes in it stays there for later functions, for as long as the worker
        lives: unlike variables it is neither shared nor restored. Use it for models, caches and
        counters. Raises :class:`~meshwright.errors.ShippingError` for what cannot be called, or
        sent.
        """
        with self._changed:
            return self._packer.own(make)

    # What is going on

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What servers that died have lost: for each death, the ids of the steps."""
        with self._changed:
            return self._dispatcher.records.losses

    def stats(self) -> dict[str, Any]:
        """Counts of steps, workers and bytes; ``staleness`` of the updates as a histogram.

        ``parameter_bytes`` are those of variables that went through this process: 0, but for what
        the program itself reads or assigns here, or gives as a first value.
        """
        with self._changed:
            counts = dict(vars(self._dispatcher.records.counts))
            counts["staleness"] = dict(sorted(counts["staleness"].items()))
            counts["parameter_bytes"] = self.strategy.parameter_bytes
            counts["queued"], counts["running"] = self._queue.num_queued, self._queue.num_running
            counts["workers"] = {
                worker.task: {
                    "pid": worker.pid,
                    "incarnation": worker.incarnation,
                    "done": worker.num_done,
                    "step_s": worker.step_s,
                }
                for worker in self._dispatcher.workers.values()
            }
        return counts

    def report(self) -> str:
        """What every task does now, line by line."""
        with self._changed:
            return "\n".join(self._dispatcher.lines())

    def restarted(self, restarts: Iterable[Sequence[int]]) -> None:
        """The strategy calls this for restarted servers, before it uses what they answer."""
        self._dispatcher.restarted(restarts)

    def close(self, stop_workers: bool = False) -> None:
        """End the coordinator; the workers wait for another one, or stop if ``stop_workers``."""
        self._closed = True
        self._dispatcher.stop(stop_workers)
        if self._dispatcher.guardian is not None:
            self._dispatcher.guardian.close()

    def _begin(self, dataset: PerWorkerDataset) -> PerWorkerValues:
        with self._changed:
            workers = [worker.task for worker in self._dispatcher.workers.values()]
            num_workers = max(1, self.strategy.num_workers)
            values = self._packer.begin(dataset, num_workers)
            for index in range(num_workers):
                if f"worker:{index}" not in workers:
                    self._packer.sources[values.key].leave(f"worker:{index}")
            return values

    # Waiting, under the lock

    def _raise_error(self) -> None:
        """Raise the pending error, if there is one."""
        self._check_broken()
        self._tell_losses()
        error = self._queue.take_error()
        if error is not None:
            raise error

    def _tell_losses(self) -> None:
        records = self._dispatcher.records
        untold, records.untold = records.untold, []
        for news in untold:
            warn(str(news))

    def _wait(self, is_over: Callable[[], bool], timeout_s: float | None) -> None:
        begun_s = time.monotonic()
        alone_s = reported_s = begun_s
        before = self._dispatcher.records.counts.done
        while not (is_over() or self._dispatcher.broken is not None):
            now_s = time.monotonic()
            if timeout_s is not None and now_s - begun_s >= timeout_s:
                raise self._late(f"join has waited for {timeout_s:.1f} s")
            self._check_tasks()
            if self._dispatcher.workers:
                alone_s = now_s
            if now_s - alone_s >= _ALONE_S:
                raise self._late(f"there has been no worker for {_ALONE_S:.0f} s")
            if self._dispatcher.records.counts.done != before:
                before, reported_s = self._dispatcher.records.counts.done, now_s
            elif now_s - reported_s >= _REPORT_EVERY_S:
                reported_s = now_s
                lines = "\n  ".join(self._dispatcher.lines())
                warn(f"no step has ended for {_REPORT_EVERY_S:.0f} s:\n  {lines}")
            left_s = LOOK_S if timeout_s is None else timeout_s - (now_s - begun_s)
            self._changed.wait(max(0.001, min(LOOK_S, left_s)))

    def _check_tasks(self) -> None:
        """Raise where what is waited for can never come: a server, or all workers, are given up."""
        self._check_open()
        self.strategy.cluster.check("ps")
        if not self._dispatcher.workers:
            self.strategy.cluster.check()
        self._check_broken()

    def _check_open(self) -> None:
        if self._closed:
            raise TaskError(
                "the coordinator is closed: no worker gets a step from it any more. Make a new "
                "ParameterServer, and a ClusterCoordinator of it."
            )

    def _check_broken(self) -> None:
        if self._dispatcher.broken is not None:
            raise TaskError(
                f"the coordinator has broken down: {self._dispatcher.broken!r}"
            ) from self._dispatcher.broken

    def _wait_until_idle(
        self, timeout_s: float | None, interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        self._dispatcher.waiting += 1
        try:
            self._dispatcher.wake()
            self._wait(
                lambda: self._queue.idle or self._queue.error is not None or interrupted(),
                timeout_s,
            )
        finally:
            self._dispatcher.waiting -= 1

    def _late(self, what: str) -> UnreachableError:
        return UnreachableError("\n  ".join([f"{what}:", *self._dispatcher.lines()]))

    def __reduce__(self) -> Any:
        raise ShippingError(
            "a coordinator cannot be used in a scheduled function, nor be its argument: schedule "
            "and fetch in the program that made it, and let functions return values."
        )

    def __repr__(self) -> str:
        return f"ClusterCoordinator({self.strategy!r})"


def _names_arguments(kwargs: object) -> bool:
    return isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
