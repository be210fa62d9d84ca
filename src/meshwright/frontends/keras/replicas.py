"""``strategy.run``, ``reduce`` and ``gather``: TensorFlow's names for one function per replica.

A replica is a piece of the batch: there are as many as the batch axes have places. Functions are
pure, as everywhere in JAX; ``strategy.train_step`` is the one that trains a Keras model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ...arrays.by_hand import over_axes
from ...data import InputContext, LocalBatch, LocalRows
from ...errors import ArrayError, BatchError
from ...launch.progress import begin_step
from ...layouts.mesh import Mesh
from ...layouts.placement import Placement
from . import batches


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=[])
@dataclass(frozen=True)
class PerReplica:
    """One value for each replica, as :meth:`~Sharded.run` returns it.

    ``values`` has them along its first dim, ``(num_replicas_in_sync, ...)``, each on the devices
    of its replica.
    """

    values: jax.Array


class Replicas:
    """The part of a strategy that has TensorFlow's names for replicas."""

    placement: Placement

    @property
    def num_replicas_in_sync(self) -> int:
        """Into how many pieces the batch is cut."""
        return self.placement.batch_shards

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a pure function once for each replica, on its piece of every batch.

        Arrays that :meth:`put` has laid out over the batch axes, and :class:`PerReplica` values,
        are cut; everything else is the same for all. Inside, ``jax.lax.pmean(x, "batch")`` is the
        mean over replicas, by the name of the axis. Every array of the result becomes a
        :class:`PerReplica`. It is compiled once for each function and shapes. In a group each call
        counts as a step, as :func:`~meshwright.begin_step` does.

        >>> import numpy as np, meshwright as mw
        >>> strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
        >>> x = strategy.put(np.arange(16.0))
        >>> sums = strategy.run(lambda piece: piece.sum(), args=(x,))
        >>> sums.values.tolist(), float(strategy.reduce("sum", sums))
        ([1.0, 5.0, 9.0, 13.0, 17.0, 21.0, 25.0, 29.0], 120.0)
        """
        mesh, axes = self.placement.mesh, self.placement.batch_axes
        arguments = (tuple(args), dict(kwargs or {}))
        flat, tree = jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, PerReplica))
        kinds = tuple(_kind_of(value, axes) for value in flat)
        values = [v.values if isinstance(v, PerReplica) else v for v in flat]
        if not any(isinstance(value, Tracer) for value in values):
            begin_step()
        return _compiled(function, mesh, axes, tree, kinds)(*values)

    def reduce(self, reduce_op: str, value: Any, axis: int | None = None) -> Any:
        """The sum or the mean of what the replicas have, the same on all devices.

        ``reduce_op`` is ``"sum"`` or ``"mean"``. With ``axis`` each value is reduced over that dim
        as well. Any other value than a :class:`PerReplica` is one that all replicas have. Raises
        :class:`~meshwright.ArrayError` for another operation.
        """
        name = str(getattr(reduce_op, "name", reduce_op)).lower()
        if name not in ("sum", "mean"):
            raise ArrayError(f"reduce_op must be 'sum' or 'mean'; received {reduce_op!r}.")

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, PerReplica):
                whole = leaf if axis is None else getattr(jnp, name)(leaf, axis)
                return whole * self.num_replicas_in_sync if name == "sum" else whole
            dims = (0,) if axis is None else (0, 1 + axis % (leaf.values.ndim - 1))
            function = jnp.sum if name == "sum" else jnp.mean
            everywhere = self._everywhere()
            return jax.jit(function, static_argnums=1, out_shardings=everywhere)(leaf.values, dims)

        return jax.tree.map(one, value, is_leaf=lambda x: isinstance(x, PerReplica))

    def gather(self, value: Any, axis: int) -> Any:
        """What the replicas have, one after the other along ``axis``, on all devices.

        >>> import numpy as np, meshwright as mw
        >>> strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
        >>> doubled = strategy.run(lambda piece: piece * 2, args=(strategy.put(np.arange(8)),))
        >>> strategy.gather(doubled, axis=0).tolist()
        [0, 2, 4, 6, 8, 10, 12, 14]
        """

        def one(leaf: Any) -> jax.Array:
            if not isinstance(leaf, PerReplica):
                raise ArrayError(
                    "gather() takes what run() returns; received "
                    f"{type(leaf).__name__}, which is whole already."
                )
            everywhere = self._everywhere()
            return jax.jit(_joined, static_argnums=1, out_shardings=everywhere)(leaf.values, axis)

        return jax.tree.map(one, value, is_leaf=lambda x: isinstance(x, PerReplica))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any]
    ) -> DistributedRows:
        """The batches of a dataset that each process makes for itself.

        ``dataset_fn`` receives an :class:`~meshwright.InputContext`; its batches are those of one
        replica (``context.get_per_replica_batch_size(...)``), of rows that no other process has.
        They can be read repeatedly: a list, a ``PyDataset``, a ``tf.data.Dataset``.
        The result goes to ``fit``; iterating yields batches of the whole mesh for :meth:`run`.
        Raises :class:`~meshwright.BatchError` where replicas are not shared out evenly.
        """
        processes, replicas = jax.process_count(), self.num_replicas_in_sync
        if replicas % processes:
            raise BatchError(
                f"{replicas} replicas are not shared out evenly over {processes} processes: use "
                "mw.LocalRows with batches of the rows of each process."
            )
        context = InputContext(jax.process_index(), processes, replicas)
        joined = _Joined(dataset_fn(context), replicas // processes)
        return DistributedRows(joined, self.placement)

    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self.placement.mesh.jax_mesh, PartitionSpec())


@dataclass(frozen=True, eq=False)
class DistributedRows(LocalRows):
    """Batches of which each process reads its own rows; iterating lays them out on the mesh."""

    placement: Placement

    def __iter__(self) -> Iterator[Any]:
        putter = batches.putter(self.placement)
        return (putter(LocalBatch(self.source[index])) for index in range(len(self.source)))


class _Joined(keras.utils.PyDataset):
    """Batches of single replicas as batches of a process; a rest that is too short is left out."""

    def __init__(self, dataset: Any, count: int) -> None:
        super().__init__()
        self._dataset, self._count = dataset, count
        whole = len(dataset) if hasattr(dataset, "__len__") else sum(1 for _ in dataset)
        self._length = whole // count
        self._rest, self._position = iter(()), self._length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        first = index * self._count
        if hasattr(self._dataset, "__getitem__"):
            parts = [self._dataset[first + i] for i in range(self._count)]
        else:
            if index != self._position:
                self._rest = itertools.islice(self._dataset, first, None)
            parts = list(itertools.islice(self._rest, self._count))
            self._position = index + 1
        arrays = [jax.tree.map(np.asarray, part) for part in parts]
        return jax.tree.map(lambda *pieces: np.concatenate(pieces), *arrays)


def _joined(values: jax.Array, axis: int) -> jax.Array:
    return jnp.concatenate(list(values), axis)


def _kind_of(value: Any, axes: tuple[str, ...]) -> str:
    """``"each"`` for one value per replica, ``"cut"`` for a batch, ``"same"`` for the rest."""
    if isinstance(value, PerReplica):
        return "each"
    sharding = getattr(value, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.spec:
        first = sharding.spec[0]
        if axes and (first if isinstance(first, tuple) else (first,)) == axes:
            return "cut"
    return "same"


@functools.lru_cache(maxsize=128)
def _compiled(
    function: Callable[..., Any],
    mesh: Mesh,
    axes: tuple[str, ...],
    tree: Any,
    kinds: tuple[str, ...],
) -> Callable[..., Any]:
    cut, same = PartitionSpec(axes or None), PartitionSpec()

    def one(*values: Any) -> Any:
        own = [v[0] if kind == "each" else v for v, kind in zip(values, kinds, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, own)
        return jax.tree.map(lambda out: jnp.asarray(out)[None], function(*args, **kwargs))

    def all_of_them(*values: Any) -> Any:
        results = over_axes(
            one,
            mesh=mesh.jax_mesh,
            in_specs=tuple(same if kind == "same" else cut for kind in kinds),
            out_specs=cut,
            axis_names=axes,
        )(*values)
        return jax.tree.map(PerReplica, results)

    return jax.jit(all_of_them)
