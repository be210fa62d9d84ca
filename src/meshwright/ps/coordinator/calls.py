"""Scheduled calls as they are sent: functions and arguments packed once, iterators replaced."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ShippingError
from ..shared.variables import Variable
from ..worker.iterators import worker_iterator
from .data import ElementSource
from .shipping import Packed, is_iterator, key_of, name_of, pack, unpack
from .values import OWN, PerWorkerDataset, PerWorkerValues, RemoteValue

_MOST_FUNCTIONS = 1024  # of which the bytes are kept here


@dataclass(frozen=True, eq=False)
class Function:
    """A function as it travels; ``iterators`` are those that it closes over."""

    key: str
    name: str
    packed: Packed
    iterators: Mapping[str, Any]
    original: Any = None  # kept where its end cannot be noticed, so that no other gets its identity


@dataclass(frozen=True, eq=False)
class Scheduled:
    """What the queue's steps carry."""

    function: Function
    packed: Packed
    iterators: tuple[str, ...]
    value: RemoteValue
    kept: Mapping[str, Any]  # the iterators themselves, for as long as the step is to be done


class Packer:
    """Packs functions and arguments, and knows every iterator that was met in them.

    A function is packed when it is first scheduled: what it closes over is taken then. It is
    forgotten when the program has no more of it; steps that are under way keep what they need.
    """

    def __init__(self, strategy: Any = None) -> None:
        self._strategy = strategy  # whose variables may travel
        self.sources: dict[str, ElementSource] = {}
        self.datasets: dict[str, tuple[Function, str]] = {}  # iterator -> what makes it, sharding
        self.dropped: list[str] = []  # iterators of workers that are out of use
        self.forgotten: list[str] = []  # functions that workers need keep no longer
        self._functions: dict[Any, Function] = {}
        self._num_alive: Counter[str] = Counter()  # functions of one key: equal bytes
        self._shared: dict[int, tuple[str, Any]] = {}
        self._numbers = itertools.count()

    def function(self, function: Callable[..., Any]) -> Function:
        """The function, packed; raises :class:`~meshwright.errors.ShippingError` if it cannot."""
        identity = _identity(function)
        packed_before = self._functions.get(identity)
        if packed_before is not None:
            return packed_before
        if not callable(function):
            raise ShippingError(f"{function!r} cannot be scheduled: it is not callable.")
        name = name_of(function)
        iterators: dict[str, Any] = {}
        packed = pack(function, lambda one: self._replaced(one, iterators), f"function {name!r}")
        key = key_of(*packed)
        watched = self._watch(function, identity, key)
        packed_function = Function(key, name, packed, iterators, None if watched else function)
        if len(self._functions) >= _MOST_FUNCTIONS:
            self._forget(next(iter(self._functions)))
        self._functions[identity] = packed_function
        self._num_alive[key] += 1
        return packed_function

    def _watch(self, function: Any, identity: Any, key: str) -> bool:
        """Forget a function when it is gone; ``False`` where that cannot be observed."""
        is_method = hasattr(function, "__func__")
        owner, packer = function.__self__ if is_method else function, weakref.ref(self)

        def forget() -> None:
            mine = packer()
            if mine is not None and identity in mine._functions:
                mine._forget(identity, key)

        try:
            weakref.finalize(owner, forget).atexit = False
        except TypeError:
            return False
        return True

    def _forget(self, identity: Any, key: str | None = None) -> None:
        if key is not None and self._functions[identity].key != key:
            return
        key = self._functions.pop(identity).key
        self._num_alive[key] -= 1
        if not self._num_alive[key]:
            del self._num_alive[key]
            self.forgotten.append(key)

    def arguments(
        self, function: Function, args: Any, kwargs: Any
    ) -> tuple[Packed, dict[str, Any]]:
        """The arguments of one call, packed, and all iterators that the call may use."""
        iterators = dict(function.iterators)
        what = f"an argument of {function.name!r}"
        packed = pack((args, kwargs), lambda one: self._replaced(one, iterators), what)
        return packed, iterators

    def begin(self, dataset: PerWorkerDataset, num_workers: int) -> PerWorkerValues:
        """A new iterator over a dataset of the workers."""
        function = self.function(dataset.dataset_fn)
        key = f"iterator {next(self._numbers)} over {function.name}"
        self.sources[key] = ElementSource(dataset.sharding, num_workers=num_workers)
        self.datasets[key] = (function, dataset.sharding)
        values = PerWorkerValues(key, dataset.sharding)
        weakref.finalize(values, self.dropped.append, key)
        return values

    def own(self, make: Callable[[], Any]) -> PerWorkerValues:
        """A value that each worker makes when it first needs it."""
        function = self.function(make)
        key = f"value {next(self._numbers)} made by {function.name}"
        self.sources[key], self.datasets[key] = ElementSource(OWN), (function, OWN)
        values = PerWorkerValues(key, OWN)
        weakref.finalize(values, self.dropped.append, key)
        return values

    def forget(self, key: str) -> None:
        """Drop an iterator over a dataset of the workers."""
        del self.sources[key], self.datasets[key]

    def _replaced(self, value: Any, iterators: dict[str, Any]) -> Any:
        if isinstance(value, PerWorkerValues):
            key = value.key
        elif isinstance(value, Variable):
            if fault := value.elsewhere(self._strategy):
                raise ShippingError(fault)
            return None
        elif isinstance(value, PerWorkerDataset):
            raise ShippingError("pass iter(dataset) to a scheduled function, not the dataset.")
        elif is_iterator(value):
            key = self._key_of(value)
        else:
            return None
        iterators[key] = value
        return worker_iterator, (key,)

    def _key_of(self, iterator: Iterator[Any]) -> str:
        if id(iterator) not in self._shared:
            key = f"shared iterator {next(self._numbers)} ({type(iterator).__name__})"
            draw = map(functools.partial(_as_it_is_now, key), iterator)
            self.sources[key] = ElementSource("shared", draw)
            self._shared[id(iterator)] = (key, iterator)
        return self._shared[id(iterator)][0]


def _as_it_is_now(key: str, element: Any) -> Any:
    """A copy: it is drawn before it is sent, and its iterator may use the same memory again."""
    return unpack(*pack(element, what=f"an element of {key}"))


def _identity(function: Any) -> Any:
    # A bound method is made anew each time that it is asked for.
    owner = getattr(function, "__self__", None)
    inner = getattr(function, "__func__", None)
    return (id(owner), id(inner)) if owner is not None and inner is not None else id(function)
