"""Metrics of steps that ran elsewhere: counts that are added up, and read at the end of an epoch.

Every worker counts its batches from 0, and what it counted is added on the servers in the push of
that step. So nothing is counted twice or lost, whatever happens to a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from ...errors import ModelError
from ...frontends.keras.program import KerasVariables
from ...program import Logs
from ...run.logs import on_host
from .gradients import Parts


def check_metrics(metrics: Sequence[Any]) -> None:
    """Raise :class:`~meshwright.ModelError` for metrics whose counts cannot be added up.

    Keras' own can be; others are asked to: two updates one after the other must count what they
    count alone, together.
    """
    refused = [metric.name for metric in metrics if not _is_kerass(metric) and not adds_up(metric)]
    if refused:
        raise ModelError(
            f"these metrics cannot be summed over workers: {', '.join(refused)}. Each batch must "
            "only add to a metric's variables, as in keras.metrics.Mean. Leave the others out of "
            "compile, and compute them from strategy.predict."
        )


def _is_kerass(metric: Any) -> bool:
    return type(metric).__module__.startswith("keras.")


def adds_up(metric: Any) -> bool:
    """Whether a metric's variables only ever grow by what a batch adds, seen on numbers.

    >>> adds_up(keras.metrics.MeanSquaredError())
    True
    """
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 2, [8, 1]).astype("float32"), rng.random([8, 1], "float32"))
        for _ in range(2)
    ]
    before = [np.array(v.value) for v in metric.variables]
    try:
        alone = [_counted(metric, before, [pair]) for pair in pairs]
        together = _counted(metric, before, pairs)
    except Exception:
        return True  # it wants other shapes than these; what is not known is not refused
    finally:
        _assign(metric, before)
    sums = [a + b - start for a, b, start in zip(*alone, before, strict=True)]
    return all(np.allclose(a, b, rtol=1e-4) for a, b in zip(sums, together, strict=True))


def _counted(metric: Any, before: list[Any], pairs: list[Any]) -> list[Any]:
    _assign(metric, before)
    for y_true, y_pred in pairs:
        metric.update_state(y_true, y_pred)
    return [np.array(v.value, np.float64) for v in metric.variables]


def _assign(metric: Any, values: list[Any]) -> None:
    for variable, value in zip(metric.variables, values, strict=True):
        variable.assign(value)


def base_of(model: keras.Model, variables: KerasVariables) -> dict[str, Any]:
    """What the metrics' variables begin an epoch with, by path."""
    model.reset_metrics()
    return {path: jnp.asarray(v.value) for path, v in variables.metrics.items()}


def logs_of(
    model: keras.Model, variables: KerasVariables, parts: Parts, counts: np.ndarray
) -> Logs:
    """The metrics as Keras shows them, from what all batches together counted."""
    model.reset_metrics()
    at = 0
    for path, dims in parts.metrics:
        size = int(np.prod(dims, dtype=int))
        variable = variables.metrics[path]
        counted = counts[at : at + size].reshape(dims)
        variable.assign(np.asarray(variable.value) + counted)
        at += size
    results: Any = model.get_metrics_result()
    return on_host(results)
