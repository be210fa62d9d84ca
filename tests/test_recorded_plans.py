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


def test_the_page_shows_the_pairs_of_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    wins = __import__("pipeline_wins")
    rows = wins.recorded()
    assert __import__("doc_tables").shown("pipeline_wins.py") == wins.table(rows)
    gains = [row["without_over_pipeline"] or 0.0 for row in rows.values()]
    assert any(gain >= 1.1 for gain in gains)


def test_the_page_of_results_is_that_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = __import__("report")
    assert report.page_text() == (report.RESULTS / "README.md").read_text()


def test_the_readme_has_the_ratios_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    plans = __import__("plans")
    ratios = {name: plans.ratio(row, selective=True) for name, row in plans.kept_results().items()}
    best, others = ratios.pop("gpt_13b_v5p"), ratios.values()
    sizes = recorded(__import__("paper_sizes")).values()
    estimated = [size["plan"]["step_time_s"] / size["paper"]["step_time_s"] for size in sizes]
    text = " ".join((BENCHMARKS.parent / "README.md").read_text().split())
    assert len(others) == 8
    assert f"takes {best:.2f} of the time" in text
    assert f"{min(others):.2f} to {max(others):.2f} of it. Plans" in text
    assert f"take {min(estimated):.2f} to {max(estimated):.2f} of it" in text


SPEED = BENCHMARKS.parent / "docs" / "explanation" / "speed.md"
TRAINED = {  # job: its peers, in the order of the page
    "mlp_8": ("hand_written", "keras_data_parallel", "tf_dtensor_right", "tf_dtensor"),
    "mlp_8_zero": ("tf_dtensor",),
    "mlp_4x2": ("hand_written", "tf_dtensor_right", "tf_dtensor"),
    "convolutional_8": ("hand_written", "keras_data_parallel"),
}
FEATURES = ("accumulate", "checkpoint", "prefetch")
PLATFORMS = BENCHMARKS.parent / "docs" / "guides" / "platforms.md"
ON_GPU = ("gpt2", "mlp", "resnet_50", "recommender", "digits", "bert", "lstm")


def saved(name: str) -> Any:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def tables(path: Path) -> list[list[list[str]]]:
    """The cells of the rows of each table of a page, without its heads."""
    texts = [block for block in path.read_text().split("\n\n") if block.startswith("|")]
    return [
        [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()[2:]]
        for text in texts
    ]


def ratio_cell(rounds: list[float]) -> str:
    return f"{statistics.median(rounds):.2f} × ({min(rounds):.2f} to {max(rounds):.2f})"


def goal_cell(sign: str, goal: float, rounds: list[float]) -> str:
    ratio = statistics.median(rounds)
    is_met = ratio <= goal if sign == "≤" else ratio >= goal
    return f"{sign} {goal:.2f}" + ("" if is_met else ", **missed**")


def measured_on_two_cores(report: Any) -> list[tuple[str, str]]:
    """The last two cells of each row of the first table, by the records."""
    cells = []
    for job, peers in TRAINED.items():
        record = saved(job)
        assert {pair["peer"] for pair in record["pairs"]} == {*peers}
        for peer in peers:
            (pair,) = (pair for pair in record["pairs"] if pair["peer"] == peer)
            by_time = pair["measure"] == "time"
            goal, sign = report.goal_of(record, pair)[0], "≤" if by_time else "≥"
            rounds, what = pair["ratio_by_round"], "time" if by_time else "steps/s"
            cells.append((f"{ratio_cell(rounds)} its {what}", goal_cell(sign, goal, rounds)))
    features = {each["name"]: each for each in saved("features")}
    for name in FEATURES:
        for net in ("mlp", "convolutional"):
            each = features.pop(f"{name}_{net}")
            goal = goal_cell("≤", each["limit"], each["ratio_by_round"])
            cells.append((f"{ratio_cell(each['ratio_by_round'])} the time", goal))
    assert not features
    for each in saved("parameter_server"):
        rounds = each["ratio_by_round"]
        cells.append(
            (f"{ratio_cell(rounds)} its steps/s", goal_cell("≥", each["at_least"], rounds))
        )
    for each in saved("ps_push_pull"):
        if each["says"] == "shared memory":
            rounds, speed = each["over_tcp_by_round"], f"{each['per_s']:,.0f} per second"
            goal = goal_cell("≥", each["at_least_over_tcp"], rounds)
            goal += f"; ≥ {each['at_least_per_s']:,} per second"
            cells.append((f"{ratio_cell(rounds)} its speed, {speed}", goal))
    for each in saved("named"):
        rounds = each["ours_over_peer"]
        cells.append((f"{ratio_cell(rounds)} its time", goal_cell("≤", 0.9, rounds)))
    return cells


def test_the_page_on_speed_has_every_ratio_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows = [tuple(row[-2:]) for row in tables(SPEED)[0]]
    assert rows == measured_on_two_cores(__import__("report"))


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_page_on_speed_has_every_job_on_one_gpu(gpu: str) -> None:
    rows = tables(SPEED)[1 if gpu == "h100" else 2]
    records = saved(f"one_gpu_{gpu}")
    jobs = [name for name in ON_GPU if name in records]
    assert len(jobs) == len(rows) == len(records)
    for name, row in zip(jobs, rows, strict=True):
        seen, said = records[name]["measured"], records[name]["predicted"]
        times = [said[by]["compiled"]["step_time_s"] for by in (f"{gpu}:1", f"{gpu}:1 measured")]
        peak = said[f"{gpu}:1"]["compiled"]["peak_bytes"] / seen["peak_bytes"]
        step_ms, gib = 1e3 * seen["step_time_s"], seen["peak_bytes"] / 2**30
        cells = [f"{step_ms:.{1 if step_ms > 1 else 2}f} ms"]
        cells += [f"{time / seen['step_time_s']:.2f}" for time in times]
        cells += [f"{gib:.{1 if gib > 10 else 2}f} GiB"] if gpu == "h100" else []
        cells.append(f"{peak:.2f}")
        assert row[1:-1] == cells, name
        peer = seen.get("peer")
        assert (f"{peer['time_ratio']:.2f} ×" in row[-1]) if peer else not row[-1]


def test_the_page_on_speed_has_the_records_of_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    least_ms = __import__("queueing").least_ms
    _, _, _, answers, endured, planned = tables(SPEED)
    columns = []
    for each in saved("serving")["rows"]:
        loads = [f"{at['p50_ms']:.1f} and {at['p99_ms']:.1f} ms" for at in each["loads"][:2]]
        alone = each["answer_p50_ms"]
        least = least_ms(each["function_rows_per_s"], each["loads"][1]["offered_rows_per_s"])
        columns.append([
            f"{each['overhead_p50_ms']:.2f} ms", f"{each['batching_rows_per_s']:,.0f}",
            f"{each['ratio']:.1f} ×", f"{each['function_ratio']:.1f} ×",
            f"{alone:.{1 if alone > 1 else 2}f} ms", *loads,
            f"{least['p50_ms']:.1f} and {least['p99_ms']:.1f} ms",
        ])  # fmt: skip
    net = saved("serving")["rows"][0]
    half = net["loads"][1]["offered_rows_per_s"]
    p99 = [least_ms(net["function_rows_per_s"], half, 1e-6 * us)["p99_ms"] for us in (90, 60, 40)]
    text = " ".join(SPEED.read_text().split())
    assert f"a p99 of {p99[0]:.1f} ms at the net, with 60 µs {p99[1]:.1f} and with 40 µs" in text
    assert f"40 µs {p99[2]:.1f}." in text
    shown = [[cell.removesuffix(", **missed**") for cell in row[1:3]] for row in answers]
    assert shown == [list(pair) for pair in zip(*columns, strict=True)]
    record = saved("serving_endurance")
    p99, soak, starts = record["malformed"]["p99_ms"], record["soak"], record["starts"]
    assert [row[1] for row in endured] == [
        f"{record['restarts']['lost']} of {record['restarts']['answered']:,}",
        f"{record['malformed']['deaths']}",
        f"{record['malformed']['ratio_to_another_client']:.2f} × "
        f"({p99['beside_another_client']:.1f} and {p99['beside_malformed']:.1f} ms)",
        f"{record['malformed']['ratio_to_alone']:.1f} × ({p99['alone']:.1f} ms)",
        f"{100 * soak['slope_share_per_hour']:.3f} %, seen for an hour; {soak['answered']:,} "
        "answers, none lost",
        f"{starts['later_ready_s']:.1f} s (the first: {starts['first_ready_s']:.1f} s)",
    ]
    for size, row in zip(("70b", "405b"), planned, strict=True):
        times = [saved("serving_plans")[size][aim]["seconds"] for aim in ("latency", "throughput")]
        assert row[1:3] == [f"{seconds:.2g} s" for seconds in times]


def test_the_page_on_platforms_has_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = __import__("report")
    records = saved("platforms")
    assert [each["platform"] for each in records] == ["bentoml", "mlflow", "ray", "litserve"]
    rows = []
    for each in records:
        package, version = next(iter(each["versions"].items()))
        replicas = report.replicas_text(each)
        gap = each["largest_difference"]
        rows.append([
            f"{package} {version}", f"`{each['started_by']}`", f"{each['first_answer_s']:.0f} s",
            f"{gap:.0e}" if gap else "none", replicas,
        ])  # fmt: skip
    assert tables(PLATFORMS)[1] == rows
    (ray,) = (each for each in records if each["platform"] == "ray")
    assert [count for _, count in ray["replicas"]] == [1, 2, 1]
    assert ray["failed_under_load"] == 0
    text = " ".join(PLATFORMS.read_text().split())
    assert f"All {ray['answered_under_load']:,} requests of these clients were answered." in text


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
