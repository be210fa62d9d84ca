"""How much one training step does: samples, tokens and FLOPs, for rates in the live line."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from ...targets.hardware import hardware_of_device
from ...units import count_text


class StepWork(NamedTuple):
    """What one step works through on all devices together; ``None`` for what is not known.

    ``tokens`` are the integers of an input of ids, ``[rows, length]``. ``flops`` are those of
    products and convolutions; ``peak_flops_per_s`` is that of all devices, for the utilization.
    ``is_recomputed`` says that ``flops`` hold operations that are done twice.
    """

    samples: int | None = None
    tokens: int | None = None
    flops: float | None = None
    peak_flops_per_s: float | None = None
    is_recomputed: bool = False

    def items_text(self, steps_per_s: float) -> str:
        """``41.2k tokens/s``, or samples where there are no tokens; empty if neither is known.

        >>> StepWork(32, 32 * 512).items_text(2.5), StepWork(32).items_text(2.5)
        ('41k tokens/s', '80 samples/s')
        """
        for count, noun in ((self.tokens, "tokens"), (self.samples, "samples")):
            if count:
                return f"{count_text(count * steps_per_s)} {noun}/s"
        return ""

    def speed_text(self, steps_per_s: float) -> str:
        """The share of the devices' peak, or the FLOP/s where the peak is not known.

        What is computed twice counts in HFU (hardware FLOPs utilization), not in MFU.

        >>> StepWork(flops=2e12, peak_flops_per_s=1e13).speed_text(2)
        'MFU 40.0%'
        >>> StepWork(flops=2e12).speed_text(2)
        '4 TFLOP/s'
        """
        if not self.flops:
            return ""
        rate = self.flops * steps_per_s
        if self.peak_flops_per_s:
            return f"{'HFU' if self.is_recomputed else 'MFU'} {rate / self.peak_flops_per_s:.1%}"
        return f"{count_text(rate, of='FLOP/s')}"


def samples_and_tokens(batch: Any) -> tuple[int | None, int | None]:
    """Rows of a batch, and the ids in it where its first input holds ids.

    >>> samples_and_tokens((np.zeros([4, 16], "int32"), np.zeros([4])))
    (4, 64)
    >>> samples_and_tokens((np.zeros([4, 28, 28, 1]), np.zeros([4])))
    (4, None)
    """
    leaves = jax.tree.leaves(batch)
    if not leaves or not np.ndim(leaves[0]):
        return None, None
    dims, dtype = np.shape(leaves[0]), np.dtype(leaves[0].dtype)
    is_ids = dtype.kind in "iu" and len(dims) == 2 and dims[1] > 1
    return dims[0], dims[0] * dims[1] if is_ids else None


def peak_flops_per_s(devices: Any, dtype: str) -> float | None:
    """The peak of all devices together for products of this type; ``None`` where not published."""
    devices = list(devices)
    hardware = hardware_of_device(devices[0].device_kind)
    if hardware is None:
        return None
    # TPUs multiply float32 in passes of bfloat16 by default.
    one = hardware.peak(dtype) or hardware.peak("bfloat16")
    return one and one * len(devices)
