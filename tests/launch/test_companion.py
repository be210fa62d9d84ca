"""Ranks that something else has started (here with torchrun's variables), and their agents."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_ports
from watching import LOSS, soon_enough, within

from meshwright.launch import companion, join
from meshwright.launch.companion import Charge, Companion
from meshwright.launch.progress import Board, Progress, new_board
from meshwright.launch.stalls import Seen

PROGRAM = str(Path(__file__).parent / "grouped.py")
STALL_S, SCRIPT_S = 2.0, 6.0


REPORTS = """
import signal, sys
from pathlib import Path
from meshwright.launch import join
from meshwright.launch.failure import Failure
from meshwright.launch.membership import Membership
from meshwright.launch.progress import new_board

folder = Path(sys.argv[1])
new_board(join.board_path(folder, 0))
Failure(1, 2, "n01", 4711, "step", 9, "was killed by signal 9").write(join.failure_path(folder))

def report(kind, error, trace):
    signal.raise_signal(join.TELL)
    sys.__excepthook__(kind, error, trace)

sys.excepthook = report
join._follow_agent(Membership(0, 2, "n00:8476"), folder)
try:
    try:
        raise OSError("its own")
    finally:
        signal.raise_signal(join.TELL)
        print("not reached")
except join.ProcessError as error:
    signal.raise_signal(join.TELL)
    print("raised once, for rank", error.rank)
join._is_raised = False
try:
    raise ValueError("UNKNOWN: Gloo all-reduce failed")
finally:
    signal.raise_signal(join.TELL)
    print("to its end")
"""


@pytest.mark.alone
def test_a_failure_of_another_rank_interrupts_neither_its_own_handling_nor_a_report(tmp_path):
    command = [sys.executable, "-c", REPORTS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.splitlines() == ["raised once, for rank 1", "to its end"], ended.stderr
    assert "Error in sys.excepthook" not in ended.stderr
    assert re.search(
        r"ValueError: UNKNOWN: Gloo all-reduce failed\nmeshwright.errors.ProcessError: rank 1 of 2 "
        r"\(host n01, pid 4711\) was killed by signal 9\.",
        ended.stderr,
    )


def started(
    arguments: list[str], before: list[str] | None = None, **more: str
) -> list[subprocess.Popen[str]]:
    """Two ranks with torchrun's variables, as another launcher would start them."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(2)[0])}
    shared |= {"MESHWRIGHT_SCRIPT_TIMEOUT": str(SCRIPT_S)}
    shared |= {"MESHWRIGHT_STALL_TIMEOUT": str(STALL_S), "JAX_NUM_CPU_DEVICES": "2", **more}
    return [
        subprocess.Popen(
            [*(before or []), sys.executable, *arguments],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        output = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, text) for p, text in zip(processes, output, strict=True)]


def companions_of(pids: list[int]) -> list[tuple[int, str]]:
    """The agents of these ranks that are still there: their numbers and command lines."""
    names = [f'"pid": {pid},' for pid in pids]
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            commands.append((int(path.parent.name), command))
        except OSError:
            continue
    return [
        (pid, command)
        for pid, command in commands
        if "meshwright.launch.companion" in command and any(name in command for name in names)
    ]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("how", "fails", "limit_s", "says"),
    [
        ("kill", 0, 1.0, r"was killed, or crashed in native code, after step 60\b"),
        pytest.param("kill", 1, 1.0, "was killed, or", marks=pytest.mark.full),
        pytest.param("stop", 0, STALL_S + 5, "is stopped", marks=pytest.mark.full),
        pytest.param("raise", 1, 1.0, "raised an exception after step 60", marks=pytest.mark.full),
        pytest.param("exit", 1, STALL_S + 5, "has ended, and rank 0 waits", marks=pytest.mark.full),
        pytest.param("gil", 1, STALL_S + 5, "is stuck in 'input'", marks=pytest.mark.full),
        pytest.param("asleep", 1, SCRIPT_S + 5, "does nothing in 'script'", marks=pytest.mark.full),
    ],
)
def test_ranks_that_others_start_learn_which_failed_and_where(tmp_path, how, fails, limit_s, says):
    def named_after_s(folder: Path) -> float:
        processes = started([PROGRAM, str(folder), how, str(fails)])
        results = ended(processes)
        pid = processes[fails].pid
        messages = [text for _, text in results if f"meshwright: rank {fails} of 2" in text]
        assert messages, results
        assert re.search(rf"rank {fails} of 2 \(host \S+, pid {pid}\) {says}", messages[0])
        assert not any(f"meshwright: rank {1 - fails} of 2" in text for _, text in results), results
        actual = json.loads((folder / "seen").read_text())
        assert (actual["rank"], actual["pid"]) == (fails, pid)
        assert results[1 - fails][0] == 1
        assert (folder / f"left{1 - fails}").exists()  # its ``finally`` block has run
        if how in ("raise", "gil", "asleep"):
            assert "grouped.py" in actual["stack"]
        if how == "asleep":  # it is named long before, by its own agent with its stack
            named = rf"pid {pid}\) has been in 'script' for .* s while .*\n.*stack:\n.*grouped.py"
            assert re.search(named, results[fails][1])
        assert within(10.0, lambda: not companions_of([p.pid for p in processes]))
        return actual["at"] - json.loads((folder / "failed").read_text())

    assert soon_enough(limit_s, tmp_path, named_after_s)


@pytest.mark.alone
@pytest.mark.full
def test_a_rank_learns_that_the_host_of_rank_0_is_lost_with_its_agent(tmp_path):
    # JAX's coordination service ends with it, and would end this rank without a word.
    processes = started([PROGRAM, str(tmp_path), "goes on", "0"])
    try:
        assert within(90, (tmp_path / "training").exists)
        agents = [pid for pid, _ in companions_of([processes[0].pid])]
        for pid in (*agents, processes[0].pid):
            os.kill(pid, signal.SIGKILL)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    (_, (_, text)) = ended(processes)
    assert len(agents) == 1
    assert (tmp_path / "left1").exists(), text  # its ``finally`` block has run
    assert json.loads((tmp_path / "seen").read_text())["rank"] == 0


@pytest.mark.alone
@pytest.mark.full
def test_a_group_that_others_start_ends_by_itself_and_leaves_no_agent(tmp_path):
    processes = started([PROGRAM, str(tmp_path), "nothing"])
    results = ended(processes)
    assert [code for code, _ in results] == [0, 0], results
    assert all(re.search(LOSS, text) for _, text in results), results
    assert within(10.0, lambda: not companions_of([p.pid for p in processes]))


@pytest.mark.alone
@pytest.mark.full
def test_one_switch_leaves_the_agents_out(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import meshwright as mw, subprocess, os\nmember = mw.join()\n"
        "print(subprocess.run(['ps', '--ppid', str(os.getpid())], capture_output=True).stdout)\n"
    )
    results = ended(started([str(program)], MESHWRIGHT_WATCH="0"))
    assert [code for code, _ in results] == [0, 0], results
    assert not any("companion" in text for _, text in results)


# One agent, without processes


class Link:
    """The other ranks, as the hub knows them."""

    def __init__(self, *ranks: Seen) -> None:
        self.ranks = list(ranks)
        self.named: list[int] = []

    def others(self) -> list[Seen]:
        return self.ranks

    def name(self, rank: int, _what: str) -> None:
        self.named.append(rank)


def companion_of_rank_0(folder: Path, link: Link) -> Companion:
    new_board(join.board_path(folder, 0))
    Board(join.board_path(folder, 0)).write("step")
    return Companion(Charge(0, 2, os.getppid(), str(folder), "", "", 2.0), link)  # type: ignore[arg-type]


def test_agents_name_a_rank_that_is_slow_but_alive(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(companion, "STRAGGLER_S", 0.05)
    slow = Seen(1, Progress("input", 1, time.monotonic(), pid=1))
    watch = companion_of_rank_0(tmp_path, link := Link(slow))
    for _ in range(4):
        assert watch._look() is None
        time.sleep(0.03)
    assert link.named == [1]  # by its own agent, too, which can read its stack
    assert "meshwright: rank 1 of 2 is slow: for" in capfd.readouterr().err


def test_agents_learn_what_ranks_of_other_hosts_take(tmp_path):
    now_s = time.monotonic()
    link = Link(Seen(1, Progress("input", 60, now_s - 12.0, pid=1)))
    watch = companion_of_rank_0(tmp_path, link)
    watch._look()
    link.ranks = [Seen(1, Progress("step", 61, now_s, pid=1))]
    watch._look()
    assert 20 < watch._limits.of("input", now_s) < 30  # the shortest is 2 s
