"""Two processes that differ in one thing are stopped before the first step, by one error."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agreeing
import keras
import numpy as np
import pytest
import zmq
from ports import free_address, free_ports
from watching import soon_enough

import meshwright as mw
from meshwright import AgreementError, ProcessError
from meshwright.launch.agreement import Attendance, Meeting, Party, clock_note, differences
from meshwright.launch.outlines import Outlined

LIMIT_S = 90


@functools.cache
def imported() -> multiprocessing.context.ForkServerContext:
    """Starts processes as copies of one that has imported everything and touched no device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["agreeing", *agreeing.IMPORTS])
    return context


def run(folder: Path, *changes: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """What each process has raised: class, message, when it came to ``fit``, when it raised."""
    address = f"127.0.0.1:{free_ports(2)[0]}"
    processes = [
        imported().Process(
            target=agreeing.main,
            args=(rank, address, str(folder), {"waits_for": len(changes), **changed}),
        )
        for rank, changed in enumerate(changes)
    ]
    for process in processes:
        process.start()
    until_s = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, until_s - time.monotonic()))
        process.kill()
        process.join()
        process.close()
    reports = [folder / f"rank{rank}.json" for rank in range(len(changes))]
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    assert all(report.exists() for report in reports), logs
    return [json.loads(report.read_text()) for report in reports]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"activation": "tanh"},
            r"layer \S*dense \(Dense\), activation: relu on rank 0 \(host .*, tanh on rank 1",
        ),
        *(
            pytest.param(changed, says, marks=pytest.mark.full, id=next(iter(changed)))
            for changed, says in [
                ({"seed": 4}, r"seed \(python\): state \w+ on rank 0 .* on rank 1"),
                ({"data": 1}, r"data x: \(64, 8\) float32 \w+ on rank 0"),
                ({"processes": 3}, r"processes: 2 where the group meets, 3 on rank 1"),
                ({"mesh": {"batch": 2, "model": 2}}, r"mesh: .*'batch': 4.* on rank 0"),
                ({"batch_size": 16}, r"batch size: 8 on rank 0 .*, 16 on rank 1"),
                ({"rows": 72}, r"data x: \(64, 8\) .* on rank 0 .*, \(72, 8\)"),
                ({"learning_rate": 0.02}, r"the value of \S+: 0\.01 on rank 0 .*, 0\.02 on rank 1"),
                ({"zero": 1}, r"strategy, zero: .* on rank 0 .* on rank 1"),
                ({"width": 32}, r"layer \S*dense \(Dense\), units: 16 on rank 0 .*, 32 on rank 1"),
                ({"epochs": 3}, r"epochs: 0 to 2 on rank 0 .*, 0 to 3 on rank 1"),
                ({"checkpoint": "elsewhere"}, r"checkpoint: none on rank 0"),
                ({"versions": {"jaxlib": "0.9.0"}}, r"jaxlib: .* on rank 0 .*, 0\.9\.0 on rank 1"),
                ({"order": [8, 0]}, r"first batch: \(8, 8\) float32 .* on rank 0 .* on rank 1"),
                (
                    {"bends": "tanh"},
                    r"step, first at part \d+ of \d+: \S*agreeing.py:\d+: v\d+:float32\[\d+, 16\] "
                    r"= custom_jvp.* on rank 0 .*, \S*agreeing.py:\d+: .* = tanh .* on rank 1",
                ),
                ({"evaluates": 16}, r"batch size: 8 on rank 0 .*, 16 on rank 1"),
                ({"rank": 0}, r"two processes have rank 0: host \S+, pid \d+, and host \S+, pid"),
            ]
        ),
    ],
)
def test_a_difference_is_one_error_on_all(tmp_path, changed, says):
    if "checkpoint" in changed:
        changed = {"checkpoint": str(tmp_path / "elsewhere")}
    both = {"order": [0, 8], "evaluates": 8}
    first = {name: both[name] for name in changed if name in both}

    def from_arrival_to_error_s(folder: Path) -> float:
        raised = run(folder, first, changed)
        assert [kind for kind, *_ in raised] == ["AgreementError"] * 2, raised
        if "processes" not in changed:
            assert raised[0][1] == raised[1][1]
        assert all(re.search(says, text) for _, text, *_ in raised), raised[0][1]
        last_arrival_s = max(arrived_s for *_, arrived_s, _ in raised)
        return max(raised_s for *_, raised_s in raised) - last_arrival_s

    assert soon_enough(5.0, tmp_path, from_arrival_to_error_s)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            np.float32(0.1),
            r"the value of \S*rate is another in each process, and here it is 0\.1\.",
        ),
        (np.ones([2, 3], "f"), r"here it is \(2, 3\) float32 \w{8}\."),
        (np.float32("nan"), r"the value of \S*rate has NaN"),  # JAX finds them unequal, too
    ],
)
def test_another_value_is_named_where_nothing_is_compared(monkeypatch, value, says):
    def put(*_: Any) -> Any:
        raise AssertionError("value passed to device_put is not the same on each process")

    strategy = mw.DataParallel(mw.create_mesh({"batch": -1}))
    with strategy.scope():
        rate = keras.Variable(value * 2, name="rate")
        monkeypatch.setattr("keras.src.backend.jax.distribution_lib.distribute_tensor", put)
        with pytest.raises(AgreementError, match=says) as caught:
            rate.assign(value)
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.alone
@pytest.mark.full
def test_processes_that_agree_train_and_another_number_of_devices_is_a_mesh_error(tmp_path):
    assert [kind for kind, *_ in run(tmp_path, {}, {})] == ["NoneType"] * 2
    for path in tmp_path.glob("*.json"):
        path.unlink()
    raised = run(tmp_path, {}, {"devices": 1})
    assert [kind for kind, *_ in raised] == ["MeshError"] * 2, raised


@pytest.mark.alone
@pytest.mark.full
def test_a_process_that_never_comes_is_named_and_one_switch_compares_nothing(tmp_path):
    ((kind, text, arrived_s, raised_s),) = run(tmp_path, {"wait_s": 1})
    assert kind == "ProcessError"
    assert "rank 1 of 2 has not come within 1 s; rank 0 (host" in text
    assert raised_s - arrived_s < 6
    (tmp_path / "rank0.json").unlink()
    without = {"agree": "0", "seed": 4}
    assert [kind for kind, *_ in run(tmp_path, {"agree": "0"}, without)] == ["NoneType"] * 2


# The meeting, without JAX


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/meeting"


@contextlib.contextmanager
def attending(address: str, rank: int, pid: int = 1, processes: int = 2) -> Iterator[Attendance]:
    attendance = Attendance(address, Party(rank, "n01", pid, {}), processes, wait_s=1.0)
    with contextlib.closing(attendance):
        yield attendance


def test_one_that_never_comes_is_named_after_the_time_that_was_asked(address):
    with (
        contextlib.closing(Meeting(address, 3, wait_s=0.5)),
        attending(address, 0, 11, 3) as first,
        attending(address, 2, 12, 3) as last,
    ):
        began_s = time.monotonic()
        first.say({})
        last.say({})
        for attendance in (first, last):
            with pytest.raises(ProcessError, match=r"rank 1 of 3 has not come within 0.5 s") as e:
                attendance.answer()
            assert e.value.rank == 1
        assert 0.5 <= time.monotonic() - began_s < 3


def test_all_learn_what_the_clock_of_rank_0_says(address):
    with contextlib.closing(Meeting(address, 1)), attending(address, 0, processes=1) as only:
        assert abs(only.agree({})["clock_s"] - time.time()) < 60
    note = clock_note(Party(1, "n02", 7, {}), 3600.4)
    assert note.startswith("the clock of rank 1 (host n02, pid 7) is 3600 s ahead of that of rank")
    assert not clock_note(Party(1, "n02", 7, {}), -4.0)


def test_two_processes_with_one_rank_are_named(address):
    with (
        contextlib.closing(Meeting(address, 2)),
        attending(address, 0, pid=11) as one,
        attending(address, 0, pid=12) as other,
    ):
        one.say({})
        other.say({})
        for attendance in (one, other):
            with pytest.raises(AgreementError, match=r"two processes have rank 0: .*pid 1\d, "):
                attendance.answer()


def test_rank_0_that_does_not_answer_is_named(address):
    with (
        attending(address, 1) as attendance,
        pytest.raises(ProcessError, match=r"rank 0 does not answer rank \d .* at ipc://"),
    ):
        attendance.agree({})


def test_the_address_of_a_meeting_can_be_used_once():
    port = f"tcp://{free_address()}"
    with contextlib.closing(Meeting(port, 2)), pytest.raises(zmq.ZMQError):
        Meeting(port, 2)


def test_the_first_part_of_a_long_text_that_differs_is_named_by_all(address):
    texts = [[(f"v{n} = add", f"train.py:{n}: v{n} = add") for n in range(5000)] for _ in range(3)]
    texts[1][4000] = ("v4000 = mul", "train.py:4000: v4000 = mul")
    texts[2] = texts[2][:4999]  # further on, where they do not matter any more
    said: list[str] = []

    def attend(rank: int) -> None:
        with attending(address, rank, pid=1, processes=3) as attendance:
            try:
                attendance.agree({"step": Outlined(f"program {rank}", lambda: texts[rank])})
            except AgreementError as error:
                said.append(str(error))

    with contextlib.closing(Meeting(address, 3)):
        threads = [threading.Thread(target=attend, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(said) == 3
    assert len(set(said)) == 1
    expected = (
        r"step, first at part 4001 of 5000: train.py:4000: v4000 = add on rank 0 \(.*\) and 1 "
        r"more, train.py:4000: v4000 = mul on rank 1"
    )
    assert re.search(expected, said[0]), said[0]


def test_a_process_that_does_not_say_what_differs_leaves_the_difference_itself(
    address, monkeypatch
):
    monkeypatch.setattr("meshwright.launch.agreement._SEARCH_S", 0.3)
    with (
        contextlib.closing(Meeting(address, 2)),
        attending(address, 0) as one,
        attending(address, 1) as other,
    ):
        one.say({"step": Outlined("program 1", list)})
        other.say({"step": Outlined("program 2", list)})
        with pytest.raises(AgreementError, match=r"step: program 1 on rank 0 .* program 2"):
            one.answer()  # the other says nothing


def test_fields_that_few_have_are_compared_among_those_few():
    parties = [
        Party(0, "n01", 1, {"weight a[0:4]": "x", "layer": '{"units": 3, "bias": true}'}),
        Party(1, "n01", 2, {"weight a[4:8]": "y", "layer": '{"units": 4, "bias": true}'}),
        Party(2, "n02", 3, {"weight a[4:8]": "z", "layer": '{"units": 4, "bias": true}'}),
    ]
    assert differences(parties) == [
        "layer, units: 3 on rank 0 (host n01, pid 1), 4 on rank 1 (host n01, pid 2) and 1 more",
        "weight a[4:8]: y on rank 1 (host n01, pid 2), z on rank 2 (host n02, pid 3)",
    ]
