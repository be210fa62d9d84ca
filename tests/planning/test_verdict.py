"""Whether a step fits, where only an estimate says so: values, texts, pages and the records."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.planning.report import Memory
from meshwright.planning.search.plan import Plan
from meshwright.planning.verdict import AT_MOST, verdict_of
from meshwright.targets.target import Target

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 2**30
HERE = {"cpu": "cpu:8", "tpu": "v5e:2x4", "cuda": "h100:8"}


def peaks() -> list[tuple[str, float]]:
    """The platform of every recorded layout, and its compiled peak over the estimate."""
    planned = json.loads((RESULTS / "planned_peaks.json").read_text()).values()
    result = [(row["target"], 1 / row["planner"]) for row in planned if row.get("planner")]
    for model in json.loads((RESULTS / "plans.json").read_text()).values():
        ways = [*model["hand"].values(), *model["plan"]["options"]]
        ways += [way["selective"] for way in ways if "selective" in way]
        result += [
            (model["target"], way["peak_bytes"] / way["model_peak_bytes"])
            for way in ways
            if way.get("step_time_s") and way.get("model_peak_bytes")
        ]
    return [(Target.of(target).platform, ratio) for target, ratio in result]


@pytest.mark.parametrize("platform", HERE)
def test_the_error_of_estimates_is_that_of_nine_of_ten_recorded_layouts(platform: str) -> None:
    ratios = sorted(ratio for where, ratio in peaks() if where == platform)
    assert len(ratios) >= 8
    nine_of_ten = ratios[math.ceil(0.9 * len(ratios)) - 1]
    assert nine_of_ten <= AT_MOST[platform] < nine_of_ten + 0.06
    page = (RESULTS.parents[1] / "docs" / "explanation" / "planner.md").read_text()
    assert platform == "cpu" or f"at most {AT_MOST[platform]} times" in page


@pytest.mark.parametrize(("platform", "where"), HERE.items())
def test_an_estimate_near_the_limit_may_not_fit(platform: str, where: str) -> None:
    target, most = Target.of(where), AT_MOST[platform]
    limit = 1000 * GIB
    near, far = int(limit / most * 1.001), int(limit / most * 0.999)
    assert verdict_of(near, limit, target, is_estimate=True) == "may not fit"
    assert verdict_of(near, limit, target, is_estimate=False) == "fits"
    assert verdict_of(far, limit, target, is_estimate=True) == "fits"
    assert verdict_of(limit + 1, limit, target, is_estimate=True) == "does not fit"
    assert verdict_of(None, limit, target, is_estimate=True) is None
    assert verdict_of(near, None, target, is_estimate=True) is None


def estimated(peak_gib: float, why: str = "compile=False was given") -> mw.DryRun:
    memory = Memory(GIB, GIB, 0, 0, GIB, peak_bytes=int(peak_gib * GIB), available_bytes=16 * GIB)
    axes = (("batch", 8),)
    return mw.DryRun("net", Target.of("v5e:2x4"), axes, memory, not_compiled=why)


def test_an_estimated_dry_run_near_the_limit_says_so_first() -> None:
    run = estimated(15)
    assert (run.verdict, run.fits) == ("may not fit", None)
    first, *lines = str(run).splitlines()
    assert "may not fit, 15 GiB of 16 GiB by the estimate; a compiled dry run settles it" in first
    assert "compile=False was given" in " ".join(lines)
    assert "? May not fit, 15 GiB of 16 GiB" in run.to_html()
    assert "may not fit: a compiled dry run settles it" in (run._repr_html_() or "")
    compiled = estimated(15, why="")
    assert (compiled.verdict, compiled.fits) == ("fits", True)
    assert (estimated(17).verdict, estimated(17).fits) == ("does not fit", False)
    assert (estimated(10).verdict, estimated(10).fits) == ("fits", True)


def plan(peak_gib: float, **more: Any) -> Plan:
    from meshwright.planning.search.plan import _EXAMPLE

    known = Plan.from_json(_EXAMPLE)
    chosen = replace(known.chosen, peak_bytes=int(peak_gib * GIB), **more)
    return replace(known, target="v5e:2x4", limit_bytes=16 * GIB, chosen=chosen)


def test_an_estimated_plan_near_the_limit_says_so_first() -> None:
    near = plan(15)
    assert near.verdict == "may not fit"
    first, *lines = str(near).splitlines()
    settles = "may not fit (verify=1 or --verify 1 settles it)"
    assert first.startswith(f"plan for v5e:2x4, estimated, not compiled, {settles}: least time")
    assert ["fits", "16", "GiB", "maybe"] in [line.split() for line in lines]
    assert any('note: "maybe" is within the error of estimates' in line for line in lines)
    assert "? May not fit into 16 GiB: verify=1 or --verify 1 settles it" in near.to_html()
    assert "? maybe" in near.to_html()
    assert "may not fit, verify=1" in (near._repr_html_() or "")


@pytest.mark.parametrize("sure", [plan(10), plan(15, dry_run_peak_bytes=15 * GIB)])
def test_a_plan_that_fits_by_far_or_was_compiled_fits(sure: Plan) -> None:
    assert sure.verdict == "fits"
    assert "may not fit" not in str(sure) + sure.to_html()
    assert "✓ Fits into 16 GiB" in sure.to_html()
