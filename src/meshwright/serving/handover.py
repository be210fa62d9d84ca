"""Weights from where they are to where they are served, piece by piece, in memory of their own.

Training donates its arrays to the next step, so what is served is never the same memory, even
where both lie alike. A piece that one device holds whole goes from device to device; any other is
put together on the host. No device ever holds more than its own pieces.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ..program import TrainState
from .turns import turn_on


@dataclass(frozen=True)
class Moved:
    """What a hand-over of weights took: bytes that arrived on all devices together, seconds.

    Example:
        >>> print(Moved(2_000_000, 0.5))
        2,000,000 bytes in 0.500 s
    """

    nbytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.nbytes:,} bytes in {self.seconds:.3f} s"


def handed_over(state: TrainState, like: TrainState) -> tuple[TrainState, Moved]:
    """The arrays of ``state``, of any mesh or of the host, with the shardings of ``like``.

    Waits until all of them have arrived. Dtypes stay.
    """
    import jax

    begin_s = time.perf_counter()
    params, others = (
        {path: _moved_to(state[n][path], shape.sharding) for path, shape in part.items()}
        for n, part in enumerate(like[:2])
    )
    arrived = jax.block_until_ready(TrainState(params, others, {}, {}))
    nbytes = sum(
        shard.data.nbytes
        for array in jax.tree.leaves(arrived)
        for shard in array.addressable_shards
    )
    return arrived, Moved(nbytes, time.perf_counter() - begin_s)


def _moved_to(value: Any, sharding: Any) -> Any:
    import jax
    import numpy as np

    if not isinstance(value, jax.Array):
        value = np.asarray(value)
        # Copies, for on CPUs JAX may go on using the memory of NumPy's array.
        return jax.make_array_from_callback(
            value.shape, sharding, lambda index: np.array(value[index])
        )
    if not value.is_fully_addressable:
        with turn_on(sharding.device_set | value.sharding.device_set):
            return jax.block_until_ready(jax.jit(jax.numpy.copy, out_shardings=sharding)(value))
    held = {_key(shard.index, value.shape): shard.data for shard in value.addressable_shards}
    pieces = []
    for device, index in sharding.addressable_devices_indices_map(value.shape).items():
        piece = held.get(_key(index, value.shape))
        if piece is None:
            piece = _from_host(value, held, index)
        elif piece.devices() == {device}:
            piece = jax.numpy.copy(piece)
        pieces.append(jax.device_put(piece, device))
    return jax.make_array_from_single_device_arrays(value.shape, sharding, pieces)


def _key(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Where a piece begins and ends in each dim."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _from_host(value: Any, pieces: Any, index: Any) -> Any:
    """A piece that no device holds as it is, from all that overlap it."""
    import numpy as np

    bounds = _key(index, value.shape)
    piece = np.empty([end - begin for begin, end in bounds], value.dtype)
    for place, data in pieces.items():
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, place, strict=True)]
        if all(begin < end for begin, end in both):
            into = [slice(b - w, e - w) for (b, e), (w, _) in zip(both, bounds, strict=True)]
            out_of = [slice(b - p, e - p) for (b, e), (p, _) in zip(both, place, strict=True)]
            piece[tuple(into)] = np.asarray(data[tuple(out_of)])
    return piece
