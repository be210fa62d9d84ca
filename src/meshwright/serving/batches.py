"""The compiled batches of a model: how requests become one of them, and answers of its outputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MeshwrightError, ModelFailedError, NotReadyError, ProcessError
from ..launch.join import naming_failures
from .api import Answer
from .figures import Figures
from .options import ServeOptions, at_once, worthwhile
from .ragged import cut_output, disagreeing
from .requests import Request, refusal, stacked
from .weights import Weights

if TYPE_CHECKING:
    from .forward import Forward, Shape

_LONGEST = 400  # characters of an error of others


class Batches:
    """The forward pass in the sizes that were compiled.

    ``why_alone`` says why each request is computed by itself; ``None`` where rows share batches.
    """

    def __init__(
        self, forward: Forward, options: ServeOptions, name: str, figures: Figures
    ) -> None:
        self.forward, self._options = forward, options
        self._name, self._figures = name, figures
        sizes = options.sizes(forward.shards)
        self.why_alone = forward.why_alone(sizes[-1])
        self.sizes = (1,) if self.why_alone else sizes
        self.outputs = forward.outputs()
        self._ragged = forward.ragged() if options.lengths else None
        self._at_once: tuple[int, ...] = ()  # by the rows that wait
        self._last_end_s = 0.0  # of a batch
        # Batches follow each other in a model of stages; what one answers waits for it elsewhere.
        depth = options.in_flight or forward.depth
        self._answering = ThreadPoolExecutor(1) if depth > 1 else None
        self._room = threading.Semaphore(depth - 1)

    def compile(self, weights: Weights) -> None:
        """Compile every size, compute each once, and leave out large ones that are slower."""
        from .forward import Shape

        forward, options = self.forward, self._options
        shapes = [Shape(rows, lengths) for rows in self.sizes for lengths in self._ahead()]
        forward.compile(shapes)
        seconds = {shape: forward.seconds(weights.state, shape) for shape in shapes}
        if not options.buckets and self.why_alone is None:
            longest = shapes[-1].lengths if shapes else ()
            by_rows = {s.rows: took for s, took in seconds.items() if s.lengths == longest}
            self.sizes = worthwhile(by_rows) or self.sizes
            if by_rows:
                self._at_once = at_once({size: by_rows[size] for size in self.sizes})
        if not forward.is_split:  # else once the others can answer
            self.check(weights)

    def check(self, weights: Weights) -> None:
        """Raise :class:`~meshwright.ModelError` where padding changes what is computed.

        Or being one row, where batches of several rows are computed, too.
        """
        from .trials import check_one_row, check_padding

        if self.sizes[0] == 1 < self.sizes[-1] and self.forward.has_form_of_one_row:
            check_one_row(self.forward, weights)
        if self._ragged is not None:
            options = self._options
            check_padding(self.forward, weights, self._ragged, options.lengths, options.pad_value)

    def check_request(self, request: Request) -> None:
        """Raise :class:`~meshwright.RequestError` for lengths that would agree once padded."""
        if self._ragged is None:
            return
        if faults := disagreeing(self._ragged, self.forward.inputs, request.lengths):
            raise refusal(faults)

    def rows_of_next(self, waiting: int) -> int:
        """How many rows the next batch takes of those that wait and would fit into one."""
        return self._at_once[waiting] if waiting < len(self._at_once) else waiting

    def _ahead(self) -> list[tuple[int, ...]]:
        """The lengths that are compiled ahead: those named, all ragged dims alike."""
        count = self.forward.num_lengths
        if not count:
            return [()]
        return [(length,) * count for length in self._options.lengths]

    def answer(self, requests: list[Request], weights: Weights) -> None:
        """Answer the requests of one batch, all with these weights.

        Of a model of stages it returns once there is room for one batch more.
        """
        try:
            wait = self._begun(requests, weights)
        except Exception as error:
            self.fail(requests, error)
            return
        if self._answering is None:
            self._finish(requests, weights, wait)
            return

        def finish() -> None:
            self._finish(requests, weights, wait)
            self._room.release()

        self._answering.submit(finish)
        self._room.acquire()

    def close(self) -> None:
        """Wait for the batches that are under way."""
        if self._answering is not None:
            self._answering.submit(lambda: None).result()
        self.forward.close()

    def computed(self, requests: list[Request], weights: Weights) -> list[np.ndarray]:
        """The outputs for the rows of these requests, one after the other."""
        return self._begun(requests, weights)()

    def _finish(
        self, requests: list[Request], weights: Weights, wait: Callable[[], list[np.ndarray]]
    ) -> None:
        try:
            with naming_failures():
                outputs = wait()
        except Exception as error:
            self.fail(requests, error)
            return
        begin = 0
        for request in requests:
            end = begin + request.rows
            rows = outputs if self.why_alone else [output[begin:end] for output in outputs]
            self._give(request, rows, weights.version)
            begin = end

    def fail(self, requests: list[Request], error: Exception) -> None:
        """Say of these requests what went wrong."""
        fault = error if isinstance(error, MeshwrightError) else _failed(self._name, error)
        if isinstance(error, ProcessError):
            fault = NotReadyError(f"a process of the model has failed: {error}")
        for request in requests:
            request.fail(fault)

    def _begun(self, requests: list[Request], weights: Weights) -> Callable[[], list[np.ndarray]]:
        """Begin what these requests need; what is returned waits for the outputs."""
        alone = self.why_alone is not None
        parts = [self._part(piece, weights, alone) for piece in self._pieces(requests)]
        if len(parts) == 1:
            return parts[0]
        return lambda: [np.concatenate(p) for p in zip(*[p() for p in parts], strict=True)]

    def _pieces(self, requests: list[Request]) -> list[list[Request]]:
        rows = sum(request.rows for request in requests)
        return _cut(requests, self.sizes[-1] if self.why_alone is None else rows)

    def _shape(self, requests: list[Request]) -> Shape:
        """What a batch of these requests is compiled for."""
        from .forward import Shape

        count = sum(request.rows for request in requests)
        fitting = () if self.why_alone else (size for size in self.sizes if size >= count)
        return Shape(next(iter(fitting), count), requests[0].padded)

    def missing(self, requests: list[Request]) -> list[Shape]:
        """What must be compiled before these requests can be answered."""
        shapes = dict.fromkeys(map(self._shape, self._pieces(requests)))
        return [shape for shape in shapes if shape not in self.forward.shapes]

    def _part(
        self, requests: list[Request], weights: Weights, alone: bool
    ) -> Callable[[], list[np.ndarray]]:
        shape = self._shape(requests)
        count, size = sum(request.rows for request in requests), shape.rows
        begin_s = time.perf_counter()
        arrays = stacked(requests, self.forward.inputs, size, self._options.pad_value)
        arrays = self.forward.source.filled(arrays, weights.rows)
        wait = self.forward.begun(weights.state, shape, arrays, weights.version)

        def outputs() -> list[np.ndarray]:
            outputs = wait()
            end_s = time.perf_counter()
            self._figures.batch(count, size, end_s - max(begin_s, self._last_end_s))
            self._last_end_s = end_s
            return outputs if alone else [output[:count] for output in outputs]

        return outputs

    def _give(self, request: Request, rows: Sequence[np.ndarray], version: str) -> None:
        named = dict(zip((spec.name for spec in self.outputs), rows, strict=True))
        if request.lengths != request.padded:
            named = self._cut_lengths(named, request)
        is_checked = self._options.finite
        if is_checked and (faulty := [n for n, v in named.items() if not _is_finite(v)]):
            text = f"the answer of model {self._name!r} is not finite: {', '.join(faulty)}"
            request.fail(ModelFailedError(f"{text} (finite=True refuses it)."))
            return
        request.give(Answer(named, version))

    def _cut_lengths(self, named: dict[str, np.ndarray], request: Request) -> dict[str, np.ndarray]:
        """Outputs without what follows from padding."""
        assert self._ragged is not None
        return {
            spec.name: cut_output(named[spec.name], dims, request.lengths)
            for spec, dims in zip(self.outputs, self._ragged.follows, strict=True)
        }


def _cut(requests: list[Request], most: int) -> list[list[Request]]:
    """The requests as they are; one that alone has more rows in pieces of at most ``most``."""
    if len(requests) > 1 or requests[0].rows <= most:
        return [requests]
    (whole,) = requests
    return [
        [
            Request(
                [array[begin : begin + most] for array in whole.arrays],
                min(most, whole.rows - begin),
                whole.lengths,
                whole.padded,
            )
        ]
        for begin in range(0, whole.rows, most)
    ]


def first_line(error: BaseException) -> str:
    """The first line of what an error says; of others' errors the rest is about their insides."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _failed(name: str, error: Exception) -> ModelFailedError:
    fault = ModelFailedError(f"model {name!r} raised {type(error).__name__}: {first_line(error)}")
    fault.__cause__ = error
    return fault


def _is_finite(value: Any) -> bool:
    if value.dtype.kind in "biu":
        return True
    return bool(np.isfinite(value.astype("float32", copy=False)).all())
