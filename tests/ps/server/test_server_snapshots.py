"""Snapshots: the whole state in one file, there or not there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from asking import Asking
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.launch.settings import TaskSettings
from meshwright.launch.spec import ClusterSpec, Task
from meshwright.ps.server import saving
from meshwright.ps.server.core import ServerCore
from meshwright.ps.server.loop import serve
from meshwright.ps.server.optimizers import TWINS
from meshwright.ps.server.saving import Saver
from meshwright.ps.server.snapshot import restore, snapshot_of
from meshwright.ps.wire.listener import Listener


def trained(optimizer: str = "Adam", **config) -> Asking:
    server = Asking(ServerCore(1, snapshot_dir="/"))
    server.table("w", [5, 3], kind="normal", seed=1)
    server.table("t", [0, 2], kind="constant", value=2.0, rows=None, hash=True)
    server.table("count", [], "int64")
    server.optimizer(optimizer, ["w", "t"], learning_rate=0.1, **config)
    server.ask("rate", group="g", learning_rate=0.2)
    for step in range(3):
        push(server, step)
    return server


def push(server: Asking, step: int, **head) -> dict:
    random = np.random.default_rng(step)
    keys = random.integers(0, 50 * (step + 1), size=9)
    return server.push(
        ("w", "gradient", [random.normal(size=(5, 3)).astype("f")]),
        ("t", "rows_gradient", [keys, random.normal(size=(9, 2)).astype("f")]),
        ("count", "add", [np.array(1)]),
        step=step,
        **head,
    )


def everything(server: Asking) -> list[np.ndarray]:
    slots = server.ask("slots", names=["w", "t"]).arrays
    return [*server.read("w", "t", "count"), *slots, *server.ask("keys", name="t").arrays]


@pytest.mark.parametrize("optimizer", TWINS)
def test_a_restored_server_goes_on_as_if_nothing_had_been(optimizer, tmp_path) -> None:
    server = trained(optimizer, use_ema=True, gradient_accumulation_steps=2)
    server.ask("fence", incarnation="dead")
    server.ask("snapshot", path=str(tmp_path / "a.snapshot"))
    restored = Asking(ServerCore(1, generation=3, snapshot_dir="/"))
    restored.ask("restore", path=str(tmp_path / "a.snapshot"))
    assert restored.ask("hello").head["generation"] == 3
    assert not push(restored, 1)["applied"], "the ids of applied steps are kept"
    with pytest.raises(mw.ProtocolError, match="declared dead"):
        push(restored, 9, incarnation="dead")
    for step in range(3, 6):
        assert push(server, step)["version"] == push(restored, step)["version"]
    for ours, theirs in zip(everything(restored), everything(server), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
    config = {"learning_rate": 0.1, "use_ema": True, "gradient_accumulation_steps": 2}
    assert not restored.optimizer(optimizer, ["w", "t"], **config)["made"]


def test_what_a_round_holds_is_kept(tmp_path) -> None:
    server = trained()
    push(server, 10, round=0, of=3)
    push(server, 11, round=0, of=3)
    server.ask("snapshot", path=str(tmp_path / "a"))
    restored = Asking(ServerCore(snapshot_dir="/"))
    restored.ask("restore", path=str(tmp_path / "a"))
    for one in (server, restored):
        assert not push(one, 10, round=0, of=3)["applied"]
        push(one, 12, round=0, of=3)
        assert one.ask("stats").head["rounds"] == 1
    assert np.array_equal(everything(restored)[0], everything(server)[0])


@given(st.lists(st.one_of(st.integers(0, 9), st.sampled_from(["snapshot", "crash"])), max_size=40))
def test_whenever_a_server_dies_each_step_counts_once_or_is_lost(events) -> None:
    server = Asking()
    server.value("total", np.zeros((), np.int64))
    taken, acknowledged, steps = snapshot_of(server.core.state, 1).copied(), {}, set()
    for event in events:
        if event == "snapshot":
            taken = snapshot_of(server.core.state, taken.number + 1).copied()
            steps = set(acknowledged)
        elif event == "crash":
            server.core.state = restore(taken.copied())
            version = server.ask("hello").head["version"]
            expected = {step for step, at in acknowledged.items() if at <= version}
            assert expected == steps, "the versions in the answers say what is lost"
            acknowledged = {step: acknowledged[step] for step in expected}
        else:
            reply = server.push(("total", "add", [np.array(1 << event)]), step=event)
            assert reply["applied"] == (event not in acknowledged)
            acknowledged[event] = reply["applied_at"]
        assert server.read("total")[0] == sum(1 << step for step in acknowledged)


def test_a_snapshot_is_of_one_moment() -> None:
    """Also while the server goes on: what is written later is a copy."""
    server = trained()
    before = [array.copy() for array in everything(server)]
    taken = snapshot_of(server.core.state, 1).copied()
    for step in range(3, 6):
        push(server, step)
    server.core.state = restore(taken)
    for ours, theirs in zip(everything(server), before, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("copy_bytes", [0, 1 << 20])
def test_snapshots_are_taken_as_pushes_come(copy_bytes, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(saving, "COPY_BYTES", copy_bytes)
    server = Asking(ServerCore(1))
    saver = Saver(server.core, str(tmp_path), every=4)
    server.value("w", np.zeros(2))
    saver.tick(idle=True)
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["ps1.snapshot"]
    lost = set()
    for step in range(10):
        reply = server.push(("w", "add", [np.ones(2)]), step=step)
        saver.tick(idle=False)
        saver.wait()
        lost = {step for step in lost | {step} if step + 1 > reply["snapshot"]["version"]}
    assert server.ask("stats").head["snapshots"] == 3
    assert server.ask("hello").head["snapshot"] == {"id": 3, "version": 8}
    again = ServerCore(1, generation=1)
    assert Saver(again, str(tmp_path), every=4).restore()
    assert Asking(again).read("w")[0].tolist() == [8, 8]
    assert lost == {8, 9}, "what a client keeps of the answers is what a crash loses"
    assert Asking(again).ask("hello").head["version"] == 8


def test_a_server_without_pushes_keeps_its_variables(tmp_path) -> None:
    core = ServerCore()
    saver = Saver(core, str(tmp_path), every=None)
    Asking(core).value("w", np.ones(2))
    saver.tick(idle=False)
    assert not list(tmp_path.iterdir()), "more variables may be on their way"
    Asking(core).push(("w", "add", [np.ones(2)]), step=0)
    saver.tick(idle=False)
    saver.wait()
    assert (tmp_path / "ps0.snapshot").exists()
    saver.tick(idle=True)
    saver.wait()
    assert core.state.snapshot.number == 1


def test_a_full_disk_is_told_and_not_tried_at_every_push(tmp_path, monkeypatch) -> None:
    core = ServerCore()
    saver = Saver(core, str(tmp_path), every=3)
    Asking(core).value("w", np.zeros(2))
    tried = []

    def full(snapshot, path) -> None:
        tried.append(snapshot.version)
        raise mw.CheckpointError("no room")

    monkeypatch.setattr(saving, "write", full)
    monkeypatch.setattr(saving, "COPY_BYTES", 0)

    def train() -> None:
        for step in range(8):
            Asking(core).push(("w", "add", [np.ones(2)]), step=step)
            saver.tick(idle=False)
            saver.tick(idle=True)

    with pytest.warns(mw.MeshwrightWarning, match="no room"):
        train()
    assert tried == [1, 4, 7]
    assert core.state.snapshot.version == 0


def test_fences_outlive_a_crash_before_the_next_snapshot(tmp_path) -> None:
    core = ServerCore()
    saver = Saver(core, str(tmp_path), every=None)
    Asking(core).ask("fence", incarnation="dead")
    saver.keep_fences()
    again = ServerCore(generation=1)
    assert not Saver(again, str(tmp_path), every=None).restore()
    with pytest.raises(mw.ProtocolError, match="declared dead"):
        Asking(again).ask("hello", incarnation="dead")


def test_a_full_disk_ends_no_server_and_fences_are_tried_again(tmp_path, monkeypatch) -> None:
    core = ServerCore()
    saver = Saver(core, str(tmp_path), every=None)
    Asking(core).ask("fence", incarnation="dead")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        saver.keep_fences()
        saver.tick(idle=True)
        assert "No space left" in Asking(core).ask("stats").head["save_fault"]
    with pytest.raises(mw.ProtocolError, match="declared dead"):
        Asking(core).ask("hello", incarnation="dead")
    monkeypatch.setattr("meshwright.ps.server.saving._TRY_AGAIN_S", 0.0)
    saver.tick(idle=True)
    saver.tick(idle=True)
    assert Asking(core).ask("stats").head["save_fault"] == ""
    again = ServerCore(generation=1)
    Saver(again, str(tmp_path), every=None).restore()
    assert again.state.fences.fenced == {"dead"}


def test_what_another_cluster_left_is_not_restored(tmp_path) -> None:
    for _ in range(2):
        core = ServerCore()
        saver = Saver(core, str(tmp_path), every=None)
        saver.begin()
        Asking(core).value("w", np.ones(2))
        Asking(core).ask("fence", incarnation="dead")
        saver.keep_fences()
        saver.save()
        saver.wait()
    Saver(ServerCore(), str(tmp_path), every=None).begin()
    assert [path.name for path in tmp_path.iterdir()] == ["ps0.former"]
    again = ServerCore(generation=1)
    assert not Saver(again, str(tmp_path), every=None).restore()
    assert not again.state.fences.fenced


def test_nothing_is_kept_without_a_directory() -> None:
    core = ServerCore()
    saver = Saver(core, None, every=1)
    Asking(core).value("w", np.ones(2))
    Asking(core).ask("fence", incarnation="dead")
    saver.begin()
    saver.keep_fences()
    saver.tick(idle=True)
    assert not saver.restore()
    assert core.state.snapshot.number == 0


def test_a_server_that_cannot_listen_leaves_the_snapshot_of_the_one_that_does(tmp_path) -> None:
    address = f"ipc://{tmp_path}/ps"
    jobs = {"chief": [f"ipc://{tmp_path}/c"], "worker": [f"ipc://{tmp_path}/w"], "ps": [address]}
    (tmp_path / "ps0.snapshot").write_bytes(b"of the first")
    with Listener(address), pytest.raises(mw.ClusterError, match="ps:0 cannot listen"):
        serve(TaskSettings(Task("ps", 0), ClusterSpec(jobs), snapshot_dir=str(tmp_path)))
    assert (tmp_path / "ps0.snapshot").read_bytes() == b"of the first"


def test_the_former_snapshot_stays_until_the_next_is_whole(tmp_path, monkeypatch) -> None:
    server, path = trained(), tmp_path / "a"
    server.ask("snapshot", path=str(path))
    former = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    push(server, 3)
    message = "snapshot of ps:1 .* cannot be written to .*: No space left .* one before is still"
    with pytest.raises(mw.CheckpointError, match=message):
        server.ask("snapshot", path=str(path))
    assert path.read_bytes() == former
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_damage_is_noticed(tmp_path) -> None:
    path = tmp_path / "a"
    trained().ask("snapshot", path=str(path))
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for place in [30, len(whole) - 20, *random.integers(25, len(whole), 20)]:
        damaged = bytearray(whole)
        damaged[place] ^= 0x40
        expect_damage(path, bytes(damaged))
    for length in (26, len(whole) // 2, len(whole) - 1):
        expect_damage(path, whole[:length])
    path.write_bytes(b"something else")
    with pytest.raises(mw.CheckpointError, match="is not a server snapshot of this version"):
        Asking(ServerCore(snapshot_dir="/")).ask("restore", path=str(path))
    with pytest.raises(mw.CheckpointError, match="cannot be read: No such file"):
        Asking(ServerCore(snapshot_dir="/")).ask("restore", path=str(tmp_path / "missing"))


def expect_damage(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(mw.CheckpointError, match=r"is damaged: .*\. It cannot be used"):
        Asking(ServerCore(snapshot_dir="/")).ask("restore", path=str(path))


def test_nothing_is_pickled(tmp_path) -> None:
    trained().ask("snapshot", path=str(tmp_path / "a"))
    assert b"numpy" not in (tmp_path / "a").read_bytes()


@pytest.mark.parametrize("kind", ["snapshot", "restore"])
@pytest.mark.parametrize("path", ["../a", "/etc/a", "link/a", ""])
def test_no_message_names_a_file_outside_of_the_directory(kind, path, tmp_path) -> None:
    inside = tmp_path / "snapshots"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path)
    server = Asking(ServerCore(snapshot_dir=inside))
    with pytest.raises(mw.TaskError, match="writes and reads snapshots inside"):
        server.ask(kind, path=path)
    assert [one.name for one in tmp_path.iterdir()] == ["snapshots"]
    with pytest.raises(mw.TaskError, match="has no directory for snapshots"):
        Asking().ask(kind, path="a")
    server.ask("snapshot", path="deeper/a")
    server.ask("restore", path="deeper/a")
