"""The devices of each place for a process on this host: virtual CPU devices, GPUs, TPU chips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import ClusterError
from ..topology import virtual_device_variables
from .processes import free_port

_CUDA, _ROCM, _TPU = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"
_GOOGLE = "0x1ae0"  # a vendor on the PCI bus, whose network cards are there too
# jax/_src/hardware_utils.py (JAX 0.10): v3, v4, v5p, v5e, v6e, 7x
_TPU_CHIPS = frozenset(["0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"])
# jax/_src/test_multiprocess.py (JAX 0.10), by the chips of a host and the processes on it: how
# these lie in a host, and the chips of one in it.
_GRIDS = {
    (4, 2): ("2,1,1", "1,2,1"),
    (4, 4): ("2,2,1", "1,1,1"),
    (8, 8): ("4,2,1", "1,1,1"),
}


def device_variables(
    places: int,
    devices: int | None,
    environment: Mapping[str, str],
    *,
    changes: bool = False,
    root: Path = Path("/"),
) -> list[dict[str, str]]:
    """For each place the variables that give a process there its devices.

    ``devices`` virtual CPU devices, or else an even share of the GPUs or of the TPU chips.
    ``changes`` says that there may be processes on other hosts, or fewer than places; ``root`` is
    where the system lists devices. Raises :class:`~meshwright.errors.ClusterError` where they
    cannot be shared out evenly.

    >>> device_variables(2, None, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    [{'CUDA_VISIBLE_DEVICES': '4,5'}, {'CUDA_VISIBLE_DEVICES': '6,7'}]
    """
    if devices is not None:
        return [virtual_device_variables(devices, environment)] * places
    if environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return [{}] * places
    for name, listed in ((_CUDA, _cuda_gpus), (_ROCM, _rocm_gpus)):
        visible = environment.get(name)
        gpus = listed(root) if visible is None else [gpu for gpu in visible.split(",") if gpu]
        if gpus:
            return [{name: ",".join(share)} for share in _shares(gpus, places, name)]
    visible = environment.get(_TPU)
    chips = _tpu_chips(root) if visible is None else [chip for chip in visible.split(",") if chip]
    return _tpu_variables(chips, places, changes) if chips and places > 1 else [{}] * places


def _shares(gpus: Sequence[str], places: int, name: str) -> list[Sequence[str]]:
    share, rest = divmod(len(gpus), places)
    if rest:
        raise ClusterError(
            f"{len(gpus)} GPUs ({', '.join(gpus)}) cannot be shared out evenly among "
            f"{places} processes. Set {name}, or choose another --processes "
            "(--devices N makes CPU devices instead)."
        )
    return [gpus[p * share : (p + 1) * share] for p in range(places)]


def _tpu_variables(chips: Sequence[str], places: int, changes: bool) -> list[dict[str, str]]:
    """Variables of libtpu: which chips a process has, and where it meets the others of the host."""
    if (grid := _GRIDS.get((len(chips), places))) is None or changes:
        kinds = ", ".join(f"{count} chips among {number}" for count, number in _GRIDS)
        raise ClusterError(
            f"{len(chips)} TPU chips of this host cannot be shared out among {places} processes"
            f"{' of a group on several hosts, or whose number may change' * changes}. Supported, "
            f"on one host and with one number of processes: {kinds}. Use --processes 1, which has "
            "all chips of its host (--devices N makes CPU devices instead)."
        )
    ports = _free_ports(places)
    of_all = {
        "TPU_PROCESS_BOUNDS": grid[0],
        "TPU_CHIPS_PER_PROCESS_BOUNDS": grid[1],
        "TPU_PROCESS_ADDRESSES": ",".join(f"localhost:{port}" for port in ports),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a lock file lets one process load it otherwise
    }
    share = len(chips) // places
    return [
        {
            **of_all,
            "CLOUD_TPU_TASK_ID": str(place),
            "TPU_PROCESS_PORT": str(port),
            _TPU: ",".join(chips[place * share : (place + 1) * share]),
        }
        for place, port in enumerate(ports)
    ]


def _free_ports(count: int) -> list[int]:
    ports = dict.fromkeys([free_port()])
    while len(ports) < count:  # the system may name one twice
        ports[free_port()] = None
    return list(ports)


def _cuda_gpus(root: Path) -> list[str]:
    numbers = [path.name.removeprefix("nvidia") for path in root.glob("dev/nvidia[0-9]*")]
    return sorted(numbers, key=int)


def _rocm_gpus(root: Path) -> list[str]:
    """The GPUs that AMD's driver lists, beside the CPUs, which have no vector units."""
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
    lines = [line.split() for path in nodes for line in _text(path).splitlines()]
    gpus = [line for line in lines if line[:1] == ["simd_count"] and line[1:] != ["0"]]
    return [str(number) for number in range(len(gpus))]


def _tpu_chips(root: Path) -> list[str]:
    cards = root.glob("sys/bus/pci/devices/*")
    kinds = [_text(card / "device") for card in cards if _text(card / "vendor") == _GOOGLE]
    return [str(number) for number in range(sum(kind in _TPU_CHIPS for kind in kinds))]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a file of the system that this user may not read
        return ""
