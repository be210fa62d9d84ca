"""Several short steps in one compiled program: dispatching one costs as much as a small step does.

Keras calls this ``steps_per_execution``. The steps are written one after another, not as a loop:
XLA's CPU compiler runs a convolution inside a loop many times slower. Their batches travel to the
devices together, for laying out many small arrays costs more than one that holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from ..jaxprs.edits import equations
from ..jaxprs.flops import product_flops
from ..program import Batch, Logs, Step, TrainState

AT_ONCE = 4  # eight gained little more and compiled twice as long

_MOST_EQUATIONS = 1500  # above, compiling several takes longer than it saves
_MOST_FLOPS = 1e9  # above, a step takes far longer than its dispatch
_MOST_BYTES = 1 << 20  # of a batch; above, it takes longer to stack them than that saves


class Together(NamedTuple):
    """Batches of one shape, stacked: every array has one more dim in front, their number.

    >>> import numpy as np
    >>> batches = Together({"x": np.arange(6).reshape(3, 2)})
    >>> batches.number, batches.apart()[1]
    (3, {'x': array([2, 3])})
    """

    arrays: Batch

    @property
    def number(self) -> int:
        """How many batches there are."""
        return jax.tree.leaves(self.arrays)[0].shape[0]

    def apart(self) -> list[Batch]:
        """One batch after another."""
        return [jax.tree.map(lambda a, i=i: a[i], self.arrays) for i in range(self.number)]


def together(step: Step, for_steps: Callable[[Iterable[Batch]], Iterable[Any]]) -> Any:
    """The pure function ``(state, Together) -> (state, logs of the last step)``.

    ``for_steps`` says what each step takes of the batches.
    """

    def steps(state: TrainState, batches: Together) -> tuple[TrainState, Logs]:
        return several(step)(state, list(for_steps(batches.apart())))

    return steps


def several(step: Step) -> Any:
    """The pure function ``(state, batches) -> (state, logs of the last step)``."""

    def steps(state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Logs]:
        logs: Logs = {}
        for batch in batches:
            state, logs = step(state, batch)
        return state, logs

    return steps


def is_small(batch: Batch) -> bool:
    """Whether batches of these shapes are stacked in no time.

    >>> import numpy as np
    >>> is_small(np.zeros([128, 28, 28], "float32")), is_small(np.zeros([128, 224, 224, 3], "int8"))
    (True, False)
    """
    leaves = jax.tree.leaves(batch)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) <= _MOST_BYTES


def is_short(jaxpr: Any) -> bool:
    """Whether a traced step is so short that its dispatch counts.

    >>> import jax, jax.numpy as jnp
    >>> is_short(jax.make_jaxpr(lambda x: x @ x)(jnp.ones([64, 64])))
    True
    >>> is_short(jax.make_jaxpr(lambda x: x @ x)(jax.ShapeDtypeStruct([4096, 4096], "float32")))
    False
    """
    flops = 0.0
    for count, eqn in enumerate(equations(jaxpr)):
        flops += _flops(eqn)
        if count > _MOST_EQUATIONS or flops > _MOST_FLOPS:
            return False
    return True


def _flops(eqn: Any) -> float:
    """Floating-point operations of the equations that can be long; convolutions always are."""
    if eqn.primitive.name == "conv_general_dilated":
        return math.inf
    return product_flops(eqn) if eqn.primitive.name == "dot_general" else 0.0
