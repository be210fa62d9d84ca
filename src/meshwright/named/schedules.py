"""Learning rates of T5 and Mesh-TensorFlow, as functions of the step; Optax has the usual ones.

Each is a function that `adafactor` and Optax' optimizers take as their learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..errors import ModelError

Schedule = Callable[[Any], Any]


def _check(**sizes: float) -> None:
    """Raise :class:`ModelError` that lists every size below 1."""
    small = [name for name, size in sizes.items() if isinstance(size, (int, float)) and size < 1]
    if small:
        listed = ", ".join(f"{name}={sizes[name]!r}" for name in small)
        raise ModelError(f"expected {' and '.join(small)} of at least 1; received {listed}.")


def truncated_rsqrt(warmup_steps: int = 10_000, multiplier: float = 1.0) -> Schedule:
    """One over the root of the step, and of ``warmup_steps`` before that (T5, Raffel et al. 2020).

    >>> rate = truncated_rsqrt(warmup_steps=100)
    >>> float(rate(0)), float(rate(100)), float(rate(400))
    (0.1..., 0.1..., 0.05...)
    """
    _check(warmup_steps=warmup_steps)
    return lambda step: multiplier / jnp.sqrt(jnp.maximum(step, float(warmup_steps)))


def noam(d_model: int, warmup_steps: int = 4000, multiplier: float = 1.0) -> Schedule:
    """A linear warm-up, then one over the root of the step (Vaswani et al. 2017).

    >>> rate = noam(d_model=256, warmup_steps=100)
    >>> float(rate(50)) < float(rate(100)) > float(rate(400))
    True
    """
    _check(d_model=d_model, warmup_steps=warmup_steps)
    scale = multiplier * d_model**-0.5

    def rate(step: Any) -> Any:
        step = jnp.asarray(step, jnp.float32) + 1
        return scale * jnp.minimum(step * warmup_steps**-1.5, step**-0.5)

    return rate


def slanted_triangular(
    steps: int, highest: float, cut: float = 0.1, ratio: float = 32.0
) -> Schedule:
    """Up to ``highest`` in the part ``cut`` of the steps, then down to ``highest / ratio``.

    Both are linear. (ULMFiT, Howard and Ruder 2018.)

    >>> rate = slanted_triangular(steps=100, highest=1.0)
    >>> float(rate(10)), float(rate(100))
    (1.0, 0.03125)
    """
    _check(steps=steps, ratio=ratio)
    if not 0 <= cut <= 1:
        raise ModelError(f"cut={cut!r} is a part of all steps, from 0 to 1.")
    top = max(int(steps * cut), 1)

    def rate(step: Any) -> Any:
        up = step / top
        down = 1 - (step - top) / max(steps - top, 1)
        part = jnp.clip(jnp.where(step < top, up, down), 0.0, 1.0)
        return highest * (1 + part * (ratio - 1)) / ratio

    return rate
