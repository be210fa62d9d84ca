"""Whatever a peer sends, the coordinator goes on: every kind of message, each field of it wrong."""

from __future__ import annotations

import time
from collections import deque

import pytest

from meshwright.errors import MeshwrightWarning
from meshwright.launch.local import LocalCluster
from meshwright.ps.coordinator.calls import Packer, Scheduled
from meshwright.ps.coordinator.dispatcher import Dispatcher, DispatcherSettings
from meshwright.ps.coordinator.values import RemoteValue
from meshwright.ps.shared.consistency import Async
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.schema import BEAT, TO_COORDINATOR

WRONG = (None, -1, 1 << 62, 2.5, float("nan"), "zz", "worker:0", True, [], [[3]], {}, {"x": [1]})


class ScriptedLinks:
    """Links without sockets: a test says what comes in, and sees what goes out."""

    def __init__(self) -> None:
        self.coming: deque[tuple[str, Message]] = deque()
        self.sent: list[tuple[str, Message]] = []

    def poll(self, timeout_s: float) -> list[tuple[str, Message]]:
        if not self.coming:
            time.sleep(0.001)
        return [self.coming.popleft() for _ in range(len(self.coming))]

    def send(self, peer: str, message: Message, number: int | None = None) -> bool:
        self.sent.append((peer, message))
        return True

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class FencesAtOnce:
    """A guardian whose servers have always answered."""

    waits_for = ""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def fence(self, name: str, incarnation: str) -> None:
        self._dispatcher.fenced(name)


def made() -> tuple[Dispatcher, ScriptedLinks]:
    dispatcher = Dispatcher(DispatcherSettings(1, 1, Async(), 0.2, 60.0), Packer(), lambda *_: None)
    links = ScriptedLinks()
    dispatcher.start(links, FencesAtOnce(dispatcher))
    return dispatcher, links


def until(true) -> None:
    limit_s = time.monotonic() + 20
    while not true():
        assert time.monotonic() < limit_s
        time.sleep(0.001)


def joined(dispatcher: Dispatcher, links: ScriptedLinks, incarnation: str) -> str:
    name = f"worker:0/{incarnation}"
    head = {"task": "worker:0", "incarnation": incarnation, "pid": 1, "host": "h", "id": 1}
    links.coming.append((name, Message("join", head)))
    until(lambda: name in dispatcher.workers)
    return name


def scheduled(dispatcher: Dispatcher) -> RemoteValue:
    with dispatcher.changed:
        function = dispatcher.packer.function(len)
        value = RemoteValue(dispatcher.changed, dispatcher.queue.next_number, "len")
        packed, iterators = dispatcher.packer.arguments(function, (), {})
        dispatcher.queue.add(Scheduled(function, packed, tuple(iterators), value, iterators))
    return value


def done(number: int, attempt: int) -> list:
    return [number, attempt, 3, [0, 0], [], [], 0.1, []]


def handed_out(dispatcher: Dispatcher) -> bool:
    with dispatcher.changed:
        dispatcher.queue.error = None  # of a step that has lost too many workers
    return dispatcher.queue.num_running > 0


def well_formed(kind: str, step: int) -> dict:
    used: list = []
    heads = {
        "join": {"task": "worker:0", "incarnation": "x", "pid": 1, "host": "h"},
        "results": {
            "restarts": [],
            "results": [[step, 1, 3, [0, 0], [[0, True, 1, 0, False, 0, 0]], used, 0.1, []]],
        },
        "failed": {"step": step, "attempt": 1, "used": used, "error": {"type": "x"}},
        "passed": {"step": step, "attempt": 1},
        "recalled": {"steps": [step]},
        "next": {"key": "no such one", "step": step, "used": 0, "missing": None, "before": []},
        "alive": {"what": "runs", "step": step, "for_s": 1.0},
        "leave": {},
    }
    return heads[kind]


def malformed(kind: str, step: int) -> list[dict]:
    whole = well_formed(kind, step)
    heads = [{name: value for name, value in whole.items() if name != left} for left in whole]
    heads += [{**whole, name: value} for name in [*whole, "id"] for value in WRONG]
    if kind == "results":  # and every field inside of one
        (result,) = whole["results"]
        for at in range(len(result)):
            for value in (*WRONG, [[9, True, 1, 0, False, 0, 0]], [["no such iterator", 1]]):
                wrong = [*result[:at], value, *result[at + 1 :]]
                heads.append({"restarts": [], "results": [wrong]})
    return heads


@pytest.mark.parametrize("kind", sorted(TO_COORDINATOR))
def test_no_malformed_message_of_a_worker_ends_the_coordinator(kind: str) -> None:
    dispatcher, links = made()
    with dispatcher.changed:
        cases = malformed(kind, dispatcher.queue.next_number)
    for number, head in enumerate([*cases, {"results": 3}]):
        name = joined(dispatcher, links, f"i{number}")
        value = scheduled(dispatcher)
        until(lambda: handed_out(dispatcher) or value.done())  # noqa: B023
        links.coming.append((name, Message(kind, {**head})))
        links.coming.append((f"{name}/alive", Message(kind, {**head})))
        links.coming.append(("stranger", Message(kind, {**head})))
        until(lambda: not links.coming)
        assert dispatcher.broken is None
    # Nothing is left behind that keeps a good worker from its work.
    name = joined(dispatcher, links, "last")
    value = scheduled(dispatcher)

    def work() -> bool:
        handed_out(dispatcher)
        with dispatcher.changed:
            links.coming.extend(
                (
                    name,
                    Message("results", {"restarts": [], "results": [done(n, s.attempt)]}),
                )
                for n, s in dispatcher.queue.members[name].steps.items()
            )
        return value.done()

    until(work)
    assert value.fetch() == 3
    assert dispatcher.broken is None
    dispatcher.stop(False)


def test_no_malformed_beat_of_a_server_ends_the_coordinator() -> None:
    dispatcher, links = made()
    whole = {"task": "ps:0", "pid": 4, "every_s": 0.2}
    heads = [{**whole, name: value} for name in whole for value in WRONG]
    links.coming.extend(("ps:0/alive", Message("alive", head)) for head in heads)
    until(lambda: not links.coming)
    joined(dispatcher, links, "a")
    assert dispatcher.broken is None
    told = [str(one) for one in dispatcher.records.untold]
    assert len(told) == 1  # once for each task and kind
    assert "message 'alive' from ps:0/alive was refused: ProtocolError" in told[0]
    dispatcher.stop(False)
    assert set(BEAT) == set(whole)
    assert issubclass(MeshwrightWarning, UserWarning)


def test_a_worker_that_names_the_process_of_another_user_is_gone(monkeypatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    cluster = object.__new__(LocalCluster)  # which has started nothing
    monkeypatch.setattr(cluster, "pid", lambda task: 5)
    monkeypatch.setattr("os.kill", refuse)
    assert cluster.has_ended("worker:0", 1)
    assert not cluster.has_ended("worker:0", 5)


def test_a_worker_that_joins_first_of_all_and_falls_silent_is_lost():
    dispatcher = Dispatcher(DispatcherSettings(1, 1, Async(), 0.2, 0.5), Packer(), lambda *_: None)
    links = ScriptedLinks()
    head = {"task": "worker:0", "incarnation": "a", "pid": 1, "host": "h", "id": 1}
    links.coming.append(("worker:0/a", Message("join", head)))
    dispatcher.start(links, FencesAtOnce(dispatcher))
    until(lambda: dispatcher.records.counts.workers_lost == 1)
    dispatcher.stop(stop_workers=False)
