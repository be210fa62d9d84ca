"""A mesh as numbers: what each set of its axes multiplies to, and what collectives over it take."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from ...errors import TargetError
from ...hlo.collectives import Collective
from ...hlo.groups import Axes
from ...hlo.links import AxisLink, collective_s, links_of
from ...hlo.schedule import Clock
from ...hlo.text import Array
from ...jaxprs.products import CONVOLUTIONS, PRODUCTS
from ...targets.hardware import Hardware
from ...targets.target import Target

_DTYPES = ("int8", "bfloat16", "float32", "float64")
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
_PROBE_BYTES = 1 << 30
_OF_CHIP = 0.5  # of a chip's own memory: one array is there beside another


@dataclass(frozen=True, eq=False)
class Setting:
    """What costs depend on beside the graph.

    A set of axes is a number, bit ``i`` for the ``i``-th axis of the mesh. ``size_of`` gives the
    devices of each set, ``rate_s_per_byte`` and ``delay_s`` per kind what a collective over it
    takes, and ``seconds_per_flop`` those of each kind and type of product; the numbers in
    ``missing`` count as nothing. Of an array that is soon read again, ``kept_bytes`` stay in the
    chip.
    """

    axes: Axes
    size_of: np.ndarray
    rate_s_per_byte: dict[str, np.ndarray]
    delay_s: dict[str, np.ndarray]
    seconds_per_flop: dict[str, dict[str, float]]
    seconds_per_byte: float
    kept_bytes: float
    missing: tuple[str, ...]

    @property
    def everything(self) -> int:
        """The set of all axes."""
        return len(self.size_of) - 1


@functools.lru_cache(maxsize=512)
def setting_of(axes: Axes, target: Target, hardware: Hardware) -> Setting:
    """The numbers of a mesh, from the closed forms of ``links.py``."""
    links = links_of(target, hardware, axes)
    clock = Clock(hardware, target.platform, links)
    sets = range(2 ** len(axes))
    size_of = np.array([_size(axes, mask) for mask in sets], np.int64)
    probes = {kind: [_probe(kind, axes, mask, links) for mask in sets] for kind in _KINDS}
    fallback = clock.flops_per_s("float32") or clock.flops_per_s("bfloat16")
    missing = [] if fallback else ["peak_flops_per_s.float32"]
    if clock.bytes_per_s is None:
        missing.append("memory_bandwidth_bytes_per_s")
    missing += [
        f"links.{link.link.kind}.bytes_per_s" for link in links if link.link.bytes_per_s is None
    ]
    return Setting(
        axes=axes,
        size_of=size_of,
        rate_s_per_byte={kind: np.array([p[0] for p in points]) for kind, points in probes.items()},
        delay_s={kind: np.array([p[1] for p in points]) for kind, points in probes.items()},
        seconds_per_flop={
            kind: {
                dtype: 1.0 / (clock.flops_per_s(dtype, kind) or fallback or float("inf"))
                for dtype in _DTYPES
            }
            for kind in (*PRODUCTS, *CONVOLUTIONS)
        },
        seconds_per_byte=1.0 / (clock.bytes_per_s or float("inf")),
        kept_bytes=_OF_CHIP * (hardware.on_chip_bytes or 0),
        missing=tuple(dict.fromkeys(missing)),
    )


@functools.lru_cache(maxsize=512)
def within_stages(axes: Axes, stages: Axes, target: Target, hardware: Hardware) -> Setting:
    """The numbers of the axes of a mesh that has an axis of stages before them."""
    whole = setting_of((*stages, *axes), target, hardware)
    step = 2 ** len(stages)
    return replace(
        whole,
        axes=axes,
        size_of=whole.size_of[::step],
        rate_s_per_byte={kind: of[::step] for kind, of in whole.rate_s_per_byte.items()},
        delay_s={kind: of[::step] for kind, of in whole.delay_s.items()},
    )


class UnknownTimesError(TargetError):
    """Times cannot be estimated; ``at_serving`` says so where serving is planned, which has no
    objective beside them."""

    def __init__(self, text: str, at_serving: str = "") -> None:
        super().__init__(text)
        self.at_serving = at_serving


def require_times(setting: Setting, target: Target, hardware: Hardware) -> None:
    """Raise :class:`UnknownTimesError` where times cannot be estimated."""
    if setting.missing:
        measured = (
            f"hardware=mw.calibrate({str(target)!r})"
            if target.platform == "cpu"
            else ("hardware=mw.load_hardware(path), with a file of your own")
        )
        text = (
            f"no {', '.join(setting.missing)} in the hardware table of {hardware.name}: step times "
            f"cannot be estimated. Give {measured}"
        )
        raise UnknownTimesError(f"{text}, or use objective='memory'.", f"{text}.")


def _size(axes: Axes, mask: int) -> int:
    size = 1
    for bit, (_, axis_size) in enumerate(axes):
        size *= axis_size if mask >> bit & 1 else 1
    return size


def _probe(kind: str, axes: Axes, mask: int, links: tuple[AxisLink, ...]) -> tuple[float, float]:
    """Seconds per byte and seconds besides of one collective: they are linear in its bytes."""
    names = tuple(name for bit, (name, _) in enumerate(axes) if mask >> bit & 1)

    def seconds(nbytes: int) -> float:
        members = tuple(range(_size(axes, mask)))
        array = Array("int8", (nbytes,), 8)
        one = Collective(kind, (array,), (members,), names, 1, "", 0, 0)
        return collective_s(one, links) or 0.0

    delay = seconds(0)
    return (seconds(_PROBE_BYTES) - delay) / _PROBE_BYTES, delay
