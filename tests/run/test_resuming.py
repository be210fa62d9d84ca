"""``Trainer.train(checkpoints=...)``: a loop over a plain JAX program that stops and goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw

BATCHES = 20


def trainer(**axes: int) -> mw.Trainer:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)

    first = np.random.default_rng(0).standard_normal([4, 2]).astype("float32")
    program = mw.jax_program(loss, {"w": first}, optax.adam(0.1))
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    rules = {"w": [None, "model"]} if "model" in axes else {}
    return mw.Trainer(program, mw.Placement.of(mw.create_mesh(axes, devices=devices), rules))


def drawn(stop: int = -1, number: int = signal.SIGTERM) -> Iterator[Any]:
    """Random batches; a signal comes while one of them is read."""
    for index in range(BATCHES):
        if index == stop:
            os.kill(os.getpid(), number)
        yield {"x": np.random.standard_normal([8, 4]), "y": np.random.standard_normal([8, 2])}


def run(to: mw.Trainer, batches: Any, directory: Path, every: int | None = 4) -> Any:
    np.random.seed(3)
    with mw.Checkpoints(directory) as checkpoints:
        return to.train(to.init(), batches, checkpoints=checkpoints, save_every=every)


def test_a_run_that_was_preempted_goes_on_bit_for_bit(tmp_path: Path) -> None:
    to = trainer(batch=8)
    state, logs = run(to, drawn(), tmp_path / "whole")
    with pytest.raises(mw.Preempted) as stopped:
        run(to, drawn(11), tmp_path / "run")
    assert stopped.value.code == 75
    assert mw.read_checkpoint(tmp_path / "run").step == 12  # the step with that batch is finished
    with pytest.raises(KeyboardInterrupt):
        run(to, drawn(17, signal.SIGINT), tmp_path / "run")
    resumed, logs_again = run(to, drawn(), tmp_path / "run")
    assert float(logs_again["loss"]) == float(logs["loss"])
    for path, value in state.params.items():
        np.testing.assert_array_equal(value, resumed.params[path])
    assert mw.read_checkpoint(tmp_path / "run").step == BATCHES


def test_it_goes_on_on_another_mesh(tmp_path: Path) -> None:
    state, _ = run(trainer(batch=8), drawn(), tmp_path / "whole")
    with pytest.raises(mw.Preempted):
        run(trainer(batch=8), drawn(9), tmp_path / "run")
    moved, _ = run(trainer(batch=2, model=2), drawn(), tmp_path / "run")
    assert moved.params["w"].sharding.num_devices == 4
    np.testing.assert_allclose(moved.params["w"], state.params["w"], atol=1e-6)


def test_a_finished_run_takes_no_more_steps(tmp_path: Path) -> None:
    to = trainer(batch=8)
    state, logs = run(to, drawn(), tmp_path, every=None)
    assert [info.step for info in mw.Checkpoints(tmp_path).all] == [BATCHES]
    again, logs_again = run(to, drawn(), tmp_path, every=None)
    assert logs_again == {"loss": float(logs["loss"])}
    np.testing.assert_array_equal(again.params["w"], state.params["w"])


class Counting:
    """An iterator that says where it stands, as Grain's do."""

    def __init__(self, of: type = dict, stop: int = -1) -> None:
        self.at, self.read, self._of, self._stop = 0, 0, of, stop

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> Any:
        if self.at == BATCHES:
            raise StopIteration
        if self.at == self._stop:
            os.kill(os.getpid(), signal.SIGTERM)
        draw = np.random.default_rng(self.at)
        self.at, self.read = self.at + 1, self.read + 1
        return {"x": draw.standard_normal([8, 4]), "y": draw.standard_normal([8, 2])}

    def get_state(self) -> Any:
        return str(self.at).encode() if self._of is bytes else {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.at = int(state) if self._of is bytes else state["at"]


@pytest.mark.full_for("dict")
@pytest.mark.parametrize("kind", [dict, bytes])
def test_an_iterator_with_a_state_is_put_where_it_stood(kind: type, tmp_path: Path) -> None:
    to = trainer(batch=8)
    state, _ = run(to, Counting(kind), tmp_path / "whole")
    with pytest.raises(mw.Preempted):
        run(to, Counting(kind, stop=11), tmp_path / "run")
    source = Counting(kind)
    resumed, _ = run(to, source, tmp_path / "run")
    assert source.read == BATCHES - 12
    np.testing.assert_array_equal(resumed.params["w"], state.params["w"])


def test_grain_goes_on_where_it_stood(tmp_path: Path) -> None:
    grain = pytest.importorskip("grain.python")
    draw = np.random.default_rng(0)
    rows = [
        {"x": draw.standard_normal(4), "y": draw.standard_normal(2)} for _ in range(BATCHES * 8)
    ]

    def batches(stop: bool = False) -> Any:
        def one(row: Any) -> Any:
            one.seen += 1
            if stop and one.seen == 70:
                os.kill(os.getpid(), signal.SIGTERM)
            return row

        one.seen = 0
        data = grain.MapDataset.source(rows).seed(1).shuffle().map(one).batch(8)
        return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=0)))

    to = trainer(batch=8)
    state, _ = run(to, batches(), tmp_path / "whole")
    with pytest.raises(mw.Preempted):
        run(to, batches(stop=True), tmp_path / "run")
    assert mw.read_checkpoint(tmp_path / "run").position.data
    resumed, _ = run(to, batches(), tmp_path / "run")
    np.testing.assert_array_equal(resumed.params["w"], state.params["w"])


def test_a_state_that_no_file_can_hold_is_told(tmp_path: Path) -> None:
    class Odd(Counting):
        def get_state(self) -> Any:
            return {"at": object()}

    to = trainer(batch=8)
    with pytest.raises(mw.CheckpointError, match="neither bytes nor made of JSON"):
        run(to, Odd(), tmp_path)


def test_save_every_needs_checkpoints() -> None:
    to = trainer(batch=8)
    with pytest.raises(mw.CheckpointError, match="save_every=2 needs checkpoint="):
        to.train(to.init(), [], save_every=2)


def test_save_every_is_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(mw.CheckpointError, match="save_every must be a whole number"):
        run(trainer(batch=8), drawn(), tmp_path, every=0)
