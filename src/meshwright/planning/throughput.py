"""What a step is worth: samples and tokens per second, and their price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from ..views import Viewable

_MILLION = 1e6


@dataclass(frozen=True)
class StepInput:
    """What one step of all devices is fed: rows of a batch, and tokens where rows are of such."""

    rows: int
    tokens: int | None = None


@dataclass(frozen=True)
class Price(Viewable):
    """What a step, a million samples and a million tokens cost, in the unit of the price that was
    given for one device and hour; ``None`` for what the batch does not have."""

    per_device_hour: float
    per_step: float
    per_million_samples: float | None
    per_million_tokens: float | None


def step_input(batch: Any, micro_batches: int) -> StepInput | None:
    """What a step is fed with ``micro_batches`` of such batches; ``None`` for one without rows.

    Tokens are the elements of the first array, where that holds integers in two dims.

    >>> import jax
    >>> step_input(jax.ShapeDtypeStruct((8, 512), "int32"), 4)
    StepInput(rows=32, tokens=16384)
    """
    import jax
    import numpy as np

    arrays = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    if not arrays:
        return None
    dims = np.shape(arrays[0])
    rows = micro_batches * dims[0]
    is_text = len(dims) == 2 and jax.numpy.issubdtype(arrays[0].dtype, np.integer)
    return StepInput(rows, rows * dims[1] if is_text else None)


def per_s(count: int | None, step_time_s: float | None) -> float | None:
    """A count per step as a rate; ``None`` where either is not known, or no time passes."""
    return count / step_time_s if count is not None and step_time_s else None


def price(
    per_device_hour: float, devices: int, step_time_s: float | None, what: StepInput | None
) -> Price:
    """The price of a step that all devices take together.

    Raises :class:`~meshwright.DataError` for a price below zero, and where the time of a step is
    not known.

    >>> price(3.6, 10, 0.5, StepInput(rows=5000)).per_million_samples
    1.0
    """
    if not per_device_hour >= 0:
        raise DataError(
            f"the price of a device must be 0 or more an hour; received {per_device_hour}."
        )
    if step_time_s is None:
        raise DataError(
            "the price of a step needs its time, which this report does not have. Its notes and "
            "errors say why; hardware= takes the numbers of a machine."
        )
    step = per_device_hour / 3600 * devices * step_time_s
    rows, tokens = (None, None) if what is None else (what.rows, what.tokens)
    return Price(
        per_device_hour,
        step,
        _MILLION * step / rows if rows else None,
        _MILLION * step / tokens if tokens else None,
    )
