"""Laws: one worker, or synchronous training, is what Keras does on one device, step by step."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from training_models import apart, data, dense, ratings, recommender, same_history

from meshwright.errors import ModelError
from meshwright.frontends.keras.data_parallel import DataParallel
from meshwright.frontends.keras.program import KerasVariables
from meshwright.layouts.mesh import create_mesh
from meshwright.ps.options import InputOptions, Tables
from meshwright.ps.server.optimizers import TWINS, twin_of
from meshwright.ps.shared.consistency import Async, Backup, Stale
from meshwright.ps.shared.partitioners import FixedShardsPartitioner
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.training.embeddings import Embedding

decay = keras.optimizers.schedules.ExponentialDecay
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw, all gradients clipped together": lambda: keras.optimizers.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.3
    ),
    "rmsprop, each gradient clipped": lambda: keras.optimizers.RMSprop(0.01, clipnorm=0.1),
    "a schedule, values clipped": lambda: keras.optimizers.Adam(decay(0.1, 2, 0.5), clipvalue=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "averaged": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5),
    "loss scaled and clipped": lambda: keras.optimizers.SGD(
        0.1, loss_scale_factor=8.0, clipnorm=0.1
    ),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}
HOW = {"batch_size": 16, "shuffle": False, "epochs": 2, "verbose": 0}


def slots_apart(one: keras.Model, other: keras.Model) -> float:
    pairs = zip(one.optimizer.variables, other.optimizer.variables, strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


_FAST = ("adam",)
_TABLE = [
    name if name in _FAST else pytest.param(name, marks=pytest.mark.full) for name in OPTIMIZERS
]


@pytest.mark.parametrize("name", _TABLE)
def test_training_on_servers_is_training_on_one_device(name):
    x, y = data()
    layers = keras.layers.BatchNormalization, keras.layers.Dropout
    between = [] if "clipped" in name else [layers[0](), layers[1](0.2, seed=1)]
    model = dense(OPTIMIZERS[name](), *between)
    between = [] if "clipped" in name else [layers[0](), layers[1](0.2, seed=1)]
    expected = dense(OPTIMIZERS[name](), *between)
    history = expected.fit(x, y, **HOW).history
    with ParameterServer(partitioner=FixedShardsPartitioner(2)) as strategy:
        same_history(history, strategy.fit(model, x, y, **HOW).history)
        if name == "nadam":
            expected.fit(x, y, **HOW)
            strategy.fit(model, x, y, **HOW)
    assert apart(expected, model) < 1e-6
    assert slots_apart(expected, model) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize(
    "consistency",
    ["sync", Stale(1), Backup(1), Async(by_staleness=True, compensation=0.04)],
    ids=str,
)
def test_for_one_worker_every_consistency_is_the_same(consistency, optimizer):
    """Nothing is stale, no worker is waited for, and no gradient comes late."""
    x, y = data()
    model, expected = (dense(OPTIMIZERS[optimizer]()) for _ in range(2))
    history = expected.fit(x, y, **HOW).history
    with ParameterServer(consistency=consistency) as strategy:
        result = strategy.fit(model, x, y, **HOW).history
    same_history(history, result)
    assert apart(expected, model) < 1e-6


@pytest.mark.full_for("async")
@pytest.mark.parametrize("consistency", [pytest.param("sync", marks=pytest.mark.full), "async"])
def test_what_was_trained_is_trained_on(consistency):
    """Fit, fit again, and fit with Keras: slots and steps go on in both directions."""
    x, y = data()
    how = {**HOW, "epochs": 1}
    model, expected = dense(keras.optimizers.Adam(0.01)), dense(keras.optimizers.Adam(0.01))
    with ParameterServer(consistency=consistency) as strategy:
        strategy.fit(model, x, y, **how)
        model.fit(x, y, **how)
        strategy.fit(model, x, y, **how)
    for _ in range(3):
        expected.fit(x, y, **how)
    assert apart(expected, model) < 1e-6
    assert int(model.optimizer.iterations) == 9


def dropping() -> keras.Model:
    """A model that draws three times per step from two seeds."""
    keras.utils.set_random_seed(0)
    shared = keras.layers.Dropout(0.4, seed=1)
    between = [shared, keras.layers.Dense(8), shared, keras.layers.Dropout(0.2, seed=2)]
    return dense(keras.optimizers.SGD(0.1, momentum=0.9), *between)


@pytest.mark.parametrize("through", ["one program", "checkpoints"])
def test_random_numbers_go_on_where_those_of_one_device_do(through, tmp_path):
    """From fit to fit, and from checkpoint to checkpoint, to parameter servers and back."""
    x, y = data()
    how = {**HOW, "epochs": 4}
    expected, model = dropping(), dropping()
    losses = expected.fit(x, y, **how).history["loss"]
    with ParameterServer() as servers:
        device = DataParallel(create_mesh({"batch": 8}))
        for epoch, strategy in enumerate((servers, servers, device, servers)):
            legs = {**how, "initial_epoch": epoch}
            if through == "checkpoints":
                model, legs = dropping(), {**how, "checkpoint": tmp_path}
            history = strategy.fit(model, x, y, **{**legs, "epochs": epoch + 1}).history
            assert history["loss"][-1] == pytest.approx(losses[epoch], abs=1e-5)
    assert apart(expected, model) < 1e-5  # seeds, too


class Noisy(keras.layers.Layer):
    """Draws in every call, also outside of training, as the sampling layer of a VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed)


def test_evaluations_and_predictions_draw_as_those_of_one_device_do():
    x, y = data()
    how = {**HOW, "validation_data": (x, y), "validation_batch_size": 16}
    expected, model = (
        dense(keras.optimizers.SGD(0.1), Noisy(), keras.layers.Dropout(0.2, seed=2))
        for _ in range(2)
    )
    with ParameterServer() as servers:
        for fit in (expected.fit(x, y, **how), servers.fit(model, x, y, **how)):
            assert fit.history["val_loss"][0] != fit.history["val_loss"][1]
        same_history(expected.history.history, model.history.history)
        for _ in range(2):
            loss, _ = expected.evaluate(x, y, batch_size=16, verbose=0)
            measured = servers.evaluate(model, x, y, batch_size=16, verbose=0)
            assert measured[0] == pytest.approx(loss)
            outputs = expected.predict(x, batch_size=16, verbose=0)
            np.testing.assert_allclose(
                servers.predict(model, x, batch_size=16, verbose=0), outputs, atol=1e-5
            )
    assert apart(expected, model) < 1e-5  # seeds, too


@pytest.mark.full_for("0.1")
@pytest.mark.parametrize("clip", [None, 0.1])
def test_rows_of_tables_train_as_whole_tables_do(clip):
    """For SGD; optimizers with a memory leave rows alone that a batch does not touch."""
    x, y = ratings()
    expected = recommender(keras.optimizers.SGD(0.5, global_clipnorm=clip))
    model = recommender(keras.optimizers.SGD(0.5, global_clipnorm=clip))
    history = expected.fit(x, y, **HOW).history
    tables = ["user_table", "item_table"]
    with ParameterServer(partitioner=FixedShardsPartitioner(2)) as strategy:
        same_history(history, strategy.fit(model, x, y, tables=Tables(tables), **HOW).history)
        stats = strategy.with_servers(lambda servers: servers.ask_all(_stats()))[0].head
    assert apart(expected, model) < 1e-6
    assert stats["lookups"] >= 2 * 2 * 3  # two tables, two epochs, three batches


def test_rows_that_wait_for_a_step_take_it_in_a_run_that_resumes(tmp_path):
    """Three batches an epoch, and a step every second one: the epoch ends amid one."""
    x, y = np.array([0, 1, 2, 3, 4, 5])[:, None], np.ones((6, 1, 1), "float32")
    how = {"batch_size": 2, "shuffle": False, "verbose": 0}

    def model():
        keras.utils.set_random_seed(0)
        table = keras.layers.Embedding(6, 1, name="table")
        net = keras.Sequential([keras.Input([1], dtype="int32"), table])
        net.compile(keras.optimizers.SGD(0.5, gradient_accumulation_steps=2), "mse")
        return net

    expected, resumed = model(), model()
    expected.fit(x, y, epochs=2, **how)
    tables = Tables(["table"])
    for epochs, trained in ((1, model()), (2, resumed)):
        with ParameterServer() as strategy:
            strategy.fit(trained, x, y, epochs=epochs, checkpoint=tmp_path, tables=tables, **how)
    assert apart(expected, resumed) < 1e-6


def classifier(loss: str) -> keras.Model:
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, "softmax")])
    model.compile("adam", loss)
    return model


@pytest.mark.parametrize("one_hot", [False, pytest.param(True, marks=pytest.mark.full)])
def test_classes_have_the_weights_that_keras_gives_them(one_hot):
    draw, weights = np.random.default_rng(0), {0: 0.3, 2: 4.0}
    x, y = draw.normal(size=[40, 4]).astype("float32"), draw.integers(0, 3, [40, 1])
    y = np.eye(3)[y[:, 0]] if one_hot else y
    loss = f"{'' if one_hot else 'sparse_'}categorical_crossentropy"
    model, expected = classifier(loss), classifier(loss)
    history = expected.fit(x, y, class_weight=weights, **HOW).history
    with ParameterServer() as strategy:
        same_history(history, strategy.fit(model, x, y, class_weight=weights, **HOW).history)
    assert apart(expected, model) < 1e-6


@pytest.mark.parametrize("form", ["by number", "a stream that knows its length"])
def test_classes_of_a_dataset_have_the_weights_that_keras_gives_them(form):
    class Numbered(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, number):
            rows = slice(8 * number, 8 * number + 8)
            return x[rows], y[rows]

    draw, weights = np.random.default_rng(0), {0: 0.3, 2: 4.0}
    x, y = draw.normal(size=[32, 4]).astype("float32"), draw.integers(0, 3, [32])
    model, expected = (classifier("sparse_categorical_crossentropy") for _ in range(2))
    history = expected.fit(Numbered(), class_weight=weights, shuffle=False, verbose=0).history

    class Stream:  # as tf.data's datasets and PyTorch's loaders are
        def __len__(self):
            return 4

        def __iter__(self):
            return (Numbered()[number] for number in range(4))

    feed = Numbered() if form == "by number" else Stream()
    with ParameterServer() as strategy:
        actual = strategy.fit(model, feed, class_weight=weights, verbose=0)
        same_history(history, actual.history)
    assert apart(expected, model) < 1e-6


def tower(rows: int) -> keras.Model:
    ids = keras.Input([], dtype="int32")
    return keras.Model(ids, keras.layers.Embedding(rows, 4, name="table")(ids))


def towers() -> keras.Model:
    """Two towers of which Keras calls every variable, and so every slot, the same."""
    keras.utils.set_random_seed(0)
    ids = [keras.Input([], dtype="int32") for _ in range(2)]
    parts = [tower(rows)(of_ids) for rows, of_ids in zip((12, 9), ids, strict=True)]
    model = keras.Model(ids, keras.layers.Dot(1)(parts))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def test_layers_of_the_same_name_keep_their_own_slots():
    users, items = np.arange(40) % 12, np.arange(40) % 9
    liked = (users * items % 5).astype("float32")
    model, expected = towers(), towers()
    for _ in range(2):  # in the second fit the servers begin with slots that are there
        expected.fit([users, items], liked, **HOW)
        with ParameterServer() as strategy:
            strategy.fit(model, [users, items], liked, **HOW)
    assert apart(expected, model) < 1e-6
    assert slots_apart(expected, model) < 1e-6


@pytest.mark.full
def test_validation_counts_every_element_once():
    x, y = data(70)
    model, expected = dense("sgd"), dense("sgd")
    how = {**HOW, "validation_data": (x[40:], y[40:])}
    history = expected.fit(x[:40], y[:40], **how).history
    with ParameterServer() as strategy:
        same_history(history, strategy.fit(model, x[:40], y[:40], **how).history)


def _stats():
    from meshwright.ps.wire.message import Message

    return Message("stats")


def kinds_of(optimizer: keras.optimizers.Optimizer) -> set[str]:
    model = dense(optimizer)
    optimizer.build(model.trainable_variables)
    variables = KerasVariables.of(model)
    owned = [path for path, slot in variables.slots.items() if variables.infos[id(slot)].owner]
    return {path.rpartition("/")[2] for path in owned}


@pytest.mark.parametrize("name", TWINS)
def test_servers_call_the_slots_of_an_optimizer_as_keras_does(name):
    optimizer = getattr(keras.optimizers, name)()
    twin = twin_of(keras.optimizers.serialize(optimizer))  # type: ignore[arg-type]
    assert kinds_of(optimizer) == set(twin.slots)


def _averaged() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)


@pytest.mark.parametrize("table", ["in the model", "with its own optimizer", 40, "hash"])
def test_averages_take_the_place_of_the_rows_as_in_keras(table):
    """One of two shards gets no gradient at all; rows without one stay as they are."""
    is_away = table in (40, "hash")
    ids = np.array([1, 3, 5, 3] * 4, "int32")
    y = np.random.default_rng(0).normal(size=[16, 4]).astype("float32")

    def model(layer: keras.layers.Layer, optimizer: keras.optimizers.Optimizer) -> keras.Model:
        inputs = keras.Input([], dtype="int32")
        built = keras.Model(inputs, layer(inputs))
        built.compile(optimizer, "mse")
        return built

    own = table == "with its own optimizer"
    layer = Embedding("users", 4, table) if is_away else keras.layers.Embedding(40, 4)
    trained = model(layer, keras.optimizers.SGD(0.5) if own else _averaged())
    plain = keras.layers.Embedding(40, 4)
    expected = model(plain, _averaged())
    every = np.arange(40)
    with ParameterServer(partitioner=FixedShardsPartitioner(2)) as strategy:
        before = strategy.predict(trained, every, verbose=0) if is_away else layer.get_weights()[0]
        plain.set_weights([before])
        expected.fit(ids, y, batch_size=16, epochs=3, verbose=0)
        tables = Tables(0, _averaged() if own else None)
        strategy.fit(trained, ids, y, batch_size=16, epochs=3, verbose=0, tables=tables)
        after = strategy.predict(trained, every, verbose=0) if is_away else layer.get_weights()[0]
    result = plain.get_weights()[0]
    np.testing.assert_allclose(after, result, atol=1e-6)
    assert np.abs(result - before).max() > 0.01


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"embeddings": -1}, r"a whole number of bytes, 0 or more, .* or None; received -1"),
        ({"embeddings": 4e6}, r"names of layers, or None; received 4000000\.0"),
        ({"embeddings": 0, "optimizer": "sdg"}, r"a Keras optimizer, its name .* received 'sdg'"),
    ],
)
def test_tables_of_another_kind_are_refused(tables, message):
    layer, inputs = keras.layers.Embedding(40, 4), keras.Input([], dtype="int32")
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", "mse")
    with ParameterServer() as strategy, pytest.raises(ModelError, match=message):
        strategy.fit(model, np.zeros([4], "int32"), np.zeros([4, 4]), tables=Tables(**tables))


class Batches(keras.utils.PyDataset):
    """Batches of 16 rows, and a rest."""

    def __init__(self, *arrays) -> None:
        super().__init__()
        self.arrays = arrays

    def __len__(self) -> int:
        return -(-len(self.arrays[0]) // 16)

    def __getitem__(self, number: int):
        return tuple(array[number * 16 : number * 16 + 16] for array in self.arrays)


def test_validation_data_may_have_weights_where_training_data_have_none():
    x, y = data()
    held_out = Batches(x, y, np.linspace(0.1, 1, len(x), dtype="float32"))
    expected, model = dense("sgd"), dense("sgd")
    how = {"validation_data": held_out, "shuffle": False, "verbose": 0}
    history = expected.fit(Batches(x, y), **how).history
    with ParameterServer() as servers:
        same_history(history, servers.fit(model, Batches(x, y), **how).history)


class Shuffled(Batches):
    """Batches of other rows in each epoch."""

    def __init__(self, *arrays) -> None:
        super().__init__(*arrays)
        self.draw = np.random.default_rng(0)

    def on_epoch_end(self) -> None:
        order = self.draw.permutation(len(self.arrays[0]))
        self.arrays = tuple(array[order] for array in self.arrays)


@pytest.mark.parametrize("sharding", ["dynamic", "copy"])
def test_a_dataset_that_changes_between_epochs_does_so_on_servers(sharding):
    x, y = data()
    expected, model = dense("sgd"), dense("sgd")
    how = {"epochs": 3, "shuffle": False, "verbose": 0, "validation_steps": 1}
    own, sent, options = Shuffled(x, y), Shuffled(x, y), InputOptions(sharding)
    held_out, validated = Shuffled(x, y), Shuffled(x, y)
    history = expected.fit(own, validation_data=held_out, **how).history
    outputs = expected.predict(own, verbose=0)
    loss = expected.evaluate(own, steps=2, verbose=0)
    with ParameterServer() as servers:
        how |= {"validation_data": validated, "input_options": options}
        same_history(history, servers.fit(model, sent, **how).history)
        np.testing.assert_allclose(servers.predict(model, sent, verbose=0), outputs, atol=1e-6)
        assert servers.evaluate(model, sent, steps=2, verbose=0) == pytest.approx(loss, rel=1e-5)
    assert apart(expected, model) < 1e-6


@pytest.mark.parametrize("sharding", ["dynamic", "copy"])
@pytest.mark.parametrize("kind", [Batches, Shuffled])
def test_an_epoch_goes_on_where_fewer_steps_than_batches_left_the_dataset(kind, sharding, tmp_path):
    x, y = data(96)
    expected, model, resumed = dense("sgd"), dense("sgd"), dense("sgd")
    how = {"epochs": 3, "steps_per_epoch": 2, "shuffle": False, "verbose": 0}
    history = expected.fit(kind(x, y), **how).history
    options = {"input_options": InputOptions(sharding)}
    with ParameterServer() as servers:
        same_history(history, servers.fit(model, kind(x, y), **how, **options).history)
        if kind is Batches:
            options["checkpoint"] = tmp_path
            servers.fit(dense("sgd"), kind(x, y), **how | {"epochs": 2}, **options)
            same_history(history, servers.fit(resumed, kind(x, y), **how, **options).history)
    assert apart(expected, model) < 1e-6
