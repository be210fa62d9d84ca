"""The passes of stages that differ, and the gradients of a step of them.

Every device has the code of all stages and takes its own (``lax.switch``); gradients are taken
inside of each branch, never through one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..program import Arrays, TrainState
from .by_stage import from_row, packed_row
from .packing import Pack, Packing
from .passes import Kept, Passes
from .places import entry, plus, put
from .rooms import Around
from .running import Runner, Taken
from .segments import Packed, Segments
from .setting import Own, Rest, Setting


class UnequalPasses(Passes):
    """The passes of one device of the stages' axis."""

    def __init__(
        self, setting: Setting, packing: Packing, segments: Segments, *values: Any
    ) -> None:
        super().__init__(setting, *values)
        self._packing, self._segments = packing, segments
        self._trees: dict[int, Any] = {}

    # Before the first stage and after the last one

    def enter(self, micro: Any) -> list[Any]:
        """Nothing: the first stage reads the batch itself."""
        return self._nothing()

    def no_grads_around(self, nothing: list[Any]) -> Around:
        """None: stages hold all weights."""
        return Around({}, {}, {})

    def at_input(self, gradient: list[Any], sums: Around, micro: Any) -> Around:
        """The sums as they are."""
        return sums

    def at_loss(self, y: list[Any], results: dict[str, Any], micro: Any) -> Any:
        """Metrics, statistics and logs with those of a micro-batch, and the gradient of ``y``."""
        traced, segments = self._setting.traced, self._segments
        carried = results["metrics"]
        rest = self.rest._replace(metrics=carried["metrics"])
        known_values = self._values_known(self._others, micro, rest)
        known_values |= {
            var: carried["state"][path]
            for var, (part, path) in traced.arguments.items()
            if part == "state" and path in carried["state"]
        }

        def tail(y: list[Any]) -> Any:
            values = segments.packed.unpack(segments.count, y, self._setting.exactly)
            here = known_values | dict(zip(segments.boundaries[-1], values, strict=True))
            loss, *more = segments.evaluate(segments.line.outputs, here)
            return loss, more

        loss, pull, more = jax.vjp(tail, y, has_aux=True)
        share = self._share if self._setting.takes_mean else 1.0
        gradient = _as_sent(pull(jax.numpy.asarray(share, loss.dtype))[0], y)
        more = iter(more)
        metrics, logs = ({path: next(more) for path in of} for of in (traced.metrics, traced.logs))
        state = dict(zip(segments.line.statistics, more, strict=True))
        if self._setting.logs_of_one:
            logs = {p: before + self._share * logs[p] for p, before in results["logs"].items()}
        return {**results, "metrics": {"metrics": metrics, "state": state}, "logs": logs}, gradient

    # A stage

    def run(self, x: list[Any], micro: Any, repeat: Any) -> list[Any]:
        """What a stage makes of its input."""
        return self._switch(lambda stage: self._leaves_of(stage, self._weights(stage), x, micro))

    def forward(
        self, x: list[Any], micro: Any, repeat: Any, into: Kept | None = None
    ) -> tuple[list[Any], Any]:
        """The same, and what its gradients need; buffers with it, where they are given."""

        def branch(stage: int) -> tuple[list[Any], list[Any]]:
            return self._differentiated(stage, x, micro)

        shapes = [
            jax.eval_shape(lambda stage=stage: branch(stage)[1]) for stage in range(self._count)
        ]
        self._packed = packing = Packed(shapes, self._micros[0].shape[1])

        def packed(stage: int) -> tuple[list[Any], list[Any]]:
            y, leaves = branch(stage)
            return y, packing.pack(leaves, self._setting.exactly)

        y, values = self._switch(packed)
        return y, put(into.values, (into.slot,), values) if into else values

    def no_grads(self) -> list[Any]:
        """Zeros that :meth:`backward` adds to: rows of weights, each with a part per piece."""
        dims = [(1, self._setting.pieces, *param.shape[2:]) for param in self.own.params]
        zeros = map(jnp.zeros, dims, [param.dtype for param in self.own.params])
        return [[self._setting.laid(value, 1) for value in zeros]]

    def joined(self, grads: list[Any]) -> list[Any]:
        """The same as they are stored."""
        return grads[0]

    def backward(
        self,
        residuals: Kept,
        gradient: list[Any],
        grads: Any,
        micro: Any,
        repeat: Any,
        into: Kept | None = None,
    ) -> tuple[list[Any], Any]:
        """The gradient of a stage's input, and ``grads`` with those of its weights."""
        kept = entry(residuals.values, () if residuals.slot is None else (residuals.slot,))

        def branch(stage: int) -> tuple[list[Any], list[Any]]:
            weights = self._weights(stage)
            tree, own = self._trees[stage]
            leaves = iter(self._packed.unpack(stage, kept, self._setting.exactly))
            names = list(weights)
            values = [weights[names[at]] if at is not None else next(leaves) for at in own]

            def pull(values: list[Any], gradient: list[Any]) -> tuple[list[Any], Arrays]:
                grads, x = tree.unflatten(values)(_as_taken(gradient))
                return _as_sent(x, gradient), grads

            x, grads = self._in_parts(pull)(values, gradient)
            return x, self._rows(stage, grads, weights)

        gradient, rows = self._switch(branch)
        return gradient, [plus(grads[0], (0,), rows)]

    def _differentiated(self, stage: int, x: list[Any], micro: Any) -> tuple[list[Any], list[Any]]:
        """A stage's results, and what its gradients need beside its weights."""
        weights = self._weights(stage)
        y, pull = jax.vjp(lambda w, x: self._leaves_of(stage, w, x, micro), weights, x)
        leaves, tree = jax.tree.flatten(pull)
        ids = [id(value) for value in weights.values()]
        own = [ids.index(id(leaf)) if id(leaf) in ids else None for leaf in leaves]
        self._trees[stage] = tree, own
        return y, [leaf for leaf, at in zip(leaves, own, strict=True) if at is None]

    def _leaves_of(self, stage: int, weights: Arrays, x: list[Any], micro: Any) -> list[Any]:
        values = self._values_known({**self._others, **weights}, micro, self.rest)
        return self._segments.run(stage, values, x, self._setting.exactly)

    @property
    def _count(self) -> int:
        return self._segments.count

    def _switch(self, branch: Callable[[int], Any]) -> Any:
        branches = [lambda stage=stage: branch(stage) for stage in range(self._count)]
        return jax.lax.switch(self.own.fixed[0][0, 0], branches)

    def _nothing(self) -> list[Any]:
        return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in self._segments.enters]

    def _weights(self, stage: int) -> Arrays:
        """The parameters that a stage reads, by path."""
        rows = iter(self.own.params)
        weights: Arrays = {}
        for pack in self._packing.packs.params.values():
            own = [piece for piece in pack.pieces if piece.stage == stage]
            weights |= from_row(own, next(rows)[0, 0])
        weights |= {path: next(rows)[0, 0] for path in self._segments.shared}
        exactly = self._setting.exactly
        return {path: exactly(weights[path], False) for path in self._segments.params[stage]}

    def _rows(self, stage: int, grads: Arrays, weights: Arrays) -> list[Any]:
        """Gradients as the parameters of a stage lie, with a part per piece."""
        parts = {path: self._as_parts(grad, weights[path].ndim) for path, grad in grads.items()}
        rows = [self._row(pack, stage, parts) for pack in self._packing.packs.params.values()]
        for path, value in zip(self._segments.shared, self.own.params[len(rows) :], strict=True):
            nothing = jnp.zeros((self._setting.pieces, *value.shape[2:]), value.dtype)
            rows.append(parts.get(path, nothing))
        return [self._setting.exactly(row, True) for row in rows]

    def _row(self, pack: Pack, stage: int, parts: Arrays) -> Any:
        """The gradients of a stage's arrays in a pack, flat, with a part per piece."""
        own = [piece for piece in pack.pieces if piece.stage == stage]

        def flat(of_piece: Arrays) -> Any:
            return packed_row(own, of_piece, pack.info.dims[1], pack.info.dtype)

        of_pack = {piece.path: parts[piece.path] for piece in own}
        return jax.vmap(flat, axis_size=self._setting.pieces)(of_pack)

    def _as_parts(self, grad: Any, ndim: int) -> Any:
        """A gradient with a part per piece."""
        exactly = self._setting.exactly
        return exactly(grad if grad.ndim > ndim else self._first_part(exactly(grad, False)), True)


@dataclass(frozen=True, eq=False)
class UnequalRunner(Runner):
    """The gradients of one step of stages that differ."""

    packing: Packing
    segments: Segments

    def __call__(self, whole: TrainState, micros: Sequence[Any]) -> Taken:
        """Of a state with packs, and the leaves of the batch as ``(micro-batches, rows, ...)``."""
        setting, segments = self.setting, self.segments
        packs, shared, count = self.packing.packs.params, segments.shared, segments.count
        others = {p: v for p, v in whole.params.items() if p not in packs and p not in shared}
        states, state = self._counted(whole, others, micros)
        statistics = {path: whole.state[path] for path in segments.line.statistics}
        fixed = {p: v for p, v in whole.state.items() if p not in states and p not in statistics}
        spread = [
            jnp.broadcast_to(whole.params[p], (count, *whole.params[p].shape)) for p in shared
        ]
        own = Own(
            [*(whole.params[path] for path in packs), *spread],
            [jnp.arange(count)],
            [],
            [jnp.ones([count], bool)],
        )
        carried = {"metrics": whole.metrics, "state": statistics}
        rest = Rest(self._read_slots(whole.slots), carried)
        run = self._over_stages(jax.sharding.PartitionSpec(setting.axis))
        results = run(own, others, (fixed, states), rest, [], micros, self._rows())
        parts, _, _, carried, logs = results
        own_grads = [part.sum(1) for part in parts]  # over the pieces of the rows
        grads = {p: jnp.zeros_like(value) for p, value in others.items()}
        grads |= dict(zip(packs, own_grads, strict=False))
        for path, value in zip(shared, own_grads[len(packs) :], strict=True):
            grads[path] = value.sum(0)
        carried, logs = jax.tree.map(lambda value: value[-1], (carried, logs))
        return grads, {**state, **carried["state"]}, carried["metrics"], logs

    def _passes(self, setting: Setting, *values: Any) -> Passes:
        return UnequalPasses(setting, self.packing, self.segments, *values)


def _as_taken(gradient: Sequence[Any]) -> list[Any]:
    """A gradient as JAX takes it: whole numbers and truth values have none."""
    return [
        value
        if jnp.issubdtype(value.dtype, jnp.inexact)
        else np.zeros(value.shape, jax.dtypes.float0)
        for value in gradient
    ]


def _as_sent(gradient: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """A gradient as it is sent to another stage: zeros for what has none."""
    return [
        jnp.zeros(value.shape, of.dtype) if value.dtype == jax.dtypes.float0 else value
        for value, of in zip(gradient, like, strict=True)
    ]
