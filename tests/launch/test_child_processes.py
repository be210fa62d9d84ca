"""A child ends with its parent, however that ends: no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from watching import all_gone, is_there, within

from meshwright.launch import processes
from meshwright.launch.processes import Child, Command, end_all, own_module, program

pytestmark = pytest.mark.alone

# Starts one more process, says the numbers of both, and waits.
_TASK = """
    import os, subprocess, sys, time
    from meshwright.launch.tie import tie_from_environment
    tie_from_environment()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print(os.getpid(), other.pid, flush=True)
    {then}
    time.sleep(100)
"""


def task(then: str = "") -> str:
    return textwrap.dedent(_TASK).replace("{then}", then)


def started(code: str) -> tuple[Child, list[int]]:
    child = Child(own_module(["-c", code], {}))
    with os.fdopen(child.output) as output:
        return child, [int(number) for number in output.readline().split()]


def test_killing_a_child_ends_what_it_started():
    child, pids = started(task())
    assert child.pid == pids[0]
    assert child.poll() is None
    assert child.kill() == -signal.SIGKILL
    assert within(5, all_gone(pids))
    assert child.kill() == -signal.SIGKILL


def test_a_child_that_exits_takes_along_what_it_started():
    child, pids = started(task("sys.exit(7)"))
    assert within(10, lambda: child.poll() is not None)
    assert child.exit_code == 7
    assert within(5, all_gone(pids[1:]))


@pytest.mark.full_for("True")
@pytest.mark.parametrize("stopped", [False, True])
def test_children_that_are_asked_end_together_and_the_deaf_are_killed(stopped):
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    polite = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"
    children = [started(task(then))[0] for then in (deaf, polite)]
    time.sleep(0.2)  # until the handlers are set
    if stopped:
        children[1].send_signal(signal.SIGSTOP)
    begun_s = time.monotonic()
    end_all(children, grace_s=1.0)
    assert 1.0 <= time.monotonic() - begun_s < 5.0
    assert [child.exit_code for child in children] == [-signal.SIGKILL, 0]


def test_a_child_gets_its_variables_and_finds_the_modules_of_its_parent(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("name = 'found'")
    monkeypatch.syspath_prepend(tmp_path)
    code = "import os, beside; print(beside.name, os.environ['A'])"
    child = Child(own_module(["-c", code], {"A": "1"}))
    with os.fdopen(child.output) as output:
        assert output.read() == "found 1\n"
    assert within(10, lambda: child.poll() == 0)


def test_a_program_that_knows_nothing_of_this_is_tied_as_well():
    code = "import os; print(os.getpid(), flush=True); import time; time.sleep(100)"
    child = Child(program(["-c", code], {}))
    with os.fdopen(child.output) as output:
        assert int(output.readline()) == child.pid
    os.close(child._lifeline)  # as when this process ends
    processes._shared_descriptors.discard(child._lifeline)
    assert within(5, all_gone([child.pid]))
    child._lifeline = os.open(os.devnull, os.O_RDONLY)
    assert child.poll() == -signal.SIGKILL


@pytest.mark.parametrize(("then", "ends_with"), [("sys.exit(7)", 7), ("", -signal.SIGKILL)])
def test_a_program_that_closes_what_it_inherits_is_tied_as_well(then, ends_with):  # as ssh does
    code = "import os, sys, time; os.closerange(3, 99); print(os.getpid(), flush=True)"
    rest = then or "time.sleep(100)"
    child = Child(Command((sys.executable, "-c", f"{code}; {rest}"), closes_pipes=True))
    with os.fdopen(child.output) as output:
        pid = int(output.readline())
    if not then:
        os.close(child._lifeline)  # as when this process ends
        processes._shared_descriptors.discard(child._lifeline)
        assert within(5, all_gone([pid]))
        child._lifeline = os.open(os.devnull, os.O_RDONLY)
    assert within(10, lambda: child.poll() == ends_with)


def test_a_thread_does_it_where_the_kernel_does_not():
    without = "from meshwright.launch import tie; tie._by_signal = lambda *_: False\n"
    child, pids = started(without + task())
    os.close(child._lifeline)
    processes._shared_descriptors.discard(child._lifeline)
    assert within(5, all_gone(pids))
    child._lifeline = os.open(os.devnull, os.O_RDONLY)
    assert child.poll() == -signal.SIGKILL


def test_a_task_that_ties_itself_too_late_ends_then():
    child = Child(own_module(["-c", "import time; time.sleep(0.5)\n" + task()], {}))
    os.close(child._lifeline)  # as when this process ends before the task has come so far
    processes._shared_descriptors.discard(child._lifeline)
    with os.fdopen(child.output) as output:
        assert output.read() == ""
    child._lifeline = os.open(os.devnull, os.O_RDONLY)
    assert within(10, lambda: child.poll() is not None)
    assert child.exit_code == -signal.SIGKILL


def test_a_program_that_is_not_there_leaves_nothing_open():
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        Child(Command.of(["/no/such/program"], ties_itself=True))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# A parent of its own, that is then ended in many ways.

_PARENT = """
    import os, signal, sys, time, threading
    from meshwright.launch.processes import Child, own_module
    def start():
        global child
        child = Child(own_module(["-c", sys.argv[1]], {}))
    starter = threading.Thread(target=start)  # a thread that has ended by the time it matters
    starter.start()
    starter.join()
    with os.fdopen(child.output) as output:
        print(output.readline(), end="", flush=True)
    {then}
    time.sleep(100)
"""
ENDINGS: dict[str, tuple[str, int | None]] = {
    "SIGKILL": ("", signal.SIGKILL),
    "SIGTERM": ("", signal.SIGTERM),
    "Ctrl-C": ("", signal.SIGINT),
    "an exception": ("raise RuntimeError", None),
    "os._exit": ("os._exit(3)", None),
    "SIGKILL while the child is stopped": (
        "os.kill(child.pid, signal.SIGSTOP); time.sleep(0.1); os.kill(os.getpid(), signal.SIGKILL)",
        None,
    ),
    "SIGKILL after a fork that lives on": (
        "pid = os.fork()\n"
        "if not pid:\n    time.sleep(100)\n"
        "print(pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)",
        None,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(("then", "number"), ENDINGS.values(), ids=ENDINGS)
def test_no_child_is_left_when_its_parent_ends_by(then, number):
    code = textwrap.dedent(_PARENT).replace("{then}", then)
    parent = subprocess.Popen(
        [sys.executable, "-c", code, task()], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    forked = int(parent.stdout.readline()) if "fork" in then else None
    try:
        assert len(pids) == 2
        if number is not None:
            assert all(map(is_there, pids))
            parent.send_signal(number)
        parent.wait(10)
        assert within(10, all_gone(pids))
    finally:
        parent.kill()
        parent.stdout.close()
        if forked is not None:
            os.kill(forked, signal.SIGKILL)


def test_the_look_at_processes_sees_one_that_is_there():
    assert is_there(os.getpid())
    assert not within(0.05, lambda: not is_there(os.getpid()))
