"""The compiling process: ``python -m meshwright.planning.child FOLDER``.

Reads ``step.bin`` and ``job.json``, writes ``answer.json`` and ``hlo.txt``. It allocates nothing
on any device.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import topology
from ..errors import MeshwrightError

_HOST = (2, 2, 1)  # chips of one host along each direction, for libtpu
_MEGACORE = "megacore"  # both cores of a TPU v4 are one device where it runs, not as libtpu begins


def main(folder: Path) -> None:
    """Compile the step in the folder and write down what the compiler says."""
    job = json.loads((folder / "job.json").read_text())
    try:
        answer = _compile(folder, job)
    except (MeshwrightError, RuntimeError, NotImplementedError, ValueError) as error:
        answer = {"error": f"{error}"}
    (folder / "answer.json").write_text(json.dumps(answer))


def _compile(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    import jax
    import numpy as np

    # A program that JAX reads back from its own cache has no dump, and less to say of its memory.
    jax.config.update("jax_enable_compilation_cache", False)
    if job.get("x64"):
        jax.config.update("jax_enable_x64", True)
    names, shape, kinds = zip(*job["axes"], strict=True)
    devices = np.array(_devices(job, shape))
    types = tuple(jax.sharding.AxisType[kind] for kind in kinds)
    mesh = jax.sharding.Mesh(devices.reshape(shape), names, axis_types=types)
    exported = jax.export.deserialize(bytearray((folder / "step.bin").read_bytes()))
    lie = exported.in_shardings_jax(mesh)
    step = jax.jit(
        exported.call,
        in_shardings=lie,
        out_shardings=exported.out_shardings_jax(mesh),
        donate_argnums=tuple(job["donated"]),
        keep_unused=True,
    )
    args = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, lie, strict=True)
    ]
    begin = time.monotonic()
    compiled = step.lower(*args).compile()
    took = time.monotonic() - begin
    text = _text(compiled, folder / "dump")
    if text is None:
        return {"no_text": True}
    (folder / "hlo.txt").write_text(text)
    return {"memory": _memory(compiled.memory_analysis()), "compile_s": took}


def _devices(job: dict[str, Any], shape: tuple[int, ...]) -> list[Any]:
    """The target's devices in the order that a mesh of this shape has there."""
    import jax

    if job["kind"] == "cpu":
        return jax.devices("cpu")
    from jax.experimental import topologies

    name, platform = f"{job['kind']}:{'x'.join(map(str, job['topology']))}", "tpu"
    details: dict[str, Any] = {"chip_config_name": _MEGACORE} if job["kind"] == "v4" else {}
    if slices := job.get("slices"):
        details["num_slices"] = slices
    if gpus := job.get("gpus"):
        platform = "cuda"
        details = {"topology": gpus["topology"], "target_config": gpus["config"]}
    elif bounds := _host_bounds(job["topology"]):
        details["chips_per_host_bounds"] = bounds
    there = topologies.get_topology_desc(name, platform=platform, **details)
    return topology.in_mesh_order(shape, there.devices)


def _host_bounds(chips: Sequence[int]) -> list[int] | None:
    """The chips of one host of a small TPU slice; ``None`` where they are as libtpu begins with.

    >>> _host_bounds([1, 2]), _host_bounds([4, 4, 2])
    ([1, 2, 1], None)
    """
    sizes = [*chips, 1, 1][: len(_HOST)]
    bounds = [math.gcd(size, of_host) for size, of_host in zip(sizes, _HOST, strict=True)]
    return None if bounds == list(_HOST) else bounds


def _text(compiled: Any, dump: Path) -> str | None:
    """Optimized HLO; from the dump where the executable cannot print it, as on some TPUs."""
    if dump.exists():
        (text,) = (path.read_text() for path in dump.glob("*jit_call*after_optimizations.txt"))
        return text
    try:
        return compiled.as_text()
    except RuntimeError:
        return None


def _memory(stats: Any) -> dict[str, int]:
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "donated_bytes": stats.alias_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "peak_bytes": stats.peak_memory_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
    }


def _end_with_the_parent() -> None:
    """End at once when standard input is closed: the process that asked is gone."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    main(Path(sys.argv[1]))
    # Not by way of the interpreter's own end, which would wait for the thread's hold on stdin.
    os._exit(0)
