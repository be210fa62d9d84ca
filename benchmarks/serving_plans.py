"""How long it takes to plan the serving of models that are larger than a machine.

``python benchmarks/serving_plans.py [70b] [405b]`` plans the forward pass of models with the shapes
of Llama 3 (Grattafiori et al. 2024) for ``h100:8`` and ``v5p:4x4x4``, as shapes only, once for
latency and once for throughput. It writes ``results/serving_plans.json``: seconds from the built
model to the plan, those of the processor (on a busy machine the time limit of the search passes
while it waits), what was chosen, and the load of the machine before and after. Neither target is
needed.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from quiet import Quiet
from report import RESULTS, machine

import meshwright as mw

VOCABULARY, KEY_HEADS, LENGTH = 128_256, 8, 2048
MOST_S = 60.0  # that a plan may take


@dataclass(frozen=True)
class Shape:
    """A decoder of Llama 3, and the devices that it is planned for."""

    layers: int
    width: int
    heads: int
    hidden: int
    target: str

    @property
    def head(self) -> int:
        return self.width // self.heads

    def params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every weight, in bfloat16."""
        keys = KEY_HEADS * self.head
        block = {
            "attention/norm": (self.width,),
            "attention/query": (self.width, self.width),
            "attention/key": (self.width, keys),
            "attention/value": (self.width, keys),
            "attention/out": (self.width, self.width),
            "mlp/norm": (self.width,),
            "mlp/gate": (self.width, self.hidden),
            "mlp/up": (self.width, self.hidden),
            "mlp/down": (self.hidden, self.width),
        }
        dims = {
            f"block_{n}/{path}": size for n in range(self.layers) for path, size in block.items()
        }
        ends = {"embedding": (VOCABULARY, self.width), "norm": (self.width,)}
        dims |= {**ends, "head": (self.width, VOCABULARY)}
        return {path: jax.ShapeDtypeStruct(size, "bfloat16") for path, size in dims.items()}


SHAPES = {
    "70b": Shape(80, 8192, 64, 28_672, "h100:8"),
    "405b": Shape(126, 16_384, 128, 53_248, "v5p:4x4x4"),
}


def program_of(shape: Shape) -> mw.Program:
    """The forward pass: token ids to the logits of the next token."""

    def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
        wide = x.astype("float32")
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
        return (wide * scale).astype(x.dtype) * gain

    def turned(x: jax.Array) -> jax.Array:
        """Rotary positions."""
        half = x.shape[-1] // 2
        speeds = 500_000.0 ** (-jnp.arange(half) / half)
        angles = jnp.arange(x.shape[1])[:, None, None] * speeds
        sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
        one, two = x[..., :half], x[..., half:]
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    def attended(own: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        rows, length, _ = x.shape
        query, key, value = (
            (x @ own[f"attention/{name}"]).reshape(rows, length, -1, shape.head)
            for name in ("query", "key", "value")
        )
        groups = shape.heads // KEY_HEADS
        query = turned(query).reshape(rows, length, KEY_HEADS, groups, shape.head)
        scores = jnp.einsum("rqkgh,rskh->rkgqs", query, turned(key)) / shape.head**0.5
        seen = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf).astype("float32"))
        mixed = jnp.einsum("rkgqs,rskh->rqkgh", weights.astype(x.dtype), value)
        return mixed.reshape(rows, length, shape.width) @ own["attention/out"]

    def forward(params: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
        x = params["embedding"][ids]
        for n in range(shape.layers):
            begin = f"block_{n}/"
            own = {p.removeprefix(begin): v for p, v in params.items() if p.startswith(begin)}
            x = x + attended(own, normed(x, own["attention/norm"]))
            y = normed(x, own["mlp/norm"])
            x = x + (jax.nn.silu(y @ own["mlp/gate"]) * (y @ own["mlp/up"])) @ own["mlp/down"]
        return normed(x[:, -1], params["norm"]) @ params["head"]

    import optax

    return mw.jax_program(forward, shape.params(), optax.sgd(1.0), forward=forward)


def planned(shape: Shape, objective: Any) -> dict[str, Any]:
    program = program_of(shape)
    ids = jax.ShapeDtypeStruct((1, LENGTH), "int32")
    goal = mw.ServingGoal(objective, rows=(1, 8))
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    plan = mw.plan(program, ids, target=shape.target, objective=goal)
    seconds = time.perf_counter() - begin_s
    assert plan.serving is not None
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu_s,
        "axes": dict(plan.axes),
        "copies": plan.serving.copies,
        "buckets": list(plan.serving.buckets),
        "precision": plan.serving.precision,
        "plan": str(plan),
    }


def main() -> None:
    path, quiet = RESULTS / "serving_plans.json", Quiet.wait()
    for name in sys.argv[1:] or SHAPES:
        shape = SHAPES[name]
        parameters = sum(each.size for each in shape.params().values())
        by_goal = {goal: planned(shape, goal) for goal in ("latency", "throughput")}
        record = json.loads(path.read_text()) if path.exists() else {}
        record[name] = {
            "parameters": parameters,
            "target": shape.target,
            "tokens": LENGTH,
            **by_goal,
            "quiet": quiet.record(),
            "machine": machine(),
        }
        path.write_text(json.dumps(record, indent=2) + "\n")
        for goal, found in by_goal.items():
            verdict = "within" if found["seconds"] <= MOST_S else "MORE THAN"
            cpu = f"{found['cpu_seconds']:.1f} s of a core"
            took = f"{found['seconds']:.1f} s ({cpu}), {verdict} {MOST_S:.0f} s"
            print(f"{name} for {goal} on {shape.target}: {took}", flush=True)
            print(found["plan"], flush=True)


if __name__ == "__main__":
    main()
