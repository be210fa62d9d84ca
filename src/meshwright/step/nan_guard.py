"""A training step that changes nothing once something is not finite, and finds what it was.

The check reads the gradients once, as the optimizer does anyway, and never blocks. A step whose
gradients are not finite changes no variable and marks the loss, and no later step changes anything
either. So the host may notice it late: the values before the bad step are still there, and with
them and the batch the cause can be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from ..jaxprs.evaluation import evaluated
from ..jaxprs.primitives import CONTROL_FLOW, inner_jaxprs, opened
from ..program import Arrays, Batch, Logs, Program, Step, TrainState


class StandStill:
    """Makes a step stand still; ``losses`` are the paths of the metrics that average the loss."""

    def __init__(self, program: Program, losses: tuple[str, ...]) -> None:
        self.program = replace(program, update=self._update)
        self._inner = program
        self._losses = losses
        self._stands: Any = None  # while a step is traced: whether it changes nothing

    def step(self, step: Step) -> Step:
        """``step``, made from :attr:`program`, so that it does not go on after a bad one."""

        def standing(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
            self._stands = ~_finite({path: whole.metrics[path] for path in self._losses})
            try:
                new, logs = step(whole, batch)
                stands = self._stands
            finally:
                self._stands = None
            marks = {p: jnp.where(stands, jnp.nan, new.metrics[p]) for p in self._losses}
            logs = logs | {"loss": jnp.where(stands, jnp.nan, logs["loss"])}
            return new._replace(
                state=_either(stands, whole.state, new.state), metrics=new.metrics | marks
            ), logs

        return standing

    def _update(self, params: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
        self._stands = self._stands | ~_finite(grads)
        new = self._inner.update(params, grads, slots)
        return _either(self._stands, (params, slots), new)


@dataclass(frozen=True)
class NotFinite:
    """What was not finite in a step, in the order in which it comes about."""

    inputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    operation: str = ""
    loss: float = 0.0
    gradients: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != NotFinite(loss=self.loss) or self.loss - self.loss != 0


def look(program: Program, state: TrainState, batch: Batch) -> NotFinite:
    """Take the gradient again and report what is not finite, and where that began.

    Of several processes none has all the numbers: inputs and operations are then left out.
    """

    def loss(params: Arrays) -> Any:
        return program.loss(params, state, batch, True)

    def gradient(params: Arrays) -> Any:
        return jax.grad(lambda params: loss(params)[0])(params)

    def flags(params: Arrays) -> Any:
        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return aux.loss, *({p: _finite(v) for p, v in part.items()} for part in (params, grads))

    value, params, grads = jax.tree.map(np.asarray, jax.jit(flags)(state.params))
    bad = [
        tuple(info.path for info in program.params if not part[info.path])
        for part in (params, grads)
    ]
    began, inputs = "", ()
    if jax.process_count() == 1:
        inputs = tuple(_bad_inputs(batch))
        began = first_operation(lambda params: loss(params)[0], state.params)
        if not began and bad[1] and not bad[0]:
            began = first_operation(gradient, state.params)
            began = began and f"the backward pass: {began}"
    return NotFinite(inputs, bad[0], began, float(value), bad[1])


def first_operation(function: Callable[..., Any], *args: Any) -> str:
    """The first operation that makes something that is not finite of finite numbers; or ``""``.

    >>> import jax.numpy as jnp
    >>> first_operation(lambda x: jnp.sum(jnp.log(x - 1) * 2), jnp.ones([3]))
    'log'
    """
    closed = jax.make_jaxpr(function)(*args)
    try:
        evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(args), _checked)
    except _BeginsHereError as fault:
        return str(fault)
    return ""


class _BeginsHereError(Exception):
    """An operation made something that is not finite of finite numbers; says which."""


def _checked(eqn: Any, operands: list[Any]) -> list[Any]:
    """The results of one operation; those inside of a call are taken, and checked, one by one."""
    inner = inner_jaxprs(eqn)
    if len(inner) == 1 and eqn.primitive.name not in CONTROL_FLOW:
        ((called,),) = inner.values()
        return evaluated(opened(called), getattr(called, "consts", ()), operands, _checked)
    results = _compat.evaluate(eqn, operands)
    if any(map(_is_bad, results)) and not any(map(_is_bad, operands)):
        scope = _compat.name_scope(eqn)
        raise _BeginsHereError(eqn.primitive.name + (f" in {scope}" if scope else ""))
    return results


def _finite(tree: Any) -> Any:
    """Whether every float of a tree is finite, as a traced scalar."""
    checks = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree) if _is_float(leaf)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.asarray(True)


def _either(condition: Any, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact)


def _is_bad(value: Any) -> bool:
    return _is_float(value) and not bool(jnp.all(jnp.isfinite(value)))


def _bad_inputs(batch: Batch) -> Iterator[str]:
    """Each array of a batch that is not finite, with its rows."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        if _is_bad(leaf):
            host = np.atleast_1d(np.asarray(leaf))
            rows = np.flatnonzero(~np.isfinite(host).all(axis=tuple(range(1, host.ndim))))
            numbers = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
            name = jax.tree_util.keystr(path)
            yield f"{name} in {len(rows)} of {len(host)} rows ({numbers})"
