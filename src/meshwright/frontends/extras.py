"""What a loss may take beside parameters and batch: random keys, and the number of the step.

Rows are counted over all of training, and keys are folded from that count, not drawn one from
another. So a key depends neither on the mesh nor on the layout; one per row depends not even on how
a step is cut into micro-batches, and a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ModelError
from ..layouts.params import ParamInfo, Role
from ..program import ROWS_SO_FAR, Arrays, Batch, TrainState
from ..step.padding import rows_of

NAMES = ("key", "keys", "step")
_STEP = "counts/step"
_STATE = "state"


@dataclass(frozen=True)
class Extras:
    """Those of :data:`NAMES` that a loss takes; keys begin with ``seed``."""

    names: tuple[str, ...]
    seed: int

    @classmethod
    def of(cls, loss: Callable[..., Any], seed: int, is_stateful: bool = False) -> Extras:
        """Read from the signature: arguments after the first two without default, or with ``None``.

        A loss that is stateful takes ``state``, too, which is not one of the extras.

        Raises :class:`~meshwright.ModelError` for another argument without default.

        >>> Extras.of(lambda params, batch, key, temperature=1.0: 0.0, seed=0).names
        ('key',)
        """
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ModelError(f"seed={seed!r} is invalid: expected a whole number.")
        try:
            every = inspect.signature(loss).parameters.values()
        except (TypeError, ValueError):  # written in C, or not a function
            return cls((), seed)
        named = [p for p in every if p.kind in _BY_NAME][_taken_by_place(every) :]
        required = [p.name for p in named if p.default is inspect.Parameter.empty]
        _check_state([p.name for p in named], required, is_stateful)
        required = [name for name in required if name != _STATE]
        if unknown := [name for name in required if name not in NAMES]:
            raise ModelError(
                f"the loss has arguments without a default that are unknown: {', '.join(unknown)}. "
                f"Expected params, batch and any of {', '.join(NAMES)}."
            )
        optional = [p.name for p in named if p.default is None]
        return cls(tuple(name for name in NAMES if name in (*required, *optional)), seed)

    @property
    def state(self) -> tuple[ParamInfo, ...]:
        """What is kept from one micro-batch to the next: the rows before."""
        return (_info(ROWS_SO_FAR, "seed", "uint32"),) if {"key", "keys"} & {*self.names} else ()

    @property
    def slots(self) -> tuple[ParamInfo, ...]:
        """What is kept from one step to the next: how many there were."""
        return (_info(_STEP, "slot", "int32"),) if "step" in self.names else ()

    def values(self, whole: TrainState, batch: Batch) -> dict[str, Any]:
        """The arguments for one batch or micro-batch."""
        extras: dict[str, Any] = {}
        if "step" in self.names:
            extras["step"] = whole.slots[_STEP]
        if self.state:
            before = whole.state[ROWS_SO_FAR]
            of_batches, of_rows = jax.random.split(jax.random.key(self.seed))
            if "key" in self.names:
                extras["key"] = jax.random.fold_in(of_batches, before)
            if "keys" in self.names:
                numbers = before + jnp.arange(rows_of(batch), dtype="uint32")
                extras["keys"] = jax.vmap(jax.random.fold_in, (None, 0))(of_rows, numbers)
        return extras

    def after_batch(self, state: Arrays, batch: Batch) -> Arrays:
        """The state when the rows of a batch have been counted."""
        return {**state, ROWS_SO_FAR: state[ROWS_SO_FAR] + rows_of(batch)} if self.state else state

    def after_step(self, slots: Arrays) -> Arrays:
        """The slots that count steps, when one more was taken."""
        return {_STEP: slots[_STEP] + 1} if self.slots else {}


def _check_state(taken: list[str], required: list[str], is_stateful: bool) -> None:
    """Refuse a state that the loss does not take, and a loss that needs one and gets none."""
    if is_stateful and _STATE not in taken:
        raise ModelError(
            "jax_program got state=, but the loss has no argument named state. Write "
            "loss(params, batch, state), which returns (number, logs, new_state)."
        )
    if not is_stateful and _STATE in required:
        raise ModelError(
            "the loss has an argument named state, but jax_program got none: pass state=, a tree "
            "of what the model keeps beside its parameters, such as batch statistics."
        )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _taken_by_place(every: Any) -> int:
    """How many of the arguments that have names are ``params`` and ``batch``."""
    nameless = [p for p in every if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in every):
        by_place = [e for e in every if e.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        return min(2 - min(2, len(nameless)), len(by_place))
    return max(0, 2 - len(nameless))


def zeros(infos: tuple[ParamInfo, ...]) -> Arrays:
    """Counts before the first step."""
    return {info.path: jnp.zeros([], info.dtype) for info in infos}


def _info(path: str, role: Role, dtype: str) -> ParamInfo:
    return ParamInfo(path=path, spellings=(path,), dims=(), dtype=dtype, itemsize=4, role=role)
