"""How near are one and two compiled blocks, and the planner's own model, to the whole compile?

Each model has more than 100 million parameters and at least five equal blocks. Its step is compiled
for the target with all of them, and then as a dry run does it: with one and with two. The ratio of
the two, for the peak of a device and for its FLOPs, is asked to be within 5 %; "planner" is the
ratio of the peak that the planner counts before anything is compiled.

    python benchmarks/planned_peaks.py                 # all; hours on two cores
    python benchmarks/planned_peaks.py gpt_cpu ...     # some; results of others are kept
    python benchmarks/planned_peaks.py --planner ...   # the planner's own figure alone

Compiling for TPUs needs `pip install "meshwright[tpu]"`, and no TPU. What was compiled before is
taken from the cache of dry runs.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import meshwright as mw  # before Keras: it settles KERAS_BACKEND=jax
from meshwright.layouts.params import Placed
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.graph import Graph
from meshwright.planning.search import Choices, cost
from meshwright.planning.search.facts import batch_dim
from meshwright.planning.traced_graph import graph_of_step

RESULTS = Path(__file__).with_name("results") / "planned_peaks.json"
DEPTH, WIDTH, HEADS, VOCAB, LENGTH, ROWS = 6, 1024, 16, 16384, 256, 256
ASKED = 0.05


def shape(*dims: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# Plain JAX; weights are float32, products run in the type that is asked for


def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype("float32")
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (scaled * gain).astype(x.dtype)


def mixed(weights: dict[str, jax.Array], x: jax.Array, causal: bool) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, weights[n].astype(x.dtype)) for n in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k).astype("float32") * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    seen = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores).astype(x.dtype), v)
    return jnp.einsum("bthk,hkd->btd", seen, weights["o"].astype(x.dtype))


def dense(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ weights["up"].astype(x.dtype)) @ weights["down"].astype(x.dtype)


def transformer_block(weights: dict[str, jax.Array], x: jax.Array, causal: bool) -> jax.Array:
    x = x + mixed(weights, normed(x, weights["g1"]), causal)
    return x + dense(weights, normed(x, weights["g2"]))


def mixer_block(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    across = jnp.swapaxes(normed(x, weights["g1"]), 1, 2)
    x = x + jnp.swapaxes(dense(weights["tokens"], across), 1, 2)
    return x + dense(weights, normed(x, weights["g2"]))


def transformer_weights(width: int) -> dict[str, Any]:
    head = width // HEADS
    return {
        **dict.fromkeys("qkv", shape(width, HEADS, head)),
        **{"o": shape(HEADS, head, width), "g1": shape(width), "g2": shape(width)},
        **{"up": shape(width, 4 * width), "down": shape(4 * width, width)},
    }


def mixer_weights(width: int, length: int) -> dict[str, Any]:
    tokens = {"up": shape(length, 2 * length), "down": shape(2 * length, length)}
    known = {"tokens": tokens, "g1": shape(width), "g2": shape(width)}
    return {**known, "up": shape(width, 4 * width), "down": shape(4 * width, width)}


def language_loss(
    weights: dict[str, Any], ids: jax.Array, block: Any, dtype: str, named: bool
) -> jax.Array:
    x = weights["embed"].astype(dtype)[ids]
    for number, each in enumerate(weights["blocks"]):
        with jax.named_scope(f"block_{number}" if named else "blocks"):
            x = block(each, x)
    logits = (normed(x, weights["g"]) @ weights["head"].astype(dtype)).astype("float32")
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1)
    return -jnp.mean(found)


def language_model(
    depth: int = DEPTH,
    width: int = WIDTH,
    dtype: str = "float32",
    causal: bool = True,
    remat: bool = False,
    named: bool = True,
    vocab: int = VOCAB,
) -> mw.Program:
    block = functools.partial(transformer_block, causal=causal)
    block = jax.checkpoint(block) if remat else block
    blocks = [transformer_weights(width) for _ in range(depth)]
    table = {"embed": shape(vocab, width), "head": shape(width, vocab), "g": shape(width)}
    loss = functools.partial(language_loss, block=block, dtype=dtype, named=named)
    return mw.jax_program(loss, {**table, "blocks": blocks}, optax.adam(1e-3))


def image_loss(
    weights: dict[str, Any], batch: tuple[jax.Array, jax.Array], block: Any, dtype: str
) -> jax.Array:
    patches, labels = batch
    x = patches.astype(dtype) @ weights["embed"].astype(dtype)
    for each in weights["blocks"]:
        x = block(each, x)
    logits = jnp.mean(normed(x, weights["g"]), 1).astype("float32") @ weights["head"]
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1)
    return -jnp.mean(found)


def image_model(depth: int, block: Any, weights: Callable[[], Any], dtype: str) -> mw.Program:
    table = {"embed": shape(768, WIDTH), "head": shape(WIDTH, 1000), "g": shape(WIDTH)}
    loss = functools.partial(image_loss, block=block, dtype=dtype)
    blocks = [weights() for _ in range(depth)]
    return mw.jax_program(loss, {**table, "blocks": blocks}, optax.adamw(1e-3))


# Keras


def keras_transformer(causal: bool, policy: str = "float32") -> Any:
    """A functional model of layers with Keras' own names."""
    import keras
    from keras import layers

    keras.backend.clear_session()
    keras.config.set_dtype_policy(policy)
    ids = keras.Input([LENGTH], dtype="int32")
    x = layers.Embedding(VOCAB, WIDTH)(ids)
    for _ in range(DEPTH):
        h = layers.LayerNormalization()(x)
        h = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(h, h, use_causal_mask=causal)
        x = layers.Add()([x, layers.Dropout(0.1)(h)])
        h = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(WIDTH)(h))])
    logits = layers.Dense(VOCAB, dtype="float32")(layers.LayerNormalization()(x))
    model = keras.Model(ids, logits, name="transformer")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3, global_clipnorm=1.0), loss)
    keras.config.set_dtype_policy("float32")
    return model


def keras_mlp() -> Any:
    import keras
    from keras import layers

    keras.backend.clear_session()
    model = keras.Sequential([keras.Input([2048])])
    for _ in range(8):
        model.add(layers.Dense(4096, activation="relu", use_bias=False))
        model.add(layers.Dense(2048, use_bias=False))
    model.compile("adam", "mse")
    return model


# What is compared


@dataclass(frozen=True)
class Case:
    build: Callable[[], Any]
    batch: Any
    target: str
    axes: dict[str, int]
    rules: dict[str, Any] | None = None
    how: dict[str, Any] | None = None


IDS = shape(ROWS, LENGTH, dtype="int32")
IMAGES = shape(ROWS, 256, 768), shape(ROWS, dtype="int32")
DATA, BOTH = {"batch": 8}, {"batch": 2, "model": 4}
MEGATRON = {
    "blocks/.*/[qkv]": [None, "model", None],
    "blocks/.*/o": ["model", None, None],
    "blocks/.*/up": [None, "model"],
    "blocks/.*/down": ["model", None],
}
KERAS_SPLIT = {"dense(_[0-9]*[02468])?/kernel": [None, "model"]}
KERAS_SPLIT |= {"dense_[0-9]*[13579]/kernel": ["model", None]}

gpt = language_model
wide = functools.partial(gpt, 5, 2048, "bfloat16")
vit = functools.partial(image_model, 8, functools.partial(transformer_block, causal=False))
CASES = {
    "gpt_cpu": Case(gpt, IDS, "cpu:8", DATA),
    "gpt_cpu_zero_3": Case(gpt, IDS, "cpu:8", DATA, how={"zero": 3}),
    "gpt_cpu_megatron": Case(gpt, IDS, "cpu:8", BOTH, MEGATRON),
    "keras_gpt_cpu_zero_2": Case(
        lambda: keras_transformer(True), (IDS, IDS), "cpu:8", DATA, how={"zero": 2}
    ),
    "encoder_cpu_remat": Case(
        lambda: gpt(causal=False, remat=True, named=False), IDS, "cpu:8", DATA
    ),
    "vit_cpu": Case(
        lambda: vit(functools.partial(transformer_weights, WIDTH), "float32"),
        IMAGES, "cpu:8", DATA,
    ),
    "mixer_cpu_zero_1": Case(
        lambda: image_model(
            12, mixer_block, functools.partial(mixer_weights, WIDTH, 256), "float32"
        ),
        IMAGES, "cpu:8", DATA, how={"zero": 1},
    ),
    "gpt_cpu_accumulated": Case(gpt, IDS, "cpu:8", DATA, how={"accumulate": 2, "zero": 2}),
    "gpt_v5e": Case(lambda: gpt(dtype="bfloat16"), IDS, "v5e:2x4", DATA),
    "gpt_v5e_remat": Case(lambda: gpt(dtype="bfloat16", remat=True), IDS, "v5e:2x4", DATA),
    "gpt_v5p_zero_3": Case(
        lambda: gpt(8, named=False, vocab=8192),
        shape(64, LENGTH, dtype="int32"), "v5p:2x2x2", DATA, how={"zero": 3},
    ),
    "gpt_v5p_megatron": Case(wide, IDS, "v5p:2x2x2", BOTH, MEGATRON),
    "encoder_v5e_zero_1": Case(
        lambda: gpt(causal=False, named=False), IDS, "v5e:2x4", DATA, how={"zero": 1}
    ),
    "vit_v5p": Case(
        lambda: vit(functools.partial(transformer_weights, WIDTH), "bfloat16"),
        IMAGES, "v5p:2x2x2", DATA,
    ),
    "mixer_v5e": Case(
        lambda: image_model(
            12, mixer_block, functools.partial(mixer_weights, WIDTH, 256), "bfloat16"
        ),
        IMAGES, "v5e:2x4", DATA,
    ),
    "keras_mlp_v5e_split": Case(
        keras_mlp, (shape(1 << 15, 2048), shape(1 << 15, 2048)), "v5e:2x4", BOTH, KERAS_SPLIT
    ),
    "keras_gpt_v5e_mixed": Case(
        lambda: keras_transformer(True, "mixed_bfloat16"), (IDS, IDS), "v5e:2x4", DATA
    ),
}  # fmt: skip


def run(case: Case, blocks: Any) -> mw.DryRun:
    with mw.abstract():
        model = case.build()
    strategy = mw.Sharded(mw.Mesh(case.axes), case.rules or {}, **(case.how or {}))
    return mw.dry_run(model, case.batch, strategy=strategy, target=case.target, blocks=blocks)


def planned(case: Case) -> int | None:
    """The peak that the planner counts for this layout, before anything is compiled."""
    with mw.abstract():
        model = case.build()
    strategy = mw.Sharded(mw.Mesh(case.axes), case.rules or {})
    how = case.how or {}
    rows = jax.tree.map(functools.partial(all_rows, how.get("accumulate", 1)), case.batch)
    one = mw.Sharded(mw.Mesh({"batch": 1}))
    graph = graph_of_step(abstract_step(model, rows, one))
    rules = rules_of(graph, abstract_step(model, case.batch, strategy).placed)
    choices = Choices(how.get("zero", 0), how.get("accumulate", 1))
    return cost(graph, tuple(case.axes.items()), rules, choices, target=case.target).peak_bytes


def all_rows(micro_batches: int, one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The rows of a whole step, of which the batch of a case is one of several micro-batches."""
    return jax.ShapeDtypeStruct((one.shape[0] * micro_batches, *one.shape[1:]), one.dtype)


def rules_of(graph: Graph, placed: Sequence[Placed]) -> dict[str, list[str]]:
    """The families of dims that lie along axes where parameters are placed so."""
    batch = batch_dim(graph)
    rules = {} if batch is None else {family_of(graph, batch): ["batch"]}
    layouts = {each.info.path: each.layout for each in placed}
    for tensor in graph.tensors:
        if tensor.role != "parameter":
            continue
        layout = layouts[tensor.path]
        for place, dim in enumerate(tensor.dims):
            axes = layout.dim_axes(place)
            if dim is not None and axes:
                rules[family_of(graph, dim)] = list(axes)
    return rules


def family_of(graph: Graph, dim: int) -> str:
    """The family of a dim as rules name it: with its size, where there are several."""
    found = graph.dims[dim]
    sizes = {each.size for each in graph.dims if each.family == found.family}
    return found.family if len(sizes) == 1 else f"{found.family}[{found.size}]"


def measured(case: Case) -> dict[str, Any]:
    """One and two blocks beside all of them."""
    few = run(case, "few")
    if few.blocks is None:
        return {"target": case.target, "not reduced": list(few.notes)}
    whole = run(case, "whole")
    return {
        **counted(case, whole),
        "blocks": few.blocks.count,
        "peak": ratio(few.peak_bytes, whole.peak_bytes),
        "flops": ratio(few.flops, whole.flops),
        "step_time": ratio(few.step_time_s, whole.step_time_s),
        "collective_bytes": ratio(moved(few), moved(whole)),
        "compile_s": [round(each, 1) for each in few.blocks.compiled_s],
    }


def counted(case: Case, whole: mw.DryRun) -> dict[str, Any]:
    """The planner's own figure beside that of the whole compile."""
    weights = sum(each.info.nbytes for each in whole.placed if each.info.role == "parameter")
    assert whole.compiled is not None
    return {
        "target": case.target,
        "mesh": case.axes,
        "parameters": weights // 4,
        "peak_bytes": whole.peak_bytes,
        "planner": ratio(planned(case), whole.peak_bytes),
        "whole_compile_s": round(whole.compiled.compile_s, 1),
    }


def ratio(one: float | None, other: float | None) -> float | None:
    return None if not one or not other else round(one / other, 4)


def moved(run: mw.DryRun) -> int:
    return sum(each.bytes_per_step or each.bytes_per_device for each in run.collectives)


def main(names: list[str]) -> None:
    mw.virtual_devices(1)  # nothing runs here
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    alone = "--planner" in names
    for name in [name for name in names if name != "--planner"] or CASES:
        begin = time.monotonic()
        case = CASES[name]
        new = counted(case, run(case, "whole")) if alone else measured(case)
        kept[name] = {**kept.get(name, {}), **new}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"{name:22} {time.monotonic() - begin:6.0f} s  {kept[name]}", flush=True)
    tell(kept)


def tell(kept: dict[str, Any]) -> None:
    """How far off the figures are."""
    few = [each for each in kept.values() if "peak" in each]
    far = [abs(each[figure] - 1) for each in few for figure in ("peak", "flops")]
    print(f"{len(few)} models of blocks: at most {max(far):.1%} off; asked {ASKED:.0%}")
    own = [abs(each["planner"] - 1) for each in kept.values() if each.get("planner")]
    near = sum(each <= ASKED for each in own)
    print(f"the planner: {near} of {len(own)} models within {ASKED:.0%}, {max(own):.1%} at most")


if __name__ == "__main__":
    main(sys.argv[1:])
