"""Loss and metrics on the host: floats, and arrays of the metrics that have a value per class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..program import Logs


def on_host(logs: Mapping[str, Any]) -> Logs:
    """Logs as Keras' own loops give them: floats, arrays for non-scalar metrics, no nesting.

    Waits for the devices.

    >>> on_host({"loss": np.float32(0.5), "f1": np.ones(2), "more": {"recall": np.array([0.25])}})
    {'loss': 0.5, 'f1': array([1., 1.]), 'recall': array([0.25])}
    """
    ready = jax.block_until_ready(flat(logs))  # which a signal can interrupt; reading cannot be
    return {name: _number(value) for name, value in ready.items()}


def flat(logs: Mapping[str, Any]) -> Logs:
    """Logs whose nested mappings, from a ``train_step`` of the model's own, are laid open.

    >>> flat({"loss": 1.0, "metrics": {"recall": 0.5}})
    {'loss': 1.0, 'recall': 0.5}
    """
    merged: Logs = {}
    for name, value in logs.items():
        merged |= flat(value) if isinstance(value, Mapping) else {name: value}
    return merged


def as_json(logs: Mapping[str, Any]) -> Any:
    """Logs, or a history of them, as JSON values; waits for the devices."""
    return {name: _plain(value) for name, value in logs.items()}


def history_from_json(logs: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The history that :func:`as_json` wrote, with arrays where it held arrays."""
    return {
        name: [_array(value) if isinstance(value, list) else value for value in values]
        for name, values in logs.items()
    }


def texts(logs: Mapping[str, Any]) -> list[str]:
    """Logs on the host for a line of progress; of an array its mean, which says so.

    >>> texts({"loss": 0.51234, "f1": np.array([0.25, 0.75])})
    ['loss 0.5123', 'f1 0.5 (mean of 2)']
    """
    return [
        f"{name} {np.mean(value):.4g}" + (f" (mean of {np.size(value)})" * (np.ndim(value) > 0))
        for name, value in logs.items()
        if np.size(value) and np.asarray(value).dtype.kind in "biuf"
    ]


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 and array.dtype.kind in "biuf" else array


def _array(value: list[Any]) -> Any:
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return as_json(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return np.asarray(value).tolist()
