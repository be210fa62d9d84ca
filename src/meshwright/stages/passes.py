"""What one stage computes in a pass: its blocks, what comes before them and after, and gradients.

Only the inputs of passes that are still needed backward are kept; a backward pass computes its
stage again from them, so what a step keeps does not grow with the number of micro-batches under
``1f1b`` (Chen et al., 2016; Narayanan et al., 2021). Gradients are taken inside of each branch,
never through one.
"""

from __future__ import annotations

import functools
from typing import Any

from ..program import Arrays
from .parts import Functions
from .setting import Own, Rest, Setting


class Passes:
    """The passes of one device of the stages' axis; all that is traced here is of that device.

    ``state`` is what stays as it is in a step, and what counts, by micro-batch.
    """

    def __init__(
        self,
        setting: Setting,
        own: Own,
        others: Arrays,
        state: tuple[Arrays, Arrays],
        rest: Rest,
        shared: Any,
        micros: Any,
    ) -> None:
        self._setting, self._functions = setting, setting.functions
        table = setting.plan.table
        self._repeats, self._share = table.repeats, 1 / table.micro_batches
        self.own = Own(self._by_repeat(own.params), self._by_repeat(own.fixed), own.counted)
        self._others, self._state, self.rest = others, state, rest
        self._shared, self._micros = shared, micros
        self.before = {path: others[path] for path in setting.functions.params_before}
        self.after = {path: others[path] for path in setting.functions.params_after}

    def _by_repeat(self, arrays: list[Any]) -> list[Any]:
        return [a.reshape(self._repeats, -1, *a.shape[1:]) for a in arrays]

    # What comes before and after the blocks

    def enter(self, micro: Any) -> list[Any]:
        """The input of the first block."""
        return self._head(self.before, micro)

    def at_input(self, gradient: list[Any], grads: Arrays, micro: Any) -> Arrays:
        """Gradients with those of what comes before the blocks."""
        import jax

        _, pull = jax.vjp(lambda params: self._head(params, micro), self.before)
        return _added(grads, pull(gradient)[0])

    def _head(self, params: Arrays, micro: Any) -> list[Any]:
        """What comes before the blocks."""
        known = self._known(params, micro, self.rest)
        return self._functions.evaluate(self._functions.enters, known)

    def at_loss(self, y: list[Any], results: dict[str, Any], micro: Any) -> Any:
        """Gradients, metrics and logs with those of a micro-batch, and the gradient of ``y``."""
        import jax

        traced, functions = self._setting.traced, self._functions
        rest = self.rest._replace(metrics=results["metrics"])

        def tail(params: Arrays, y: list[Any]) -> Any:
            known = self._known(params, micro, rest)
            known |= dict(zip(functions.leaves, y, strict=True))
            loss, *more = functions.evaluate(functions.results, known)
            return loss, more

        loss, pull, more = jax.vjp(tail, self.after, y, has_aux=True)
        share = self._share if self._setting.takes_mean else 1.0
        params, gradient = pull(jax.numpy.asarray(share, loss.dtype))
        metrics = dict(zip(traced.metrics, more, strict=False))
        logs = dict(zip(traced.logs, more[len(metrics) :], strict=True))
        if self._setting.logs_of_one:
            logs = {p: before + self._share * logs[p] for p, before in results["logs"].items()}
        grads = _added(results["grads_after"], params)
        return {**results, "grads_after": grads, "metrics": metrics, "logs": logs}, gradient

    # A run of blocks

    def run(self, x: list[Any], micro: Any, repeat: Any) -> list[Any]:
        """A stage's run of blocks, one after the other."""
        return self._run(self._params(repeat), x, micro, repeat)

    def differentiable(self, x: list[Any], micro: Any, repeat: Any) -> tuple[list[Any], Any]:
        """A stage's results, and its gradients by parameters and input; see ``by_piece``."""
        import jax

        few, pieces = self._setting.by_piece, self._setting.pieces
        if few is None:
            run = functools.partial(self._run, micro=micro, repeat=repeat)
            return jax.vjp(run, self._params(repeat), x)

        functions = few.functions
        shared = list(self._shared_by(micro).values())
        read = [*functions.constant, *functions.of_batch]  # the same in the same order
        axes = [
            None if value.shape == var.aval.shape else 0
            for value, var in zip(shared, read, strict=True)
        ]
        shared = [v if axis is None else self._cut(v) for v, axis in zip(shared, axes, strict=True)]
        fixed, _ = self._own_state(micro, repeat)

        def one(params: list[Any], x: list[Any], values: list[Any]) -> list[Any]:
            known = dict(zip(read, values, strict=True))
            return self._chain(functions, Own(params, fixed, []), known, x)

        each = jax.vmap(one, in_axes=(0, 0, axes), axis_size=pieces)
        params = self.per_piece(self._params(repeat))
        y, pull = jax.vjp(lambda p, x: each(p, x, shared), params, list(map(self._cut, x)))

        def whole_rows(gradient: list[Any]) -> tuple[list[Any], list[Any]]:
            own, back = pull(list(map(self._cut, gradient)))
            return own, list(map(self._join, back))

        return list(map(self._join, y)), whole_rows

    def _cut(self, value: Any) -> Any:
        """Rows as pieces of rows."""
        pieces = self._setting.pieces
        return self._setting.laid(value.reshape(pieces, -1, *value.shape[1:]), 0)

    def _join(self, value: Any) -> Any:
        return self._setting.laid(value.reshape(-1, *value.shape[2:]), 0)

    def per_piece(self, params: list[Any]) -> list[Any]:
        """Parameters with a dim of pieces in front, one of which a device has as it has them."""
        import jax.numpy as jnp

        if self._setting.by_piece is None:
            return params
        pieces = self._setting.pieces
        return [self._setting.laid(jnp.broadcast_to(p, (pieces, *p.shape)), 0) for p in params]

    def _params(self, repeat: Any) -> list[Any]:
        return [params[repeat] for params in self.own.params]

    def _run(self, params: list[Any], x: list[Any], micro: Any, repeat: Any) -> list[Any]:
        """A stage's run of blocks, one after the other."""
        fixed, counted = self._own_state(micro, repeat)
        shared = self._shared_by(micro)
        return self._chain(self._functions, Own(params, fixed, counted), shared, x)

    def _own_state(self, micro: Any, repeat: Any) -> tuple[list[Any], list[Any]]:
        fixed = [values[repeat] for values in self.own.fixed]
        counted = self._by_repeat([values[micro] for values in self.own.counted])
        return fixed, [values[repeat] for values in counted]

    def _shared_by(self, micro: Any) -> dict[Any, Any]:
        """What all blocks read alike, those of every micro-batch first."""
        functions = self._functions
        shared = dict(zip(functions.constant, self._shared, strict=True))
        if functions.of_batch:
            known = self._known(self._others, micro, self.rest)
            values = functions.evaluate(functions.of_batch, known)
            shared |= dict(zip(functions.of_batch, values, strict=True))
        return shared

    def _chain(
        self, functions: Functions, own: Own, shared: dict[Any, Any], x: list[Any]
    ) -> list[Any]:
        import jax

        def block(x: list[Any], own: Own) -> tuple[list[Any], None]:
            arrays = {kind: iter(values) for kind, values in own._asdict().items()}
            in_order = [next(arrays[kind]) for kind in self._setting.kinds]
            return functions.block(in_order, shared, x), None

        if self._setting.recompute_blocks:
            block = jax.checkpoint(block)
        if jax.tree.leaves(own)[0].shape[0] == 1:
            return block(x, jax.tree.map(lambda a: a[0], own))[0]
        return jax.lax.scan(block, x, own)[0]

    def _known(self, params: Arrays, micro: Any, rest: Rest) -> dict[Any, Any]:
        """The values of the loss's arguments for a micro-batch."""
        fixed, counted = self._state
        state = {**fixed, **{path: values[micro] for path, values in counted.items()}}
        return self._setting.known(params, state, rest, [leaf[micro] for leaf in self._micros])


def _added(grads: Arrays, more: Arrays) -> Arrays:
    return {path: grads[path] + more[path] for path in grads}
