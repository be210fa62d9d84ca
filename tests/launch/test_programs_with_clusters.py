"""The user's program with a local cluster ends in many ways, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from watching import all_gone, is_there, within

from meshwright.launch import private_folder

pytestmark = [pytest.mark.alone, pytest.mark.full]

PROGRAM = """
    import sys, time
    from meshwright.launch.local import LocalCluster

    def use(cluster):
        folder = cluster.spec.task_address("chief").removeprefix("ipc://").rsplit("/", 1)[0]
        print(folder, *(cluster.pid(task) for task in cluster.tasks), flush=True)
        {then}

    {begin}
"""
WITH = "with LocalCluster(2, 1) as cluster: use(cluster)"
WITHOUT = "use(LocalCluster(2, 1))"

ENDINGS = {
    "Ctrl-C": ("time.sleep(100)", signal.SIGINT, -signal.SIGINT, 1),
    "SIGTERM": ("time.sleep(100)", signal.SIGTERM, -signal.SIGTERM, 0),
    "SIGKILL": ("time.sleep(100)", signal.SIGKILL, -signal.SIGKILL, 0),
    "an exception": ("raise RuntimeError", None, 1, 1),
    "its end": ("pass", None, 0, 0),
    "sys.exit": ("sys.exit(5)", None, 5, 0),
    "a crash": ("import ctypes; ctypes.string_at(0)", None, -signal.SIGSEGV, 0),
}


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for sockets, unlike that of ``tmp_path``."""
    with tempfile.TemporaryDirectory(prefix="mw") as folder:
        yield Path(folder)


@pytest.mark.parametrize("begin", [WITH, WITHOUT], ids=["with", "without with"])
@pytest.mark.parametrize(("then", "number", "code", "tracebacks"), ENDINGS.values(), ids=ENDINGS)
def test_no_task_is_left_after(begin, then, number, code, tracebacks, short):
    program = textwrap.dedent(PROGRAM).replace("{begin}", begin).replace("{then}", then)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(short)},
    )
    assert process.stdout is not None
    folder, *numbers = process.stdout.readline().split()
    pids = list(map(int, numbers))
    assert len(pids) == 3
    if number is not None:
        assert all(map(is_there, pids))
        time.sleep(0.15)  # tasks are in the midst of their imports
        process.send_signal(number)
    sent_s = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert within(10, all_gone(pids))
    assert time.monotonic() - sent_s < 10
    assert err.count("Traceback") == tracebacks, err
    killed = code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV)
    assert Path(folder).parent == short
    assert Path(folder).exists() == killed


def test_the_folder_of_a_program_that_was_killed_is_removed_by_the_next(short, monkeypatch):
    monkeypatch.setattr(private_folder.tempfile, "gettempdir", lambda: str(short))
    private = private_folder.PrivateFolder()
    code = textwrap.dedent(
        f"""
        import os
        from meshwright.launch import private_folder
        private_folder.tempfile.gettempdir = lambda: {str(short)!r}
        print(private_folder.PrivateFolder().path, flush=True)
        os._exit(0)
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    left = Path(result.stdout.strip())
    assert left.is_dir()
    assert left.parent == short
    private_folder.PrivateFolder().remove()
    assert left.exists()  # it might be one that is just being made
    for folder in (left, private.path):
        os.utime(folder, (time.time() - 1000, time.time() - 1000))
    private_folder.PrivateFolder().remove()
    assert not left.exists()
    assert private.path.exists()
    private.remove()
    assert list(short.iterdir()) == []
