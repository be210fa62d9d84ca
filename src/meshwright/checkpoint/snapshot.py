"""A copy of a training state that later steps, which donate it, cannot touch."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import CheckpointError
from ..program import TrainState
from ..step.compression import UNSENT, respread
from .record import PARTS, CheckpointInfo, SavedArray

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def describe(state: TrainState) -> list[SavedArray]:
    """Every array of a state by part and path; arrays need only shape and dtype."""
    return [
        SavedArray(part, path, tuple(int(size) for size in value.shape), str(value.dtype))
        for part, values in zip(PARTS, state, strict=True)
        for path, value in values.items()
    ]


def as_saved(info: CheckpointInfo, like: TrainState) -> TrainState:
    """``like`` with what each device keeps for itself in the number of devices that saved it."""
    import jax

    saved = {array.path: array for array in info.arrays if array.part == "slots"}
    slots = dict(like.slots)
    for path, value in like.slots.items():
        if path.endswith(UNSENT) and path in saved:
            there = saved[path].dims
            if there[1:] == tuple(value.shape[1:]) and there != tuple(value.shape):
                slots[path] = jax.ShapeDtypeStruct(there, value.dtype)
    return like._replace(slots=slots)


def spread_again(state: TrainState, like: TrainState) -> TrainState:
    """The state with what other devices kept for themselves in shares for those of ``like``."""
    slots = dict(state.slots)
    for path, value in state.slots.items():
        if value.shape != like.slots[path].shape:
            rows = respread(value, like.slots[path].shape[0])
            slots[path] = laid_out(rows, like.slots[path])
    return state._replace(slots=slots)


def laid_out(value: Any, like: Any) -> Any:
    """A host array in the layout, and the type, of its counterpart."""
    import jax

    value = value.astype(like.dtype, copy=False)
    sharding = getattr(like, "sharding", None)
    if sharding is None:
        return value
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


def rounded(state: TrainState, dtype: str | None) -> TrainState:
    """The state with floating-point weights (parameters and state) in another type.

    Raises :class:`CheckpointError` for a type that weights are not saved in.
    """
    if dtype is None:
        return state
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype={dtype!r}: expected one of {', '.join(map(repr, _DTYPES))}.")
    import jax.numpy as jnp

    def one(value: Any) -> Any:
        return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value

    params, others = ({path: one(v) for path, v in part.items()} for part in state[:2])
    return state._replace(params=params, state=others)


def snapshot(state: TrainState) -> dict[str, Any]:
    """Copies of all arrays by their names in the checkpoint, on the devices, without waiting.

    Of what is replicated one device copies its piece; what is split is copied where it lies, so no
    device ever holds more than twice its own share.
    """
    import jax
    import numpy as np

    arrays = {
        f"{part}/{path}": value
        for part, values in zip(PARTS, state, strict=True)
        for path, value in values.items()
    }
    hosts = {k: np.array(v) for k, v in arrays.items() if not isinstance(v, jax.Array)}
    whole, split = {}, {}
    for key, array in arrays.items():
        if key in hosts:
            continue
        if array.is_fully_replicated:
            whole[key] = array.addressable_data(0)
        else:
            split[key] = array
    return {**hosts, **_copied(whole), **_copied(split)}


def to_host(arrays: dict[str, Any]) -> dict[str, Any]:
    """What lies whole on one device as NumPy arrays; waits for the devices."""
    import jax
    import numpy as np

    def fetch(array: Any) -> Any:
        on_one = isinstance(array, jax.Array) and len(array.sharding.device_set) == 1
        return np.asarray(array) if on_one else array

    return {key: fetch(array) for key, array in arrays.items()}


def _copied(arrays: dict[str, Any]) -> dict[str, Any]:
    lies = tuple((key, array.sharding) for key, array in arrays.items())
    return _copier(lies)(arrays) if arrays else {}


@functools.lru_cache(maxsize=16)
def _copier(lies: tuple[tuple[str, Any], ...]) -> Any:
    """One compiled function that copies arrays with these layouts."""
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays), out_shardings=dict(lies))
