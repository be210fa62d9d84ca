"""How long the planner takes to find layouts for the models of ``plan_models.py``, compiling none.

    python benchmarks/search_times.py              # all; some minutes on two quiet cores
    python benchmarks/search_times.py mlp_64 ...   # some; results of others are kept

Each model is planned by itself, in a process of its own: its step is traced, its graph made small,
and layouts are searched. Seconds of CPU count, those of all threads: what else the machine does
adds to the others alone.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import report
from plan_models import JOBS, Job, fresh, ids
from quiet import Quiet

import meshwright as mw
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.search import Space, plan_step, search
from meshwright.planning.search.compact import compact
from meshwright.planning.traced_graph import graph_of_step
from meshwright.targets.hardware import hardware_of
from meshwright.targets.target import Target

NAME = "search_times"
LIMIT_S = 10.0  # of CPU, for the search of one model


def keras_gpt2(depth: int = 48, width: int = 1600, heads: int = 25) -> Any:
    """GPT-2 of Keras' own layers; its optimizer clips by the norm of all gradients."""
    import keras
    from keras import layers

    tokens = keras.Input([1024], dtype="int32")
    x = layers.Embedding(50304, width)(tokens)
    for _ in range(depth):
        h = layers.LayerNormalization()(x)
        h = layers.MultiHeadAttention(heads, width // heads)(h, h, use_causal_mask=True)
        x = layers.Add()([x, layers.Dropout(0.1)(h)])
        h = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(width)(h))])
    model = keras.Model(tokens, layers.Dense(50304)(layers.LayerNormalization()(x)), name="gpt2")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4, global_clipnorm=1.0), loss)
    return model


EVERY = {
    **JOBS,
    "gpt2_keras": Job(
        "GPT-2 1.5B in Keras, 128 x 1,024 tokens", fresh(keras_gpt2),
        (ids(128, 1024), ids(128, 1024)), "h100:8", {},
    ),
}  # fmt: skip


@contextlib.contextmanager
def taking(took: dict[str, Any], part: str) -> Iterator[None]:
    """Keep the seconds of CPU, and of the clock, that a part takes."""
    wall, cpu = time.monotonic(), time.process_time()
    yield
    took[part] = {
        "cpu_s": round(time.process_time() - cpu, 2),
        "wall_s": round(time.monotonic() - wall, 2),
    }


def measured(job: Job) -> dict[str, Any]:
    """One model in this process, from nothing."""
    mw.virtual_devices(1)  # nothing runs here
    target, took = Target.of(job.target), {}
    hardware = hardware_of(target)
    one = mw.Sharded.from_placement(mw.Placement.of(mw.Mesh({"batch": 1})))
    program = job.build()
    with taking(took, "trace"):
        graph = graph_of_step(abstract_step(program, job.batch, one))
    with taking(took, "compact"):
        small = compact(graph, target.platform)
    limit = hardware.memory_bytes
    with taking(took, "search"):
        found = search(graph, target, hardware, limit_bytes=limit, space=Space(), limit_s=600.0)
    with taking(took, "again"):  # what was read from the graph is known by now
        plan = plan_step(graph, target, limit_s=600.0)
    return {
        "what": job.what,
        "target": job.target,
        "operations": len(graph.operations),
        "kinds_of_work": len(small.works),
        **took,
        "is_proven": found.is_proven,
        "tables": found.tables,
        "solved": found.solved,
        "axes": dict(plan.axes),
        "rules": {dim: list(along) for dim, along in plan.chosen.rules},
        "zero": plan.zero,
        "accumulate": plan.accumulate,
        "remat": plan.remat,
        "time_s": [each.cost.time_s for each in found.candidates],
        "peak_bytes": [each.cost.peak_bytes for each in found.candidates],
    }


def line(name: str, found: dict[str, Any]) -> str:
    """A row of what is printed."""
    said = [f"{found[part]['cpu_s']:6.2f} ({found[part]['wall_s']:6.2f})" for part in PARTS]
    status = "proven" if found["is_proven"] else "NOT PROVEN"
    return "  ".join([f"{name:14}", *said, f"{found['tables']}/{found['solved']}", status])


PARTS = ("trace", "compact", "search", "again")


def main(asked: list[str]) -> None:
    kept = {each["name"]: each for each in report.saved(NAME)}
    heads = "  ".join(f"{part:>15}" for part in PARTS)
    print(f"{'CPU s (wall s)':14}{heads}  tables built/solved")
    quiet = Quiet.wait()
    for name in asked or EVERY:
        command = [sys.executable, __file__, "--one", name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(said.splitlines()[-1])
        print(line(name, found), flush=True)
        kept[name] = {"name": name, **found, "quiet": quiet.record()}
        kept[name]["machine"] = report.machine()
        report.save(NAME, [kept[each] for each in EVERY if each in kept])
    slow = [name for name in kept if kept[name]["search"]["cpu_s"] > LIMIT_S]
    print(f"within {LIMIT_S:g} s of CPU: " + ("all" if not slow else f"all but {', '.join(slow)}"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measured(EVERY[sys.argv[2]])))
    else:
        main(sys.argv[1:])
