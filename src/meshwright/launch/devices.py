"""The devices of each place for a process on this host: virtual CPU devices, or its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import ClusterError
from ..topology import virtual_device_variables

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_variables(
    places: int, devices: int | None, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """For each place the variables that give a process there its devices.

    ``devices`` virtual CPU devices, or else an even share of the GPUs. Raises
    :class:`~meshwright.errors.ClusterError` where GPUs cannot be shared out evenly.

    >>> device_variables(2, None, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    [{'CUDA_VISIBLE_DEVICES': '4,5'}, {'CUDA_VISIBLE_DEVICES': '6,7'}]
    """
    if devices is not None:
        return [virtual_device_variables(devices, environment)] * places
    gpus = _gpus(environment)
    if not gpus or environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return [{}] * places
    share, rest = divmod(len(gpus), places)
    if rest:
        raise ClusterError(
            f"{len(gpus)} GPUs ({', '.join(gpus)}) cannot be shared out evenly among "
            f"{places} processes. Set {_VISIBLE}, or choose another --processes "
            "(--devices N makes CPU devices instead)."
        )
    return [{_VISIBLE: ",".join(gpus[p * share : (p + 1) * share])} for p in range(places)]


def _gpus(environment: Mapping[str, str]) -> list[str]:
    """The names of the GPUs that this process may use."""
    visible = environment.get(_VISIBLE)
    if visible is not None:
        return [name for name in visible.split(",") if name]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted(found, key=int)
