"""A plan as one page: what was chosen beside what was not."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from pages import EVIL, page, report, rows_of, text

from meshwright.cli import main
from meshwright.commands import planning as planning_commands
from meshwright.display import figures
from meshwright.planning.search.plan import Option, Plan, Reason


def option(time_s, peak_bytes, axes=(("batch", 8),), rules=(("batch", ("batch",)),), **more):
    choices = {"zero": 0, "accumulate": 1, "remat": "none", **more}
    compute_s, talk_s = time_s and 0.75 * time_s, time_s and 0.25 * time_s
    times = {"time_s": time_s, "compute_s": compute_s, "communication_s": talk_s}
    return Option(axes, rules, peak_bytes=peak_bytes, **times, **choices)


def a_plan(**more) -> Plan:
    both = (("batch", 4), ("model", 2))
    split = (("batch", ("batch",)), ("block/ffn.hidden", ("model",)))
    values = {
        "name": "net",
        "target": "h100:8",
        "hardware": "h100",
        "objective": "time",
        "limit_bytes": 80 * 10**9,
        "chosen": option(0.02, 60 * 10**9, both, split, zero=1, accumulate=4, remat="block"),
        "runners_up": (option(0.03, 50 * 10**9, both, split), option(0.05, 40 * 10**9)),
        "data_parallel": option(0.07, 110 * 10**9),
        "layouts": (("x", (("batch",), ())), ("block/ffn/kernel", ((), ("model",)))),
        "inputs": ("x",),
        "batch": ("batch",),
        "why": (Reason("block/ffn.hidden over model", ("saves 2.89 GiB, most of it slots",)),),
        "notes": ("said",),
    }
    return Plan(**{**values, **more})


def test_a_plan_shows_what_was_chosen_beside_what_was_not():
    tree = ElementTree.fromstring(a_plan().to_html())
    rows = {row[0]: row for row in rows_of(tree, "plan-table")}
    assert list(rows) == ["chosen", "runner-up 1", "runner-up 2", "data parallel"]
    assert rows["chosen"][4] == "ZeRO 1, 4 micro-batches, remat"
    assert rows["chosen"][-2:] == ["? maybe", "-"]
    assert rows["runner-up 1"][3] == "batch over batchblock/ffn.hidden over model"
    assert rows["runner-up 1"][-1] == "10 ms slower, saves 9.31 GiB"
    assert rows["data parallel"][-2:] == ["✗ no", "50 ms slower, takes 46.6 GiB"]
    assert "block/ffn.hidden over model: saves 2.89 GiB, most of it slots" in text(tree)
    assert rows_of(tree, "layouts-table")[1] == [
        "block/ffn/kernel",
        "parameter",
        "[unsharded, model]",
    ]


def test_a_plan_has_the_name_of_its_model_and_says_how_sure_its_time_is():
    why = Reason("a.dim0 over model", ()), Reason("b.dim1 over model", ("saves 1 GiB",))
    visible = text(ElementTree.fromstring(a_plan(why=why).to_html()))
    assert "net" in visible
    assert (
        "by the planner's model; likely 13.4 ms to 22.4 ms (dry runs of the benchmarks)" in visible
    )
    assert "a.dim0" not in visible  # it changes next to nothing
    assert "b.dim1 over model: saves 1 GiB" in visible
    assert "h100:8" in text(ElementTree.fromstring(a_plan(name="").to_html()))


@pytest.mark.parametrize("is_analytic", [False, True])
def test_a_dry_run_says_how_sure_its_time_is(is_analytic):
    seconds = replace(report().estimate, step_time_s=0.1)
    run = replace(report(), estimate=seconds, not_compiled="so it is" if is_analytic else "")
    near = "likely 67 ms to 112 ms (dry runs of the benchmarks)"
    near = near if is_analytic else "likely 74 ms to 165 ms (steps measured in the benchmarks)"
    assert f"estimated; {near}" in text(page(run))
    assert near in str(run)


def test_the_ranges_of_times_are_those_of_the_benchmarks():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    models = json.loads((results / "plans.json").read_text()).values()
    hands = [hand for model in models for hand in model["hand"].values()]
    ratios = [
        hand["step_time_s"] / hand["model_time_s"]
        for hand in hands
        if hand.get("step_time_s") and hand.get("model_time_s")
    ]
    low, high = figures.OF_THE_MODEL
    assert sum(low <= ratio <= high for ratio in ratios) >= 0.9 * len(ratios) > 20
    layouts = [
        layout
        for run in json.loads((results / "ranking.json").read_text())
        for layout in run["layouts"]
    ]
    ratios = [statistics.mean(layout["passes_s"]) / layout["estimated_s"] for layout in layouts]
    low, high = figures.OF_DRY_RUNS
    assert sum(low <= round(ratio, 2) <= high for ratio in ratios) >= 0.9 * len(ratios) > 20
    # Not the digits, whose step is too short, nor what cuDNN does on a single GPU.
    for chip, by_published, by_measured in (("h100", 6, 5), ("h200", 5, 4)):
        on_gpu = json.loads((results / f"one_gpu_{chip}.json").read_text()).values()
        for name, (low, high), enough in (
            (f"{chip}:1", figures.BY_PUBLISHED, by_published),
            (f"{chip}:1 measured", figures.OF_DRY_RUNS, by_measured),
        ):
            ratios = [
                row["measured"]["step_time_s"] / row["predicted"][name]["compiled"]["step_time_s"]
                for row in on_gpu
            ]
            assert sum(low <= ratio <= high for ratio in ratios) >= enough


def test_dry_runs_are_set_beside_dry_runs_alone():
    dry = {"dry_run_time_s": 0.06, "dry_run_peak_bytes": 85 * 10**9}
    chosen = replace(a_plan().chosen, **dry)
    first = replace(a_plan().runners_up[0], dry_run_time_s=0.08, dry_run_peak_bytes=86 * 10**9)
    plan = a_plan(chosen=chosen, runners_up=(first, a_plan().runners_up[1]))
    tree = ElementTree.fromstring(plan.to_html())
    assert "Does not fit into 74.5 GiB" in text(tree)
    assert "79.2 GiB: too much" in text(tree)
    rows = {row[0]: row for row in rows_of(tree, "plan-table")}
    assert rows["chosen"][5] == "20 msdry run: 60 ms"
    assert rows["chosen"][-2] == "✗ no"  # by its dry run, which knows better
    assert rows["runner-up 1"][-1] == "20 ms slower, takes 954 MiB"
    assert rows["runner-up 2"][-1] == "30 ms slower, saves 18.6 GiB"  # both by the model


@pytest.mark.parametrize(
    "plan",
    [
        a_plan(),
        a_plan(limit_bytes=None),
        a_plan(runners_up=(), data_parallel=None, why=(), notes=()),
        a_plan(chosen=option(None, 6), runners_up=(), data_parallel=option(None, 8)),
    ],
    ids=["all", "no limit", "alone", "no times"],
)
def test_every_number_of_a_plan_is_in_its_page(plan):
    tree = ElementTree.fromstring(plan.to_html())
    ids = [element.get("id") for element in tree.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    visible = text(tree)
    numbers = re.findall(r"\d[\d,.]* (?:[KMGT]?i?B|[mµ]?s)\b", str(plan))
    assert numbers
    assert [number for number in numbers if number not in visible] == []


def test_a_report_shows_the_alternatives_of_its_plan(tmp_path):
    with_plan = report().to_html(a_plan())
    assert len(rows_of(ElementTree.fromstring(with_plan), "plan-table")) == 4
    assert 'id="plan-table"' not in report().to_html()
    report().save(tmp_path / "both.html", a_plan())
    assert (tmp_path / "both.html").read_text(encoding="utf-8") == with_plan


def test_what_a_plan_has_from_the_user_is_escaped():
    evil = replace(option(0.1, 5), rules=((EVIL, (EVIL,)),))
    why = (Reason(EVIL, (EVIL,)),)
    plan = a_plan(chosen=evil, runners_up=(), why=why, notes=(EVIL,), target=EVIL)
    plan = replace(plan, layouts=((EVIL, ((EVIL,),)),), inputs=())
    assert plan.to_html().count("<script>") == 1
    assert len(list(ElementTree.fromstring(plan.to_html()).iter("script"))) == 1


def test_the_command_that_chooses_writes_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(planning_commands, "choose", lambda *_, **__: a_plan())
    command = ["plan", "json:build", "--target", "h100:8", "--html", str(tmp_path / "plan.html")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == a_plan().to_html()
    command[-1] = str(tmp_path / "plan.html" / "plan.html")
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2
    assert "Invalid value for '--html': cannot write the page to" in refused.output
