"""Bags of ids and optimizers of tables: NumPy, and Keras on one device, say what is right."""

from __future__ import annotations

from dataclasses import replace

import jax
import keras
import numpy as np
import pytest
from training_models import ratings, recommender

import meshwright as mw
from meshwright.frontends.keras.program import KerasVariables
from meshwright.ps.options import Tables
from meshwright.ps.shared.partitioners import FixedShardsPartitioner
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.training import table_of
from meshwright.ps.training.embeddings import COMBINERS, Embedding, KerasLookups, combine

PAD = 7
HOW = {"batch_size": 16, "shuffle": False, "verbose": 0}


def combined(rows: np.ndarray, weights: np.ndarray, combiner: str) -> np.ndarray:
    """Of one bag, as TensorFlow's documentation says it."""
    total = (weights[:, None] * rows).sum(0)
    size = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner]
    return total / size if size else np.zeros_like(total)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_bag_is_what_tensorflow_makes_of_it(combiner):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(4, 5, 3)).astype("float32")
    weights = rng.random((4, 5)).astype("float32")
    present = rng.random((4, 5)) < 0.6
    present[1] = False
    weights[2] = 0
    expected = [
        combined(r[there], w[there], combiner)
        for r, w, there in zip(rows, weights, present, strict=True)
    ]
    np.testing.assert_allclose(combine(rows, present, weights, combiner), expected, rtol=1e-5)
    equal = [
        combined(r[there], np.ones(there.sum()), combiner)
        for r, there in zip(rows, present, strict=True)
    ]
    np.testing.assert_allclose(combine(rows, present, None, combiner), equal, rtol=1e-5)


class PlainBag(keras.layers.Layer):
    """The same on one device, with a dense table and a loop over the ids of a bag."""

    def __init__(self, size: int, dim: int, combiner: str, name: str) -> None:
        super().__init__(name=name)
        self.table, self.combiner = keras.layers.Embedding(size, dim), combiner

    def call(self, ids, weights):
        total, size = 0.0, 0.0
        for at in range(ids.shape[1]):
            weight = keras.ops.where(ids[:, at : at + 1] == PAD, 0.0, weights[:, at : at + 1])
            total = total + weight * self.table(ids[:, at])
            size = size + (weight if self.combiner == "mean" else weight**2)
        if self.combiner == "sum":
            return total
        return total / (size if self.combiner == "mean" else keras.ops.sqrt(size))


def bag_model(layer: keras.layers.Layer) -> keras.Model:
    keras.utils.set_random_seed(0)
    ids = keras.Input([3], dtype="int32", name="items")
    weights = keras.Input([3], name="weights")
    out = keras.layers.Dense(1, name="out")(layer(ids, weights))
    model = keras.Model({"items": ids, "weights": weights}, out, name="bag")
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


@pytest.mark.full
@pytest.mark.parametrize("combiner", COMBINERS)
def test_bags_train_as_on_one_device(combiner):
    x, y = ratings()
    del x["users"]
    x["items"][:, 0] = np.arange(40) % 7  # no bag is empty: that divides by 0 in the plain loop
    x["weights"] = 0.1 + np.random.default_rng(3).random((40, 3), "float32")
    model = bag_model(Embedding("bag", 4, 10, combiner=combiner, padding_id=PAD))
    plain = bag_model(PlainBag(10, 4, combiner=combiner, name="bag"))
    with ParameterServer() as strategy:
        strategy.predict(model, x)
        table = table_of(strategy, model, "bag")
        first = table.read()
        plain.get_layer("bag").set_weights([first])
        plain.get_layer("out").set_weights(model.get_weights())
        expected = plain.fit(x, y, epochs=2, **HOW).history["loss"]
        losses = strategy.fit(model, x, y, epochs=2, **HOW).history["loss"]
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        (rows,) = plain.get_layer("bag").get_weights()
        np.testing.assert_allclose(table.read(), rows, atol=1e-6)
        np.testing.assert_array_equal(table.read()[PAD], first[PAD])  # padding is never trained


def test_padding_has_no_row_in_a_hash_table():
    ids = np.array([[1 << 40, -1, 5], [-1, -1, -1]])
    model = keras.Sequential(
        [keras.Input([3], dtype="int32"), Embedding("t", 2, combiner="sqrtn", padding_id=-1)]
    )
    model.compile(keras.optimizers.SGD(1.0), "mse")
    with ParameterServer() as strategy:
        strategy.fit(model, ids, np.ones([2, 2], "float32"), verbose=0)
        assert table_of(strategy, model, "t").read().shape == (2, 2)
        predictions = strategy.predict(model, ids)
    assert not predictions[1].any()
    assert predictions[0].all()


def test_what_a_bag_cannot_take_is_refused_where_the_model_is_made():
    ids, floats = keras.Input([3], dtype="int32"), keras.Input([3])
    one = keras.Input([], dtype="int32")
    with pytest.raises(mw.ModelError, match="ids of table 'a' must be integers; received float32"):
        Embedding("a", 2)(floats)
    with pytest.raises(mw.ModelError, match="needs ids with at least 2 dims"):
        Embedding("a", 2, combiner="sum")(one)
    with pytest.raises(mw.ModelError, match="received weights, which need a combiner"):
        Embedding("a", 2)(ids, floats)
    with pytest.raises(mw.ModelError) as caught:
        Embedding("a", 0, "many", combiner="max", padding_id="none")
    for part in ("dim must", "size must", "combiner must", "padding_id must"):
        assert part in str(caught.value)


def test_layers_of_one_table_must_describe_it_alike():
    ids = [keras.Input([], dtype="int32") for _ in range(2)]
    parts = [
        keras.Sequential([keras.Input([], dtype="int32"), Embedding("a", 2, size)])(of_ids)
        for of_ids, size in zip(ids, (7, 9), strict=True)
    ]
    model = keras.Model(ids, keras.layers.Dot(1)(parts))
    with pytest.raises(mw.ModelError, match=r"share table 'a'.*size=7 and 9"):
        KerasLookups(model, KerasVariables.of(model), None)


def test_rows_of_a_frozen_table_stay_and_count_in_no_norm():
    x, y = ratings()
    layer = Embedding("item_table", 4, 10, trainable=False)
    optimizer = {"learning_rate": 0.5, "global_clipnorm": 0.01}
    model, plain = (recommender(keras.optimizers.SGD(**optimizer), of) for of in (layer, None))
    with ParameterServer() as strategy:
        strategy.predict(model, x)
        table = table_of(strategy, model, "item_table")
        before = table.read()
        plain.get_layer("item_table").embeddings.assign(before)
        plain.get_layer("item_table").trainable = False
        plain.compile(keras.optimizers.SGD(**optimizer), plain.loss)
        for one, other in zip(model.trainable_variables, plain.trainable_variables, strict=True):
            other.assign(np.array(one))
        strategy.fit(model, x, y, **HOW)
        plain.fit(x, y, **HOW)
        np.testing.assert_array_equal(table.read(), before)
    for one, other in zip(model.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


# Optimizers of tables


def by_two_optimizers(model: keras.Model, x, y, names: list[str], tables, others) -> None:
    """Two epochs of a model on one device: one optimizer for these layers, one for the others."""
    state = [v.value for v in model.non_trainable_variables]

    def loss(values, inputs, targets):
        result, _ = model.stateless_call(values, state, inputs)
        return ((result - targets) ** 2).mean()

    gradient, variables = jax.jit(jax.grad(loss)), model.trainable_variables
    for at in [0, 16, 32] * 2:
        batch = {name: ids[at : at + 16] for name, ids in x.items()}
        grads = gradient([v.value for v in variables], batch, y[at : at + 16])
        pairs = list(zip(grads, variables, strict=True))
        of_tables = [pair for pair in pairs if pair[1].path.split("/")[0] in names]
        tables.apply(*map(list, zip(*of_tables, strict=True)))
        rest = [pair for pair in pairs if pair[1].path.split("/")[0] not in names]
        others.apply(*map(list, zip(*rest, strict=True)))


def adagrad(**options):
    return keras.optimizers.Adagrad(0.3, **options)


@pytest.mark.parametrize(
    "case", ["in fit", pytest.param("in the layer, clipped", marks=pytest.mark.full)]
)
def test_tables_have_an_optimizer_of_their_own(case):
    """Adagrad does not move rows that have no gradient, so that whole tables train alike."""
    x, y = ratings()
    clip = {"clipnorm": 0.05} if "clipped" in case else {}
    names = ["user_table", "item_table"] if case == "in fit" else ["item_table"]
    layer = Embedding("item_table", 4, 10, optimizer=adagrad(**clip) if clip else None)
    tables = Tables(None if clip else names[:1])
    model, plain = recommender(keras.optimizers.Adam(0.01), layer), recommender("sgd")
    with ParameterServer(partitioner=FixedShardsPartitioner(2)) as strategy:
        strategy.predict(model, x, tables=tables)
        table = table_of(strategy, model, "item_table")
        plain.set_weights([table.read(), *model.get_weights()])
        by_two_optimizers(plain, x, y, names, adagrad(**clip), keras.optimizers.Adam(0.01))
        if case == "in fit":
            tables = replace(tables, optimizer=adagrad())
        for _ in range(2):  # slots outlive a fit
            strategy.fit(model, x, y, tables=tables, **HOW)
        expected = plain.get_weights()
        np.testing.assert_allclose(table.read(), expected.pop(0), atol=1e-6)
        for result, right in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(result, right, atol=1e-6)


@pytest.mark.full
def test_slots_of_a_table_are_saved_with_it(tmp_path):
    """A run that goes on from a checkpoint is the run that was not broken off."""
    x, y = ratings()
    how = {"tables": Tables(["user_table"], adagrad()), **HOW}

    def model():
        return recommender(keras.optimizers.Adam(0.01), Embedding("item_table", 4, "hash"))

    whole, rest = model(), model()
    with ParameterServer() as strategy:
        strategy.fit(whole, x, y, epochs=2, **how)
        expected = strategy.predict(whole, x)
    with ParameterServer() as strategy:
        first = model()
        strategy.fit(first, x, y, epochs=1, checkpoint=tmp_path, **how)
        strategy.evaluate(first, x, y, tables=Tables(["user_table"]))  # needs no optimizer
        strategy.fit(first, x, y, epochs=1, **how)
    with ParameterServer() as strategy:
        strategy.fit(rest, x, y, epochs=2, checkpoint=tmp_path, **how)
        np.testing.assert_array_equal(strategy.predict(rest, x), expected)


@pytest.mark.full
def test_optimizers_of_tables_that_cannot_be_are_refused():
    x, y = ratings()
    with ParameterServer() as strategy:
        with pytest.raises(mw.ModelError, match="no table of this model travels by rows"):
            strategy.fit(recommender("adam"), x, y, tables=Tables(optimizer="adagrad"), **HOW)
        muon = recommender("adam", Embedding("t", 4, optimizer="muon"))
        with pytest.raises(mw.ModelError, match="the optimizer of table 't': optimizer Muon"):
            strategy.fit(muon, x, y, **HOW)
        model = recommender("adam", Embedding("item_table", 4))
        strategy.fit(model, x, y, **HOW)
        with pytest.raises(mw.ModelError, match=r"cannot change .*: item_table"):
            strategy.fit(model, x, y, tables=Tables(optimizer="adagrad"), **HOW)


# Ids that a table does not have


@pytest.mark.parametrize("embeddings", [None, ["user_table"]], ids=["whole", "by rows"])
def test_an_id_out_of_range_is_an_error_that_names_table_id_and_size(embeddings):
    x, y = ratings()
    wrong = {**x, "users": np.where(np.arange(40) == 38, 20, x["users"])}
    model = recommender("adam")
    before = model.get_weights()
    with ParameterServer() as strategy:
        match = "(id|row) 20 is out of range for table '.*user_table/embeddings', which has 20 rows"
        with pytest.raises(mw.ArrayError, match=match):
            strategy.fit(model, wrong, y, tables=Tables(embeddings), **HOW)
        weights = model.get_weights()  # of the two batches before
        assert all(np.isfinite(array).all() for array in weights)
        assert any((a != b).any() for a, b in zip(before, weights, strict=True))
        strategy.fit(model, x, y, tables=Tables(embeddings), **HOW)
