"""Every kind of data, and every callback that looks at the model or steers it: Keras' behaviour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import callbacks, layers
from models import Batches
from oracle import OneDevice, classifier, largest_gap, made, sharded, train, weights
from scipy import sparse

import meshwright as mw

draw = np.random.default_rng(9)
X = draw.normal(size=[44, 12]).astype("float32")
Y = draw.integers(0, 4, 44)


def build() -> keras.Model:
    return classifier(metrics=["accuracy"])


def generator() -> Iterator[Any]:
    for _ in range(2):  # two epochs, and nothing left over
        yield from (Batches(X, Y)[index] for index in range(3))


def tensorflow_dataset() -> Any:
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "NumPy": lambda: {"x": X, "y": Y, "batch_size": 16},
    "PyDataset": lambda: {"x": Batches(X, Y)},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 3},
    "tf.data": lambda: {"x": tensorflow_dataset()},
    "steps_per_epoch": lambda: {"x": X, "y": Y, "batch_size": 16, "steps_per_epoch": 2},
    "validation_split": lambda: {"x": X, "y": Y, "batch_size": 16, "validation_split": 0.3},
    "validation_data": lambda: {
        "x": X, "y": Y, "batch_size": 16, "validation_data": (X[:21], Y[:21]),
        "validation_freq": 2,
    },
    "validation from a PyDataset": lambda: {
        "x": X, "y": Y, "batch_size": 16, "validation_data": Batches(X, Y), "validation_steps": 2,
    },
    "validation from a generator": lambda: {  # the second one has the first batches again
        "x": X, "y": Y, "batch_size": 16, "validation_data": generator(), "validation_steps": 2,
    },
}  # fmt: skip


@pytest.mark.full_for(
    "NumPy",
    "PyDataset",
    "generator",
    "steps_per_epoch",
    "validation from a PyDataset",
    "validation_data",
    "validation_split",
)
@pytest.mark.filterwarnings("ignore:Your `PyDataset` class should call")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # steps_per_epoch, as in Keras
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_fit_reads_it_as_keras_does(data: Callable[[], dict[str, Any]]) -> None:
    """No row is lost or doubled: history and weights of two epochs are plain Keras'."""
    actual = train(sharded(), build, epochs=2, shuffle=False, **_only(data()))
    expected = train(OneDevice(), build, epochs=2, shuffle=False, **_only(data()))
    assert actual.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(actual.history[name], values, rtol=1e-6, err_msg=name)
    assert len(actual.curve) == len(expected.curve)
    gap, path = largest_gap(actual.weights, expected.weights)
    assert gap <= 1e-6, path


def test_rows_of_a_sparse_matrix_are_trained_on_together() -> None:
    losses = []
    for strategy in (sharded(), OneDevice()):
        model = made(strategy, build)
        rows = sparse.csr_matrix(X[:40])
        trained = strategy.fit(model, rows, Y[:40], batch_size=8, shuffle=False, verbose=0)
        losses.append(trained.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-6)


def _only(options: dict[str, Any]) -> dict[str, Any]:
    return options if "batch_size" in options else options | {"batch_size": None}


class ReadWeights(callbacks.Callback):
    """Reads the model at the end of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[np.ndarray] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(np.asarray(self.model.layers[0].kernel))


class HalveWeights(callbacks.Callback):
    """Changes the model in the middle of training."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            kernel = self.model.layers[0].kernel
            kernel.assign(kernel * 0.5)


class StopAt(callbacks.Callback):
    """Stops training after the second batch of the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        self.model.stop_training = self._batches == 5


CALLBACKS: dict[str, Callable[[Path], callbacks.Callback]] = {
    "EarlyStopping": lambda at: callbacks.EarlyStopping(
        "loss", mode="max", patience=1, restore_best_weights=True
    ),
    "ReduceLROnPlateau": lambda at: callbacks.ReduceLROnPlateau(
        "loss", mode="max", patience=1, factor=0.5
    ),
    "LearningRateScheduler": lambda at: callbacks.LearningRateScheduler(lambda e: 0.1 / (e + 1)),
    "ModelCheckpoint": lambda at: callbacks.ModelCheckpoint(at / "best.keras"),
    "CSVLogger": lambda at: callbacks.CSVLogger(at / "log.csv"),
    "TerminateOnNaN": lambda at: callbacks.TerminateOnNaN(),
    "BackupAndRestore": lambda at: callbacks.BackupAndRestore(at / "backup"),
    "reads weights": lambda at: ReadWeights(),
    "changes weights": lambda at: HalveWeights(),
    "stops training": lambda at: StopAt(),
}


QUICK = ("ModelCheckpoint", "BackupAndRestore", "changes weights")


@pytest.mark.full_for("BackupAndRestore", "ModelCheckpoint", "changes weights")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name in QUICK else pytest.mark.full)
        for name, make in CALLBACKS.items()
    ],
)
def test_a_callback_does_what_it_does_in_keras(
    make: Callable[[Path], callbacks.Callback], tmp_path: Path
) -> None:
    results = []
    for name, strategy in (("ours", sharded()), ("one", OneDevice())):
        at = tmp_path / name
        at.mkdir()
        callback = make(at)
        trained = train(strategy, build, X, Y, epochs=4, shuffle=False, callbacks=[callback])
        files = {path.name: path.read_text() for path in at.glob("*.csv")}
        results.append(
            (trained, getattr(callback, "found", []), files, sorted(at.rglob("*.keras")))
        )
    (actual, read, files, saved), (expected, read_there, files_there, saved_there) = results
    assert actual.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(actual.history[name], values, rtol=2e-6, err_msg=name)
    gap, path = largest_gap(actual.weights, expected.weights)
    assert gap <= 1e-6, path
    assert len(read) == len(read_there)
    for ours, theirs in zip(read, read_there, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert [text.count("\n") for text in files.values()] == [
        text.count("\n") for text in files_there.values()
    ]
    for ours, theirs in zip(saved, saved_there, strict=True):
        both = [keras.models.load_model(path).get_weights() for path in (ours, theirs)]
        for a, b in zip(*both, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def _gives_another_optimizer(model: keras.Model) -> None:
    other = keras.optimizers.SGD(0.0)
    other.build(model.trainable_variables)  # as Keras itself needs
    model.optimizer = other


def _freezes_a_layer(model: keras.Model) -> None:
    model.layers[0].trainable = False


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_batch_end"])
@pytest.mark.parametrize(
    ("change", "says"),
    [(_gives_another_optimizer, "optimizer"), (_freezes_a_layer, "list of trainable variables")],
)
def test_a_callback_cannot_change_what_fit_trains_by(
    change: Callable[[keras.Model], None], says: str, hook: str
) -> None:
    strategy = sharded()
    model = made(strategy, build)
    callback = callbacks.Callback()
    setattr(callback, hook, lambda at, logs=None: change(model))
    with pytest.raises(mw.ModelError, match=f"another {says} while fit trained it"):
        strategy.fit(
            model, X, Y, batch_size=16, epochs=2, verbose=0, nan_guard="off", callbacks=[callback]
        )
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@pytest.mark.full
def test_history_belongs_to_the_model() -> None:
    strategy = sharded()
    model = made(strategy, build)
    history = strategy.fit(model, X, Y, batch_size=16, epochs=2, verbose=0)
    assert history is model.history
    assert history.epoch == [0, 1]
    assert set(history.history) == {"accuracy", "loss"}


def test_a_generator_is_read_exactly_as_far_as_needed() -> None:
    """A model that is not built yet looks at one batch, and trains on it all the same."""
    observations: list[int] = []

    def batches() -> Iterator[Any]:
        for number in range(100):
            observations.append(number)
            yield X[:16], Y[:16]

    strategy = sharded()

    def unbuilt() -> keras.Model:
        model = keras.Sequential([layers.Dense(16, name="hidden"), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        return model

    model = made(strategy, unbuilt)
    strategy.fit(model, batches(), steps_per_epoch=3, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 6
    assert len(observations) <= 8  # Keras itself reads ahead


@pytest.mark.full
def test_verbose_training_prints_keras_own_bar(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = sharded()
    model = made(strategy, build)
    strategy.fit(model, X, Y, batch_size=16, epochs=1, verbose=2)
    assert "3/3 - " in capsys.readouterr().out


@pytest.mark.full
def test_weights_survive_a_stopped_training() -> None:
    strategy = sharded()
    model = made(strategy, build)
    strategy.fit(model, X, Y, batch_size=16, epochs=9, verbose=0, callbacks=[StopAt()])
    assert int(model.optimizer.iterations) == 5
    assert all(np.isfinite(value).all() for value in weights(model).values())


class Reordered(Batches):
    """Another order of its batches after each epoch."""

    log: list[str]

    def on_epoch_begin(self) -> None:
        self.log = [*getattr(self, "log", []), "begin"]

    def on_epoch_end(self) -> None:
        self.log.append("end")
        self.x, self.y = (np.roll(array, 5, axis=0) for array in (self.x, self.y))


def test_the_hooks_of_a_dataset_are_called_as_often_as_in_keras() -> None:
    """Before the first pass too, whether or not the model had to be built."""
    logs = []
    for strategy in (sharded(), OneDevice()):
        model = made(strategy, build)
        data = [Reordered(X, Y) for _ in range(3)]
        for reader in data:
            reader.log = []
        strategy.fit(model, data[0], validation_data=data[1], shuffle=False, epochs=2, verbose=0)
        strategy.fit(model, data[0], shuffle=False, verbose=0)
        numbers = strategy.evaluate(model, data[2], verbose=0)
        logs.append(([reader.log for reader in data], numbers, weights(model)))
    (actual, measured, trained), (expected, right, oracle) = logs
    assert actual == expected
    np.testing.assert_allclose(measured, right, rtol=1e-6)
    gap, path = largest_gap(trained, oracle)
    assert gap <= 1e-6, path


class TwiceListed(keras.Model):
    """Adds to Keras' metrics one that Keras has found itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(4)
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, x: Any) -> Any:
        return self.head(x)

    @property
    def metrics(self) -> list[Any]:
        return [self.largest, *super().metrics]

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *rest: Any) -> Any:
        self.largest.update_state(keras.ops.max(y_pred))
        return super().compute_loss(x, y, y_pred, *rest)


class TwiceListedStep(TwiceListed):
    def train_step(self, state: Any, data: Any) -> Any:
        return super().train_step(state, data)


@pytest.mark.parametrize("kind", [TwiceListed, TwiceListedStep])
def test_a_model_may_list_a_metric_twice(kind: type[keras.Model]) -> None:
    def twice() -> keras.Model:
        model = kind()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"])
        return model

    options: Any = {"x": X[:32], "y": Y[:32], "batch_size": 16, "shuffle": False}
    callback = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    options |= {"validation_data": (X, Y), "callbacks": [callback]}
    actual = train(mw.DataParallel(mw.create_mesh({"batch": 8})), twice, **options)
    expected = train(OneDevice(), twice, **options)
    for name, values in expected.history.items():
        np.testing.assert_allclose(actual.history[name], values, rtol=1e-5, err_msg=name)
    gap, path = largest_gap(actual.weights, expected.weights)
    assert gap <= 1e-6, path
