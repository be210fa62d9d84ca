"""What is exported of a model, and what cannot be."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from training_models import data, dense, ratings, recommender

import meshwright as mw
from meshwright import _compat
from meshwright.frontends.keras.program import KerasVariables, keras_program
from meshwright.ps.training.compiled import Compiled
from meshwright.ps.training.embeddings import KerasLookups, building
from meshwright.ps.training.export import export_step
from meshwright.ps.training.optimizers import take_apart
from meshwright.ps.training.signature import Signature


def exported(model, batch, embeddings=None, **options):
    with building():
        _compat.build_for(model, batch)
    variables = KerasVariables.of(model)
    lookups = KerasLookups(model, variables, embeddings)
    return export_step(keras_program(model, variables), [batch], lookups=lookups, **options)


@pytest.mark.full
def test_state_is_told_apart_by_who_keeps_it():
    frozen = keras.layers.Dense(4, name="frozen", trainable=False)
    between = [frozen, keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.1)]
    parts = exported(dense("sgd", *between), data(8)).parts
    assert parts.params[:2] == ("hidden/kernel", "hidden/bias")
    assert parts.moving == ("norm/moving_mean", "norm/moving_variance")
    assert parts.frozen == ("frozen/kernel", "frozen/bias")
    assert len(parts.seeds) == 1
    assert [path for path, _ in parts.metrics][-2:] == ["accuracy/total", "accuracy/count"]


def test_one_export_takes_any_number_of_rows():
    x, y = data()
    export = exported(dense("sgd"), (x[:8], y[:8]))
    assert export.code_for(Signature.of((x[:8], y[:8]))) is export.codes[0][1]
    assert export.code_for(Signature.of((x[:5], y[:5]))) is export.any_rows[0].even
    with pytest.raises(
        mw.BatchError, match=r"exported for 8x6 float32.*received 8x7 float32.*number of rows"
    ):
        export.code_for(Signature.of((np.zeros([8, 7], "float32"), y[:8])))


def test_on_cpus_maximum_pooling_is_differentiated_by_comparison():
    def loss(params, batch):
        pooled = jax.lax.reduce_window(
            batch * params["w"], -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID"
        )
        return jnp.mean(pooled)

    program = mw.jax_program(loss, {"w": jnp.ones([])}, optax.sgd(0.1))
    batch = np.ones([8, 4, 4], "float32")
    selects = {}
    for platforms in (["cpu"], ["cpu", "tpu"]):
        step = export_step(program, [batch], platforms=platforms)
        (free,) = step.any_rows
        assert free.even is not None, free.why_not
        codes = (step.codes[0][1].gradients, free.even.gradients)
        selects[len(platforms)] = [b"select_and_scatter" in code for code in codes]
    assert selects == {1: [False, False], 2: [True, True]}


def test_without_a_free_number_of_rows_batches_must_be_alike():
    x, y = data()
    export = exported(dense("sgd"), (x[:8], y[:8]), any_rows=False)
    with pytest.raises(mw.BatchError, match="drop a smaller last one"):
        export.code_for(Signature.of((x[:5], y[:5])))


RUN = """
import pickle, sys
import numpy as np
made, arguments = pickle.load(open(sys.argv[1], "rb"))
from meshwright.ps.training.compiled import Compiled
step = Compiled(made).step_for(made.codes[0][0])
grads, *_, loss = step.gradients(*arguments)
assert "keras" not in sys.modules and "tensorflow" not in sys.modules, "a worker needs JAX alone"
np.savez(sys.argv[2], loss=loss, **{path.replace("/", "."): v for path, v in grads.items()})
"""


@pytest.mark.full
def test_exported_code_runs_without_keras_and_gives_the_model_s_gradients(tmp_path: Path):
    x, y = data(8)
    model = dense("sgd")
    export = exported(model, (x, y))
    params = {path: np.asarray(v.value) for path, v in KerasVariables.of(model).params.items()}
    arguments = (params, {}, {}, {}, {}, [], [x, y])
    (tmp_path / "made").write_bytes(pickle.dumps((export, arguments)))
    run = [sys.executable, "-c", RUN, str(tmp_path / "made"), str(tmp_path / "out.npz")]
    subprocess.run(run, check=True, timeout=120, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    with np.load(tmp_path / "out.npz") as file:
        result = dict(file)
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(1.0), model.loss)
    expected = model.train_on_batch(x, y, return_dict=True)
    assert float(result["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
    for path, was, now in zip(params, before, model.get_weights(), strict=True):
        np.testing.assert_allclose(result[path.replace("/", ".")], was - now, atol=1e-6)


def test_only_the_rows_of_a_batch_are_taken_and_each_once():
    x, y = ratings(8)
    export = exported(recommender("sgd"), (x, y), ["user_table", "item_table"])
    step = Compiled(export).step_for(Signature.of((x, y)))
    looked = step.look([x["items"], x["users"], y])
    assert {name: ids.tolist() for name, ids in looked.unique.items()} == {
        "user_table/embeddings": np.unique(x["users"]).tolist(),
        "item_table/embeddings": np.unique(x["items"]).tolist(),
    }
    assert looked.num_rows == {"user_table/embeddings": 8, "item_table/embeddings": 24}


def test_tables_that_are_read_whole_do_not_travel_by_rows():
    x, y = ratings(8)
    model = recommender("sgd", embeddings_regularizer="l2")
    with pytest.raises(mw.ModelError, match=r"user_table/embeddings.*embeddings="):
        exported(model, (x, y), ["user_table"])
    assert "user_table/embeddings" in exported(model, (x, y)).parts.params
    with pytest.raises(mw.ModelError, match=r"no Embedding layer \['unknown'\]"):
        exported(model, (x, y), ["unknown"])


class Chooses(keras.Model):
    """Looks up a table by ids that depend on ``scores``, which is called with the inputs."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores
        self.table = keras.layers.Embedding(5, 2, name="table")
        self.table.build(None)

    def call(self, x):
        return self.table(keras.ops.argmax(self.scores(x), axis=-1))


class OfWholeTable(Chooses):
    """The ids depend on the table, which nothing else reads."""

    def call(self, x):
        return self.table(keras.ops.argmax(x @ self.table.embeddings, axis=-1))


class InLoop(Chooses):
    """The ids are made inside of a loop."""

    def call(self, x):
        def one(total, row):
            return total + self.table(keras.ops.argmax(row, axis=-1)), None

        scanned: Any = keras.ops.scan(one, keras.ops.zeros([2]), x)
        return scanned[0]


COMPUTED = "looks up ids that it computes from its own weights.*: in 'table/embeddings'"


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (lambda: Chooses(keras.layers.Dense(5)), "float32", COMPUTED),
        (
            lambda: Chooses(
                keras.Sequential([keras.layers.Embedding(5, 4), keras.layers.Flatten()])
            ),
            "int32",
            COMPUTED,
        ),
        (lambda: OfWholeTable(None), "float32", COMPUTED),
        (lambda: InLoop(None), "float32", "looks up ids that it makes inside of a loop"),
    ],
    ids=["weights", "rows", "whole table", "in a loop"],
)
def test_ids_that_are_unknown_before_a_step_are_refused(make, inputs, message):
    model = make()
    model.compile("sgd", "mse")
    batch = np.zeros([4, 5], inputs), np.zeros([4, 2], "float32")
    with pytest.raises(mw.ModelError, match=message):
        exported(model, batch, 1)


def test_ids_that_a_model_computes_from_its_batch_are_looked_up():
    model = keras.Sequential(
        [
            keras.Input([], dtype="int32"),
            keras.layers.Lambda(lambda ids: ids % 5),
            keras.layers.Embedding(5, 2, name="table"),
        ]
    )
    model.compile("sgd", "mse")
    batch = np.array([7, 12, 3], "int32"), np.zeros([3, 2], "float32")
    export = exported(model, batch, ["table"])
    looked = Compiled(export).step_for(Signature.of(batch)).look(list(batch))
    assert looked.unique["table/embeddings"].tolist() == [2, 3]
    assert looked.positions[0].tolist() == [0, 0, 1]


def test_a_training_step_of_its_own_is_refused():
    class Own(keras.Sequential):
        def train_step(self, state, data):
            return super().train_step(state, data)

    model = Own([keras.Input([6]), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    with pytest.raises(mw.ModelError, match="overrides train_step"):
        exported(model, (np.zeros([4, 6], "float32"), np.zeros([4, 3], "float32")))


def test_words_in_a_batch_are_refused():
    with pytest.raises(mw.BatchError, match="Convert strings to numbers"):
        Signature.of(np.array(["a", "b"]))


def test_constraints_are_refused_by_name():
    layer = keras.layers.Dense(2, kernel_constraint="max_norm")
    model = keras.Sequential([keras.Input([3]), layer])
    model.compile("sgd", "mse")
    with pytest.raises(mw.ModelError, match=r"constraints are not supported.*kernel"):
        take_apart(model.optimizer, KerasVariables.of(model).params)
