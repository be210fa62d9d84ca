"""What a server answers: variables made, read and changed, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from asking import Asking

import meshwright as mw
from meshwright.ps.server.core import ServerCore
from meshwright.ps.server.delays import EPSILON, KEEP, MOST_PEERS
from meshwright.ps.server.store import Store
from meshwright.ps.wire.memory import MemoryChannel
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.schema import TO_SERVER


def test_a_variable_is_made_once_and_keeps_its_values() -> None:
    server = Asking()
    assert server.table("w", [3])
    server.push(("w", "add", [np.ones(3, "f")]))
    assert not server.table("w", [3])
    assert server.read("w")[0].tolist() == [1, 1, 1]
    with pytest.raises(mw.ArrayError, match=r"on ps:0 as float32\[3\]; it is asked .*float32\[4\]"):
        server.table("w", [4])
    with pytest.raises(mw.ArrayError, match=r"asked for as float64\[3\]"):
        server.table("w", [3], "float64")


def test_changes_of_whole_variables() -> None:
    server = Asking()
    server.value("w", np.zeros(3, "f"))
    server.push(("w", "assign", [np.array([1.0, 2.0, 3.0])]))
    server.push(("w", "add", [np.array([1, 1, 1])]), ("w", "sub", [np.array(0.5, "f")]))
    assert server.read("w")[0].tolist() == [1.5, 2.5, 3.5]
    assert server.read("w")[0].dtype == np.float32


def test_what_was_read_does_not_change_later() -> None:
    server = Asking()
    server.value("w", np.zeros(3))
    before = server.read("w")[0]
    server.push(("w", "add", [np.ones(3)]))
    assert not before.any()


def test_a_push_keeps_nothing_of_the_message() -> None:
    server = Asking()
    sent = np.ones(3)
    server.value("w", sent)
    server.push(("w", "assign", [sent]))
    sent[:] = 9
    assert server.read("w")[0].tolist() == [1, 1, 1]


def test_unknown_variables_are_named_all_at_once() -> None:
    server = Asking()
    server.table("w", [1])
    with pytest.raises(mw.TaskError, match=r"ps:0 has no variable .a., .b.\. It holds 1") as caught:
        server.read("a", "w", "b")
    assert caught.value.task == "ps:0"
    with pytest.raises(mw.TaskError, match="has no variable 'c'"):
        server.push(("w", "add", [np.ones(1)]), then_read=["c"])
    assert server.read("w")[0] == 0


FAULTS = [
    (("w", "add", [np.ones(3)]), r"shape \[2\] here; received shape \[3\]"),
    (("w", "assign", [np.ones((1, 2))]), r"received shape \[1, 2\]"),
    (("w", "add", [np.ones(2, complex)]), "is float32; received complex128"),
    (("n", "add", [np.ones(2)]), "is int64; received float64"),
    (("w", "add", [np.ones(2), np.ones(2)]), "takes 1 arrays, not 2"),
    (("w", "multiply", [np.ones(2)]), "unknown operation 'multiply'; expected one of assign"),
    (
        ("w", "rows_add", [np.array([0]), np.ones((1, 1))]),
        r"1 rows of 'w', each of shape .*received values of",
    ),
    (("w", "rows_add", [np.array([9]), np.ones(1)]), "row 9 is out of range for 'w'"),
    (("w", "gradient", [np.ones(2)]), "'w' has no optimizer here"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_push_is_applied_as_a_whole_or_not_at_all(fault, message) -> None:
    server = Asking()
    server.table("w", [2])
    server.table("n", [2], "int64")
    good = ("w", "add", [np.ones(2)])
    with pytest.raises((mw.ArrayError, mw.TaskError, mw.ModelError), match=message):
        server.push(good, fault, good, step=4)
    assert not server.read("w")[0].any()
    assert server.push(good, step=4)["applied"], "a refused step may come again"


def test_all_faults_of_a_push_are_told() -> None:
    server = Asking()
    server.table("w", [2])
    faults = [fault for fault, _ in FAULTS[:2]]
    with pytest.raises(mw.ArrayError, match=r"for 2 of its updates:\n- add .*\n- assign "):
        server.push(*faults)


def test_messages_that_make_no_sense_are_refused() -> None:
    server = Asking()
    with pytest.raises(mw.ProtocolError, match=r"unknown request .sing.; expected one of"):
        server.ask("sing")
    with pytest.raises(mw.ProtocolError, match="'read' to ps:0 is invalid: names is missing"):
        server.ask("read")
    server.table("w", [2])
    with pytest.raises(mw.ProtocolError, match="brings 1 arrays, and says that they are 2"):
        server.ask("push", np.ones(2), step=None, updates=[["w", "add", 2, {}]])
    assert server.ask("stats").head["refused"] == 3


def test_a_variable_larger_than_the_memory_is_refused() -> None:
    server = Asking(ServerCore(2, memory_bytes=1000))
    server.table("w", [100])
    with pytest.raises(mw.TaskError, match=r"'big' takes 800 B more on ps:2, which holds 400 B"):
        server.table("big", [200])
    with pytest.raises(mw.TaskError, match=r"'w' takes 800 B more .* Use more servers, or a"):
        server.optimizer("Adam", ["w"])
    assert server.optimizer("SGD", ["w"])["made"]


def test_then_read_saves_a_round_trip() -> None:
    server = Asking()
    server.value("w", np.zeros(2))
    updates = [["w", "add", 1, {}]]
    answer = server.ask("push", np.ones(2), step=1, updates=updates, then_read=["w"])
    again = server.ask("push", np.ones(2), step=1, updates=updates, then_read=["w"])
    assert answer.head["applied"]
    assert not again.head["applied"]
    assert answer.arrays[0].tolist() == again.arrays[0].tolist() == [1, 1]


def test_versions_count_pushes_and_tell_staleness() -> None:
    server = Asking()
    server.value("w", np.zeros(2))
    actual = server.ask("read", names=["w"]).head["version"]
    assert actual == 0
    for behind in range(3):
        reply = server.push(("w", "add", [np.ones(2)]), seen=actual)
        assert (reply["version"], reply["staleness"]) == (behind + 1, behind)
    assert server.ask("read", names=["w"]).head["versions"] == [3]
    assert server.ask("stats").head["staleness"] == {0: 1, 1: 1, 2: 1}


def test_the_rate_of_a_stale_gradient_is_smaller() -> None:
    server = Asking()
    server.value("w", np.zeros(1, "f"))
    server.optimizer("SGD", ["w"], learning_rate=1.0)
    moved = []
    for _ in range(4):
        before = server.read("w")[0]
        server.push(("w", "gradient", [np.ones(1, "f")], {"staleness": True}), seen=0)
        moved.extend(before - server.read("w")[0])
    np.testing.assert_allclose(moved, [1, 1, 1 / 2, 1 / 3], rtol=1e-6)


def test_delay_is_compensated_by_what_the_worker_read() -> None:
    """DC-ASGD: g + lambda * g * g * (w_now - w_read), for each worker what that one read."""
    server, rate, factor = Asking(), 0.5, 0.3
    server.value("w", np.array([1.0, -2.0]))
    config = {"class_name": "SGD", "config": {"learning_rate": rate}}
    server.ask("optimizer", group="g", config=config, names=["w"], compensation=True)
    read = {peer: server.ask("read", names=["w"], peer=peer).arrays[0] for peer in ("a", "b")}
    now = read["a"].copy()
    for peer, gradient in (("a", [1.0, 2.0]), ("b", [3.0, -1.0]), ("b", [0.5, 0.5])):
        gradient = np.array(gradient)
        update = ("w", "gradient", [gradient], {"compensation": factor})
        server.push(update, peer=peer)
        now -= rate * (gradient + factor * gradient**2 * (now - read[peer]))
        np.testing.assert_allclose(server.read("w", peer="c")[0], now, rtol=1e-12)
    read["b"] = server.ask("read", names=["w"], peer="b").arrays[0]
    server.push(("w", "gradient", [np.ones(2)], {"compensation": factor}), peer="b")
    np.testing.assert_allclose(server.read("w", peer="c")[0], now - rate, rtol=1e-12)
    before = server.read("w", peer="c")[0]
    rows = [np.array([0]), np.ones(1)]
    server.push(("w", "rows_gradient", rows, {"compensation": factor}), peer="b")
    np.testing.assert_allclose(server.read("w")[0], before - [rate, 0], rtol=1e-12)


def test_the_adaptive_factor_goes_by_the_mean_square_of_the_gradient() -> None:
    """DC-ASGD-a: the mean square runs over all workers' gradients."""
    server, rate, factor = Asking(), 0.5, 2.0
    server.value("w", np.array([1.0, -2.0]))
    config = {"class_name": "SGD", "config": {"learning_rate": rate}}
    server.ask("optimizer", group="g", config=config, names=["w"], compensation=True)
    read = {peer: server.ask("read", names=["w"], peer=peer).arrays[0] for peer in ("a", "b")}
    now, mean = read["a"].copy(), np.zeros(2)
    for peer, gradient in (("a", [1.0, 2.0]), ("b", [3.0, -1.0]), ("b", [0.5, 0.0])):
        gradient = np.array(gradient)
        options = {"compensation": factor, "adaptive": True}
        server.push(("w", "gradient", [gradient], options), peer=peer)
        mean = KEEP * mean + (1 - KEEP) * gradient**2
        own = factor / np.sqrt(mean + EPSILON)
        now -= rate * (gradient + own * gradient**2 * (now - read[peer]))
        np.testing.assert_allclose(server.read("w", peer="c")[0], now, rtol=1e-12)


@pytest.mark.parametrize("init", [{}, {"hash": True}], ids=["dense", "hash"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_rows_are_compensated_by_what_the_worker_looked_up(init, adaptive) -> None:
    server, rate, factor = Asking(), 0.5, 0.3
    server.table("t", (0 if init else 5, 2), "float64", **init)
    config = {"class_name": "SGD", "config": {"learning_rate": rate}}
    server.ask("optimizer", group="g", config=config, names=["t"], compensation=True)
    rows, options = np.array([1, 3]), {"compensation": factor, "adaptive": adaptive}
    read = {p: server.ask("lookup", rows, name="t", peer=p, make=True).arrays[0] for p in "ab"}
    now, mean = read["a"].copy(), np.zeros((2, 2))
    for seed, peer in enumerate("ab"):
        gradient = np.random.default_rng(seed).normal(size=(2, 2))
        server.push(("t", "rows_gradient", [rows, gradient], options), peer=peer)
        mean = KEEP * mean + (1 - KEEP) * gradient**2
        own = factor / np.sqrt(mean + EPSILON) if adaptive else factor
        now -= rate * (gradient + own * gradient**2 * (now - read[peer]))
        np.testing.assert_allclose(
            server.ask("lookup", rows, name="t", peer="c").arrays[0], now, rtol=1e-12
        )
    # Other rows than those that it looked up last, and rows that come twice, go as they are.
    for others in ([3, 1], [3, 3]):
        before = server.ask("lookup", np.array([3, 1]), name="t", peer="c").arrays[0]
        server.push(("t", "rows_gradient", [np.array(others), np.ones((2, 2))], options), peer="b")
        after = server.ask("lookup", np.array([3, 1]), name="t", peer="c").arrays[0]
        moved = [[rate, rate]] if others == [3, 1] else [[2 * rate, 0]]
        np.testing.assert_allclose(before - after, np.array(moved).T * np.ones((2, 2)), rtol=1e-9)


def test_what_was_read_is_kept_of_the_last_peers_alone() -> None:
    server = Asking()
    server.value("w", np.zeros(1))
    server.core.state.backups.keep_all(["w"])
    for number in range(MOST_PEERS + 5):
        server.ask("read", names=["w"], peer="first")
        server.ask("read", names=["w"], peer=f"worker:{number}")
    backups = [server.core.state.backups.get(f"worker:{n}", "w") for n in range(MOST_PEERS + 5)]
    assert [one is not None for one in backups] == [False] * 6 + [True] * (MOST_PEERS - 1)
    assert server.core.state.backups.get("first", "w") is not None


def test_values_and_slots_are_loaded_as_they_were() -> None:
    one, other = Asking(), Asking()
    for server in (one, other):
        server.value("w", np.zeros(3, "f"))
        server.optimizer("Nadam", ["w"], use_ema=True)
    for _ in range(3):
        one.push(("w", "gradient", [np.arange(3, dtype="f")]))
    reply = one.ask("slots", names=["w"])
    arrays = [*one.read("w"), *reply.arrays]
    other.ask("load", *arrays, values=["w"], slots=reply.head["slots"], steps=reply.head["steps"])
    for server in (one, other):
        server.push(("w", "gradient", [np.ones(3, "f")]))
    assert np.array_equal(one.read("w")[0], other.read("w")[0])
    with pytest.raises(mw.ArrayError, match="'w' has no slot 'shine'; it has momentum, velocity"):
        one.ask("load", np.zeros(3, "f"), slots=[["w", ["shine"]]])
    with pytest.raises(
        mw.ArrayError, match=r"slot 'momentum' of 'w' has shape \[3\]; received \[2\]"
    ):
        one.ask("load", np.zeros(2, "f"), slots=[["w", ["momentum"]]])
    with pytest.raises(mw.ArrayError, match=r"'w' has shape \[3\]; received \[2\]"):
        one.ask("load", np.zeros(2, "f"), values=["w"])


def test_a_server_says_who_it_is() -> None:
    server = Asking(ServerCore(3, generation=2))
    server.table("w", [2])
    reply = server.ask("hello", role="worker", task="worker:1", incarnation="x").head
    assert (reply["task"], reply["generation"], reply["names"]) == ("ps:3", 2, ["w"])
    stats = server.ask("stats").head
    assert (stats["variable_bytes"], stats["slot_bytes"], stats["variables"]) == (8, 0, 1)
    server.ask("stop")
    assert server.core.stopped


def test_a_read_may_wait_for_a_version() -> None:
    server = Asking()
    server.value("w", np.zeros(1))
    assert server.ask_later("read", names=["w"], at_least={"version": 2}, id=70) is None
    for _ in range(2):
        assert server.core.ready() == []
        server.push(("w", "add", [np.ones(1)]))
    ((peer, number, answer),) = server.core.ready()
    assert (peer, number, answer.arrays[0].tolist()) == ("worker:0", 70, [2])
    assert server.core.ready() == []


def test_a_read_that_is_sent_again_is_answered_once() -> None:
    server = Asking()
    server.value("w", np.zeros(1))
    for _ in range(2):
        assert server.ask_later("read", names=["w"], at_least=1, id=70) is None
    server.push(("w", "add", [np.ones(1)]))
    assert len(server.core.ready()) == 1


def test_a_core_answers_through_a_channel() -> None:
    channel = MemoryChannel(ServerCore(), "ps:0")
    head = {"name": "w", "shape": [50_000], "dtype": "<f4", "init": {"kind": "zeros"}}
    channel.ask(Message("create", head))
    before = channel.ask(Message("read", {"names": ["w"]})).arrays[0]
    push = {"step": None, "updates": [["w", "add", 1, {}]], "then_read": ["w"]}
    answer = channel.ask(Message("push", push, (np.ones(50_000, "f"),)))
    assert answer.arrays[0].all()
    assert not before.any()
    with pytest.raises(mw.TaskError, match="has no variable 'v'"):
        channel.ask(Message("read", {"names": ["v"]}))


HARMLESS = ("hello", "norms", "stats", "stop")  # they have no fields of their own


def wrong_values(kind: str) -> list[tuple[str, object]]:
    return [
        (field, value) for field in TO_SERVER[kind] for value in (None, -1, 2.5, "x", [[3]], {})
    ]


@pytest.mark.parametrize("kind", sorted(TO_SERVER))
def test_no_malformed_message_ends_a_server_or_changes_what_it_holds(kind: str, tmp_path) -> None:
    server = Asking(ServerCore(snapshot_dir=tmp_path))
    server.value("w", np.ones(3))
    whole = dict.fromkeys(TO_SERVER[kind])
    heads = [{}, *({**whole, name: value} for name, value in wrong_values(kind))]
    heads += [{name: value} for name, value in wrong_values(kind)]
    for head in heads if kind not in HARMLESS else ():
        for arrays in ((), (np.ones(2),)):
            server.core.handle("worker:0", Message(kind, head, arrays))
    for name in ("id", "incarnation"):
        answer = server.core.handle("worker:0", Message(kind, {name: [2]}))
        assert answer is not None
        assert answer.kind == "error"
    assert server.read("w")[0].tolist() == [1, 1, 1]


def test_an_error_inside_a_server_is_not_taken_for_a_malformed_message(monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("inner")

    monkeypatch.setattr(Store, "get", broken)
    with pytest.raises(KeyError, match="inner"):
        Asking().ask("read", names=["w"])
