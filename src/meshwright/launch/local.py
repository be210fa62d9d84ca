"""A cluster of real processes on this machine."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from ..errors import ClusterError, TaskError
from ..topology import virtual_device_variables
from .joining import WORKER_DEVICES, cluster_variables, variables_of
from .keys import Keys
from .logs import LogPump
from .processes import Command, own_module, program
from .settings import TaskSettings
from .spec import ClusterSpec, Task
from .supervision import Event, Restarts
from .supervisor import Supervisor

_GRACE_S = 2.0
_LONGEST_SERVER_DELAY_S = 0.5  # all workers wait for a server
_LONGEST_WORKER_DELAY_S = 2.0


class LocalCluster:
    """Workers and parameter servers as processes of this machine, for as long as it is open::

        with LocalCluster(workers=2, ps=2) as cluster:
            strategy = ParameterServer(cluster)

    There are ``workers`` of them and ``ps`` servers. The program that makes it is the chief. Use it
    as a context manager, or let it end with the program: on exit, on a crash, after Ctrl-C and
    after SIGKILL, no process is left. What the tasks print comes to stderr in whole lines, as in
    ``[worker:0] text`` (``logs=False``: not).

    A server that ends is started again at the same address, and restores its last snapshot,
    which is written after every ``snapshot_every`` pushes (``None``: never), unless
    ``restart_servers=False``. A worker is started
    again, too, with growing delays. Both at most ``max_restarts`` times in a row; then
    :meth:`check` raises. ``env`` holds variables for the tasks. ``worker_devices`` is the number
    of CPU devices in each worker; without it a worker has those that JAX finds. ``evaluator`` is a
    Python program with its arguments, to be run beside them as the evaluator. Each task sends a
    heartbeat every ``heartbeat_s`` seconds.

    Raises :class:`~meshwright.errors.ClusterError` for an invalid number.

    >>> with LocalCluster(workers=1, ps=1, logs=False) as cluster:
    ...     print(*cluster.tasks)
    worker:0 ps:0
    """

    _arguments = ("-m", "meshwright.ps.task")  # of Python, for each task

    def __init__(
        self,
        workers: int = 2,
        ps: int = 1,
        *,
        evaluator: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        logs: bool = True,
        snapshot_every: int | None = 1000,
        restart_servers: bool = True,
        max_restarts: int = 10,
        heartbeat_s: float = 1.0,
        worker_devices: int | None = None,
    ) -> None:
        _check(workers, ps, evaluator, max_restarts, snapshot_every, heartbeat_s, worker_devices)
        self.worker_devices = worker_devices
        self._env = dict(env or {})
        self._evaluator = tuple(evaluator)
        self._snapshot_every, self._heartbeat_s = snapshot_every, heartbeat_s
        of_servers = Restarts(max_restarts, longest_s=_LONGEST_SERVER_DELAY_S)
        self._restarts = {
            "ps": of_servers if restart_servers else None,
            "worker": Restarts(max_restarts, longest_s=_LONGEST_WORKER_DELAY_S),
            "evaluator": None,
        }
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._supervisor = Supervisor(LogPump(show=logs))
        self._folder = self._supervisor.folder.path
        self._keys = Keys.make()
        self._keys.save(self._keys_path)
        self._next_worker = workers
        self._spec = self._first_spec(workers, ps)
        atexit.register(self._close_at_exit)
        try:
            for task in self._spec.tasks:
                if task.job != "chief":
                    self._start(task)
        except BaseException:
            self.close(grace_s=0.0)
            raise

    # What it is

    @property
    def spec(self) -> ClusterSpec:
        """Its tasks and their addresses, the chief's too."""
        return self._spec

    @property
    def keys(self) -> Keys:
        """The chief's keys."""
        return self._keys

    def cluster_spec(self) -> ClusterSpec:
        """As :attr:`spec`: a local cluster is a resolver, too."""
        return self._spec

    def task(self) -> Task:
        """The task of this process: the chief."""
        return Task("chief", 0)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that it has started."""
        return self._supervisor.tasks

    @property
    def events(self) -> tuple[Event, ...]:
        """What has happened to its tasks: starts, deaths, restarts."""
        return self._supervisor.events

    def pid(self, task: Task | str) -> int:
        """The number of a task's process."""
        return self._supervisor.pid(_task(task))

    def generation(self, task: Task | str) -> int:
        """How often a task was started again."""
        return self._supervisor.generation(_task(task))

    def check(self, job: str | None = None) -> None:
        """Raise :class:`~meshwright.errors.TaskError` for tasks that ended and are given up.

        With ``job``, only tasks of that job count. The message has the last lines of each. Once the
        cluster is closed, all have ended.
        """
        if self._closed:
            raise TaskError(
                "the cluster is closed: its workers and servers have ended. Make a new "
                "LocalCluster, and a ParameterServer on it."
            )
        self._supervisor.check(job)

    def has_ended(self, task: Task | str, pid: int) -> bool:
        """Whether this process of a task is known to have ended; ``False`` once it is closed."""
        try:
            with contextlib.suppress(PermissionError):  # it is there, and another user's
                os.kill(pid, 0)
            return self.pid(task) != pid
        except (ProcessLookupError, ClusterError):  # it ended, or was removed
            return True
        except TaskError:  # the cluster is closed
            return False

    def chief_variables(self) -> dict[str, str]:
        """The variables with which another process is the chief of this cluster."""
        devices = "" if self.worker_devices is None else str(self.worker_devices)
        variables = cluster_variables(self._spec, self.task(), self._keys_path)
        return {**variables, WORKER_DEVICES: devices}

    # What can be done to it

    def kill(self, task: Task | str, signal_number: int) -> None:
        """Send a signal to a task's process, to see what happens then."""
        self._supervisor.send_signal(_task(task), signal_number)

    def restart(self, task: Task | str) -> None:
        """Kill a task's process and start it again."""
        self._supervisor.restart(_task(task))

    def replace(self, task: Task | str, pid: int) -> bool:
        """Kill this process of a task, so that another is started; returns whether it did.

        Not if the task has another process by now, or the cluster is closed.
        """
        try:
            if self.pid(task) != pid:
                return False
            self.kill(task, signal.SIGKILL)
        except (ClusterError, TaskError):
            return False
        return True

    def add_worker(self) -> Task:
        """Start one more worker; it joins a training that is under way."""
        with self._lock:
            added = Task("worker", self._next_worker)
            self._next_worker += 1
            self._spec = self._spec.with_task(added, self._address(added))
            self._start(added)
        return added

    def remove_worker(self, task: Task | str | None = None) -> Task:
        """End a worker (the last one, unless ``task`` names another), and do not start it again.

        Raises :class:`~meshwright.errors.ClusterError` for the last worker that there is.
        """
        with self._lock:
            last = self._spec.task_indices("worker")[-1]
            removed = Task("worker", last) if task is None else _task(task)
            if removed.job != "worker":
                raise ClusterError(f"{removed} cannot be removed: only workers come and go.")
            self._spec = self._spec.without_task(removed)
            self._supervisor.remove(removed, _GRACE_S)
        return removed

    def close(self, grace_s: float = _GRACE_S) -> None:
        """End every task; those that have not ended after ``grace_s`` are killed.

        With 0 they are not asked first. Safe to call twice.
        """
        if self._closed or self._process != os.getpid():  # a fork of the chief owns nothing
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self._supervisor.close(grace_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close(_GRACE_S if error is None else 0.0)

    def __repr__(self) -> str:
        state = "closed" if self._closed else ", ".join(map(str, self.tasks))
        return f"LocalCluster({state})"

    # Parts

    def _close_at_exit(self) -> None:
        # After Ctrl-C or another error (Python has noted it) there is no point in waiting.
        self.close(0.0 if getattr(sys, "last_value", None) else _GRACE_S)

    @property
    def _keys_path(self) -> str:
        return str(self._folder / "keys.json")

    def _address(self, task: Task) -> str:
        return f"ipc://{self._folder / f'{task.job}{task.index}'}"

    def _first_spec(self, workers: int, ps: int) -> ClusterSpec:
        counts = {"chief": 1, "worker": workers, "ps": ps, "evaluator": int(bool(self._evaluator))}
        return ClusterSpec(
            {
                job: [self._address(Task(job, index)) for index in range(count)]
                for job, count in counts.items()
                if count
            }
        )

    def _start(self, task: Task) -> None:
        restarts = self._restarts[task.job]
        self._supervisor.start(task, lambda generation: self._command(task, generation), restarts)

    def _command(self, task: Task, generation: int) -> Command:
        settings = TaskSettings(
            task,
            self._spec,
            heartbeat_s=self._heartbeat_s,
            snapshot_dir=str(self._folder / "snapshots"),
            snapshot_every=self._snapshot_every,
            generation=generation,
        )
        env = {**self._env, **variables_of(settings, self._keys_path)}
        if task.job == "worker" and self.worker_devices is not None:
            env |= virtual_device_variables(self.worker_devices, {**os.environ, **env})
        if task.job == "evaluator":
            return program(self._evaluator, env)
        return own_module(self._arguments, env)


def _task(task: Task | str) -> Task:
    return Task.parse(task) if isinstance(task, str) else task


def _check(
    workers: int,
    ps: int,
    evaluator: Sequence[str],
    max_restarts: int,
    snapshot_every: int | None,
    heartbeat_s: float,
    worker_devices: int | None,
) -> None:
    faults = [
        f"{name}={value!r}: a whole number from {least} up."
        for name, value, least in (
            ("workers", workers, 1),
            ("ps", ps, 1),
            ("max_restarts", max_restarts, 0),
            ("snapshot_every", 1 if snapshot_every is None else snapshot_every, 1),
            ("worker_devices", 1 if worker_devices is None else worker_devices, 1),
        )
        if type(value) is not int or value < least
    ]
    if isinstance(evaluator, str | bool):
        faults.append(f"evaluator={evaluator!r}: a list, such as ['evaluate.py', '--steps', '9'].")
    if not heartbeat_s > 0:
        faults.append(f"heartbeat_s={heartbeat_s!r}: seconds above 0.")
    if faults:
        raise ClusterError("LocalCluster: " + "\n".join(faults))
