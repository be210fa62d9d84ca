"""The planner's layouts beside those by hand, each dry-run: compiled for machines that are absent.

For each model of ``plan_models.py`` every layout by hand is compiled for the target, then the best
few of the planner, which their dry runs rank. A layout that does not fit is tried again with blocks
computed again in the backward pass, whole as is usual and but for their products, where the model
says what its blocks are. Of the equal blocks of a model one and two are compiled for TPUs, and all
for GPUs, whose compiler takes minutes.

The planner's own model times the layouts by hand as well. Its search is exact, so what it proves to
be the least, beside the least of those by hand, tells how much any layout could win.

    python benchmarks/plans.py                # all; some hours on two quiet cores
    python benchmarks/plans.py mlp_64 ...     # some; results of others are kept
    python benchmarks/plans.py --by-model ... # the planner's model alone; compiled figures are kept

It takes `pip install "meshwright[tpu,cuda,plan]"`, and neither TPU nor GPU. What was compiled
before is taken from the cache of dry runs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Literal

import doc_tables
import jax
from plan_models import JOBS, Hand, Job

import meshwright as mw
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.graph import Graph
from meshwright.planning.search import Choices, cost
from meshwright.planning.search.choices import remat_text
from meshwright.planning.traced_graph import graph_of_step
from meshwright.targets.hardware import hardware_of
from meshwright.targets.target import Target
from meshwright.units import bytes_text, seconds_text

RESULTS = Path(__file__).with_name("results") / "plans.json"
VERIFY = 2
BLOCKS: dict[str, Literal["whole", "few"]] = {"cuda": "whole"}  # elsewhere "few": whole takes hours
FAR = 2.0  # times a device's memory, by the model: compilers try for long to make so much fit
STAGES = "stage"  # what the planner calls the axis of a pipeline
_MANY = 4  # rules, which a table has no room for


def of_hand(job: Job, hand: Hand) -> dict[str, Any]:
    """A layout by hand; where it does not fit, with its blocks computed again, and with less."""
    said = {"axes": hand.axes, "zero": hand.zero}
    held = state_bytes(job, hand)
    available = hardware_of(job.target).memory_bytes
    if available is not None and held > available:
        return {**said, "fits": False, "state_bytes": held}
    found = tried(job, hand, "none", available)
    if found["fits"] is False and job.can_remat:
        found = {
            **tried(job, hand, "block", available),
            "remat": "block",
            "peak_without_bytes": found["peak_bytes"],
            "selective": tried(job, hand, "selective", available),
        }
    return {**said, **found}


def tried(job: Job, hand: Hand, remat: str, available: int | None) -> dict[str, Any]:
    """A layout that recomputes so: compiled, unless by the model it is far too much."""
    model = by_model(job, hand, remat)
    if available is not None and model.get("model_peak_bytes", 0) > FAR * available:
        return {"fits": False, "peak_bytes": model["model_peak_bytes"]}
    return {**compiled(job, hand, remat), **model}


def compiled(job: Job, hand: Hand, remat: str) -> dict[str, Any]:
    begin = time.monotonic()
    run = mw.dry_run(
        job.build(),
        job.batch,
        strategy=laid_by(hand, remat),
        target=job.target,
        blocks=blocks_of(job),
    )
    return {**figures(run), "took_s": round(time.monotonic() - begin)}


def blocks_of(job: Job) -> Literal["whole", "few"]:
    return BLOCKS.get(Target.of(job.target).platform, "few")


def by_model(job: Job, hand: Hand, remat: str) -> dict[str, Any]:
    """What the planner's model says of a layout; nothing of one that it does not know."""
    laid = laid_by(hand, remat)
    try:
        run = mw.dry_run(job.build(), job.batch, strategy=laid, target=job.target, compile=False)
    except mw.TargetError:
        return {}
    return {"model_time_s": run.step_time_s, "model_peak_bytes": run.peak_bytes}


def laid_by(hand: Hand, remat: str) -> mw.Sharded:
    return mw.Sharded.from_placement(hand.placement(), mw.StepOptions(remat=remat))


def figures(run: mw.DryRun) -> dict[str, Any]:
    talk = () if run.estimate is None else run.estimate.communication_s
    return {
        "step_time_s": run.step_time_s,
        "peak_bytes": run.peak_bytes,
        "fits": run.fits,
        "mfu": run.mfu,
        "bound_by": run.bound_by,
        "waiting_s": run.estimate.waiting_s if run.estimate else None,
        "communication_s": {"+".join(axes): seconds for axes, seconds in talk},
        "unexpected": len(run.unexpected),
    }


def state_bytes(job: Job, hand: Hand) -> int:
    """What parameters and slots of one device take, exactly."""
    step = abstract_step(job.build(), job.batch, mw.Sharded.from_placement(hand.placement()))
    return sum(
        jax.dtypes.canonicalize_dtype(each.dtype).itemsize
        * size_of(each.sharding.shard_shape(each.shape))
        for each in jax.tree.leaves(step.state)
    )


def size_of(dims: tuple[int, ...]) -> int:
    size = 1
    for dim in dims:
        size *= dim
    return size


def of_plan(job: Job) -> dict[str, Any]:
    """The planner's best few, as their dry runs rank them; its search is timed by itself."""
    begin, busy = time.monotonic(), time.process_time()  # whatever else the machine does
    first = mw.plan(job.build(), job.batch, target=job.target, limit_s=60.0)
    search_s = time.process_time() - busy
    best = mw.plan(
        job.build(),
        job.batch,
        target=job.target,
        verify=VERIFY,
        blocks=blocks_of(job),
        limit_s=60.0,
    )
    options = [best.chosen, *best.runners_up]
    return {
        "search_s": round(search_s, 2),
        "is_proven": first.is_proven,
        "took_s": round(time.monotonic() - begin),
        "options": [
            {
                "axes": dict(each.axes),
                "rules": {dim: list(along) for dim, along in each.rules},
                "zero": each.zero,
                "accumulate": each.accumulate,
                "remat": each.remat,
                "step_time_s": each.dry_run_time_s,
                "peak_bytes": each.dry_run_peak_bytes,
                "model_time_s": each.time_s,
                "model_peak_bytes": each.peak_bytes,
            }
            for each in options
        ],
    }


# In words


def ratio(found: dict[str, Any], selective: bool = False) -> float | None:
    """The plan's time by that of the fastest layout by hand that fits, also ``selective`` ones.

    None where these were not tried.
    """
    ways = [*found["hand"].values()]
    if selective:
        again = [each for each in ways if "remat" in each]
        if any("selective" not in each for each in again):
            return None
        ways += [each["selective"] for each in again]
    hand = [each["step_time_s"] for each in ways if each["fits"] and each["step_time_s"]]
    plan = found.get("plan", {}).get("options", [{}])[0].get("step_time_s")
    return None if not hand or plan is None else plan / min(hand)


def least_by_model(found: dict[str, Any]) -> float | None:
    """The least time of any layout by that of the fastest by hand, both by the planner's model.

    None where the search is not proven: then nothing is known of layouts that it did not meet.
    """
    hand = [
        each["model_time_s"]
        for each in found["hand"].values()
        if each["fits"] and each.get("model_time_s")
    ]
    if not hand or not found["plan"]["is_proven"]:
        return None
    return min(each["model_time_s"] for each in found["plan"]["options"]) / min(hand)


def table(kept: dict[str, Any]) -> str:
    lines = [
        "| model | target | fastest by hand | | the plan | | plan ÷ hand "
        "| given selective remat | least ÷ hand, by the model | search |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in kept.values():
        fits = {n: e for n, e in each["hand"].items() if e["fits"] and e["step_time_s"]}
        if "plan" not in each or not fits:
            continue
        name = min(fits, key=lambda name: fits[name]["step_time_s"])
        plan = each["plan"]["options"][0]
        least = least_by_model(each)
        by_model = "" if least is None else f"{least:.3f}"
        given = ratio(each, selective=True)
        given_selective = "not tried" if given is None else f"{given:.3f}"
        lines.append(
            f"| {each['what']} | `{each['target']}` | {name}{again(fits[name])} "
            f"| {time_and_peak(fits[name])} | {laid(plan)} | {time_and_peak(plan)} "
            f"| **{ratio(each):.3f}** | {given_selective} | {by_model} "
            f"| {each['plan']['search_s']:.1f} s |"
        )
    return "\n".join(lines)


def again(found: dict[str, Any]) -> str:
    """What is computed again, in words."""
    words = remat_text(found.get("remat", "none"))
    return f", {words}" if words else ""


def time_and_peak(found: dict[str, Any]) -> str:
    return f"{seconds_text(found['step_time_s'])}, {bytes_text(found['peak_bytes'])}"


def laid(option: dict[str, Any]) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in option["axes"].items())
    said = [f"`{mesh}`"]
    rules = [f"{dim}:{'+'.join(along)}" for dim, along in option["rules"].items()]
    said += [f"`{';'.join(rules)}`"] if len(rules) < _MANY else []
    said += [f"ZeRO {option['zero']}"] if option["zero"] else []
    said += [f"{option['accumulate']} micro-batches"] if option["accumulate"] > 1 else []
    return ", ".join(said) + again(option)


def main(asked: list[str]) -> None:
    mw.virtual_devices(1)  # nothing runs here
    only_model = "--by-model" in asked
    for name in [each for each in asked if each != "--by-model"] or JOBS:
        if only_model:
            model_again(name)
        else:
            everything(name)
    doc_tables.show("plans.py", table(kept_results()))


def everything(name: str) -> None:
    """Compile a model's layouts by hand and the planner's, and keep what is found at once."""
    job, begin = JOBS[name], time.monotonic()
    found: dict[str, Any] = {"what": job.what, "target": job.target, "hand": {}}
    for hand in job.by_hand:
        found["hand"][hand] = of_hand(job, job.by_hand[hand])
        print(f"{name}: {hand}: {found['hand'][hand]}", flush=True)
        keep(name, found)
    found["plan"] = of_plan(job)
    keep(name, found)
    print(f"{name}: {ratio(found)}, {time.monotonic() - begin:.0f} s", flush=True)


def model_again(name: str) -> None:
    """What the planner's model says of all layouts, beside what was compiled before."""
    job, found = JOBS[name], kept_results()[name]
    for name_of_hand, known in found["hand"].items():
        hand_by_model(job, job.by_hand[name_of_hand], known)
    graph = on_one_device(job)
    for option in found["plan"]["options"]:
        option |= option_by_model(job, graph, option)
    keep(name, found)
    print(f"{name}: {ratio(found)} compiled, at least {least_by_model(found)} by the model")


def hand_by_model(job: Job, hand: Hand, known: dict[str, Any]) -> None:
    """What the planner's model says of a layout by hand, also in place of what was not compiled."""
    for remat, way in (
        (known.get("remat", "none"), known),
        ("selective", known.get("selective", {})),
    ):
        if "step_time_s" in way:
            way |= by_model(job, hand, remat)
        elif "peak_bytes" in way:  # by the model, as it was too far above the limit
            way["peak_bytes"] = by_model(job, hand, remat)["model_peak_bytes"]
    available = hardware_of(job.target).memory_bytes
    if available is not None and "peak_without_bytes" in known:
        without = by_model(job, hand, "none").get("model_peak_bytes", 0)
        known |= {"peak_without_bytes": without} if without > FAR * available else {}


def on_one_device(job: Job) -> Graph:
    """The step as the planner reads it."""
    placement, model = mw.Placement.of(mw.Mesh({"batch": 1})), job.build()
    strategy = mw.Sharded.from_placement(placement)
    described = placement if isinstance(model, mw.Program) else strategy
    return graph_of_step(abstract_step(model, job.batch, described))


def option_by_model(job: Job, graph: Graph, option: dict[str, Any]) -> dict[str, Any]:
    """What the planner's model says of an option; nothing where dims are called otherwise now, and
    of a pipeline, which takes a search of its own."""
    if STAGES in option["axes"]:
        return {}
    choices = Choices(option["zero"], option["accumulate"], option["remat"])
    axes = tuple(option["axes"].items())
    try:
        new = cost(graph, axes, option["rules"], choices, target=job.target)
    except mw.LayoutError as error:
        print(f"left as it was: {error}")
        return {}
    return {"model_time_s": new.time_s, "model_peak_bytes": new.peak_bytes}


def kept_results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(name: str, found: dict[str, Any]) -> None:
    kept = kept_results()
    kept[name] = found
    RESULTS.write_text(json.dumps({n: kept[n] for n in JOBS if n in kept}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
