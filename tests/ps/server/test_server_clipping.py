"""Clipping in rounds: several servers and workers do what one process does with a big batch."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest

from meshwright.errors import ModelError
from meshwright.ps.server.core import ServerCore
from meshwright.ps.server.snapshot import restore, snapshot_of
from meshwright.ps.shared.client import Servers, connect_here
from meshwright.ps.shared.placing import VariableSpec, placed
from meshwright.ps.shared.pushing import Acknowledged, Stamp
from meshwright.ps.wire.message import Message
from meshwright.ps.worker.gradients import gradient_updates
from meshwright.ps.worker.updates import Update

SHAPES = {"kernel": (6, 3), "bias": (3,), "table": (8, 2)}
STEPS = 3
CLIPPINGS = {
    "global": {"global_clipnorm": 0.5},
    "each": {"clipnorm": 0.3},
    "value": {"clipvalue": 0.1},
}


class Variable:
    def __init__(self, spec: VariableSpec) -> None:
        self.spec = spec


class Training:
    """Some workers' clients of some servers, and the variables of a model."""

    def __init__(self, num_servers: int, num_workers: int, clipping: dict[str, float]) -> None:
        self.cores = [ServerCore(index) for index in range(num_servers)]
        self.clients = [connect_here(self.cores) for _ in range(num_workers)]
        self.config = {
            "class_name": "SGD",
            "config": {"learning_rate": 0.5, **clipping},
        }
        self._numbers = itertools.count()
        self.round = 0
        loads = [0] * num_servers
        self.specs = {
            name: placed(name, shape, "float32", num_shards=shards, loads_bytes=loads)
            for (name, shape), shards in zip(SHAPES.items(), (num_servers, 1, 1), strict=True)
        }
        for name, spec in self.specs.items():
            self.clients[0].create(spec, {"kind": "value"}, first(name))

    def push(self, client: Servers, grads: dict[str, Any], of: int) -> Acknowledged:
        stamp = Stamp(next(self._numbers), round=self.round, of=of)
        return client.push(self.updates(client, grads), stamp, everywhere=True)

    def updates(self, client: Servers, grads: dict[str, Any]) -> list[Update]:
        pairs = [(grads[name], Variable(spec)) for name, spec in self.specs.items()]
        return gradient_updates(client, {}, self.config, pairs, {}, in_round=True)

    def values(self) -> list[np.ndarray]:
        return self.clients[0].read(list(self.specs.values()))


def first(name: str) -> np.ndarray:
    return np.linspace(-1, 1, int(np.prod(SHAPES[name])), dtype="float32").reshape(SHAPES[name])


def gradients(step: int, worker: int) -> dict[str, Any]:
    rng = np.random.default_rng([step, worker])
    grads = {name: rng.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
    rows = np.array([1, 4, 1])  # the table goes by rows
    return {**grads, "table": (rows, rng.normal(size=(3, 2)).astype("float32"))}


def whole(grads: dict[str, Any]) -> list[np.ndarray]:
    rows, values = grads["table"]
    table = np.zeros(SHAPES["table"], "float32")
    np.add.at(table, rows, values)
    return [grads["kernel"], grads["bias"], table]


def one_process(num_workers: int, steps: int, clipping: dict[str, float]) -> list[np.ndarray]:
    """Keras' own optimizer, with the mean gradient of the workers' batches: one big batch."""
    variables = [keras.Variable(first(name), name=name) for name in SHAPES]
    optimizer = keras.optimizers.SGD(0.5, **clipping)  # type: ignore[arg-type]
    for step in range(steps):
        gradients_of_workers = [whole(gradients(step, worker)) for worker in range(num_workers)]
        means = [np.mean(parts, 0) for parts in zip(*gradients_of_workers, strict=True)]
        optimizer.apply(means, variables)
    return [np.asarray(variable.value) for variable in variables]


def apart(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def trained(num_servers: int, num_workers: int, clipping: dict[str, float], spare: int = 0):
    """Rounds of SGD; the ``spare`` workers of each come late."""
    training = Training(num_servers, num_workers + spare, clipping)
    for step in range(STEPS):
        for worker, client in enumerate(training.clients):
            training.push(client, gradients(step, worker), of=num_workers)
        training.round += 1
    return training


@pytest.mark.parametrize("spare", [0, 1], ids=["sync", "backup"])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("clipping", CLIPPINGS.values(), ids=CLIPPINGS)
def test_a_round_is_clipped_as_one_big_batch(clipping, num_servers, num_workers, spare):
    training = trained(num_servers, num_workers, clipping, spare)
    expected = one_process(num_workers, STEPS, clipping)
    assert apart(training.values(), expected) < 1e-6
    assert apart(expected, one_process(num_workers, STEPS, {})) > 0.01  # it does clip


def test_a_loss_scale_is_undone_before_clipping():
    clipping = {"global_clipnorm": 0.5, "loss_scale_factor": 8.0}
    assert apart(trained(2, 2, clipping).values(), one_process(2, STEPS, clipping)) < 1e-6


@pytest.mark.parametrize("killed_after", ["push", "half of the clipping"])
def test_a_worker_killed_between_the_phases_changes_nothing(killed_after):
    clipping = CLIPPINGS["global"]
    training = Training(2, 3, clipping)
    one, killed, other = training.clients
    training.push(one, gradients(0, 0), of=2)
    before = training.values()
    stamp = Stamp(99, round=0, of=2)
    pending = killed.start_push(training.updates(killed, gradients(0, 1)), stamp, everywhere=True)
    killed._wait_all(pending.sent)
    assert apart(training.values(), before) == 0  # complete on both servers, applied on none
    if killed_after != "push":
        states = killed._round_states(killed.ask_all(_message("norms")))
        totals: dict[str, float] = {}
        for state in states:
            totals = {key: totals.get(key, 0.0) + one for key, one in (state.due or {}).items()}
        killed.ask(0, _message("clip", round=0, totals=totals))
    reply = other.push(training.updates(other, gradients(0, 1)), stamp, everywhere=True)
    assert not any(server.applied for server in reply.servers)  # they were there before
    assert apart(training.values(), one_process(2, 1, clipping)) < 1e-6
    again = training.values()
    other.clip_rounds()
    assert apart(training.values(), again) == 0


def test_a_restarted_server_does_not_stop_the_others():
    """It lost a gradient of a round that waits on the other: both go on with what is left."""
    training = Training(2, 2, CLIPPINGS["global"])
    one, two = training.clients
    training.updates(one, gradients(0, 0))  # both servers know the optimizer
    snapshot = snapshot_of(training.cores[1].state, 1).copied()
    training.push(one, gradients(0, 0), of=2)
    training.cores[1].state = restore(snapshot, 1)
    training.push(two, gradients(0, 1), of=2)
    assert [core.state.rounds.applied for core in training.cores] == [0, 0]
    one.ask(1, _message("round", round=0, of=0))  # as the guardian does
    one.clip_rounds()
    assert [core.state.rounds.applied for core in training.cores] == [1, 1]


def test_a_round_that_waits_to_be_clipped_is_in_the_snapshot():
    training = Training(2, 2, CLIPPINGS["each"])
    one, two = training.clients
    training.push(one, gradients(0, 0), of=2)
    pending = two.start_push(
        training.updates(two, gradients(0, 1)), Stamp(99, round=0, of=2), everywhere=True
    )
    two._wait_all(pending.sent)
    for core in training.cores:
        core.state = restore(snapshot_of(core.state, 1).copied(), 1)
    one.clip_rounds()
    assert apart(training.values(), one_process(2, 1, CLIPPINGS["each"])) < 1e-6
    for core in training.cores:
        core.state = restore(snapshot_of(core.state, 2).copied(), 2)
        assert core.state.rounds.last


def test_what_cannot_be_clipped_so_is_refused_by_name():
    training = Training(1, 1, {"clipnorm": 1.0, "gradient_accumulation_steps": 2})
    with pytest.raises(ModelError, match="no server holds all of it"):
        training.updates(training.clients[0], gradients(0, 0))


def _message(kind: str, **head: Any) -> Message:
    return Message(kind, head)
