"""First values of variables: a table's rows come out the same however the table is cut.

Rows are drawn in blocks of a fixed size, each from a counter-based generator that is keyed by the
seed and the block (Philox; Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011),
so that no server ever makes more than its own shard and the blocks at its two ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ArrayError

_BLOCK_ELEMENTS = 1 << 16
_OTHERS = frozenset({"kind", "params", "seed", "rows", "full_shape", "hash"})
_TRUNCATED_STDDEV = 0.87962566103423978  # of a standard normal cut at two of its deviations


@dataclass(frozen=True)
class Draw:
    """What values are drawn from: a law, and its two numbers.

    ``constant``: the value and nothing; ``uniform``: the low and the high end; ``normal`` and
    ``truncated`` (at two standard deviations): mean and standard deviation.
    """

    law: str
    first: float = 0.0
    second: float = 0.0

    @classmethod
    def of(cls, init: Mapping[str, Any], full_shape: Sequence[int]) -> Draw:
        """What an ``init`` of a message says; numbers by the names and defaults of Keras.

        >>> Draw.of({"kind": "glorot_uniform"}, (3, 3))
        Draw(law='uniform', first=-1.0, second=1.0)
        """
        kind = str(init["kind"])
        if kind not in KINDS:
            raise ArrayError(
                f"unknown initializer {kind!r}; expected one of {', '.join(sorted(KINDS))}."
            )
        every = {**init, **(init.get("params") or {})}
        params = {name: value for name, value in every.items() if name not in _OTHERS}
        if unknown := params.keys() - _takes(kind):
            raise ArrayError(
                f"initializer {kind!r} takes {', '.join(_takes(kind)) or 'nothing'}; received "
                f"{', '.join(sorted(unknown))}."
            )
        for name, value in params.items():
            if fault := _fault(name, value):
                raise ArrayError(f"initializer {kind!r} has {name}={value!r}; expected {fault}.")
        return KINDS[kind](params, tuple(full_shape))

    def scaled(self, standard: np.ndarray) -> np.ndarray:
        """Values of this draw from those of its standard law, in place."""
        if self.law == "uniform":
            standard *= self.second - self.first
        else:
            standard *= self.second
        standard += self.first
        return standard


def rows_of(
    draw: Draw, seed: int, full_shape: Sequence[int], start: int, stop: int, dtype: np.dtype
) -> np.ndarray:
    """Rows ``start`` to ``stop`` of a table of ``full_shape``."""
    shape = (stop - start, *full_shape[1:])
    if draw.law == "constant":
        return np.full(shape, draw.first, dtype)
    values = np.empty(shape, dtype)
    size = block_rows(full_shape)
    for block in range(start // size, -(-stop // size)):
        values_of_block = _block(draw, seed, block, (size, *full_shape[1:]))
        low, high = max(start, block * size), min(stop, (block + 1) * size)
        values[low - start : high - start] = values_of_block[
            low - block * size : high - block * size
        ]
    return values


def block_rows(full_shape: Sequence[int]) -> int:
    """Rows that are drawn together; it depends on the whole table alone."""
    return max(1, _BLOCK_ELEMENTS // max(1, math.prod(full_shape[1:])))


def _block(draw: Draw, seed: int, block: int, shape: tuple[int, ...]) -> np.ndarray:
    key = (block << 64) | (seed & (1 << 64) - 1)
    random = np.random.Generator(np.random.Philox(key=key))
    if draw.law == "uniform":
        return draw.scaled(random.random(shape, np.float32))
    values = random.standard_normal(shape, np.float32)
    while draw.law == "truncated" and (far := np.abs(values) > 2).any():
        values[far] = random.standard_normal(int(far.sum()), np.float32)
    return draw.scaled(values)


def rows_by_key(
    draw: Draw, seed: int, keys: np.ndarray, row_shape: Sequence[int], dtype: np.dtype
) -> np.ndarray:
    """One row for each key, which the key and the seed alone decide.

    Each element hashes (seed, key, place) by SplitMix64 (Steele, Lea and Flood, 2014).
    """
    size = math.prod(row_shape)
    if draw.law == "constant":
        return np.full((len(keys), *row_shape), draw.first, dtype)
    counter = _mixed(keys.astype(np.uint64) + _mixed(np.array([seed & (1 << 64) - 1], np.uint64)))
    counter = _mixed(counter[:, None] + np.arange(size, dtype=np.uint64)[None, :])
    if draw.law == "uniform":
        values = _fraction(counter)
    else:
        values = _normal(counter)
        while draw.law == "truncated" and (far := np.abs(values) > 2).any():
            counter[far] = _mixed(counter[far] + np.uint64(2))
            values[far] = _normal(counter[far])
    return draw.scaled(values).reshape(len(keys), *row_shape).astype(dtype, copy=False)


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _fraction(bits: np.ndarray) -> np.ndarray:
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _normal(bits: np.ndarray) -> np.ndarray:
    """Box and Muller's; one of the pair is enough."""
    radius = np.sqrt(-2.0 * np.log1p(-_fraction(bits)))
    return radius * np.cos(np.float32(2 * math.pi) * _fraction(_mixed(bits)))


def _fans(shape: tuple[int, ...]) -> tuple[float, float]:
    """Inputs and outputs of one unit, as Keras counts them."""
    if len(shape) < 2:
        size = float(shape[0]) if shape else 1.0
        return size, size
    field = math.prod(shape[:-2])
    return float(shape[-2] * field), float(shape[-1] * field)


def _variance_scaling(
    scale: float | None = None, mode: str = "fan_in", law: str = "truncated_normal"
) -> Callable[[Mapping[str, Any], tuple[int, ...]], Draw]:
    def make(params: Mapping[str, Any], shape: tuple[int, ...]) -> Draw:
        fan = params.get("mode", mode)
        fan_in, fan_out = _fans(shape)
        fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
        factor = params.get("scale", 1.0) if scale is None else scale
        variance = factor / max(1.0, fans[fan])
        return _spread(params.get("distribution", law) if scale is None else law, variance)

    return make


def _spread(law: str, variance: float) -> Draw:
    if law == "uniform":
        return Draw("uniform", -math.sqrt(3 * variance), math.sqrt(3 * variance))
    if law == "untruncated_normal":
        return Draw("normal", 0.0, math.sqrt(variance))
    return Draw("truncated", 0.0, math.sqrt(variance) / _TRUNCATED_STDDEV)


def _uniform(params: Mapping[str, Any], shape: tuple[int, ...]) -> Draw:
    return Draw("uniform", params.get("minval", -0.05), params.get("maxval", 0.05))


def _gaussian(law: str) -> Callable[[Mapping[str, Any], tuple[int, ...]], Draw]:
    return lambda params, shape: Draw(law, params.get("mean", 0.0), params.get("stddev", 0.05))


KINDS: dict[str, Callable[[Mapping[str, Any], tuple[int, ...]], Draw]] = {
    "zeros": lambda config, shape: Draw("constant", 0.0),
    "ones": lambda config, shape: Draw("constant", 1.0),
    "constant": lambda config, shape: Draw("constant", config.get("value", 0.0)),
    "uniform": _uniform,
    "random_uniform": _uniform,
    "normal": _gaussian("normal"),
    "random_normal": _gaussian("normal"),
    "truncated_normal": _gaussian("truncated"),
    "variance_scaling": _variance_scaling(),
    "glorot_uniform": _variance_scaling(1.0, "fan_avg", "uniform"),
    "glorot_normal": _variance_scaling(1.0, "fan_avg"),
    "he_uniform": _variance_scaling(2.0, "fan_in", "uniform"),
    "he_normal": _variance_scaling(2.0, "fan_in"),
    "lecun_uniform": _variance_scaling(1.0, "fan_in", "uniform"),
    "lecun_normal": _variance_scaling(1.0, "fan_in"),
}


_NAMES = {
    "mode": ("fan_in", "fan_out", "fan_avg"),
    "distribution": ("uniform", "truncated_normal", "untruncated_normal", "normal"),
}


def _fault(name: str, value: object) -> str:
    """What was expected of an initializer's parameter, where the value is something else.

    >>> _fault("stddev", "wide"), _fault("mode", "fan_in"), _fault("mode", "fan")
    ('a number', '', "one of 'fan_in', 'fan_out', 'fan_avg'")
    """
    if name in _NAMES:
        is_known = value in _NAMES[name]
        return "" if is_known else f"one of {', '.join(map(repr, _NAMES[name]))}"
    return "" if isinstance(value, int | float) else "a number"


def _takes(kind: str) -> tuple[str, ...]:
    """The names of what an initializer takes, as Keras'."""
    if kind == "constant":
        return ("value",)
    if kind == "variance_scaling":
        return ("scale", "mode", "distribution")
    if kind in ("uniform", "random_uniform"):
        return ("minval", "maxval")
    if kind in ("normal", "random_normal", "truncated_normal"):
        return ("mean", "stddev")
    return ()
