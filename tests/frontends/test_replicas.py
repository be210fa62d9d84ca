"""TensorFlow's names: ``get_strategy``, ``run``, ``reduce``, ``gather``, datasets by function."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright import ArrayError, BatchError


@pytest.fixture(scope="module")
def strategy() -> mw.Sharded:
    return mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}))


def test_a_replica_is_a_piece_of_the_batch_whatever_other_axes_there_are(strategy):
    assert strategy.num_replicas_in_sync == 4
    rows = strategy.put(np.arange(16.0).reshape(8, 2))
    actual = strategy.run(
        lambda piece, k: {"shape": piece.sum(0) * k}, args=(rows,), kwargs={"k": 2}
    )
    assert actual["shape"].values.shape == (4, 2)
    expected = np.arange(16.0).reshape(4, 2, 2).sum(1) * 2
    np.testing.assert_array_equal(actual["shape"].values, expected)


def test_reduce_and_gather_are_those_of_numpy(strategy):
    values = np.arange(24.0).reshape(8, 3)
    halves = strategy.run(lambda piece: piece / 2, args=(strategy.put(values),))
    np.testing.assert_allclose(strategy.gather(halves, axis=0), values / 2)
    by_column = strategy.gather(halves, axis=1)
    assert by_column.shape == (2, 12)
    np.testing.assert_allclose(by_column[:, 3:6], values[2:4] / 2)
    np.testing.assert_allclose(strategy.reduce("MEAN", halves, axis=0), values.mean(0) / 2)
    np.testing.assert_allclose(strategy.reduce("sum", halves), values.reshape(4, 2, 3).sum(0) / 2)
    assert strategy.reduce("sum", 3.0) == 12.0  # which every replica has
    assert strategy.reduce("mean", 3.0) == 3.0
    with pytest.raises(ArrayError, match="must be 'sum' or 'mean'; received 'max'"):
        strategy.reduce("max", halves)
    with pytest.raises(ArrayError, match="whole already"):
        strategy.gather(np.ones(3), axis=0)


def test_collectives_inside_and_results_of_another_run(strategy):
    rows = strategy.put(np.arange(8.0))
    sums = strategy.run(lambda piece: piece.sum(), args=(rows,))
    shares = strategy.run(lambda own: own / jax.lax.psum(own, "batch"), args=(sums,))
    assert float(strategy.reduce("sum", shares)) == pytest.approx(1.0)


def test_a_function_is_compiled_once(strategy):
    traces = []

    def function(piece):
        traces.append(1)
        return piece * 2

    for number in range(3):
        strategy.run(function, args=(strategy.put(np.full(8, number, "float32")),))
    assert len(traces) == 1


class Once:
    """Batches that can only be iterated, from the start, as those of ``tf.data``."""

    def __init__(self, batches: list) -> None:
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


@pytest.mark.parametrize("kind", [list, Once])
def test_datasets_by_function_train_as_the_whole_data_does(kind):
    import keras

    strategy = mw.DataParallel(mw.create_mesh({"batch": 4}, devices=jax.devices()[:4]))
    x, y = np.arange(16.0)[:, None] / 16, np.arange(16.0)[:, None] / 4

    def dataset_fn(context: mw.InputContext):
        size = context.get_per_replica_batch_size(8)
        assert (context.input_pipeline_id, context.num_input_pipelines, size) == (0, 1, 2)
        return kind([(x[i : i + size], y[i : i + size]) for i in range(0, 16, size)])

    def trained(*data, **more) -> np.ndarray:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        strategy.fit(model, *data, epochs=2, verbose=0, shuffle=False, **more)
        return np.asarray(model.trainable_variables[0].value)

    rows = strategy.distribute_datasets_from_function(dataset_fn)
    np.testing.assert_allclose(trained(rows), trained(x, y, batch_size=8), rtol=1e-6)
    assert [batch[0].shape for batch in rows] == [(8, 1), (8, 1)]


def test_a_batch_that_does_not_divide_over_replicas_says_which_would():
    with pytest.raises(BatchError, match=r"10 rows does not divide over 4 replicas.* 12\."):
        mw.InputContext(0, 1, num_replicas_in_sync=4).get_per_replica_batch_size(10)


def test_get_strategy_is_that_of_the_innermost_scope(strategy):
    assert mw.get_strategy().num_replicas_in_sync == 1
    other = mw.ParameterServer()
    with strategy.scope():
        assert mw.get_strategy() is strategy
        with other.scope():
            assert mw.get_strategy() is other
    other.close()


def test_replicas_run_where_nothing_else_is_compiled():
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), batch="batch")
    rows = strategy.put(np.ones([8, 2], "float32"))
    with jax.disable_jit():
        sums = strategy.run(lambda piece: piece.sum(), args=(rows,))
        assert float(strategy.reduce("sum", sums, axis=None)) == 16.0
