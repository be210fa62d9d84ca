"""Takes steps of training on the devices that are here, and looks: how long, how many bytes, what
the profiler records. A step donates its state: :func:`kept` gives it back."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..arrays.by_hand import run_compiled
from ..hlo.groups import Axes
from ..program import TrainState
from .measurement import Measured, SeenCollective
from .profiled import collectives_seen, events_in

_WARM = 2  # steps that are not counted: the first fills caches
_PROFILED = 3  # steps under the profiler, which slows them down; their times do not count


def copier(state: Any) -> Callable[[], Any]:
    """A copy of a state on the host, each piece once; the result makes the state of it again."""
    pieces = jax.tree.map(_Pieces.of, state)
    return lambda: jax.tree.map(_Pieces.again, pieces, is_leaf=lambda v: isinstance(v, _Pieces))


class _Pieces(NamedTuple):
    """The pieces of one array that are here, by the part of it that they are."""

    dims: tuple[int, ...]
    sharding: Any
    values: dict[str, np.ndarray]
    lie: dict[Any, str]  # device -> part

    @classmethod
    def of(cls, array: Any) -> _Pieces:
        lie = {shard.device: str(shard.index) for shard in array.addressable_shards}
        first = {str(shard.index): shard.data for shard in reversed(array.addressable_shards)}
        values = {part: np.array(data) for part, data in first.items()}  # never a view
        return cls(array.shape, array.sharding, values, lie)

    def again(self) -> Any:
        placed = [jax.device_put(self.values[part], device) for device, part in self.lie.items()]
        return jax.make_array_from_single_device_arrays(self.dims, self.sharding, placed)


def measure_step(
    jitted: Any, state: TrainState, batch: Any, *, name: str, axes: Axes, steps: int
) -> Measured:
    """What a jitted step ``(state, batch) -> (state, logs)`` takes here; the state is used up."""
    compiled = jitted.lower(state, batch).compile()  # at once, if it has been called before
    sizes = _sizes(state, batch)
    times = []

    def take(state: TrainState) -> TrainState:
        begin = time.perf_counter()
        state, logs = run_compiled(compiled, state, batch)
        jax.block_until_ready((state, logs))
        times.append(time.perf_counter() - begin)
        return state

    for _ in range(_WARM + steps):
        state = take(state)
    counted = tuple(times[_WARM:])
    state, collectives = _profiled(take, state, compiled.as_text(), axes)
    peak, peak_is = _peak(state, compiled)
    first = _devices(state)[0]
    return Measured(
        name=name,
        platform=first.platform,
        device=first.device_kind,
        axes=axes,
        **sizes,
        peak_bytes=peak,
        peak_is=peak_is,
        step_times_s=counted,
        collectives=collectives,
    )


def _profiled(
    take: Callable[[TrainState], TrainState], state: TrainState, text: str, axes: Axes
) -> tuple[TrainState, tuple[SeenCollective, ...] | None]:
    """Some more steps under JAX's profiler, and the collectives that it saw."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # of no use here, and slow
    with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
        try:
            jax.profiler.start_trace(name, profiler_options=options)
        except RuntimeError:  # somebody else is profiling, and only one may
            return state, None
        try:
            for _ in range(_PROFILED):
                state = take(state)
        finally:
            jax.profiler.stop_trace()
        return state, collectives_seen(events_in(Path(name)), text, axes, _PROFILED)


def _devices(tree: Any) -> list[Any]:
    """The devices of this process that hold a piece of it."""
    arrays = jax.tree.leaves(tree)
    devices = {s.device for array in arrays for s in array.addressable_shards}
    return sorted(devices, key=lambda device: device.id)


def _sizes(state: TrainState, batch: Any) -> dict[str, int]:
    """Bytes of the arrays themselves, in the device that holds most of each part."""
    other = state.state, state.metrics
    parts = {
        "parameter_bytes": state.params,
        "slot_bytes": state.slots,
        "state_bytes": other,
        "input_bytes": batch,
    }
    return {name: _most_bytes(part) for name, part in parts.items()}


def _most_bytes(tree: Any) -> int:
    bytes_of: dict[Any, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            bytes_of[shard.device] = bytes_of.get(shard.device, 0) + shard.data.nbytes
    return max(bytes_of.values(), default=0)


def _peak(state: TrainState, compiled: Any) -> tuple[int | None, str]:
    """What a device held at most: by its own count, else as the executable has reserved it."""
    counted = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in _devices(state)]
    numbers = [number for number in counted if number is not None]
    if numbers:
        return max(numbers), "what the device counted, from the start of this process on"
    memory = compiled.memory_analysis()
    if memory is None:
        return None, ""
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    whole = memory.argument_size_in_bytes + new + memory.temp_size_in_bytes
    return whole, "arguments, new outputs and temporaries of the executable that ran"
