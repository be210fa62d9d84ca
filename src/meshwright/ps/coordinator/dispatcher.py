"""The thread that hands out steps and takes in what became of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ExhaustedError, ProtocolError, TaskError
from ..shared.client import Servers
from ..shared.consistency import Async, Consistency, Stale
from ..wire.failures import KIND, failure, rebuilt
from ..wire.message import Message
from ..wire.schema import ANY_MESSAGE, BEAT, TO_COORDINATOR, check
from ..wire.values import unpack_value
from ..worker.iterators import Asked, Given
from .calls import Packer
from .guardian import Guardian
from .judging import fits_worker, given_up, ran_dry, report, steps_to_recall
from .links import Links
from .members import Beats, LostNames, Worker, silent
from .queue import Step, StepQueue
from .records import Records, Refused
from .sending import forgotten, messages_for, packed_elements

_TICK_S = 0.05
_PAUSE_S = 0.5
_MOST_ATTEMPTS = 10  # of a step, before it is blamed for the end of its workers


@dataclass(frozen=True)
class DispatcherSettings:
    """The cluster as it is expected, and how far its workers may be apart."""

    num_servers: int
    num_workers: int
    consistency: Consistency
    heartbeat_s: float
    dead_after_s: float
    worker_settings: dict[str, Any] = field(default_factory=dict)  # sent to every worker
    at_once: bool = False
    noted: Callable[[Any], None] = lambda note: None  # a worker has told servers an optimizer
    gone: Callable[[str, int], bool] = lambda task, pid: False  # the launcher saw a process end
    replace: Callable[[str, int], bool] = lambda task, pid: False  # the launcher starts a new one


class Dispatcher:
    """Everything that the coordinator knows, under one lock; its thread speaks with workers."""

    def __init__(
        self, settings: DispatcherSettings, packer: Packer, refill: Callable[[int, Servers], None]
    ) -> None:
        self.settings = settings
        self.packer = packer
        self.changed = threading.Condition(threading.RLock())
        first = time.time_ns() // 1_000_000 << 20  # above those of earlier ones, mostly
        self.queue = StepQueue(first, settings.consistency, settings.num_workers)
        self.session = f"{os.getpid()}-{first}"
        self.workers: dict[str, Worker] = {}
        self.records = Records(settings.num_servers)
        self.waiting = 0  # threads that wait until all is done: rounds need not be full then
        self.broken: BaseException | None = None
        self.links: Links | None = None
        self.guardian: Guardian | None = None
        self.refill = refill  # gives a server that came back the variables that it may lack
        self._beats = Beats()
        self._sent_s: dict[int, float] = {}
        self._recalled: set[int] = set()
        self._lost_names = LostNames()
        self._closing = self._stop_workers = False
        self._sleeping = False
        self._ticked_s = 0.0
        self._thread = threading.Thread(target=self._run, name="meshwright-dispatcher", daemon=True)

    def start(self, links: Links, guardian: Guardian | None) -> None:
        """Begin to speak with workers."""
        self.links, self.guardian = links, guardian
        self.records.servers_can_die = guardian is not None
        self._ticked_s = time.monotonic()
        self._thread.start()

    def stop(self, stop_workers: bool) -> None:
        """End the thread, and the workers if they are to end."""
        self._closing, self._stop_workers = True, stop_workers
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def wake(self) -> None:
        """There is something to hand out."""
        if self._sleeping and self.links is not None:
            self._sleeping = False
            self.links.wake()

    # The thread

    def _run(self) -> None:
        assert self.links is not None
        try:
            while not self._closing:
                with self.changed:
                    batches = self._batches()
                    self._sleeping = True
                for worker, messages in batches:
                    self._hand_out(worker, messages)
                for peer, message in self.links.poll(_TICK_S):
                    self._take(peer, message)
                self._tick(time.monotonic())
        except BaseException as error:
            with self.changed:
                self.broken = error
                self.changed.notify_all()
        finally:
            for worker in list(self.workers.values()) if self._stop_workers else ():
                self.links.send(worker.name, Message("stop"))
            self.links.close()

    def _hand_out(self, worker: Worker, messages: list[Message]) -> None:
        """Send a worker its steps; where that fails, it has to join again, and others take them."""
        assert self.links is not None
        for message in messages:
            try:
                self.links.send(worker.name, message)
            except Exception as error:
                with self.changed:
                    self._refuse(worker.name, message, error)
                return

    def _take(self, peer: str, message: Message) -> None:
        now_s = time.monotonic()
        with self.changed:
            self._sleeping = False
            try:
                self._take_in(peer, message, now_s)
            except Exception as error:  # nothing that a peer sends may end this thread
                self._refuse(peer, message, error)

    def _take_in(self, peer: str, message: Message, now_s: float) -> None:
        check(message, ANY_MESSAGE, "chief:0")
        worker = self.workers.get(peer.removesuffix("/alive"))
        if message.kind == "join":
            check(message, TO_COORDINATOR["join"], "chief:0")
            self._join(peer, message, now_s)
        elif worker is None:
            self._not_known(peer, message, now_s)
        elif message.kind in _HANDLERS:
            check(message, TO_COORDINATOR[message.kind], "chief:0")
            worker.heard(now_s)
            _HANDLERS[message.kind](self, worker, message)

    def _refuse(self, peer: str, message: Message, error: Exception) -> None:
        """Report a message that is not accepted; a worker that sent it must join again."""
        assert self.links is not None
        if self.guardian is None:
            raise error  # the worker of this process joins but once
        self.records.refused(Refused(peer, message.kind, f"{type(error).__name__}: {error}"))
        number = message.head.get("id")
        if type(number) is int:
            self.links.send(peer, failure(error, "chief:0"), number)
        worker = self.workers.get(peer.removesuffix("/alive"))
        if worker is not None:
            self._lose(worker)
            self.links.send(peer, Message("unknown"))
        self._tell_ended()

    def _not_known(self, peer: str, message: Message, now_s: float) -> None:
        assert self.links is not None
        head = message.head
        if message.kind == "alive" and str(head.get("task", "")).startswith("ps:"):
            check(message, BEAT, "chief:0")
            if peer != f"{head['task']}/alive":
                raise ProtocolError(f"{peer} beats for {head['task']}.", "chief:0")
            self._beats.heard(head["task"], head["pid"], float(head["every_s"]), now_s)
            self.links.send(peer, Message("ok", {"session": self.session}))
        number = message.head.get("id")
        if peer.removesuffix("/alive") in self._lost_names:
            self.links.send(peer, Message("unknown"))
        elif number is not None:
            self.links.send(peer, Message("ok", {"session": self.session}), number)

    def _tick(self, now_s: float) -> None:
        assert self.links is not None
        pause_s = now_s - self._ticked_s
        if pause_s < _TICK_S:
            return
        self._ticked_s = now_s
        with self.changed:
            workers = list(self.workers.values())
            if pause_s > _PAUSE_S:  # this process was suspended and received nothing
                for worker in workers:
                    worker.paused(pause_s, now_s)
                self._beats.paused(pause_s, now_s)
            for name, message in forgotten(self.packer, self.queue, self.workers.values()):
                self.links.send(name, message)
            # Without a cluster the worker runs in this very thread, and is never silent.
            among = [] if self.guardian is None else workers
            for worker in silent(among, now_s, self.settings.dead_after_s):
                self._lose(worker)
            for worker in list(self.workers.values()):
                if self.records.answer(self.settings.gone, worker.task, worker.pid):
                    self._lose(worker)
            for server in self._beats.silent(now_s, self.settings.dead_after_s):
                if self.records.answer(self.settings.replace, server.task, server.pid):
                    self.records.untold.append(server)
            self._recall(now_s)
            self._fail_if_dry()

    # Workers come and go

    def _join(self, peer: str, message: Message, now_s: float) -> None:
        assert self.links is not None
        head = message.head
        if not head["task"].startswith("worker:"):
            self.links.send(peer, Message("ok", {"session": self.session}), head.get("id"))
            return
        for other in [one for one in self.workers.values() if one.task == head["task"]]:
            self._lose(other)
        if peer in self._lost_names:
            # It greets again, as its connection was cut: what was on the way may be lost, so it
            # has to come as a new one.
            self.links.send(peer, Message("unknown"))
            return
        worker = Worker(peer, head["task"], head["incarnation"], head["pid"], head["host"], now_s)
        worker.since_s = now_s
        self.workers[peer] = worker
        self.queue.enter(peer, worker.window)
        for source in self.packer.sources.values():
            source.enter(worker.task)
        settings = self.settings
        welcome = {
            "session": self.session,
            "settings": settings.worker_settings,
            "at_once": settings.at_once,
        }
        self.links.send(peer, Message("welcome", welcome), head.get("id"))
        self.changed.notify_all()

    def _lose(self, worker: Worker) -> None:
        del self.workers[worker.name]
        self._lost_names.add(worker.name)
        self.records.counts.workers_lost += 1
        self.queue.lose(worker.name)
        if self.guardian is None:
            self._release(worker.name)
        else:
            self.guardian.fence(worker.name, worker.incarnation)

    def fenced(self, name: str) -> None:
        """No server takes anything from this worker any more."""
        with self.changed:
            self._release(name)
            self.wake()

    def _release(self, name: str) -> None:
        steps = self.queue.release(name)
        task = name.partition("/")[0]
        self.records.counts.retried += len(steps)
        for step in steps:
            self._freed(step)
            if step.attempt >= _MOST_ATTEMPTS and not self.queue.error:
                self._give_up(step, given_up(step, task))
        if all(worker.task != task for worker in self.workers.values()):
            for source in self.packer.sources.values():
                source.leave(task)
        self._tell_ended()

    def _give_up(self, step: Step, error: TaskError | ExhaustedError) -> None:
        self.queue.drop(step)
        self._ended(step, error)
        self.queue.abort(error)
        self._tell_ended()

    def drop_waiting(self) -> int:
        """Cancel the steps that were not begun; how many they are."""
        dropped = self.queue.drop_waiting()
        self._tell_ended()
        return dropped

    def _leave(self, worker: Worker, message: Message) -> None:
        """The worker was asked to end, and has reported everything that it has done."""
        self._lose(worker)

    def server_state(self, server: int, generation: int, base: int, snapshot: int) -> int:
        """A server's restarts, the version it came back with, and that of its last snapshot.

        Returns how many rounds ought to have been applied there.
        """
        with self.changed:
            self.records.server_state(server, generation, base, snapshot)
            return self.queue.rounds_done

    def restarted(self, restarts: Iterable[Sequence[int]]) -> None:
        """Restarts that a client of the servers saw: server, generation, version."""
        with self.changed:
            for server, generation, base in restarts:
                self.records.restarted(server, generation, base)

    def saving(self, server: int, fault: str, unsaved: int) -> None:
        """Whether a server can write snapshots, and how many updates are in none."""
        with self.changed:
            self.records.saving(server, fault, unsaved)

    # Steps go out

    def _batches(self) -> list[tuple[Worker, list[Message]]]:
        if not self.queue.num_queued or not self.workers:
            return []
        for worker in self.workers.values():
            self.queue.members[worker.name].window = self._window(worker)
        by_worker: dict[str, list[Step]] = {}
        for step in self.queue.assign(self.waiting > 0, self._fits):
            assert step.worker is not None
            by_worker.setdefault(step.worker, []).append(step)
        return [
            (self.workers[name], self._messages(name, steps)) for name, steps in by_worker.items()
        ]

    def _messages(self, name: str, steps: list[Step]) -> list[Message]:
        now_s, queue = time.monotonic(), self.queue
        self._sent_s.update((step.number, now_s) for step in steps)
        messages, failures = messages_for(
            self.packer, self.workers[name], steps, queue.done_below, queue.broken_rounds
        )
        for step, error in failures:
            self._ended(queue.fail(name, step.number, step.attempt, error), error)
            self._tell_ended()
        return messages

    def _window(self, worker: Worker) -> int:
        return worker.window if isinstance(self.settings.consistency, Async | Stale) else 1

    def _fits(self, step: Step, name: str) -> bool:
        return fits_worker(self.packer.sources, step, self.workers[name].task)

    def _fail_if_dry(self) -> None:
        """Every worker has run dry: no worker can do the next step."""
        step = self.queue.next_step()
        if step is None or self.queue.num_running or not self.workers:
            return
        if not any(self._fits(step, name) for name in self.workers):
            self._give_up(step, ran_dry(step))

    def _recall(self, now_s: float) -> None:
        assert self.links is not None
        steps_of = steps_to_recall(self.queue, self._sent_s, self._recalled, now_s)
        for name, steps in steps_of.items():
            self._recalled.update(step.number for step in steps)
            attempts = [[step.number, step.attempt] for step in steps]
            self.links.send(f"{name}/alive", Message("recall", {"steps": attempts}))

    # Steps come back

    def _results(self, worker: Worker, message: Message) -> None:
        restarts = message.head.get("restarts", ())
        self._check_servers(restarts)
        self.restarted(restarts)  # before their results, which may show what was lost
        for number, attempt, head, span, servers, used, seconds, notes in message.head["results"]:
            self._check_servers(servers)
            for note in notes:
                self.settings.noted(note)
            step = self.queue.finish(worker.name, number, attempt)
            if step is None:
                continue
            worker.measured(seconds)
            self.records.counts.done += 1
            self.records.acknowledged(number, servers)
            arrays = tuple(array.copy() for array in message.arrays[slice(*span)])
            self.records.counts.result_bytes += sum(array.nbytes for array in arrays)
            self._used(number, used)
            try:
                step.call.value.set_value(unpack_value(head, arrays))
            except Exception as error:
                step.call.value.set_error(error)
        self._tell_ended()

    def _check_servers(self, servers: Iterable[Sequence[Any]]) -> None:
        unknown = [server[0] for server in servers if server[0] >= self.settings.num_servers]
        if unknown:
            raise ProtocolError(f"there is no ps:{unknown[0]} in this cluster.", f"ps:{unknown[0]}")

    def _failed(self, worker: Worker, message: Message) -> None:
        head = message.head
        error = rebuilt(Message(KIND, head["error"]))
        step = self.queue.fail(worker.name, head["step"], head["attempt"], error)
        if step is not None:
            self._used(step.number, head["used"])
        self._ended(step, error)
        self._tell_ended()

    def _ended(self, step: Step | None, error: BaseException) -> None:
        if step is not None:
            self.records.counts.failed += 1
            step.call.value.set_error(error)

    def _passed(self, worker: Worker, message: Message) -> None:
        self.records.counts.passed_on += 1
        for step in self.queue.give_back(worker.name, [message.head["step"]]):
            self._freed(step)
        self._tell_ended()

    def _given_back(self, worker: Worker, message: Message) -> None:
        for step in self.queue.give_back(worker.name, message.head["steps"]):
            self._freed(step)
        self._tell_ended()

    def _next(self, worker: Worker, message: Message) -> None:
        assert self.links is not None
        head = message.head
        key, number = head["key"], head["step"]
        if key not in self.packer.sources:
            raise ProtocolError(f"{worker.name} asks for elements of {key!r}, which is unknown.")
        try:
            request = Asked(key, number, head["used"], head["missing"], head["before"])
            elements, later = self.more(worker.name, request)
            packed = packed_elements(self.packer, key, elements)
            again = [[other, packed_elements(self.packer, key, one)] for other, one in later]
            answer = {"key": key, "step": number, "elements": packed, "later": again}
        except Exception as error:  # the user's own iterator raised
            step = self.queue.members[worker.name].steps.get(number)
            attempt = 0 if step is None else step.attempt
            self._ended(self.queue.fail(worker.name, number, attempt, error), error)
            answer = {"key": key, "step": number, "elements": [], "later": []}
            self._tell_ended()
        self.links.send(worker.name, Message("element", answer))

    def more(self, name: str, request: Asked) -> Given:
        """One more element of an iterator for a step, or none at its end."""
        with self.changed:
            worker = self.workers.get(name)
            if worker is None:
                raise TaskError(f"{name} was declared dead.")
            source, steps = self.packer.sources[request.key], self.queue.members[name].steps
            for number, num_used in request.before:
                source.took(number, num_used)
                source.expect(num_used)
            step = steps.get(request.step)
            if step is None or step.attempt > 1:
                # It may have changed something already, with what it took then: it takes the same.
                elements = source.remaining(request.step, request.used, request.missing)
                return elements or source.more(request.step, worker.task), []
            later = [one for one in steps.values() if one.attempt == 1]
            later = later[later.index(step) + 1 :]
            numbers = [one.number for one in later if request.key in one.call.iterators]
            return source.in_order(
                request.step, worker.task, request.used, numbers, request.missing
            )

    def _alive(self, worker: Worker, message: Message) -> None:
        worker.heard(time.monotonic(), dict(message.head))
        assert self.links is not None
        self.links.send(f"{worker.name}/alive", Message("ok", {"session": self.session}))

    # Records-keeping

    def lines(self) -> list[str]:
        """What every task does."""
        waits_for = self.guardian.waits_for if self.guardian is not None else ""
        return report(self.queue, self.workers, waits_for, time.monotonic())

    def _freed(self, step: Step) -> None:
        self._recalled.discard(step.number)
        for key in step.call.iterators:
            self.packer.sources[key].freed(step.number)

    def _used(self, number: int, used: list[list[Any]]) -> None:
        self._sent_s.pop(number, None)
        self._recalled.discard(number)
        for key, num_used in used:
            if key in self.packer.sources:
                self.packer.sources[key].ended(number, num_used)

    def _tell_ended(self) -> None:
        """Mark cancelled steps as cancelled, and wake all waiting threads."""
        for step in self.queue.cancelled:
            self.records.counts.cancelled += 1
            step.call.value.cancel()
            self._used(step.number, [[key, 0] for key in step.call.iterators])
        self.queue.cancelled.clear()
        self.changed.notify_all()


_HANDLERS: dict[str, Callable[[Dispatcher, Worker, Message], None]] = {
    "results": Dispatcher._results,
    "failed": Dispatcher._failed,
    "passed": Dispatcher._passed,
    "recalled": Dispatcher._given_back,
    "next": Dispatcher._next,
    "alive": Dispatcher._alive,
    "leave": Dispatcher._leave,
}
