"""The seven language models of the Mesh-TensorFlow paper, dry-run on the meshes of the paper.

Each has six layers, and a feed-forward layer and heads that double from size to size (Shazeer et
al. 2018, table 2); batches are 256 sequences of 256 tokens. Each is compiled for TPU v2 under the
paper's layout, and under the layout that the planner chooses for the same cores. Parameters and
Adafactor's slots are float32, activations bfloat16, and nothing is computed again.

    python benchmarks/paper_sizes.py          # all seven; about half an hour on two quiet cores
    python benchmarks/paper_sizes.py 5        # some, by s; results of others are kept

It takes `pip install "meshwright[tpu,plan]"`, and no TPU. What was compiled before is taken from
the cache of dry runs.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import doc_tables
import jax
import jax.numpy as jnp

import meshwright as mw
import meshwright.named as mn
from meshwright.planning.search.choices import remat_text

RESULTS = Path(__file__).with_name("results") / "paper_sizes.json"
BATCH = {"tokens": jax.ShapeDtypeStruct((256, 256), "int32")}


@dataclass(frozen=True)
class Size:
    """A size of the paper: its mesh, and the TPU cores that make it."""

    target: str
    axes: dict[str, int]

    @property
    def rules(self) -> str:
        split = [f"{dim}:model" for dim in ("vocab", "d_ff", "heads") if "model" in self.axes]
        return ";".join(["batch:batch", *split])


SIZES = {
    -1: Size("v2:4x4", {"batch": 32}),
    0: Size("v2:4x4", {"batch": 32}),
    1: Size("v2:4x4", {"batch": 8, "model": 4}),
    2: Size("v2:4x4", {"batch": 8, "model": 4}),
    3: Size("v2:8x8", {"batch": 16, "model": 8}),
    4: Size("v2:16x16", {"batch": 16, "model": 32}),
    5: Size("v2:16x16", {"batch": 16, "model": 32}),
}


def language_model(s: int) -> mw.Program:
    """The paper's model; tokens that come in and go out have tables of their own."""
    d_ff, heads = int(8192 * 2.0**s), int(8 * 2.0**s)
    dims = f"length:256 vocab:32768 d_model:1024 d_ff:{d_ff} heads:{heads} d_kv:256 layers:6"
    model = mn.models.Transformer(dims, shared_embedding=False, dtype=jnp.bfloat16)
    return mw.named_program(
        lambda params, batch: model.loss(params, batch["tokens"]),
        lambda: model.init(jax.random.key(0)),
        mn.adafactor(),
        batch={"tokens": "batch length"},
        name=f"s={s}",
    )


def of_paper(s: int) -> mw.DryRun:
    """The paper's layout, on its mesh."""
    size = SIZES[s]
    placement = mw.Placement.of(mw.Mesh(size.axes), rules=size.rules)
    program = language_model(s)
    return mw.dry_run(program, BATCH, strategy=placement, target=size.target, blocks="few")


def paper_row(s: int) -> dict[str, Any]:
    """The paper's layout."""
    size, found = SIZES[s], of_paper(s)
    return {
        "parameters": sum(info.nbytes for info in language_model(s).params) // 4,
        "target": size.target,
        "paper": {"axes": size.axes, "rules": size.rules, **figures(found)},
    }


def plan_row(s: int) -> dict[str, Any]:
    """The planner's layout for the same model and cores."""
    size, program = SIZES[s], language_model(s)
    begin = time.process_time()  # whatever else the machine does
    plan = mw.plan(program, BATCH, target=size.target, limit_s=60.0)
    search_s = time.process_time() - begin
    found = mw.dry_run(
        program, BATCH, strategy=plan.strategy(plan.mesh), target=size.target, blocks="few"
    )
    return {
        "axes": dict(plan.axes),
        "rules": ";".join(f"{dim}:{'+'.join(along)}" for dim, along in plan.rules.items()),
        "zero": plan.zero,
        "accumulate": plan.accumulate,
        "remat": plan.remat,
        **figures(found),
        "search_s": round(search_s, 1),
    }


def figures(run: mw.DryRun) -> dict[str, Any]:
    """What the table shows of a dry run."""
    assert run.estimate is not None
    return {
        "peak_bytes": run.peak_bytes,
        "fits": run.fits,
        "step_time_s": run.step_time_s,
        "mfu": run.mfu,
        "bound_by": run.bound_by,
        "waiting_s": run.estimate.waiting_s,
        "unexpected": len(run.unexpected),
        "blocks": None if run.blocks is None else run.blocks.count,
    }


def table(kept: dict[str, Any]) -> str:
    """The recorded sizes as a table of the documentation."""
    lines = [
        "| s | parameters | cores | layout | peak of a core | fits 8 GiB | step | MFU | bound by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for s in sorted(kept, key=int):
        each = kept[s]
        first = f"{s} | {each['parameters'] / 1e9:.2f} B | {cores(each['paper']['axes'])}"
        for who in [who for who in ("paper", "plan") if who in each]:
            found = each[who]
            lines.append(
                f"| {first} | {who}: {laid(found)} | {found['peak_bytes'] / 2**30:.2f} GiB "
                f"| {'yes' if found['fits'] else 'no'} | {1e3 * found['step_time_s']:.1f} ms "
                f"| {found['mfu']:.1%} | {found['bound_by']} |"
            )
            first = " | | "
    return "\n".join(lines)


def cores(axes: dict[str, int]) -> int:
    return mw.Mesh(axes).size


def laid(found: dict[str, Any]) -> str:
    """Mesh, rules and the other choices in a few words."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in found["axes"].items())
    said = [f"`{mesh}`", f"`{found['rules']}`"]
    said += [f"ZeRO {found['zero']}"] if found.get("zero") else []
    said += [f"{found['accumulate']} micro-batches"] if found.get("accumulate", 1) > 1 else []
    again = remat_text(found.get("remat", "none"))
    said += [again] if again else []
    return ", ".join(said)


def keep(kept: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def main(asked: list[str]) -> None:
    mw.virtual_devices(1)  # nothing runs here
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for s in map(int, asked or SIZES):
        begin = time.monotonic()
        kept[str(s)] = paper_row(s)
        keep(kept)
        kept[str(s)]["plan"] = plan_row(s)
        keep(kept)
        print(f"s={s:2}: {time.monotonic() - begin:.0f} s", flush=True)
    doc_tables.show("paper_sizes.py", table(kept))


if __name__ == "__main__":
    main(sys.argv[1:])
