"""Steps on one real GPU: beside what was predicted without it, and beside the same step by hand.

    python benchmarks/one_gpu.py predict            # anywhere; compiles for a GPU that is absent
    python benchmarks/one_gpu.py run                # where the GPU is; some minutes
    python benchmarks/one_gpu.py run --only resnet_50 gpt2 --out here.json
    python benchmarks/one_gpu.py keep here.json     # puts what ran beside what was predicted
    python benchmarks/one_gpu.py table --chip h200  # of another GPU; all of them take --chip

Each job runs in a process of its own, so that the peak that the device counts is its own. Batches
are random: products of zeros take less power, and run faster. Peers are really run, in turn with
ours, in that process: the step that someone writes in JAX by hand, and plain Keras' `fit`.
Predictions need `pip install "meshwright[cuda]"`; `results/one_gpu_h100.json` keeps both.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # what is held is counted

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plan_models
from quiet import Quiet, Sides
from report import RESULTS, machine

import meshwright as mw  # before Keras: it settles KERAS_BACKEND=jax

CHIP = "h100"
ROUNDS, STEPS, EPOCHS = 5, 20, 3  # of each side, in turn
TIMEOUT_S = 300
ADAM = optax.adam(1e-4)


@dataclass(frozen=True)
class Job:
    """A model, one batch of it, options of its step, and the peer that runs beside it."""

    what: str
    build: Callable[[], Any]
    batch: Any
    options: dict[str, Any] = field(default_factory=dict)
    peer: str = ""  # "JAX by hand" or "Keras fit"
    numbers: int = 2  # integers of more than one dim are below it; labels are 0 or 1


# Models


@dataclass(frozen=True)
class Gpt:
    """The language model of plans.py, with values."""

    depth: int
    width: int
    heads: int

    def params(self) -> Any:
        shapes = plan_models.gpt_shapes(self.depth, self.width, self.heads, 1024)
        leaves, structure = jax.tree.flatten(shapes)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        pairs = zip(keys, leaves, strict=True)
        values = [0.02 * jax.random.normal(key, leaf.shape) for key, leaf in pairs]
        return jax.tree.unflatten(structure, values)

    def __call__(self) -> mw.Program:
        return mw.jax_program(plan_models.next_token_loss, self.params, ADAM, name="gpt")


def bert() -> Any:
    """BERT-base of Keras' own layers, in bfloat16."""
    import keras

    model = plan_models.bert(512, 30522, 768, blocks=12, heads=12, name="bert")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    return model


def in_bfloat16(build: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(build)
    def built() -> Any:
        import keras

        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return build()
        finally:
            keras.config.set_dtype_policy(before)

    return built


def mobile_net() -> Any:
    import keras

    build: Any = keras.applications.MobileNetV2
    model = build((224, 224, 3), weights=None)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def lstm() -> Any:
    """Two layers over 256 steps: a loop of small products."""
    import keras
    from keras import layers

    x = keras.Input([256, 64], name="x")
    h: Any = layers.LSTM(512, return_sequences=True)(x)
    model = keras.Model(x, layers.Dense(1)(layers.LSTM(512)(h)), name="lstm")
    model.compile("adam", "mse")
    return model


def digits() -> Any:
    """The convolutional net of the MNIST examples: a step of many small kernels."""
    import keras
    from keras import layers

    x = keras.Input([28, 28, 1], name="image")
    h: Any = x
    for filters in (32, 64):
        h = layers.MaxPooling2D()(layers.Conv2D(filters, 3, activation="relu")(h))
    h = layers.Dense(128, "relu")(layers.Flatten()(h))
    model = keras.Model(x, layers.Dense(10, "softmax", name="digit")(h), name="digits")
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


shape, ids = plan_models.shape, plan_models.ids
IMAGES = shape(128, 224, 224, 3), shape(128, dtype="int32")
GPT2, GPT2_LARGE = Gpt(12, 768, 12), Gpt(36, 1280, 20)
JOBS = {
    "gpt2": Job(
        "GPT-2 124M, 16 x 1,024 tokens, bfloat16", GPT2, ids(16, 1024), {}, "JAX by hand", 50304
    ),
    "gpt2_remat": Job(
        "the same, blocks computed again", GPT2, ids(16, 1024), {"remat": "block"}, "", 50304
    ),
    "gpt2_accumulate": Job(
        "a step of four such batches", GPT2, ids(16, 1024), {"accumulate": 4}, "", 50304
    ),
    "gpt2_large": Job(
        "GPT-2 774M, 8 x 1,024 tokens, blocks computed again",
        GPT2_LARGE, ids(8, 1024), {"remat": "block"}, "JAX by hand", 50304,
    ),
    "bert": Job(
        "BERT-base of Keras' layers, 32 x 512 tokens, bfloat16",
        in_bfloat16(bert), (ids(32, 512), shape(32, dtype="int32")), {}, "Keras fit", 30522,
    ),
    "resnet_50": Job(
        "ResNet-50, 128 images, bfloat16", plan_models.resnet, IMAGES, {}, "Keras fit"
    ),
    "mobile_net": Job("MobileNetV2, 128 images, float32", mobile_net, IMAGES),
    "mlp": Job(
        "MLP 1024-8192-8192-8192-1024, 4,096 rows, float32", plan_models.mlp,
        (shape(4096, 1024), shape(4096, 1024)), {}, "Keras fit",
    ),
    "recommender": Job(
        "recommender, a table of 10M x 64, 16,384 rows of 26 look-ups", plan_models.recommender,
        ((ids(16384, 26), shape(16384, 13)), shape(16384, 1)), {}, "", 10_000_000,
    ),
    "lstm": Job(
        "LSTM, two layers of 512, 128 rows of 256 steps", lstm,
        (shape(128, 256, 64), shape(128, 1)),
    ),
    "digits": Job(
        "convolutional net of MNIST, 128 images", digits,
        (shape(128, 28, 28, 1), shape(128, dtype="int32")), {}, "Keras fit",
    ),
}  # fmt: skip


def strategy_of(job: Job, mesh: mw.Mesh) -> mw.Sharded:
    return mw.Sharded(mesh, batch="batch", unmatched="replicate", **job.options)


# Predicted


def predict(chip: str, names: list[str], hardware: mw.Hardware | None) -> None:
    target = f"{chip}:1"
    for name in names:
        job, kept = JOBS[name], _kept(chip)
        found = {
            "compiled": _dry_run(job, target, hardware, compile=True),
            "estimated": _dry_run(job, target, hardware, compile=False),
        }
        row = kept.setdefault(name, {"what": job.what, "predicted": {}})
        row["predicted"][target if hardware is None else f"{target} measured"] = found
        _keep(chip, kept)
        print(name, json.dumps(found), flush=True)


def _dry_run(job: Job, target: str, hardware: mw.Hardware | None, compile: bool) -> dict[str, Any]:
    with mw.abstract():
        model = job.build()
    strategy = strategy_of(job, mw.Mesh({"batch": 1}))
    begin = time.perf_counter()
    report = mw.dry_run(
        model, job.batch, strategy=strategy, target=target, hardware=hardware, compile=compile
    )
    return {
        "peak_bytes": report.peak_bytes,
        "step_time_s": report.step_time_s,
        "mfu": report.mfu,
        "bound_by": report.bound_by,
        "took_s": time.perf_counter() - begin,
    }


# Run


def run(names: list[str], out: Path) -> None:
    """Every job in a process of its own; what each prints is kept as soon as it is there."""
    results: dict[str, Any] = {}
    quiet = Quiet.wait()
    for name in names:
        begin = time.perf_counter()
        results[name] = _in_process(name) | {"took_s": time.perf_counter() - begin}
        results[name]["quiet"] = quiet.record(results[name].pop("cpu_s_of_sides", None))
        out.write_text(json.dumps(results, indent=1))
        print(name, json.dumps(results[name])[:1500], flush=True)


def _in_process(name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "job", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {TIMEOUT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    seen = json.loads(lines[-1]) if lines else {}
    return seen | ({"error": done.stderr[-3000:]} if done.returncode else {})


def run_job(name: str) -> None:
    """What one job takes here, beside its peer; JSON in the last line."""
    job = JOBS[name]
    model, batch = job.build(), _random(job)
    strategy = strategy_of(job, mw.create_mesh({"batch": 1}))
    measured = mw.measure(model, batch, strategy=strategy)
    result: dict[str, Any] = {
        "device": measured.device,
        "peak_bytes": measured.peak_bytes,
        "peak_is": measured.peak_is,
        "state_bytes": measured.parameter_bytes + measured.slot_bytes + measured.state_bytes,
        "step_time_s": measured.step_time_s,
        "step_times_s": measured.step_times_s,
        "machine": machine(),
    }
    print(json.dumps(result), flush=True)
    if job.peer:
        sides = _by_hand if job.peer == "JAX by hand" else _keras
        cpu = Sides()
        result["peer"] = {"name": job.peer} | _in_turn(*sides(job, model, strategy, batch), cpu)
        result["cpu_s_of_sides"] = cpu.cpu_s
        print(json.dumps(result))


def _random(job: Job) -> Any:
    random = np.random.default_rng(0)

    def value(array: jax.ShapeDtypeStruct) -> np.ndarray:
        if not jnp.issubdtype(array.dtype, jnp.integer):
            return random.normal(size=array.shape).astype(array.dtype)
        highest = job.numbers if len(array.shape) > 1 else 2
        return random.integers(0, highest, array.shape).astype(array.dtype)

    return jax.tree.map(value, job.batch)


Side = Callable[[], float]  # seconds of a step


def _in_turn(ours: Side, theirs: Side, cpu: Sides) -> dict[str, Any]:
    def timed(name: str, side: Side) -> float:
        with cpu.runs(name):
            return side()

    both = ("ours", ours), ("theirs", theirs)
    rounds = [[timed(*each) for each in both] for _ in range(ROUNDS + 1)][1:]  # the first compiles
    return {
        "ours_s": [ours_s for ours_s, _ in rounds],
        "theirs_s": [theirs_s for _, theirs_s in rounds],
        "time_ratio": statistics.median(ours_s / theirs_s for ours_s, theirs_s in rounds),
    }


def _by_hand(job: Job, program: mw.Program, strategy: mw.Sharded, batch: Any) -> tuple[Side, Side]:
    """The compiled steps alone, on a batch that lies on the device."""
    trainer = mw.Trainer(program, strategy.placement, strategy.how)
    build: Any = job.build
    block = jax.checkpoint(plan_models.block) if job.options.get("remat") else plan_models.block

    @functools.partial(jax.jit, donate_argnums=0)
    def by_hand(state: Any, ids: Any) -> Any:
        params, slots = state
        loss = functools.partial(plan_models.next_token_loss, block=block)
        value, gradients = jax.value_and_grad(loss)(params, ids)
        changes, slots = ADAM.update(gradients, slots, params)
        return (optax.apply_updates(params, changes), slots), value

    def begin() -> Any:
        params = build.params()
        return params, ADAM.init(params)

    (batches,) = strategy.how.for_steps([trainer.put(batch)] * strategy.how.batches)
    return _steps(trainer.step, trainer.init, batches), _steps(by_hand, begin, jnp.asarray(batch))


def _steps(step: Any, begin: Callable[[], Any], batch: Any) -> Side:
    held: list[Any] = []

    def side() -> float:
        state = held.pop() if held else begin()
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(STEPS):
            state, logs = step(state, batch)
        jax.block_until_ready((state, logs))
        held.append(state)
        return (time.perf_counter() - start) / STEPS

    return side


def _keras(job: Job, model: Any, strategy: mw.Sharded, batch: Any) -> tuple[Side, Side]:
    """Epochs of fit, the way of the batches to the device included."""
    plain = job.build()
    rows = len(jax.tree.leaves(batch)[0])
    x, y = jax.tree.map(lambda array: np.concatenate([array] * STEPS), batch)
    options: Any = {"batch_size": rows, "epochs": EPOCHS, "verbose": 0, "shuffle": False}

    def timed(fit: Callable[[], Any]) -> float:
        start = time.perf_counter()
        fit()
        return (time.perf_counter() - start) / STEPS / EPOCHS

    return (
        lambda: timed(lambda: strategy.fit(model, x, y, **options)),
        lambda: timed(lambda: plain.fit(x, y, **options)),
    )


# Kept


def _result(chip: str) -> Path:
    return RESULTS / f"one_gpu_{chip}.json"


def _kept(chip: str) -> dict[str, Any]:
    return json.loads(_result(chip).read_text()) if _result(chip).exists() else {}


def _keep(chip: str, rows: dict[str, Any]) -> None:
    _result(chip).write_text(json.dumps(rows, indent=2) + "\n")


def keep(chip: str, path: Path) -> None:
    """Put what ran beside what was predicted."""
    rows = _kept(chip)
    for name, found in json.loads(path.read_text()).items():
        rows.setdefault(name, {"what": JOBS[name].what, "predicted": {}})["measured"] = found
    _keep(chip, rows)


def table(chip: str) -> str:
    """What is kept, in Markdown; predictions as shares of what was measured."""
    head = "| job | step, ms | published | measured rates | peak, GiB | predicted | peer |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in _kept(chip).values():
        measured = row["measured"]
        published, calibrated = (
            row["predicted"][name]["compiled"] for name in (f"{chip}:1", f"{chip}:1 measured")
        )
        step_s, peak = measured["step_time_s"], measured["peak_bytes"]
        peer = measured.get("peer")
        cells = [
            row["what"],
            f"{1e3 * step_s:.1f}" if step_s > 1e-3 else f"{1e3 * step_s:.2f}",
            f"{published['step_time_s'] / step_s:.2f} x",
            f"{calibrated['step_time_s'] / step_s:.2f} x",
            f"{peak / 2**30:.2f}",
            f"{calibrated['peak_bytes'] / peak:.2f} x",
            f"{peer['time_ratio']:.2f} x {peer['name']}" if peer else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=["predict", "run", "job", "keep", "table"])
    parser.add_argument("what", nargs="?", help="the job, or the file that is kept")
    parser.add_argument("--chip", default=CHIP, help="the GPU, as targets call it")
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--out", type=Path, default=Path("one_gpu.json"))
    parser.add_argument("--hardware", help="a file of mw.calibrate, measured on the GPU")
    asked = parser.parse_args()
    match asked.do:
        case "predict":
            hardware = mw.load_hardware(asked.hardware) if asked.hardware else None
            predict(asked.chip, asked.only, hardware)
        case "run":
            run(asked.only, asked.out)
        case "job":
            run_job(asked.what)
        case "keep":
            keep(asked.chip, Path(asked.what))
        case "table":
            print(table(asked.chip))


if __name__ == "__main__":
    main()
