"""``meshwright launch --processes``: real groups, and what is said when one process fails."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from keras_script import SETTING
from ports import free_address, free_port
from watching import all_gone, soon_enough, within, write_fake_ssh

import meshwright as mw
from meshwright import ClusterError
from meshwright.launch import join
from meshwright.launch.group import run_group
from meshwright.launch.group_options import GroupOptions
from meshwright.launch.holdups import Holdups
from meshwright.launch.hosts import run_on_hosts
from meshwright.launch.idleness import _descendants, of_all
from meshwright.launch.limits import Limits
from meshwright.launch.native_waits import NativeWait, waits_natively
from meshwright.launch.outside import stack_from
from meshwright.launch.progress import Board, Progress, new_board, read_board, report_to
from meshwright.launch.signals import Stopping
from meshwright.launch.stalls import Seen, learn, stalls
from meshwright.launch.standstill import Standstill
from meshwright.launch.stragglers import Stragglers
from meshwright.launch.supervision import Event
from meshwright.launch.watch import Watch, task_of
from meshwright.run.counted_step import CountedStep

PROGRAM = str(Path(__file__).parent / "grouped.py")
STALL_S, SCRIPT_S = 2.0, 6.0


def grouped(folder: Path, how: str, fails: int = 1, **options: Any) -> int:
    arguments = [PROGRAM, str(folder), how, str(fails)]
    return run_group(arguments, GroupOptions(2, 2, stall_s=STALL_S, script_s=SCRIPT_S, **options))


@pytest.mark.alone
def test_a_group_trains_with_prefixed_lines_and_a_file_for_each_rank(tmp_path, capfd):
    assert grouped(tmp_path, "nothing", log_dir=tmp_path / "logs") == 0
    out, err = capfd.readouterr()
    losses = re.findall(r"^\[rank:(\d)\] loss (\S+) 2 4$", out, re.MULTILINE)
    assert sorted(rank for rank, _ in losses) == ["0", "1"]
    assert losses[0][1] == losses[1][1]
    assert "Gloo" not in out + err
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(2)]
    assert all(re.search(r"^loss \S+ 2 4$", text, re.MULTILINE) for text in logs), logs
    assert "Gloo" not in "".join(logs)


@pytest.mark.alone
@pytest.mark.full
def test_the_launcher_passes_on_that_nothing_is_compared(tmp_path, capfd):
    program = tmp_path / "train.py"
    program.write_text(
        "import meshwright as mw\nfrom meshwright.launch.join import compared_member\n"
        "print('compares', compared_member() is not None)\n"
    )
    assert run_group([str(program)], GroupOptions(2, 1, agree=False)) == 0
    assert capfd.readouterr().out.count("compares False") == 2


@pytest.mark.alone
@pytest.mark.parametrize(
    ("how", "fails", "code", "limit_s", "says"),
    [
        ("kill", 0, 137, 1.0, r"was killed by signal 9 after step 60\b"),
        pytest.param("raise", 1, 1, 1.0, "raised an exception after step", marks=pytest.mark.full),
        pytest.param("exit 3", 1, 3, 1.0, "raised an exception after step", marks=pytest.mark.full),
        pytest.param("stop", 0, 1, STALL_S + 5, "is stopped", marks=pytest.mark.full),
        pytest.param("exit", 1, 1, STALL_S + 5, "has ended, and rank 0", marks=pytest.mark.full),
        pytest.param("uneven", 1, 1, STALL_S + 5, "has ended, and rank 0", marks=pytest.mark.full),
        pytest.param("gil", 1, 1, STALL_S + 5, "is stuck in 'input'", marks=pytest.mark.full),
        pytest.param("asleep", 1, 1, SCRIPT_S + 5, "does nothing in '", marks=pytest.mark.full),
    ],
)
def test_the_others_learn_which_process_failed_and_where(
    tmp_path, capfd, how, fails, code, limit_s, says
):
    def named_after_s(folder: Path) -> float:
        assert grouped(folder, how, fails) == code
        out, err = capfd.readouterr()
        actual = json.loads((folder / "seen").read_text())
        assert actual["rank"] == fails
        assert (folder / f"left{1 - fails}").exists()  # its ``finally`` block has run
        pid, text = actual["pid"], actual["text"]
        assert re.search(rf"rank {fails} of 2 \(host \S+, pid {pid}\) {says}", text)
        own = [line for line in err.splitlines() if line.startswith("meshwright launch: ")]
        assert f"pid {pid}" in own[0]
        assert "meshwright.errors.ProcessError" in out
        if how in ("raise", "exit 3", "gil", "asleep"):
            assert "grouped.py" in actual["stack"]
            assert ("meet" if how == "asleep" else "fail") in actual["stack"]
        if how == "asleep":  # it is named long before
            assert f"rank {fails}" in own[0]
            assert "while rank 0 waits for it; it does nothing there" in own[0]
        if how == "raise":
            assert err.rstrip().endswith("OSError: a file of rows is damaged")
        assert all_gone([pid])()
        return actual["at"] - json.loads((folder / "failed").read_text())

    assert soon_enough(limit_s, tmp_path, named_after_s)


@pytest.mark.alone
@pytest.mark.full
def test_a_rank_that_is_only_late_is_named_and_goes_on(tmp_path, capfd, monkeypatch):
    # It compiles for 4 s and is stopped for 1 s three times, while a step may take 2 s.
    monkeypatch.setattr("meshwright.launch.watch.STRAGGLER_S", 2.0)
    assert grouped(tmp_path, "late") == 0
    out, err = capfd.readouterr()
    assert len(re.findall(r"^\[rank:\d\] loss", out, re.MULTILINE)) == 2
    slow = re.findall(r"rank (\d) of 2 \(.*\) is slow: for \d+% of the last .* in '(.*)'", err)
    assert ("1", "input") in slow, err
    assert {rank for rank, _ in slow} == {"1"}
    assert "grouped.py" in err  # where it is


@pytest.mark.alone
@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_however_the_launcher_ends_nothing_is_left(tmp_path, number, code):
    program = tmp_path / "train.py"
    program.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    command = [sys.executable, "-m", "meshwright.cli", "launch", "--processes", "2", str(program)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as out:
        pids = [int(out.readline().split()[1]) for _ in range(2)]
        process.send_signal(number)
        assert process.wait(20) == code
    assert within(10.0, all_gone(pids))


@pytest.mark.alone
def test_a_program_that_never_joins_is_named(tmp_path, capfd):
    def named_after_s(folder: Path) -> float:
        (program := folder / "train.py").write_text("import time; time.sleep(100)")
        began_s = time.monotonic()
        assert run_group([str(program)], GroupOptions(2, join_s=1.0)) == 1
        assert "rank 0 of 2" in (err := capfd.readouterr().err)
        assert "does the program import meshwright" in err
        return time.monotonic() - began_s

    assert soon_enough(5.0, tmp_path, named_after_s)


def test_what_cannot_be_started_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ClusterError, match=r"no program 'nowhere\.py'"):
        run_group(["nowhere.py"], GroupOptions(2))
    with pytest.raises(ClusterError, match=r"processes must be 1 or more.*\n.*stall_s must be"):
        GroupOptions(0, stall_s=-1)
    with pytest.raises(ClusterError, match=r"folder for logs cannot be made.*--log-dir"):
        run_group([PROGRAM], GroupOptions(2, log_dir=Path("/dev/null/logs")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ClusterError, match=r"3 GPUs \(0, 1, 2\) cannot be shared out evenly among"):
        run_group([PROGRAM], GroupOptions(2))


# The rule, without processes


def seen(rank: int, section: str, step: int, **outside_s: float) -> Seen:
    return Seen(rank, Progress(section, step, 0.0, pid=1), **outside_s)


def later(rank: int, section: str, step: int, since_s: float) -> Seen:
    return Seen(rank, Progress(section, step, since_s, pid=1))


@pytest.mark.parametrize(
    ("ranks", "after_s", "blamed"),
    [
        ([seen(0, "step", 80), seen(1, "step", 80)], 9.0, []),
        ([seen(0, "step", 81), seen(1, "input", 80)], 11.0, [1]),
        ([seen(0, "step", 80), seen(1, "batch callbacks", 80)], 11.0, [1]),
        ([seen(0, "step", 81), seen(1, "step", 80)], 11.0, [1]),
        ([seen(0, "batch callbacks", 81), seen(1, "input", 80)], 11.0, [1]),
        ([seen(0, "batch callbacks", 81), seen(1, "exit", 80)], 11.0, [1]),
        ([seen(0, "batch callbacks", 80), seen(1, "batch callbacks", 80)], 59.0, []),
        ([seen(0, "batch callbacks", 81), seen(1, "compile", 80)], 59.0, []),
        ([later(0, "batch callbacks", 81, 5.0), seen(1, "input", 80)], 14.0, []),  # not late yet
        ([seen(0, "step", 80), seen(1, "step", 80)], 11.0, []),  # a long step, perhaps
        ([seen(0, "step", 80), seen(1, "step", 80)], 61.0, [0, 1]),
        ([seen(0, "input", 80), seen(1, "input", 80)], 11.0, []),  # none waits for another
        ([seen(0, "input", 80), seen(1, "input", 80)], 61.0, [0, 1]),
        ([seen(0, "step", 80), seen(1, "compile", 79)], 30.0, []),
        ([seen(0, "step", 80), seen(1, "compile", 79)], 1801.0, [1]),
        ([seen(0, "step", 80), seen(1, "exit", 79)], 11.0, [1]),
        ([seen(0, "script", 80), seen(1, "exit", 80)], 10_000.0, []),
        ([seen(0, "script", 0), seen(1, "script", 0)], 10_000.0, []),
        ([seen(0, "step", 80), seen(1, "script", 80)], 30.0, []),
        ([seen(0, "step", 80), seen(1, "script", 80)], 601.0, [1]),
        ([seen(0, "input", 80), seen(1, "compile", 79, stopped_s=11.0)], 1.0, [1]),
        ([seen(0, "input", 80), seen(1, "step", 79, stopped_s=2.0)], 2.0, []),
        ([seen(0, "launch", 0), seen(1, "join", 0)], 61.0, [0]),
        # Loops that enter no section: who waits is seen from outside.
        ([seen(0, "script", 0, waits_s=61.0), seen(1, "exit", 0)], 900.0, [1]),
        ([seen(0, "script", 9, waits_s=61.0), seen(1, "script", 8)], 900.0, []),  # it may save
        ([seen(0, "script", 9, waits_s=601.0), seen(1, "script", 8)], 900.0, [1]),
        ([seen(0, "script", 9, waits_s=9e3), seen(1, "script", 8, waits_s=9e3)], 9e3, []),
        ([seen(0, "script", 0, waits_s=61.0), seen(1, "exit", 0), seen(2, "script", 0)], 9e2, []),
        ([seen(0, "script", 0, waits_s=61.0), seen(1, "compile", 0)], 900.0, []),
        ([seen(0, "script", 90, waits_s=61.0), seen(1, "step", 9), seen(2, "input", 8)], 61.0, [2]),
        # Code of the program's own: one that does nothing is not waited for as long.
        ([seen(0, "barrier", 8), seen(1, "script", 8, idle_s=121.0)], 121.0, [1]),
        ([seen(0, "barrier", 8), seen(1, "script", 8, idle_s=119.0)], 121.0, []),
        ([seen(0, "barrier", 8), seen(1, "script", 8)], 290.0, []),  # it works
        ([later(0, "barrier", 8, 10.0), seen(1, "script", 8, idle_s=121.0)], 121.0, []),
        ([seen(0, "exit", 8), seen(1, "script", 8, idle_s=121.0)], 121.0, [1]),
        ([seen(0, "exit", 8), seen(1, "script", 8)], 10_000.0, []),
        ([seen(0, "step", 9), seen(1, "callbacks", 8, idle_s=121.0)], 121.0, [1]),
        ([seen(0, "callbacks", 8, waits_s=121.0), seen(1, "callbacks", 8, idle_s=121)], 121.0, [1]),
        ([seen(0, "callbacks", 8, waits_s=610.0), seen(1, "callbacks", 8)], 610.0, [1]),
        ([seen(0, "script", 8, idle_s=900.0), seen(1, "script", 8, idle_s=900.0)], 900.0, []),
        ([seen(0, "script", 8), seen(1, "script", 8, idle_s=900.0)], 900.0, []),  # none waits
        ([seen(0, "barrier", 8), seen(1, "script", 8, idle_s=130), seen(2, "script", 8)], 130, []),
        ([seen(0, "barrier", 8), seen(1, "script", 8, idle_s=130), seen(2, "compile", 8)], 130, []),
    ],
)
def test_only_those_that_hold_the_others_up_are_blamed(ranks, after_s, blamed):
    assert [s.rank for s in stalls(ranks, Limits(steps=100), after_s)] == blamed


def test_a_rank_for_which_loops_of_their_own_wait_is_named_long_before_it_is_ended():
    ranks, watch = [seen(0, "script", 0, waits_s=61.0), seen(1, "script", 0)], Stragglers(10.0)
    assert [watch.look(ranks, now_s) for now_s in (0.0, 5.0)] == [None, None]
    assert str(watch.look(ranks, 10.0)).endswith("mostly while it was in 'script'")
    ranks = [seen(0, "script", 0), seen(1, "script", 0)]
    assert [watch.look(ranks, now_s) for now_s in (15.0, 20.0)] == [None, None]


def test_a_rank_that_does_nothing_while_others_wait_is_named_once_and_early():
    waits, elsewhere = seen(0, "barrier", 8), seen(1, "script", 8, idle_s=11.9)
    holdups = Holdups(Limits())
    assert not holdups.look([waits, elsewhere], 11.9)
    (named,) = holdups.look([waits, elsewhere], 12.1)
    assert named.rank == 1
    assert str(named).endswith(
        "does nothing there, and after 120 s of that the group ends "
        "(--script-timeout, MESHWRIGHT_SCRIPT_TIMEOUT)"
    )
    assert not holdups.look([waits, elsewhere], 100.0)
    assert not Holdups(Limits()).look([seen(0, "script", 8), elsewhere], 1000.0)


def test_one_that_left_quietly_is_named_beside_the_exception_of_another(tmp_path):
    """``os._exit(0)``: the sum of the others breaks off, and would be blamed alone."""
    for rank in range(2):
        new_board(join.board_path(tmp_path, rank))
        Board(join.board_path(tmp_path, rank)).write("script")
    join.error_path(tmp_path, 0).write_text("ValueError: Gloo AllGather failed")
    ended = SimpleNamespace(events=(Event(1.0, task_of(1), "ended", 0),), pid=lambda _: os.getpid())
    logs: Any = SimpleNamespace(last_lines=lambda *_, **__: ())
    failure = Watch(range(2), 2, tmp_path, cast("Any", ended), logs, Limits()).look(None)
    assert failure is not None
    assert failure.rank == 0
    assert "; rank 1 had ended by then, with exit code 0." in failure.text()


def test_limits_in_the_environment_are_checked_all_at_once(monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_STALL_TIMEOUT", "soon")
    monkeypatch.setenv("MESHWRIGHT_SCRIPT_TIMEOUT", "-3")
    with pytest.raises(ClusterError, match=r"STALL_TIMEOUT.*received 'soon'(.|\n)*SCRIPT.*-3"):
        join._agent_limits_s()
    monkeypatch.setenv("MESHWRIGHT_STALL_TIMEOUT", "4")
    monkeypatch.delenv("MESHWRIGHT_SCRIPT_TIMEOUT")
    assert join._agent_limits_s() == (4.0, 120.0)


def test_a_process_that_sleeps_does_nothing_and_one_whose_child_computes_does(monkeypatch):
    monkeypatch.setattr("meshwright.launch.standstill._EVERY_S", 0.02)
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("only Linux says what a process does")
    sleeps = subprocess.Popen(["sleep", "60"])
    works = subprocess.Popen(["sh", "-c", "sh -c 'while :; do :; done' & wait"])
    idle_s = {sleeps.pid: Standstill(of_all), works.pid: Standstill(of_all)}
    looks = list[float]()
    try:
        # A second of a core, or of waiting for one: a tenth of that is seen.
        while (sample := of_all(works.pid, 0.0)) is not None and sample.all_ran_s < 1.0:
            looks = [idleness.look(pid, time.monotonic()) for pid, idleness in idle_s.items()]
            time.sleep(0.05)
    finally:
        for pid in (*_descendants(works.pid), works.pid, sleeps.pid):
            os.kill(pid, signal.SIGKILL)
        works.wait()
        sleeps.wait()
    assert looks[1] < looks[0] / 2


def test_a_process_that_writes_to_a_slow_disk_does_something(tmp_path):
    if not Path("/proc/self/io").exists():
        pytest.skip("only Linux says what a process has written")
    before = of_all(os.getpid(), 0.0)
    (tmp_path / "checkpoint").write_bytes(bytes(20 << 20))
    after = of_all(os.getpid(), 0.0)
    assert before is not None
    assert after is not None
    assert after.all_ran_s - before.all_ran_s >= 16.0


def test_a_stack_is_the_newest_that_the_rank_has_written(tmp_path):
    form = 'Current thread 0x1 (most recent call first):\n  File "a.py", line {} in f\n'
    path = tmp_path / "stack"
    for line in (1, 2):
        stack = stack_from(path, functools.partial(append, path, form.format(line)))
        assert stack == f'  File "a.py", line {line} in f'


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_line_that_takes_a_lock_does_not_wait_in_jax(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("loss.block_until_ready()\nlock.acquire()\nwith lock:\n    pass\n")
    actual = [waits_natively(f'File "{program}", line {line} in main') for line in (1, 2, 3)]
    assert actual == [True, False, False]


def test_a_wait_of_the_main_thread_in_native_code_is_seen_from_outside(monkeypatch):
    monkeypatch.setattr("meshwright.launch.standstill._EVERY_S", 0.02)
    monkeypatch.setattr("meshwright.launch.standstill._ALL_RUN_S", 2.0)  # of other tests' threads
    if not Path("/proc/self/wchan").exists():
        pytest.skip("only Linux says where a thread waits")
    actual = {}

    def watch(stack: str, lock: Any) -> None:
        wait, until_s = NativeWait(0.1, lambda: stack), time.monotonic() + 1.0
        while not actual.get(stack) and time.monotonic() < until_s:
            actual[stack] = wait.look(os.getpid(), time.monotonic())
            time.sleep(0.01)
        lock.release()

    for stack in ('File "train.py", line 7 in main', f'File "{threading.__file__}", line 7 in x'):
        lock = threading.Lock()
        lock.acquire()
        threading.Thread(target=watch, args=(stack, lock)).start()
        lock.acquire()
    assert [waits_s > 0.1 for waits_s in actual.values()] == [True, False]


def test_steps_of_a_loop_of_the_programs_own_are_counted(tmp_path):
    new_board(tmp_path / "board")
    board = Board(tmp_path / "board")
    report_to(board)
    try:
        board.write("script")
        mw.begin_step()
        step = CountedStep(lambda x: x + 1)
        assert step(np.ones(2))[0] == 2.0
        assert jax.jit(step)(np.ones(2))[0] == 2.0  # it is only traced
        progress = read_board(tmp_path / "board")
        assert (progress.section, progress.step) == ("script", 2)
        board.write("batch callbacks")
        mw.begin_step()  # of training inside of training
        assert read_board(tmp_path / "board").step == 2
    finally:
        report_to(None)


def test_a_section_that_has_taken_long_before_may_take_long_again():
    ranks, limits = [seen(0, "step", 81), seen(1, "input", 80)], Limits(steps=100)
    for ended_s in (-200.0, -100.0):
        limits.learn("input", 40.0, 100, ended_s)
    assert not stalls(ranks, limits, 150.0)
    assert stalls(ranks, limits, 201.0)
    assert stalls(ranks, limits, 201.0)[0].limit_s == 200.0


def test_one_hitchof_all_ranks_does_not_set_the_limit_for_good():
    limits = Limits(steps=100)
    for _ in range(4):  # ranks that waited for the same thing
        limits.learn("step", 100.0, 100, ended_s=1000.0)
    limits.learn("step", 0.1, 101, ended_s=1001.0)
    assert limits.of("step", now_s=1002.0) == 200.0
    assert limits.of("step", now_s=9000.0) == 10.0


def test_ranks_of_other_hosts_that_read_for_long_are_known_from_the_first_steps():
    limits, before = Limits(), seen(1, "input", 0)
    for step in range(1, 40):  # 12 s of input for each step, seen every 0.25 s
        now = Seen(1, Progress("input", step, step * 12.0, pid=1))
        learn(limits, before, now, looked_s=step * 12.0 - 0.25)
        before = now
    waiting = Seen(0, Progress("step", 40, 39 * 12.0, pid=1))
    assert not stalls([waiting, before], limits, 40 * 12.0)
    assert [s.rank for s in stalls([waiting, before], limits, 45 * 12.0)] == [1]


def test_in_the_first_steps_a_rank_that_others_wait_for_has_two_minutes():
    reads, waits = seen(1, "input", 1), seen(0, "step", 2)
    assert not stalls([reads, waits], Limits(), 119.0)
    assert stalls([reads, waits], Limits(), 121.0)
    assert not stalls([reads, seen(0, "input", 1)], Limits(), 299.0)  # buffers are filled


def test_a_board_costs_microseconds_and_keeps_its_end(tmp_path):
    new_board(tmp_path / "board")
    assert read_board(tmp_path / "board").section == "launch"
    board, took_s = Board(tmp_path / "board"), list[float]()
    for _ in range(10):  # of which other programs disturb some
        began_s = time.perf_counter()
        for _ in range(100):
            board.write("step")
            board.write("input")
        took_s.append((time.perf_counter() - began_s) / 100)
    assert min(took_s) < 25e-6  # 0.5 % of a step of 5 ms
    board.write("exit")
    board.write("script")
    progress = read_board(tmp_path / "board")
    assert (progress.section, progress.step) == ("exit", 1000)


WRITES = """
import sys, pathlib
from meshwright.launch.progress import Board
board = Board(pathlib.Path(sys.argv[1]))
print("begun", flush=True)
while True:
    board.write("step")
"""


@pytest.mark.alone
def test_a_board_that_is_being_written_is_never_read_as_empty(tmp_path):
    # As it once was, on a busy host: a rank that had never joined since the host was booted.
    path = tmp_path / "board"
    new_board(path)
    command = [sys.executable, "-c", WRITES, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            actual = {(p.section, p.since_s > 0, p.pid) for p in map(read_board, [path] * 20_000)}
        finally:
            writer.kill()
    assert actual <= {("launch", True, 0), ("step", True, writer.pid)}


KERAS = (
    SETTING
    + """
import os, signal, sys

class Preempt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and jax.process_index() == 0:
            os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM)

strategy.fit(model, x, y, batch_size=16, epochs=1, verbose=0, checkpoint=sys.argv[1] + "-first")
strategy.fit(model, x, y, batch_size=16, epochs=10**6, verbose=2,
             checkpoint=sys.argv[1], callbacks=[Preempt()])
"""
)


@pytest.fixture
def keras_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    (tmp_path / "train.py").write_text(KERAS)
    return str(tmp_path / "train.py")


@pytest.mark.alone
@pytest.mark.full
def test_fit_needs_no_line_and_no_seed_and_sigterm_saves_and_ends_with_75(
    keras_program, tmp_path, capfd
):
    # Keras' own line (verbose=2) once made rank 0 take single steps where the others took four.
    assert run_group([keras_program, str(tmp_path / "saved")], GroupOptions(2)) == 75
    assert mw.read_checkpoint(tmp_path / "saved").step >= 8
    out = capfd.readouterr().out
    lines = [line for line in out.splitlines() if "loss" in line]
    assert len(lines) >= 1
    assert all(line.startswith("[rank:0]") for line in lines)
    assert "Traceback" not in out


IDLE = (
    SETTING
    + """
import sys, time

strategy.fit(model, x, y, batch_size=16, epochs=1, verbose=0, checkpoint=sys.argv[1])
print("trained", os.getpid(), flush=True)
time.sleep(100)
"""
)


def test_a_group_that_all_ended_well_after_sigterm_has_drained():
    stopping = Stopping()
    stopping.hear(signal.SIGTERM)
    assert stopping.exit_code([0, 0], are_all=True) == 0
    assert stopping.exit_code([0], are_all=False) == 143  # of two
    assert stopping.exit_code([0, -15], are_all=True) == 143
    assert stopping.exit_code([0, 75], are_all=True) == 75
    stopping = Stopping()
    stopping.hear(signal.SIGINT)
    assert stopping.exit_code([0, 0], are_all=True) == 130


@pytest.mark.alone
@pytest.mark.full
def test_sigterm_ends_ranks_that_would_not_save(tmp_path):
    # JAX's preemption service once took the signal in every rank, for good: they were left there
    # until the launcher's patience of 60 s was over.
    (program := tmp_path / "train.py").write_text("import os\n" + IDLE)
    command = [sys.executable, "-m", "meshwright.cli", "launch", "--processes", "2"]
    command += [str(program), str(tmp_path / "saved")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        lines = (re.search(r"trained (\d+)", line) for line in launcher.stdout)
        matches = (match for match in lines if match)
        pids = [int(next(matches)[1]) for _ in range(2)]
        launcher.terminate()
        try:
            assert launcher.wait(10) == 128 + signal.SIGTERM
        finally:
            launcher.kill()
    assert all_gone(pids)()


# Several hosts: launchers that meet


def node(address: str, *arguments: str) -> subprocess.Popen[str]:
    """A launcher of one rank, as on one of two hosts."""
    options = ["--processes", "1", "--devices", "2", "--nodes", "2", "--rendezvous", address]
    command = [sys.executable, "-m", "meshwright.cli", "launch", *options, "--stall-timeout", "2"]
    return subprocess.Popen(
        [*command, PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def listens(address: str) -> bool:
    """Whether something listens at this address; a connection would be taken for a host."""
    local = f":{int(address.rpartition(':')[2]):04X} "
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return any(local in line and line.split()[3] == "0A" for line in lines)


def nodes(folder: Path, how: str) -> list[tuple[int, str, str]]:
    """Two launchers of one rank each, as on two hosts: exit code, stdout and stderr of each."""
    address = free_address()
    started = [node(address, str(folder), how) for _ in range(2)]
    try:
        output = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(started, output, strict=True)]


@pytest.mark.alone
@pytest.mark.full
def test_ranks_of_other_hosts_learn_that_the_host_of_rank_0_is_lost(tmp_path):
    # JAX's coordination service ends with it, and would end these ranks without a word.
    address = free_address()
    with node(address, str(tmp_path), "goes on", "0") as hub:
        assert within(60, lambda: listens(address))
        with node(address, str(tmp_path), "goes on", "0") as other:
            try:
                assert within(90, (tmp_path / "training").exists)
                hub.kill()  # and with it its rank
                out, err = other.communicate(timeout=60)
            finally:
                hub.kill()
                other.kill()
    assert (tmp_path / "left1").exists(), out + err  # its ``finally`` block has run
    assert json.loads((tmp_path / "seen").read_text())["rank"] == 0
    assert re.search(r"rank 0 of 2 \(host \S+\) is out of reach", err)


@pytest.mark.alone
@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("kill", 137, "rank 1 of 2 .* was killed by signal 9 after step 60"),
        ("gil", 1, r"rank 1 of 2 .* is stuck in 'input'[\s\S]*grouped\.py.* in fail"),
    ],
)
def test_launchers_that_meet_run_one_group_and_name_a_rank_of_another_host(
    tmp_path, how, code, says
):
    ended = nodes(tmp_path, how)
    assert [c for c, *_ in ended] == [code] * 2, ended
    assert all(re.search(says, err) for *_, err in ended), ended
    assert json.loads((tmp_path / "seen").read_text())["rank"] == 1


def test_hosts_that_do_not_come_and_addresses_that_are_wrong_are_refused():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ClusterError, match=r"1 of 2 hosts have not come within 0\.2 s; present"):
        run_group([PROGRAM], GroupOptions(1, nodes=2, rendezvous=address, join_s=0.2))
    with pytest.raises(ClusterError, match=r"--rendezvous must be 'host:port', .*; received 'n01'"):
        run_group([PROGRAM], GroupOptions(1, nodes=2, rendezvous="n01"))
    with pytest.raises(ClusterError, match="several nodes need --rendezvous"):
        GroupOptions(1, nodes=2)


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(write_fake_ssh(tmp_path)), prepend=os.pathsep)


@pytest.mark.alone
@pytest.mark.full
def test_hosts_are_reached_by_ssh_and_share_one_group(fake_ssh, tmp_path, capfd):
    options = ["--processes", "1", "--devices", "2"]
    hosts = ["127.0.0.1", "localhost"]
    assert run_on_hosts(hosts, options, [PROGRAM, str(tmp_path), "nothing"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^\[(127\.0\.0\.1|localhost)\] \[rank:0\] loss \S+ 2 4$", out, re.MULTILINE)
    assert re.search(r"^\[(127\.0\.0\.1|localhost)\] \[rank:1\] loss \S+ 2 4$", out, re.MULTILINE)


def test_a_host_that_refuses_or_is_named_twice_is_an_error(fake_ssh):
    with pytest.raises(ClusterError, match=r"ssh does not reach host 'nowhere': Connection refus"):
        run_on_hosts(["nowhere"], ["--processes", "1"], [PROGRAM])
    with pytest.raises(ClusterError, match="--hosts must name different hosts"):
        run_on_hosts(["a", "a"], [], [PROGRAM])
