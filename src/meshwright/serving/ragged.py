"""Which dims of any size belong together, and which of them the dims of outputs follow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .api import TensorSpec
from .requests import Lengths

_MOST_GROUPS = 16  # that are tried; after these, that all belong together


@dataclass(frozen=True)
class Ragged:
    """The dims of any size of a model's inputs, by their numbers.

    ``first`` has, for each, the first one that it must be as long as. ``follows`` has, for each
    output, for each dim after the rows, the first one that it is as long as; ``None`` for others.
    """

    first: tuple[int, ...]
    follows: tuple[tuple[int | None, ...], ...]


def ragged_of(dims_of: Callable[[Lengths], list[tuple[int, ...]]], typical: Lengths) -> Ragged:
    """Found by tracing: ``dims_of`` returns the dims of the outputs, or raises.

    >>> def image_and_ids(lengths):  # ids and mask must agree; pixels come out
    ...     height, width, ids, mask = lengths
    ...     assert ids == mask
    ...     return [(1, height, width, 3), (1, ids // 2)]
    >>> ragged_of(image_and_ids, (4, 4, 4, 4))
    Ragged(first=(0, 1, 2, 2), follows=((0, 1, None), (None,)))
    """
    before = dims_of(typical)
    first = list(range(len(typical)))
    follows: list[list[int | None]] = [[None] * (len(dims) - 1) for dims in before]
    left = list(range(len(typical)))
    while left:
        group, after = _group(dims_of, typical, left)
        for number in group:
            first[number] = group[0]
        short, long = typical[group[0]], _longer(typical[group[0]])
        for output, (old, new) in enumerate(zip(before, after, strict=True)):
            for dim, sizes in enumerate(zip(old[1:], new[1:], strict=True)):
                if sizes == (short, long):
                    follows[output][dim] = group[0]
        left = [number for number in left if number not in group]
    return Ragged(tuple(first), tuple(map(tuple, follows)))


def disagreeing(ragged: Ragged, specs: Sequence[TensorSpec], lengths: Lengths) -> list[str]:
    """What is wrong with the lengths of a request whose ragged dims must agree."""
    names = [spec.name for spec in specs for size in spec.shape[1:] if size is None]
    return [
        f"input {names[number]!r} is {length} long and input {names[first]!r} {lengths[first]}; "
        "they must be as long as each other"
        for number, (first, length) in enumerate(zip(ragged.first, lengths, strict=True))
        if length != lengths[first]
    ]


def cut_output(value: np.ndarray, follows: Sequence[int | None], lengths: Lengths) -> np.ndarray:
    """An output of padded inputs, each dim that follows one of them as long as that was.

    >>> cut_output(np.ones([2, 8, 8, 3]), (0, 1, None), (5, 7)).shape
    (2, 5, 7, 3)
    """
    return value[(slice(None), *(slice(None if i is None else lengths[i]) for i in follows))]


def _group(
    dims_of: Callable[[Lengths], list[tuple[int, ...]]], typical: Lengths, left: list[int]
) -> tuple[Sequence[int], list[tuple[int, ...]]]:
    """The fewest dims, the first of ``left`` among them, that may be longer than the others."""
    for group in itertools.islice(_groups(left), _MOST_GROUPS):
        with_longer = _with_longer(typical, group)
        try:
            return group, dims_of(with_longer)
        except Exception:  # of any kind: the layer that raises it is somebody else's
            continue
    return left, dims_of(_with_longer(typical, left))


def _groups(left: list[int]) -> Iterator[Sequence[int]]:
    first, *others = left
    for count in range(len(others)):
        for group in itertools.combinations(others, count):
            yield (first, *group)


def _with_longer(typical: Lengths, group: Sequence[int]) -> Lengths:
    return tuple(_longer(n) if number in group else n for number, n in enumerate(typical))


def _longer(length: int) -> int:
    return length * 3 // 2
