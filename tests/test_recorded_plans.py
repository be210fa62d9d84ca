"""Recorded dry runs of absent machines, and what docs/explanation/plans.md shows of them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(params=["paper_sizes", "plans"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__(request.param)


def recorded(script: Any) -> dict[str, Any]:
    return json.loads(script.RESULTS.read_text())


def test_the_page_shows_what_is_recorded(script: Any) -> None:
    tables = __import__("doc_tables")
    assert tables.shown(f"{script.__name__}.py") == script.table(recorded(script))


def test_the_page_of_results_is_that_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = __import__("report")
    assert report.page_text() == (report.RESULTS / "README.md").read_text()


def test_the_page_on_speed_has_every_step_beside_mesh_tensorflow() -> None:
    page = (BENCHMARKS.parent / "docs" / "explanation" / "speed.md").read_text()
    for step in json.loads((BENCHMARKS / "results" / "named.json").read_text()):
        rounds = step["ours_over_peer"]
        ratio = f"{statistics.median(rounds):.2f} × ({min(rounds):.2f} to {max(rounds):.2f})"
        assert f"{ratio} its time | ≤ 0.9, **missed** |" in page


def test_what_was_said_by_the_model_alone_is_said_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks of layouts that were not compiled, being far above the memory, stand among compiled."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    plans = __import__("plans")
    peaks = {"none": 9 << 40, "block": 8 << 40, "selective": 1 << 30}
    monkeypatch.setattr(
        plans, "by_model", lambda job, hand, remat: {"model_peak_bytes": peaks[remat]}
    )
    compiled = {"step_time_s": 1.0, "peak_bytes": 1, "model_peak_bytes": 2}
    known = {"remat": "block", "fits": False, "peak_bytes": 5 << 40, "peak_without_bytes": 6 << 40}
    known |= {"selective": compiled}
    plans.hand_by_model(plans.JOBS["gpt2_v5e"], None, known)
    assert (known["peak_bytes"], known["peak_without_bytes"]) == (peaks["block"], peaks["none"])
    assert compiled == {"step_time_s": 1.0, "peak_bytes": 1, "model_peak_bytes": peaks["selective"]}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("paper_sizes")


def test_the_largest_model_of_the_paper_fits_and_is_above_half_of_the_peak(sizes: Any) -> None:
    results = recorded(sizes)
    assert results["5"]["parameters"] == pytest.approx(4.9e9, rel=0.005)
    assert results["5"]["target"] == "v2:16x16"  # 512 cores
    for plan in results.values():
        for layout in [plan[who] for who in ("paper", "plan") if who in plan]:
            assert layout["fits"]
            assert 0.5 < layout["mfu"] < 1.0
            assert layout["peak_bytes"] < 8 << 30


def test_parameters_are_those_of_the_paper(sizes: Any) -> None:
    billions = [0.14, 0.22, 0.37, 0.67, 1.28, 2.48, 4.90]  # as the paper prints them
    for s, result in recorded(sizes).items():
        assert round(result["parameters"] / 1e9, 2) == pytest.approx(
            billions[int(s) + 1], abs=0.011
        )


@pytest.mark.targets
def test_the_smallest_model_of_the_paper_is_dry_run_as_recorded(sizes: Any) -> None:
    pytest.importorskip("libtpu", reason="pip install 'meshwright[tpu]'")
    result = sizes.figures(sizes.of_paper(-1))
    known = recorded(sizes)["-1"]["paper"]
    assert result["fits"]
    assert result["peak_bytes"] == pytest.approx(known["peak_bytes"], rel=0.02)
    assert result["step_time_s"] == pytest.approx(known["step_time_s"], rel=0.02)


def test_no_recorded_time_is_above_the_peak(script: Any) -> None:
    for plan in recorded(script).values():
        layouts = [*plan.get("hand", {}).values(), plan.get("paper", {})]
        known = [result["mfu"] for result in layouts if result.get("mfu") is not None]
        assert known
        assert all(0 < mfu < 1 for mfu in known)
