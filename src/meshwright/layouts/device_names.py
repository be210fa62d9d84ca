"""Devices by their names: ``"cpu:3"``, and ``"cpu:0-7"`` for several."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from .. import indices, topology
from ..errors import MeshError


def named_devices(devices: Sequence[Any], platform: str | None) -> list[Any]:
    """JAX devices for a mixture of devices and names such as ``"cpu:3"``."""
    if isinstance(devices, str) or not hasattr(devices, "__iter__"):
        raise MeshError(
            f"devices={devices!r}: expected a list of JAX devices or of their names, such as "
            "['cpu:0', 'cpu:1']."
        )
    members, faults = [], []
    for device in devices:
        is_name = isinstance(device, str)
        resolved: Any = _device_called(device, platform) if is_name else device
        if is_name and resolved is None:
            faults.append(f"there is no device {device!r}. {_devices_there(device, platform)}")
        elif not hasattr(resolved, "platform"):
            faults.append(
                f"expected a JAX device or its name, such as 'cpu:3'; received {device!r}."
            )
        elif platform not in (None, resolved.platform, "cuda", "rocm"):  # both are JAX's "gpu"
            faults.append(f"device {device!r} is not of platform {platform!r}.")
        members.append(resolved)
    if not members:
        faults.append("devices=[] is empty; leave it out to use all devices.")
    if faults:
        raise MeshError("\n".join(faults))
    return members


def present_devices(platform: str, ids: Iterable[int]) -> tuple[Any, ...] | None:
    """The devices of these ids if all of them are here already, else ``None``."""
    here = topology.running_devices(platform)
    numbers = list(ids)
    return tuple(here[i] for i in numbers) if all(i in here for i in numbers) else None


def _device_called(name: str, platform: str | None) -> Any | None:
    kind, _, number = name.lower().rpartition(":")
    by_id = {str(device.id): device for device in topology.devices(kind or platform)}
    return by_id.get(number)


def _devices_there(name: str, platform: str | None) -> str:
    there = topology.devices(name.lower().rpartition(":")[0] or platform)
    return f"JAX has {devices_text(tuple(there))}."


def devices_text(devices: tuple[Any, ...]) -> str:
    return f"{devices[0].platform}:{_ranges([d.id for d in devices])}"


def _ranges(ids: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2,5"``; the order is kept."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in indices.runs(ids))


def parse_ids(ids: str, num_devices: int, text: str) -> list[int]:
    runs = []
    for run in ids.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", run)
        first, last = map(int, (match[1], match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise MeshError(f"invalid devices after '@' in {text!r}; write 'cpu:0-7' or 'cpu:0,2'.")
        runs.append((first, last))
    count = sum(last - first + 1 for first, last in runs)
    if count != num_devices:
        raise MeshError(f"{text!r} names {count} device(s), but its axes make {num_devices}.")
    return [i for first, last in runs for i in range(first, last + 1)]
