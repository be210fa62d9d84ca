"""The target: a kind and number of devices to compile for, present or not."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import TargetError
from ..layouts.mesh import Mesh


class _Kind(NamedTuple):
    """What is known of one kind of device."""

    platform: str  # in JAX's words
    rank: int  # numbers in the topology; one where it is just a count
    devices_per_chip: int = 1
    comes_in_nodes: bool = False  # which may stand before the count: 2x8 are two of eight


# TPU v2 and v3 show each core of a chip as a device, TPU7x each of its two chiplets.
_KINDS = {
    "cpu": _Kind("cpu", 1),
    "v2": _Kind("tpu", 2, 2),
    "v3": _Kind("tpu", 2, 2),
    "v4": _Kind("tpu", 3),
    "v5e": _Kind("tpu", 2),
    "v5p": _Kind("tpu", 3),
    "v6e": _Kind("tpu", 2),
    "tpu7x": _Kind("tpu", 3, 2),
    "a100": _Kind("cuda", 1, comes_in_nodes=True),
    "h100": _Kind("cuda", 1, comes_in_nodes=True),
    "h200": _Kind("cuda", 1, comes_in_nodes=True),
    "b200": _Kind("cuda", 1, comes_in_nodes=True),
}


@dataclass(frozen=True)
class Target:
    """A kind of device and how many, such as 16 TPU v5e in a grid of 4 x 4.

    ``topology`` counts TPU chips along the directions of their network, or is the number of CPU
    devices or GPUs, or that of nodes and of the GPUs in each. ``slices`` TPU slices of that
    topology are joined by the network of the data centre. ``str(target)`` reads as
    :meth:`from_string` takes it. Raises :class:`~meshwright.errors.TargetError`.

    >>> target = Target.from_string("v5e:4x4")
    >>> target.platform, target.kind, target.topology, target.num_devices
    ('tpu', 'v5e', (4, 4), 16)
    >>> Target.from_string("v5e:2x(4x4)").num_devices
    32
    """

    kind: str
    topology: tuple[int, ...]
    slices: int = 1

    def __post_init__(self) -> None:
        kind = _KINDS.get(self.kind)
        if kind is None:
            near = difflib.get_close_matches(self.kind, _KINDS, n=2, cutoff=0.6)
            hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise TargetError(
                f"unknown kind of target {self.kind!r}. {hint}Known are {', '.join(_KINDS)}."
            )
        ranks = (kind.rank, kind.rank + kind.comes_in_nodes)
        if len(self.topology) not in ranks or min(self.topology) < 1:
            example = "x".join("248"[: kind.rank])
            more = f" or, for two nodes, '{self.kind}:2x8'" if kind.comes_in_nodes else ""
            if kind.platform == "tpu":
                more = f" or, for two slices, '{self.kind}:2x({example})'"
            raise TargetError(
                f"a target of kind {self.kind!r} has {kind.rank} number(s), at least 1, such as "
                f"'{self.kind}:{example}'{more}; received {'x'.join(map(str, self.topology))!r}."
            )
        if self.slices < 1:
            raise TargetError(f"a target has 1 slice or more; received {self.slices}.")
        if self.slices > 1 and kind.platform != "tpu":
            count = f"{self.slices}x{self.topology[-1]}"
            way_out = f"Write nodes x GPUs of each, such as '{self.kind}:{count}'."
            if not kind.comes_in_nodes:
                way_out = f"Write their number, such as '{self.kind}:{self.num_devices}'."
            raise TargetError(f"only TPUs come in slices; received {str(self)!r}. {way_out}")

    @classmethod
    def from_string(cls, text: str) -> Target:
        """Read ``"v5p:8x8x8"``, ``"v5e:2x(4x4)"``, ``"h200:8"``, ``"h200:2x8"``, ``"cpu:8"``.

        >>> str(Target.from_string("V5P:2x2x2"))
        'v5p:2x2x2'
        """
        count = r"\d+(?:x\d+)*"
        result = re.fullmatch(rf"\s*(\w+):(?:({count})|(\d+)x\(({count})\))\s*", text)
        if result is None:
            raise TargetError(
                "expected a target such as 'v5e:4x4', 'v5e:2x(4x4)', 'h200:8' or 'cpu:8'; "
                f"received {text!r}. Known kinds are {', '.join(_KINDS)}."
            )
        kind, alone, slices, of_each = result.groups()
        topology = tuple(map(int, (alone or of_each).split("x")))
        return cls(kind.lower(), topology, int(slices or 1))

    @classmethod
    def of(cls, target: Target | str) -> Target:
        """The target itself, or the one that a text names.

        Raises :class:`~meshwright.TargetError` for anything else.
        """
        if isinstance(target, str):
            return cls.from_string(target)
        if not isinstance(target, Target):
            raise TargetError(f"expected a target such as 'h100:8'; received {target!r}.")
        return target

    @property
    def platform(self) -> str:
        """``"cpu"``, ``"tpu"`` or ``"cuda"``."""
        return _KINDS[self.kind].platform

    @property
    def num_devices(self) -> int:
        """How many devices JAX sees there; a TPU chip of some kinds is two.

        >>> Target("v3", (2, 2)).num_devices
        8
        """
        return self.slices * self.devices_per_slice

    @property
    def devices_per_slice(self) -> int:
        """How many devices one TPU slice has; all devices of another target.

        >>> Target.of("v5p:2x(2x2x2)").devices_per_slice
        8
        """
        return math.prod(self.topology) * _KINDS[self.kind].devices_per_chip

    @property
    def devices_per_node(self) -> int | None:
        """GPUs in one node, where the target says it; ``None`` where its kind does.

        >>> Target.of("h200:2x4").devices_per_node
        4
        """
        in_nodes = len(self.topology) > _KINDS[self.kind].rank
        return self.topology[-1] if in_nodes else None

    def part(self, num_devices: int) -> Target:
        """A target of the same kind with ``num_devices`` of the devices.

        Raises :class:`~meshwright.TargetError` where they are none, as half a node more, or a part
        of a TPU slice.

        >>> str(Target.of("h200:2x8").part(4)), str(Target.of("h200:4x8").part(16))
        ('h200:4', 'h200:2x8')
        >>> str(Target.of("v5e:4x(4x4)").part(32))
        'v5e:2x(4x4)'
        """
        if num_devices == self.num_devices:
            return self
        if self.slices > 1 and num_devices % self.devices_per_slice == 0:
            return replace(self, slices=num_devices // self.devices_per_slice)
        in_node = self.devices_per_node
        if self.platform != "tpu" and num_devices <= (in_node or self.num_devices):
            return Target(self.kind, (num_devices,))
        if in_node is not None and num_devices % in_node == 0:
            return Target(self.kind, (num_devices // in_node, in_node))
        raise TargetError(f"{num_devices} devices of {self} cannot be a target of their own.")

    def __str__(self) -> str:
        of_each = "x".join(map(str, self.topology))
        of_all = f"{self.slices}x({of_each})" if self.slices > 1 else of_each
        return f"{self.kind}:{of_all}"


def check_size(mesh: Mesh, target: Target) -> None:
    """Raise :class:`~meshwright.TargetError` unless a mesh has as many devices as the target.

    >>> check_size(Mesh({"batch": 4, "model": 2}), Target.of("v5e:2x4"))
    """
    if mesh.size != target.num_devices:
        raise TargetError(
            f"the step is laid out over {mesh.size} devices ({mesh.axes_text}), and the target "
            f"{target} has {target.num_devices}. Make a mesh of {target.num_devices}, or choose "
            "another target."
        )
