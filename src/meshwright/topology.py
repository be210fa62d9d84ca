"""Devices and processes: virtual CPU devices, JAX's devices by name, many processes.

XLA's CPU client runs collectives on a pool with one thread per core, and a collective blocks one
thread per device: eight virtual devices on two cores lock up in an unblocked training loop
("Expected 8 threads to join the rendezvous, but only 7 of them arrived"). The client takes the
size of the pool from the environment variable ``NPROC``, when it is created and never again; so
whatever knows the number of devices first settles it here.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _compat
from .errors import TopologyError
from .warn import warn

_THREADS_PER_DEVICE = 2  # 16 for 8 devices and 32 for 16 were never seen to lock up; 8 for 8 were
_POOL_VARIABLE = "NPROC"  # read by XLA's DefaultThreadPoolSize, in place of the number of cores
_TPU_MACHINE = {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}
_FLAGS = "XLA_FLAGS"


def virtual_devices(count: int) -> None:
    """Make ``count`` CPU devices in this process; safe on a machine with fewer cores.

    To be called before JAX is first used (``import jax`` alone is safe). If
    ``JAX_PLATFORMS`` is not set, the CPU becomes JAX's only platform in this process, so that the
    devices are also found on a machine with an accelerator. A second call with the same count
    does nothing, so that a cell of a notebook may run again. Raises :class:`TopologyError` if
    JAX already has other devices, and for a count below one.

    >>> import subprocess, sys
    >>> code = "import meshwright as mw, jax; mw.virtual_devices(4); print(jax.device_count())"
    >>> subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    '4\\n'
    """
    if not hasattr(count, "__index__") or isinstance(count, bool) or count < 1:
        raise TopologyError(
            f"virtual_devices({count!r}): the count must be a whole number, at least 1."
        )
    import jax

    if _compat.jax_is_running():
        there = jax.devices()
        if len(there) == count and there[0].platform == "cpu":
            return
        raise TopologyError(
            f"virtual_devices({count}) comes too late: JAX has already created its "
            f"{len(there)} {there[0].platform} device(s), and they cannot be changed in this "
            "process. Call it before the first use of JAX, or set the environment variable "
            f"JAX_NUM_CPU_DEVICES={count} before the program starts."
        )
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")
    make_cpu_devices(int(count))


def make_cpu_devices(count: int) -> None:
    """Make ``count`` CPU devices if JAX chooses the CPU; without effect once JAX runs."""
    import jax

    if _compat.jax_is_running():
        return
    jax.config.update("jax_num_cpu_devices", count)
    _size_pool_for(count)


def virtual_device_variables(count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make ``count`` CPU devices in a process yet to be started.

    ``environment`` is what it gets beside them; accelerators are left to others.

    >>> variables = virtual_device_variables(4, {"XLA_FLAGS": "--xla_dump_to=here"})
    >>> sorted(set(variables) - {"NPROC"})
    ['JAX_NUM_CPU_DEVICES', 'JAX_PLATFORMS', 'XLA_FLAGS']
    """
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", environment.get(_FLAGS, ""))
    return {
        "JAX_NUM_CPU_DEVICES": str(count),
        "JAX_PLATFORMS": "cpu",
        _FLAGS: flags,  # JAX refuses to be told the number in two ways
        _POOL_VARIABLE: str(_threads_for(count)),
    }


def settle_cpu_pool() -> None:
    """Size XLA's CPU pool for the devices that JAX's own options ask for; never starts JAX."""
    _size_pool_for(_requested_cpu_devices())


def settle_tpu_library() -> None:
    """Describe this machine to the TPU's library where it is installed and there is no TPU.

    It is there for dry runs. JAX starts it in every process, and without these variables it looks
    for the TPU that it expects, and writes errors to the terminal when there is none.
    """
    if any(name in os.environ for name in (*_TPU_MACHINE, "JAX_PLATFORMS", "JAX_FORCE_TPU_INIT")):
        return
    if importlib.util.find_spec("libtpu") is not None and not _may_have_a_tpu():
        os.environ.update(_TPU_MACHINE)


def _may_have_a_tpu() -> bool:
    """Whether there is a device file as TPUs have them; other accelerators may have one, too."""
    return any(any(Path("/dev").glob(names)) for names in ("accel*", "vfio/*"))


def devices(platform: str | None = None) -> list[Any]:
    """All devices of a platform, or of JAX's default one; this starts JAX.

    Raises :class:`TopologyError` where the platform has none.
    """
    import jax

    settle_cpu_pool()
    try:
        return list(jax.devices(platform))
    except RuntimeError as error:
        raise TopologyError(
            f"JAX finds no devices of platform {platform!r} here ({error}). "
            "`meshwright doctor` lists what there is."
        ) from error


def running_devices(platform: str) -> dict[int, Any]:
    """Devices by id if JAX is running and has the platform; else none. Never starts JAX."""
    if not _compat.jax_is_running():
        return {}
    import jax

    try:
        return {device.id: device for device in jax.devices(platform)}
    except RuntimeError:  # JAX's answer for a platform that it does not have
        return {}


def process_index() -> int:
    """Which of the processes this one is, from 0."""
    import jax

    return jax.process_index()


def process_count() -> int:
    """How many processes take part."""
    import jax

    return jax.process_count()


def in_mesh_order(shape: Sequence[int], chosen: Sequence[Any]) -> list[Any]:
    """The devices in the order in which a mesh of this shape communicates best.

    Of several TPU slices, or nodes of GPUs, the first axes span them and the last ones lie within
    one. An axis takes whole dims of a TPU's torus where sizes allow it, else a part of one.
    """
    if chosen[0].platform == "gpu":
        return sorted(chosen, key=_slice_of)
    if chosen[0].platform != "tpu":
        return list(chosen)
    from jax.experimental import mesh_utils

    options: Any = {"devices": list(chosen), "allow_split_physical_axes": True}
    slices = len(set(map(_slice_of, chosen)))
    if slices == 1:
        return list(mesh_utils.create_device_mesh(tuple(shape), **options).flat)
    spans = across_slices(shape, slices)
    within = [size // span for size, span in zip(shape, spans, strict=True)]
    return list(mesh_utils.create_hybrid_device_mesh(within, spans, **options).flat)


def across_slices(shape: Sequence[int], slices: int) -> tuple[int, ...]:
    """How many slices each axis of a mesh of this shape spans: the first axes take them.

    >>> across_slices((2, 4, 4), 2), across_slices((8, 2), 4), across_slices((3, 4), 2)
    ((2, 1, 1), (4, 1), (1, 2))
    """
    spans = []
    for size in shape:
        spans.append(math.gcd(size, slices))
        slices //= spans[-1]
    return tuple(spans)


def _slice_of(device: Any) -> int:
    """The TPU slice, or the node of GPUs, that a device is in; the first where JAX says nothing."""
    return getattr(device, "slice_index", None) or 0


def warn_if_cpu_pool_is_small(count: int) -> None:
    """Warn where ``count`` CPU devices of this process share too small a pool to be safe."""
    threads = _pool_threads()
    if count > 1 and threads is not None and threads < _THREADS_PER_DEVICE * count:
        warn(
            f"{count} CPU devices share a pool of {threads} threads: a training loop that does "
            "not block at every step can lock up in a collective and abort. Call "
            f"meshwright.virtual_devices({count}) before JAX is first used, or start the program "
            f"with {_POOL_VARIABLE}={_THREADS_PER_DEVICE * count}."
        )


def _size_pool_for(count: int) -> None:
    if count < 2 or _compat.jax_is_running():
        return
    wanted = _threads_for(count)
    present = os.environ.get(_POOL_VARIABLE, "")
    if not present.isdigit() or int(present) < wanted:
        os.environ[_POOL_VARIABLE] = str(wanted)


def _threads_for(count: int) -> int:
    return max(_THREADS_PER_DEVICE * count, os.cpu_count() or 1)


def _requested_cpu_devices() -> int:
    """How many CPU devices JAX's options ask for, by configuration or environment."""
    flags = os.environ.get(_FLAGS, "")
    by_flag = max(map(int, re.findall(r"host_platform_device_count=(\d+)", flags)), default=0)
    if "jax" in sys.modules:
        import jax

        return max(by_flag, getattr(jax.config, "jax_num_cpu_devices", 0))
    by_variable = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return max(by_flag, int(by_variable) if by_variable.isdigit() else 0)


def _pool_threads() -> int | None:
    """How many threads XLA's CPU pool really has; ``None`` where this cannot be seen."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():  # only Linux shows the names of threads
        return None
    names = []
    for task in tasks.iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # the thread has ended since
            continue
    return names.count("tf_XLAEigen")
