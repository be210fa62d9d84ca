"""The step that ``fit`` runs, that a Trainer takes and that a dry run compiles is the same text."""

from __future__ import annotations

import re
from typing import Any

import jax
import keras
import numpy as np
import oracle
import pytest
from strategies import BATCH, QUICK, Row, rows

import meshwright as mw
from meshwright.frontends.keras.batches import abstract
from meshwright.frontends.keras.compiled import functions_of
from meshwright.frontends.keras.program import read_state, steps_of

OPTIONS = {"accumulate": 2, "remat": "block", "sums": "float32"}


def text(jitted: Any, *args: Any) -> str:
    """The step as it is lowered for CPUs, without the names of functions and places in files."""
    lowered = jitted.trace(*args).lower(lowering_platforms=("cpu",)).as_text()
    return re.sub(r"module @\w+", "module", lowered)


@pytest.mark.parametrize("row", rows())
def test_every_door_leads_to_one_step(row: Row) -> None:
    agree(row, row.strategy())


@pytest.mark.parametrize("row", rows(always=(), only=lambda row: row.name in QUICK))
def test_options_change_it_behind_every_door(row: Row) -> None:
    plain = row.strategy()
    agree(row, mw.Sharded.from_placement(plain.placement, mw.StepOptions(**OPTIONS)))


def agree(row: Row, strategy: mw.Sharded) -> None:
    x, y = row.of.data(BATCH)
    build = oracle.compiled(row.of.build, lambda: keras.optimizers.Adam(0.01))
    model = oracle.made(strategy, build)
    variables = strategy.prepare(model, lambda: (x, y))
    fitted = functions_of(strategy, model, variables)
    state = strategy.state(model)
    (batch,) = fitted.how.for_steps([strategy.put((x, y), model)] * fitted.how.accumulate)
    expected = text(fitted.train, state, batch)

    program = steps_of(strategy, model, variables).program
    trainer = mw.Trainer(program, strategy.placement, strategy.how)
    assert text(trainer.step, state, batch) == expected

    described = strategy.abstract_step(model, abstract((x, y)))
    assert text(described.train, described.state, described.batch) == expected


def test_a_model_of_another_strategy_on_the_same_mesh_is_laid_out_again() -> None:
    mesh = mw.create_mesh({"batch": 4, "model": 2})
    x, y = np.ones([8, 4], "float32"), np.zeros([8, 2], "float32")

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, name="output")])
        model.compile("adam", "mse")
        return model

    alone = mw.DataParallel(mesh, batch=("batch", "model"))
    model = oracle.made(alone, build)
    alone.fit(model, x, y, verbose=0)
    strategy = mw.Sharded(mesh, {"output.*kernel": [None, "model"]})
    strategy.fit(model, x, y, verbose=0)
    kernel, slots = model.layers[0].kernel, model.optimizer.variables
    assert {str(v.layout.unbound()) for v in slots if v.shape == (4, 2)} == {"[unsharded, model]"}
    assert str(kernel.layout.unbound()) == "[unsharded, model]"
    assert kernel.value.sharding.is_equivalent_to(kernel.layout.sharding, 2)


class Counting(keras.layers.Layer):
    """Counts how often Python trains it, which is when a step is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, x: Any, training: bool = False) -> Any:
        self.calls += bool(training)
        return x


@pytest.mark.parametrize("inputs", [None, [None, "batch", None, None]], ids=["rows", "height"])
def test_fit_traces_a_step_once(inputs: list[str | None] | None) -> None:
    mesh = mw.create_mesh({"batch": 8})
    strategy = mw.Sharded(mesh, inputs=inputs) if inputs else mw.Sharded(mesh, batch="batch")
    with strategy.scope():
        counting = Counting()
        image, convolution = keras.Input([8, 8, 1]), keras.layers.Conv2D(1, 3, padding="same")
        model = keras.Sequential([image, convolution, counting])
        model.compile("sgd", "mse")
    x = np.zeros([16, 8, 8, 1], "float32")
    strategy.fit(model, x, x, batch_size=8, epochs=1, verbose=0)
    assert counting.calls == 1


def test_on_one_device_nothing_that_is_assigned_compiles_a_step_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Keras takes an array on the only device as it is, and JAX tells such arrays apart."""
    strategy = mw.DataParallel(mw.create_mesh({"batch": 1}, devices=jax.devices()[:1]))
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, name="output")])
    model.compile("adam", "mse")
    x, y = np.ones([12, 4], "float32"), np.zeros([12, 2], "float32")

    def steps_compiled() -> int:
        caplog.clear()
        with jax.log_compiles():
            strategy.fit(model, x, y, batch_size=4, verbose=0)
        return sum("train_step" in message for message in caplog.messages)

    assert steps_compiled() > 0
    model.set_weights(model.get_weights())
    model.optimizer.learning_rate.assign(0.5)
    assert steps_compiled() == 0


@pytest.mark.parametrize(("pixels", "at_once"), [(28, 4), (224, 1)])
def test_short_steps_are_taken_together_unless_it_takes_long_to_stack_their_batches(
    pixels: int, at_once: int
) -> None:
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    image = keras.Input([pixels, pixels, 3])
    model = keras.Sequential([image, keras.layers.GlobalMaxPooling2D(), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    rows = np.zeros([16, pixels, pixels, 3], "float32"), np.zeros([16, 2], "float32")
    variables = strategy.prepare(model, lambda: rows)
    functions = functions_of(strategy, model, variables)
    assert functions.steps_at_once(read_state(variables), abstract(rows)) == at_once
