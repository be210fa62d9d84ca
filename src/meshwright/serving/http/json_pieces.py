"""Long JSON is read and written in pieces, so that other threads have their turn between them.

To read or write one text is one call of a library, during which no other thread runs Python: not
the loop of events that answers other requests. What makes a text long is nearly always an array of
numbers, which can be cut at its commas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import orjson

_LONG = 1 << 18  # bytes of a text; a shorter one is read at once
_PIECE = 1 << 16  # bytes that are read at once
_TAIL = 1 << 12  # bytes in which the end of an array is looked for
_DEEPEST = 8  # dims of an array
_FEW = 64  # elements of a list, each of which is looked at
_OPEN = re.compile(rb"\s*:?\s*((?:\[\s*)+)")
_ESCAPED = b"\\u0000"

Span = tuple[int, int, int]  # where an array begins and ends, and how many brackets open it


def loaded(text: bytes | memoryview) -> Any:
    """The value of a JSON text; NaN and Infinity may be bare words. Raises ValueError.

    >>> loaded(b"[1, NaN]")
    [1, nan]
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        whole = bytes(text)
        if b"NaN" not in whole and b"Infinity" not in whole:
            raise
        try:
            return json.loads(whole)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def loaded_in_pieces(text: bytes | memoryview) -> Any:
    """The same, with long arrays of numbers read piece by piece. Raises ValueError.

    >>> loaded_in_pieces(b'{"instances": [[1.5]]}')
    {'instances': [[1.5]]}
    """
    if len(text) > _LONG:
        whole = bytes(text)
        try:
            return _joined(whole, _long_arrays(whole))
        except ValueError:
            pass  # an array of another form, or invalid JSON: the error is that of the whole text
    return loaded(text)


def _long_arrays(text: bytes) -> list[Span]:
    """Arrays of numbers: they have no quotes."""
    spans, at = [], 0
    while at < len(text):
        if text.find(b'"', at, at + _PIECE) >= 0:
            at += _PIECE
            continue
        begin, end = text.rfind(b'"', 0, at) + 1, text.find(b'"', at)
        end = len(text) if end < 0 else end
        if end - begin > _PIECE and (span := _span(text, begin, end)):
            spans.append(span)
        at = end
    return spans


def _span(text: bytes, begin: int, end: int) -> Span | None:
    """The array that begins a text without quotes: it ends with as many brackets."""
    opening = _OPEN.match(text, begin, end)
    depth = opening[1].count(b"[") if opening else 0
    if opening is None or depth > _DEEPEST:
        return None
    closing = _closed(depth - 1, rb"\]").search(text, max(opening.end(), end - _TAIL), end)
    return (opening.start(1), closing.end(), depth) if closing else None


def _closed(depth: int, then: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"(?:\]\s*){%d}" % depth + then)


def _joined(text: bytes, spans: list[Span]) -> Any:
    """The text without these arrays, and they in their places."""
    rest, at = [], 0
    for number, (start, stop, _) in enumerate(spans):
        rest += [text[at:start], b'"%s%d"' % (_ESCAPED, number)]
        at = stop
    rest.append(text[at:])
    if any(_ESCAPED in part for part in rest[::2]):
        raise ValueError("a string looks like the place of an array")
    places = {f"\0{number}": _elements(text, *span) for number, span in enumerate(spans)}
    holder = [loaded(b"".join(rest))]
    todo: list[Any] = [holder]
    while todo:
        inside = todo.pop()
        for key, value in inside.items() if isinstance(inside, dict) else enumerate(inside):
            if isinstance(value, str) and value in places:
                inside[key] = places[value]
            elif isinstance(value, list | dict):
                todo.append(value)
    return holder[0]


def _elements(text: bytes, start: int, stop: int, depth: int) -> list[Any]:
    """The elements of an array. Each piece is JSON by itself, and has one at least."""
    comma = _closed(depth - 1, b",")
    elements: list[Any] = []
    at, end = start + 1, stop - 1
    while at <= end:
        match = comma.search(text, at + _PIECE, end)
        cut = match.end() - 1 if match else end
        piece = loaded(b"[%s]" % text[at:cut])
        if not piece:
            raise ValueError("an element is missing")
        elements += piece
        at = cut + 1
    return elements


# Writing


def dumped_in_pieces(value: Any, dumps: Callable[[Any], bytes]) -> bytes:
    """JSON of a value, of which ``dumps`` writes a piece at a time; the text is what it gives.

    >>> dumped_in_pieces({"x": [0, 1, 2]}, orjson.dumps)
    b'{"x":[0,1,2]}'
    """
    return b"".join(_dumped(value, dumps))


def _dumped(value: Any, dumps: Callable[[Any], bytes]) -> Iterator[bytes]:
    if isinstance(value, Mapping) and _size(value) > _PIECE:
        for number, (key, inside) in enumerate(value.items()):
            yield b"%s%s:" % (b"," if number else b"{", dumps(key))
            yield from _dumped(inside, dumps)
        yield b"}"
    elif isinstance(value, np.ndarray | list | tuple) and _size(value) > _PIECE:
        step = max(1, _PIECE * len(value) // _size(value))
        for start in range(0, len(value), step):
            yield b"," if start else b"["
            if step == 1:
                yield from _dumped(value[start], dumps)
            else:
                yield dumps(value[start : start + step])[1:-1]
        yield b"]"
    else:
        yield dumps(value)


def _size(value: Any) -> int:
    """About how many bytes there are to write; of a long list, going by its first element."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_size, value.values())) + len(value)
    if isinstance(value, list | tuple):
        short = len(value) <= _FEW
        return sum(map(_size, value)) if short else len(value) * _size(value[0])
    return 8
