"""Gradients in scheduled functions, and how far workers may be apart: one process is the oracle."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

from meshwright.errors import ArrayError, ModelError
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.shared.consistency import Async, Stale
from meshwright.ps.shared.partitioners import FixedShardsPartitioner
from meshwright.ps.strategy import ParameterServer

WAIT_S = 20.0
SGD = {"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.9}}


def one_process(gradients: list[np.ndarray]) -> np.ndarray:
    w = np.zeros_like(gradients[0])
    moving = np.zeros_like(w)
    for gradient in gradients:
        moving = 0.9 * moving - 0.1 * gradient
        w = w + moving
    return w


@pytest.mark.parametrize("optimizer", [SGD, keras.optimizers.SGD(0.1, 0.9)], ids=["dict", "keras"])
def test_gradients_go_through_the_servers_optimizer(optimizer):
    lots = np.random.default_rng(0)
    gradients = [lots.normal(size=(5, 2)).astype("float32") for _ in range(4)]
    with ParameterServer(partitioner=FixedShardsPartitioner(2)) as strategy:
        coordinator = ClusterCoordinator(strategy)
        w = strategy.variable(np.zeros((5, 2), "float32"))

        def step(gradient):
            strategy.apply_gradients(optimizer, [(gradient, w)])

        for gradient in gradients:
            coordinator.schedule(step, args=(gradient,))
        coordinator.join(WAIT_S)
        np.testing.assert_allclose(w.read(), one_process(gradients), rtol=1e-6)
        ids = np.array([[3, 0], [1, 3]])
        np.testing.assert_array_equal(w.lookup(ids), w.read()[ids])


def test_a_gradient_by_rows_changes_only_these_rows():
    with ParameterServer() as strategy:
        coordinator = ClusterCoordinator(strategy)
        w = strategy.variable(np.zeros((6, 2), "float32"))
        plain = {"class_name": "SGD", "config": {"learning_rate": 1.0}}

        def step():
            rows = np.array([4, 1, 4])
            strategy.apply_gradients(plain, [((rows, np.ones((3, 2), "float32")), w)])

        coordinator.schedule(step)
        coordinator.join(WAIT_S)
        np.testing.assert_array_equal(w.read()[:, 0], [0, -1, 0, 0, -2, 0])


@pytest.mark.parametrize(("name", "scale"), [("clipnorm", 1 / 5), ("global_clipnorm", 1 / 13)])
def test_clipping_by_norms_sees_whole_gradients(name, scale):
    with ParameterServer(partitioner=FixedShardsPartitioner(2)) as strategy:
        w = strategy.variable(np.zeros(2, "float32"), name="w")
        v = strategy.variable(np.zeros(1, "float32"), name="v")
        config = {"class_name": "SGD", "config": {"learning_rate": 1.0, name: 1.0}}
        strategy.apply_gradients(config, [(np.array([3.0, 4.0]), w), (np.array([12.0]), v)])
        np.testing.assert_allclose(w.read(), [-3 * scale, -4 * scale], rtol=1e-6)


def test_a_function_may_overwrite_the_arrays_that_it_has_given():
    with ParameterServer() as strategy:
        coordinator = ClusterCoordinator(strategy)
        v, w, x, y = (strategy.variable(np.zeros((2, 2), "float32")) for _ in range(4))
        plain = {"class_name": "SGD", "config": {"learning_rate": 1.0}}

        def step():
            buffer, row, rows = np.ones((2, 2), "float32"), np.ones(2, "float32"), np.array([0])
            v.assign_add(buffer)
            w.assign(row)
            x.rows_add(rows, buffer[:1])
            strategy.apply_gradients(plain, [(buffer, y)])
            buffer[:], row[:], rows[:] = 5, 5, 1

        coordinator.schedule(step)
        coordinator.join(WAIT_S)
        for variable, expected in ((v, 1), (w, 1), (x, [[1, 1], [0, 0]]), (y, -1)):
            np.testing.assert_array_equal(variable.read(), np.broadcast_to(expected, (2, 2)))


def test_wrong_gradients_are_named():
    with ParameterServer() as strategy:
        w = strategy.variable(np.zeros(2, "float32"), name="w")
        with pytest.raises(ArrayError, match=r"gradient of 'w' has shape \(3,\)"):
            strategy.apply_gradients(SGD, [(np.zeros(3), w)])
        with pytest.raises(ArrayError, match="by rows"):
            strategy.apply_gradients(SGD, [((np.zeros(3), np.zeros(2)), w)])
        with pytest.raises(ModelError, match="expected a Keras optimizer"):
            strategy.apply_gradients("sgd", [(np.zeros(2), w)])
        with pytest.raises(ModelError, match="Lamb"):
            strategy.apply_gradients({"class_name": "Lamb", "config": {}}, [(np.zeros(2), w)])


@pytest.mark.parametrize(
    "consistency",
    [
        "async",
        "sync",
        Stale(1),
        Async(by_staleness=True),
        Async(compensation=0.1),
        Stale(1, compensation=0.1, adaptive=True),
    ],
)
def test_one_worker_trains_alike_with_any_consistency(consistency):
    with ParameterServer(consistency=consistency) as strategy:
        coordinator = ClusterCoordinator(strategy)
        w = strategy.variable(np.zeros(3, "float32"))

        def step(target):
            strategy.apply_gradients(SGD, [(w.read() - target, w)])

        target = np.array([1.0, 2.0, 3.0], "float32")
        expected = moving = np.zeros(3, "float32")
        for _ in range(6):
            coordinator.schedule(step, args=(target,))
            moving = 0.9 * moving - 0.1 * (expected - target)
            expected = expected + moving
        coordinator.join(WAIT_S)
        np.testing.assert_allclose(w.read(), expected, rtol=1e-5)


def test_an_error_in_a_round_does_not_stop_the_next_rounds():
    with ParameterServer(consistency="sync") as strategy:
        coordinator = ClusterCoordinator(strategy)
        w = strategy.variable(np.zeros((), "float32"))
        plain = {"class_name": "SGD", "config": {"learning_rate": 1.0}}

        def step(fails):
            strategy.apply_gradients(plain, [(np.float32(-1), w)])
            if fails:
                raise ValueError("on purpose")

        for fails in (False, True):
            coordinator.schedule(step, args=(fails,))
        with pytest.raises(ValueError, match="on purpose"):
            coordinator.join(WAIT_S)
        for _ in range(3):
            coordinator.schedule(step, args=(False,))
        coordinator.join(WAIT_S)
        assert w.read() == 4.0


@pytest.mark.parametrize("norm", ["clipnorm", "global_clipnorm"])
def test_a_repeated_row_is_clipped_by_the_norm_of_its_sum(norm):
    clipped = {"class_name": "SGD", "config": {"learning_rate": 1.0, norm: 1.0}}
    with ParameterServer() as strategy:
        w = strategy.variable(np.zeros((4, 1), "float32"))
        strategy.apply_gradients(clipped, [(([3, 3], np.ones((2, 1), "float32")), w)])
        np.testing.assert_allclose(w.read()[:, 0], [0, 0, 0, -1], rtol=1e-6)


def test_gradients_are_of_floats_of_any_size():
    bfloat16 = np.ones((2, 1)).astype("bfloat16")
    plain = {"class_name": "SGD", "config": {"learning_rate": jnp.float32(1.0)}}
    with ParameterServer() as strategy:
        w = strategy.variable(np.zeros((2, 1), "float32"))
        strategy.apply_gradients(plain, [(bfloat16, w)])
        strategy.apply_gradients(plain, [(([1], bfloat16[:1]), w)])
        np.testing.assert_array_equal(w.read(), [[-1], [-2]])
        for gradient, why in (
            (np.ones((2, 1), "int32"), "must be of floats; received int32. Convert it"),
            (([0],), r"is a pair of row numbers and values .* received \(1,\)"),
            ([[1.0], [1.0, 2.0]], "is not an array"),
        ):
            with pytest.raises(ArrayError, match=why):
                strategy.apply_gradients(plain, [(gradient, w)])
        with pytest.raises(ArrayError, match="takes a list of pairs"):
            strategy.apply_gradients(plain, None)
