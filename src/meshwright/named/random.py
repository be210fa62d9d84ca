"""Random numbers over named dims: the same under any rules, and made where they lie.

JAX's default generator, threefry, makes an element from the key and the element's place in the
whole array. So each device makes its own part, nothing is exchanged, and another mesh makes the
same numbers. Of keys of other generators (``rbg``) XLA promises neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import DimError, ModelError
from ..layouts.dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from .arguments import float_type
from .array import NamedArray, as_named, spread
from .elementwise import add, divide, where
from .operation import operation
from .ordering import argmax
from .reductions import dims_over


@operation
def uniform(
    key: Any, dims: DimsLike, low: Any = 0.0, high: Any = 1.0, *, dtype: Any = jnp.float32
) -> NamedArray:
    """Numbers from ``low`` up to ``high``, each as likely as any other.

    >>> uniform(jax.random.key(0), "batch:64 io:16").shape
    {'batch': 64, 'io': 16}
    """
    return _draw(jax.random.uniform, key, dims, float_type(dtype, "uniform"), low, high)


@operation
def normal(
    key: Any, dims: DimsLike, mean: Any = 0.0, deviation: Any = 1.0, *, dtype: Any = jnp.float32
) -> NamedArray:
    """Numbers of the normal distribution with this ``mean`` and standard ``deviation``.

    ``key`` is one of ``jax.random``; ``dims`` and ``dtype`` are those of the result.

    >>> import meshwright.named as mn
    >>> x = mn.normal(jax.random.key(0), "batch:1000", mean=5.0, deviation=2.0)
    >>> x.shape, round(float(mn.reduce_mean(x)))
    ({'batch': 1000}, 5)
    """
    dtype = float_type(dtype, "normal", jnp.inexact)
    return _draw(jax.random.normal, key, dims, dtype) * deviation + mean


@operation
def truncated_normal(
    key: Any,
    dims: DimsLike,
    mean: Any = 0.0,
    deviation: Any = 1.0,
    *,
    within: float = 2.0,
    dtype: Any = jnp.float32,
) -> NamedArray:
    """Numbers of the normal distribution, none further than ``within`` deviations from the mean.

    ``deviation`` is that of the distribution before it is cut; ``key`` is one of ``jax.random``.

    >>> import meshwright.named as mn
    >>> x = mn.truncated_normal(jax.random.key(0), "batch:1000", within=1.0)
    >>> bool(mn.reduce_max(mn.absolute(x)) <= 1)
    True
    """

    def standard(key: Any, shape: Any, dtype: Any) -> Any:
        return jax.random.truncated_normal(key, -within, within, shape, dtype)

    return _draw(standard, key, dims, float_type(dtype, "truncated_normal")) * deviation + mean


@operation
def bernoulli(key: Any, dims: DimsLike, probability: Any = 0.5) -> NamedArray:
    """Truth values, each true with this probability: a number, or an array with some of the dims.

    Raises :class:`DimError` if the probabilities have a dim that the result does not have.

    >>> import meshwright.named as mn
    >>> chance = mn.named([0.0, 1.0], "io:2")
    >>> print(mn.bernoulli(jax.random.key(0), "batch:2 io:2", chance).array)
    [[False  True]
     [False  True]]
    """
    dims, chance = as_dims(dims), as_named(probability)
    missing = [dim for dim in chance.dims if dim not in dims]
    if missing:
        raise DimError(
            f"bernoulli: the probabilities have {text_of(missing)}, which [{text_of(dims)}] lacks. "
            "Name every dim of the result."
        )
    likely = spread(chance, dims)
    if not jnp.issubdtype(likely.dtype, jnp.floating):
        likely = likely.astype(jnp.float32)  # JAX takes no whole numbers, such as 1
    return NamedArray(jax.random.bernoulli(key, likely, _shape(dims)), dims)


@operation
def categorical(key: Any, logits: Any, over: str | Dim) -> NamedArray:
    """For each position a number along the dim ``over``, by the softmax of the logits there.

    The dim may be split: only each device's best candidate is exchanged.

    >>> from meshwright.named import named
    >>> logits = named(jnp.log(jnp.array([[0.0, 1.0], [1.0, 0.0]])), "batch:2 vocab:2")
    >>> categorical(jax.random.key(0), logits, "vocab").array
    Array([1, 0], dtype=int32)
    """
    return sample_with_temperature(key, logits, over)


@operation
def sample_with_temperature(
    key: Any, logits: Any, over: str | Dim, temperature: Any = 1.0
) -> NamedArray:
    """As :func:`categorical`, of the logits divided by the temperature; 0 takes the largest.

    Raises :class:`ModelError` for a temperature below zero. (Mesh-TensorFlow's operation.)

    >>> import meshwright.named as mn
    >>> logits = mn.named([[1.0, 3.0], [2.0, 0.0]], "batch:2 vocab:2")
    >>> print(mn.sample_with_temperature(jax.random.key(0), logits, "vocab", 0.0).array)
    [1 0]
    """
    if isinstance(temperature, (int, float)) and temperature < 0:
        raise ModelError(
            f"temperature={temperature!r}: 0 takes the largest logit, 1 samples by the softmax, "
            "and more is more even; less than 0 has no meaning."
        )
    logits = as_named(logits)
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    # The largest of logits / temperature + noise (Gumbel), written so that 0 divides by nothing.
    noise = _draw(jax.random.gumbel, key, logits.dims, dtype)
    return argmax(add(logits, noise * temperature), over)


@operation
def dropout(
    x: Any,
    key: Any,
    *,
    rate: float | None = None,
    keep_prob: float | None = None,
    noise_dims: str | Dim | Iterable[str | Dim] | None = None,
) -> NamedArray:
    """The array with some elements set to zero, and the others larger, so that the mean stays.

    Give ``rate``, the part that is set to zero, or ``keep_prob``, the part that is kept. Elements
    that differ in other dims than ``noise_dims`` are dropped together; by default each is dropped
    by itself. Raises :class:`ModelError` for both parts or neither, or if it is none from 0 to 1.
    (Srivastava et al. 2014.)

    >>> from meshwright.named import named
    >>> x = named(jnp.ones([2, 3]), "batch:2 io:3")
    >>> dropout(x, jax.random.key(1), rate=0.5, noise_dims="batch").array
    Array([[2., 2., 2.],
           [0., 0., 0.]], dtype=float32)
    """
    x, keep = as_named(x), _keep_probability(rate, keep_prob)
    if keep == 1:
        return x
    if keep == 0:
        return NamedArray(jnp.zeros_like(x.array), x.dims)
    noise = dims_over(x.dims, noise_dims)
    return where(bernoulli(key, noise, keep), divide(x, keep), 0, out=x.dims)


def _keep_probability(rate: float | None, keep_prob: float | None) -> float:
    parts = {"rate": rate, "keep_prob": keep_prob}
    match [(name, part) for name, part in parts.items() if part is not None]:
        case [(name, part)] if 0 <= part <= 1:
            return part if name == "keep_prob" else 1 - part
        case [(name, part)]:
            raise ModelError(f"dropout: {name}={part!r} is a part of all elements, from 0 to 1.")
        case several:
            raise ModelError(
                "dropout takes rate=, the part to drop, or keep_prob=, the part to keep; received "
                f"{'both' if several else 'neither'}."
            )


def _draw(draw: Any, key: Any, dims: DimsLike, dtype: Any, *args: Any) -> NamedArray:
    dims = as_dims(dims)
    return NamedArray(draw(key, _shape(dims), dtype, *args), dims)


def _shape(dims: Dims) -> tuple[int, ...]:
    return tuple(dim.size for dim in dims)
