"""Keras' callbacks under a strategy decide what they decide on one device.

The table: callback × strategy. Each row trains the same model by plain Keras; curves, decisions
(learning rates, epochs that ran, files that were written) and weights agree.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import callbacks
from oracle import OneDevice, largest_gap, made, weights

import meshwright as mw

draw = np.random.default_rng(9)
X = draw.normal(size=[96, 12]).astype("float32")
Y = draw.integers(0, 4, 96)
EPOCHS = 6


def build() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input([12]),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.Dense(4, name="output"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


STRATEGIES: dict[str, Callable[[], mw.Sharded]] = {
    "batch=4, model=2": lambda: mw.Sharded(
        mw.create_mesh({"batch": 4, "model": 2}), {"hidden.*kernel": [None, "model"]}
    ),
    "batch=8, zero=3": lambda: mw.DataParallel(mw.create_mesh({"batch": 8}), zero=3),
}


class Rates(callbacks.Callback):
    """Notes the learning rate of every epoch: a decision of others."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found.append(float(self.model.optimizer.learning_rate))


class StopInTheMiddle(callbacks.Callback):
    """Fails in the third epoch, once."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise InterruptedError


CALLBACKS: dict[str, Callable[[Path], Any]] = {
    "EarlyStopping": lambda at: callbacks.EarlyStopping(
        "loss", mode="max", patience=2, restore_best_weights=True
    ),
    "EarlyStopping, start_from_epoch": lambda at: callbacks.EarlyStopping(
        "val_loss", min_delta=10.0, patience=1, start_from_epoch=2
    ),
    "ReduceLROnPlateau": lambda at: callbacks.ReduceLROnPlateau(
        "val_loss", min_delta=0.05, patience=1, factor=0.3, cooldown=1
    ),
    "LearningRateScheduler": lambda at: callbacks.LearningRateScheduler(
        lambda epoch, rate: rate * 0.7 if epoch else rate
    ),
    "ModelCheckpoint, best": lambda at: callbacks.ModelCheckpoint(
        at / "best.keras", "val_loss", save_best_only=True
    ),
    "ModelCheckpoint, weights of every epoch": lambda at: callbacks.ModelCheckpoint(
        at / "{epoch:02d}-{val_loss:.2f}.weights.h5", save_weights_only=True
    ),
    "ModelCheckpoint, every 4 batches": lambda at: callbacks.ModelCheckpoint(
        at / "{epoch:02d}-{batch:02d}.weights.h5", save_weights_only=True, save_freq=4
    ),
    "CSVLogger": lambda at: callbacks.CSVLogger(at / "log.csv"),
    "SwapEMAWeights": lambda at: callbacks.SwapEMAWeights(swap_on_epoch=True),
    "TerminateOnNaN": lambda at: callbacks.TerminateOnNaN(),
}


@dataclass
class Trained:
    """What one training run did and left."""

    model: keras.Model
    history: dict[str, list[float]]
    rates: list[float]
    files: list[Path]


def train(strategy: Any, callback: Any, make: Any = build, **options: Any) -> Trained:
    model, rates = made(strategy, make), Rates()
    options = {
        "batch_size": 16,
        "epochs": EPOCHS,
        "validation_split": 1 / 3,
        "shuffle": False,
        "verbose": 0,
    } | options
    history = strategy.fit(model, X, Y, callbacks=[callback, rates], **options)
    return Trained(model, history.history, rates.found, [])


def agree(ours: Trained, theirs: Trained) -> None:
    assert ours.history.keys() == theirs.history.keys()
    for name, values in theirs.history.items():
        np.testing.assert_allclose(ours.history[name], values, rtol=5e-6, err_msg=name)
    np.testing.assert_allclose(ours.rates, theirs.rates, rtol=1e-6)
    gap, path = largest_gap(weights(ours.model), weights(theirs.model))
    assert gap <= 2e-6, path


def with_average() -> keras.Model:
    model = build()
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


BOTH = [
    pytest.param(make, id=name, marks=pytest.mark.full if "zero" in name else ())
    for name, make in STRATEGIES.items()
]


@pytest.mark.full_for(
    "CSVLogger-batch=4, model=2",
    "EarlyStopping, start_from_epoch-batch=4, model=2",
    "EarlyStopping-batch=4, model=2",
    "LearningRateScheduler-batch=4, model=2",
    "ModelCheckpoint, best-batch=4, model=2",
    "ModelCheckpoint, every 4 batches-batch=4, model=2",
    "ModelCheckpoint, weights of every epoch-batch=4, model=2",
    "ReduceLROnPlateau-batch=4, model=2",
    "SwapEMAWeights-batch=4, model=2",
    "TerminateOnNaN-batch=4, model=2",
)
@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("name", CALLBACKS)
def test_it_decides_what_it_decides_on_one_device(
    name: str, strategy: Callable[[], mw.Sharded], tmp_path: Path
) -> None:
    make, both = with_average if name.startswith("Swap") else build, []
    for side, placement in (("ours", strategy()), ("theirs", OneDevice())):
        at = tmp_path / side
        at.mkdir()
        trained = train(placement, CALLBACKS[name](at), make)
        trained.files = sorted(path for path in at.rglob("*") if path.is_file())
        both.append(trained)
    ours, theirs = both
    agree(ours, theirs)
    assert [path.name for path in ours.files] == [path.name for path in theirs.files]
    for mine, other in zip(ours.files, theirs.files, strict=True):
        _files_agree(mine, other)
    _has_acted(name, theirs)


def _has_acted(name: str, theirs: Trained) -> None:
    """The row is worth something: on one device, too, the callback did something."""
    if name.startswith("EarlyStopping"):
        assert len(theirs.rates) < EPOCHS
    if name in ("ReduceLROnPlateau", "LearningRateScheduler"):
        assert theirs.rates[-1] < theirs.rates[0]
    if name.startswith(("ModelCheckpoint", "CSVLogger")):
        assert theirs.files


def _files_agree(mine: Path, other: Path) -> None:
    if mine.suffix == ".csv":
        tables = [list(csv.DictReader(path.read_text().splitlines())) for path in (mine, other)]
        assert [row.keys() for row in tables[0]] == [row.keys() for row in tables[1]]
        for a, b in zip(*tables, strict=True):
            np.testing.assert_allclose(
                [float(v) for v in a.values()], [float(v) for v in b.values()], rtol=5e-6
            )
        return
    both = []
    for path in (mine, other):
        if path.suffix == ".keras":
            model = keras.models.load_model(path)
        else:
            model = build()
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        both.append([np.asarray(v) for v in (*model.weights, *model.optimizer.variables)])
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.full_for("3-batch=4, model=2", "epoch-batch=4, model=2")
@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_backup_and_restore_goes_on_where_training_was_cut_off(
    strategy: Callable[[], mw.Sharded], save_freq: Any, tmp_path: Path
) -> None:
    """Both sides are cut off in the third epoch and begin again; one device is not cut off."""
    resumed = []
    for side, make in (("ours", strategy), ("theirs", OneDevice)):
        backup = callbacks.BackupAndRestore(tmp_path / side, save_freq=save_freq)
        placement = make()
        model = made(placement, build)
        options = {"batch_size": 16, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
        with pytest.raises(InterruptedError):
            placement.fit(model, X, Y, callbacks=[StopInTheMiddle(), backup], **options)
        again, rates = made(placement, build), Rates()
        backup = callbacks.BackupAndRestore(tmp_path / side, save_freq=save_freq)
        history = placement.fit(again, X, Y, callbacks=[backup, rates], **options)
        resumed.append(Trained(again, history.history, rates.found, []))
        assert history.epoch[0] > 0
    agree(*resumed)


@pytest.mark.full
def test_an_own_callback_stops_in_the_middle_of_an_epoch_as_in_keras() -> None:
    class After(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 2

    both = [train(STRATEGIES["batch=4, model=2"](), After()), train(OneDevice(), After())]
    agree(*both)
    assert [int(side.model.optimizer.iterations) for side in both] == [3, 3]


def test_functions_given_to_a_callback_are_called_for_every_batch() -> None:
    """A ``LambdaCallback`` has its hooks itself, and its class has none."""
    calls: list[list[Any]] = []
    for strategy in (STRATEGIES["batch=4, model=2"](), OneDevice()):
        calls.append([])
        given = callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: calls[-1].append(("begin", batch)),
            on_train_batch_end=lambda batch, logs: calls[-1].append(("end", batch, sorted(logs))),
            on_test_batch_end=lambda batch, logs: calls[-1].append(("test", batch, sorted(logs))),
        )
        train(strategy, given, epochs=2)
    ours, theirs = calls
    assert ours == theirs
    assert len(theirs) == 2 * (4 + 4 + 2)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_tensorboard_writes_the_same_curves(tmp_path: Path) -> None:
    from tensorflow.python.summary.summary_iterator import summary_iterator

    curves = []
    for side, placement in (("ours", STRATEGIES["batch=8, zero=3"]()), ("theirs", OneDevice())):
        train(placement, callbacks.TensorBoard(tmp_path / side))
        results: dict[str, list[Any]] = {}
        for path in sorted((tmp_path / side).rglob("events.*.v2")):
            for event in summary_iterator(str(path)):
                for value in event.summary.value:
                    if value.tag.startswith("epoch"):
                        number = np.frombuffer(value.tensor.tensor_content, "float32")
                        results.setdefault(f"{path.parent.name}/{value.tag}", []).append(number)
        curves.append(results)
    assert curves[0].keys() == curves[1].keys()
    for tag, values in curves[1].items():
        np.testing.assert_allclose(curves[0][tag], values, rtol=5e-6, err_msg=tag)


class PerClass(keras.metrics.Metric):
    """Counts the rows of each class: one number per class, and whole ones."""

    def __init__(self) -> None:
        super().__init__(name="per_class")
        self.rows = self.add_weight(shape=(4,), dtype="int32", initializer="zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(keras.ops.sum(keras.ops.cast(y_true, "int32"), axis=0))

    def result(self) -> Any:
        return keras.ops.cast(self.rows, "int32")


def build_per_class() -> keras.Model:
    model = keras.Sequential([keras.Input([12]), keras.layers.Dense(4, name="hidden")])
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=[keras.metrics.F1Score(), PerClass()])
    return model


def test_metrics_that_are_no_scalars_are_the_arrays_of_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In history, validation, evaluation, CSV files, the line of progress and a resumed run."""
    one_hot = np.eye(4, dtype="float32")[Y]
    alone = build_per_class()
    strategy = STRATEGIES["batch=4, model=2"]()
    with strategy.scope():
        sharded = build_per_class()
    sharded.set_weights(alone.get_weights())
    how: Any = {"batch_size": 16, "shuffle": False, "validation_data": (X[:40], one_hot[:40])}

    def noting(name: str) -> list[Any]:
        stopping = callbacks.EarlyStopping("loss", patience=3)
        return [stopping, callbacks.CSVLogger(tmp_path / name, append=True)]

    plain = alone.fit(X, one_hot, epochs=3, callbacks=noting("plain"), verbose=0, **how)
    saved: Any = {"checkpoint": tmp_path / "saved", **how}
    strategy.fit(sharded, X, one_hot, epochs=1, callbacks=noting("ours"), verbose=0, **saved)
    capsys.readouterr()
    ours = strategy.fit(sharded, X, one_hot, epochs=3, callbacks=noting("ours"), **saved)
    assert "(mean of 4)" in capsys.readouterr().out
    assert set(ours.history) == set(plain.history)
    for name, values in plain.history.items():
        for value, expected in zip(ours.history[name], values, strict=True):
            assert np.asarray(value).dtype == np.asarray(expected).dtype, name
            np.testing.assert_allclose(value, expected, rtol=1e-5)
    files = [(tmp_path / name).read_text().splitlines() for name in ("plain", "ours")]
    rows = [list(csv.reader(lines)) for lines in files]
    assert [len(row) for row in rows[0]] == [len(row) for row in rows[1]]

    for of, on in ((alone.evaluate, ()), (strategy.evaluate, (sharded,))):
        loss, f1, per_class = of(*on, X[:40], one_hot[:40], batch_size=16, verbose=0)
        assert isinstance(loss, float)
        assert f1.shape == per_class.shape == (4,)
        np.testing.assert_array_equal(per_class, one_hot[:40].sum(axis=0))
