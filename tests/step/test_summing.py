"""Gradients summed as flat vectors are those that XLA sums, and other sums are what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.step.compression import UNSENT
from meshwright.step.summing import sum_flat

DRAW = np.random.default_rng(5)
SHAPES = {"first": (12, 24), "bias": (24,), "second": (24, 8), "scale": (8,)}
PARAMS = {name: DRAW.normal(size=dims).astype("float32") for name, dims in SHAPES.items()}
BATCHES = [
    (DRAW.normal(size=(32, 12)).astype("float32"), DRAW.normal(size=(32, 8)).astype("float32"))
    for _ in range(4)
]


def loss(params: Any, batch: Any) -> Any:
    x, y = batch
    hidden = jnp.tanh(x @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["second"] * params["scale"] - y) ** 2)


def trainer(axes: Any = None, batch: Any = "batch", **how: Any) -> mw.Trainer:
    program = mw.jax_program(loss, PARAMS, optax.adam(0.01))
    mesh = mw.create_mesh(axes or {"batch": 8})
    return mw.Trainer(program, mw.Placement.of(mesh, batch=batch), mw.StepOptions(**how))


def trained(**options: Any) -> dict[str, np.ndarray]:
    job = trainer(**options)
    state, _ = job.train(job.init(), BATCHES)
    return {name: np.asarray(value) for name, value in state.params.items()}


@pytest.fixture(scope="module")
def by_xla() -> dict[str, np.ndarray]:
    return trained()


HOSTS = {"host": 2, "local": 4}


@pytest.mark.parametrize(
    ("options", "within"),
    [
        ({"sums": mw.GradientSum()}, 1e-6),
        ({"sums": mw.GradientSum(fusion_bytes=500)}, 1e-6),
        ({"sums": mw.GradientSum(fusion_bytes=0)}, 1e-6),
        (
            {"axes": HOSTS, "batch": ("host", "local"), "sums": mw.GradientSum(inner="local")},
            1e-6,
        ),
        ({"sums": mw.GradientSum(wire="bfloat16")}, 4e-3),  # of steps of Adam of 0.01
        ({"sums": mw.GradientSum(wire="float16")}, 1e-3),
        (
            {
                "axes": HOSTS,
                "batch": ("host", "local"),
                "sums": mw.GradientSum(inner="local", wire="float16"),
            },
            1e-3,
        ),
    ],
    ids=lambda value: str(value.get("sums")) if isinstance(value, dict) else None,
)
def test_flat_sums_train_as_those_of_xla(options: Any, within: float, by_xla: Any) -> None:
    for name, value in trained(**options).items():
        np.testing.assert_allclose(value, by_xla[name], atol=within)


def test_micro_batches_are_summed_once_as_one_vector(by_xla: Any) -> None:
    plain, flat = trained(accumulate=2), trained(accumulate=2, sums=mw.GradientSum())
    for name in plain:
        np.testing.assert_allclose(flat[name], plain[name], atol=1e-6)
    job = trainer(accumulate=2, sums=mw.GradientSum())
    sums = all_reduces(job, tuple(map(job.put, BATCHES[:2])))
    assert sums.count(ELEMENTS) == 1


ELEMENTS = sum(value.size for value in PARAMS.values())


def all_reduces(job: mw.Trainer, batch: Any) -> list[int]:
    """The elements of each array that the compiled step sums over devices."""
    text = job.step.lower(job.init(), batch).compile().as_text()
    matches = re.findall(r"= (\([^=]*?\)|\S+) all-reduce\(", text)
    arrays = [dims for result in matches for dims in re.findall(r"\w+\[([\d,]*)\]", result)]
    return [int(np.prod([int(size) for size in dims.split(",") if size])) for dims in arrays]


def test_all_gradients_go_as_one_vector() -> None:
    job = trainer(sums=mw.GradientSum())
    assert [size for size in all_reduces(job, job.put(BATCHES[0])) if size > 1] == [ELEMENTS]
    apart = trainer()
    assert ELEMENTS not in all_reduces(apart, apart.put(BATCHES[0]))


def test_half_as_many_bytes_travel() -> None:
    job = trainer(sums=mw.GradientSum(wire="bfloat16"))
    text = job.step.lower(job.init(), job.put(BATCHES[0])).compile().as_text()
    assert max(all_reduces(job, job.put(BATCHES[0]))) == 1  # the loss
    for kind in ("all-to-all", "all-gather"):
        assert re.search(rf"u16\[[^=]* {kind}\(", text)


# Adasum, beside its definition (Maleki et al., 2021, equation 2)


def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot = float((a * b).sum())
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


def adasum(pieces: Any) -> dict[str, np.ndarray]:
    mesh = mw.create_mesh({"batch": 8}).jax_mesh
    how = mw.GradientSum(op="adasum")
    sums = jax.jit(lambda parts: sum_flat(parts, mesh, ("batch",), how))(pieces)
    return {name: np.asarray(value) for name, value in sums.items()}


def test_adasum_is_combined_in_pairs_array_by_array() -> None:
    draw = np.random.default_rng(5)
    parts = {n: draw.normal(size=(8, *dims)).astype("float32") for n, dims in SHAPES.items()}
    for name, value in adasum(parts).items():
        left = list(parts[name].astype("float64") * 8)  # parts are shares of the mean
        while len(left) > 1:
            left = [combined(a, b) for a, b in zip(left[::2], left[1::2], strict=True)]
        np.testing.assert_allclose(value, left[0], rtol=1e-4, atol=1e-4)


def test_adasum_averages_what_is_parallel_and_adds_what_is_orthogonal() -> None:
    alike = np.tile(np.arange(1, 9, dtype="float32"), (8, 1)) / 8
    np.testing.assert_allclose(adasum({"w": alike})["w"], np.arange(1, 9), rtol=1e-5)
    np.testing.assert_allclose(adasum({"w": np.eye(8, dtype="float32") / 8})["w"], np.ones(8))


# What cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 1}, "sums=GradientSum: zero=1 keeps and updates state in pieces"),
        ({"axes": {"batch": 4, "model": 2}}, "splits more than the batch: model"),
        ({"sums": mw.GradientSum(inner="host")}, "inner=.'host',. names host"),
        (
            {"axes": {"batch": 6}, "sums": mw.GradientSum(op="adasum")},
            "6 pieces of the batch are not a power of two",
        ),
    ],
)
def test_where_gradients_cannot_be_summed_so_the_error_says_why(options: Any, message: str) -> None:
    options = {"sums": mw.GradientSum(), "axes": {"batch": 8}, **options}
    mesh = mw.Mesh(options.pop("axes"))
    with pytest.raises(mw.LayoutError, match=message):
        mw.Sharded(mesh, **options)


def test_invalid_choices_are_listed_together() -> None:
    with pytest.raises(mw.ModelError) as caught:
        mw.GradientSum(fusion_bytes=-1, wire="int8", op="max")  # pyright: ignore[reportArgumentType]
    for text in ("fusion_bytes must be", "wire must be None or one of", "op must be one of"):
        assert text in str(caught.value)
    with pytest.raises(mw.ModelError, match=r"compress= is not supported together with inner="):
        mw.GradientSum(compress=mw.TopK(0.1), wire="float16")
    with pytest.raises(mw.ModelError, match="is not supported together with accumulate="):
        mw.StepOptions(accumulate=2, sums=mw.GradientSum(compress=mw.TopK(0.1)))
    with pytest.raises(mw.ModelError, match="is not supported together with inner="):
        mw.GradientSum(op="adasum", inner="local")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mw.TopK("0.1"), r"TopK\(share\) must be > 0 and <= 1; received '0\.1'"),
        (lambda: mw.TopK(None), r"TopK\(share\) must be > 0 and <= 1; received None"),
        (lambda: mw.PowerSGD(2.0), r"PowerSGD\(rank\) must be 1 or more; received 2\.0"),
        (lambda: mw.GradientSum(compress=0.1), r"compress must be mw\.PowerSGD.*; received 0\.1"),
        (
            lambda: mw.Pipeline("stage", 4, cuts=7),
            "cuts must be a list of layers' paths; received 7",
        ),
        (lambda: mw.Pipeline("stage", 4, cuts="a"), "cuts must be a list of .*; received 'a'"),
        (lambda: mw.Pipeline("stage", 4, cuts=[1]), r"cuts must be a list of .*; received \[1\]"),
    ],
)
def test_values_of_the_wrong_type_are_refused(make: Any, message: str) -> None:
    with pytest.raises(mw.MeshwrightError, match=message):
        make()


# Compressed, with error feedback

COMPRESSIONS = [mw.PowerSGD(rank=2), mw.TopK(0.05)]


@pytest.mark.parametrize("how", COMPRESSIONS, ids=str)
def test_what_is_sent_and_what_is_left_are_the_whole_sum(how: Any) -> None:
    program = mw.jax_program(loss, PARAMS, optax.sgd(1 / 64))  # so that 64 moves are minus a sum
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}))
    exact, summed = (
        mw.Trainer(program, placement, mw.StepOptions(sums=sums))
        for sums in (mw.GradientSum(), mw.GradientSum(compress=how))
    )
    state = summed.init()
    before = host(state)
    for batch in BATCHES:
        here = exact.init()._replace(params={k: jnp.copy(v) for k, v in state.params.items()})
        whole, _ = exact.step(here, exact.put(batch))
        state, _ = summed.step(state, summed.put(batch))
        after = host(state)
        for name in PARAMS:
            gradient = 64 * (before[name] - np.asarray(whole.params[name]))
            sent = 64 * (before[name] - after[name])
            left = after[f"{name} left"] - before[f"{name} left"]
            np.testing.assert_allclose(sent + left, gradient, atol=5e-5)
        before = after
    assert max(np.abs(before[f"{name} left"]).max() for name in PARAMS) > 0.05  # not all was sent


def host(state: mw.TrainState) -> dict[str, np.ndarray]:
    """The parameters, and what all devices together have not sent of the gradient of each."""
    results = {name: np.array(value) for name, value in state.params.items()}
    rows, at = np.asarray(state.slots[UNSENT]).sum(0), 0
    for name in sorted(PARAMS):
        size = PARAMS[name].size
        results[f"{name} left"] = rows[at : at + size].reshape(SHAPES[name])
        at += size
    return results


@pytest.mark.parametrize("how", COMPRESSIONS, ids=str)
def test_training_with_compressed_sums_converges(how: Any) -> None:
    goal = np.random.default_rng(5).normal(size=(24, 16)).astype("float32")
    x = np.random.default_rng(6).normal(size=(64, 24)).astype("float32")

    def far(params: Any, batch: Any) -> Any:
        return jnp.mean((batch @ params["w"] - batch @ goal) ** 2)

    program = mw.jax_program(far, {"w": np.zeros([24, 16], "float32")}, optax.sgd(0.5))
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}))
    job = mw.Trainer(program, placement, mw.StepOptions(sums=mw.GradientSum(compress=how)))
    _, logs = job.train(job.init(), [x] * 400)
    assert float(logs["loss"]) < 1e-3 * float(np.mean((x @ goal) ** 2))
    assert max(all_reduces(job, job.put(x))) < 24 * 16 / 2


@pytest.mark.parametrize("how", COMPRESSIONS, ids=str)
def test_gradients_that_are_no_sums_over_rows_stay_with_xla(how: Any) -> None:
    def decayed(params: Any, batch: Any) -> Any:
        return loss(params, batch) + sum(jnp.sum(value**2) for value in params.values())

    program = mw.jax_program(decayed, PARAMS, optax.sgd(0.01))
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}))
    by_xla, compressed = (
        mw.Trainer(program, placement, mw.StepOptions(sums=sums))
        for sums in (None, mw.GradientSum(compress=how))
    )
    expected, state = (job.train(job.init(), BATCHES[:1])[0] for job in (by_xla, compressed))
    for name, value in expected.params.items():
        np.testing.assert_allclose(state.params[name], value, atol=1e-6)


@pytest.mark.parametrize("how", COMPRESSIONS, ids=str)
def test_a_step_that_is_not_finite_leaves_nothing_behind(how: Any) -> None:
    program = mw.jax_program(loss, PARAMS, optax.apply_if_finite(optax.sgd(0.1), 9))
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}))
    job = mw.Trainer(program, placement, mw.StepOptions(sums=mw.GradientSum(compress=how)))
    (x, y), good = BATCHES[0], BATCHES[1]
    state, _ = job.step(job.init(), job.put(good))
    before = jax.tree.map(np.array, (state.params, state.slots[UNSENT]))
    state, _ = job.step(state, job.put((x, np.where(x[:, :8] > 2, np.inf, y))))
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.slots[UNSENT]))
    state, _ = job.step(state, job.put(good))
    assert all(np.any(np.asarray(state.params[name]) != before[0][name]) for name in PARAMS)


def test_what_is_not_sent_yet_goes_on_under_another_mesh(tmp_path: Path) -> None:
    def run(devices: int, batches: Any) -> mw.TrainState:
        program = mw.jax_program(loss, PARAMS, optax.sgd(1 / 64))
        mesh = mw.create_mesh({"batch": devices}, devices=jax.devices()[:devices])
        how = mw.StepOptions(sums=mw.GradientSum(compress=mw.TopK(0.05)))
        job = mw.Trainer(program, mw.Placement.of(mesh), how)
        with mw.Checkpoints(tmp_path) as checkpoints:
            return job.train(job.init(), batches, checkpoints=checkpoints)[0]

    eight = run(8, BATCHES)
    two = run(2, BATCHES)  # which begins and ends where the other did
    assert two.slots[UNSENT].shape[0] == 2
    for name, value in host(eight).items():
        np.testing.assert_allclose(host(two)[name], value, atol=1e-6)


@pytest.mark.full
def test_keras_models_keep_what_they_have_not_sent_in_their_optimizers(tmp_path: Path) -> None:
    x = np.random.default_rng(5).normal(size=(64, 16)).astype("float32")

    def fit(devices: int, epochs: int) -> tuple[float, Any]:
        keras.utils.set_random_seed(3)
        mesh = mw.create_mesh({"batch": devices}, devices=jax.devices()[:devices])
        strategy = mw.DataParallel(mesh, sums=mw.GradientSum(compress=mw.PowerSGD(2)))
        with strategy.scope():
            model = keras.Sequential([keras.Input([16]), keras.layers.Dense(8)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        options: dict[str, Any] = {"epochs": epochs, "verbose": 0, "checkpoint": tmp_path}
        history = strategy.fit(model, x, x[:, :8], batch_size=32, **options)
        return history.history["loss"], model.optimizer.variables[-1]

    first, summed = fit(8, 2)
    assert summed.path.endswith(UNSENT)
    assert summed.value.addressable_data(0).shape[0] == 1  # each device holds its own row
    losses, summed = fit(4, 5)
    assert summed.shape[0] == 4
    assert losses[:2] == first
    assert losses[-1] < 0.9 * first[-1]


def test_what_is_not_sent_yet_does_not_depend_on_the_scale_of_the_loss() -> None:
    x = np.random.default_rng(4).normal(size=(64, 8)).astype("float32")

    def fit(optimizer: Any) -> Any:
        keras.utils.set_random_seed(3)
        strategy = mw.DataParallel(
            mw.create_mesh({"batch": 8}), sums=mw.GradientSum(compress=mw.TopK(0.1))
        )
        with strategy.scope():
            model = keras.Sequential([keras.Input([8]), keras.layers.Dense(8)])
            model.compile(optimizer, "mse")
        strategy.fit(model, x, x, batch_size=16, verbose=0, shuffle=False)
        return model.get_weights()[0]

    growing = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=1
    )
    np.testing.assert_allclose(fit(growing), fit(keras.optimizers.SGD(0.1)), atol=1e-6)
