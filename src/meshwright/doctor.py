"""What this installation has and lacks: packages, devices, the CPU pool, data; found, not guessed.

Everything is looked at under protection: a broken package becomes a finding, never a traceback.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from . import topology

State = Literal["ok", "missing", "broken"]

_REQUIRED = {
    "jax": "arrays, compilation, devices",
    "jaxlib": "the compiler behind JAX",
    "keras": "models, layers, optimizers",
    "numpy": "arrays on the host",
    "click": "this program",
    "rich": "tables and progress in the terminal",
}
_JAX_FOR_GPUS, _FOR_GPUS = "jax[cuda13]", "NVIDIA GPUs"  # some gigabytes: only where there is one
_OPTIONAL = {  # distributions, any of which will do -> what pip calls them, purpose
    ("optax",): ("optax", "optimizers for plain JAX models"),
    ("orbax-checkpoint",): ("orbax-checkpoint", "checkpoints"),
    ("grain",): ("grain", "input pipelines"),
    ("libtpu",): ("libtpu", "TPUs, and compiling for absent ones"),
    ("jax-cuda13-plugin", "jax-cuda12-plugin"): (_JAX_FOR_GPUS, _FOR_GPUS),
}
_VARIABLES = ("KERAS_BACKEND", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "NPROC")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Package:
    """One package: its version if it is there, and what is wrong with it if something is."""

    name: str
    version: str | None
    required: bool
    purpose: str
    requirement: str  # what to give to pip
    fault: str = ""

    @property
    def state(self) -> State:
        """Whether it can be used."""
        return "broken" if self.fault else "ok" if self.version else "missing"


@dataclass(frozen=True)
class Device:
    """One device that JAX has; ``memory_bytes`` where the device tells it."""

    id: int
    platform: str
    kind: str
    process: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Diagnosis:
    """All that was found. ``faults`` keep Meshwright from working, ``notes`` do not."""

    meshwright: str
    python: str
    system: str
    cores: int
    packages: tuple[Package, ...]
    devices: tuple[Device, ...]
    process_index: int
    process_count: int
    environment: dict[str, str | None]
    data: str
    faults: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether everything that is required works."""
        return not self.faults

    @property
    def command(self) -> str | None:
        """The pip command that mends what is required, if something is to be mended."""
        return _pip_install(p for p in self.packages if p.required and p.state != "ok")

    @property
    def optional_command(self) -> str | None:
        """The pip command for what is optional, not there, and of use on this machine."""
        absent = [each for each in self.packages if not each.required and each.state != "ok"]
        gpu = _NVIDIA_DRIVER.exists()
        return _pip_install(each for each in absent if gpu or each.purpose != _FOR_GPUS)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {
            "usable": self.usable,
            "command": self.command,
            "optional_command": self.optional_command,
            **asdict(self),
            "packages": [{**asdict(each), "state": each.state} for each in self.packages],
        }


def examine() -> Diagnosis:
    """Look at everything; this imports JAX and Keras and starts JAX's devices."""
    packages = (
        *(_required(name, purpose) for name, purpose in _REQUIRED.items()),
        *(_optional(names, *rest) for names, rest in _OPTIONAL.items()),
    )
    lacking = [each for each in packages if each.required and each.state != "ok"]
    faults = [f"{each.name} {each.fault or 'is not installed'}" for each in lacking]
    devices, notes = [], []
    if not any(each.name in ("jax", "jaxlib", "numpy") for each in lacking):
        try:
            devices, notes = _devices(), _pool_notes()
        except Exception as error:  # whatever a plugin may throw is a finding
            faults.append(f"JAX cannot start its devices: {_one_line(error)}")
    return Diagnosis(
        meshwright=_version("meshwright") or "unknown",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        packages=packages,
        devices=tuple(devices),
        process_index=topology.process_index() if devices else 0,
        process_count=len({device.process for device in devices}) or 1,
        environment={name: os.environ.get(name) for name in _VARIABLES},
        data=_data(),
        faults=tuple(faults),
        notes=(*notes, *_gpu_notes(devices)),
    )


# Packages


def _required(name: str, purpose: str) -> Package:
    version, requirement = _version(name), _requirements().get(name, name)
    fault = "" if version is None else _import_fault(name) or _range_fault(requirement, version)
    return Package(name, version, True, purpose, requirement, fault)


def _optional(names: tuple[str, ...], requirement: str, purpose: str) -> Package:
    for name in names:
        version = _version(name)
        if version is not None:
            return Package(name, version, False, purpose, requirement)
    return Package(names[0], None, False, purpose, requirement)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_fault(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package may throw anything
        return f"cannot be imported: {_one_line(error)}"
    return ""


def _range_fault(requirement: str, version: str) -> str:
    try:
        from packaging.requirements import Requirement
    except ImportError:  # it comes with Keras; without Keras there is a greater fault than this
        return ""
    wanted = Requirement(requirement).specifier
    if wanted.contains(version, prereleases=True):
        return ""
    return f"{version} is installed, and {wanted} is needed"


def _requirements() -> dict[str, str]:
    """What our own metadata asks for, by name: ``{"jax": "jax<0.12,>=0.10"}``."""
    try:
        lines = importlib.metadata.requires("meshwright") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    always = (line.partition(";")[0].strip() for line in lines if "extra ==" not in line)
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0]: line for line in always}


def _pip_install(packages: Iterable[Package]) -> str | None:
    wanted = [each.requirement for each in packages]
    quoted = (f'"{each}"' if re.search(r"[^\w.-]", each) else each for each in wanted)
    return f"pip install {' '.join(quoted)}" if wanted else None


# Devices


def _devices() -> list[Device]:
    import jax

    topology.settle_cpu_pool()
    found = list(jax.devices())
    if found[0].platform != "cpu":
        found += jax.devices("cpu")
    return [
        Device(each.id, each.platform, each.device_kind, each.process_index, _memory_bytes(each))
        for each in found
    ]


def _memory_bytes(device: Any) -> int | None:
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except Exception:  # not every backend has the question
        return None


def _pool_notes() -> list[str]:
    """What is to be said about the CPU pool, in the words of the warning that training gives."""
    import jax

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        topology.warn_if_cpu_pool_is_small(jax.local_device_count("cpu"))
    return [str(each.message) for each in caught]


def _gpu_notes(devices: list[Device]) -> list[str]:
    seen = any(device.platform in ("gpu", "cuda") for device in devices)
    if seen or not _NVIDIA_DRIVER.exists():
        return []
    return [
        "this machine has an NVIDIA driver, but JAX sees no GPU: "
        f'pip install "{_JAX_FOR_GPUS}" adds what is missing.'
    ]


# Data and words


def _data() -> str:
    """Where the digits for the demo would come from."""
    try:
        from .datasets import cache_files

        found = [path for path in cache_files() if path.is_file()]
        if found:
            return f"MNIST in Keras' cache: {found[0]} ({found[0].stat().st_size:,} bytes)"
        return (
            f"no MNIST in Keras' cache ({cache_files()[0]}): the demo downloads it, or uses the "
            "subset that is part of Meshwright"
        )
    except Exception as error:  # NumPy may be the broken package
        return f"cannot be looked for: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
