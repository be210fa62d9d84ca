"""Benchmarks that measure time wait for a quiet machine, and keep what it did meanwhile."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIDES = {  # started by others, which wait and keep
    *("hand_written", "keras_data_parallel", "ours", "tf_dtensor", "mesh_tensorflow_side"),
    *("many_processes_ours", "many_processes_torch", "named_hand_written", "named_ours"),
    *("pipelines_ours", "pipelines_torch", "ps_ours", "ps_tensorflow_side"),
}
TIMELESS = {  # compile, count or print what is kept
    *("digits", "large_model", "paper_sizes", "pipeline_wins", "planned_peaks", "plans"),
    "ps_accuracy",
}
PROGRAMS = {
    path.stem
    for path in BENCHMARKS.glob("*.py")
    if '__name__ == "__main__"' in path.read_text() and path.stem not in SIDES
}


def calls(name: str) -> set[str]:
    """The methods that a program calls, as ``Quiet.wait``."""
    tree = ast.parse((BENCHMARKS / f"{name}.py").read_text())
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {ast.unparse(func) for func in called if isinstance(func, ast.Attribute)}


def test_the_lists_name_programs_that_are_there() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} >= SIDES
    assert PROGRAMS >= TIMELESS


@pytest.mark.parametrize("name", sorted(PROGRAMS - TIMELESS))
def test_every_benchmark_of_time_waits_for_quiet_and_keeps_the_load(name: str) -> None:
    made = calls(name)
    by_itself = "Quiet.wait" in made and made & {"quiet.record", "quiet.line"}
    assert by_itself or "report.measure_each" in made


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("quiet")


@pytest.fixture
def machine(quiet: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine whose other processes keep ``busy`` cores busy, one number for each look."""
    state = SimpleNamespace(busy=iter([0.0]), wall_s=0.0, all_s=0.0)

    def sleep(seconds: float) -> None:
        state.wall_s += seconds
        state.all_s += seconds * next(state.busy)

    def now(cls: Any) -> Any:
        return cls(state.wall_s, 0.0, state.all_s)

    monkeypatch.setattr(quiet.time, "sleep", sleep)
    monkeypatch.setattr(quiet.Used, "now", classmethod(now))
    return state


def test_it_waits_until_30_s_in_a_row_were_quiet(quiet: Any, machine: Any) -> None:
    machine.busy = itertools.chain([0.1, 0.2, 0.9], itertools.repeat(0.1))
    kept = quiet.Quiet.wait().record()
    assert (kept["was_quiet"], kept["waited_s"]) == (True, 45)


def test_it_says_that_the_machine_was_not_quiet(
    quiet: Any, machine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.busy = itertools.repeat(1.0)
    watched = quiet.Quiet.wait()
    assert "not quiet for 30 s within 600 s" in capsys.readouterr().out
    machine.wall_s, machine.all_s = machine.wall_s + 10, machine.all_s + 5
    kept = watched.record({"ours": 1.5})
    assert (kept["was_quiet"], kept["other_busy_cores"]) == (False, pytest.approx(0.5))
    assert kept["cpu_s_of_sides"] == {"ours": 1.5}


def test_a_dry_run_does_not_wait(quiet: Any, machine: Any) -> None:
    machine.busy = iter(())
    assert quiet.Quiet.wait(dry=True).record()["was_quiet"] is None


def test_sides_in_one_process_have_their_cpu_time(
    quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_s = iter([1.0, 3.0, 3.0, 4.5, 5.0, 5.25])
    monkeypatch.setattr(quiet, "own_cpu_s", lambda: next(used_s))
    sides = quiet.Sides()
    for side in ("ours", "peer", "ours"):
        with sides.runs(side):
            pass
    assert sides.cpu_s == {"ours": 2.25, "peer": 1.5}


LEAVES_ONE_BEHIND = """
import subprocess, sys
works = "import time\\nwhile time.process_time() < 0.5: pass"
subprocess.Popen([sys.executable, "-c", works], start_new_session=True)
print("{}")
"""
MEASURES_IT = """
import processes, sys
print(processes.run_process([sys.executable, "-c", sys.argv[1]])["load"]["cpu_s"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to another parent")
def test_what_a_side_leaves_behind_counts_as_its_own() -> None:
    """A process of its own measures, since it waits for whatever children it has."""
    measures = [sys.executable, "-c", MEASURES_IT, LEAVES_ONE_BEHIND]
    cpu_s = subprocess.run(measures, cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert float(cpu_s.stdout) > 0.5


def test_the_page_says_how_quiet_it_was(
    quiet: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = __import__("report")
    kept = {"was_quiet": True, "waited_s": 35, "load_before": 0.1, "load_after": 1.9}
    kept |= {"other_busy_cores": 0.31, "cpu_s_of_sides": {"ours": 2.0, "peer": 3.5}}
    (tmp_path / "serving.json").write_text(json.dumps({"rows": [{"model": "bert", "quiet": kept}]}))
    (tmp_path / "ranking.json").write_text("[{}]")
    (tmp_path / "plans.json").write_text("{}")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.loads_table().splitlines()[2:] == [
        "| serving: bert | quiet after 35 s | load 0.1 to 1.9, cores kept busy by others: 0.31 "
        "| ours 2 s, peer 3.5 s |",
        "",
        "Taken before it was recorded: ranking.",
    ]
