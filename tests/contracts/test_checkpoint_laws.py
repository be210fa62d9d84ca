"""Runs of ``fit`` that stop and go on: the same curve on the same mesh, and nearly so on others."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import optimizers
from oracle import Curve, OneDevice, compiled, largest_gap, made, weights
from strategies import STRATEGIES, Row

import meshwright as mw

EPOCHS = 3
ROWS = 72  # five batches, of which the last is half a one
STEPS = 5 * EPOCHS
FIT = {"batch_size": 16, "epochs": EPOCHS, "verbose": 0}


class Signal(keras.callbacks.Callback):
    """Sends this process a signal after so many batches."""

    def __init__(self, after: int, number: int = signal.SIGINT) -> None:
        super().__init__()
        self._left, self._number = after, number

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)


def fit(row: Row, strategy: Any, *callbacks: Any, **options: Any) -> tuple[Any, list[Any], Any]:
    """The model, the logs of each batch, and the history."""
    x, y = row.of.data(ROWS)
    model = made(strategy, compiled(row.of.build, lambda: optimizers.Adam(0.01)))
    curve = Curve()
    options = FIT | {"validation_data": (x[:16], y[:16])} | options
    try:
        history = strategy.fit(model, x, y, callbacks=[curve, *callbacks], **options)
    except (KeyboardInterrupt, mw.Preempted) as stopped:
        history = stopped
    return model, curve.logs, history


def row_of(name: str) -> Row:
    return next(row for row in STRATEGIES if row.name == name)


def tiny() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([keras.Input([12]), layers.Dropout(0.2), layers.Dense(4, name="only")])


class Tiny:
    """A row of its own: quick to compile."""

    name = "tiny"
    of = dataclasses.replace(row_of("dp8-dense").of, build=tiny)

    def strategy(self) -> mw.Sharded:
        return mw.DataParallel(mw.create_mesh({"batch": 8}))


DENSE: Any = Tiny()
KINDS = [  # one of each kind of layout, level and subject
    pytest.param(row, marks=[] if row.name == "zero1-wide" else pytest.mark.full, id=row.name)
    for row in STRATEGIES
    if row.core or row.name in ("model-tokens", "data-fsdp-images", "zero3-spatial-images")
]


@pytest.mark.full_for("zero1-wide")
@pytest.mark.parametrize("row", KINDS)
def test_a_run_that_was_interrupted_goes_on_bit_for_bit(row: Row, tmp_path: Path) -> None:
    strategy = row.strategy()
    model, curve, history = fit(row, strategy)
    _, first, stopped = fit(row, strategy, Signal(8), checkpoint=tmp_path)
    assert isinstance(stopped, KeyboardInterrupt)
    info = mw.read_checkpoint(tmp_path)
    assert (info.step, info.position.epoch, info.position.batches) == (8, 1, 3)
    resumed, second, went_on = fit(row, strategy, checkpoint=tmp_path)
    assert first + second == curve
    assert went_on.history == history.history
    assert went_on.epoch == history.epoch
    for path, value in weights(model).items():
        np.testing.assert_array_equal(weights(resumed)[path], value, path)


@pytest.mark.full
def test_short_steps_taken_four_at_once_go_on_bit_for_bit_too(tmp_path: Path) -> None:
    strategy = DENSE.strategy()
    x, y = DENSE.of.data(ROWS)

    def run(epochs: int, **options: Any) -> Any:
        model = made(strategy, compiled(DENSE.of.build, lambda: optimizers.Adam(0.01)))
        options = FIT | options | {"epochs": epochs}
        return model, strategy.fit(model, x, y, **options).history

    model, history = run(EPOCHS)
    run(2, checkpoint=tmp_path, save_every=3)
    assert [info.step for info in mw.Checkpoints(tmp_path).all] == [4, 9, 10]
    for info in mw.Checkpoints(tmp_path).all[1:]:  # go on from the middle of the first epoch
        shutil.rmtree(info.directory)
    resumed, went_on = run(EPOCHS, checkpoint=tmp_path, save_every=3)
    assert went_on == history
    for path, value in weights(model).items():
        np.testing.assert_array_equal(weights(resumed)[path], value, path)


CHAIN = ["dp8-dense", "model-dense", "fsdp-dense"]


@pytest.mark.full
def test_a_run_that_moves_from_mesh_to_mesh_keeps_its_curve(tmp_path: Path) -> None:
    first = row_of(CHAIN[0])
    model, curve, history = fit(first, first.strategy())
    results: list[Any] = []
    for name in CHAIN:
        last = name == CHAIN[-1]
        callbacks = [] if last else [Signal(4)]
        moved, part, went_on = fit(
            first, row_of(name).strategy(), *callbacks, checkpoint=tmp_path, save_every=100
        )
        results += part
    assert len(results) == STEPS
    for ours, theirs in zip(results, curve, strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=2e-6)
    np.testing.assert_allclose(went_on.history["loss"], history.history["loss"], rtol=2e-6)
    gap, path = largest_gap(weights(moved), weights(model))
    assert gap < 5e-6, path


@pytest.mark.full
def test_levels_of_zero_write_and_read_the_same_logical_arrays(tmp_path: Path) -> None:
    wide = {level: row_of(f"zero{level}-wide") for level in (1, 2, 3)}
    one = fit(wide[1], mw.DataParallel(mw.create_mesh({"batch": 8})))
    results: list[Any] = []
    for level in (3, 1, 2):
        callbacks = [Signal(6)] if level != 2 else []
        model, part, _ = fit(wide[level], wide[level].strategy(), *callbacks, checkpoint=tmp_path)
        results += part
        arrays = {array.path: array.dims for array in mw.read_checkpoint(tmp_path).arrays}
        assert arrays == {p: v.shape for p, v in all_arrays(model).items()}
    np.testing.assert_allclose([l["loss"] for l in results], [l["loss"] for l in one[1]], rtol=1e-5)  # noqa: E741


def all_arrays(model: keras.Model) -> dict[str, Any]:
    from meshwright.frontends.keras.program import KerasVariables, read_state

    parts = read_state(KerasVariables.of(model))
    return {path: value for part in parts for path, value in part.items()}


@pytest.mark.full
def test_sigterm_saves_and_leaves_with_code_75(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    *_, stopped = fit(DENSE, DENSE.strategy(), Signal(7, signal.SIGTERM), checkpoint=tmp_path)
    assert isinstance(stopped, mw.Preempted)
    assert isinstance(stopped, SystemExit)
    assert stopped.code == 75
    assert mw.read_checkpoint(tmp_path).step == 7
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_ctrl_c_without_checkpoints_loses_no_weight() -> None:
    model, curve, stopped = fit(DENSE, DENSE.strategy(), Signal(7))
    assert isinstance(stopped, KeyboardInterrupt)
    assert len(curve) == 7
    assert int(model.optimizer.iterations.numpy()) == 7


class InterruptValidation(keras.callbacks.Callback):
    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations.numpy()) >= 10:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.full
def test_ctrl_c_in_a_validation_stops_there_and_goes_on_with_it(tmp_path: Path) -> None:
    _, _, history = fit(DENSE, DENSE.strategy())
    *_, stopped = fit(DENSE, DENSE.strategy(), InterruptValidation(), checkpoint=tmp_path)
    assert isinstance(stopped, KeyboardInterrupt)
    position = mw.read_checkpoint(tmp_path).position
    assert (position.epoch, position.batches) == (1, 5)
    *_, went_on = fit(DENSE, DENSE.strategy(), checkpoint=tmp_path)
    assert went_on.history == history.history


@pytest.mark.full
def test_fit_in_another_thread_saves_and_leaves_signals_alone(tmp_path: Path) -> None:
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(fit(DENSE, DENSE.strategy(), checkpoint=tmp_path))
    )
    thread.start()
    thread.join()
    assert len(results[0][1]) == STEPS
    assert mw.read_checkpoint(tmp_path).step == STEPS


@pytest.mark.full
def test_a_finished_run_is_not_trained_again_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    _, curve, history = fit(DENSE, DENSE.strategy(), epochs=4)
    fit(DENSE, DENSE.strategy(), checkpoint=tmp_path)
    _, again, same = fit(DENSE, DENSE.strategy(), checkpoint=tmp_path)
    assert again == []
    assert same.history == {name: values[:3] for name, values in history.history.items()}
    _, more, longer = fit(DENSE, DENSE.strategy(), checkpoint=tmp_path, epochs=4)
    assert more == curve[STEPS:]
    assert longer.history == history.history


def test_keep_and_save_every_are_what_they_say(tmp_path: Path) -> None:
    fit(DENSE, DENSE.strategy(), checkpoint=tmp_path, save_every=4, keep=2)
    assert [info.step for info in mw.Checkpoints(tmp_path).all] == [12, 15]


@pytest.mark.full_for("options0-resume=False.*holds checkpoints up to step 15")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"resume": False}, "resume=False.*holds checkpoints up to step 15"),
        ({"resume": "never"}, "resume must be 'auto'.*received 'never'"),
        ({"save_every": 0}, "save_every must be"),
        ({"keep": 0}, "keep=0"),
        ({"checkpoint": None, "save_every": 3}, "save_every=3 needs checkpoint="),
        ({"checkpoint": None, "resume": True}, "resume=True needs checkpoint="),
    ],
)
def test_options_that_contradict_the_directory_are_errors(
    options: dict[str, Any], says: str, finished: Path
) -> None:
    before = sorted(finished.rglob("*"))
    with pytest.raises(mw.CheckpointError, match=says):
        fit(DENSE, DENSE.strategy(), **{"checkpoint": finished, **options})
    assert sorted(finished.rglob("*")) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished")
    fit(DENSE, DENSE.strategy(), checkpoint=path)
    return path


def test_resume_true_wants_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(mw.CheckpointError, match=r"resume=True.*no complete checkpoint"):
        fit(DENSE, DENSE.strategy(), checkpoint=tmp_path, resume=True)


def test_another_model_is_refused_and_stays_as_it_is(finished: Path) -> None:
    strategy = DENSE.strategy()
    x, y = DENSE.of.data(ROWS)

    def build() -> keras.Model:
        layers = [keras.layers.Dense(8, name="hiden"), keras.layers.Dense(4, name="output")]
        return keras.Sequential([keras.Input([12]), *layers])

    model = made(strategy, compiled(build, lambda: optimizers.SGD()))
    before = weights(model)
    with pytest.raises(mw.CheckpointError, match=r"hiden/kernel .12, 8. float32 is not .*near"):
        strategy.fit(model, x, y, checkpoint=finished, **FIT)
    for path, value in weights(model).items():
        np.testing.assert_array_equal(before[path], value)


# Callbacks


@pytest.mark.full
def test_what_callbacks_have_counted_goes_on(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [
            keras.callbacks.EarlyStopping("loss", patience=4, min_delta=10.0, start_from_epoch=1),
            keras.callbacks.ReduceLROnPlateau("loss", patience=2, min_delta=10.0),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        ]

    strategy = DENSE.strategy()
    model, curve, history = fit(DENSE, strategy, *callbacks(), epochs=9)
    assert len(history.epoch) < 9
    results: list[Any] = []
    for stop in (7, 9, 6, 0):
        resumed, part, went_on = fit(
            DENSE, strategy, *callbacks(), Signal(stop), epochs=9, checkpoint=tmp_path
        )
        results += part
    assert results == curve
    assert went_on.history == history.history
    assert float(resumed.optimizer.learning_rate.numpy()) == float(
        model.optimizer.learning_rate.numpy()
    )
    _, more, _ = fit(DENSE, strategy, *callbacks(), epochs=9, checkpoint=tmp_path)
    assert more == []  # what EarlyStopping has ended stays ended


# Data


class Shuffled(keras.utils.PyDataset):
    """Eight batches, which Keras shuffles with Python's generator."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        x, y = DENSE.of.data(ROWS * 2)
        return x[index * 16 : index * 16 + 16], y[index * 16 : index * 16 + 16]


def random_batches() -> Iterator[Any]:
    while True:
        rows = np.random.permutation(ROWS)[:16]
        x, y = DENSE.of.data(ROWS)
        yield x[rows], y[rows]


DATA = {
    "a dataset that Keras shuffles": (Shuffled, {"shuffle": True}),
    "a generator that draws rows": (random_batches, {"steps_per_epoch": 5, "shuffle": False}),
    "arrays over which epochs run on": (lambda: DENSE.of.data(96), {"steps_per_epoch": 3}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", DATA)
def test_other_data_go_on_where_they_stood(name: str, tmp_path: Path) -> None:
    make, options = DATA[name]
    strategy = DENSE.strategy()

    def run(stop: int, **more: Any) -> list[Any]:
        model = made(strategy, compiled(DENSE.of.build, lambda: optimizers.Adam(0.01)))
        net, curve = make(), Curve()
        x, y = net if isinstance(net, tuple) else (net, None)
        size = {"batch_size": 16} if y is not None else {}
        try:
            strategy.fit(
                model, x, y, epochs=3, verbose=0, callbacks=[curve, Signal(stop)],
                **size, **options, **more,
            )  # fmt: skip
        except KeyboardInterrupt:
            assert len(curve.logs) == stop
        return curve.logs

    whole = run(0)
    assert run(4, checkpoint=tmp_path) + run(0, checkpoint=tmp_path) == whole


@pytest.mark.full
def test_another_batch_size_in_the_middle_of_an_epoch_is_told(tmp_path: Path) -> None:
    fit(DENSE, DENSE.strategy(), Signal(3), checkpoint=tmp_path)
    with pytest.warns(mw.MeshwrightWarning, match="has 9 batches now and had 5"):
        fit(DENSE, DENSE.strategy(), checkpoint=tmp_path, batch_size=8)


# To and from plain Keras


@pytest.mark.full
def test_a_checkpoint_becomes_a_keras_file_and_a_keras_file_a_checkpoint(tmp_path: Path) -> None:
    row = row_of("model-dense")
    trained, *_ = fit(row, row.strategy(), checkpoint=tmp_path / "run")
    x, _ = row.of.data(16)
    fresh = made(row.strategy(), compiled(row.of.build, lambda: optimizers.Adam(0.01)))
    info = row.strategy().restore(fresh, tmp_path / "run")
    assert info.step == STEPS
    fresh.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        plain.predict(x, verbose=0), trained.predict(x, verbose=0), atol=1e-6
    )
    for ours, theirs in zip(plain.optimizer.variables, trained.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), ours.path)

    other = row_of("fsdp-dense").strategy()
    other.place(plain)
    other.save(plain, tmp_path / "from_keras", step=3)
    again = made(OneDevice(), row.of.build)
    alone = mw.DataParallel(mw.create_mesh({"batch": 8}))
    alone.restore(again, tmp_path / "from_keras", parts=("params", "state"))
    for ours, theirs in zip(again.get_weights(), trained.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(mw.CheckpointError, match=r"'weights'.*: expected a tuple"):
        alone.restore(again, tmp_path / "from_keras", parts=("weights",))
