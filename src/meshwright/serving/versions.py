"""Versions of one model beside each other: who answers, and how much they differ."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import MeshwrightError, ModelError, UnknownModelError
from .api import Answer
from .model import LoadedModel


@dataclass(eq=False)
class _Version:
    model: LoadedModel
    share: float
    compare: float
    credit: float = 0.0  # of requests, so that shares are met exactly and not by chance
    owed_comparison: float = 0.0


class Versions:
    """The versions of one model; the first has what the shares of the others leave.

    Requests fall to versions in turn, in proportion to their shares: of ten requests one goes to a
    version with a share of 0.1. The share of one that is not ready goes to the others.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._versions: list[_Version] = []
        self._lock = threading.Lock()
        self._differences: dict[str, float] = {}

    @property
    def all(self) -> list[LoadedModel]:
        return [version.model for version in self._versions]

    def check(self, model: LoadedModel, share: float | None, compare: float) -> None:
        """Raise :class:`ModelError` where shares or names of one more version do not fit."""
        faults = []
        if not 0 <= compare <= 1:
            faults.append(f"compare={compare!r}: expected a number from 0 to 1")
        is_share = share is None or 0 <= share <= 1
        if not is_share or (not self._versions and share not in (None, 1)):
            faults.append(f"share={share!r}: expected a number from 0 to 1, and 1 for the first")
        rest = sum(version.share for version in self._versions[1:]) + (share or 0)
        if self._versions and rest > 1:
            faults.append(f"share={share!r}: with the other versions' that is {rest:g} of 1")
        if self._versions and not model.version:
            faults.append("version= is missing: several versions need names")
        if model.version and model.version in self.names():
            faults.append(f"version={model.version!r} is there already")
        if faults:
            raise ModelError(f"model {self.name!r}: {'; '.join(faults)}.")

    def add(self, model: LoadedModel, share: float | None, compare: float) -> None:
        """One more version; see :meth:`check`."""
        self.check(model, share, compare)
        with self._lock:
            first = not self._versions
            self._versions.append(_Version(model, 1.0 if first else share or 0.0, compare))
            self._versions[0].share = 1 - sum(version.share for version in self._versions[1:])

    def names(self) -> tuple[str, ...]:
        ordered = sorted(self._versions, key=lambda version: -version.share)
        return tuple(version.model.version for version in ordered)

    def model(self, version: str | None = None) -> LoadedModel:
        """The version of this name, or the one that the next request falls to."""
        if version is None:
            return self.chosen()
        result = next((m for m in self.all if m.version == version), None)
        if result is None:
            raise UnknownModelError(
                f"model {self.name!r} has no version {version!r}; it has {', '.join(self.names())}."
            )
        return result

    def chosen(self) -> Any:
        """The version that the next request falls to, with those that compute it, too."""
        if len(self._versions) == 1:
            return self._versions[0].model
        with self._lock:
            there = [version for version in self._versions if version.share and version.model.ready]
            if not there:
                return self._versions[0].model  # which says why it does not answer
            whole = sum(version.share for version in there)
            for version in there:
                version.credit += version.share / whole
            chosen = max(there, key=lambda version: version.credit)
            chosen.credit -= 1
            beside = []
            for version in self._versions[1:] if chosen is self._versions[0] else ():
                version.owed_comparison += version.compare if version.model.ready else 0.0
                if version.owed_comparison >= 1:
                    version.owed_comparison -= 1
                    beside.append(version.model)
        return _Compared(chosen.model, beside, self._note) if beside else chosen.model

    def compared(self) -> dict[str, float]:
        with self._lock:
            return dict(self._differences)

    def _note(self, answer: Answer, other: Answer) -> None:
        for name, value in answer.outputs.items():
            difference = _difference(value, other.outputs.get(name))
            key = f"{other.version}/{name}"
            with self._lock:
                self._differences[key] = max(self._differences.get(key, 0.0), difference)


class _Compared:
    """A version whose answers are compared with what others compute of the same inputs.

    In an event loop the client waits for the first alone, outside of one for all of them; what
    another one refuses is not compared.
    """

    def __init__(self, model: LoadedModel, others: list[LoadedModel], note: Any) -> None:
        self._model, self._others, self._note = model, others, note
        self._tasks: set[Any] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)  # all else is as of that version

    async def predict(
        self, inputs: Mapping[str, np.ndarray], *, timeout_s: float | None = None
    ) -> Answer:
        answer = await self._model.predict(inputs, timeout_s=timeout_s)
        for other in self._others:
            task = asyncio.ensure_future(self._compare(answer, other, inputs))
            self._tasks.add(task)  # a loop keeps only weak references
            task.add_done_callback(self._tasks.discard)
        return answer

    def answer(self, inputs: Mapping[str, Any], *, timeout_s: float | None = None) -> Answer:
        answer = self._model.answer(inputs, timeout_s=timeout_s)
        for other in self._others:
            try:
                self._note(answer, other.answer(inputs))
            except MeshwrightError:
                continue
        return answer

    async def _compare(self, answer: Answer, other: LoadedModel, inputs: Any) -> None:
        try:
            self._note(answer, await other.predict(inputs))
        except MeshwrightError:
            return


def _difference(one: np.ndarray, other: np.ndarray | None) -> float:
    """The largest difference of two arrays; infinite where their shapes differ.

    >>> _difference(np.ones(2), np.array([1.0, 1.5])), _difference(np.ones(2), None)
    (0.5, inf)
    """
    if other is None or one.shape != other.shape:
        return float("inf")
    if not one.size:
        return 0.0
    difference = np.abs(one.astype("float64") - other.astype("float64")).max()
    return float("inf") if np.isnan(difference) else float(difference)
