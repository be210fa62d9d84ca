"""Orbax, as it is used here: one tree of arrays per directory, committed by renaming it.

Orbax' own defaults write a sharding file and the pieces of replicated arrays from every device,
which costs several times the work for the many small arrays of a training state.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..extras import require
from .packing import PACKED, pack, packed_bytes, unpack
from .record import KEY, CheckpointInfo, to_record

_CHUNK_BYTES = 64 * 2**20  # a piece that a device asks for is read from chunks of at most this size


def write(checkpointer: Any, arrays: dict[str, Any], info: CheckpointInfo) -> None:
    """Write one checkpoint; when this returns, it is complete in every process."""
    import orbax.checkpoint as ocp

    arrays = {key: array for key, array in arrays.items() if array.size}  # Orbax takes no others
    arrays, packed = pack(arrays)
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
    by_key = {each.key: each for each in info.arrays}
    packed = [by_key[key] for key in info.packed]
    small = {key: filled.pop(key) for key in info.packed if key in filled}
    if small:
        filled[PACKED] = np.broadcast_to(np.uint8(0), packed_bytes(packed))
    args = ocp.args.PyTreeRestore(
        {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in filled.items()},
        restore_args={key: arguments(value) for key, value in filled.items()},
        partial_restore=True,
    )
    found = checkpointer.restore(info.directory.absolute(), args=args) if filled else {}
    values = unpack(found.pop(PACKED), packed) if small else {}
    return {**found, **empty, **{key: _laid_out(values[key], small[key]) for key in small}}


def _empty(like: Any) -> Any:
    import numpy as np

    return _laid_out(np.zeros(like.shape, like.dtype), like)


def _laid_out(value: Any, like: Any) -> Any:
    """A host array in the layout, and the type, of its counterpart."""
    import jax

    value = value.astype(like.dtype, copy=False)
    sharding = getattr(like, "sharding", None)
    if sharding is None:
        return value
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


def require_orbax() -> None:
    """Raise :class:`CheckpointError` if Orbax is not installed; it is slow, and not imported."""
    what = "checkpoints are written and read by Orbax"
    require("orbax.checkpoint", CheckpointError, what, "checkpoint")


def make_checkpointer() -> Any:
    """What reads and writes; raises :class:`CheckpointError` if Orbax is not installed."""
    require_orbax()
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    count = jax.process_count()
    # Named processes wait for each other over the network and not on the devices, where the
    # thread that writes would get between the collectives of the training step.
    options = ocp.options.MultiprocessingOptions(
        active_processes=set(range(count)) if count > 1 else None,
        barrier_sync_key_prefix="meshwright" if count > 1 else None,
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


def remove(path: Path) -> None:
    """Remove a checkpoint; whenever this is cut short, no broken one is taken for complete."""
    import shutil

    if path.suffix != ".removed":
        path = path.rename(path.with_name(f"{path.name}.removed"))
    shutil.rmtree(path)
