"""Splitting the batch against splitting the graph, in one process and across two.

    python benchmarks/splitting.py           # about two minutes; writes results/splitting.json
    python benchmarks/splitting.py --dry     # writes nothing

A model of two towers trains on four virtual devices: all four split the batch, or two split the
towers (``mw.Branches``) and two the batch. The devices are those of one process, or of two under
the launcher, where each tower is one process's. Both sides take their steps in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from quiet import Quiet, Sides

import meshwright as mw
from meshwright.launch.group import GroupOptions, run_group

WIDTH, LAYERS, ROWS = 1024, 3, 256
SIDES: dict[str, tuple[dict[str, int], mw.Branches | None]] = {
    "batch": ({"data": 4}, None),
    "graph": ({"branch": 2, "data": 2}, mw.Branches("branch")),
}
PLACES = {"one process": 1, "two processes": 2}


def loss(params: Any, batch: Any) -> Any:
    """How far the product of two towers is from what was asked."""
    towers = [batch["users"], batch["items"]]
    for number, weights in enumerate((params["users"], params["items"])):
        for weight in weights:
            towers[number] = jnp.tanh(towers[number] @ weight)
    scores = jnp.mean(towers[0] * towers[1], axis=-1)
    return jnp.mean((scores - batch["y"]) ** 2), {}


def program_and_batch() -> tuple[mw.Program, dict[str, np.ndarray]]:
    """Two towers of the same size."""
    draw = np.random.default_rng(0)

    def tower() -> list[np.ndarray]:
        dims = [WIDTH, WIDTH]
        return [draw.normal(0, WIDTH**-0.5, dims).astype("float32") for _ in range(LAYERS)]

    batch = {name: draw.normal(size=[ROWS, WIDTH]).astype("float32") for name in ("users", "items")}
    batch["y"] = draw.normal(size=[ROWS]).astype("float32")
    params = {"users": tower(), "items": tower()}
    return mw.jax_program(loss, params, optax.adam(1e-3), batch=batch), batch


def step_of(side: str) -> Any:
    """A function that takes one step and says its seconds."""
    axes, branches = SIDES[side]
    program, batch = program_and_batch()
    placement = mw.Placement.of(mw.create_mesh(axes), batch="data", unmatched="replicate")
    trainer = mw.Trainer(program, placement, mw.StepOptions(pipeline=branches))
    held = [trainer.init()]
    put = trainer.put(batch)

    def step() -> float:
        begin = time.perf_counter()
        held[0], _ = trainer.step(held[0], put)
        jax.block_until_ready(held[0])
        return time.perf_counter() - begin

    return step


def work(steps: int, into: Path) -> None:
    """In each process of a group: both sides in turn; the first process writes the seconds."""
    sides = {side: step_of(side) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu = Sides()
    for number in range(steps + 2):
        for side, step in sides.items():
            with cpu.runs(side):
                took = step()
            if number >= 2:
                seconds[side].append(took)
    if jax.process_index() == 0:
        into.write_text(json.dumps([seconds, cpu.cpu_s]))


def measured(processes: int, steps: int) -> dict[str, Any]:
    """Seconds of a step of each side, by median, and how much faster splitting the graph is."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "seconds.json"
        command = [__file__, "--steps", str(steps), "--worker", str(into)]
        if run_group(command, GroupOptions(processes=processes, devices=4 // processes)):
            raise SystemExit("a process ended badly; its last lines stand above.")
        seconds, cpu_s = json.loads(into.read_text())
    ratios = [b / g for b, g in zip(seconds["batch"], seconds["graph"], strict=True)]
    medians = {side: statistics.median(of) for side, of in seconds.items()}
    speed = statistics.median(ratios)
    return {"seconds": medians, "speed_of_graph_over_batch": speed, "cpu_s_of_sides": cpu_s}


def main() -> None:
    """Measure, print the table, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        work(asked.steps, asked.worker)
        return
    quiet, found = Quiet.wait(dry=asked.dry), dict[str, Any]()
    for place, count in PLACES.items():
        found[place] = measured(count, asked.steps)
        found[place]["quiet"] = quiet.record(found[place].pop("cpu_s_of_sides"))
    print("| | the batch over 4 | the towers over 2, the batch over 2 | speed |")
    print("|---|---|---|---|")
    for place, row in found.items():
        cells = [f"{row['seconds'][side] * 1e3:.0f} ms" for side in SIDES]
        print(f"| {place} | {' | '.join(cells)} | {row['speed_of_graph_over_batch']:.2f} x |")
    if not asked.dry:
        what = f"two towers of {LAYERS} layers of {WIDTH}, {ROWS} rows, Adam, 4 virtual devices"
        facts = {"what": what, "steps": asked.steps}
        report.save("splitting", [{**facts, "found": found, "machine": report.machine()}])


if __name__ == "__main__":
    main()
