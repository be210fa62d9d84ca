"""Ctrl-C and SIGTERM while training on servers: what was trained is saved, and gone on from."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
from training_models import apart, data, dense

import meshwright as mw
from meshwright.errors import Preempted
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.strategy import ParameterServer

STEPS, EPOCHS = 10, 2


def test_what_nobody_has_begun_is_dropped():
    with ParameterServer() as strategy:
        coordinator = ClusterCoordinator(strategy)
        total = strategy.variable(0)
        began = time.monotonic()

        def slowly():
            time.sleep(0.05)
            total.assign_add(1)

        for _ in range(200):
            coordinator.schedule(slowly)
        dropped = coordinator.join_unless(lambda: time.monotonic() - began > 0.2)
        assert 150 < dropped < 200
        assert total.read() == 200 - dropped
        assert coordinator.join_unless(lambda: True) == 0
        coordinator.schedule(slowly)
        coordinator.join(10)
        assert total.read() == 201 - dropped


class Interrupting:
    """Batches of arrays, of which one sends this process a signal, once."""

    def __init__(self, number: int, at: int) -> None:
        self.number, self.at = number, at

    def __call__(self, context):
        x, y = data(16 * STEPS)
        while True:
            for begin in range(0, len(x), 16):
                if begin == 16 * self.at:
                    os.kill(os.getpid(), self.number)
                    self.at = -1
                time.sleep(0.01)
                yield x[begin : begin + 16], y[begin : begin + 16]


@pytest.mark.full
@pytest.mark.parametrize("at", [3, STEPS - 1])
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_saves_and_the_next_run_goes_on(tmp_path: Path, number, error, at):
    x, y = data(16 * STEPS)
    how: dict[str, Any] = {"epochs": EPOCHS, "verbose": 0}
    expected = dense(keras.optimizers.Adam(0.01))
    history = expected.fit(x, y, batch_size=16, shuffle=False, **how).history
    steps = {"steps_per_epoch": STEPS, "checkpoint": tmp_path, **how}
    model = dense(keras.optimizers.Adam(0.01))
    with ParameterServer() as strategy, pytest.raises(error) as caught:
        strategy.fit(model, Interrupting(number, at), **steps)
    if error is Preempted:
        assert caught.value.code == 75  # type: ignore[attr-defined]
    done = int(model.optimizer.iterations)
    info = mw.read_checkpoint(tmp_path)
    assert at < done <= STEPS
    assert (info.step, info.position.batches) == (done, done)
    with ParameterServer() as strategy:
        model = dense(keras.optimizers.Adam(0.01))
        result = strategy.fit(model, Interrupting(number, -1), **steps).history
    assert apart(expected, model) < 1e-6
    for name, values in history.items():  # the epoch's metrics are those of all its batches
        assert result[name] == pytest.approx(values, rel=2e-5)


SCRIPT = """
import sys
import keras
import numpy as np
import meshwright as mw

where = sys.argv[1]

def batches(context):
    import pathlib, time
    x = np.ones([16, 6], "float32")
    for number in range(10**9):
        if number == 20:
            pathlib.Path(where + ".going").touch()
        time.sleep(0.02)
        yield x, np.ones([16], "int32")

if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([6]), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with mw.LocalCluster(workers=2, ps=2, env={"JAX_PLATFORMS": "cpu"}) as cluster:
        strategy = mw.ParameterServer(cluster)
        print("pids", *(cluster.pid(task) for task in cluster.tasks), flush=True)
        strategy.fit(model, batches, epochs=1, steps_per_epoch=int(sys.argv[2]), verbose=0,
                     checkpoint=where)
        print("ended", int(model.optimizer.iterations), flush=True)
"""


@pytest.mark.alone
@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, None)])
def test_a_coordinator_that_is_told_to_end_saves_first(tmp_path: Path, number: int, code):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    where = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, str(script), str(where), "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    pids = [int(n) for n in next(one for one in lines if one.startswith("pids")).split()[1:]]
    _wait_until(lambda: Path(f"{where}.going").exists() or process.poll() is not None)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code or (code is None and process.returncode in (1, 130, -2))
    if code:
        assert "Traceback" not in output
    for pid in pids:
        _wait_until(lambda pid=pid: not _is_there(pid))
    info = mw.read_checkpoint(where)
    assert info.step == info.position.batches > 0
    goes_on = [sys.executable, str(script), str(where), str(info.step + 20)]
    again = subprocess.run(goes_on, capture_output=True, text=True, timeout=100, check=True)
    assert re.search(r"ended (\d+)", again.stdout)[1] == str(info.step + 20)  # type: ignore[index]


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
