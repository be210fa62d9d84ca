"""Several steps of each replica between two exchanges with the others.

``LocalSGD`` averages what the replicas arrive at (McMahan and others, 2017; Stich, 2019).
``DiLoCo`` (Douillard and others, 2023) takes how far they moved for a gradient, and gives it to an
outer optimizer. The inner optimizer is the model's own. With parameter servers a replica is a
worker, which keeps its slots, and the outer optimizer is on the servers. On a mesh a replica is a
piece of the batch, the steps between two exchanges are one compiled call, and slots of the inner
optimizer and statistics of batches are averaged too: so nothing differs between replicas when a
call has ended, and a checkpoint goes on under any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import BatchError, ModelError
from ..layouts.params import ParamInfo
from ..layouts.placement import Placement
from ..program import ROWS_SO_FAR, Arrays, Aux, Batch, Logs, Program, TrainState
from .gradient import Gradient
from .padding import rows_of
from .summing import PLAIN_SUM, refuse_split, sum_within

OUTER = "outer_momentum"  # how the slots of DiLoCo's outer optimizer end


@dataclass(frozen=True)
class LocalSGD:
    """Exchange after ``every`` steps, and average the replicas' parameters.

    Asynchronous parameter servers add each worker's move instead. (Stich 2018)

    >>> LocalSGD(every=8)
    LocalSGD(every=8)
    """

    every: int

    def __post_init__(self) -> None:
        _check_every(self)

    @property
    def outer(self) -> dict[str, Any]:
        """The outer optimizer, as Keras writes it: a move is applied as it is."""
        return _sgd(1.0, 0.0, nesterov=False)


@dataclass(frozen=True)
class DiLoCo:
    """Exchange after ``every`` steps, and apply SGD with Nesterov momentum to the mean move.

    ``learning_rate`` and ``momentum`` are those of this outer optimizer. (Douillard et al. 2023)

    >>> DiLoCo(every=100)
    DiLoCo(every=100, learning_rate=0.7, momentum=0.9)
    """

    every: int
    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_every(self)

    @property
    def outer(self) -> dict[str, Any]:
        """The outer optimizer, as Keras writes it."""
        return _sgd(self.learning_rate, self.momentum, nesterov=True)


Local = LocalSGD | DiLoCo


def _sgd(learning_rate: float, momentum: float, *, nesterov: bool) -> dict[str, Any]:
    config = {"learning_rate": learning_rate, "momentum": momentum, "nesterov": nesterov}
    return {"class_name": "SGD", "config": config}


def _check_every(local: Local) -> None:
    every = local.every
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ModelError(
            f"{type(local).__name__}(every) must be an integer of at least 1; received {every!r}."
        )


# On a mesh


def with_outer(program: Program) -> Program:
    """The program with a slot for the outer momentum of each parameter, unless it has them."""
    if outer_slots(program):
        return program
    slots = tuple(
        ParamInfo(path, (path,), info.dims, info.dtype, info.itemsize, "slot", info.path)
        for info in program.params
        for path in (f"{info.path}/{OUTER}",)
    )

    def initial() -> TrainState:
        import jax.numpy as jnp

        first = program.initial()
        zeros = {info.path: jnp.zeros(info.dims, info.dtype) for info in slots}
        return first._replace(slots={**first.slots, **zeros})

    return replace(program, slots=(*program.slots, *slots), initial=initial)


def outer_slots(program: Program) -> dict[str, str]:
    """The slot of the outer momentum of each parameter that has one, by path."""
    return {i.owner: i.path for i in program.slots if i.owner and i.path.endswith(OUTER)}


def local_step(
    program: Program, local: Local, of: Callable[[Program, float], Gradient], placement: Placement
) -> Callable[[TrainState, Sequence[Batch]], tuple[TrainState, Logs]]:
    """The pure step ``(state, batches) -> (state, logs)``, with an exchange at its end.

    Metrics count the losses and outputs of every batch. Raises :class:`~meshwright.LayoutError`
    where a replica is more than one device, and :class:`~meshwright.BatchError` for batches that do
    not divide.
    """
    from .accumulate import check_alike

    refuse_split(placement, f"local={local!r}")
    count = placement.batch_shards
    differentiate = of(program, float(count) if program.reduction == "sum" else 1.0)
    outer = outer_slots(program)
    seeds = {info.path for info in program.state if info.role == "seed"} - {ROWS_SO_FAR}

    def train_step(whole: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Logs]:
        if local.every > 1:
            check_alike(batches, f"local={local!r} a step takes a tuple of batches")
        batches = (batches,) if local.every == 1 else tuple(batches)
        rows = _Seen("sum" if program.reduction == "sum" else "mean")

        def replica(here: TrainState, batches: Any) -> Any:
            index = _index(placement)
            state = _moved(here.state, seeds, index)  # each draws numbers of its own
            params, slots, losses = here.params, here.slots, []
            for batch in batches:
                state = _counting(state, batch, index)  # as on one device, for keys of rows
                at = TrainState(params, state, slots, here.metrics)
                aux, grads = differentiate(params, at, batch)
                params, new = program.update(params, grads, program.noting(slots, aux.loss))
                slots, state = {**slots, **new}, _counting(aux.state, batch, count - 1 - index)
                losses.append((aux.loss, aux.outputs))
            state = _moved(state, seeds, -index)
            return _mean((params, slots, state), placement), rows.leaves(losses, batches)

        (params, slots, state), leaves = _on_replicas(replica, placement)(whole, batches)
        if isinstance(local, DiLoCo):
            params, slots = _outer_step(local, outer, whole, params, slots)
        metrics, every = whole.metrics, list[Logs]()
        for (loss, outputs), batch in zip(rows.of_all(leaves), batches, strict=True):
            metrics, logs = program.measure(metrics, Aux(loss, outputs, state, metrics), batch)
            every.append(logs)
        logs = every[-1]
        if program.logs == "of one batch":
            logs = {name: sum(step_logs[name] for step_logs in every) / len(every) for name in logs}
        return TrainState(params, state, slots, metrics), logs

    return train_step


def _outer_step(
    local: DiLoCo, outer: dict[str, str], whole: TrainState, params: Arrays, slots: Arrays
) -> tuple[Arrays, Arrays]:
    """Nesterov's step from where the replicas began, along their mean move."""
    new, slots = dict(params), dict(slots)
    for path, slot in outer.items():
        move = whole.params[path] - params[path]
        momentum = local.momentum * whole.slots[slot] + move
        new[path] = whole.params[path] - local.learning_rate * (local.momentum * momentum + move)
        slots[slot] = momentum
    return new, slots


class _Seen:
    """Losses and outputs of replicas, in a list of arrays whose first dim lies over the replicas.

    What has no rows becomes one element of each replica, and afterwards their mean or sum.
    """

    def __init__(self, joined: str) -> None:
        self._joined = joined
        self._structure: Any = None
        self._have_rows: list[bool] = []

    def leaves(self, losses: Any, batches: Any) -> list[Any]:
        """The arrays of one replica; logs may be plain numbers, too."""
        import jax
        import jax.numpy as jnp

        rows = {leaf.shape[0] for leaf in jax.tree.leaves(batches) if leaf.ndim}
        leaves, self._structure = jax.tree.flatten(jax.tree.map(jnp.asarray, losses))
        self._have_rows = [leaf.ndim > 0 and leaf.shape[0] in rows for leaf in leaves]
        pairs = zip(leaves, self._have_rows, strict=True)
        return [leaf if has_rows else leaf[None] for leaf, has_rows in pairs]

    def of_all(self, leaves: list[Any]) -> Any:
        """The same of all rows."""
        import jax

        pairs = zip(leaves, self._have_rows, strict=True)
        joined = [leaf if has_rows else getattr(leaf, self._joined)(0) for leaf, has_rows in pairs]
        return jax.tree.unflatten(self._structure, joined)


def _on_replicas(replica: Callable[..., Any], placement: Placement) -> Callable[..., Any]:
    """``replica(state, batches)`` on each piece of the rows."""
    import jax

    spec, axes, count = jax.sharding.PartitionSpec, placement.batch_axes, placement.batch_shards

    def run(whole: TrainState, batches: tuple[Any, ...]) -> Any:
        for batch in batches:
            _check_rows([leaf.shape for leaf in jax.tree.leaves(batch) if leaf.ndim])
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batches) if leaf.ndim}
        if odd := sorted(size for size in sizes if size % count):
            raise BatchError(
                f"batches of {', '.join(map(str, odd))} rows do not divide over {count} replicas "
                "that take steps of their own. Choose a batch size that does, and leave out a "
                "smaller last batch."
            )
        rows = jax.tree.map(lambda leaf: spec(axes) if leaf.ndim else spec(), batches)
        return jax.shard_map(
            replica,
            mesh=placement.mesh.jax_mesh,
            in_specs=(spec(), rows),
            out_specs=(spec(), spec(axes)),
            check_vma=False,
        )(whole, batches)

    return run


def _check_rows(shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise BatchError where arrays differ in their first dim: replicas share all of them out."""
    if len({shape[0] for shape in shapes}) > 1:
        raise BatchError(
            "replicas that take steps of their own share a batch out by its rows, the first dim of "
            f"every array; received arrays of {', '.join(map(str, shapes))}. Let the loss close "
            "over what is the same for all rows, or repeat it for each of them."
        )


def _mean(tree: Any, placement: Placement) -> Any:
    """The mean of real and complex arrays over replicas, and the largest of whole numbers.

    These are mostly the same in all; but an optimizer may count the steps that it has left out.
    """
    import jax
    import jax.numpy as jnp

    leaves, structure = jax.tree.flatten(tree)
    inexact = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    mesh, axes = placement.mesh.jax_mesh, placement.batch_axes
    sums = sum_within([leaves[i] for i in inexact], mesh, axes, PLAIN_SUM)
    for i, total in zip(inexact, sums, strict=True):
        leaves[i] = total / placement.batch_shards
    for i in {*range(len(leaves))} - {*inexact} if axes else ():
        leaf = leaves[i]
        number = leaf.astype("int32") if leaf.dtype == bool else leaf
        leaves[i] = jax.lax.pmax(number, axes).astype(leaf.dtype)
    return jax.tree.unflatten(structure, leaves)


def _index(placement: Placement) -> Any:
    """Which replica this one is."""
    import jax

    axes = placement.batch_axes
    return jax.lax.axis_index(axes) if axes else jax.numpy.zeros([], "int32")


def _counting(state: Arrays, batch: Batch, others: Any) -> Arrays:
    """The state, with the rows of this many other replicas counted too."""
    if ROWS_SO_FAR not in state:
        return state
    return _moved(state, {ROWS_SO_FAR}, others * rows_of(batch))


def _moved(state: Arrays, paths: set[str], by: Any) -> Arrays:
    """The state with these amounts added to arrays of whole numbers."""
    return {path: v + by.astype(v.dtype) if path in paths else v for path, v in state.items()}
