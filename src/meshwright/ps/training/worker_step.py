"""One training step on a worker: pull what has changed, compute, push, and pull with the answer.

A :class:`TrainStep` is what ``fit`` schedules. It travels once to each worker, and there keeps what
it has compiled and the values that it read last in the worker's cache.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from ...errors import BatchError, TaskError
from ..shared.placing import ShardPlace, VariableSpec
from ..worker.context import Context, current
from ..worker.iterators import IndexedElements
from ..worker.updates import Update
from .compiled import Compiled, CompiledStep, Looked, padded_rows
from .compression import Compression, pack_gradient
from .data import DatasetMaker
from .exported import Exported
from .signature import Signature, on_devices

_MOST_MODELS = 4  # whose compiled code a worker keeps
_SPREAD = 0x9E3779B9  # the golden ratio: far apart for neighbouring workers
_MOST_KEPT = 2  # datasets of epochs that a worker keeps of a run


Seeds = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Specs:
    """Where each array of a step lies on the servers, by path.

    ``counts`` is a table with a row for each epoch, in which its metrics are summed: a server that
    comes back with older values has no row of an epoch that began since.
    """

    params: Mapping[str, VariableSpec] = field(default_factory=dict)
    moving: Mapping[str, VariableSpec] = field(default_factory=dict)
    frozen: Mapping[str, VariableSpec] = field(default_factory=dict)
    tables: Mapping[str, VariableSpec] = field(default_factory=dict)
    counts: VariableSpec | None = None

    @property
    def pulled(self) -> tuple[VariableSpec, ...]:
        """What a worker reads for every step."""
        return (*self.params.values(), *self.moving.values())


def by_shard(spec: VariableSpec) -> list[tuple[VariableSpec, slice]]:
    """Each shard as a variable of its own, and which rows of the whole it holds.

    >>> from meshwright.ps.shared.placing import placed
    >>> spec = placed("w", (5, 2), "float32", num_shards=2, loads_bytes=[0, 0])
    >>> [(one.name, one.shape, rows) for one, rows in by_shard(spec)]
    [('w/0', (3, 2), slice(0, 3, None)), ('w/1', (2, 2), slice(3, 5, None))]
    """
    if spec.is_whole:
        return [(spec, slice(None))]
    shards: list[tuple[VariableSpec, slice]] = []
    for shard in spec.shards:
        rows = shard.stop - shard.start
        place = ShardPlace(shard.name, shard.server, 0, rows)
        own = VariableSpec(shard.name, (rows, *spec.shape[1:]), spec.dtype, (place,), spec.is_hash)
        shards.append((own, slice(shard.start, shard.stop)))
    return shards


@dataclass(frozen=True, eq=False)
class TrainStep:
    """A step of training, as a function of an iterator over batches; returns the loss.

    ``key`` names the run: what a worker keeps belongs to it. ``seeds`` are the model's own; every
    worker but the first makes others of them.
    """

    key: str
    exported: Exported
    specs: Specs
    seeds: Mapping[str, np.ndarray]
    compression: Compression | None = None
    fresh: bool = False  # read before each step: others' updates must be seen
    local: bool = False  # several steps on the worker between two talks with the servers
    slots: Mapping[str, np.ndarray] = field(default_factory=dict)  # that local steps begin with

    def __call__(
        self,
        batches: Iterator[Any],
        edition: int = 0,
        count: int = 1,
        aside: Seeds | None = None,
        epoch: int = 0,
    ) -> float:
        """Train on the next batch, or with ``local`` on ``count`` batches.

        ``edition`` changes when variables were changed from outside the training steps, ``aside``
        is how far the seeds were moved by others since the run began, and ``epoch`` the key of the
        metrics.
        """
        if not self.local:
            return engine(self).train(here(), next(batches), edition, aside, epoch)
        batches_here = [next(batches), *itertools.islice(batches, count - 1)]
        return engine(self).train_locally(here(), batches_here, edition, aside, epoch)


def here() -> Context:
    """The worker's context. Raises :class:`~meshwright.TaskError` outside of workers."""
    context = current()
    if context is None:
        raise TaskError("training steps run on workers: schedule them with a ClusterCoordinator.")
    return context


def engine(step: TrainStep, role: str = "training") -> Engine:
    """What this worker keeps of a run; made when first asked for."""
    cache = here().cache
    current = cache.get(role)
    if current is None or current.key != step.key:  # one run at a time: an older one is let go
        current = cache[role] = Engine(step, here().index, compiled_of(step.exported, cache))
    return current


def compiled_of(exported: Exported, cache: dict[Any, Any]) -> Compiled:
    """What is compiled of a model; the next run of the same model finds it there."""
    by_digest: dict[str, Compiled] = cache.setdefault("training code", {})
    if exported.digest not in by_digest:
        while len(by_digest) >= _MOST_MODELS:
            del by_digest[next(iter(by_digest))]
        by_digest[exported.digest] = Compiled(exported)
    return by_digest[exported.digest]


class Engine:
    """A worker's side of one run: compiled steps, the values read last, its seeds."""

    def __init__(self, step: TrainStep, index: int, compiled: Compiled) -> None:
        self.key = step.key
        self._specs, self._compression = step.specs, step.compression
        self._compiled, self._ids = compiled, step.exported.parts.ids
        self._fixed = {table.name for table in step.exported.parts.tables if not table.trains}
        self._slots: Any = dict(step.slots)
        self._fresh = step.fresh
        self._seeds: Any = {path: spread(seed, index) for path, seed in step.seeds.items()}
        self._aside: Seeds = {}  # how far others had moved the seeds before the last step
        parts = step.exported.parts
        self._draws_held_out = dict(zip(parts.seeds, parts.draws_held_out, strict=True))
        self._edition: int | None = None
        self._pulled: list[Any] = []
        self._frozen: dict[str, Any] = {}
        self._residuals: dict[str, np.ndarray] = {}  # what compression left out

    def train(
        self,
        context: Context,
        batch: Any,
        edition: int,
        aside: Seeds | None = None,
        epoch: int = 0,
    ) -> float:
        """One step; the loss."""
        self._follow(aside)
        step, leaves, host = self._prepared(batch)
        self._pull(context, edition, step)
        looked = step.look(host)
        grads, row_grads, moves, seeds, counts, loss = step.gradients(
            *self._arguments(context, looked, leaves, self._seeds, make=True)
        )
        updates = [
            *self._gradients(grads, context),
            *self._row_gradients(row_grads, looked, context),
            *self._additions(moves, counts, epoch),
        ]
        self._push(context, updates)
        self._seeds = seeds
        return float(loss)

    def train_locally(
        self,
        context: Context,
        batches: list[Any],
        edition: int,
        aside: Seeds | None = None,
        epoch: int = 0,
    ) -> float:
        """Several steps on this worker, of which the servers get how far they went; the last loss.

        The way from where they began is what an optimizer's gradient is: SGD with rate 1 goes it.
        """
        self._follow(aside)
        prepared = [self._prepared(batch) for batch in batches]
        self._pull(context, edition, prepared[0][0])
        before = self._values()
        params, moving = before
        total, loss = np.zeros([]), 0.0
        for step, leaves, _ in prepared:
            params, moving, self._seeds, self._slots, counts, loss = step.local(
                params, moving, self._frozen, self._seeds, self._slots, leaves
            )
            total = total + np.asarray(counts, np.float64)
        way = {path: before[0][path] - np.asarray(value) for path, value in params.items()}
        moves = {path: np.asarray(value) - before[1][path] for path, value in moving.items()}
        updates = [*self._gradients(way, context), *self._additions(moves, total, epoch)]
        self._push(context, updates)
        return float(loss)

    def measure(self, context: Context, batch: Any, edition: int, seeds: Seeds) -> np.ndarray:
        """The counts of the metrics over one batch of validation, which draws from ``seeds``."""
        counts, _ = self._computed(context, batch, edition, "measures", seeds)
        return np.asarray(counts, np.float64)

    def predict(self, context: Context, batch: Any, seeds: Seeds) -> list[np.ndarray]:
        """The arrays that the model returns for one batch of inputs."""
        outputs, num_rows = self._computed(context, batch, 0, "outputs", seeds)
        return [np.asarray(output)[:num_rows] for output in outputs]  # more where it was filled up

    def seeds_at(self, seeds: Seeds, number: int) -> Seeds:
        """The seeds for a batch before which ``number`` others are evaluated or predicted.

        They are the model's own on each worker: who computes a batch does not matter.
        """
        draws = self._draws_held_out
        return {path: moved(seed, draws[path] * number) for path, seed in seeds.items()}

    def _follow(self, aside: Seeds | None) -> None:
        """Move the seeds as others have moved them since the last step."""
        for path, way in (aside or {}).items():
            seed = np.asarray(self._seeds[path])
            self._seeds[path] = seed + (way - self._aside.get(path, np.zeros_like(way)))
        self._aside = aside or self._aside

    def _computed(
        self,
        context: Context,
        batch: Any,
        edition: int,
        function: Literal["measures", "outputs"],
        seeds: Seeds,
    ) -> tuple[Any, int]:
        """What a function that changes nothing gives for a batch, and the batch's rows."""
        step, leaves, host = self._prepared(batch)
        self._pull(context, edition, step, trains=False)
        arguments = self._arguments(context, step.look(host), leaves, seeds)
        return getattr(step, function)(*arguments), len(host[0])

    def _prepared(self, batch: Any) -> tuple[CompiledStep, list[Any], list[Any]]:
        batch = as_batch(batch)
        host = jax.tree.leaves(batch)
        for ids in self._ids:
            ids.check(host)
        step = self._compiled.step_for(Signature.of(batch))
        return step, step.filled([on_devices(leaf) for leaf in host]), host

    def _pull(
        self, context: Context, edition: int, step: CompiledStep, trains: bool = True
    ) -> None:
        """Read all, unless the last push has brought it, or nothing has changed since."""
        if self._edition == edition and not (self._fresh and trains):
            return
        specs = self._specs
        if self._edition is None and specs.frozen:
            values = context.servers.read(list(specs.frozen.values()))
            self._frozen = step.put_frozen(dict(zip(specs.frozen, values, strict=True)))
        self._pulled = context.servers.read(list(specs.pulled))
        self._edition = edition

    def _values(self) -> tuple[dict[str, Any], dict[str, Any]]:
        count = len(self._specs.params)
        params = dict(zip(self._specs.params, self._pulled[:count], strict=True))
        return params, dict(zip(self._specs.moving, self._pulled[count:], strict=True))

    def _arguments(
        self,
        context: Context,
        looked: Looked,
        leaves: list[Any],
        seeds: Any,
        *,
        make: bool = False,
    ) -> tuple[Any, ...]:
        """Those of a step; ``make`` the rows of keys that a hash table does not have yet."""
        rows = {
            name: padded_rows(
                context.servers.lookup(
                    self._specs.tables[name], ids, make=make and name not in self._fixed
                ),
                looked.num_rows[name],
            )
            for name, ids in looked.unique.items()
        }
        return (*self._values(), self._frozen, seeds, rows, looked.positions, leaves)

    # What is pushed

    def _push(self, context: Context, updates: list[Update]) -> None:
        answer = context.push(updates, () if self._fresh else self._specs.pulled)
        self._pulled = list(answer.values)

    def _gradients(self, grads: Mapping[str, Any], context: Context) -> Iterator[Update]:
        options = context.settings.get("gradient_options", {})
        for path, spec in self._specs.params.items():
            gradient = np.asarray(grads[path])
            if self._compression is None:
                yield Update(spec, "gradient", (gradient,), options)
                continue
            for shard, rows in by_shard(spec):
                part = gradient[rows] if gradient.ndim else gradient
                packed = pack_gradient(self._compression, part, self._residuals.get(shard.name))
                if packed.residual is not None:
                    self._residuals[shard.name] = packed.residual
                yield Update(shard, "gradient", packed.arrays, {**options, **packed.options})

    def _row_gradients(
        self, grads: Mapping[str, Any], looked: Looked, context: Context
    ) -> Iterator[Update]:
        options = context.settings.get("gradient_options", {})
        for name, ids in looked.unique.items():
            if name in self._fixed:
                continue
            values = np.asarray(grads[name])[: len(ids)]
            yield Update(self._specs.tables[name], "rows_gradient", (ids, values), options)

    def _additions(self, moves: Mapping[str, Any], counts: Any, epoch: int) -> Iterator[Update]:
        for path, spec in self._specs.moving.items():
            move = np.asarray(moves[path])
            if move.dtype.kind == "f":
                # As a gradient for SGD of rate 1, for then a round goes the mean of its moves.
                yield Update(spec, "gradient", (-move,))
            else:
                yield Update(spec, "add", (move,))
        if self._specs.counts is not None:
            row = np.asarray(counts, np.float64).reshape(1, -1)
            yield Update(self._specs.counts, "rows_add", (np.array([epoch]), row))


def spread(seed: np.ndarray, index: int) -> np.ndarray:
    """The seed of worker ``index``: the first keeps the model's own, the others get others.

    >>> spread(np.array([7, 0], "uint32"), 0).tolist()
    [7, 0]
    """
    mixed = np.array(seed)
    if index:
        first = int(mixed.reshape(-1)[0])
        mixed.reshape(-1)[0] = (first + index * _SPREAD) % 2**32
    return mixed


def moved(seed: np.ndarray, draws: int) -> np.ndarray:
    """The seed after ``draws`` more draws: its last number counts them.

    >>> moved(np.array([7, 2], "uint32"), 3).tolist()
    [7, 5]
    """
    after = np.array(seed)
    after.reshape(-1)[-1:] += np.asarray(draws).astype(after.dtype)
    return after


def as_batch(element: Any) -> Any:
    """An element of a dataset as ``(x, y, sample weights)``, shorter where parts are absent.

    TensorFlow's and PyTorch's tensors become NumPy arrays. Raises :class:`~meshwright.BatchError`
    for a batch without rows: it has neither a loss nor a gradient.
    """

    def one(leaf: Any) -> Any:
        return leaf.numpy() if hasattr(leaf, "numpy") else leaf

    if isinstance(element, list):
        element = tuple(element)
    batch = jax.tree.map(one, element)
    if any(np.shape(leaf)[:1] == (0,) for leaf in jax.tree.leaves(batch)):
        shapes = ", ".join(str(np.shape(leaf)) for leaf in jax.tree.leaves(batch))
        raise BatchError(
            f"a batch has no rows; its arrays have the shapes {shapes}. Leave empty batches out of "
            "the dataset, for example those of which a filter has left nothing."
        )
    return batch


@dataclass(frozen=True, eq=False)
class IndexedStep:
    """A step of training on the elements of these numbers."""

    step: TrainStep
    maker: DatasetMaker

    def __call__(
        self,
        dataset: int,
        number: int,
        edition: int = 0,
        count: int = 1,
        aside: Seeds | None = None,
        epoch: int = 0,
    ) -> float:
        """Train on ``count`` elements from ``number`` on; ``dataset`` changes with the epoch."""
        # When the coordinator says that the run is over, the function goes, and its data with it.
        runs: Any = here().cache.setdefault("training data", weakref.WeakKeyDictionary())
        by_dataset: dict[int, IndexedElements] = runs.setdefault(self, {})
        if dataset not in by_dataset:
            while len(by_dataset) >= _MOST_KEPT:
                del by_dataset[next(iter(by_dataset))]
            by_dataset[dataset] = IndexedElements(self.maker)
        elements = [by_dataset[dataset][at] for at in range(number, number + count)]
        if self.step.local:
            return engine(self.step).train_locally(here(), elements, edition, aside, epoch)
        return engine(self.step).train(here(), elements[0], edition, aside, epoch)
