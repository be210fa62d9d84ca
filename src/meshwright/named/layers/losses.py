"""Losses over classes that may be split: logits are never gathered."""

from __future__ import annotations

import math

import jax.numpy as jnp

from ...errors import DimError, ModelError
from ...layouts.dim_rules import Dim, text_of
from ..array import NamedArray, find
from ..elementwise import absolute, equal, maximum, multiply, relu, softplus, square, where
from ..indexing import arange
from ..operation import operation
from ..reductions import logsumexp, reduce_mean, reduce_sum
from .layer import in_dtype, widened, without


@operation
def softmax_cross_entropy(
    logits: NamedArray,
    targets: NamedArray,
    over: str | Dim = "vocab",
    *,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
) -> NamedArray:
    """The cross-entropy of the softmax over one dim with the targets, for every position.

    ``targets`` are class numbers, without the dim ``over``, or probabilities with it. ``z_loss``
    times the square of the logits' logsumexp is added, which keeps logits from drifting.
    ``smoothing`` spreads that part of the targets over all classes. A class number out of range
    has no logit; give such positions weight 0. Sums are taken in float32 at least. Where classes
    are split, only one maximum and two sums per position are exchanged. Raises :class:`DimError`
    if dims of the targets are not those of the logits, and :class:`ModelError` for a ``smoothing``
    outside of 0 to 1. (Mesh-TensorFlow's loss of this name; z-loss after its Transformer.)

    >>> from meshwright.named import named
    >>> logits = named(jnp.zeros([2, 4]), "batch:2 vocab:4")
    >>> softmax_cross_entropy(logits, named([3, 0], "batch:2")).array  # log(4)
    Array([1.3862944, 1.3862944], dtype=float32)
    """
    vocab = find(logits.dims, over)
    _fit_targets(logits, targets, vocab)
    if not 0 <= smoothing <= 1:
        raise ModelError(
            f"smoothing={smoothing!r} is the part of the targets to spread, from 0 to 1."
        )
    logits = widened(logits)
    total = logsumexp(logits, vocab)
    if vocab in targets.dims:
        loss = reduce_sum(multiply(targets, total - logits, out=logits.dims), vocab)
    else:
        is_target = equal(targets, arange(vocab), out=logits.dims)
        loss = total - reduce_sum(where(is_target, logits, 0.0), vocab)
    if smoothing:
        uniform = total - reduce_mean(logits, vocab)
        loss = (1 - smoothing) * loss + smoothing * uniform
    if z_loss:
        loss = loss + z_loss * square(total)
    return loss


@operation
def sigmoid_cross_entropy(logits: NamedArray, targets: NamedArray) -> NamedArray:
    """The cross-entropy of the logistic function with ``targets`` from 0 to 1, for every element.

    Dims are those of the ``logits``; large logits of either sign stay finite. Raises
    :class:`DimError` for targets with a dim that these lack.

    >>> from meshwright.named import named
    >>> loss = sigmoid_cross_entropy(named([0.0, 100.0], "batch:2"), named([1, 0], "batch:2"))
    >>> print(loss.array.round(2))  # log(2) and 100
    [  0.69 100.  ]
    """
    if extra := [dim for dim in targets.dims if dim not in logits.dims]:
        raise DimError(
            f"sigmoid_cross_entropy: the targets [{text_of(targets.dims)}] have {text_of(extra)}, "
            f"which the logits [{text_of(logits.dims)}] lack. Rename it, or broadcast the logits."
        )
    logits = widened(logits)
    targets = in_dtype(targets, logits.dtype)
    return relu(logits) - multiply(logits, targets) + softplus(-absolute(logits))


@operation
def weighted_mean(values: NamedArray, weights: NamedArray | None = None) -> NamedArray:
    """The mean of ``values`` over all positions, by ``weights``; zero if nothing has any.

    >>> from meshwright.named import named
    >>> losses, present = named([1.0, 3.0, 9.0], "length:3"), named([1, 1, 0], "length:3")
    >>> float(weighted_mean(losses, present))
    2.0
    """
    if weights is None:
        return reduce_mean(values)
    of = values.dtype
    values, weights = widened(values), widened(weights)
    share = math.prod(dim.size for dim in values.dims if dim not in weights.dims)  # of a weight
    mean = reduce_sum(values * weights) / maximum(share * reduce_sum(weights), 1e-9)
    return in_dtype(mean, of) if jnp.issubdtype(of, jnp.floating) else mean


def _fit_targets(logits: NamedArray, targets: NamedArray, vocab: Dim) -> None:
    """Targets have the dims of the logits; class numbers lack the classes and are whole."""
    numbers = vocab.name not in [dim.name for dim in targets.dims]
    expected = without(logits.dims, [vocab]) if numbers else logits.dims
    if set(expected) != set(targets.dims):
        raise DimError(
            f"softmax_cross_entropy: the targets [{text_of(targets.dims)}] do not fit the logits "
            f"[{text_of(logits.dims)}]: give class numbers of dims "
            f"[{text_of(without(logits.dims, [vocab]))}], or probabilities of the logits' dims."
        )
    if numbers and not jnp.issubdtype(targets.dtype, jnp.integer):
        raise DimError(
            f"softmax_cross_entropy: targets of {targets.dtype} lack dim {str(vocab)!r}: class "
            "numbers are whole numbers, and probabilities have the dim of the classes."
        )
