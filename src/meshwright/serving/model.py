"""One version of one model: weights, compiled batches, and the queue before them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import CheckpointInfo, read_checkpoint
from ..errors import (
    CheckpointError,
    DeadlineError,
    MeshwrightError,
    ModelFailedError,
    NotReadyError,
    OverloadedError,
    ProcessError,
    RequestError,
)
from ..launch.join import naming_failures
from ..program import TrainState
from .accuracy import Difference, differences
from .api import Answer, ModelStatus, TensorSpec, Weight
from .batcher import Batcher
from .delivery import answer_of
from .figures import Figures
from .handover import Moved
from .options import ServeOptions, worthwhile
from .requests import Request, checked, stacked

_TIMED = 3  # batches of each size, of which the fastest counts
_OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (RequestError, "invalid"),
    (OverloadedError, "overloaded"),
    (DeadlineError, "deadline"),
    (NotReadyError, "not_ready"),
    (asyncio.CancelledError, "cancelled"),
    (ModelFailedError, "failed"),
)


@dataclass(frozen=True, eq=False)
class Weights:
    """The values that a batch is computed with; a batch has one of these from begin to end."""

    version: str
    state: TrainState


class LoadedModel:
    """A :class:`~.api.ServedModel`: the engine itself, which needs no event loop.

    :meth:`load` restores and compiles, :meth:`predict` answers in a loop, :meth:`answer` outside of
    one, :meth:`close` answers what waits and ends.
    """

    def __init__(
        self,
        source: Any,
        options: ServeOptions,
        *,
        checkpoint: str | Path | None = None,
        version: str | None = None,
        sample: Mapping[str, Any] | None = None,
        own: Any = None,
    ) -> None:
        self.source = source
        self.differences: tuple[Difference, ...] = ()  # from the model's own types, on the sample
        self._sample, self._own = sample, own
        self.options = options
        self.name: str = source.name
        self.moved: Moved | None = None
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._asked_version = version
        self.forward: Any = None  # the compiled batches, once loaded
        self._figures = Figures()
        self._weights: Weights | None = None
        self._batcher: Batcher | None = None
        self._outputs: tuple[TensorSpec, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._why_alone: str | None = None
        self._is_loaded = False
        self._stopping = threading.Event()
        self._follower: threading.Thread | None = None
        self._refused: str | None = None  # the newest checkpoint, if it could not be served
        self._reloading = threading.Lock()
        self.missing: Callable[[], str | None] = lambda: None  # which process, of several
        self._computing: Weights | None = None  # what the present batch is computed with
        self._tell_restore: Callable[[CheckpointInfo], None] | None = None
        self._restoring: Any = None  # of a process that follows rank 0

    # What a face asks

    @property
    def version(self) -> str:
        """That of the weights which the next batch is computed with."""
        weights = self._weights
        return weights.version if weights else self._asked_version or ""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.source.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._outputs

    @property
    def ready(self) -> bool:
        is_running = self._batcher is not None and not self._stopping.is_set()
        return is_running and self.missing() is None

    @property
    def why_alone(self) -> str | None:
        """Why requests are not put into batches; ``None`` where they are."""
        return self._why_alone

    async def predict(
        self, inputs: Mapping[str, np.ndarray], *, timeout_s: float | None = None
    ) -> Answer:
        begin_s = time.monotonic()
        try:
            request = self._submitted(inputs, timeout_s)
            answer = await self._awaited(request)
        except BaseException as error:
            self._figures.answer(_outcome(error))
            raise
        self._figures.answer("answered", time.monotonic() - begin_s)
        return answer

    def answer(self, inputs: Mapping[str, Any], *, timeout_s: float | None = None) -> Answer:
        """The same outside of an event loop: waits, and raises what :meth:`predict` raises."""
        begin_s = time.monotonic()
        try:
            request = self._submitted(inputs, timeout_s)
            try:
                answer = request.future.result(self._left_s(request))
            except TimeoutError as error:
                request.future.cancel()
                raise _late(error, request) from None
        except BaseException as error:
            self._figures.answer(_outcome(error))
            raise
        self._figures.answer("answered", time.monotonic() - begin_s)
        return answer

    def status(self) -> ModelStatus:
        batcher, weights = self._batcher, self._weights
        requests, rows = batcher.queued if batcher else (0, 0)
        return ModelStatus(
            name=self.name,
            version=self.version,
            ready=self.ready,
            queued_requests=requests,
            queued_rows=rows,
            rows_in_flight=batcher.rows_in_flight if batcher else 0,
            bytes_by_device=_bytes_by_device(weights),
            weights=_weights_of(weights),
            mesh=dict(self.source.mesh.axes),
            **self._figures.snapshot(),
        )

    # Loading

    def load(self) -> None:
        """Restore the weights, compile every size of batch, and begin to answer.

        After :meth:`close` it begins again, with the weights that there are. Raises
        :class:`~meshwright.CheckpointError` and :class:`~meshwright.ModelError`.
        """
        if self._batcher is not None:
            return
        if not self._is_loaded:
            self._prepare()
            self._is_loaded = True
        self._stopping.clear()
        self._batcher = Batcher(
            self._compute,
            self._figures,
            max_rows=self._sizes[-1],
            queue_rows=self.options.queue_rows,
            wait_s=self.options.wait_s,
            alone=not self._batched,
            name=self.name,
        )
        if self._checkpoint is not None and self.options.follow_s is not None:
            self._follower = threading.Thread(
                target=self._follow, name=f"meshwright-follow-{self.name}", daemon=True
            )
            self._follower.start()

    def close(self) -> None:
        """Refuse new requests, answer those that wait, end the threads."""
        self._stopping.set()
        batcher, follower = self._batcher, self._follower
        if batcher is not None:
            batcher.close()
        if follower is not None:
            follower.join()
        self._batcher = self._follower = None

    def _prepare(self) -> None:
        """Everything that is done once: weights, what is computed together, what is compiled."""
        from .forward import Forward, Shape, check_padding

        options = self.options
        self.forward = Forward(self.source)
        self._weights = self.first_weights()
        sizes = options.sizes(self.forward.shards)
        self._why_alone = self.forward.why_alone(sizes[-1])
        self._sizes = sizes if self._batched else (1,)
        self._outputs = self.forward.outputs()
        shapes = [Shape(rows, each) for rows in self._sizes for each in self._ahead()]
        self.forward.compile(shapes)
        seconds = {shape: self._warm_up(shape) for shape in shapes}
        if not options.buckets and self._batched:
            longest = shapes[-1].lengths if shapes else ()
            by_rows = {s.rows: took for s, took in seconds.items() if s.lengths == longest}
            self._sizes = worthwhile(by_rows) or self._sizes
        self.differences = self._compared_with_own()
        for difference in self.differences:
            self._figures.event(f"{options.precision}: {difference}")
        check_padding(self.forward, self._weights.state, options.lengths, options.pad_value)

    def first_weights(self) -> Weights:
        """The weights to begin with. Raises what :meth:`load` raises."""
        if self._checkpoint is not None:
            info = read_checkpoint(self._checkpoint)
            return self._restored(info, self._asked_version)
        state, self.moved = self.source.in_memory()
        return self._checked(Weights(self._asked_version or "1", state))

    def _compared_with_own(self) -> tuple[Difference, ...]:
        """How far the sample's answers are from those of the source without conversion."""
        if self._sample is None or self._own is None:
            return ()
        own = LoadedModel(self._own, replace(self.options, precision=None, follow_s=None),
                          checkpoint=self._checkpoint)  # fmt: skip
        own.load()
        try:
            wanted = own.answer(self._sample).outputs
        finally:
            own.close()
        request = checked(self._sample, self.inputs, self.options.lengths)
        assert self._weights is not None
        outputs = self._outputs_of([request], self._weights.state)
        names = [spec.name for spec in self._outputs]
        return differences(names, wanted, dict(zip(names, outputs, strict=True)))

    def _ahead(self) -> list[tuple[int, ...]]:
        """The lengths that are compiled ahead: those named, all ragged dims alike."""
        count = self.forward.num_lengths
        if not count:
            return [()]
        return [(length,) * count for length in self.options.lengths]

    def _warm_up(self, shape: Any) -> float:
        """Compute a batch of zeros; the seconds that it takes after the first time."""
        assert self._weights is not None
        sizes = iter(shape.lengths)
        dims = [[next(sizes) if n is None else n for n in spec.shape[1:]] for spec in self.inputs]
        zeros = [
            np.zeros((shape.rows, *d), spec.dtype)
            for d, spec in zip(dims, self.inputs, strict=True)
        ]
        times = []
        for _ in range(_TIMED + 1):
            begin_s = time.perf_counter()
            self.forward(self._weights.state, shape, zeros)
            times.append(time.perf_counter() - begin_s)
        return min(times[1:])

    # Over several processes

    def lead(self, tell: Callable[..., None], number: int) -> None:
        """Say each batch to the others before it is begun; this is their model ``number``."""

        def say(shape: Any, arrays: list[np.ndarray]) -> None:
            assert self._computing is not None
            word = {"do": "batch", "model": number, "version": self._computing.version}
            tell({**word, "rows": shape.rows, "lengths": list(shape.lengths)}, arrays)

        self.forward.before = say
        self._tell_restore = lambda info: tell(
            {"do": "restore", "model": number, "directory": str(info.directory)}
        )

    def follow(self, word: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Do what rank 0 says: compute a batch with it, or restore the weights of later ones."""
        from .forward import Shape

        if word["do"] == "restore":
            info = read_checkpoint(word["directory"])
            self._restoring = ThreadPoolExecutor(1).submit(self._restored, info)
            return
        assert self._weights is not None
        weights = self._weights
        if word["version"] != weights.version:
            weights = self._weights = self._restoring.result()
        self.forward(weights.state, Shape(word["rows"], tuple(word["lengths"])), arrays)

    def lose(self, error: NotReadyError) -> None:
        """Another process is missing: what waits, and what is being computed, has no answer."""
        if self._batcher is not None:
            self._batcher.fail(error)

    # Other weights

    def update(self) -> Moved:
        """Serve the values that the model has in memory now, from the next batch on.

        What the hand-over took. Raises :class:`~meshwright.ModelError` for a model without values.
        """
        with self._reloading:
            state, moved = self.source.in_memory()
            number = int(self.version) + 1 if self.version.isdecimal() else 1
            self._swap(self._checked(Weights(str(number), state)), f"handed over: {moved}")
            self.moved = moved
        return moved

    def reload(self) -> bool:
        """Serve the newest checkpoint from the next batch on; whether there was another one.

        Raises :class:`~meshwright.CheckpointError` for one that cannot be served; the weights that
        were there stay.
        """
        assert self._checkpoint is not None
        with self._reloading:
            info = read_checkpoint(self._checkpoint)
            if str(info.step) == self.version or str(info.directory) == self._refused:
                return False
            begin_s = time.perf_counter()
            try:
                if self._tell_restore is not None:
                    self._tell_restore(info)
                weights = self._restored(info)
            except MeshwrightError as error:
                self._refused = str(info.directory)
                self._figures.event(f"refused {info.directory.name}: {_line(error)}")
                raise
            self._swap(weights, f"restored in {time.perf_counter() - begin_s:.2f} s")
            return True

    def _swap(self, weights: Weights, how: str) -> None:
        before = self.version
        self._weights = weights  # a batch that is being computed keeps those that it began with
        self._figures.event(f"version {before} -> {weights.version}: {how}")

    def _restored(self, info: CheckpointInfo, version: str | None = None) -> Weights:
        """The weights of a checkpoint; whatever its files make Orbax raise is one error."""
        try:
            state = self.source.restored(info)
        except MeshwrightError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{info.directory} cannot be read: {_line(error)} It may be damaged, or have been "
                "removed by the run that writes there."
            ) from error
        return self._checked(Weights(version or str(info.step), state))

    def _checked(self, weights: Weights) -> Weights:
        if self.options.finite and (names := _not_finite(weights.state)):
            raise CheckpointError(
                f"version {weights.version} has weights that are not finite: {', '.join(names)}."
            )
        return weights

    def _follow(self) -> None:
        from contextlib import suppress

        assert self.options.follow_s is not None
        while not self._stopping.wait(self.options.follow_s):
            with suppress(CheckpointError):  # noted as an event; the present weights stay
                self.reload()

    # Requests

    def _submitted(self, inputs: Mapping[str, Any], timeout_s: float | None) -> Request:
        if not self.ready or self._batcher is None:
            why = self.missing() or "it is loading or stopping"
            raise NotReadyError(f"model {self.name!r} does not answer: {why}.")
        options = self.options
        request = checked(inputs, self.inputs, options.lengths, options.queue_rows)
        timeout_s = options.timeout_s if timeout_s is None else timeout_s
        if timeout_s is not None:
            request.deadline_s = request.arrived_s + timeout_s
        self._batcher.submit(request)
        return request

    async def _awaited(self, request: Request) -> Answer:
        try:
            async with asyncio.timeout(self._left_s(request)):
                return await answer_of(request.future)
        except TimeoutError as error:
            raise _late(error, request) from None

    @staticmethod
    def _left_s(request: Request) -> float | None:
        return None if request.deadline_s is None else request.deadline_s - time.monotonic()

    def _compute(self, requests: list[Request]) -> None:
        """Answer the requests of one batch, all with the same weights."""
        weights = self._computing = self._weights
        assert weights is not None
        try:
            with naming_failures():
                outputs = self._outputs_of(requests, weights.state)
        except Exception as error:
            fault = error if isinstance(error, MeshwrightError) else _failed(self.name, error)
            if isinstance(error, ProcessError):
                fault = NotReadyError(f"a process of the model has failed: {error}")
            for request in requests:
                request.fail(fault)
            return
        begin = 0
        for request in requests:
            end = begin + request.rows
            rows = [output[begin:end] for output in outputs] if self._batched else outputs
            self._give(request, rows, weights.version)
            begin = end

    @property
    def _batched(self) -> bool:
        return self._why_alone is None

    def _outputs_of(self, requests: list[Request], state: TrainState) -> list[np.ndarray]:
        from .forward import Shape

        rows, padded = sum(request.rows for request in requests), requests[0].padded
        most = self._sizes[-1] if self._batched else rows
        parts = []
        for piece in _cut(requests, most):
            count = sum(request.rows for request in piece)
            size = next((s for s in self._sizes if s >= count), count) if self._batched else count
            begin_s = time.perf_counter()
            arrays = stacked(piece, self.inputs, size, self.options.pad_value)
            outputs = self.forward(state, Shape(size, padded), arrays)
            self._figures.batch(count, size, time.perf_counter() - begin_s)
            parts.append([output[:count] for output in outputs] if self._batched else outputs)
        return parts[0] if len(parts) == 1 else [np.concatenate(each) for each in zip(*parts)]  # noqa: B905

    def _give(self, request: Request, rows: Sequence[np.ndarray], version: str) -> None:
        named = dict(zip((spec.name for spec in self._outputs), rows, strict=True))
        if request.lengths != request.padded:
            named = self._cut_lengths(named, request)
        if self.options.finite and (faulty := [n for n, v in named.items() if not _is_finite(v)]):
            text = f"the answer of model {self.name!r} is not finite: {', '.join(faulty)}"
            request.fail(ModelFailedError(f"{text} (finite=True refuses it)."))
            return
        request.give(Answer(named, version))

    def _cut_lengths(self, named: dict[str, np.ndarray], request: Request) -> dict[str, np.ndarray]:
        """Outputs without what follows from padding: dims as long as a padded one."""
        true = dict(zip(request.padded, request.lengths, strict=True))
        cut = {}
        for spec in self._outputs:
            value = named[spec.name]
            ends = [
                slice(true.get(size) if wanted is None else None)
                for size, wanted in zip(value.shape[1:], spec.shape[1:], strict=True)
            ]
            cut[spec.name] = value[(slice(None), *ends)]
        return cut


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


def _outcome(error: BaseException) -> str:
    return next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "failed")


def _late(error: BaseException, request: Request) -> DeadlineError:
    if isinstance(error, DeadlineError):
        return error
    passed_s = time.monotonic() - request.arrived_s
    return DeadlineError(f"no answer after {passed_s:.3g} s, the time that the request had.")


def _failed(name: str, error: Exception) -> ModelFailedError:
    fault = ModelFailedError(f"model {name!r} raised {type(error).__name__}: {_line(error)}")
    fault.__cause__ = error
    return fault


def _line(error: BaseException) -> str:
    """The first line of what an error says; of others' errors the rest is about their insides."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_finite(value: np.ndarray) -> bool:
    if value.dtype.kind in "biu":
        return True
    return bool(np.isfinite(value.astype("float32", copy=False)).all())


def _not_finite(state: TrainState) -> list[str]:
    import jax
    import jax.numpy as jnp

    def is_finite(value: Any) -> Any:
        floats = jnp.issubdtype(value.dtype, jnp.floating)
        return jnp.isfinite(value).all() if floats else jnp.array(True)

    flags = jax.jit(lambda values: {p: is_finite(v) for p, v in values.items()})(state.params)
    return [path for path, flag in flags.items() if not bool(flag)]


def _bytes_by_device(weights: Weights | None) -> dict[str, int]:
    import jax

    found: dict[str, int] = {}
    for array in jax.tree.leaves(weights.state) if weights else ():
        for shard in array.addressable_shards:
            name = f"{shard.device.platform}:{shard.device.id}"
            found[name] = found.get(name, 0) + shard.data.nbytes
    return found


def _weights_of(weights: Weights | None) -> tuple[Weight, ...]:
    if weights is None:
        return ()
    return tuple(
        Weight(
            path,
            str(array.dtype),
            tuple(array.shape),
            tuple(array.sharding.spec) + (None,) * (array.ndim - len(array.sharding.spec)),
            max(shard.data.nbytes for shard in array.addressable_shards),
        )
        for part in weights.state[:2]
        for path, array in part.items()
    )
