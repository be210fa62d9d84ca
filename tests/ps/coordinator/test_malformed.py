"""Whatever a peer sends, the coordinator goes on: every kind of message, each field of it wrong."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest

from meshwright.errors import MeshwrightWarning, ProtocolError
from meshwright.launch.keys import Keys
from meshwright.launch.local import LocalCluster
from meshwright.ps.coordinator.calls import Packer, Scheduled
from meshwright.ps.coordinator.dispatcher import Dispatcher, DispatcherSettings
from meshwright.ps.coordinator.links import SocketLinks
from meshwright.ps.coordinator.members import LostNames
from meshwright.ps.coordinator.values import RemoteValue
from meshwright.ps.shared.consistency import Async
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.schema import BEAT, TO_COORDINATOR
from meshwright.ps.wire.sockets import SocketChannel

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


PATIENT = DispatcherSettings(1, 1, Async(), 0.2, 60.0)


def made(settings: DispatcherSettings = PATIENT) -> tuple[Dispatcher, ScriptedLinks]:
    dispatcher = Dispatcher(settings, Packer(), lambda *_: None)
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
    lines = [str(one) for one in dispatcher.records.untold]
    assert len(lines) == 1  # once for each task and kind
    assert "message 'alive' from ps:0/alive was refused: ProtocolError" in lines[0]
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


@pytest.mark.parametrize("every_s", [float("inf"), 1e300, float("nan"), 0, -1.0])
def test_no_beat_switches_off_the_wait_for_the_next(every_s: float) -> None:
    dispatcher, links = made()
    head = {"task": "ps:0", "pid": 4, "every_s": every_s}
    links.coming.append(("ps:0/alive", Message("alive", head)))
    until(lambda: dispatcher.records.untold)
    assert "every_s must be seconds above 0, an hour at most" in str(dispatcher.records.untold[0])
    assert not dispatcher._beats._last_beats
    dispatcher.stop(False)


def test_a_worker_cannot_beat_for_a_server() -> None:
    keys, head = Keys.make(), {"task": "ps:0", "pid": 4, "every_s": 1.0}
    links = SocketLinks("tcp://127.0.0.1:*", keys)
    channel = SocketChannel(
        links._listener.address, keys.of("worker"), "chief:0", identity="ps:0/alive"
    )
    number = channel.send(Message("alive", head))
    record: list[object] = []
    polling = threading.Thread(target=lambda: [record.extend(links.poll(0.05)) for _ in range(20)])
    polling.start()
    with pytest.raises(ProtocolError, match="'alive' to chief:0 is reserved for servers"):
        channel.wait(number, 10.0)
    polling.join()
    assert not record
    channel.close()
    links.close()
    dispatcher, scripted = made()  # nor one server for another, whose keys are its own
    scripted.coming.append(("ps:1/alive", Message("alive", head)))
    until(lambda: dispatcher.records.untold)
    assert "ps:1/alive beats for ps:0" in str(dispatcher.records.untold[0])
    dispatcher.stop(False)


def test_what_a_launcher_cannot_say_does_not_end_the_coordinator() -> None:
    def fail(task: str, pid: int) -> bool:
        raise OverflowError("signed integer is greater than maximum")

    settings = DispatcherSettings(1, 1, Async(), 0.2, 0.3, gone=fail, replace=fail)
    dispatcher, links = made(settings)
    joined(dispatcher, links, "a")
    beat = Message("alive", {"task": "ps:0", "pid": 4, "every_s": 0.01})
    links.coming.append(("ps:0/alive", beat))
    until(lambda: not dispatcher.workers)  # silent by now, and so is the server
    until(lambda: not dispatcher._beats._last_beats)
    until(lambda: len(dispatcher.records.untold) >= 2)
    joined(dispatcher, links, "b")
    assert dispatcher.broken is None
    assert "OverflowError" in "".join(map(str, dispatcher.records.untold))
    dispatcher.stop(False)


def test_a_message_that_cannot_be_sent_costs_a_worker_its_steps_alone(monkeypatch) -> None:
    dispatcher, links = made()
    send = links.send

    def fail_once(peer: str, message: Message, number: int | None = None) -> bool:
        if message.kind == "calls":
            monkeypatch.setattr(links, "send", send)
            raise ValueError("no such frame")
        return send(peer, message, number)

    joined(dispatcher, links, "a")
    monkeypatch.setattr(links, "send", fail_once)
    scheduled(dispatcher)
    until(lambda: "worker:0/a" not in dispatcher.workers)
    name = joined(dispatcher, links, "b")
    until(lambda: dispatcher.queue.members[name].steps)
    assert dispatcher.broken is None
    assert "ValueError: no such frame" in str(dispatcher.records.untold[0])
    dispatcher.stop(False)


def test_names_of_lost_workers_are_not_kept_for_good() -> None:
    dispatcher, links = made()
    dispatcher._lost_names = LostNames(most=3)
    names = [joined(dispatcher, links, f"i{number}") for number in range(6)]  # each ends the last
    assert len(dispatcher._lost_names) == 3
    assert names[4] in dispatcher._lost_names
    assert names[0] not in dispatcher._lost_names
    dispatcher.stop(False)
