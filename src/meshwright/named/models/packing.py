"""Packing: several short sequences in one row, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ...errors import DataError

Example = Mapping[str, Sequence[int]]
_OPEN = 1000  # rows that wait for a sequence that still fits


def pack(
    examples: Iterable[Example], lengths: Mapping[str, int], *, rows: int | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Rows in which short sequences stand one after the other, as batches of ``rows`` of them.

    Each example is a mapping of texts to whole numbers, such as ``source`` and ``target``, and
    stands in one row as a whole: the first that has room in all of ``lengths``. For each name there
    are three arrays [batch length]: itself, ``<name>_segments``, which number the examples of a row
    from 1, and ``<name>_places``, from 0 in each. What is left is 0 in all. Without ``rows`` there
    is one batch of everything; with it, the last batch is filled up with empty rows. Raises
    :class:`DataError` for an example that no row has room for, or whose tokens are not whole
    numbers. (Packing after Tensor2Tensor and T5, Raffel et al. 2020.)

    >>> (batch,) = pack([{"tokens": [5, 6, 7]}, {"tokens": [8, 9]}], {"tokens": 6})
    >>> for name, array in batch.items():
    ...     print(name, array.tolist())
    tokens [[5, 6, 7, 8, 9, 0]]
    tokens_segments [[1, 1, 1, 2, 2, 0]]
    tokens_places [[0, 1, 2, 0, 1, 0]]
    """
    if rows is not None and rows < 1:
        raise DataError(f"rows must be at least 1, or None for one batch; received {rows!r}.")
    packed: list[list[Example]] = []
    for row in _filled(examples, lengths):
        packed.append(row)
        if rows is not None and len(packed) == rows:
            yield _arrays(packed, lengths, rows)
            packed = []
    if packed:
        yield _arrays(packed, lengths, rows or len(packed))


def _filled(examples: Iterable[Example], lengths: Mapping[str, int]) -> Iterator[list[Example]]:
    """The examples of each row; a row is done when it is full, or waits longest of too many."""
    open_rows: list[tuple[list[Example], dict[str, int]]] = []
    for number, example in enumerate(examples):
        sizes = sizes_of(example, lengths, number)
        fits = (
            entry
            for entry in open_rows
            if all(entry[1][name] >= size for name, size in sizes.items())
        )
        row, room = next(fits, ([], dict(lengths)))
        if not row:
            open_rows.append((row, room))
        row.append(example)
        for name, size in sizes.items():
            room[name] -= size
        if not all(room.values()):
            open_rows = [entry for entry in open_rows if entry[0] is not row]
            yield row
        elif len(open_rows) > _OPEN:
            yield open_rows.pop(0)[0]
    for row, _ in open_rows:
        yield row


def sizes_of(example: Example, lengths: Mapping[str, int], number: int) -> dict[str, int]:
    if missing := [name for name in lengths if name not in example]:
        raise DataError(
            f"example {number} has {sorted(example)} and lacks {', '.join(map(repr, missing))}, "
            "which lengths= names."
        )
    sizes = {name: len(example[name]) for name in lengths}
    too_long = [name for name, size in sizes.items() if size > lengths[name]]
    if too_long:
        faults = "; ".join(
            f"{name!r} has {sizes[name]} and a row {lengths[name]}" for name in too_long
        )
        raise DataError(f"example {number} is too long: {faults}. Cut it, or make rows longer.")
    for name in lengths:
        _check_tokens(example[name], name, number)
    return sizes


def _check_tokens(tokens: Sequence[int], name: str, number: int) -> None:
    kind = np.asarray(tokens).dtype
    if len(tokens) and not np.issubdtype(kind, np.integer):
        raise DataError(
            f"example {number}: {name!r} is of type {kind}, and is to be whole numbers, the ids of "
            "its tokens. Encode texts with a tokenizer first."
        )


def _arrays(
    several: Sequence[Sequence[Example]], lengths: Mapping[str, int], rows: int
) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name, length in lengths.items():
        tokens, segments, places = (np.zeros([rows, length], np.int32) for _ in range(3))
        for i, row in enumerate(several):
            at = 0
            for number, example in enumerate(row, start=1):
                size = len(example[name])
                tokens[i, at : at + size] = example[name]
                segments[i, at : at + size] = number
                places[i, at : at + size] = np.arange(size)
                at += size
        arrays |= {name: tokens, f"{name}_segments": segments, f"{name}_places": places}
    return arrays
