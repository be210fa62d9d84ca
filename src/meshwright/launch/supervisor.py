"""Keeps the processes of tasks running: starts them, notices their end, starts them again."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ClusterError, TaskError
from .logs import LogPump
from .private_folder import PrivateFolder
from .processes import Child, Command, end_all
from .spec import Task
from .supervision import Event, Restarts, exit_text

_TRY_AGAIN_S = 1.0
_AFTER_STOP_S = 0.2
_LOOK_EVERY_S = 0.1  # where the system does not report a process's end


@dataclass
class _Kept:
    """One task: its process, or when it is started again, or how it came to its end."""

    command: Callable[[int], Command]  # by generation
    restarts: Restarts | None
    child: Child
    started_s: float
    generation: int = 0
    counted: int = 0  # restarts that count against it
    due_s: float | None = None
    over: str = ""


class Supervisor:
    """The processes of some tasks, and a thread that watches over them.

    Everything that happens to them is an :class:`Event`; with ``announces`` what goes wrong is
    also written among their lines. :attr:`folder` is their private folder; it and ``logs``, which
    hold what they print, end with them.
    """

    def __init__(self, logs: LogPump, *, announces: bool = True) -> None:
        self.folder = PrivateFolder()
        self._logs = logs
        self._announces = announces
        self._begun_s = time.monotonic()
        self._lock = threading.RLock()
        self._charges: dict[Task, _Kept] = {}
        self._events: list[Event] = []
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="task supervisor", daemon=True)
        self._thread.start()

    @property
    def events(self) -> tuple[Event, ...]:
        """All that has happened so far."""
        with self._lock:
            return tuple(self._events)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that are kept, dead ones too."""
        with self._lock:
            return tuple(self._charges)

    def start(
        self,
        task: Task,
        command: Callable[[int], Command],
        restarts: Restarts | None,
        child: Child | None = None,
    ) -> None:
        """Start a task, and again whenever it has ended; ``restarts=None``: only this once.

        With a ``child`` the first process is one that runs already.
        """
        with self._lock:
            self._check_open()
            child = self._logged(task, child or Child(command(0)))
            self._charges[task] = _Kept(command, restarts, child, time.monotonic())
            self._note(task, "started")
        self._wake()

    def pid(self, task: Task) -> int:
        """The number of the task's process, or of its last one."""
        with self._lock:
            return self._of(task).child.pid

    def generation(self, task: Task) -> int:
        """How often the task was started again."""
        with self._lock:
            return self._of(task).generation

    def send_signal(self, task: Task, number: int) -> None:
        """Send a signal to the task's process."""
        with self._lock:
            self._check_open()
            self._of(task).child.send_signal(number)
        self._wake()  # the process may have been found ended just now

    def restart(self, task: Task) -> None:
        """End the task's process at once, and start it again."""
        with self._lock:
            self._check_open()
            charge = self._of(task)
            charge.child.kill()
            charge.counted = 0
            self._start_again(task, charge)
        self._wake()

    def remove(self, task: Task, grace_s: float) -> None:
        """End a task for good, and forget it."""
        with self._lock:
            charge = self._of(task)
            charge.due_s, charge.over = None, "stopped"  # the thread lets it be from now on
        end_all([charge.child], grace_s)
        with self._lock:
            del self._charges[task]
            self._note(task, "stopped", charge.child.exit_code)

    def check(self, job: str | None = None) -> None:
        """Raise :class:`TaskError` if a task has ended and is not started again; names them all.

        With ``job``, only tasks of that job are looked at.
        """
        with self._lock:
            dead = [
                (task, charge)
                for task, charge in self._charges.items()
                if charge.over in ("given up", "died") and job in (None, task.job)
            ]
        if dead:
            raise TaskError(
                "\n".join(self._obituary(task, kept) for task, kept in dead), str(dead[0][0])
            )

    def close(self, grace_s: float) -> None:
        """End everything, all at the same time; what has not ended after ``grace_s`` is killed."""
        try:
            self._end(grace_s)
        finally:
            self._logs.close(timeout_s=2.0)
            self.folder.remove()

    def _end(self, grace_s: float) -> None:
        with self._lock:
            self._closing = True
        self._wake()
        try:
            self._thread.join()
        finally:  # a second Ctrl-C comes while waiting
            running = [k.child for k in self._charges.values() if not k.over and k.due_s is None]
            end_all(running, grace_s)
            for task, charge in self._charges.items():
                if charge.child in running:
                    self._note(task, "stopped", charge.child.exit_code)
            for descriptor in (self._wake_read, self._wake_write):
                os.close(descriptor)

    # The thread

    def _run(self) -> None:
        while not self._closing:
            with self._lock:
                timeout_s = self._look()
                watched = [k.child.exit_descriptor for k in self._charges.values() if not k.over]
            _wait([d for d in watched if d is not None], self._wake_read, timeout_s)

    def _look(self) -> float | None:
        """Take note of what has ended and start what is due; returns when to look again."""
        for task, charge in self._charges.items():
            if charge.over or self._closing:
                continue
            if charge.due_s is None and charge.child.poll() is not None:
                self._note_end(task, charge)
            if charge.due_s is not None and charge.due_s <= time.monotonic():
                self._start_again(task, charge)
        waits = [k.due_s - time.monotonic() for k in self._charges.values() if k.due_s is not None]
        if any(k.child.exit_descriptor is None and not k.over for k in self._charges.values()):
            waits.append(_LOOK_EVERY_S)
        return max(0.0, min(waits)) if waits else None

    def _note_end(self, task: Task, charge: _Kept) -> None:
        code = charge.child.exit_code or 0
        self._note(task, "died" if code else "ended", code)
        if charge.restarts is None:
            charge.over = "died" if code else "ended"
            if code:
                self._tell(task, f"has died ({exit_text(code)}), and is not started again")
            return
        now_s = time.monotonic()
        charge.counted = charge.restarts.count(charge.counted, now_s - charge.started_s)
        delay_s = charge.restarts.delay_s(charge.counted)
        if delay_s is None:
            charge.over = "given up"
            self._note(task, "given up", code)
            self._tell(task, f"has ended again ({exit_text(code)}), and is given up")
            return
        # What was told to stop may well see its cluster closed next.
        charge.due_s = now_s + (delay_s if code else max(delay_s, _AFTER_STOP_S))
        charge.counted += 1
        if code:
            self._tell(task, f"has died ({exit_text(code)}); it is started again")

    def _start_again(self, task: Task, charge: _Kept) -> None:
        charge.due_s, charge.over, charge.started_s = None, "", time.monotonic()
        try:
            charge.child = self._logged(task, Child(charge.command(charge.generation + 1)))
        except OSError as error:  # the machine is full; it may not stay so
            charge.due_s = time.monotonic() + _TRY_AGAIN_S
            self._tell(task, f"cannot be started again yet: {error}")
            return
        charge.generation += 1
        self._note(task, "restarted")

    # Parts

    def _logged(self, task: Task, child: Child) -> Child:
        self._logs.add(str(task), child.output)
        return child

    def _of(self, task: Task) -> _Kept:
        if task not in self._charges:
            told_tasks = ", ".join(map(str, self._charges)) or "none"
            raise ClusterError(f"no {task} is kept running here; there are: {told_tasks}.")
        return self._charges[task]

    def _tell(self, task: Task, line: str) -> None:
        if self._announces:
            self._logs.tell(str(task), line)

    def _check_open(self) -> None:
        if self._closing:
            raise ClusterError("the cluster is closed: nothing can be done to its tasks any more.")

    def _note(self, task: Task, what: str, exit_code: int | None = None) -> None:
        self._events.append(Event(time.monotonic() - self._begun_s, task, what, exit_code))

    def _obituary(self, task: Task, charge: _Kept) -> str:
        code = charge.child.exit_code or 0
        times = f" after {charge.generation} restarts" if charge.generation else ""
        lines = self._logs.last_lines(str(task), wait_s=1.0)
        last = "".join(f"\n    {line}" for line in lines) or " none"
        return f"{task} has ended ({exit_text(code)}){times}. Its last lines:{last}"

    def _wake(self) -> None:
        os.write(self._wake_write, b".")


def _wait(descriptors: list[int], wake: int, timeout_s: float | None) -> None:
    poller = select.poll()
    for descriptor in (wake, *descriptors):
        poller.register(descriptor, select.POLLIN)
    ready = poller.poll(None if timeout_s is None else timeout_s * 1000)
    if any(descriptor == wake for descriptor, _ in ready):
        os.read(wake, 1 << 12)
