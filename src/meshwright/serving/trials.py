"""Rows that are computed in two ways when a model is loaded, where its trace leaves doubt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from ..errors import ModelError
from .api import TensorSpec
from .forward import Forward, Shape
from .ragged import Ragged
from .requests import Lengths
from .weights import Weights


def check_one_row(forward: Forward, weights: Weights) -> None:
    """Raise :class:`ModelError` where a row by itself has another answer than beside another one.

    JAX traces some functions in another form for one row, and so does code that looks at their
    number.
    """
    lengths = forward.typical.lengths
    inputs = _drawn(forward, *lengths[:1])
    alone, beside = (
        _answer(forward, weights, [np.repeat(value, rows, 0) for value in inputs], rows, lengths)
        for rows in (1, 2)
    )
    for name, a, b in zip((o.name for o in forward.outputs()), alone, beside, strict=True):
        difference, scale = _difference(a, b[:1])
        if not difference <= 1e-2 * scale:
            raise ModelError(
                f"one row by itself has another answer than beside other rows: output {name!r} "
                f"differs by {difference:.3g} (its largest value is {scale:.3g}). Give buckets= "
                "without 1."
            )


def check_padding(
    forward: Forward, weights: Weights, ragged: Ragged, lengths: Lengths, pad_value: float
) -> None:
    """Raise :class:`ModelError` where padding a ragged dim changes what is computed of the rest.

    A row is computed as it is, and padded to the largest of ``lengths``: what rounds lengths down,
    such as pooling, may hide in a short row what padding does.
    """
    length = lengths[-1]
    if not forward.num_lengths or length == 1:
        return
    outputs = forward.outputs()
    if faults := list(_uncut(outputs, ragged)):
        raise ModelError(
            f"lengths={lengths}: padding cannot be cut off again where an output changes with the "
            f"length of an input and is not as long: {', '.join(faults)}. Leave lengths out."
        )
    count = forward.num_lengths
    row = _row(forward, weights, lengths)
    padded = [np.full(_dims(spec, length), pad_value, spec.dtype) for spec in forward.inputs]
    for whole, part in zip(padded, row.inputs, strict=True):
        whole[tuple(map(slice, part.shape))] = part
    names = (output.name for output in outputs)
    longer = _answer(forward, weights, padded, 1, (length,) * count)
    for name, a, b in zip(names, row.outputs, longer, strict=True):
        cut = b[tuple(map(slice, a.shape))]  # as by ``ragged``: no other dims have changed
        difference, scale = _difference(a, cut)
        if not difference <= 1e-2 * scale:
            raise ModelError(
                f"lengths={lengths}: padding a row from {row.length} to {length} with {pad_value} "
                f"changes output {name!r} by {difference:.3g} (its largest value is {scale:.3g}). "
                "Mask what is padded in the model, such as Embedding(mask_zero=True), or leave "
                "lengths out."
            )


def _uncut(outputs: Iterable[TensorSpec], ragged: Ragged) -> Iterator[str]:
    """The dims of outputs that depend on a length, but are not as long."""
    for output, follows in zip(outputs, ragged.follows, strict=True):
        for dim, (size, number) in enumerate(zip(output.shape[1:], follows, strict=True), 1):
            if size is None and number is None:
                yield f"dim {dim} of output {output.name!r}"


@dataclass(frozen=True, eq=False)
class _Row:
    length: int
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


def _row(forward: Forward, weights: Weights, lengths: Lengths) -> _Row:
    """A row that can be answered: unpadded convolutions have no place in a short one."""
    why: Exception | None = None
    for length in _shorter(lengths[-1]):
        inputs = _drawn(forward, length)
        try:
            outputs = _answer(forward, weights, inputs, 1, (length,) * forward.num_lengths)
        except (TypeError, ValueError) as error:
            why = error
            continue
        if not any(map(_has_nan, outputs)):
            return _Row(length, inputs, outputs)
        why = None
    raise ModelError(
        f"lengths={lengths}: whether padding changes answers is not known, for rows shorter than "
        f"{lengths[-1]} {'cannot be computed' if why else 'are answered by NaN'}. Leave lengths "
        "out."
    ) from why


def _drawn(forward: Forward, length: int = 0) -> list[np.ndarray]:
    """Inputs of one row: of ones where they may be ids, which any vocabulary has."""
    draw = np.random.default_rng(0)

    def one(spec: TensorSpec) -> np.ndarray:
        dims = _dims(spec, length)
        if jax.numpy.issubdtype(spec.dtype, jax.numpy.floating):
            return draw.random(dims, "float32").astype(spec.dtype)
        return np.ones(dims, spec.dtype)

    return [one(spec) for spec in forward.inputs]


def _answer(
    forward: Forward, weights: Weights, inputs: list[np.ndarray], rows: int, lengths: Lengths
) -> list[np.ndarray]:
    filled = forward.source.filled(inputs, weights.rows)
    return forward(weights.state, Shape(rows, lengths), filled)


def _dims(spec: TensorSpec, length: int) -> tuple[int, ...]:
    """The dims of one row whose ragged dims are of this length."""
    return (1, *(length if size is None else size for size in spec.shape[1:]))


def _shorter(length: int) -> Iterator[int]:
    """Lengths from half of this one on, nearer and nearer.

    >>> list(_shorter(16)), list(_shorter(3)), list(_shorter(1))
    ([8, 12, 14, 15], [2], [])
    """
    missing = length // 2
    while missing:
        yield length - missing
        missing //= 2


def _has_nan(array: np.ndarray) -> bool:
    return bool(np.isnan(array.astype("float32")).any())


def _difference(exact: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The largest difference, and the largest finite value; NaN is the same as NaN here."""
    a, b = exact.astype("float32"), other.astype("float32")
    with np.errstate(invalid="ignore"):  # of infinite values, which the condition leaves out
        is_same = (a == b) | (np.isnan(a) & np.isnan(b))
        difference = np.where(is_same, 0, np.abs(a - b))
    scale = np.max(np.abs(a), initial=1e-6, where=np.isfinite(a))
    return float(np.max(difference, initial=0)), float(scale)
