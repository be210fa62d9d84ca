"""``fit``: data, callbacks, checkpoints, and everything it refuses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from scipy import sparse
from training_models import RowsOfClasses, apart, data, dense

import meshwright as mw
from meshwright.ps.options import InputOptions
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.training.callbacks import check_callbacks
from meshwright.ps.training.data import ArrayBatches, DatasetMaker, InputContext
from meshwright.ps.training.embeddings import Embedding
from meshwright.ps.training.evaluator import SidecarEvaluator
from meshwright.ps.training.feed import feed_of
from meshwright.ps.training.metrics import adds_up, check_metrics
from meshwright.ps.training.progress import Look, WorkerRates, stragglers
from meshwright.ps.training.shards import elements_of, num_shards
from meshwright.ps.wire.message import Message
from meshwright.ps.worker.context import current
from meshwright.ps.worker.iterators import IndexedElements
from meshwright.run.options import Data
from meshwright.run.progress import Progress

HOW = {"batch_size": 16, "shuffle": False, "verbose": 0}

# Data


def test_arrays_are_cut_into_epochs_of_batches_in_another_order_each():
    x = np.arange(10)
    batches = ArrayBatches((x, -x), batch_size=4, epochs=2, shuffle=True, seed=3)
    epochs = [[batches[3 * epoch + at] for at in range(3)] for epoch in range(2)]
    rows = [np.concatenate([x for x, _ in epoch]).tolist() for epoch in epochs]
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(10))
    assert all((x == -y).all() for epoch in epochs for x, y in epoch)
    again = ArrayBatches((x, -x), batch_size=4, epochs=2, shuffle=True, seed=3)
    assert again[4][0].tolist() == batches[4][0].tolist()
    with pytest.raises(mw.DataError, match="received 9, 10 rows"):
        ArrayBatches((x, x[:9]))
    with pytest.raises(mw.DataError, match="a csr_matrix, which NumPy reads as one value"):
        ArrayBatches((sparse.csr_matrix(np.eye(10)), x))


@pytest.mark.parametrize("make", [lambda c: list("abcd"), lambda c: iter("abcd")])
def test_elements_are_found_by_number_in_any_order(make):
    numbered = IndexedElements(DatasetMaker(make))
    assert [numbered[at] for at in (2, 3, 0, 1, 1)] == list("cdabb")
    with pytest.raises(mw.ExhaustedError, match="has 4 elements; number 4 was requested"):
        numbered[4]


def test_what_was_trained_on_is_skipped():
    def make(context: InputContext):
        return iter("abcd") if context.worker_index == 0 else []

    assert list(DatasetMaker(make, skip=2)()) == ["c", "d"]
    by_number = DatasetMaker(lambda c: "abcd", skip=1)()
    assert (len(by_number), by_number[0]) == (3, "b")


@pytest.mark.parametrize("steps", [None, 5, 0])
@pytest.mark.parametrize("make", [str, iter])
def test_shards_of_validation_share_all_elements(make, steps):
    results = [list(elements_of(make("abcdefgh"), shard, 3, steps)) for shard in range(3)]
    assert sorted("".join(map("".join, results))) == sorted("abcdefgh"[:steps])
    assert num_shards(2, steps) <= 10


class Bound(list):
    """A dataset of this process, as those of TensorFlow are."""

    def __reduce__(self):
        raise TypeError("it holds a tensor.")


def test_data_that_cannot_be_used_is_refused():
    x, y = data()
    with pytest.raises(mw.DataError, match=r"to workers: it holds a tensor\. Pass a function"):
        feed_of(Data(Bound([(x, y)])))
    with pytest.raises(mw.DataError, match="can be read only once"):
        feed_of(Data(batch for batch in [(x, y)]))
    with pytest.raises(mw.DataError, match="returned an empty dataset"):
        feed_of(Data(lambda context: []))
    with pytest.raises(mw.DataError, match=r"iterable of batches.*received int"):
        feed_of(Data(lambda context: 7))
    with pytest.raises(mw.BatchError, match="are for arrays"):
        feed_of(Data(lambda context: [(x, y)], batch_size=3))
    with pytest.raises(mw.BatchError, match=r"a batch has no rows.*\(0, \d+\), \(0,\)"):
        feed_of(Data(lambda context: [(x[:0], y[:0]), (x, y)]))
    assert feed_of(Data([x, x], y, batch_size=3)).examples[0][0][1].shape == (3, *x.shape[1:])


# Callbacks and metrics


class Batchwise(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


def test_callbacks_that_look_at_batches_are_refused_by_name():
    checkpoint = keras.callbacks.ModelCheckpoint("x.keras", save_freq=5)
    with pytest.raises(mw.ModelError, match=r"Batchwise \(on_train_batch_end\); ModelCheckpoint"):
        check_callbacks([Batchwise(), checkpoint, keras.callbacks.EarlyStopping()])
    by_hand = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    with pytest.raises(mw.ModelError, match=r"LambdaCallback \(on_train_batch_end\)"):
        check_callbacks([by_hand])
    epochs = [keras.callbacks.ModelCheckpoint("x.keras"), keras.callbacks.TerminateOnNaN()]
    check_callbacks([*epochs, keras.callbacks.ReduceLROnPlateau()])


class Most(keras.metrics.Metric):
    """Not a sum: the largest value that was seen."""

    def __init__(self):
        super().__init__(name="most")
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self):
        return self.most.value


def test_metrics_must_add_up():
    assert adds_up(keras.metrics.Precision())
    assert not adds_up(Most())
    with pytest.raises(mw.ModelError, match=r"cannot be summed over workers: most"):
        check_metrics([keras.metrics.Mean(), Most()])


# Whole runs


class Changes(keras.callbacks.Callback):
    """Looks at the weights, and changes the learning rate, as schedulers do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(np.array(self.model.get_weights()[0]))
        self.model.optimizer.learning_rate = 0.1 / (epoch + 2)
        if epoch == 1:
            self.model.set_weights([w * 0.5 for w in self.model.get_weights()])


@pytest.mark.full
def test_callbacks_see_and_change_weights_and_learning_rate():
    x, y = data()
    expected, model = (dense(keras.optimizers.SGD(0.1, momentum=0.5)) for _ in range(2))
    theirs, ours = Changes(), Changes()
    expected.fit(x, y, epochs=3, callbacks=[theirs], **HOW)
    with ParameterServer() as strategy:
        history = strategy.fit(model, x, y, epochs=3, callbacks=[ours], **HOW)
    assert apart(expected, model) < 1e-6
    assert len(history.history["loss"]) == 3
    for one, other in zip(theirs.seen, ours.seen, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.full
def test_a_run_goes_on_from_its_checkpoint_and_an_evaluator_follows_it(tmp_path):
    x, y = data()

    def build(optimizer):
        return dense(optimizer, metrics=("accuracy", RowsOfClasses()))

    whole = build(keras.optimizers.Adam(0.01))
    with ParameterServer() as strategy:
        expected = strategy.fit(whole, x, y, epochs=3, **HOW).history
        halves, how = build(keras.optimizers.Adam(0.01)), {"checkpoint": tmp_path, **HOW}
        strategy.fit(halves, x, y, epochs=1, save_every=2, **how)
    again = dense("sgd")
    again.compile(keras.optimizers.Adam(0.01), whole.loss, metrics=["accuracy", RowsOfClasses()])
    with ParameterServer() as strategy:  # another coordinator, which knows nothing
        actual = strategy.fit(again, x, y, epochs=3, **how).history
    assert apart(whole, again) < 1e-6
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert [list(rows) for rows in actual["rows"]] == [list(rows) for rows in expected["rows"]]
    beside = build("sgd")
    (last,) = SidecarEvaluator(beside, (x, y), tmp_path, timeout_s=5).start()
    assert (last.step, last.ended) == (9, True)
    assert apart(whole, beside) < 1e-6
    reference = whole.evaluate(x, y, verbose=0, return_dict=True)
    assert list(last.logs["rows"]) == list(reference.pop("rows")) == list(np.bincount(y))
    assert last.logs | {"rows": 0} == pytest.approx(reference | {"rows": 0}, rel=1e-5)
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    for dataset in (batches, lambda context: iter(batches)):
        (other,) = SidecarEvaluator(beside, dataset, tmp_path, timeout_s=5).start()
        assert other.logs["loss"] == pytest.approx(last.logs["loss"], rel=1e-5)


class Epochs(keras.callbacks.Callback):
    """Counts epochs, as EarlyStopping counts those without progress."""

    def on_train_begin(self, logs=None):
        self.epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


def test_what_callbacks_have_counted_goes_on_and_a_share_of_the_rows_is_held_out(tmp_path):
    x, y = data()
    how = {"validation_split": 1 / 3, "checkpoint": tmp_path, **HOW}
    with ParameterServer() as strategy:
        strategy.fit(dense("sgd"), x, y, epochs=2, callbacks=[Epochs()], **how)
    resumed, counted = dense("sgd"), Epochs()
    with ParameterServer() as strategy:
        actual = strategy.fit(resumed, x, y, epochs=3, callbacks=[counted], **how).history
    assert counted.epochs == 3
    expected = dense("sgd").fit(x, y, epochs=3, validation_split=1 / 3, **HOW).history
    assert actual["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)


@pytest.mark.full
def test_what_servers_have_trained_goes_on_synchronously(tmp_path):
    x, y = data()
    model = dense(keras.optimizers.Adam(0.01))
    with ParameterServer() as strategy:
        strategy.fit(model, x, y, epochs=1, checkpoint=tmp_path, **HOW)
    one = mw.Sharded(mw.create_mesh({"batch": 1}, devices=["cpu:0"]))
    with one.scope():
        other = dense(keras.optimizers.Adam(0.01))
    one.fit(other, x, y, epochs=2, checkpoint=tmp_path / "whole", **HOW)
    beside = SidecarEvaluator(dense("sgd"), (x, y), tmp_path / "whole", timeout_s=5)
    assert [result.ended for result in beside.start()] == [True]
    expected = dense(keras.optimizers.Adam(0.01))
    expected.fit(x, y, epochs=2, **HOW)
    with one.scope():
        restored = dense(keras.optimizers.Adam(0.01))
    one.restore(restored, tmp_path)
    assert apart(model, restored) == 0
    one.fit(restored, x, y, epochs=1, **HOW)
    assert apart(expected, restored) < 1e-5


@pytest.mark.full
def test_a_dataset_function_is_told_its_worker_and_must_last():
    x, y = data()
    events = []

    def dataset(context: InputContext):
        events.append((context.worker_index, context.num_workers))
        return [(x[:8], y[:8]), (x[8:16], y[8:16])]

    with ParameterServer() as strategy:
        history = strategy.fit(dense("sgd"), dataset, epochs=2, verbose=0)
        assert len(history.history["loss"]) == 2
        with pytest.raises(mw.ExhaustedError, match="ended in epoch 1, before its 3 batches"):
            strategy.fit(dense("sgd"), dataset, steps_per_epoch=3, verbose=0)
        with pytest.raises(mw.DataError, match="give steps_per_epoch="):
            strategy.fit(dense("sgd"), lambda context: iter([(x, y)]), verbose=0)
    assert set(events) == {(0, 1)}


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["static", "copy"])
def test_workers_may_have_shares_of_their_own(sharding):
    x, y = data()
    model = dense("sgd")
    with ParameterServer() as strategy:
        strategy.fit(model, x, y, epochs=2, input_options=InputOptions(sharding), **HOW)
        with pytest.raises(mw.ClusterError, match="sharding must be 'dynamic'"):
            strategy.fit(model, x, y, input_options=InputOptions("hashed"), **HOW)
    assert int(model.optimizer.iterations) == 6


def test_a_table_that_is_only_on_the_servers_grows_by_use():
    model = keras.Sequential(
        [
            keras.Input([], dtype="int32"),
            Embedding("users", 4, "hash", seed=1),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse")
    ids = np.tile(np.array([3, 10**9, 77], "int32"), 16)
    y = (ids == 77).astype("float32")[:, None]
    with ParameterServer() as strategy:
        losses = strategy.fit(model, ids, y, batch_size=12, epochs=30, verbose=0).history["loss"]
    assert losses[-1] < 0.05 * losses[0]
    assert [w.shape for w in model.get_weights()] == [(4, 1), (1,)]
    with pytest.raises(mw.ModelError, match="rows of table 'users' are on parameter servers"):
        model.predict(ids[:3], verbose=0)


def test_frames_and_series_of_pandas_are_taken_as_keras_takes_them():
    pandas = pytest.importorskip("pandas")
    x, y = data(32)
    frame, labels = pandas.DataFrame(x), pandas.Series(y, index=range(32, 0, -1))
    how = {"batch_size": 8, "shuffle": False, "verbose": 0, "validation_split": 0.25}
    weights = pandas.Series(np.linspace(0, 1, 32))
    plain, trained = dense("sgd"), dense("sgd")
    expected = plain.fit(frame, labels, sample_weight=weights, **how).history
    with ParameterServer() as strategy:
        history = strategy.fit(trained, frame, labels, sample_weight=weights, **how).history
        scores = strategy.predict(trained, frame, verbose=0)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    np.testing.assert_allclose(scores, plain.predict(frame, verbose=0), atol=1e-6)


def test_an_epoch_in_which_a_server_goes_back_counts_none_of_the_one_before(tmp_path):
    """The targets are the number of their epoch, and a metric is the mean of the targets."""
    strategy = ParameterServer()
    strategy._cores[0]._snapshot_dir = tmp_path

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 8

        def __getitem__(self, number):
            kind = {3: "snapshot", 5: "restore"}.get(number)  # in the first and the second epoch
            if kind is not None:
                current().servers.ask(0, Message(kind, {"path": "state"}))
            return np.ones((2, 1), "float32"), np.full((2, 1), number // 4, "float32")

    def mean(y, outputs):
        return keras.ops.mean(y, axis=-1)

    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[mean])
    with strategy:
        fit = strategy.fit(model, Data(), epochs=2, steps_per_epoch=4, verbose=0)
    assert fit.history["mean"] == [0.0, 1.0]


# The line


def test_the_line_shows_rates_with_units_staleness_and_stragglers(monkeypatch, capsys):
    first = Look(0.0, 100, {"worker:0": (50, 0.1), "worker:1": (50, 0.1)}, 10, 100)
    workers = {"worker:0": (130, 0.1), "worker:1": (70, 0.4)}
    last = Look(10.0, 200, workers, 60, 200, queued=7, retried=2)

    def visible(columns, *args, logs=None):
        """The line in the midst of an epoch, and at its end where there are logs."""
        looks, times = iter((first, last, last)), iter((0.0, 10.0, 10.0))
        rates = WorkerRates(looks.__next__, *args)
        progress = Progress(3, 200, rates, times.__next__, live=True)
        monkeypatch.setenv("COLUMNS", str(columns))
        progress.begin_epoch(1)
        progress.after(100, {})
        if logs is not None:
            progress.trained()
            progress.end_epoch(logs)
        return capsys.readouterr().out

    midst = visible(200, 1, 64)
    assert "epoch 2/3" in midst
    assert "100/200  640 samples/s  10 steps/s (8 + 2 by worker)" in midst
    assert "staleness 0.5 updates  slow: worker:1  2 steps repeated  7 steps queued" in midst
    ended = visible(200, logs={"loss": 0.25, "f1": np.array([0.5, 0.1])})
    assert "100/100  10s  loss 0.25  f1 0.3 (mean of 2)  10 steps/s" in ended
    assert "5,120 samples/s  80 steps/s (64 + 16 by worker)" in visible(200, 8, 64)
    assert "100/200  slow: worker:1\x1b" in visible(60)
    assert stragglers({"worker:0": (1, None), "worker:1": (5, 0.1)}) == []


def test_the_rate_of_a_worker_that_began_anew_counts_from_there():
    def look(at_s, done, incarnation):
        workers = {"worker:0": {"done": done}, "worker:1": {"done": 10 * at_s}}
        for own in workers.values():
            own.update(incarnation=incarnation if own["done"] == done else "b", step_s=0.1)
        stats = {"done": 12 * at_s, "staleness": {}, "queued": 0, "retried": 0}
        return Look.of({**stats, "workers": workers}, at_s)

    looks = iter((look(0, 50, "a"), look(10, 20, "c")))
    rates = WorkerRates(looks.__next__)
    rates.begin()
    rates.look()
    assert rates.parts(None, ended=True)[0].text == "12 steps/s (2 + 10 by worker)"


@pytest.mark.full
def test_metrics_with_several_values_are_logged_as_keras_logs_them(tmp_path):
    x, y = data()
    y = keras.utils.to_categorical(y, 3).astype("float32")
    how = {"batch_size": 16, "shuffle": False, "validation_data": (x, y)}

    def model():
        keras.utils.set_random_seed(0)
        net = keras.Sequential([keras.Input([6]), keras.layers.Dense(3, activation="softmax")])
        net.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
        return net

    expected = model().fit(x, y, verbose=0, epochs=3, **how).history
    trained, rest = model(), model()
    with ParameterServer() as strategy:
        strategy.fit(trained, x, y, epochs=2, checkpoint=tmp_path, verbose=1, **how)
    with ParameterServer() as strategy:
        actual = strategy.fit(rest, x, y, epochs=3, checkpoint=tmp_path, verbose=0, **how).history
    for name in ("f1_score", "val_f1_score", "loss"):
        assert type(actual[name][0]) is type(expected[name][0])
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5)
