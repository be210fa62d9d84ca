"""A loop of one's own gives what ``fit`` gives, and plain JAX what a hand-written loop gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers
from oracle import OneDevice, compiled, largest_gap, made, relative, weights
from strategies import BATCH, LAYOUTS, Row, rows

import meshwright as mw
from meshwright.frontends.keras.program import KerasVariables

STEPS = 5


def _batches(row: Row) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = row.of.data()
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, STEPS * BATCH, BATCH)]


def _build(row: Row) -> Any:
    return compiled(row.of.build, lambda: keras.optimizers.SGD(0.05, momentum=0.9))


@pytest.mark.full_for("model-dense", "spatial-images")
@pytest.mark.parametrize(
    "row", rows(always=("model-dense", "spatial-images"), only=lambda row: row.name in LAYOUTS)
)
def test_a_loop_over_the_pure_step_is_fit(row: Row) -> None:
    """That it is the same step for every row, ``test_one_step.py`` says."""
    batches, strategy, one = _batches(row), row.strategy(), OneDevice()
    model, other = made(strategy, _build(row)), made(one, _build(row))
    step = jax.jit(strategy.train_step(model, batches[0]), donate_argnums=0)
    state, losses = strategy.state(model), []
    for batch in batches:
        state, logs = step(state, strategy.put(batch))
        losses.append(float(logs["loss"]))
    strategy.load_state(model, state)
    alone = [other.train_on_batch(*batch, return_dict=True)["loss"] for batch in batches]
    so_far = np.cumsum(np.asarray(alone, float)) / np.arange(1, STEPS + 1)
    np.testing.assert_allclose(losses, so_far, rtol=1e-6)
    gap, path = largest_gap(weights(model), weights(other))
    assert gap <= 1e-6, path


def _towers() -> keras.Model:
    x = keras.Input([8])
    both = [layers.Dense(4, "tanh")(layers.Dense(8, "tanh")(x)) for _ in range(2)]
    return keras.Model(x, layers.Dense(4)(layers.Concatenate()(both)))


@pytest.mark.parametrize(
    ("axes", "how"),
    [
        ({"model": 2}, {"layouts": {"kernel": [None, "model"]}, "zero": 1, "accumulate": 2}),
        (
            {"model": 2},
            {"layouts": {"kernel": [None, "model"]}, "accumulate": 2, "remat": "selective"},
        ),
        pytest.param(
            {"stage": 2},
            {"pipeline": mw.Pipeline("stage", micro_batches=2)},
            marks=pytest.mark.full,
        ),
        pytest.param({"branch": 2}, {"pipeline": mw.Branches("branch")}, marks=pytest.mark.full),
    ],
    ids=["shared and accumulated", "accumulated and computed again", "stages", "branches"],
)
def test_a_step_that_runs_piece_by_piece_is_the_compiled_one(axes: Any, how: Any) -> None:
    """As with ``run_eagerly=True``, or to look for a fault; JAX has no ``shard_map`` over some axes
    of a mesh there."""
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, **axes}), batch="batch", **how)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = _towers()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    batch = np.eye(16, 8, dtype="float32"), np.eye(16, 4, dtype="float32")
    step, state = strategy.train_step(model, batch), strategy.state(model)
    batches = strategy.put(batch)
    if "accumulate" in how:
        batches = [batches] * how["accumulate"]
    compiled_once = jax.jit(step)(state, batches)[0]
    with jax.disable_jit():
        pieces = step(state, batches)[0]
    for path, value in compiled_once.params.items():
        np.testing.assert_allclose(pieces.params[path], value, atol=1e-6, err_msg=path)


def test_fit_where_jax_compiles_nothing_is_fit() -> None:
    """As with ``JAX_DISABLE_JIT=1``, by which programs are looked through for a fault."""
    batch = np.eye(16, 8, dtype="float32"), np.eye(16, 4, dtype="float32")

    def losses(is_compiled: bool) -> list[float]:
        strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), {"kernel": [None, "model"]})
        with jax.disable_jit(not is_compiled):
            with strategy.scope():
                keras.utils.set_random_seed(1)
                hidden = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.1)]
                model = keras.Sequential([keras.Input([8]), *hidden, layers.Dense(4)])
                model.compile(keras.optimizers.SGD(0.1), "mse")
            return strategy.fit(model, *batch, batch_size=8, epochs=2, verbose=0).history["loss"]

    np.testing.assert_allclose(losses(False), losses(True), rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("row", rows(only=lambda row: row.name == "model-dense"))
def test_the_step_is_keras_own_step_for_a_default_model(row: Row) -> None:
    """On the same values, under the same strategy: every array that comes out."""
    batch = _batches(row)[0]
    strategy = row.strategy()
    model = made(strategy, _build(row))
    ours, logs = jax.jit(strategy.train_step(model, batch))(
        strategy.state(model), strategy.put(batch)
    )
    v = KerasVariables.of(model)
    parts = (v.params, v.state, v.slots, v.metrics)
    state = tuple([variable.value for variable in part.values()] for part in parts)
    with strategy.in_force(model):
        logs_there, theirs = jax.jit(model.train_step)(state, strategy.put(batch))
    assert logs.keys() == logs_there.keys()
    for name, value in logs_there.items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-6)
    for part, mine, other in zip(parts, ours, theirs, strict=True):
        for path, value in zip(part, other, strict=True):
            np.testing.assert_allclose(mine[path], value, atol=1e-7, err_msg=path)


def test_a_step_may_be_changed_by_the_user() -> None:
    """Gradients from the program's loss, an update that halves them, written by hand."""
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input([4]), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.2), "mse")
        return model

    model, one = made(strategy, build), made(OneDevice(), build)
    one.optimizer.learning_rate = 0.1
    draw = np.random.default_rng(0)
    batch = (draw.normal(size=[8, 4]).astype("f4"), draw.normal(size=[8, 3]).astype("f4"))
    program = strategy.program(model, batch)

    @jax.jit
    def step(state: mw.TrainState, batch: Any) -> mw.TrainState:
        grads, _ = jax.grad(program.loss, has_aux=True)(state.params, state, batch, True)
        halved = jax.tree.map(lambda gradient: gradient / 2, grads)
        params, slots = program.update(state.params, halved, state.slots)
        return state._replace(params=params, slots=slots)

    strategy.load_state(model, step(strategy.state(model), strategy.put(batch)))
    one.train_on_batch(*batch)
    np.testing.assert_allclose(
        np.asarray(model.layers[0].kernel), np.asarray(one.layers[0].kernel), atol=1e-7
    )


def _library_step(strategy: mw.Sharded, model: keras.Model, program: mw.Program) -> Any:
    return strategy.train_step(model)


def _own_step(strategy: mw.Sharded, model: keras.Model, program: mw.Program) -> Any:
    def step(whole: mw.TrainState, batch: Any) -> Any:
        (_, aux), grads = jax.value_and_grad(program.loss, has_aux=True)(
            whole.params, whole, batch, True
        )
        params, slots = program.update(whole.params, grads, whole.slots)
        metrics, logs = program.measure(aux.metrics, aux, batch)
        return mw.TrainState(params, aux.state, slots, metrics), logs

    return step


@pytest.mark.parametrize("make", [_library_step, _own_step])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_keeps_every_layout_and_compiles_once(make: Any, zero: int) -> None:
    """Biases and their slots are whole beside kernels that are split over their features."""
    mesh = mw.create_mesh({"batch": 4, "model": 2})
    strategy = mw.Sharded(mesh, {"kernel": [None, "model"]}, zero=zero, unmatched="replicate")
    with strategy.scope():
        net = [layers.Dense(64), layers.BatchNormalization(), layers.Dense(2)]
        model = keras.Sequential([keras.Input([64]), *net])
        model.compile("adam", "mse")
    batch = np.ones([8, 64], "float32"), np.ones([8, 2], "float32")
    program = strategy.program(model, batch)
    step = jax.jit(make(strategy, model, program), donate_argnums=0)
    batch = strategy.put(batch)
    state = strategy.state(model)
    before = jax.tree.map(lambda array: array.sharding, state)
    for _ in range(3):
        state, _ = step(state, batch)
    lies = jax.tree.map(
        lambda array, sharding: array.sharding.is_equivalent_to(sharding, array.ndim),
        state,
        before,
    )
    assert all(jax.tree.leaves(lies)), lies
    assert step._cache_size() == 1


def test_parts_of_a_program_are_traced_under_the_strategy_anywhere() -> None:
    """Else gradients of split images would be XLA's, which are wrong where rows do not divide."""
    mesh = mw.create_mesh({"batch": 2, "rows": 4})
    strategy = mw.Sharded(mesh, batch="batch", inputs=["batch", "rows", None, None])
    batch = np.ones([4, 12, 8, 1], "float32"), np.ones([4, 1], "float32")
    with strategy.scope():
        net = [layers.Conv2D(2, 3, padding="same"), layers.GlobalMaxPooling2D()]
        model = keras.Sequential([keras.Input([12, 8, 1]), *net, layers.Dense(1)])
        model.compile("sgd", "mse")
    program, state = strategy.program(model, batch), strategy.state(model)
    traced = jax.make_jaxpr(lambda batch: program.loss(state.params, state, batch, True)[0])
    inside = jax.make_jaxpr(strategy.train_step(model))(state, strategy.put(batch))
    for result in (str(traced(strategy.put(batch))), str(inside)):
        assert "shard_map" in result  # the exchange of borders, written out


# Plain JAX


def _params(seed: int = 0) -> Any:
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "words": jax.random.normal(keys[0], [16, 8]),
        "layers": [
            {"kernel": jax.random.normal(keys[1], [8, 24]) * 0.3, "bias": jnp.zeros([24])},
            {"kernel": jax.random.normal(keys[2], [24, 4]) * 0.3, "bias": jnp.zeros([4])},
        ],
    }


def _loss(params: Any, batch: Any) -> Any:
    first, second = params["layers"]
    hidden = jnp.tanh(params["words"][batch["words"]] @ first["kernel"] + first["bias"])
    logits = hidden @ second["kernel"] + second["bias"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


OPTAX = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
}
PLACEMENTS: dict[str, tuple[Any, Any, Any]] = {
    "replicated": ({"batch": 8}, {}, "batch"),
    "split": (
        {"batch": 4, "model": 2},
        {"words": ["model"], "layers/0/kernel": [None, "model"], "layers/1/kernel": ["model"]},
        "batch",
    ),
    "fsdp": ({"data": 2, "fsdp": 4}, {".*kernel": [["fsdp", "data"], None]}, ("data", "fsdp")),
}
for _, _layouts, _ in PLACEMENTS.values():  # one entry per dim
    for _pattern, _axes in _layouts.items():
        _layouts[_pattern] = [tuple(a) if isinstance(a, list) else a for a in _axes] + [None] * (
            2 - len(_axes)
        )


ALWAYS = [("replicated", "momentum"), ("split", "adam"), ("fsdp", "adafactor")]


@pytest.mark.full_for("fsdp-adafactor", "replicated-momentum", "split-adam")
@pytest.mark.parametrize(
    ("placed", "optimizer"),
    [
        pytest.param(p, o, id=f"{p}-{o}", marks=() if (p, o) in ALWAYS else pytest.mark.full)
        for p in PLACEMENTS
        for o in OPTAX
    ],
)
def test_plain_jax_gives_what_a_hand_written_optax_loop_gives(placed: str, optimizer: str) -> None:
    axes, layouts, batch_axes = PLACEMENTS[placed]
    draw = np.random.default_rng(1)
    batches = [
        {"words": draw.integers(0, 16, 16), "label": draw.integers(0, 4, 16)} for _ in range(STEPS)
    ]
    rule = OPTAX[optimizer]()
    params = _params()
    slots, losses = rule.init(params), []

    @jax.jit
    def by_hand(params: Any, slots: Any, batch: Any) -> Any:
        (loss, _), grads = jax.value_and_grad(_loss, has_aux=True)(params, batch)
        changes, slots = rule.update(grads, slots, params)
        return optax.apply_updates(params, changes), slots, loss

    for batch in batches:
        params, slots, loss = by_hand(params, slots, batch)
        losses.append(float(loss))

    program = mw.jax_program(_loss, _params, OPTAX[optimizer]())
    placement = mw.Placement.of(mw.create_mesh(axes), layouts, batch=batch_axes)
    trainer = mw.Trainer(program, placement)
    curve, state = [], trainer.init()
    for info in trainer.steps(state, batches):
        curve.append(float(info.logs["loss"]))
        state = info.state
    np.testing.assert_allclose(curve, losses, rtol=1e-6)
    assert set(info.logs) == {"accuracy", "loss"}
    flat = dict(jax.tree_util.tree_flatten_with_path(params)[0])
    expected = {jax.tree_util.keystr(p, simple=True, separator="/"): v for p, v in flat.items()}
    assert state.params.keys() == expected.keys()
    for path, value in expected.items():
        assert relative(np.asarray(state.params[path]), np.asarray(value)) <= 1e-5, path
        sharding = trainer.layouts.params[path].sharding
        assert state.params[path].sharding.is_equivalent_to(sharding, value.ndim)
