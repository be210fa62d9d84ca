"""Compilers are asked once for the same thing, and nothing is left of them when one stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from models import wait_for

import meshwright as mw
from meshwright.planning import cache, compile_ahead, compiler_process


@pytest.fixture
def compile_cache(monkeypatch, tmp_path):
    """A folder of one's own for what is kept."""
    folder = tmp_path / "kept"
    monkeypatch.setenv(cache.VARIABLE, str(folder))
    return folder


def compiled(function=jnp.sum, rows=16):
    layout = mw.Layout(["batch"], mw.Mesh({"batch": 8}))
    x = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=layout.sharding)
    return compile_ahead(jax.jit(function), [x], "cpu:8")


@pytest.fixture
def requests(monkeypatch):
    """Targets that a process was started for; it answers at once."""
    targets = []

    def answer(folder, target, timeout_s, dump):
        targets.append(str(target))
        (folder / "hlo.txt").write_text("HloModule m")
        zeros = dict.fromkeys(("argument", "output", "donated", "temporary", "peak", "code"), 0)
        return {"memory": {f"{name}_bytes": number for name, number in zeros.items()}}

    monkeypatch.setattr(compiler_process, "_run", answer)
    return targets


def test_the_same_step_is_compiled_once_and_gives_the_same_answer(compile_cache, monkeypatch):
    first = compiled()
    (entry,) = compile_cache.iterdir()
    assert entry.suffixes == [".json", ".gz"]

    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(compiler_process, "_started", refuse)
    assert compiled() == first
    with pytest.raises(AssertionError, match="a process was started"):
        compiled(jnp.max)


def test_whatever_may_change_the_answer_asks_again(compile_cache, requests, monkeypatch):
    compiled()
    compiled()
    assert len(requests) == 1
    compiled(jnp.max)
    compiled(rows=32)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_dump_to=")
    compiled()
    monkeypatch.setattr(cache, "version_of", lambda package: f"another {package}")
    compiled()
    assert len(requests) == 5


@pytest.mark.parametrize("word", ["off", "0", "OFF", "no", "false"])
def test_it_can_be_switched_off(requests, monkeypatch, tmp_path, word):
    monkeypatch.setenv(cache.VARIABLE, word)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled()
    compiled()
    assert len(requests) == 2
    assert not list(tmp_path.iterdir())


def test_the_users_folder_is_taken_where_none_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "meshwright" / "compiled"


def test_a_broken_entry_or_folder_only_means_to_ask_again(
    compile_cache, requests, monkeypatch, tmp_path
):
    compiled()
    (entry,) = compile_cache.iterdir()
    entry.write_bytes(entry.read_bytes()[:20])
    compiled()
    assert len(requests) == 2
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv(cache.VARIABLE, str(file))
    compiled()
    assert len(requests) == 3


def test_a_failure_is_kept_only_if_it_is_one_of_memory(compile_cache, monkeypatch):
    messages = ["host trouble", "RESOURCE_EXHAUSTED: Used 40.00G of 16.00G hbm"]
    tries = []

    def answer(folder, target, timeout_s, dump):
        tries.append(messages[len(tries)])
        return {"error": tries[-1]}

    monkeypatch.setattr(compiler_process, "_run", answer)
    with pytest.raises(mw.CompileError, match="host trouble"):
        compiled()
    for _ in range(2):
        with pytest.raises(mw.DoesNotFitError) as info:
            compiled()
        assert info.value.needed_bytes == 40 << 30
    assert tries == messages


def test_what_was_not_used_for_longest_makes_room(compile_cache, monkeypatch):
    for name, age_s in (("old", 300), ("new", 100), ("used", 200)):
        cache.remember(name, {"text": name * 10})
        path = compile_cache / f"{name}.json.gz"
        os.utime(path, (time.time() - age_s,) * 2)
    assert cache.recall("used") == {"text": "used" * 10}
    sizes = [path.stat().st_size for path in compile_cache.iterdir()]
    monkeypatch.setattr(cache, "_MOST_BYTES", sum(sizes))
    cache.remember("last", {"text": "last"})
    assert {path.name.partition(".")[0] for path in compile_cache.iterdir()} == {
        "new",
        "used",
        "last",
    }


# Stopping


WAITS = """
    import os, signal, sys
    from pathlib import Path
    from meshwright.planning import Target, compiler_process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run unattended
    folder = Path(sys.argv[1])
    compiler_process._run(folder, Target.of("cpu:1"), 600.0, dump=False)
    """


def children_of(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(child) for child in text.split()]


def is_running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads processes from /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_when_the_one_that_asks_is_stopped(tmp_path, how):
    # A compilation that never ends: the child waits for a job that is never written.
    os.mkfifo(tmp_path / "job.json")
    asks = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WAITS), str(tmp_path)], stderr=subprocess.PIPE
    )
    try:
        (child,) = wait_for(lambda: children_of(asks.pid))
        # It watches its standard input from the moment that it has read its program.
        wait_for(lambda: len(list(Path(f"/proc/{child}/task").iterdir())) > 1)
        asks.send_signal(how)
        _, stderr = asks.communicate(timeout=60)
        assert asks.returncode != 0
        assert (b"KeyboardInterrupt" in stderr) == (how == signal.SIGINT)
        wait_for(lambda: not is_running(child))
    finally:
        asks.kill()
        asks.communicate()


def test_how_a_process_ended_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    answer = compiler_process._run(tmp_path, compiler_process.Target.of("cpu:1"), 60.0, dump=False)
    assert answer == {"error": "the compiling process ended with 1.\n"}
    assert "host runs out of memory" in compiler_process._how_it_ended(-signal.SIGKILL)
