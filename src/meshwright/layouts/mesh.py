"""The mesh: a named grid of devices, abstract (axes only) or bound to devices.

A :class:`Mesh` is a value: immutable, hashable, printable. Nothing in this file starts JAX, except
:func:`create_mesh` and what plainly asks for devices. The idea of a mesh whose axes have names is
that of Mesh-TensorFlow (Shazeer et al. 2018) and of TensorFlow DTensor.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .. import topology
from ..errors import MeshError, TopologyError
from ..heap import keep_freed_memory
from ..launch.elastic import most_processes
from ..views import Viewable
from ..warn import warn
from .device_names import devices_text, named_devices, parse_ids, present_devices

RESERVED = ("unsharded", "match")

AxesLike = Mapping[str, int] | Iterable[tuple[str, int]]


def axes_text(axes: Iterable[tuple[str, int]], separator: str = ", ") -> str:
    """Axes with their sizes.

    >>> axes_text([("batch", 4), ("model", 2)])
    'batch=4, model=2'
    """
    return separator.join(f"{axis}={size}" for axis, size in axes)


@dataclass(frozen=True, repr=False)
class Mesh(Viewable):
    """A named grid of devices; without devices it is abstract and can still be planned with.

    ``axes`` is a mapping or a sequence of pairs ``(name, size)``, slowest first. ``devices``, where
    given, are as many JAX devices in row-major order. Raises :class:`MeshError` and names every
    fault.

    >>> mesh = Mesh({"batch": 4, "model": 2})
    >>> print(mesh, mesh.size, mesh["model"], mesh.is_abstract)
    batch=4, model=2 8 2 True
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[Any, ...] | None = None
    name: str = field(default="", compare=False)  # a label; JAX's own meshes could not carry it

    def __init__(
        self, axes: AxesLike, devices: Iterable[Any] | None = None, name: str = ""
    ) -> None:
        pairs = _pairs(axes)
        if devices is not None:
            devices = tuple(devices)
        faults = _axis_faults(pairs) or _device_faults(pairs, devices)
        if not isinstance(name, str) or (name and not re.fullmatch(r"\w+", name)):
            faults.append(f"invalid mesh name {name!r}: use letters, digits and '_'.")
        if faults:
            raise MeshError("\n".join(faults))
        object.__setattr__(self, "axes", pairs)
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "name", name)

    def __eq__(self, other: object) -> bool:
        # Never NotImplemented: Python would then ask the other side, and an array answers with one
        # truth value per element, or raises.
        return isinstance(other, Mesh) and self._value == other._value

    @property
    def _value(self) -> tuple[Any, ...]:
        return self.axes, self.devices

    # What the mesh is

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, slowest first."""
        return tuple(axis for axis, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, slowest first."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def is_abstract(self) -> bool:
        """Whether the mesh has axes only and no devices."""
        return self.devices is None

    @property
    def is_single_device(self) -> bool:
        """Whether the mesh has one device."""
        return self.size == 1

    @property
    def platform(self) -> str | None:
        """``"cpu"``, ``"gpu"``, ``"tpu"``; ``None`` while the mesh is abstract."""
        return None if self.devices is None else self.devices[0].platform

    def axis_size(self, axis: str) -> int:
        """Size of one axis. Raises :class:`MeshError` if there is no such axis."""
        for name, size in self.axes:
            if name == axis:
                return size
        raise MeshError(
            f"axis {axis!r} is not an axis of the mesh ({self.axes_text}). "
            f"Its axes are {', '.join(map(repr, self.axis_names))}."
        )

    def __getitem__(self, axis: str) -> int:
        return self.axis_size(axis)

    def __contains__(self, axis: object) -> bool:
        return axis in self.axis_names

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart, in device positions, two neighbours on each axis are.

        >>> Mesh({"batch": 4, "model": 2}).strides
        (2, 1)
        """
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.axes)))

    def coords(self, position: int) -> dict[str, int]:
        """Where the device at ``position`` (row-major) stands on each axis.

        Raises :class:`MeshError` for a position outside the mesh.

        >>> Mesh({"batch": 4, "model": 2}).coords(5)
        {'batch': 2, 'model': 1}
        """
        if not _is_whole(position) or not 0 <= position < self.size:
            raise MeshError(
                f"there is no device at position {position!r}: the mesh ({self.axes_text}) has "
                f"positions 0 to {self.size - 1}."
            )
        return {
            axis: position // stride % size
            for (axis, size), stride in zip(self.axes, self.strides, strict=True)
        }

    def unravel_index(self) -> dict[int, dict[str, int]]:
        """Position -> coordinates, for every device."""
        return {position: self.coords(position) for position in range(self.size)}

    # Its devices

    def bound_devices(self) -> tuple[Any, ...]:
        """The devices, row-major. Raises :class:`TopologyError` if the mesh is abstract."""
        if self.devices is None:
            raise TopologyError(
                f"the mesh ({self.axes_text}) is abstract: it has axes but no devices. "
                f"Bind it with create_mesh({dict(self.axes)!r}), on a machine with "
                f"{self.size} devices or after virtual_devices({self.size})."
            )
        return self.devices

    @property
    def global_device_ids(self) -> tuple[int, ...]:
        """Ids of all devices, row-major."""
        return tuple(device.id for device in self.bound_devices())

    @property
    def local_devices(self) -> tuple[Any, ...]:
        """The devices that belong to this process, in mesh order."""
        here = topology.process_index()
        return tuple(d for d in self.bound_devices() if d.process_index == here)

    @property
    def local_device_ids(self) -> tuple[int, ...]:
        """Ids of this process's devices, in mesh order."""
        return tuple(device.id for device in self.local_devices)

    @property
    def is_remote(self) -> bool:
        """Whether none of the devices belong to this process."""
        return not self.local_devices

    # Other meshes from this one

    def update(self, **changes: Any) -> Mesh:
        """The same mesh with some of ``axes``, ``devices``, ``name`` changed."""
        return replace(self, **changes)

    def abstract(self) -> Mesh:
        """The same axes without devices."""
        return self.update(devices=None)

    def resized(self, devices: int, axis: str | None = None) -> Mesh:
        """The axes for another number of devices: one of them grows or shrinks, the others stay.

        ``axis`` is that one; without it ``batch``, or else the first axis. The result is abstract.
        Raises :class:`MeshError` where the other axes do not divide the devices.

        >>> Mesh({"batch": 4, "model": 2}).resized(6)
        Mesh({'batch': 3, 'model': 2})
        """
        changes = axis or ("batch" if "batch" in self else self.axis_names[0])
        others = self.size // self.axis_size(changes)
        if not _is_whole(devices) or devices < 1 or devices % others:
            rest = axes_text((name, size) for name, size in self.axes if name != changes)
            raise MeshError(
                f"the mesh ({self.axes_text}) cannot be made for {devices} devices by changing "
                f"{changes!r}: {rest} needs a multiple of {others}."
            )
        sizes = {name: devices // others if name == changes else n for name, n in self.axes}
        return Mesh(sizes, name=self.name)

    def host_mesh(self) -> Mesh:
        """The same grid on the CPU devices of this machine; starts JAX's CPU client."""
        return create_mesh(self.axes, devices=topology.devices("cpu")[: self.size])

    @classmethod
    def from_device(cls, device: Any, axis: str = "batch") -> Mesh:
        """A mesh of one device."""
        return cls([(axis, 1)], [device])

    # JAX's word for it

    @functools.cached_property
    def jax_mesh(self) -> Any:
        """The same as ``jax.sharding.Mesh``, or ``AbstractMesh`` while there are no devices."""
        return _jax_mesh(self.axes, self.devices)

    @classmethod
    def from_jax(cls, mesh: Any) -> Mesh:
        """A :class:`Mesh` from a ``jax.sharding.Mesh`` or ``AbstractMesh``; JAX's have no name."""
        import jax

        pairs = zip(mesh.axis_names, mesh.axis_sizes, strict=True)
        abstract = isinstance(mesh, jax.sharding.AbstractMesh)
        return cls(pairs, None if abstract else mesh.devices.flat)

    # As text and as pickle

    @property
    def axes_text(self) -> str:
        """``"batch=4, model=2"``."""
        return axes_text(self.axes)

    def __str__(self) -> str:
        name = f"{self.name}: " if self.name else ""
        where = "" if self.devices is None else f" @ {devices_text(self.devices)}"
        return f"{name}{self.axes_text}{where}"

    def __repr__(self) -> str:
        name = f", name={self.name!r}" if self.name else ""
        where = "" if self.devices is None else f", devices=<{devices_text(self.devices)}>"
        return f"Mesh({dict(self.axes)!r}{where}{name})"

    @classmethod
    def from_string(cls, text: str) -> Mesh:
        """Read what ``str(mesh)`` wrote.

        The devices named in the text are bound if JAX is running here and has them all; else the
        mesh comes back abstract. Reading never starts a device. Raises :class:`MeshError`.

        >>> Mesh.from_string("batch=4, model=2")
        Mesh({'batch': 4, 'model': 2})
        """
        match = re.fullmatch(r"\s*(?:(\w+):)?([^@]*)(?:@\s*(\w+):([\d,\- ]+))?", text)
        if match is None:
            raise _no_mesh(text)
        name, axes, platform, ids = match.groups()
        mesh = cls(_parse_axes(axes, text), name=name or "")
        if ids is None:
            return mesh
        named = parse_ids(ids, mesh.size, text)
        return mesh.update(devices=present_devices(platform, named))

    def __reduce__(self) -> tuple[Any, ...]:
        named = None
        if self.devices is not None:
            named = tuple((d.platform, d.id) for d in self.devices)
        return _unpickle, (self.axes, named, self.name)


def create_mesh(
    axes: AxesLike | None = None,
    devices: Sequence[Any] | None = None,
    platform: str | None = None,
    name: str = "",
) -> Mesh:
    """Bind named axes to devices; this starts JAX.

    ``axes``: pairs or a mapping; one size may be ``-1``, meaning "the rest"; without axes, one axis
    ``"x"`` over all devices. ``devices``: JAX devices or names such as ``"cpu:3"``, in row-major
    order; by default all of ``platform``, or of JAX's default platform. On TPUs the order follows
    the interconnect. ``name`` tells apart meshes of the same axes. In an elastic group, sizes for
    all of its processes are changed as by :meth:`Mesh.resized` while there are fewer. Raises
    :class:`MeshError` if the sizes do not multiply to the number of devices, and
    :class:`TopologyError` if there are no devices of that platform here.

    >>> print(create_mesh({"batch": -1, "model": 2}))
    batch=4, model=2 @ cpu:0-7
    """
    members = topology.devices(platform) if devices is None else named_devices(devices, platform)
    pairs = _pairs({"x": -1} if axes is None else axes)
    faults = _axis_faults(pairs, wildcard=True)
    if faults:
        raise MeshError("\n".join(faults))
    pairs = _fill_in(pairs, len(members))
    if devices is None:
        pairs = _for_those_here(pairs, len(members))
    if math.prod(size for _, size in pairs) != len(members):
        raise MeshError(_wrong_count(pairs, members, devices is None))
    if devices is None:
        members = topology.in_mesh_order([size for _, size in pairs], members)
    mesh = Mesh(pairs, members, name)
    if mesh.platform == "cpu":
        topology.warn_if_cpu_pool_is_small(len(mesh.local_devices))
        keep_freed_memory()
    return mesh


# The checks, each returning the faults it found


def is_axis_name(name: object) -> bool:
    """Whether an axis can be called so: a text of letters, digits and '_', no digit first."""
    return isinstance(name, str) and re.fullmatch(r"[^\W\d]\w*", name) is not None


def _is_whole(number: object) -> bool:
    return hasattr(number, "__index__") and not isinstance(number, bool)


def _pairs(axes: AxesLike) -> tuple[tuple[str, int], ...]:
    items: Any = axes.items() if isinstance(axes, Mapping) else axes
    try:
        # NumPy's whole numbers become Python's, so that equal meshes print alike.
        return tuple(
            (axis, operator.index(size) if _is_whole(size) else size) for axis, size in items
        )
    except (TypeError, ValueError):
        raise MeshError(
            f"axes must be pairs (name, size) or a mapping, such as {{'batch': 4, 'model': 2}}; "
            f"received {axes!r}.{way_from_jax(axes)}"
        ) from None


def way_from_jax(value: object) -> str:
    """A sentence for those who pass JAX's own mesh where one of ours is expected."""
    is_of_jax = hasattr(value, "axis_types")
    return " mw.Mesh.from_jax(mesh) makes one from a JAX mesh." if is_of_jax else ""


def _axis_faults(pairs: tuple[tuple[str, int], ...], wildcard: bool = False) -> list[str]:
    if not pairs:
        return ["a mesh needs at least one axis; for one device write {'batch': 1}."]
    names = [axis for axis, _ in pairs]
    faults = []
    for axis in names:
        if not is_axis_name(axis):
            faults.append(
                f"invalid axis name {axis!r}: use letters, digits and '_', not beginning with a "
                "digit."
            )
    for axis, times in Counter(filter(is_axis_name, names)).items():
        if axis in RESERVED:
            faults.append(f"{axis!r} is a reserved name; choose another axis name.")
        elif times > 1:
            faults.append(
                f"axis {axis!r} appears {times} times in {names}; axis names must be unique."
            )
    for axis, size in pairs:
        if not _is_whole(size) or (size < 1 and not (wildcard and size == -1)):
            allowed = "a whole number, at least 1" + (", or -1 once" if wildcard else "")
            faults.append(f"axis {axis!r} has size {size!r}; a size must be {allowed}.")
    if [size for _, size in pairs].count(-1) > 1:
        faults.append(
            "-1 ('the rest') is given for more than one axis; only one size can be inferred."
        )
    return faults


def _device_faults(
    pairs: tuple[tuple[str, int], ...], devices: tuple[Any, ...] | None
) -> list[str]:
    if devices is None:
        return []
    strangers = [d for d in devices if not hasattr(d, "platform")]
    if strangers:
        return [f"expected JAX devices; received {', '.join(map(repr, strangers))}."]
    faults = []
    total = math.prod(size for _, size in pairs)
    if total != len(devices):
        faults.append(_wrong_count(pairs, devices, may_shrink=False))
    twice = [str(device) for device, times in Counter(devices).items() if times > 1]
    if twice:
        faults.append(f"the same device appears twice in the mesh: {', '.join(twice)}.")
    platforms = sorted({d.platform for d in devices})
    if len(platforms) > 1:
        faults.append(f"the devices are of different platforms: {', '.join(platforms)}.")
    return faults


def _wrong_count(
    pairs: tuple[tuple[str, int], ...], devices: Sequence[Any], may_shrink: bool
) -> str:
    total = math.prod(size for _, size in pairs)
    sizes = " x ".join(f"{axis}={size}" for axis, size in pairs)
    message = f"{sizes} makes {total} devices, but there are {len(devices)}."
    if may_shrink and total < len(devices):
        return f"{message} To use the first {total}, pass devices=jax.devices()[:{total}]."
    if total > len(devices) and devices and devices[0].platform == "cpu":
        each, rest = divmod(total, count := topology.process_count())
        if count > 1 and not rest:  # devices of a group are counted before the program begins
            return (
                f"{message} Each of the {count} processes needs {each} devices: start them with "
                f"`meshwright launch --devices {each}`, or let one axis be -1."
            )
        return (
            f"{message} Call meshwright.virtual_devices({total}) at the start of the program, "
            "or let one axis be -1."
        )
    return f"{message} Let one axis be -1 to take the rest, or change the sizes."


def _fill_in(pairs: tuple[tuple[str, int], ...], count: int) -> tuple[tuple[str, int], ...]:
    product = math.prod(size for _, size in pairs if size != -1)
    if all(size != -1 for _, size in pairs):
        return pairs
    if count % product:
        sizes = ", ".join(f"{axis}={size}" for axis, size in pairs)
        raise MeshError(f"{sizes} cannot be filled in: {count} devices do not divide by {product}.")
    return tuple((axis, count // product if size == -1 else size) for axis, size in pairs)


def _for_those_here(pairs: tuple[tuple[str, int], ...], count: int) -> tuple[tuple[str, int], ...]:
    """Axes that are made for all processes of an elastic group, for those that there are now."""
    most, total = most_processes(), math.prod(size for _, size in pairs)
    if not most or total == count or total * topology.process_count() != count * most:
        return pairs
    changed = Mesh(pairs).resized(count)
    if topology.process_index() == 0:
        before = axes_text(pairs)
        warn(f"the mesh ({before}) becomes ({changed.axes_text}): {count} devices are here.")
    return changed.axes


def _jax_mesh(axes: tuple[tuple[str, int], ...], devices: tuple[Any, ...] | None) -> Any:
    import jax
    import numpy as np

    names, shape = zip(*axes, strict=True)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    if devices is None:
        return jax.sharding.AbstractMesh(shape, names, axis_types=auto)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return jax.sharding.Mesh(grid.reshape(shape), names, axis_types=auto)


def _no_mesh(text: str) -> MeshError:
    return MeshError(f"expected a mesh such as 'batch=4, model=2 @ cpu:0-7'; received {text!r}.")


def _parse_axes(axes: str, text: str) -> list[tuple[str, int]]:
    pairs = re.findall(r"(\w+)\s*=\s*(\d+)", axes)
    if re.sub(r"\w+\s*=\s*\d+", "", axes).strip(" ,") or not pairs:
        raise _no_mesh(text)
    return [(axis, int(size)) for axis, size in pairs]


def _unpickle(axes: AxesLike, named: tuple[tuple[str, int], ...] | None, name: str) -> Mesh:
    mesh = Mesh(axes, name=name)
    if named is None:
        return mesh
    return mesh.update(devices=present_devices(named[0][0], [i for _, i in named]))
