"""Absent GPUs, described for XLA's compiler.

XLA compiles for a GPU by a description of it, which it otherwise asks of the driver; here it is
made from what is published. What limits a kernel is given by the compute capability (NVIDIA, CUDA
C++ Programming Guide, "Technical Specifications per Compute Capability"), the rest by the chip
(white papers of the A100, H100 and Blackwell architectures; OpenXLA describes the same chips in
``xla/backends/gpu/target_config/specs``). Memory and its bandwidth are those of ``chips.toml``.
Nothing can be run, so nothing is autotuned: XLA then takes its default tiles for each kernel.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from ..errors import TargetError
from .hardware import hardware_of
from .target import Target

NOT_TUNED = (
    "compiled without a GPU, so XLA could not autotune: kernels of products and convolutions, and "
    "the memory that they work in, may be others on a real one"
)
NOT_INSTALLED = (
    "steps for {} are compiled by XLA for GPUs, which is not installed; no GPU is needed. On "
    "Linux, pip install 'meshwright[cuda]' adds it, some gigabytes"
)
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclass(frozen=True)
class _Capability:
    """What all chips of a compute capability share; bytes, and units of one multiprocessor."""

    major: int
    has_own_features: bool  # compiled for as sm_90a, sm_100a: what only this one has is used
    shared_bytes: int  # of memory in a multiprocessor; a block has at most 1 KiB less
    float_units: int


@dataclass(frozen=True)
class _Chip:
    """What a chip has of its own."""

    name: str
    capability: _Capability
    multiprocessors: int
    clock_ghz: float  # the highest
    cache_bytes: int  # of the second level


_AMPERE = _Capability(8, False, 164 << 10, 64)
_HOPPER = _Capability(9, True, 228 << 10, 128)
_BLACKWELL = _Capability(10, True, 228 << 10, 128)
_CHIPS = {
    "a100": _Chip("NVIDIA A100-SXM4-80GB", _AMPERE, 108, 1.41, 40 << 20),
    "h100": _Chip("NVIDIA H100 80GB HBM3", _HOPPER, 132, 1.98, 50 << 20),
    "h200": _Chip("NVIDIA H200", _HOPPER, 132, 1.98, 50 << 20),
    "b200": _Chip("NVIDIA B200", _BLACKWELL, 148, 1.965, 126 << 20),
}


def described(target: Target) -> dict[str, str]:
    """What a compiling process has to know of absent GPUs, as texts.

    ``"topology"`` counts partitions, hosts of each and GPUs of each, as XLA does. ``"config"`` is
    its ``GpuTargetConfigProto``, and ``"compiler"`` the version of what compiles. Raises
    :class:`~meshwright.TargetError` if JAX for GPUs is not installed, or no such nodes are built.
    """
    topology = topology_of(target)
    return {"topology": topology, "config": config_of(target), "compiler": _compiler(target)}


def topology_of(target: Target) -> str:
    """The nodes of a target in XLA's words; one number above a node's is of full nodes.

    >>> [topology_of(Target.of(text)) for text in ("h100:8", "h200:2x8", "h100:32", "a100:2x4")]
    ['1x1x8', '2x1x8', '4x1x8', '2x1x4']
    """
    full = hardware_of(target).devices_per_node or target.num_devices
    per_node = target.topology[-1]
    if len(target.topology) == 1 and per_node > full:
        if per_node % full:
            raise TargetError(
                f"{per_node} GPUs do not make nodes of {full}. Write nodes x GPUs of each, such as "
                f"'{target.kind}:{-(-per_node // full)}x{full}'."
            )
        per_node = full
    return f"{target.num_devices // per_node}x1x{per_node}"


def config_of(target: Target) -> str:
    """The description of the target's GPU that XLA takes, a ``GpuTargetConfigProto`` as text."""
    chip, hardware = _CHIPS[target.kind], hardware_of(target)
    capability = chip.capability
    features = "ACCELERATED_FEATURES" if capability.has_own_features else "NONE"
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_block_optin": capability.shared_bytes - (1 << 10),
        "shared_memory_per_core": capability.shared_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "core_count": chip.multiprocessors,
        "fpus_per_core": capability.float_units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "memory_bandwidth": int(hardware.memory_bandwidth_bytes_per_s or 0),
        "device_memory_size": int(hardware.memory_bytes or 0),
        "l2_cache_size": chip.cache_bytes,
        "clock_rate_ghz": chip.clock_ghz,
    }
    lines = [f"  {name}: {value}" for name, value in device.items()]
    lines.append(
        f"  cuda_compute_capability {{ major: {capability.major} feature_extension: {features} }}"
    )
    inner = "\n".join(lines)
    return (
        f"gpu_device_info {{\n{inner}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 }\n"
        f'device_description_str: "{chip.name}"\n'
    )


def _compiler(target: Target) -> str:
    if (result := compiler()) is None:
        raise TargetError(f"{NOT_INSTALLED.format(target)}.")
    return result


def compiler() -> str | None:
    """What compiles for GPUs, with its version; ``None`` where nothing here does."""
    for package in _PLUGINS:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
