"""Files of lines: what a model writes after each line, and how likely it finds each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...files import check_writable
from ..array import NamedArray, named
from .packing import Example, sizes_of

Batch = dict[str, NamedArray]


def for_each(
    function: Callable[[Batch], NamedArray],
    examples: Iterable[Example],
    lengths: Mapping[str, int],
    *,
    rows: int = 32,
    padding: int = 0,
) -> Iterator[np.ndarray]:
    """What a function of batches gives for each example, in order.

    An example is a mapping of names to token ids. The function takes named arrays of these names
    with the dims ``batch:rows`` and ``length``, those of ``lengths``; shorter examples end with
    ``padding``. All batches have the same shape, so that one compiled program serves them all: the
    last is filled up with examples that it has, whose results are left out. The result has the dim
    ``batch`` first. Raises :class:`DataError` for an example that is too long or lacks a name.

    >>> from meshwright.named import reduce_sum
    >>> examples = ({"source": [i] * i} for i in (1, 3, 2))
    >>> sums = lambda batch: reduce_sum(batch["source"], "length")
    >>> [int(x) for x in for_each(sums, examples, {"source": 4}, rows=2)]
    [1, 9, 4]
    """
    if rows < 1:
        raise DataError(f"rows must be at least 1; received {rows!r}.")
    numbered = enumerate(examples)
    while some := list(itertools.islice(numbered, rows)):
        for number, example in some:
            sizes_of(example, lengths, number)
        full = [some[i % len(some)][1] for i in range(rows)]
        batch = {
            name: named(_rows(full, name, length, padding), f"batch:{rows} length:{length}")
            for name, length in lengths.items()
        }
        yield from np.asarray(function(batch))[: len(some)]


def decode_file(
    function: Callable[[Batch], NamedArray],
    inputs: str | Path,
    outputs: str | Path,
    *,
    encode: Callable[[str], Example],
    decode: Callable[[Sequence[int]], str],
    lengths: Mapping[str, int],
    rows: int = 32,
    padding: int = 0,
    end: int | None = None,
) -> int:
    """Write, for each line of a file, the line that a model gives; returns how many.

    ``encode`` makes an example of a line, and ``decode`` a line of the token ids of a result, up to
    its first ``end``; both are a tokenizer's. ``function`` is that of :func:`for_each`, such as
    ``jax.jit(lambda batch: model.greedy(params, batch["source"], 64, end=1))``; for prompts of a
    language model ``padding=-1``, which leaves places free. The file appears when all lines are
    done; a failure leaves what was there. (Mesh-TensorFlow's ``decode_from_file``.)

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "in.txt").write_text("ab\\nc\\n")
    >>> decode_file(
    ...     lambda batch: batch["source"], folder / "in.txt", folder / "out.txt",
    ...     encode=lambda line: {"source": [ord(letter) for letter in line]},
    ...     decode=lambda ids: "".join(map(chr, ids)).upper(), lengths={"source": 2}, end=0,
    ... )
    2
    >>> (folder / "out.txt").read_text()
    'AB\\nC\\n'
    """

    def line(ids: np.ndarray) -> str:
        tokens = ids.tolist()
        return decode(tokens[: tokens.index(end)] if end in tokens else tokens)

    return _mapped(function, inputs, outputs, encode, line, lengths, rows, padding)


def score_file(
    function: Callable[[Batch], NamedArray],
    inputs: str | Path,
    outputs: str | Path,
    *,
    encode: Callable[[str], Example],
    lengths: Mapping[str, int],
    rows: int = 32,
    padding: int = 0,
) -> int:
    """Write, for each line of a file, how likely a model finds it; returns how many.

    As :func:`decode_file`; ``function`` gives a number for each row, such as
    ``jax.jit(lambda batch: model.log_likelihoods(params, batch["source"], batch["target"]))``, and
    ``encode`` cuts a line into source and target. (Mesh-TensorFlow's ``score_from_strings``.)

    >>> import tempfile, meshwright.named as mn
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "in.txt").write_text("ab\\nc\\n")
    >>> score_file(
    ...     lambda batch: mn.reduce_sum(mn.cast(batch["source"] > 0, "float32"), "length"),
    ...     folder / "in.txt", folder / "out.txt", lengths={"source": 2},
    ...     encode=lambda line: {"source": [ord(letter) for letter in line]},
    ... )
    2
    >>> (folder / "out.txt").read_text()
    '2.0\\n1.0\\n'
    """
    return _mapped(
        function, inputs, outputs, encode, lambda score: repr(float(score)), lengths, rows, padding
    )


def _mapped(
    function: Callable[[Batch], NamedArray],
    inputs: str | Path,
    outputs: str | Path,
    encode: Callable[[str], Example],
    line: Callable[[Any], str],
    lengths: Mapping[str, int],
    rows: int,
    padding: int,
) -> int:
    """Each line of a file through a function, into a file that appears when all of it is there."""
    path, count = Path(outputs), 0
    check_writable(path, "the lines")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with (
            Path(inputs).open(encoding="utf-8") as lines,
            unfinished.open("w", encoding="utf-8") as to,
        ):
            examples = (encode(text.rstrip("\n")) for text in lines)
            for result in for_each(function, examples, lengths, rows=rows, padding=padding):
                to.write(line(result).replace("\n", " ") + "\n")
                count += 1
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _rows(examples: Sequence[Example], name: str, length: int, padding: int) -> np.ndarray:
    rows = np.full([len(examples), length], padding, np.int32)
    for row, example in zip(rows, examples, strict=True):
        row[: len(example[name])] = example[name]
    return rows
