"""Models whose tables are on servers: predictions, plain Keras models, and evaluation beside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from training_models import data, dense, ratings, recommender

import meshwright as mw
from meshwright.errors import CheckpointError
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.training import SidecarEvaluator, table_of
from meshwright.ps.training.embeddings import Embedding

FAR = 1 << 40  # a key that 32 bits do not hold
HOW = {"batch_size": 16, "verbose": 0}


def bags() -> keras.Model:
    """A dense table beside a bag of hashed items with weights: of few parts, all of them."""
    keras.utils.set_random_seed(0)
    user = keras.Input([], dtype="int32", name="users")
    bought = keras.Input([None], dtype="int32", name="items")
    amount = keras.Input([None], name="amounts")
    of_items = Embedding("bags", 4, "hash", combiner="mean", padding_id=-1)
    joined = keras.layers.Concatenate()(
        [Embedding("people", 4, 20)(user), of_items(bought, amount)]
    )
    inputs = {"users": user, "items": bought, "amounts": amount}
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(joined), name="bags")
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def bag_data() -> tuple[dict[str, np.ndarray], np.ndarray]:
    x, y = ratings()
    x["items"][::3, 2] = -1
    x["items"][5] = -1  # none at all
    x["amounts"] = np.random.default_rng(2).random(x["items"].shape, "float32")
    return x, y


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    x, y = bag_data()
    with ParameterServer() as strategy:
        model, directory = bags(), tmp_path_factory.mktemp("bags")
        strategy.fit(model, x, y, epochs=2, checkpoint=directory, **HOW)
        yield strategy, model, directory


def by_hand(strategy, model, x) -> np.ndarray:
    """The predictions of ``bags``, row by row in NumPy."""
    people, items = (table_of(strategy, model, name) for name in ("people", "bags"))
    kernel, bias = model.get_weights()
    rows = []
    for user, bought, amounts in zip(x["users"], x["items"], x["amounts"], strict=True):
        there = bought != -1
        mean = np.zeros(4)
        if there.any():
            of_items = items.lookup(bought[there].astype("int64"))
            mean = (amounts[there, None] * of_items).sum(0) / amounts[there].sum()
        rows.append(np.concatenate([people.lookup([user])[0], mean]) @ kernel + bias)
    return np.array(rows)


def test_predictions_are_those_of_the_rows_by_their_keys(trained):
    strategy, model, _ = trained
    x, y = bag_data()
    expected = by_hand(strategy, model, x)
    actual = strategy.predict(model, x, batch_size=16)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    batches = [({k: v[at : at + 7] for k, v in x.items()}, y[at : at + 7]) for at in (0, 7, 14)]
    by_batch = strategy.predict(model, lambda context: batches)
    np.testing.assert_allclose(by_batch, expected[:21], atol=1e-6)
    assert strategy.evaluate(model, x, y, return_dict=True)["loss"] == pytest.approx(
        float(np.mean((expected - y) ** 2)), rel=1e-5
    )


def test_neither_predictions_nor_evaluation_make_rows(trained):
    strategy, model, _ = trained
    x, y = bag_data()
    table = table_of(strategy, model, "bags")
    before = table.read()
    x["items"] = np.where(x["items"] == -1, -1, x["items"].astype("int64") + FAR)
    strategy.predict(model, x, batch_size=16)
    strategy.evaluate(model, x, y, batch_size=16)
    np.testing.assert_array_equal(table.read(), before)


@pytest.mark.parametrize(
    "call", ["predict", "evaluate", "fit", "predict_on_batch", "test_on_batch", "train_on_batch"]
)
def test_keras_refuses_without_breaking_the_model(trained, tmp_path: Path, call):
    strategy, model, _ = trained
    x, y = bag_data()
    before = model.get_weights()
    arguments = (x,) if "predict" in call else (x, y)
    options = {} if "batch" in call else {"verbose": 0}
    with pytest.raises(mw.ModelError, match=r"strategy\.predict.*strategy\.export"):
        getattr(model, call)(*arguments, **options)
    for was, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(was, now)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    assert strategy.predict(model, x).shape == (40, 1)


@pytest.mark.full
def test_fit_goes_on_after_a_refusal_and_a_prediction():
    x, y = bag_data()
    with ParameterServer() as strategy, ParameterServer() as other:
        model, undisturbed = bags(), bags()
        strategy.fit(model, x, y, shuffle=False, **HOW)
        with pytest.raises(mw.ModelError):
            model.predict(x, verbose=0)
        strategy.predict(model, x)
        strategy.fit(model, x, y, shuffle=False, **HOW)
        for _ in range(2):
            other.fit(undisturbed, x, y, shuffle=False, **HOW)
        expected = other.predict(undisturbed, x)
        np.testing.assert_array_equal(strategy.predict(model, x), expected)


@pytest.mark.full
def test_a_table_outlives_a_new_optimizer():
    x, y = ratings()
    with ParameterServer() as strategy:
        model = recommender("adam", Embedding("bought", 4, "hash"))
        strategy.fit(model, x, y, **HOW)
        before = strategy.predict(model, x)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
        np.testing.assert_array_equal(strategy.predict(model, x), before)
        loss = strategy.fit(model, x, y, epochs=2, **HOW).history["loss"]
    assert loss[1] < loss[0]


def test_a_model_without_tables_predicts_too_and_needs_not_be_compiled():
    x, _ = data()
    compiled = dense("sgd", keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))
    model = keras.Sequential(compiled.layers)
    with ParameterServer() as strategy:
        predictions = strategy.predict(model, x, batch_size=16)
    np.testing.assert_allclose(predictions, model.predict(x, verbose=0), atol=1e-6)


@pytest.mark.full
def test_a_prediction_in_a_callback_leaves_the_run_as_it_is():
    x, y = data()
    models = dense(keras.optimizers.Adam(0.01)), dense(keras.optimizers.Adam(0.01))
    with ParameterServer() as strategy, ParameterServer() as other:
        called = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: strategy.predict(models[0], x)
        )
        strategy.fit(models[0], x, y, epochs=2, callbacks=[called], **HOW)
        other.fit(models[1], x, y, epochs=2, **HOW)
    for one, two in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_checkpoint_of_a_run_is_predicted_from_on_new_servers(trained):
    strategy, model, directory = trained
    x, _ = bag_data()
    restored = bags()
    with ParameterServer() as others:
        others.predict(restored, x)
        assert others.restore(directory, restored) == 6
        predictions = others.predict(restored, x)
        np.testing.assert_array_equal(predictions, strategy.predict(model, x))
        other = recommender("sgd", Embedding("bought", 4))
        with pytest.raises(CheckpointError, match="bought is not in the checkpoint"):
            others.restore(directory, other)


# Plain Keras models

LOAD = """
import sys
import keras, numpy as np
x, found = np.load(sys.argv[1]), keras.models.load_model(sys.argv[2])
inputs = {name: x[name] for name in ("users", "items", "amounts")}
np.testing.assert_allclose(found.predict(inputs, verbose=0), x["expected"], atol=1e-6)
assert "meshwright" not in sys.modules
"""


@pytest.mark.full
@pytest.mark.alone
def test_an_exported_model_predicts_the_same_in_a_process_with_keras_alone(trained, tmp_path: Path):
    strategy, model, _ = trained
    x, _ = bag_data()
    plain = strategy.export(model)
    assert not any(isinstance(layer, Embedding) for layer in plain.layers)
    assert type(plain.get_layer("people")) is keras.layers.Embedding
    expected = strategy.predict(model, x)
    np.savez(tmp_path / "data.npz", expected=expected, **x)
    plain.save(tmp_path / "plain.keras")
    run = [sys.executable, "-c", LOAD, str(tmp_path / "data.npz"), str(tmp_path / "plain.keras")]
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    subprocess.run(run, check=True, timeout=120, env=environment, cwd=tmp_path)


def test_an_exported_model_gives_zeros_for_keys_that_were_never_seen():
    ids = np.array([[3, 70], [5, 3]], "int32")
    model = keras.Sequential([keras.Input([2], dtype="int32"), Embedding("seen", 2)])
    model.compile("sgd", "mse")
    with ParameterServer() as strategy:
        strategy.fit(model, ids, np.ones([2, 2, 2], "float32"), verbose=0)
        plain = strategy.export(model)
        expected = strategy.predict(model, ids)
        np.testing.assert_array_equal(plain.predict(ids, verbose=0), expected)
        assert not plain.predict(np.array([[4, -70]], "int32"), verbose=0).any()
        far = np.array([[FAR, 1]])
        strategy.fit(model, far, np.ones([1, 2, 2], "float32"), verbose=0)
        with pytest.raises(mw.ModelError, match="1 of 5 keys of table 'seen' do not fit 32 bits"):
            strategy.export(model)


def test_models_that_cannot_be_exported_are_refused():
    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.table = Embedding("mine", 2)

        def call(self, ids):
            return self.table(ids)

    with ParameterServer() as strategy:
        model = Own()
        model.compile("sgd", "mse")
        with pytest.raises(mw.ModelError, match=r"only supported for Sequential.*table_of"):
            strategy.export(model)
        untrained = recommender("sgd", Embedding("bought", 4))
        with pytest.raises(mw.ModelError, match="no table 'bought'"):
            strategy.export(untrained)


# Evaluation beside the training


def test_the_side_car_evaluates_tables_from_their_files(trained):
    strategy, model, directory = trained
    x, y = bag_data()
    (evaluation,) = SidecarEvaluator(bags(), (x, y), directory, batch_size=16).start()
    assert (evaluation.ended, evaluation.step) == (True, 6)
    assert evaluation.logs == pytest.approx(
        strategy.evaluate(model, x, y, batch_size=16, return_dict=True)
    )
    x["items"] += 5  # rows that were never made begin as on the servers
    (other,) = SidecarEvaluator(bags(), lambda context: [(x, y)], directory).start()
    assert other.logs == pytest.approx(strategy.evaluate(model, x, y, return_dict=True))
    assert other.logs != pytest.approx(evaluation.logs)


def test_a_checkpoint_that_is_removed_meanwhile_is_skipped(trained, tmp_path: Path):
    x, y = bag_data()
    visible, aside = tmp_path / "shown", tmp_path / "aside"
    shutil.copytree(trained[2], visible)
    aside.mkdir()
    for path in (*visible.glob("step_6"), *visible.glob("tables_6_*")):
        path.rename(aside / path.name)

    def data(context):
        for path in (*visible.glob("step_3"), *visible.glob("tables_3_*")):  # as fit(keep=1) does
            shutil.rmtree(path)
        for path in list(aside.iterdir()):
            path.rename(visible / path.name)
        yield x, y

    evaluator = SidecarEvaluator(bags(), data, visible, poll_s=0.01, timeout_s=10)
    with pytest.warns(mw.MeshwrightWarning, match="removed while it was evaluated"):
        (evaluation,) = evaluator.start()
    assert (evaluation.step, evaluation.ended) == (6, True)


def test_a_checkpoint_without_tables_is_refused(tmp_path: Path):
    x, y = ratings()
    with ParameterServer() as strategy:
        strategy.fit(recommender("sgd"), x, y, checkpoint=tmp_path, **HOW)
    model = recommender("sgd", Embedding("bought", 4))
    with pytest.raises(CheckpointError):
        SidecarEvaluator(model, (x, y), tmp_path).start()


@pytest.mark.parametrize(("dtype", "far"), [("uint64", FAR), ("uint32", 1 << 31), ("int64", FAR)])
def test_keys_of_every_integer_type_are_trained_as_they_are(dtype, far):
    keras.utils.set_random_seed(0)
    key = keras.Input([], dtype="int32")
    model = keras.Model(key, keras.layers.Dense(1)(Embedding("keys", 2)(key)))
    model.compile("sgd", "mse")
    keys = np.arange(far, far + 8, dtype=dtype)
    with ParameterServer() as strategy:
        strategy.predict(model, keys, verbose=0)  # of which no row is made
        table = table_of(strategy, model, "keys")
        first = table.lookup(keys.astype("int64"))
        strategy.fit(model, keys, np.ones((8, 1), "float32"), verbose=0)
        assert (table.lookup(keys) != first).all()


def test_keys_that_the_model_would_cut_to_32_bits_are_refused():
    keras.utils.set_random_seed(0)
    both = keras.Input([2], dtype="int32")
    model = keras.Model(both, keras.layers.Dense(1)(Embedding("keys", 2)(both[:, 0])))
    model.compile("sgd", "mse")
    x, y = np.arange(8).reshape(4, 2), np.ones((4, 1), "float32")
    with ParameterServer() as strategy:
        strategy.fit(model, x + [0, FAR], y, verbose=0)  # the key alone counts
        for do in (strategy.fit, strategy.evaluate):
            with pytest.raises(mw.ArrayError, match="ids of table 'keys' from key 10995116277"):
                do(model, x + [FAR, 0], y, verbose=0)


def test_best_weights_are_put_back_without_tables_of_servers_and_a_warning_says_so():
    x, y = ratings()
    stop = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    model = recommender("sgd", Embedding("bought", 4))
    with ParameterServer() as strategy:
        with pytest.warns(mw.MeshwrightWarning, match="and not the rows of 'bought', which are on"):
            strategy.fit(model, x, y, callbacks=[stop], **HOW)
        strategy.fit(recommender("sgd"), x, y, callbacks=[stop], **HOW)  # the model has its table
