"""How long a step of 24 Transformer blocks in the named language takes to trace, beside its twin.

    python benchmarks/named_tracing.py               # about half a minute

The twin is the same arithmetic and the same layouts in plain JAX. Both are traced in turn, in one
process; CPU time counts. Prints the ratio and writes ``benchmarks/results/named_tracing.json``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import report
from protocol import eight_jax_devices
from quiet import Quiet

LAYERS, ROUNDS, LIMIT = 24, 9, 1.3
DIMS = f"length:128 vocab:1024 d_model:256 d_ff:1024 heads:8 d_kv:32 layers:{LAYERS}"
BATCH = 16
MESH = {"rows": 4, "cols": 2}
RULES = "batch:rows;vocab:cols;d_ff:cols;heads:cols"

Params = Any
Step = Callable[[Params, Any], Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dry", action="store_true", help="write no results")
    given = parser.parse_args()
    eight_jax_devices()
    quiet = Quiet.wait(dry=given.dry)
    times_s = measure(given.rounds)
    ratios = [ours / twin for ours, twin in times_s]
    ours_s, twins_s = zip(*times_s, strict=True)
    result = {
        "says": f"tracing {LAYERS} Transformer blocks, ours ÷ by hand",
        "ratio": statistics.median(ratios),
        "ratio_by_round": ratios,
        "limit": LIMIT,
        "times_s": times_s,
        "machine": report.machine(),
        "quiet": quiet.record({"ours": sum(ours_s), "by hand": sum(twins_s)}),
    }
    print(report.features_table([result]))
    if not given.dry:
        report.save("named_tracing", [result])
        report.write_page()


def measure(rounds: int) -> list[tuple[float, float]]:
    """CPU seconds of each round, ours and the twin's; both have been traced once before."""
    import jax
    import jax.numpy as jnp

    import meshwright as mw
    import meshwright.named as mn

    model = mn.models.Transformer(DIMS)
    mesh = mw.create_mesh(MESH)
    params = jax.eval_shape(model.init, jax.random.key(0))
    bare = jax.tree.map(lambda x: x.array, params, is_leaf=lambda x: isinstance(x, mn.NamedArray))
    tokens = jax.ShapeDtypeStruct((BATCH, mn.as_dims(DIMS)[0].size), jnp.int32)
    named = mn.NamedArray(tokens, mn.as_dims(f"batch:{BATCH} length:{tokens.shape[1]}"))
    twin = twin_loss(mesh.jax_mesh)

    def both() -> tuple[float, float]:
        with mn.rules(RULES, mesh):
            ours_s = trace_s(descent(model.loss), params, named)
        return ours_s, trace_s(descent(twin), bare, tokens)

    both()
    return [both() for _ in range(rounds)]


def trace_s(step: Step, *args: Any) -> float:
    import jax

    gc.collect()
    began_s = time.process_time()
    jax.jit(step).trace(*args)
    return time.process_time() - began_s


def descent(loss: Callable[..., Any]) -> Step:
    """Gradient descent on a loss; a new function each time, which no cache of JAX knows."""
    import jax

    def step(params: Params, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


# The twin


def twin_loss(mesh: Any) -> Callable[..., Any]:
    """The loss of the same model in plain JAX, with the layouts that the rules give."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    axes = {"b": "rows", "v": "cols", "f": "cols", "h": "cols"}

    @functools.cache
    def sharding(dims: str) -> Any:
        return NamedSharding(mesh, PartitionSpec(*(axes.get(dim) for dim in dims)))

    def put(x: Any, dims: str) -> Any:
        return jax.lax.with_sharding_constraint(x, sharding(dims))

    def product(x: Any, w: Any, dims: str) -> Any:
        return put(jnp.einsum(dims, x, w), dims.partition("->")[2])

    def norm(p: Params, x: Any) -> Any:
        centred = x - jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]

    def attention(p: Params, x: Any) -> Any:
        places = jnp.arange(x.shape[1])
        mask = put(places[:, None] >= places, "lm")
        q, k, v = (product(x, p[name], "bld,dhk->blhk") for name in ("query", "key", "value"))
        scores = jnp.einsum(
            "blhk,bmhk->bhlm", q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.float32
        )
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
        mixed = put(jnp.einsum("bhlm,bmhk->bhlk", weights, v), "bhlk")
        return product(mixed, p["output"], "bhlk,hkd->bld")

    def block(p: Params, x: Any) -> Any:
        x = x + attention(p["attention"], norm(p["attention_norm"], x))
        inner, layer = norm(p["feed_forward_norm"], x), p["feed_forward"]
        hidden = put(jax.nn.relu(jnp.einsum("bld,df->blf", inner, layer["up"]["kernel"])), "blf")
        return x + product(hidden, layer["down"]["kernel"], "blf,fd->bld")

    def loss(params: Params, tokens: Any) -> Any:
        before = put(jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1], "bl")
        table = params["tokens"]["table"]
        places = put(params["tokens"]["places"][: tokens.shape[1]], "ld")
        x = put(jnp.take(put(table, "vd"), before, axis=0, mode="fill", fill_value=0), "bld")
        x = x + places
        for layer in range(LAYERS):
            x = block(params["stack"][f"layer_{layer}"], x)
        x = norm(params["last"], x) * x.shape[-1] ** -0.5
        logits = product(x, table, "bld,vd->blv")
        classes = jnp.arange(logits.shape[-1])
        hit = jnp.sum(jnp.where(tokens[..., None] == classes, logits, 0.0), -1)
        losses = put(jax.nn.logsumexp(logits, -1) - hit, "bl")
        return put(jnp.mean(losses), "")

    return loss


if __name__ == "__main__":
    main()
