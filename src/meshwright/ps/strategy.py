"""``ParameterServer``: where a user's variables live, and how their changes are applied."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import ArrayError, MeshwrightError
from ..launch.addresses import to_bind
from ..launch.cluster import Cluster, DescribedCluster, cluster_of
from ..step.platform import export_platform
from .coordinator.dispatcher import Dispatcher, DispatcherSettings
from .coordinator.guardian import Guardian
from .coordinator.links import LocalLinks, SocketLinks
from .coordinator.queue import StepQueue
from .coordinator.saving import check_fits, names_in, restore_here, save_here
from .keras_training import KerasTraining
from .server.core import ServerCore
from .shared.client import Servers, checked_times, connect, connect_here
from .shared.consistency import Async, Consistency, Stale, consistency_of, gradient_options
from .shared.partitioners import Partitioner, checked_partitioner, num_shards
from .shared.placing import VariableSpec, placed, placing
from .shared.pushing import Stamp
from .shared.variables import Variable, initial
from .wire.message import Message
from .worker.context import current
from .worker.gradients import (
    WorkerStrategy,
    config_of,
    gradient_updates,
    pairs_of,
    tell_optimizer,
    worker_strategy,
)
from .worker_strategy import checked_worker

if TYPE_CHECKING:
    from .coordinator.coordinator import ClusterCoordinator

T = TypeVar("T")
_scopes: list[ParameterServer] = []


class ParameterServer(KerasTraining):
    """Variables on parameter servers, changed by functions that run on workers.

    ``cluster`` is a ``LocalCluster``, a resolver, a ``ClusterSpec`` (or a pair of one and
    its keys), or ``None``: then everything runs in this process, by the same rules.
    ``partitioner`` cuts variables into shards, ``placement`` puts each on the server with the
    fewest ``"bytes"``, or ``"round_robin"``. ``consistency`` is ``"async"``, ``"sync"``,
    ``Stale(bound)`` or ``Backup(spare)``. With ``at_least_once=True`` changes are sent at once,
    and are made twice where a function had to be run twice. A worker that is silent
    for ``dead_after_s`` is declared dead, and its work given to others. ``worker`` is the strategy
    by which ``fit`` lays a step out over the devices of each worker, ``mw.Sharded(mesh, rules)``;
    without it one device computes. Servers are waited for ``timeout_s`` at first. This process
    sends a heartbeat every ``heartbeat_s``.

    Raises :class:`~meshwright.errors.ClusterError` for a cluster that cannot be used so, and
    :class:`~meshwright.errors.UnreachableError` for servers that do not answer.

    >>> strategy = ParameterServer()
    >>> with strategy.scope():
    ...     total = strategy.variable(1.0)
    >>> total.assign_add(2.0)
    >>> float(total.read())
    3.0
    """

    def __init__(
        self,
        cluster: Any = None,
        *,
        partitioner: Partitioner | None = None,
        placement: str = "bytes",
        consistency: str | Consistency = "async",
        at_least_once: bool = False,
        heartbeat_s: float = 1.0,
        dead_after_s: float = 10.0,
        worker: Any = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.cluster: Cluster = cluster_of(cluster)
        self.partitioner = checked_partitioner(partitioner)
        self.consistency = consistency_of(consistency)
        self.at_least_once = at_least_once
        self.worker = checked_worker(worker, self.cluster)
        self.coordinator_made: ClusterCoordinator | None = None
        self._place = placing(placement)
        self._heartbeat_s, self._dead_after_s = checked_times(heartbeat_s, dead_after_s)
        self._lock = threading.RLock()
        self._names = itertools.count()
        self._loads_bytes = [0] * self.num_servers
        self._num_placed = 0
        self._created: dict[str, tuple[VariableSpec, Mapping[str, Any], np.ndarray | None]] = {}
        self._awaited: tuple[str | Path, frozenset[str]] | None = None  # to be restored when made
        self._optimizers: dict[str, Message] = {}
        self._noted_optimizers: list[Sequence[Any]] = []  # config, names, options
        self._cores = [ServerCore()] if self.cluster.spec is None else []
        self._servers = self.connect("chief:0")
        self._finalizer = weakref.finalize(self, self._servers.close)
        self._check_servers(timeout_s)

    # Variables

    def variable(
        self,
        value: Any,
        *,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
        name: str | None = None,
    ) -> Variable:
        """A variable on the servers, with a value or by an initializer.

        ``value`` is a number or an array; or, with ``shape``, the name of an initializer
        (``"zeros"``, ``"normal"``, ``"glorot_uniform"``...), one of Keras', or a mapping as servers
        know it: then each server makes its own rows. An array keeps its dtype; of Python's numbers
        a float is float32 and an int int32, unless ``dtype`` says otherwise. A variable of this
        ``name`` that is there already keeps its value. Raises
        :class:`~meshwright.errors.ArrayError` where it is there with another shape or dtype, and
        for a value that the dtype cannot hold.
        """
        init, array, full_shape, full_dtype = initial(value, shape, dtype)
        is_unnamed = name is None
        name = name or f"variable_{next(self._names)}"
        spec = self._placed(name, full_shape, full_dtype)
        is_new = self.create(spec, init, array)
        variable = Variable(spec, self)
        if not is_new and is_unnamed and array is not None:
            variable.assign(array)  # the one there is left from an earlier coordinator
        self._restore_awaited()
        return variable

    def create(
        self, spec: VariableSpec, init: Mapping[str, Any], value: np.ndarray | None = None
    ) -> bool:
        """Make a variable as this spec says; returns whether it was not there before.

        What was made is made again on a server that has lost it.
        """
        with self._lock:
            is_new = self._servers.create(spec, init, value)
            self._created[spec.name] = (spec, init, value)
        return is_new

    def place(
        self, name: str, shape: Sequence[int], dtype: Any, *, is_hash: bool = False
    ) -> VariableSpec:
        """Where a variable of this shape would lie: cut by the partitioner, placed by the rule."""
        return self._placed(name, tuple(shape), np.dtype(dtype).name, is_hash)

    def optimizer(self, head: Mapping[str, Any], server: int) -> Message:
        """Give variables of one server their optimizer, now and after a restart."""
        with self._lock:
            message = Message("optimizer", dict(head))
            answer = self._servers.ask(server, message)
            self._optimizers[f"{server}/{head['group']}"] = message
        return answer

    def apply_gradients(self, optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Let the servers' optimizer take gradients: ``[(gradient, variable), ...]``.

        For use in scheduled functions, where they are sent when the function returns, and as the
        strategy's ``consistency`` says. A gradient is an array, or a pair of row numbers and values
        (only those rows are changed). ``optimizer`` is one of Keras', or its serialized form,
        ``{"class_name": "Adam", "config": {"learning_rate": 0.001}}``.

        Raises :class:`~meshwright.errors.ModelError` for an optimizer that servers do not have.
        """
        if self.coordinator_made is not None and current() is not None:
            WorkerStrategy().apply_gradients(optimizer, pairs)
            return
        options = gradient_options(self.consistency)
        config, listed = config_of(optimizer), pairs_of(pairs)
        for pair in listed:
            self._refuse_foreign(pair)
        with self._lock:
            sent: dict[Any, Any] = {}
            servers = self._servers
            servers.push(gradient_updates(servers, sent, config, listed, options))

    def has_servers_of(self, other: ParameterServer) -> bool:
        """Whether variables of the other strategy lie on the same servers."""
        spec = self.cluster.spec
        return other is self or (spec is not None and spec == other.cluster.spec)

    def with_servers(self, do: Callable[[Servers], T]) -> T:
        """Do something with this process' own channels to the servers."""
        with self._lock:
            result = do(self._servers)
            restarts = self._servers.restarts()
        if restarts and self.coordinator_made is not None:
            self.coordinator_made.restarted(restarts)
        return result

    # Checkpoints

    def save(self, directory: str | Path, step: int = 0) -> Path:
        """Wait for all scheduled functions, and let a worker write all variables and their slots.

        The checkpoint is one of :mod:`meshwright.checkpoint`, in a directory that the workers see;
        ``read_checkpoint`` describes it. No array comes through this process. Returns its path.
        """
        coordinator = self._coordinator()
        coordinator.join()
        specs = [spec for spec, _, _ in self._created.values()]
        args = (str(directory), step, specs, self._noted_optimizers, repr(self))
        return Path(coordinator.fetch(coordinator.schedule(save_here, args=args)))

    def restore(self, directory: str | Path, model: Any = None) -> int:
        """Let a worker give the servers the newest checkpoint; returns its step.

        The variables must have been made, by the same names; the number of servers and shards may
        be another. With a Keras ``model`` the checkpoint is one of ``fit(checkpoint=)``: the model
        gets its values and the servers its tables, to predict or to evaluate. Raises
        :class:`~meshwright.errors.CheckpointError` that lists all that does not fit, before
        anything is changed.
        """
        if model is not None:
            from .training.restoring import restore_model

            return restore_model(self, model, directory)
        self._coordinator().join()
        return self._restore(directory, {name: entry[0] for name, entry in self._created.items()})

    def restore_later(self, directory: str | Path) -> int:
        """Restore the newest checkpoint as soon as all of its variables have been made.

        For programs that make variables step by step: the call to :meth:`variable` that makes the
        last one restores them all, where TensorFlow restores each as it is made; until then they
        have their initial values. Variables that are not in the checkpoint are left alone. Returns
        the checkpoint's step. Raises :class:`~meshwright.errors.CheckpointError` for a missing
        checkpoint; the call that restores raises it for variables that do not fit.
        """
        step, names = names_in(directory)
        self._awaited = (directory, names)
        self._restore_awaited()
        return step

    def _restore_awaited(self) -> None:
        if self._awaited is None or not self._awaited[1] <= self._created.keys():
            return
        (directory, names), self._awaited = self._awaited, None
        self._coordinator().join()
        self._restore(directory, {name: self._created[name][0] for name in names})

    def _restore(self, directory: str | Path, specs: Mapping[str, VariableSpec]) -> int:
        for optimizer in check_fits(directory, specs):
            self._noted(optimizer)
        coordinator = self._coordinator()
        args = (str(directory), list(specs.values()))
        return coordinator.fetch(coordinator.schedule(restore_here, args=args))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of variables that have come through this process."""
        return self._servers.num_bytes

    def _coordinator(self) -> ClusterCoordinator:
        from .coordinator.coordinator import ClusterCoordinator

        return ClusterCoordinator(self)

    @contextlib.contextmanager
    def scope(self) -> Iterator[ParameterServer]:
        """Inside, this is the strategy in use (:func:`current_strategy`)."""
        _scopes.append(self)
        try:
            yield self
        finally:
            _scopes.remove(self)

    # The cluster

    @property
    def num_servers(self) -> int:
        """Number of parameter servers; 1 without a cluster."""
        return 1 if self.cluster.spec is None else self.cluster.spec.num_tasks("ps")

    @property
    def num_workers(self) -> int:
        """Workers that the cluster is described with; more may join."""
        return 1 if self.cluster.spec is None else self.cluster.spec.num_tasks("worker")

    @functools.cached_property
    def worker_platforms(self) -> tuple[str, ...] | None:
        """JAX's platforms of the workers, where they need not be that of this process.

        Workers that others started may have GPUs where the chief has none, so one is asked.
        """
        if self.cluster.worker_devices is not None:
            return ("cpu",)
        if not isinstance(self.cluster, DescribedCluster):
            return None
        coordinator = self._coordinator()
        return (coordinator.fetch(coordinator.schedule(export_platform)),)

    def connect(self, role: str) -> Servers:
        """New channels to all servers, for one thread."""
        spec = self.cluster.spec
        if spec is None:
            return connect_here(self._cores)
        watch = functools.partial(self.cluster.check, "ps")
        return connect(spec, self.cluster.keys, role, watch=watch)

    def close(self, stop_tasks: bool = False) -> None:
        """End the coordinator, if there is one, and let go of the servers.

        The tasks wait for the next coordinator; with ``stop_tasks`` they end as well.
        """
        if self.coordinator_made is not None:
            self.coordinator_made.close(stop_tasks)
        if stop_tasks and self._finalizer.alive:
            self.with_servers(lambda servers: servers.ask_all(Message("stop")))
        self._finalizer()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the coordinator asks

    def dispatcher_settings(self) -> DispatcherSettings:
        """What the dispatcher must know."""
        return DispatcherSettings(
            self.num_servers,
            self.num_workers,
            self.consistency,
            self._heartbeat_s,
            self._dead_after_s,
            {"gradient_options": gradient_options(self.consistency)},
            self.at_least_once,
            self._noted,
            self.cluster.has_ended,
            self.cluster.replace,
        )

    def start_dispatcher(self, dispatcher: Dispatcher) -> None:
        """Let a coordinator's dispatcher speak with the workers."""
        spec = self.cluster.spec
        if spec is None:
            self._begin(dispatcher.queue)
            dispatcher.start(LocalLinks(self.connect("worker:0"), dispatcher.more), None)
            return
        # Refused while another coordinator has the address, before steps of that one are ended.
        links = SocketLinks(to_bind(spec.task_address("chief", 0)), self.cluster.keys)
        try:
            self._begin(dispatcher.queue)
        except BaseException:
            links.close()
            raise
        guardian = Guardian(lambda: self.connect("guardian"), dispatcher, self._heartbeat_s)
        dispatcher.start(links, guardian)

    def _begin(self, queue: StepQueue) -> None:
        self.with_servers(lambda servers: _begin(servers, queue))

    def refill(self, server: int, servers: Servers) -> None:
        """Make again, on a server that came back, what it may have lost."""
        for spec, init, value in list(self._created.values()):
            if any(shard.server == server for shard in spec.shards):
                servers.create(spec, init, value, only=server)
        for key, message in list(self._optimizers.items()):
            if key.startswith(f"{server}/"):
                servers.ask(server, message)
        for config, names, options in list(self._noted_optimizers):
            specs = [self._created[name][0] for name in names]
            tell_optimizer(servers, {}, config, specs, options, only=server)

    def _refuse_foreign(self, pair: Any) -> None:
        variable = pair[-1] if isinstance(pair, tuple | list) and pair else None
        if isinstance(variable, Variable) and (fault := variable.elsewhere(self)):
            raise ArrayError(fault)

    def _noted(self, optimizer: Sequence[Any]) -> None:
        are_made = all(name in self._created for name in optimizer[1])
        if are_made and optimizer not in self._noted_optimizers:
            self._noted_optimizers.append(optimizer)

    def _placed(
        self, name: str, shape: tuple[int, ...], dtype: str, is_hash: bool = False
    ) -> VariableSpec:
        with self._lock:
            if name in self._created:
                return _same(self._created[name][0], shape, dtype)
            count = num_shards(self.partitioner, shape, np.dtype(dtype))
            spec = placed(
                name,
                shape,
                dtype,
                num_shards=count,
                loads_bytes=self._loads_bytes,
                rule=self._place,
                num_placed=self._num_placed,
                is_hash=is_hash,
            )
            self._num_placed += count
            for shard in spec.shards:
                size = int(np.prod(spec.shard_shape(shard))) * np.dtype(dtype).itemsize
                self._loads_bytes[shard.server] += max(1, size)
        return spec

    def _check_servers(self, timeout_s: float) -> None:
        for channel in self._servers.channels:
            try:
                channel.connect(timeout_s)
            except MeshwrightError:
                self._finalizer()
                raise

    def __reduce__(self) -> Any:
        return worker_strategy, ()

    def __repr__(self) -> str:
        where = "this process" if self.cluster.spec is None else f"{self.num_servers} servers"
        return f"ParameterServer({where}, {self.consistency!r})"


def _same(spec: VariableSpec, shape: tuple[int, ...], dtype: str) -> VariableSpec:
    if (spec.shape, spec.dtype) != (shape, dtype):
        raise ArrayError(
            f"variable {spec.name!r} exists with shape {spec.shape} and dtype {spec.dtype}; "
            f"received shape {shape} and dtype {dtype}. Use another name, or the same shape and "
            "dtype."
        )
    return spec


def current_strategy() -> ParameterServer | None:
    """The strategy whose scope is entered, if one is."""
    return _scopes[-1] if _scopes else None


def _begin(servers: Servers, queue: StepQueue) -> None:
    """What an earlier coordinator began is over: its steps and rounds change nothing any more."""
    stats = [answer.head for answer in servers.ask_all(Message("stats"))]
    queue.begin_steps(max(of_server["first_free_step"] for of_server in stats))
    servers.push([], Stamp(done_below=queue.done_below), everywhere=True)
    if isinstance(queue.consistency, Async | Stale):
        return
    rounds = [of_server["rounds"] for of_server in stats]
    for server, first in enumerate(rounds):
        for number in range(first, max(rounds) + 1):
            servers.ask(server, Message("round", {"round": number, "of": 0}))
    servers.clip_rounds()
    queue.begin_rounds(max(rounds) + 1)
