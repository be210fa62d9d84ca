"""Orbax, as it is used here: one tree of arrays per directory, committed by renaming it.

Orbax' own defaults write a sharding file and the pieces of replicated arrays from every device,
which costs several times the work for the many small arrays of a training state.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, MeshwrightError
from ..extras import require
from .record import KEY, CheckpointInfo, SavedArray, to_record
from .snapshot import laid_out

_CHUNK_BYTES = 64 * 2**20  # a piece that a device asks for is read from chunks of at most this size


def write(checkpointer: Any, arrays: dict[str, Any], info: CheckpointInfo) -> None:
    """Write one checkpoint; when this returns, it is complete in every process."""
    import orbax.checkpoint as ocp

    arrays = {key: array for key, array in arrays.items() if array.size}  # Orbax takes no others
    arrays, packed = _pack(arrays)
    args = {key: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for key in arrays}
    checkpointer.save(
        info.directory.absolute(),
        args=ocp.args.PyTreeSave(arrays, save_args=args),
        custom_metadata={KEY: to_record(replace(info, packed=packed))},
    )


def read(checkpointer: Any, info: CheckpointInfo, like: dict[str, Any]) -> dict[str, Any]:
    """The arrays of these names, each directly in the layout of its counterpart in ``like``."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    def arguments(value: Any) -> Any:
        if getattr(value, "sharding", None) is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=value.dtype)
        return ocp.ArrayRestoreArgs(
            restore_type=jax.Array,
            dtype=value.dtype,
            sharding=value.sharding,
            global_shape=tuple(value.shape),
        )

    filled = {key: value for key, value in like.items() if math.prod(value.shape)}
    empty = {key: _empty(value) for key, value in like.items() if key not in filled}
    by_key = {array.key: array for array in info.arrays}
    packed = [by_key[key] for key in info.packed]
    small = {key: filled.pop(key) for key in info.packed if key in filled}
    if small:
        filled[_PACKED] = np.broadcast_to(np.uint8(0), _packed_bytes(packed))
    args = ocp.args.PyTreeRestore(
        {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in filled.items()},
        restore_args={key: arguments(value) for key, value in filled.items()},
        partial_restore=True,
    )
    with _damage_named(info):
        restored = checkpointer.restore(info.directory.absolute(), args=args) if filled else {}
    values = _unpack(restored.pop(_PACKED), packed) if small else {}
    return {**restored, **empty, **{key: laid_out(values[key], small[key]) for key in small}}


@contextlib.contextmanager
def _damage_named(info: CheckpointInfo) -> Iterator[None]:
    """Raise :class:`CheckpointError` for what Orbax raises where files are missing or broken."""
    try:
        yield
    except MeshwrightError:
        raise
    except (ValueError, KeyError, FileNotFoundError) as error:
        why = str(error).split(" [tensorstore_spec")[0].split(" [source locations")[0]
        raise CheckpointError(f"{_damage(info.directory)}: {why}") from error


def _damage(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory} was removed while it was read. Read a newer checkpoint"
    return (
        f"{directory} is damaged, or not whole. Move {directory.name} out of its directory, to go "
        "on from the checkpoint before it, or name an earlier one. What could not be read"
    )


def _empty(like: Any) -> Any:
    import numpy as np

    return laid_out(np.zeros(like.shape, like.dtype), like)


def require_orbax() -> None:
    """Raise :class:`CheckpointError` if Orbax is not installed; it is slow, and not imported."""
    what = "checkpoints are written and read by Orbax"
    require("orbax.checkpoint", CheckpointError, what, "checkpoint")


def reader() -> Any:
    """What reads in this process without waiting for others, which may fail to read."""
    import jax

    return make_checkpointer({jax.process_index()} if jax.process_count() > 1 else None)


def make_checkpointer(processes: set[int] | None = None) -> Any:
    """What reads and writes; raises :class:`CheckpointError` if Orbax is not installed.

    ``processes`` are those that wait for each other; all of them unless it is given.
    """
    require_orbax()
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    count = jax.process_count()
    processes = processes or set(range(count))
    # Named processes wait for each other over the network and not on the devices, where the
    # thread that writes would get between the collectives of the training step.
    options = ocp.options.MultiprocessingOptions(
        primary_host=min(processes),
        active_processes=processes if count > 1 else None,
        barrier_sync_key_prefix=_prefix(processes, count) if count > 1 else None,
    )
    types = ocp.type_handlers
    registry = types.create_type_handler_registry(
        (
            jax.Array,
            types.ArrayHandler(
                use_replica_parallel=False,
                enable_write_sharding_file=False,
                array_metadata_store=None,
            ),
        ),
        (np.ndarray, types.NumpyHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry, multiprocessing_options=options
    )
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _prefix(processes: set[int], count: int) -> str:
    """The name of the waiting of these processes, which others do not take part in."""
    some = [] if len(processes) == count else map(str, sorted(processes))
    return "-".join(["meshwright", *some])


def remove(path: Path) -> None:
    """Remove a checkpoint; whenever this is cut short, no broken one counts as complete."""
    import shutil

    if path.suffix != ".removed":
        path = path.rename(path.with_name(f"{path.name}.removed"))
    shutil.rmtree(path)


# Small arrays as one: a training state has many, and a file format's work is per array. Slots of
# biases and scales, counters and metrics are bytes one behind the other in one array. What is large
# or split over devices stays an array of its own, and so do parameters, which others may want to
# read with Orbax alone.

_PACKED = "packed"  # the name of the one array
_SMALL_BYTES = 2**20
_MOST_BYTES = 64 * 2**20  # reading one of the small arrays reads them all


def _pack(arrays: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arrays with the small ones in one, and the names of those, in order.

    >>> import numpy as np
    >>> arrays = {"params/w": np.ones(8), "slots/w": np.ones([2], "int16"), "slots/n": np.ones([])}
    >>> packed, names = _pack(arrays)
    >>> names, {name: array.shape for name, array in packed.items()}
    (('slots/w', 'slots/n'), {'params/w': (8,), 'packed': (12,)})
    """
    import numpy as np

    small, total = list[str](), 0
    for key, array in arrays.items():
        if _is_small(key, array) and total + array.nbytes <= _MOST_BYTES:
            total += array.nbytes
            small.append(key)
    if len(small) < 2:
        return arrays, ()
    bytes_of_all = b"".join(arrays[key].tobytes() for key in small)
    others = {key: array for key, array in arrays.items() if key not in set(small)}
    return others | {_PACKED: np.frombuffer(bytes_of_all, np.uint8)}, tuple(small)


def _is_small(key: str, array: Any) -> bool:
    import numpy as np

    is_whole_here = isinstance(array, np.ndarray)
    return is_whole_here and array.nbytes <= _SMALL_BYTES and not key.startswith("params/")


def _unpack(packed: Any, arrays: Sequence[SavedArray]) -> dict[str, Any]:
    """Each of the small arrays, which stand in this order, by its name."""
    import jax.numpy as jnp
    import numpy as np

    restored = {}
    for saved, (begin, end) in zip(arrays, _places(arrays), strict=True):
        values = np.frombuffer(packed[begin:end].tobytes(), jnp.dtype(saved.dtype))
        restored[saved.key] = values.reshape(saved.dims)
    return restored


def _packed_bytes(arrays: Sequence[SavedArray]) -> int:
    """How long the one array is."""
    return max((end for _, end in _places(arrays)), default=0)


def _places(arrays: Sequence[SavedArray]) -> Iterator[tuple[int, int]]:
    import jax.numpy as jnp

    end = 0
    for array in arrays:
        begin, end = end, end + math.prod(array.dims) * jnp.dtype(array.dtype).itemsize
        yield begin, end
