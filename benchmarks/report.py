"""Medians, ratios and tables out of the rounds; reads and writes ``results/``."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quiet import Quiet, cells
from settings import JOBS, OURS, PAIRS, SAME_LOSS, Job, Pair

RESULTS = Path(__file__).parent / "results"
COMMAND = "python benchmarks/run.py"
FEATURES_COMMAND = "python benchmarks/features.py"
NAMED_SIDES = (
    ("ours", "ours_zero_1", "ours_in_rows"),
    ("hand_written_plain", "hand_written_scattered", "hand_written_in_rows"),
    ("mesh_tensorflow",),
)
WAYS = {
    "ours_zero_1": "zero=1 ",
    "hand_written_scattered": "scattered ",
    "ours_in_rows": "rows:all ",
    "hand_written_in_rows": "rows split ",
}
SERVERS_SIDES = ("ours", "tensorflow")
NAMED_COMMAND = "python benchmarks/named.py"
TRACING_COMMAND = "python benchmarks/named_tracing.py"
SERVERS_COMMAND = "python benchmarks/parameter_server.py"
EXCHANGES_COMMAND = "python benchmarks/ps_push_pull.py"
ACCURACY_COMMAND = "python benchmarks/ps_accuracy.py"
PROCESSES_COMMAND = "python benchmarks/many_processes.py"
PLATFORMS_COMMAND = "python benchmarks/platforms.py"
RANKING_COMMAND = "python benchmarks/ranking.py"
RANKING_SHARE = 0.9  # of the rank correlation of two measurements, asked of the estimate
RANKING_WITHIN = 6  # layouts that have to be within twice the fastest

NAMES = {
    "ours": "Meshwright `strategy.fit`",
    "hand_written": "hand-written `jax.jit` loop",
    "keras_data_parallel": "Keras 3 `DataParallel` + `fit`",
    "tf_dtensor": "TensorFlow DTensor + tf_keras",
    "tf_dtensor_right": "the same, `..._GROUP_SIZE=1`",
}

TIMELESS = (  # files of benchmarks that only compile or count, and of tests of faults
    *("chaos", "false_alarms", "large_model", "paper_sizes", "pipeline_wins", "planned_peaks"),
    *("plans", "ps_accuracy"),
)
NAMING = ("name", "job", "model", "pair", "says", "what")  # what a record is called by

UNDER_LOAD_CORES = 0.25  # kept busy by others while a side ran
UNDER_LOAD, UNKNOWN_LOAD = "†", "‡"

Rounds = list[dict[str, dict[str, Any]]]  # per round: side -> what its script printed


def job_result(job: Job, rounds: Rounds) -> dict[str, Any]:
    """Everything that is kept about one job, ready for JSON."""
    sides = {side: _summary([r[side] for r in rounds]) for side in rounds[0]}
    pairs = [pair for pair in PAIRS if pair.job == job.name and pair.peer in sides]
    return {
        "job": job.name,
        "says": job.says,
        "batch_size": job.batch_size,
        "measured_steps": rounds[0][OURS]["measured_steps"],
        "rounds": len(rounds),
        "sides": sides,
        "pairs": [_compare(pair, sides) for pair in pairs],
        "other_busy_cores": other_busy_cores(rounds),
        "machine": machine(),
    }


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    times_ms = [result["ms_per_step"] for result in results]
    return {
        "median_ms_per_step": statistics.median(times_ms),
        "ms_per_step_by_round": times_ms,
        "mean_ms_per_step_by_round": [result["mean_ms_per_step"] for result in results],
        "cpu_s_by_round": [result["load"]["cpu_s"] for result in results],
        "loss": statistics.median(result["loss"] for result in results),
        "accuracy": statistics.median(result["accuracy"] for result in results),
        "versions": results[0]["versions"],
    }


def _compare(pair: Pair, sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The ratio in each round, where both ran one after the other, and the median of them."""
    ours, peer = sides[OURS], sides[pair.peer]
    above, below = (ours, peer) if pair.measure == "time" else (peer, ours)
    ratios = _ratios(above, below, "ms_per_step_by_round")
    return {
        "peer": pair.peer,
        "measure": pair.measure,
        "ratio": statistics.median(ratios),
        "ratio_by_round": ratios,
        "mean_ratio": statistics.median(_ratios(above, below, "mean_ms_per_step_by_round")),
        "loss": ours["loss"],
        "peer_loss": peer["loss"],
    }


def goal_of(job: dict[str, Any], recorded: dict[str, Any]) -> tuple[float, bool]:
    """What is wanted of a recorded ratio, as ``settings.py`` has it now, and whether it is met."""
    (pair,) = (p for p in PAIRS if (p.job, p.peer) == (job["job"], recorded["peer"]))
    ratio, by_time = recorded["ratio"], pair.measure == "time"
    most = SAME_LOSS * recorded["peer_loss"]
    loss_is_fine = not pair.same_or_better_loss or recorded["loss"] <= most
    return pair.target, loss_is_fine and (ratio <= pair.target if by_time else ratio >= pair.target)


def _ratios(above: dict[str, Any], below: dict[str, Any], times: str) -> list[float]:
    return [one / other for one, other in zip(above[times], below[times], strict=True)]


def other_busy_cores(rounds: Rounds) -> float | None:
    """The most cores that other processes kept busy while any side ran."""
    found = [side["load"]["other_busy_cores"] for each in rounds for side in each.values()]
    return None if None in found else max(found)


def _says(each: dict[str, Any]) -> str:
    """What was measured, marked where it was taken under load, or where that is unknown."""
    return f"{each['says']}{_mark(each)}"


def _mark(each: dict[str, Any]) -> str:
    others = each.get("other_busy_cores", each.get("quiet", {}).get("other_busy_cores"))
    if others is None:
        return f" {UNKNOWN_LOAD}"
    return f" {UNDER_LOAD}" if others > UNDER_LOAD_CORES else ""


def machine() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def saved(name: str) -> list[dict[str, Any]]:
    """What ``features.py`` or ``named.py`` has measured before."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def parser(says: str | None, rounds: int, **several: Iterable[str]) -> argparse.ArgumentParser:
    """Reads how many rounds are run, what is left out of ``several`` things, and ``--dry``."""
    result = argparse.ArgumentParser(
        description=says, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, choices in several.items():
        result.add_argument(f"--{name}", nargs="+", default=list(choices), choices=list(choices))
    result.add_argument("--rounds", type=int, default=rounds)
    result.add_argument("--dry", action="store_true", help="write no results")
    return result


def measure_each(
    name: str,
    key: str,
    measured: Iterable[str],
    order: Iterable[str],
    measure: Callable[[str], dict[str, Any]],
    table: Callable[[list[dict[str, Any]]], str],
    *,
    dry: bool,
) -> None:
    """Measure one after the other, print its row, and save it beside what was measured before.

    Waits for quiet before. Saved each time, for the whole takes long and may be cut short.
    """
    rows = {row[key]: row for row in saved(name)}
    quiet = Quiet.wait(dry=dry)
    for job in measured:
        row = measure(job)
        rows[job] = row | {"quiet": quiet.record(row.pop("cpu_s_of_sides", None))}
        print(table([rows[job]]).splitlines()[-1], flush=True)
        if not dry:
            save(name, [rows[job] for job in order if job in rows])
            write_page()


def names_on_command_line(purpose: str, known: Collection[str]) -> list[str]:
    """The names that a benchmark was started with, or all that are known."""
    parser = argparse.ArgumentParser(description=purpose.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    names = parser.parse_args().names
    if unknown := set(names) - set(known):
        parser.error(f"unknown name {min(unknown)!r}; expected one of {', '.join(known)}")
    return names or list(known)


def save(name: str, result: Any) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def write_page() -> Path:
    """``results/README.md``, made anew out of all results that are there."""
    page = RESULTS / "README.md"
    page.write_text(page_text())
    return page


def page_text() -> str:
    found = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    features, named = found.pop("features", []), found.pop("named", [])
    tracing = found.pop("named_tracing", [])
    servers = found.pop("parameter_server", [])
    exchanges, accuracy = found.pop("ps_push_pull", []), found.pop("ps_accuracy", [])
    ranking, processes = found.pop("ranking", []), found.pop("many_processes", [])
    platforms = found.pop("platforms", [])
    jobs = [found[name] for name in JOBS if name in found]
    parts = [
        "# Results",
        f"Made by `{COMMAND}`; the files beside this one hold every round.",
        "What is measured, and how: [../README.md](../README.md).",
        pairs_table(jobs),
        sides_table(jobs),
    ]
    start_up = found.get("start_up")
    if start_up:
        parts.append(start_up_table(start_up["rows"]))
    sections = (
        (f"`{FEATURES_COMMAND}`", features_table, features),
        (f"`{NAMED_COMMAND}`", named_table, named),
        (f"`{TRACING_COMMAND}`", features_table, tracing),
        (f"`{SERVERS_COMMAND}`", servers_table, servers),
        (f"`{EXCHANGES_COMMAND}`", exchanges_table, exchanges),
        (f"`{ACCURACY_COMMAND}`", accuracy_table, accuracy),
        (f"`{RANKING_COMMAND}`, Spearman's rank correlations", ranking_table, ranking),
        (f"`{PROCESSES_COMMAND}`", processes_table, processes),
        (f"`{PLATFORMS_COMMAND}`", platforms_table, platforms),
    )
    for made_by, table, rows in sections:
        if rows:
            parts += [f"Made by {made_by}:", table(rows)]
    parts += ["How quiet the machine was, of all files that are beside this one:", loads_table()]
    # Other files are of other pages: their programs print them.
    start_ups = [start_up] if start_up else []
    listed = jobs, start_ups, features, named, tracing
    listed += servers, exchanges, accuracy, ranking, processes, platforms
    parts.append(_marks([each for rows in listed for each in rows if rows is not start_ups]))
    parts.append(_facts([each for rows in listed for each in rows], jobs))
    return "\n\n".join(part for part in parts if part) + "\n"


def loads_table() -> str:
    """What each benchmark recorded of the machine meanwhile; last those that recorded nothing."""
    rows, silent = [], []
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        found = [(name, *cells(quiet)) for name, quiet in _quiets(kept, path.stem)]
        rows += found
        if not found and path.stem not in TIMELESS:
            silent.append(path.stem)
        elif isinstance(kept, dict):  # of parts that are taken one by one
            parts = ((name, part) for name, part in kept.items() if isinstance(part, dict))
            own = [name for name, part in parts if "machine" in part and "quiet" not in part]
            silent += [f"{path.stem}: {name}" for name in own]
    lines = [f"Taken before it was recorded: {', '.join(silent)}."] if silent else []
    heads = ("measured", "waited for quiet", "load of the machine", "CPU time of each side")
    return "\n\n".join([part for part in (_table(heads, rows), *lines) if part])


def _quiets(found: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of :class:`quiet.Quiet` in a file, each with the names on the way to it."""
    if isinstance(found, list):
        for each in found:
            yield from _quiets(each, name)
    elif isinstance(found, dict):
        own = next((found[key] for key in NAMING if isinstance(found.get(key), str)), "")
        here = f"{name}: {own}" if own and own not in name else name
        if "quiet" in found:
            yield here, found["quiet"]
        for key, value in found.items():
            if key not in ("quiet", "rounds"):
                nested = isinstance(value, dict)
                yield from _quiets(value, f"{here}: {key}".strip(": ") if nested else here)


def pairs_table(jobs: list[dict[str, Any]]) -> str:
    rows = [
        (
            _says(job),
            NAMES[pair["peer"]],
            "time, ours ÷ peer" if pair["measure"] == "time" else "steps/s, ours ÷ peer",
            f"**{pair['ratio']:.2f}** ({min(pair['ratio_by_round']):.2f}"
            f"–{max(pair['ratio_by_round']):.2f})",
            # Older files hold means over all epochs, and nothing else.
            f"{pair['mean_ratio']:.2f}" if "mean_ratio" in pair else "← means of all",
            f"{'≤' if pair['measure'] == 'time' else '≥'} {goal:.2f}",
            f"{pair['loss']:.4f} / {pair['peer_loss']:.4f}",
            "met" if is_met else "**missed**",
        )
        for job in jobs
        for pair in job["pairs"]
        for goal, is_met in [goal_of(job, pair)]
    ]
    heads = (
        *("job", "peer", "ratio of", "fastest epochs: median (min–max)", "all epochs: median"),
        *("target", "loss ours / peer", ""),
    )
    return _table(heads, rows)


def sides_table(jobs: list[dict[str, Any]]) -> str:
    rows = [
        (
            _says(job),
            NAMES[name],
            f"{side['median_ms_per_step']:.2f}",
            f"{1000 / side['median_ms_per_step']:.0f}",
            f"{side['loss']:.4f}",
            f"{side['accuracy']:.4f}",
        )
        for job in jobs
        for name, side in job["sides"].items()
    ]
    return _table(("job", "side", "ms/step", "steps/s", "loss", "accuracy"), rows)


def start_up_table(rows: list[dict[str, Any]]) -> str:
    return _table(
        ("command", "median", "limit", ""),
        [
            (
                f"`{row['command']}`",
                f"{row['median_s']:.3f} s",
                "" if row["limit_s"] is None else f"{row['limit_s']} s",
                ""
                if row["limit_s"] is None
                else ("met" if row["median_s"] < row["limit_s"] else "**missed**"),
            )
            for row in rows
        ],
    )


def features_table(features: list[dict[str, Any]]) -> str:
    rows = [
        (
            _says(each),
            f"**{each['ratio']:.3f}** ({min(each['ratio_by_round']):.3f}"
            f"–{max(each['ratio_by_round']):.3f})",
            f"≤ {each['limit']:.2f}",
            "met" if each["ratio"] <= each["limit"] else "**missed**",
        )
        for each in features
    ]
    return _table(("feature", "median (min–max)", "limit", ""), rows)


def named_table(named: list[dict[str, Any]]) -> str:
    rows = [
        (
            _says(each),
            f"`{each['layout']}`",
            *(_fastest(each, sides) for sides in NAMED_SIDES),
            _spread(each["ours_over_best"]),
            f"≤ {each['limit']:.2f}",
            _spread(each["best_over_peer"]),
            _spread(each["ours_over_peer"]),
            "met" if _named_is_met(each) else "**missed**",
        )
        for each in named
    ]
    heads = (
        *("step", "layout", "ours", "by hand", "Mesh-TensorFlow"),
        *("ours ÷ best by hand", "limit", "best by hand ÷ Mesh-TensorFlow (≤ 1)"),
        *("ours ÷ Mesh-TensorFlow", ""),
    )
    return _table(heads, rows)


def servers_table(servers: list[dict[str, Any]]) -> str:
    rows = [
        (
            _says(each),
            *(f"{each['steps_per_s'][side]:,.0f}" for side in SERVERS_SIDES),
            *(f"{each['cpu_ms_per_step'][side]:.2f} ms" for side in SERVERS_SIDES),
            _spread(each["ratio_by_round"]),
            f"≥ {each['at_least']:.0f}",
            "met" if each["ratio"] >= each["at_least"] else "**missed**",
        )
        for each in servers
    ]
    heads = (
        *("scheduled step", "ours: steps/s", "TensorFlow: steps/s"),
        *("CPU of all five, ours", "TensorFlow", "steps/s, ours ÷ TensorFlow", "target", ""),
    )
    return _table(heads, rows)


def exchanges_table(exchanges: list[dict[str, Any]]) -> str:
    rows = []
    for each in exchanges:
        wanted, ratio = each["at_least_per_s"], each["at_least_over_tcp"]
        ratios = each["over_tcp_by_round"]
        asked = [each["per_s"] >= wanted] if wanted else []
        asked += [statistics.median(ratios) >= ratio] if ratio else []
        rows.append(
            (
                _says(each),
                f"{each['per_s']:,.0f}",
                f"≥ {wanted:,}" if wanted else "",
                *(f"{us:.0f} µs" for us in each["cpu_us"]),
                _spread(ratios) if ratios else "",
                ("met" if all(asked) else "**missed**") if asked else "",
            )
        )
    heads = (
        *("push-pull of 400 KB", "per second", "target"),
        *("CPU here", "CPU there", "speed ÷ plain TCP", ""),
    )
    return _table(heads, rows)


def processes_table(processes: list[dict[str, Any]]) -> str:
    """Two processes of one core each: speeds of every side, and ratios with what is wanted."""
    rows = []
    for each in processes:
        speeds = ", ".join(f"{side} {speed:.1f}" for side, speed in each["steps_per_s"].items())
        for number, (what, ratios) in enumerate(each["ratios"].items()):
            wanted = each["wanted"].get(what)
            met = (
                "" if wanted is None else "met" if each["median"][what] >= wanted else "**missed**"
            )
            target = "" if wanted is None else f"≥ {wanted}"
            shown = (_says(each), speeds) if number == 0 else ("", "")
            rows.append((*shown, what, _spread(ratios), target, met))
    return _table(("job", "steps/s", "ratio", "median (min–max)", "target", ""), rows)


def pipelines_table(found: dict[str, Any]) -> str:
    """Two stages: speeds within a round, and steps over the ideals of their tick tables."""
    rows = []
    for what, ratios in found["ratios"].items():
        wanted, median = found["wanted"][what], statistics.median(ratios)
        target = "" if wanted is None else f"≥ {wanted}"
        met = "" if wanted is None else "met" if median >= wanted else "**missed**"
        rows.append((f"speed, {what}", _spread(ratios), target, met))
    for schedule, ratios in found["over_ideal"].items():
        met = statistics.median(ratios) <= found["most_over_ideal"]
        over = found["over_ms_per_tick"][schedule]
        rows.append(
            (
                f"step, {schedule} ÷ its table's ideal ({over:.2f} ms more per tick)",
                _spread(ratios),
                f"≤ {found['most_over_ideal']}",
                "met" if met else "**missed**",
            )
        )
    return _table((found["what"], "median (min–max)", "target", ""), rows)


def accuracy_table(accuracy: list[dict[str, Any]]) -> str:
    rows = [
        (
            _says(each),
            f"{each['accuracy']:.4f}",
            "" if each["staleness"] is None else f"{each['staleness']:.2f}",
            f"{each['over_synchronous']:.4f}",
            f"≥ {each['at_least']}" if each["at_least"] else "",
            ("met" if each["over_synchronous"] >= each["at_least"] else "**missed**")
            if each["at_least"]
            else "",
        )
        for each in accuracy
    ]
    said = f"{accuracy[0]['epochs']} epochs of {accuracy[0]['rows']:,} digits"
    heads = (said, "accuracy", "mean staleness", "÷ best synchronous", "target", "")
    return _table(heads, rows)


def ranking_table(runs: list[dict[str, Any]]) -> str:
    rows = []
    for number, each in enumerate(runs, 1):
        found, wanted = each["spearman"], RANKING_SHARE * each["repeat_to_repeat"]
        others = [found["bytes alone"], found["FLOPs alone"]]
        close = each["within_2x_of_fastest"]
        is_met = found["estimate"] >= max(wanted, *others) and close >= RANKING_WITHIN
        rows.append(
            (
                f"{number}: {len(each['layouts'])} layouts, {close} within twice the fastest"
                + _mark(each),
                *(f"{rank:.3f}" for rank in (each["repeat_to_repeat"], wanted)),
                f"**{found['estimate']:.3f}**",
                *(f"{rank:.3f}" for rank in others),
                _over_estimate(each["layouts"]),
                "met" if is_met else "**missed**",
            )
        )
    heads = (
        *("run", "two measurements", f"wanted: {RANKING_SHARE} of it"),
        *("estimate", "bytes alone", "FLOPs alone", "measured over estimated time", ""),
    )
    return _table(heads, rows)


def _over_estimate(layouts: list[dict[str, Any]]) -> str:
    ratios = [min(each["passes_s"]) / each["estimated_s"] for each in layouts]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def platforms_table(platforms: list[dict[str, Any]]) -> str:
    """Platforms that host a server: versions, seconds until the first answer, replicas."""
    rows = []
    for each in platforms:
        (package, version), *others = each["versions"].items()
        rows.append(
            (
                f"{package} {version}{_mark(each)}",
                f"`{each['started_by']}`",
                f"{each['first_answer_s']:.1f} s",
                f"{each['largest_difference']:.1e}",
                replicas_text(each),
                ", ".join(f"{name} {of}" for name, of in others),
            )
        )
    heads = (
        *("platform", "started by", "process to first answer", "largest difference"),
        *("replicas that run", "versions"),
    )
    return _table(heads, rows)


def replicas_text(platform: dict[str, Any]) -> str:
    """How many ran, and from which second on: ``1 (0 s), 2 (35 s), 1 (70 s)``."""
    return ", ".join(f"{count} ({at_s:.0f} s)" for at_s, count in platform.get("replicas", []))


def _fastest(each: dict[str, Any], sides: Sequence[str]) -> str:
    """Each of a side's ways, as milliseconds: ``135.1, scattered 105.3``."""
    times = each["ms_per_step_by_round"]
    took = {WAYS.get(side, ""): min(times[side]) for side in sides if side in times}
    return ", ".join(f"{way}{ms:.1f} ms" for way, ms in took.items())


def _named_is_met(each: dict[str, Any]) -> bool:
    peer = each["best_over_peer"]
    fast = statistics.median(each["ours_over_best"]) <= each["limit"]
    return fast and bool(peer) and statistics.median(peer) <= 1


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return "not measured"
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}–{max(ratios):.2f})"


def _marks(marked: list[dict[str, Any]]) -> str:
    """What the marks mean, of those that stand on the page."""
    meanings = {
        UNDER_LOAD: f"taken under load: others kept more than {UNDER_LOAD_CORES} cores busy",
        UNKNOWN_LOAD: "the load of the machine was not recorded",
    }
    used = {_mark(each).strip() for each in marked}
    return "; ".join(f"{mark} {text}" for mark, text in meanings.items() if mark in used)


def _facts(saved: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> str:
    versions = {
        f"{package} {version}"
        for job in jobs
        for side in job["sides"].values()
        for package, version in side["versions"].items()
    }
    machines = {
        f"{m['cores']} cores ({m['processor']}), {m['system']}, Python {m['python']}, {m['date']}"
        for m in (each["machine"] for each in saved)
    }
    return "Measured on " + "; ".join(sorted(machines)) + f". {', '.join(sorted(versions))}."


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
