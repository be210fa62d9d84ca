"""Accumulation, recompute and precision change how a step is computed, not what comes out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from oracle import OneDevice, Tolerance, Trained, agree, largest_gap, made, train

import meshwright as mw
from meshwright.step.accumulate import Way, accumulating_in

# One process: each oracle is computed once.
pytestmark = pytest.mark.xdist_group("step_option_laws")

EIGHT, MODEL = {"batch": 8}, {"batch": 4, "model": 2}
SPLIT = {"hidden/kernel": [None, "model"], "output/kernel": ["model", None]}
# Rounding, amplified by Adam's division by the root of small second moments.
ROUNDING = Tolerance(weights=2e-5, losses=2e-6)

STRATEGIES: dict[str, Callable[..., mw.Sharded]] = {
    "dp8": lambda **how: mw.Sharded(mw.create_mesh(EIGHT), **how),
    "model": lambda **how: mw.Sharded(mw.create_mesh(MODEL), SPLIT, **how),
    "zero2": lambda **how: mw.Sharded(mw.create_mesh(EIGHT), zero=2, **how),
    "zero3-model": lambda **how: mw.Sharded(mw.create_mesh(MODEL), SPLIT, zero=3, **how),
}


def net() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([16]),
            layers.Dense(256, activation="tanh", name="hidden"),
            layers.LayerNormalization(name="norm"),
            layers.Dense(64, activation="tanh", name="middle"),
            layers.Dense(4, name="output"),
        ],
        name="net",
    )


def build(reduction: str = "sum_over_batch_size", policy: str | None = None) -> Callable[[], Any]:
    def compiled() -> keras.Model:
        if policy is not None:
            keras.config.set_dtype_policy(policy)
        try:
            model = net()
        finally:
            keras.config.set_dtype_policy("float32")
        decay = keras.optimizers.schedules.ExponentialDecay(1e-3, 1, 0.7)
        optimizer = keras.optimizers.Adam(decay, use_ema=True, ema_momentum=0.5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        model.compile(optimizer, loss, metrics=["accuracy"])
        return model

    return compiled


def data(rows: int = 144) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    return draw.normal(size=[rows, 16]).astype("float32"), draw.integers(0, 4, rows)


def run(strategy: Any, batch_size: int, make: Callable[[], Any]) -> Trained:
    return train(strategy, make, *data(), batch_size=batch_size, shuffle=False)


@functools.cache
def one_device(batch_size: int, reduction: str = "sum_over_batch_size") -> Trained:
    return run(OneDevice(), batch_size, build(reduction))


# Accumulation


@pytest.mark.full
@pytest.mark.parametrize("way", ["side by side", "written out", "in a loop"])
@pytest.mark.parametrize(
    ("name", "reduction"),
    [*((name, "sum_over_batch_size") for name in STRATEGIES), ("dp8", "sum")],
)
def test_four_micro_batches_are_one_batch_of_all_their_rows(
    name: str, reduction: str, way: Way
) -> None:
    """Losses, weights, averages of weights and the schedule's count; the last step is smaller."""
    strategy = STRATEGIES[name](accumulate=4)
    with accumulating_in(way):
        sharded = run(strategy, 16, build(reduction))
    one = one_device(64, reduction)
    agree(sharded, one, ROUNDING)
    assert int(sharded.model.optimizer.iterations.numpy()) == 3  # of 64, 64 and 16 rows


def image_net() -> keras.Model:
    """Layers that look across the borders between devices; 12 rows over 2, then 6, then 2."""
    model = keras.Sequential(
        [
            keras.Input([12, 12, 2]),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.MaxPooling2D(),
            layers.Conv2D(4, 3, strides=2),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


def images_data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.normal(size=[32, 12, 12, 2]).astype("float32"), draw.integers(0, 4, 32)


@functools.cache
def one_device_on_images() -> Trained:
    return train(OneDevice(), image_net, *images_data(), batch_size=16, shuffle=False)


@pytest.mark.full
@pytest.mark.parametrize("way", ["side by side", "written out", "in a loop"])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_micro_batches_of_images_that_are_split(zero: int, way: Way) -> None:
    x, y = images_data()
    images = mw.create_mesh({"batch": 2, "rows": 2, "cols": 2})
    lies = ["batch", "rows", "cols", None]
    strategy = mw.Sharded(images, inputs=lies, zero=zero, accumulate=4)
    with accumulating_in(way):
        sharded = train(strategy, image_net, x, y, batch_size=4, shuffle=False)
    agree(sharded, one_device_on_images(), ROUNDING)


class Looks(keras.callbacks.Callback):
    """Looks between steps, so that each is taken alone."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


@pytest.mark.full_for("1")
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.full)])
def test_steps_that_are_taken_together_are_those_taken_alone_bit_for_bit(accumulate: int) -> None:
    """A run that is resumed, or whose source is slow, groups its steps otherwise."""
    results = []
    for callbacks in ([], [Looks()]):
        strategy = STRATEGIES["dp8"](accumulate=accumulate)
        model = made(strategy, build())
        x, y = data()
        history = strategy.fit(
            model, x, y, batch_size=16, shuffle=False, verbose=0, callbacks=callbacks
        )
        results.append((history.history, [weight.tolist() for weight in model.get_weights()]))
    assert results[0] == results[1]


@pytest.mark.full
def test_accumulation_is_not_the_smaller_batch() -> None:
    """The table can fail: steps on 16 rows go elsewhere."""
    with pytest.raises(AssertionError, match="differs by"):
        agree(run(STRATEGIES["dp8"](), 16, build()), one_device(64), ROUNDING)


def test_batch_statistics_are_those_of_each_micro_batch_in_turn() -> None:
    x = data(32)[0]
    strategy = STRATEGIES["dp8"](accumulate=2)
    with strategy.scope():
        norm = layers.BatchNormalization(momentum=0.5, name="norm")
        model = keras.Sequential([keras.Input([16]), norm, layers.Dense(4)])
        model.compile("sgd", "mse")
    strategy.fit(model, x, np.zeros([32, 4]), batch_size=16, shuffle=False, verbose=0)
    mean = np.zeros(16)
    for half in (x[:16], x[16:]):
        mean = 0.5 * mean + 0.5 * half.mean(axis=0)
    np.testing.assert_allclose(norm.moving_mean.numpy(), mean, atol=1e-6)


@pytest.mark.full
def test_a_custom_loop_takes_a_tuple_of_micro_batches() -> None:
    import jax

    x, y = data(64)
    strategy = STRATEGIES["zero2"](accumulate=2)
    model = made(strategy, build())
    step = jax.jit(strategy.train_step(model, (x[:32], y[:32])))
    halves = tuple(strategy.put((x[i : i + 32], y[i : i + 32])) for i in (0, 32))
    state, logs = step(strategy.state(model), halves)
    one = train(OneDevice(), build(), x, y, batch_size=64, shuffle=False)
    assert float(logs["loss"]) == pytest.approx(one.losses[0], rel=1e-6)
    gap = np.abs(np.asarray(state.params["hidden/kernel"]) - one.weights["hidden/kernel"]).max()
    assert gap < ROUNDING.weights


def test_a_models_own_train_step_cannot_be_reached_into() -> None:
    class Own(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            return super().train_step(state, data)

    strategy = STRATEGIES["dp8"](accumulate=2)
    with strategy.scope():
        model = Own([keras.Input([16]), layers.Dense(4)])
        model.compile("sgd", "mse")
    with pytest.raises(mw.ModelError, match="accumulate=2 is not supported with the train_step"):
        strategy.fit(model, data(16)[0], np.zeros([16, 4]), verbose=0)


def test_choices_that_there_are_not_are_refused_together() -> None:
    with pytest.raises(mw.ModelError) as caught:
        STRATEGIES["dp8"](accumulate=0, remat="blok", sums="float16")
    message = str(caught.value)
    assert "remat='blok': say 'none', 'block', 'selective' or a policy" in message
    assert "accumulate=0: say how many micro-batches" in message
    assert "sums='float16': gradients are summed in" in message


# Recompute


REMATS = ["block", "selective", "nothing_saveable", "dots_saveable"]


@pytest.mark.full_for(
    "zero3-model-block", "zero3-model-dots_saveable", "zero3-model-nothing_saveable",
    "dp8-block", "model-block", "zero2-block",
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "remat"),
    # Every way where weights are gathered again as well, and one of them where they are not.
    [
        *(("zero3-model", way) for way in REMATS),
        *((n, "block") for n in STRATEGIES if "3" not in n),
    ],
)
def test_recompute_leaves_the_values(name: str, remat: str) -> None:
    agree(run(STRATEGIES[name](remat=remat), 16, build()), one_device(16), ROUNDING)


# Precision

# A bfloat16 number has 8 bits, a float16 number 11: differences of a few units in the last place of
# activations, after nine steps. The oracle is one device at the same policy.
ROUGH = {
    "mixed_bfloat16": Tolerance(weights=4e-3, losses=2e-2),
    "mixed_float16": Tolerance(weights=4e-3, losses=4e-3),
}


@functools.cache
def one_rough_device(policy: str) -> Trained:
    return run(OneDevice(), 16, build(policy=policy))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "policy", "sums"),
    [
        (name, policy, sums)
        for name in STRATEGIES
        for policy in ROUGH
        for sums in (None, "float32")
        if sums is None or name in ("model", "zero2")  # summed whole, and in pieces
    ],
)
def test_mixed_precision_trains_as_on_one_device(name: str, policy: str, sums: Any) -> None:
    """Loss scaling included: under mixed_float16 Keras wraps the optimizer in one that scales."""
    sharded = run(STRATEGIES[name](sums=sums), 16, build(policy=policy))
    one, within = one_rough_device(policy), ROUGH[policy]
    assert largest_gap(sharded.weights, one.weights)[0] <= within.weights
    np.testing.assert_allclose(sharded.losses, one.losses, rtol=within.losses)
    scaled = isinstance(sharded.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    assert {str(v.dtype) for v in sharded.model.trainable_variables} == {"float32"}


# Memory


@pytest.mark.full_for("model", "zero2", "zero3-model")
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_donated_step_holds_no_second_copy_of_parameters_and_slots(name: str) -> None:
    import jax

    strategy = STRATEGIES[name]()
    model = made(strategy, build())
    batch = tuple(part[:16] for part in data())
    step = strategy.train_step(model, batch)
    state = strategy.state(model)
    lies = jax.tree.map(lambda array: array.sharding, state)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(lies, None))
    figures = compiled.lower(state, strategy.put(batch)).compile().memory_analysis()
    state_bytes = sum(
        array.addressable_data(0).nbytes
        for part in (state.params, state.slots)
        for array in part.values()
    )
    assert figures.alias_size_in_bytes >= state_bytes  # written where they were read
