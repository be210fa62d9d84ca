"""What is installed here and what is missing: packages, devices, the CPU pool, data.

Every check is guarded: a broken package becomes a line of the report, never a traceback.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .. import topology
from ..extras import version_of

State = Literal["ok", "missing", "broken"]

_PURPOSES = {  # of distributions that are required, and of extras
    "jax": "arrays, compilation, devices",
    "jaxlib": "the compiler behind JAX",
    "keras": "models, layers, optimizers",
    "numpy": "arrays on the host",
    "click": "the command line",
    "rich": "tables and progress in the terminal",
    "jinja2": "pages of reports and views in notebooks",
    "ml-dtypes": "bfloat16 and other small floats",
    "pyzmq": "messages between tasks of a cluster",
    "msgpack": "messages between tasks of a cluster",
    "cloudpickle": "functions sent to workers",
    "flatbuffers": "exported training steps",
    "optax": "optimizers for plain JAX programs",
    "checkpoint": "saving and resuming runs",
    "grain": "Grain datasets as input",
    "parquet": "Parquet files of mw.shard",
    "plan": "the solver of mw.plan",
    "serve": "the HTTP server of models",
    "grpc": "serving models over gRPC",
    "telemetry": "traces of requests by OpenTelemetry",
    "tpu": "TPUs, and compiling for absent ones",
    "cuda": "NVIDIA GPUs, and compiling for absent ones",
    "ray": "processes on a Ray cluster (mw.RayLauncher)",
    "spark": "processes on Spark's executors (mw.SparkLauncher)",
}
_FOR_DEVELOPERS = ("dev", "browser", "clients", "docs")
_CUDA = "cuda"  # some gigabytes: advised only where there is a GPU
# What `jax[...]` of an extra installs, any of which will do.
_INSTALLED_BY = {
    "tpu": ("libtpu",),
    _CUDA: ("jax-cuda13-plugin", "jax-cuda12-plugin"),
}
_MODULES = {"pyzmq": "zmq"}  # where the import has another name
_VARIABLES = ("KERAS_BACKEND", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "NPROC")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Package:
    """One package: its version if it is installed, and its fault if it has one."""

    name: str
    version: str | None
    required: bool
    purpose: str
    requirement: str  # with the versions that Meshwright supports
    fault: str = ""
    extra: str = ""  # the extra of Meshwright that installs it

    @property
    def state(self) -> State:
        """Whether it can be used."""
        return "broken" if self.fault else "ok" if self.version else "missing"

    @property
    def is_amiss(self) -> bool:
        """Whether it is missing or broken."""
        return self.state != "ok"


@dataclass(frozen=True)
class Device:
    """One device that JAX has; ``memory_bytes`` is ``None`` where the device does not report it."""

    id: int
    platform: str
    kind: str
    process: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Diagnosis:
    """The whole report. ``faults`` keep Meshwright from working, ``notes`` do not."""

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
        """The pip command that repairs required packages; ``None`` if none is missing or broken."""
        missing = [
            package.requirement
            for package in self.packages
            if package.required and package.is_amiss
        ]
        quoted = (
            f'"{requirement}"' if re.search(r"[^\w.-]", requirement) else requirement
            for requirement in missing
        )
        return f"pip install {' '.join(quoted)}" if missing else None

    @property
    def optional_command(self) -> str | None:
        """The pip command for extras that are missing here and of use on this machine."""
        missing = [package.extra for package in self.packages if package.extra and package.is_amiss]
        has_gpu = _NVIDIA_DRIVER.exists()
        extras = dict.fromkeys(extra for extra in missing if has_gpu or extra != _CUDA)
        return f'pip install "meshwright[{",".join(extras)}]"' if extras else None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {
            "usable": self.usable,
            "command": self.command,
            "optional_command": self.optional_command,
            **asdict(self),
            "packages": [{**asdict(package), "state": package.state} for package in self.packages],
        }


def examine() -> Diagnosis:
    """Examine this installation; imports JAX and Keras and starts JAX's devices."""
    packages = _packages()
    lacking = [package for package in packages if package.required and package.is_amiss]
    faults = [f"{package.name} {package.fault or 'is not installed'}" for package in lacking]
    if not packages:
        faults = ["meshwright is not installed, only found: run `pip install -e .` in its clone"]
    devices, notes = [], []
    if not any(package.name in ("jax", "jaxlib", "numpy") for package in lacking):
        try:
            devices, notes = _devices(), _pool_notes()
        except Exception as error:  # a plugin may raise anything
            faults.append(f"JAX cannot start its devices: {_one_line(error)}")
    return Diagnosis(
        meshwright=version_of("meshwright") or "unknown",
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


def _packages() -> tuple[Package, ...]:
    """What Meshwright requires, and what its extras install, by its own metadata."""
    required, optional = [], []
    for requirement, extra in _requirements():
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if not extra:
            required.append(_required(name, requirement))
            if name == "jax":
                required.append(_required("jaxlib", "jaxlib"))
        elif extra not in _FOR_DEVELOPERS:
            optional.append(_optional(name, requirement, extra))
    return (*required, *optional)


def _required(name: str, requirement: str) -> Package:
    version = version_of(name)
    module = _MODULES.get(name, name.replace("-", "_"))
    fault = "" if version is None else _import_fault(module) or _range_fault(requirement, version)
    return Package(name, version, True, _PURPOSES.get(name, ""), requirement, fault)


def _optional(name: str, requirement: str, extra: str) -> Package:
    purpose = _PURPOSES.get(extra, "")
    names = _INSTALLED_BY.get(extra, (name,))
    for candidate in names:
        version = version_of(candidate)
        if version is not None:
            fault = _range_fault(requirement, version) if candidate == name else ""
            return Package(candidate, version, False, purpose, requirement, fault, extra)
    return Package(names[0], None, False, purpose, requirement, "", extra)


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
    specifier = Requirement(requirement).specifier
    if specifier.contains(version, prereleases=True):
        return ""
    return f"{version} is installed; {specifier} is required"


def _requirements() -> list[tuple[str, str]]:
    """What our own metadata asks for, each with its extra: ``("optax>=0.2.5", "optax")``."""
    try:
        lines = importlib.metadata.requires("meshwright") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    pairs = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"""extra\s*==\s*['"]([\w.-]+)['"]""", marker)
        pairs.append((requirement.strip(), extra[1] if extra else ""))
    return pairs


# Devices


def _devices() -> list[Device]:
    import jax

    topology.settle_cpu_pool()
    devices = list(jax.devices())
    if devices[0].platform != "cpu":
        devices += jax.devices("cpu")
    return [
        Device(
            device.id,
            device.platform,
            device.device_kind,
            device.process_index,
            _memory_bytes(device),
        )
        for device in devices
    ]


def _memory_bytes(device: Any) -> int | None:
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except Exception:  # not every backend can answer
        return None


def _pool_notes() -> list[str]:
    """The warning about the CPU pool that training would give, if any."""
    import jax

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        topology.warn_if_cpu_pool_is_small(jax.local_device_count("cpu"))
    return [str(warning.message) for warning in caught]


def _gpu_notes(devices: list[Device]) -> list[str]:
    is_visible = any(device.platform in ("gpu", "cuda") for device in devices)
    if is_visible or not _NVIDIA_DRIVER.exists():
        return []
    return [
        "this machine has an NVIDIA driver, but JAX sees no GPU: "
        'install what it needs with pip install "meshwright[cuda]".'
    ]


# Data and words


def _data() -> str:
    """Where the digits for the demo would come from."""
    try:
        from ..data.datasets import cache_files

        cached = [path for path in cache_files() if path.is_file()]
        if cached:
            return f"MNIST in Keras' cache: {cached[0]} ({cached[0].stat().st_size:,} bytes)"
        return (
            f"no MNIST in Keras' cache ({cache_files()[0]}): the demo downloads it, or uses the "
            "subset that ships with Meshwright"
        )
    except Exception as error:  # NumPy may be the broken package
        return f"unknown: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
