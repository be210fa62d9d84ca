"""One version of one model: weights, compiled batches, and the queue before them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import (
    DeadlineError,
    MeshwrightError,
    ModelError,
    ModelFailedError,
    NotReadyError,
    OverloadedError,
    RequestError,
)
from ..heap import keep_freed_memory
from .accuracy import Difference, differences
from .api import Answer, ModelStatus, TensorSpec
from .batcher import Batcher
from .batches import Batches
from .compiling import Aside
from .delivery import answer_of
from .figures import Figures
from .following import Others
from .handover import Moved
from .keeping import Keeper
from .options import ServeOptions
from .requests import Request, checked
from .weights import Weights, bytes_by_device, described

_OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (RequestError, "invalid"),
    (OverloadedError, "overloaded"),
    (DeadlineError, "deadline"),
    (NotReadyError, "not_ready"),
    (asyncio.CancelledError, "cancelled"),
    (ModelFailedError, "failed"),
)


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
        self.forward: Any = None  # the compiled batches, once loaded
        self._figures = Figures()
        self._keeper = Keeper(
            source, options, self._figures, checkpoint=checkpoint, version=version
        )
        self._batcher: Batcher | None = None
        self._batches: Batches | None = None
        self._aside: Aside | None = None  # of one process alone: others compile in one order
        self._is_loaded = False
        self._is_closing = False
        self._computing: Weights | None = None  # what the present batch is computed with

    # What a face asks

    @property
    def version(self) -> str:
        """That of the weights which the next batch is computed with."""
        return self._keeper.version

    @property
    def moved(self) -> Moved | None:
        """What the newest weights took to come here, on the devices of this process."""
        return self._keeper.moved

    @property
    def missing(self) -> Callable[[], str | None]:
        """Says which process is missing, of several."""
        return self._keeper.missing

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.source.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._batches.outputs if self._batches else ()

    @property
    def ready(self) -> bool:
        is_running = self._batcher is not None and not self._is_closing
        return is_running and self.missing() is None

    @property
    def why_alone(self) -> str | None:
        """Why requests are not put into batches; ``None`` where they are."""
        return self._batches.why_alone if self._batches else None

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
        batcher, weights = self._batcher, self._keeper.weights
        requests, rows = batcher.queued if batcher else (0, 0)
        return ModelStatus(
            name=self.name,
            version=self.version,
            first_version=self._keeper.first_version,
            ready=self.ready,
            queued_requests=requests,
            queued_rows=rows,
            rows_in_flight=batcher.rows_in_flight if batcher else 0,
            bytes_by_device=bytes_by_device(weights.state) if weights else {},
            weights=described(weights.state) if weights else (),
            mesh=dict(self.source.whole_mesh.axes),
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
        assert self._batches is not None
        self._is_closing = False
        if self.source.stages is None and self.forward.is_alone:
            self._aside = Aside(self._batches, self._served_now)
        self._batcher = Batcher(
            self._compute,
            self._figures,
            max_rows=self._batches.sizes[-1],
            queue_rows=self.options.queue_rows,
            wait_s=self.options.wait_s,
            alone=self._batches.why_alone is not None,
            name=self.name,
            rows_of_next=self._batches.rows_of_next,
        )
        self._keeper.begin()

    def close(self) -> None:
        """Refuse new requests, answer those that wait, end the threads."""
        self._is_closing = True
        self._keeper.stop()
        if self._batcher is not None:
            self._batcher.close()
        if self._aside is not None:
            self._aside.close()
        if self._batches is not None:
            self._batches.close()
        self._keeper.end()
        self._batcher = None

    def _prepare(self) -> None:
        """Everything that is done once: weights, what is computed together, what is compiled."""
        options = self.options
        if self.source.whole_mesh.platform == "cpu":
            keep_freed_memory()
        self.forward = self._forward_of(self.source)
        self._keeper.weights = weights = self.first_weights()
        self._batches = Batches(self.forward, options, self.name, self._figures)
        self._compile(self._batches, weights)
        self.differences = self._compared_with_own()
        for difference in self.differences:
            self._keeper.note(logging.INFO, f"{options.precision}: {difference}")

    def _compile(self, batches: Batches, weights: Weights) -> None:
        precision = self.options.precision
        try:
            batches.compile(weights)
        except (TypeError, ValueError) as error:
            if precision is None or isinstance(error, MeshwrightError):
                raise
            raise ModelError(
                f"precision={precision!r}: the forward pass of model {self.name!r} cannot be "
                f"computed so on {self.source.whole_mesh.platform}: {error}"
            ) from error

    @staticmethod
    def _forward_of(source: Any) -> Any:
        if source.stages is None:
            from .forward import Forward

            return Forward(source)
        from .staged import StagedForward

        return StagedForward(source)

    def first_weights(self) -> Weights:
        """The weights to begin with. Raises what :meth:`load` raises."""
        return self._keeper.first()

    def _compared_with_own(self) -> tuple[Difference, ...]:
        """How far the sample's answers are from those of the source without conversion."""
        if self._sample is None or self._own is None:
            return ()
        if self.forward.is_split:
            raise ModelError("sample= is not supported by stages over several processes.")
        own = LoadedModel(self._own, replace(self.options, precision=None, follow_s=None),
                          checkpoint=self._keeper.checkpoint)  # fmt: skip
        own.load()
        try:
            expected = own.answer(self._sample).outputs
        finally:
            own.close()
        request = checked(self._sample, self.inputs, self.options.lengths)
        assert self._keeper.weights is not None
        assert self._batches is not None
        outputs = self._batches.computed([request], self._keeper.weights)
        names = [spec.name for spec in self.outputs]
        return differences(names, expected, dict(zip(names, outputs, strict=True)))

    # Over several processes

    def lead(
        self,
        tell: Callable[..., None],
        number: int,
        count: int,
        missing: Callable[[], str | None],
    ) -> None:
        """Say each batch to ``count`` others before it is begun; this is their model ``number``.

        ``missing`` says which of them is not there. Of a model of stages, give it to them. Raises
        :class:`~meshwright.ModelError` where padding changes what is computed.
        """

        def give(word: dict[str, Any], arrays: list[np.ndarray], rank: int) -> None:
            tell({**word, "do": "batch", "model": number}, arrays, rank)

        def say(shape: Any, arrays: list[np.ndarray]) -> None:
            assert self._computing is not None
            word = {"do": "batch", "model": number, "version": self._computing.version}
            tell({**word, "rows": shape.rows, "lengths": list(shape.lengths)}, arrays)

        if self.source.stages is None:
            self.forward.before = say
        else:
            self.forward.lead(give)
        self._keeper.others, self._keeper.missing = Others(tell, number, count), missing
        if self.forward.is_split:
            assert self._batches is not None
            assert self._keeper.weights is not None
            self._batches.check(self._keeper.weights)
        self._keeper.catch_up()
        self._keeper.begin()

    def follow(
        self,
        word: dict[str, Any],
        arrays: list[np.ndarray],
        reply: Callable[[dict[str, Any], list[np.ndarray]], None],
    ) -> None:
        """Do what rank 0 says: compute a batch with it, or get the weights of later ones."""
        from .forward import Shape

        if word["do"] != "batch":
            self._keeper.do(word, reply)
            return
        weights = self._keeper.named(word["version"])
        if self.source.stages is None:
            self.forward(weights.state, Shape(word["rows"], tuple(word["lengths"])), arrays)
        else:
            self.forward.follow(word, arrays, weights.state, reply)

    def answered(self, word: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Another process has computed its stages of a batch, or replies to what it was asked."""
        if self._keeper.others is not None and "request" in word:
            self._keeper.others.receive(word)
        else:
            self.forward.answered(word, arrays)

    def lose(self, error: NotReadyError) -> None:
        """Another process is missing: what waits, and what is being computed, has no answer."""
        if self.source.stages is not None:
            self.forward.lose(error)
        if self._batcher is not None:
            self._batcher.fail(error)

    # Other weights

    def update(self, params: Any = None) -> Moved:
        """Serve the values that the model has in memory now, from the next batch on.

        Those of a Program or a function are ``params``: a tree of parameters, or the state of a
        Trainer. What the hand-over took. Raises :class:`~meshwright.ModelError` for a model without
        values, for params that do not fit, or over several processes.
        """
        return self._keeper.update(params)

    def reload(self) -> bool:
        """Serve the newest checkpoint from the next batch on; whether there was another one.

        Raises :class:`~meshwright.CheckpointError` for one that cannot be served; the weights that
        were there stay. Such a one is read again only after a while, which doubles each time.
        """
        return self._keeper.reload()

    # Requests

    def _submitted(self, inputs: Mapping[str, Any], timeout_s: float | None) -> Request:
        if not self.ready or self._batcher is None:
            why = self.missing() or "it is loading or stopping"
            raise NotReadyError(f"model {self.name!r} does not answer: {why}. Try again later.")
        options = self.options
        request = checked(inputs, self.inputs, options.lengths, options.queue_rows)
        self.source.check(request.arrays)
        if self._batches is not None:
            self._batches.check_request(request)
        timeout_s = options.timeout_s if timeout_s is None else timeout_s
        if timeout_s is not None:
            request.deadline_s = request.arrived_s + timeout_s
        self._batcher.submit(request)
        return request

    async def _awaited(self, request: Request) -> Answer:
        try:
            return await answer_of(request.future, self._left_s(request))
        except TimeoutError as error:
            raise _late(error, request) from None

    @staticmethod
    def _left_s(request: Request) -> float | None:
        return None if request.deadline_s is None else request.deadline_s - time.monotonic()

    def _compute(self, requests: list[Request]) -> None:
        """Answer the requests of one batch."""
        weights = self._computing = self._served_now()
        assert self._batches is not None
        if self._aside is None or not self._aside.takes(requests):
            self._batches.answer(requests, weights)

    def _served_now(self) -> Weights:
        assert self._keeper.weights is not None
        return self._keeper.weights


def _outcome(error: BaseException) -> str:
    return next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "failed")


def _late(error: BaseException, request: Request) -> DeadlineError:
    if isinstance(error, DeadlineError):
        return error
    passed_s = time.monotonic() - request.arrived_s
    return DeadlineError(
        f"no answer after {passed_s:.3g} s, the time that the request had. Give it more time, or "
        "try again when fewer requests wait."
    )
