"""What lies between the processes of a group: ``meshwright doctor --processes 2``.

``python -m meshwright.fabric`` is run as every process of it, under the launcher or under any other
starter. Rank 0 prints versions, devices and clocks of all, latency and bandwidth of each collective
between processes, which of them the backend of this platform cannot do, and what else there is.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .display.text.columns import Columns
from .errors import TopologyError
from .extras import is_installed, version_of
from .launch.join import join
from .launch.membership import Membership
from .launch.neighbors import SHARED_MEMORY, neighbors
from .units import bytes_text, seconds_text

_SMALL_BYTES, _LARGE_BYTES = 8, 4 << 20
_ROUNDS, _LARGE_ROUNDS, _CLOCK_ROUNDS = 20, 5, 8
_DTYPES = ("float32", "bfloat16", "int32")
_APART_S = 1.0
_SHARED = "shared memory"
_PACKAGES = ("jax", "jaxlib", "keras", "meshwright")


@dataclass(frozen=True)
class Peer:
    """One process: where it runs, and what it has."""

    rank: int
    host: str
    pid: int
    python: str
    packages: Mapping[str, str]
    devices: str  # "2 cpu"
    clock_s: float = 0.0  # how far its clock is ahead of that of rank 0


@dataclass(frozen=True)
class Timing:
    """One collective between one device of each process; ``fault`` where it fails."""

    operation: str
    dtype: str
    latency_s: float | None = None  # of an array of 8 bytes on each device
    bytes_per_s: float | None = None  # of one with 4 MiB on each
    fault: str = ""


@dataclass(frozen=True)
class Backend:
    """A library that collectives can run on, and of each of them whether it can do it."""

    name: str
    devices: str
    through_host: str
    here: str
    remedy: str = ""
    operations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fabric:
    """The whole report."""

    started_by: str
    backend: str
    peers: tuple[Peer, ...]
    clock_error_s: float
    timings: tuple[Timing, ...]
    backends: tuple[Backend, ...]
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        peers = [("rank", "host", "pid", "Python", "JAX", "devices", "clock")]
        peers += [_peer_row(peer) for peer in self.peers]
        timings = [("collective", "dtype", "latency", "bandwidth", "")]
        timings += [_timing_row(timing) for timing in self.timings]
        backends = [("backend", "devices", "through the host", "here")]
        backends += [(b.name, b.devices, b.through_host, b.here) for b in self.backends]
        operations = [("backend", "devices", *_OPERATIONS)]
        operations += [(b.name, b.devices, *b.operations.values()) for b in self.backends]
        remedies = [f"{b.name}: {b.remedy}" for b in self.backends if b.remedy]
        return "\n".join(
            [
                f"{len(self.peers)} processes, started by {self.started_by}, over {self.backend}",
                "",
                str(Columns(peers, right=(0, 2))),
                f"  clocks are compared to within {seconds_text(self.clock_error_s)}",
                "",
                f"between the first devices of the processes ({bytes_text(_SMALL_BYTES)}, and "
                f"{bytes_text(_LARGE_BYTES)} on each)",
                str(Columns(timings, right=(2, 3))),
                "",
                "what collectives can run on",
                str(Columns(backends)),
                "",
                "what each can do",
                str(Columns(operations)),
                "",
                "to get what is missing",
                *(f"  {line}" for line in remedies),
                *(f"note: {note}" for note in self.notes),
            ]
        )


def examine_group(member: Membership) -> Fabric:
    """Measure; every process of the group must call it, and each gets the same report."""
    import jax

    own = Peer(
        member.rank,
        socket.gethostname(),
        os.getpid(),
        platform.python_version(),
        {name: version_of(name) or "not installed" for name in _PACKAGES},
        f"{jax.local_device_count()} {jax.devices()[0].platform}",
    )
    offsets, error_s = _clocks()
    gathered = [json.loads(text) for text in _gather_texts(json.dumps(asdict(own)))]
    peers = tuple(
        Peer(**{**p, "clock_s": offset}) for p, offset in zip(gathered, offsets, strict=True)
    )
    timings = tuple(_timing(name, dtype) for name in _OPERATIONS for dtype in _DTYPES)
    kind = jax.devices()[0].platform
    backend = _backend_of(kind)
    backends = with_operations(_backends(kind), backend, timings)
    notes = notes_on(peers, error_s)
    return Fabric(member.source, backend, peers, error_s, timings, backends, notes)


# Measuring


def _all_reduce(x: Any) -> Any:
    import jax

    return jax.lax.psum(x, "p")


def _all_gather(x: Any) -> Any:
    import jax

    return jax.lax.all_gather(x, "p", tiled=True)


def _reduce_scatter(x: Any) -> Any:
    import jax

    return jax.lax.psum_scatter(x, "p", tiled=True)


def _all_to_all(x: Any) -> Any:
    import jax

    return jax.lax.all_to_all(x, "p", 0, 0, tiled=True)


def _permute(x: Any) -> Any:
    import jax

    count = jax.lax.axis_size("p")
    return jax.lax.ppermute(x, "p", [(i, (i + 1) % count) for i in range(count)])


_OPERATIONS: Mapping[str, Callable[[Any], Any]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "permute": _permute,
}


@functools.cache
def _mesh() -> Any:
    """One device of each process."""
    import jax

    firsts = {d.process_index: d for d in reversed(jax.devices())}
    devices = [firsts[index] for index in sorted(firsts)]
    return jax.sharding.Mesh(devices, ("p",))


def _timing(name: str, dtype: str) -> Timing:
    try:
        small_s = _seconds(name, dtype, _SMALL_BYTES, _ROUNDS)
        large_s = _seconds(name, dtype, _LARGE_BYTES, _LARGE_ROUNDS)
    except Exception as error:  # a backend may refuse an operation in any way
        return Timing(name, dtype, fault=" ".join(str(error).split())[:120])
    return Timing(name, dtype, small_s, _LARGE_BYTES / large_s)


def _seconds(name: str, dtype: str, num_bytes: int, rounds: int) -> float:
    """The median time of a collective on arrays of this size on each device."""
    import jax
    import jax.numpy as jnp

    mesh, spec = _mesh(), jax.sharding.PartitionSpec("p")
    count = mesh.devices.size
    length = max(1, num_bytes // jnp.dtype(dtype).itemsize)
    length += -length % count
    sharding = jax.sharding.NamedSharding(mesh, spec)
    run = jax.jit(
        jax.shard_map(_OPERATIONS[name], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    x = jax.jit(lambda: jnp.zeros(length * count, dtype), out_shardings=sharding)()
    jax.block_until_ready(run(x))
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        jax.block_until_ready(run(x))
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def _clocks() -> tuple[list[float], float]:
    """How far each clock is ahead of that of rank 0, and how well that is known, in seconds."""
    import numpy as np
    from jax.experimental import multihost_utils

    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        began_s = time.perf_counter()
        multihost_utils.sync_global_devices("clocks")
        now = np.array([time.time(), time.perf_counter() - began_s])
        rounds.append(np.asarray(_gather(now)))
    times = np.stack(rounds)  # (round, process, 2)
    offsets = np.median(times[:, :, 0] - times[:, :1, 0], axis=0)
    return [float(offset) for offset in offsets], float(times[:, :, 1].min(axis=0).max())


def _gather(values: Any) -> Any:
    """Arrays of all processes, stacked; as bytes, because 64 bits may be off."""
    import numpy as np
    from jax.experimental import multihost_utils

    array = np.ascontiguousarray(values)
    raw = multihost_utils.process_allgather(np.frombuffer(array.tobytes(), np.uint8))
    every = np.asarray(raw).reshape(-1, array.nbytes)
    return np.stack([np.frombuffer(r.tobytes(), array.dtype).reshape(array.shape) for r in every])


def _gather_texts(text: str) -> list[str]:
    import numpy as np

    raw = text.encode()
    longest = int(_gather(np.array([len(raw)])).max())
    padded = np.frombuffer(raw.ljust(longest), np.uint8)
    return [bytes(row).decode().rstrip() for row in _gather(padded)]


# What there is


def _backend_of(kind: str) -> str:
    import jax

    if kind == "cpu":
        return str(getattr(jax.config, "jax_cpu_collectives_implementation", "gloo"))
    return {"gpu": "NCCL", "cuda": "NCCL", "tpu": "ICI and DCN"}.get(kind, kind)


def _backends(kind: str) -> tuple[Backend, ...]:
    """What collectives can run on, and what of that is here."""
    import jax

    shared = neighbors() is not None and jax.local_device_count() == 1
    wanted = "Linux, one CPU device in each process, all of them on one host"
    gpus = kind in ("gpu", "cuda")
    nccl = any(is_installed(f"jax_cuda{n}_plugin") for n in (12, 13))
    mpi = bool(os.environ.get("MPITRAMPOLINE_LIB"))
    return (
        Backend(
            _SHARED,
            "CPU, one in each process",
            "always: arrays are in its memory",
            "in use" if shared else "no",
            "" if shared else f"{wanted}; {SHARED_MEMORY} must not be 0",
        ),
        Backend("gloo", "CPU", "always: arrays are in its memory", "yes, in jaxlib"),
        Backend(
            "MPI",
            "CPU, one in each process",
            "always: arrays are in its memory",
            "MPITRAMPOLINE_LIB is set" if mpi else "no",
            ""
            if mpi
            else "build MPItrampoline's wrapper for your MPI, set MPITRAMPOLINE_LIB to it and "
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi",
        ),
        Backend(
            "NCCL",
            "NVIDIA GPUs",
            "between hosts without GPUDirect RDMA",
            "in use" if gpus else "installed; no GPU" if nccl else "no",
            "" if nccl else 'pip install "meshwright[cuda]"',
        ),
        Backend(
            "ICI and DCN",
            "TPUs",
            "between slices (DCN)",
            "in use" if kind == "tpu" else "no",
            "" if is_installed("libtpu") else 'pip install "meshwright[tpu]" on a TPU host',
        ),
    )


def with_operations(
    backends: Sequence[Backend], used: str, timings: Sequence[Timing]
) -> tuple[Backend, ...]:
    """The backends with what each can do; of the one in use, as it was measured."""
    failed = [timing for timing in timings if timing.fault]
    faults = {name: [t.dtype for t in failed if t.operation == name] for name in _OPERATIONS}
    measured = {n: f"fails: {', '.join(bad)}" if bad else "measured" for n, bad in faults.items()}
    sums = {name: "float32 gradients" if name == "all-reduce" else "no" for name in _OPERATIONS}
    able = {_SHARED: sums, used.lower(): measured}
    every = dict.fromkeys(_OPERATIONS, "yes")
    return tuple(replace(b, operations=able.get(b.name.lower(), every)) for b in backends)


def notes_on(peers: Sequence[Peer], error_s: float) -> tuple[str, ...]:
    """What differs between processes and should not: clocks, versions, devices."""
    notes = []
    far = [p for p in peers if abs(p.clock_s) > max(_APART_S, error_s)]
    if far:
        listed = ", ".join(f"rank {p.rank} (host {p.host}) by {p.clock_s:+.1f} s" for p in far)
        notes.append(
            f"clocks differ: {listed}. Times in logs and of files do, too, and storage that checks "
            "the time may refuse requests; training does not depend on it. Run NTP on the hosts."
        )
    for name in ("Python", *_PACKAGES):
        held = [(p.python if name == "Python" else p.packages[name], p) for p in peers]
        ranks = {version: [p.rank for v, p in held if v == version] for version, _ in held}
        if len(ranks) > 1:
            listed = ", ".join(f"{v} on rank {', '.join(map(str, r))}" for v, r in ranks.items())
            notes.append(f"versions of {name} differ: {listed}. Training refuses that.")
    if len({p.devices for p in peers}) > 1:
        notes.append("processes have different devices; a mesh needs as many on each.")
    return tuple(notes)


def _peer_row(peer: Peer) -> tuple[str, ...]:
    clock = "" if peer.rank == 0 else f"{peer.clock_s * 1e3:+.1f} ms"
    place = (str(peer.rank), peer.host, str(peer.pid))
    return (*place, peer.python, peer.packages["jax"], peer.devices, clock)


def _timing_row(timing: Timing) -> tuple[str, ...]:
    if timing.latency_s is None or timing.bytes_per_s is None:
        return (timing.operation, timing.dtype, "", "", f"fails: {timing.fault}")
    speed = f"{bytes_text(timing.bytes_per_s)}/s"
    return (timing.operation, timing.dtype, seconds_text(timing.latency_s), speed, "")


def main() -> None:
    """Examine the group that this process is in; rank 0 prints the report.

    Raises :class:`~meshwright.TopologyError` where it is in none.
    """
    member = join(agree=False)  # what differs is part of the report
    if member is None:
        raise TopologyError(
            "this process is in no group. Run `meshwright doctor --processes 2`, or "
            "`srun python -m meshwright.fabric`."
        )
    fabric = examine_group(member)
    if member.rank == 0:
        print(fabric)


if __name__ == "__main__":
    main()
