"""Compile the many small programs of these tables quickly; leave slow tests to the full tier."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src.interpreters import mlir

# LLVM's optimizations and XLA's newer emitters of kernels take most of the time of a test here.
# Both come after XLA has partitioned the program, so the laws are about the same program without
# them. Only the releases named here are known to know all these flags: an unknown one ends Python.
_QUICKLY = ["--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 11):
    _QUICKLY += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]

_ASKED = os.environ.get("XLA_FLAGS", "").split()
os.environ["XLA_FLAGS"] = " ".join(_ASKED + [flag for flag in _QUICKLY if flag not in _ASKED])

# What one process of this run has compiled, the others read: workers share the oracles of one
# device, and processes that are killed and started again their steps.
_CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
if _CACHE_VARIABLE not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="meshwright-tests-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ |= {
        _CACHE_VARIABLE: _compiled,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
# JAX was imported before, and reads its environment only then.
jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE_VARIABLE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# JAX 0.10 makes an MLIR context, with every dialect loaded, for each program that it lowers: 5 ms,
# two fifths of what a small program takes that was compiled before. JAX 0.11 uses that of a thread
# again, and so do these tests; a context keeps the constants of its programs, so not for ever.
_PROGRAMS_OF_A_CONTEXT = 10


class _Contexts(threading.local):
    """The MLIR context of a thread, and for how many programs more it is used."""

    context: Any = None
    left = 0

    def take(self, new: Callable[[], Any]) -> Any:
        if not self.left:
            self.context, self.left = new(), _PROGRAMS_OF_A_CONTEXT
        self.left -= 1
        return self.context


if jax.__version_info__ < (0, 11):
    mlir.make_ir_context = functools.partial(_Contexts().take, mlir.make_ir_context)

# Tracing makes millions of short-lived objects: collecting them by the default thresholds took an
# eighth of the time of the contract tables.
gc.set_threshold(50_000, 50, 100)

# A compiled program is several maps of memory, and Linux grants a process 65,530: some thousand
# tests in one process reach them, and the compiler dies. They also held 5 GB after 2,000 tests.
_MAPS, _STATM = Path("/proc/self/maps"), Path("/proc/self/statm")
_CROWDED = 20_000
_LARGE_BYTES = 4 << 30
_LOOK_EVERY = 50
_ended = 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``full_for(*ids)`` marks the cases with these ids ``full``; an unknown id is an error."""
    cases: dict[tuple[str, ...], set[str]] = {}
    for item in items:
        for mark in item.iter_markers("full_for"):
            case = item.callspec.id  # type: ignore[attr-defined]
            cases.setdefault((item.nodeid.partition("[")[0], *mark.args), set()).add(case)
            if case in mark.args:
                item.add_marker(pytest.mark.full)
    unknown = [
        f"{test}: {name}"
        for (test, *names), known in cases.items()
        for name in names
        if name not in known
    ]
    whole = not any("::" in argument for argument in config.args)  # else some cases are left out
    if unknown and whole:
        raise pytest.UsageError("full_for names unknown cases: " + "; ".join(unknown))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Let compiled programs go where there are too many."""
    global _ended
    _ended += 1
    if _ended % _LOOK_EVERY:
        return
    if _maps() > _CROWDED or _resident_bytes() > _LARGE_BYTES:
        gc.unfreeze()
        jax.clear_caches()
    gc.collect()
    gc.freeze()


def _maps() -> int:
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0


def _resident_bytes() -> int:
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def user_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Path]]:
    """Writes a module of the user's to the current folder, which it returns; forgotten later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}

    def write(name: str, text: str) -> Path:
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path

    yield write
    for name in {*sys.modules} - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]
