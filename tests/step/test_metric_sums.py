"""Metrics of several batches at once: the same numbers as in turn, whatever the metric does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from meshwright._compat import raw_value
from meshwright.step.metric_sums import counted

METRICS: dict[str, Callable[[], keras.Metric]] = {
    "accuracy": keras.metrics.SparseCategoricalAccuracy,
    "top k": lambda: keras.metrics.SparseTopKCategoricalAccuracy(2),
    "crossentropy": keras.metrics.SparseCategoricalCrossentropy,
}


def in_turn(count: Any, counts: Any, batches: Any) -> Any:
    others = None
    for batch in zip(*batches, strict=True):
        counts, others = count(counts, batch)
    return counts, others


@pytest.mark.full_for("accuracy", "crossentropy")
@pytest.mark.parametrize("name", METRICS)
def test_keras_metrics_count_the_same(name: str) -> None:
    metric = METRICS[name]()
    draw = np.random.default_rng(0)
    y = jnp.asarray(draw.integers(0, 4, [5, 8]))
    outputs = jax.nn.softmax(jnp.asarray(draw.normal(size=[5, 8, 4]), "float32"))
    metric(y[0], outputs[0])
    metric.reset_state()
    counts = {str(i): raw_value(v) for i, v in enumerate(metric.variables)}

    def count(counts: Any, batch: Any) -> Any:
        new = metric.stateless_update_state(list(counts.values()), *batch)
        return dict(zip(counts, new, strict=True)), {"result": metric.stateless_result(new)}

    actual, expected = (f(counts, (y, outputs)) for f in (counted(count), _turns(count)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, expected)


def _turns(count: Any) -> Any:
    return lambda counts, batches: in_turn(count, counts, batches)


def rows(counts: Any, batch: Any) -> Any:
    return {"n": counts["n"] + jnp.sum(batch[0])}, counts["n"] * 0 + jnp.max(batch[0])


def largest(counts: Any, batch: Any) -> Any:
    return {"n": jnp.maximum(counts["n"], jnp.max(batch[0]))}, ()


def decayed(counts: Any, batch: Any) -> Any:
    return {"n": 0.5 * counts["n"] + jnp.sum(batch[0])}, ()


def of_what_was_counted(counts: Any, batch: Any) -> Any:
    return {"n": counts["n"] + counts["n"] * jnp.sum(batch[0])}, ()


def unchanged(counts: Any, batch: Any) -> Any:
    return counts, counts["n"] + batch[0]


def a_constant(counts: Any, batch: Any) -> Any:
    return {"n": counts["n"] + 2.0}, jnp.sum(batch[0])


@pytest.mark.parametrize(
    "count", [rows, largest, decayed, of_what_was_counted, unchanged, a_constant]
)
def test_other_ways_to_count_are_taken_in_turn_or_right_at_once(count: Any) -> None:
    batches = (jnp.asarray(np.random.default_rng(1).normal(size=[4, 3]), "float32"),)
    counts = {"n": jnp.ones([])}
    actual, expected = counted(count)(counts, batches), in_turn(count, counts, batches)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, expected)


def test_the_operations_come_once_for_all_batches() -> None:
    def count(counts: Any, batch: Any) -> Any:
        return {"n": counts["n"] + jnp.sum(jnp.tanh(batch[0]))}, ()

    text = str(jax.make_jaxpr(counted(count))({"n": jnp.ones([])}, (jnp.ones([4, 3]),)))
    assert text.count("tanh") == 2  # of all together, and of the last, which nothing reads
