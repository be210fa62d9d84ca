"""What a variable begins with: a value, or a rule by which each server makes its own rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ArrayError

Initial = tuple[Mapping[str, Any], np.ndarray | None, tuple[int, ...], str]


def initial(value: Any, shape: Sequence[int] | None = None, dtype: Any = None) -> Initial:
    """How servers make it, the value (if it is one), the shape and the dtype's name.

    A Python float is float32, an int int32, as in TensorFlow. Raises
    :class:`~meshwright.errors.ArrayError` where shape or value are missing or do not agree.

    >>> initial(0.0)
    ({'kind': 'value'}, array(0., dtype=float32), (), 'float32')
    >>> initial("zeros", (2, 3))
    ({'kind': 'zeros', 'params': {}, 'seed': None}, None, (2, 3), 'float32')
    """
    rule = _rule(value)
    if rule is None:
        return _value(value, shape, dtype)
    if shape is None:
        raise ArrayError(f"a variable made by {rule['kind']!r} needs a shape: shape=(rows, ...).")
    if rule["kind"] not in ("zeros", "ones", "constant") and rule["seed"] is None:
        rule = {**rule, "seed": int.from_bytes(os.urandom(4), "little")}
    return rule, None, tuple(int(dim) for dim in shape), np.dtype(dtype or "float32").name


def _value(value: Any, shape: Sequence[int] | None, dtype: Any) -> Initial:
    array = np.asarray(value)
    if dtype is not None:
        array = array.astype(np.dtype(dtype))
    elif isinstance(value, float) or array.dtype == np.float64:
        array = array.astype(np.float32)
    elif isinstance(value, int) and not isinstance(value, bool):
        array = array.astype(np.int32)
    if shape is not None and tuple(shape) != array.shape:
        try:
            array = np.broadcast_to(array, tuple(shape))
        except ValueError:
            raise ArrayError(
                f"a value of shape {array.shape} does not fill shape {tuple(shape)}."
            ) from None
    return (
        {"kind": "value"},
        np.ascontiguousarray(array).reshape(array.shape),
        array.shape,
        array.dtype.name,
    )


def _rule(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        return {"kind": value, "params": {}, "seed": None}
    if isinstance(value, Mapping):
        return {"params": {}, "seed": None, **value}
    get_config: Any = getattr(value, "get_config", None)
    if get_config is not None:  # one of Keras'
        config = dict(get_config())
        seed = config.pop("seed", None)
        kind = _snake(type(value).__name__)
        params = {key: one for key, one in config.items() if isinstance(one, int | float | str)}
        return {"kind": kind, "params": params, "seed": seed if isinstance(seed, int) else None}
    return None


def _snake(name: str) -> str:
    parts = "".join(f" {letter}" if letter.isupper() else letter for letter in name).split()
    return {"random_normal": "normal", "random_uniform": "uniform"}.get(
        found := "_".join(parts).lower(), found
    )
