"""What is known of a chip: its speed, its memory and its links, each number with its source."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import TargetError
from .target import Target

_NUMBERS = (
    "memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "instruction_s",
    "elements_per_s",
    "call_s",
    "handover_s",
    "devices_per_node",
    "on_chip_bytes",
)
_KEYS = (*_NUMBERS, "name", "peak_flops_per_s", "links", "rates", "sources")
_LINK_NUMBERS = ("bytes_per_s", "latency_s")
PATTERNS = ("ring", "switch", "shared")
RATES = {  # kind of work, on float32 unless it says otherwise -> its unit
    "product": "FLOP",
    "product_bfloat16": "FLOP",
    "product_skinny": "FLOP",  # few rows by many weights
    "product_transposed": "FLOP",  # of gradients of weights: both by their rows
    "convolution": "FLOP",
    "convolution_bfloat16": "FLOP",
    "grouped_convolution": "FLOP",
    "grouped_convolution_bfloat16": "FLOP",
    "arithmetic": "element",
    "transcendental": "element",
    "memory": "byte",
}


@dataclass(frozen=True)
class Link:
    """One kind of connection between devices; ``None`` for what no public document says.

    ``bytes_per_s`` is what one device can send over it, along a ring in both directions together.
    ``latency_s`` is that of one hop. ``pattern`` says how devices hang together: in a ``"ring"``
    (one dim of a torus), all at a ``"switch"``, or in one ``"shared"`` memory, where a collective
    is a single hop.
    """

    kind: str  # "ici", "nvlink", "network", "shared"
    pattern: str = "switch"
    bytes_per_s: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True)
class Hardware:
    """A kind of device, as JAX shows it; ``None`` for what is not known.

    ``peak_flops_per_s`` holds ``(dtype, FLOP/s)`` of matrix products without sparsity.
    ``on_chip_bytes`` is a TPU's own memory, where XLA keeps arrays that are soon read again.
    ``elements_per_s`` is the speed of elementwise work, ``instruction_s`` what each instruction
    costs besides, ``call_s`` each call of a compiled function, and ``handover_s`` what it takes
    another thread to begin and to hand a result back, where they were measured
    (:func:`calibrate`). So are ``rates``, which hold ``(kind, ((size, work per second), ...))``: a
    small piece of work is slower than a large one, and one in a cache faster than one in memory.
    ``sources`` holds ``(name of the number, where it is from)``.

    >>> v5p = hardware_of("v5p:2x2x2")
    >>> v5p.peak("bfloat16"), v5p.memory_bytes, v5p.link("ici").bytes_per_s
    (459000000000000.0, 102005473280, 200000000000.0)
    """

    name: str
    peak_flops_per_s: tuple[tuple[str, float], ...] = ()
    memory_bytes: int | None = None
    memory_bandwidth_bytes_per_s: float | None = None
    links: tuple[Link, ...] = ()
    elements_per_s: float | None = None
    instruction_s: float | None = None
    call_s: float | None = None
    handover_s: float | None = None
    rates: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = ()
    devices_per_node: int | None = None
    on_chip_bytes: int | None = None
    sources: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of products of such elements; ``None`` where they are not known."""
        return dict(self.peak_flops_per_s).get(dtype)

    def rate(self, kind: str, size: float) -> float | None:
        """Work per second in pieces of a size, between the sizes that were measured.

        Units are FLOPs, elements or bytes (:data:`RATES`). ``None`` where none was measured.

        >>> Hardware("mine", rates=(("product", ((1e4, 1e9), (1e6, 1e11))),)).rate("product", 1e5)
        10000000000.0
        """
        points = dict(self.rates).get(kind)
        if not points or size <= 0:
            return None
        import numpy as np

        sizes, rates = np.log(points).T
        return round(math.exp(np.interp(math.log(size), sizes, rates)), 3)

    def link(self, kind: str) -> Link | None:
        """The link of a kind such as ``"ici"`` or ``"nvlink"``, if it has one."""
        return next((link for link in self.links if link.kind == kind), None)

    def source(self, number: str) -> str | None:
        """Where a number is from, by a name such as ``"links.ici.bytes_per_s"``."""
        return dict(self.sources).get(number)

    def to_toml(self) -> str:
        """The text of a file that :func:`load_hardware` reads.

        >>> print(Hardware("mine", (("float32", 1e12),), links=(Link("bus", "shared", 1e9),))
        ...       .to_toml())
        name = "mine"
        <BLANKLINE>
        [peak_flops_per_s]
        float32 = 1000000000000.0
        <BLANKLINE>
        [links.bus]
        pattern = "shared"
        bytes_per_s = 1000000000.0
        """
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        parts = [_table("", {"name": self.name, **numbers})]
        parts.append(_table("peak_flops_per_s", dict(self.peak_flops_per_s)))
        for link in self.links:
            speeds = {name: getattr(link, name) for name in _LINK_NUMBERS}
            parts.append(_table(f"links.{_key(link.kind)}", {"pattern": link.pattern, **speeds}))
        for kind, points in self.rates:
            parts.append(_table(f"rates.{kind}", {f"{size:.0f}": rate for size, rate in points}))
        parts.append(_table("sources", dict(self.sources)))
        return "\n\n".join(part for part in parts if part)


def hardware_of(target: Target | str, *, measured: bool = False) -> Hardware:
    """What is known of the chips of a target such as ``"h100:8"``, or of a chip by its name.

    ``target`` is a target, its text, or the name of a chip such as ``"h200"``. The numbers are
    published ones, so that chips can be compared. With ``measured=True`` the rates that
    :func:`calibrate` took on a real chip count first, for times closer to those of a run.
    Raises :class:`~meshwright.TargetError`, with the nearest names, for a chip that is not known,
    and for one without measured rates.

    >>> hardware_of("h200").memory_bytes
    141000000000
    >>> hardware_of("cpu:8").memory_bandwidth_bytes_per_s is None  # calibrate("cpu:8") measures it
    True
    >>> h100 = hardware_of("h100:8", measured=True)
    >>> h100.peak("bfloat16"), h100.rate("product_bfloat16", 1e12)
    (989400000000000.0, 801182915258252.4)
    """
    is_text = isinstance(target, str)
    name = target.partition(":")[0].strip().lower() if is_text else Target.of(target).kind
    published, by_run = _published(), _measured()
    if name in published:
        if measured and name not in by_run:
            raise TargetError(
                f"no rates of {name} were measured, only of {', '.join(by_run)}. On such a "
                f"machine, mw.calibrate({str(target)!r}) measures them."
            )
        return by_run[name] if measured else published[name]
    near = difflib.get_close_matches(name, published, n=3, cutoff=0.5)
    hint = f" The nearest are {', '.join(near)}." if near else ""
    raise TargetError(
        f"unknown chip {name!r}.{hint} Known are {', '.join(published)}; others come "
        "from a file of yours with mw.load_hardware(path)."
    )


def has_measured_rates(kind: str) -> bool:
    """Whether :func:`hardware_of` knows rates of a chip that :func:`calibrate` took on one.

    >>> has_measured_rates("h100"), has_measured_rates("v5e")
    (True, False)
    """
    return kind in _measured()


# How JAX names the devices of each chip.
_DEVICE_NAMES = {
    r"TPU v[23]$": None,  # the chip's own name, v2 or v3
    r"TPU v4$": "v4",
    r"TPU v5 ?(lite|e)": "v5e",
    r"TPU v5p?$": "v5p",
    r"TPU v6 ?(lite|e)": "v6e",
    r"TPU ?7x": "tpu7x",
    r"\b(A100|H100|H200|B200)\b": None,
}


def hardware_of_device(device_kind: str) -> Hardware | None:
    """What is known of a device by the name that JAX gives it; ``None`` if nothing is.

    >>> [hardware_of_device(kind).name for kind in ("NVIDIA H100 80GB HBM3", "TPU v5 lite")]
    ['h100', 'v5e']
    >>> hardware_of_device("cpu")
    """
    for pattern, name in _DEVICE_NAMES.items():
        if result := re.search(pattern, device_kind):
            return hardware_of(name or result[0].rpartition(" ")[2])
    return None


def load_hardware(path: str | Path) -> Hardware:
    """A chip of your own from a TOML file, as :meth:`Hardware.to_toml` writes it.

    ``path`` is that file. Raises :class:`~meshwright.TargetError` for a file that cannot be read,
    and lists every fault of one that can.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "mine.toml")
    ...     _ = path.write_text(hardware_of("v5e").to_toml())
    ...     load_hardware(path) == hardware_of("v5e")
    True
    """
    try:
        read = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TargetError(f"no hardware can be read from {str(path)!r}: {error}.") from error
    faults = list(_faults(read)) + ([] if "name" in read else ["'name' is missing: a text."])
    if faults:
        listed = "".join(f"\n- {fault}" for fault in faults)
        raise TargetError(f"the hardware in {str(path)!r} has faults:{listed}")
    return _hardware(read)


@functools.cache
def _published() -> Mapping[str, Hardware]:
    return {name: _hardware({"name": name, **read}) for name, read in _tables("chips").items()}


@functools.cache
def _measured() -> Mapping[str, Hardware]:
    published, result = _tables("chips"), dict[str, Hardware]()
    for name, read in _tables("measured").items():
        below = published[name]
        both = {**below, **read, "sources": {**below["sources"], **read["sources"]}}
        result[name] = _hardware({"name": f"{name}, measured", **both})
    return result


def _tables(name: str) -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text())


def _hardware(read: Mapping[str, Any]) -> Hardware:
    def number(name: str) -> float | None:
        return float(read[name]) if name in read else None

    def whole(name: str) -> int | None:
        return int(read[name]) if name in read else None

    return Hardware(
        name=read["name"],
        peak_flops_per_s=tuple(
            (dtype, float(flops)) for dtype, flops in read.get("peak_flops_per_s", {}).items()
        ),
        memory_bytes=whole("memory_bytes"),
        memory_bandwidth_bytes_per_s=number("memory_bandwidth_bytes_per_s"),
        links=tuple(Link(kind, **link) for kind, link in read.get("links", {}).items()),
        elements_per_s=number("elements_per_s"),
        instruction_s=number("instruction_s"),
        call_s=number("call_s"),
        handover_s=number("handover_s"),
        rates=tuple(
            (kind, tuple(sorted((float(size), float(rate)) for size, rate in points.items())))
            for kind, points in read.get("rates", {}).items()
        ),
        devices_per_node=whole("devices_per_node"),
        on_chip_bytes=whole("on_chip_bytes"),
        sources=tuple(read.get("sources", {}).items()),
    )


# Faults of a file


def _faults(read: Mapping[str, Any]) -> list[str]:
    faults = [_unknown(key, _KEYS) for key in read if key not in _KEYS]
    if "name" in read and not isinstance(read["name"], str):
        faults.append(f"'name' must be a text; received {read['name']!r}.")
    faults += [_not_positive(key, read[key]) for key in _NUMBERS if key in read]
    for name in ("peak_flops_per_s", "links", "rates", "sources"):
        if not isinstance(read.get(name, {}), dict):
            faults.append(f"'{name}' must be a table, [{name}]; received {read[name]!r}.")
    for dtype, flops in _table_of(read, "peak_flops_per_s").items():
        faults.append(_not_positive(f"peak_flops_per_s.{dtype}", flops))
    for kind, link in _table_of(read, "links").items():
        faults += _link_faults(kind, link)
    for kind, points in _table_of(read, "rates").items():
        faults += _rate_faults(kind, points)
    for name, source in _table_of(read, "sources").items():
        if not isinstance(source, str):
            faults.append(f"'sources.{name}' must be a text; received {source!r}.")
    return [fault for fault in faults if fault]


def _rate_faults(kind: str, points: Any) -> list[str]:
    here = f"rates.{kind}"
    if kind not in RATES:
        return [_unknown(here, tuple(RATES))]
    if not isinstance(points, dict) or not points:
        return [f"'{here}' must be a table, [{here}], of sizes; received {points!r}."]
    faults = [
        f"'{here}' must have numbers above zero as its sizes; received {size!r}."
        for size in points
        if not (size.isdecimal() and int(size))
    ]
    return faults + [_not_positive(f"{here}.{size}", rate) for size, rate in points.items()]


def _link_faults(kind: str, link: Any) -> list[str]:
    here = f"links.{kind}"
    if not isinstance(link, dict):
        return [f"'{here}' must be a table, [{here}]; received {link!r}."]
    keys = ("pattern", *_LINK_NUMBERS)
    faults = [_unknown(f"{here}.{key}", keys) for key in link if key not in keys]
    if link.get("pattern", "switch") not in PATTERNS:
        faults.append(f"'{here}.pattern' must be one of {PATTERNS}; received {link['pattern']!r}.")
    return faults + [_not_positive(f"{here}.{key}", link[key]) for key in link if key in keys[1:]]


def _table_of(read: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    result = read.get(name, {})
    return result if isinstance(result, dict) else {}


def _unknown(key: str, keys: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key.rpartition(".")[2], keys, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(keys)}."
    return f"unknown key {key!r}. {hint}"


def _not_positive(key: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return ""
    return f"{key!r} must be a number above zero; received {value!r}."


# Writing


def _table(name: str, values: Mapping[str, Any]) -> str:
    lines = [f"{_key(key)} = {json.dumps(value)}" for key, value in values.items() if value]
    return "\n".join(([f"[{name}]"] if name and lines else []) + lines)


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() else json.dumps(key)
