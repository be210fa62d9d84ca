"""The guard of ``fit`` against losses and gradients that are not finite."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import keras
import numpy as np

from ... import _compat
from ...errors import ModelError, NotFiniteError
from ...program import Logs, TrainState
from ...stages.stacking import Stacking
from ...step.nan_guard import NotFinite, look
from ...step.storing import Storing
from ...warn import warn
from .program import KerasVariables, loss_metrics, steps_of

if TYPE_CHECKING:
    from .sharded import Sharded

NanGuard = Literal["warn", "raise", "off"]

_LEAST_BEHIND = 8  # calls that may be under way before anybody looks
_MOST_BYTES = 256 << 20  # of batches that are kept to look at again


def check_nan_guard(nan_guard: Any) -> None:
    """Raise :class:`ModelError` for an unknown ``nan_guard`` value."""
    if nan_guard not in get_args(NanGuard):
        raise ModelError(
            "nan_guard must be 'warn' (at the end of an epoch), 'raise' (names the step and what "
            f"was not finite, and keeps the values before) or 'off'; received {nan_guard!r}."
        )


def counter_of(model: keras.Model, variables: KerasVariables) -> str | None:
    """The path of the optimizer's count of its steps."""
    count = getattr(model.optimizer, "iterations", None)
    return next((path for path, v in variables.slots.items() if v is count), None)


def can_stand_still(model: keras.Model, variables: KerasVariables) -> str:
    """Why this model's step cannot be made to stand still; empty if it can."""
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        return "its LossScaleOptimizer skips steps itself"
    if _compat.has_own(model, "train_step"):
        return "it brings its own train_step"
    if not loss_metrics(model, variables) or counter_of(model, variables) is None:
        return "it counts no steps, or averages no loss"
    return ""


class FiniteGuard:
    """Remembers the batches of steps that are under way, and looks at their losses afterwards."""

    def __init__(
        self, nan_guard: NanGuard, strategy: Sharded, model: keras.Model, variables: KerasVariables
    ) -> None:
        self._how = nan_guard
        self._strategy, self._model, self._variables = strategy, model, variables
        self._under_way: deque[tuple[list[Any], Any]] = deque()
        self._bytes = 0
        self._together = jax.process_count() > 1  # all processes have to look at the same time
        self._before = 0  # steps of the optimizer before the first that is under way
        self._epoch, self._epoch_began = 0, 0
        self.stands_still = False
        if nan_guard == "raise":
            if why := can_stand_still(model, variables):
                raise ModelError(
                    f"nan_guard='raise' is not supported for model {model.name!r}: {why}. "
                    "Use nan_guard='warn' or keras.callbacks.TerminateOnNaN."
                )
            self.stands_still = True

    def begin(self, epoch: int) -> None:
        """An epoch begins; the variables hold the newest state."""
        self._epoch = epoch
        if self.stands_still:
            self._under_way.clear()
            self._bytes = 0
            self._before = self._epoch_began = int(self._model.optimizer.iterations)

    def took(self, steps: Sequence[Any], logs: Logs) -> None:
        """Steps were begun, in one call."""
        if self.stands_still:
            self._under_way.append((list(steps), logs["loss"]))
            self._bytes += _nbytes(steps)

    def check(self, newest: Callable[[], TrainState]) -> None:
        """Look at steps that are done. Raises :class:`NotFiniteError` if one of them was bad."""
        while len(self._under_way) > _LEAST_BEHIND and (
            self._under_way[0][1].is_ready() or self._bytes > _MOST_BYTES or self._together
        ):
            self._look_at_first(newest)

    def stored_by(self, storing: Storing | Stacking) -> None:
        """The states that are looked at are stored so."""
        self._variables = self._variables.stored_by(storing)

    def wait(self, newest: Callable[[], TrainState]) -> None:
        """Look at every step that is under way. Raises :class:`NotFiniteError`."""
        while self._under_way:
            self._look_at_first(newest)

    def end(self, logs: Logs) -> None:
        """An epoch has ended with these logs, on the host."""
        if self._how == "warn" and not math.isfinite(_loss_of(logs)):
            self._how = "off"  # once is enough
            warn(
                f"the loss of epoch {self._epoch + 1} is {_loss_of(logs)}. "
                "fit(..., nan_guard='raise') stops at the step where that begins, names the first "
                "variable that is not finite and keeps the values before it; nan_guard='off' is "
                "silent."
            )

    def _look_at_first(self, newest: Callable[[], TrainState]) -> None:
        steps, loss = self._under_way[0]
        if not math.isfinite(float(np.asarray(loss))):
            self._tell(newest())
        self._under_way.popleft()
        self._bytes -= _nbytes(steps)
        self._before += len(steps)

    def _tell(self, state: TrainState) -> None:
        counter = counter_of(self._model, self._variables)
        assert counter is not None  # or it would not stand still
        steps = int(np.asarray(state.slots[counter]))
        batches = [batch for steps, _ in self._under_way for batch in steps]
        program = steps_of(self._strategy.unstaged, self._model, self._variables).stored
        if self._strategy.how.pipeline is not None:
            state = self._variables.storing.restore(state)
        # Where the gradients are finite though the loss is not, the step was still taken.
        for step in (steps, steps - 1):
            at = step - self._before
            step_takes = batches[at] if 0 <= at < len(batches) else ()
            parts = step_takes if self._strategy.how.batches > 1 else [step_takes]
            for part in parts if step_takes else ():
                with self._strategy.in_force(self._model):
                    fault = look(program, state, part)
                if fault:
                    raise self._error(step + 1, fault)
        raise self._error(steps + 1, NotFinite(loss=math.nan))

    def _error(self, step: int, fault: NotFinite) -> NotFiniteError:
        text = (
            f"step {step} of the optimizer (step {step - self._epoch_began} of epoch "
            f"{self._epoch + 1}) is infinite or NaN: "
            + "; ".join(_words(fault))
            + ". The model holds "
            f"the values after step {step - 1}. A smaller learning rate, clipping "
            "(clipnorm= of the optimizer) or a look at the rows of this batch may help."
        )
        variables = fault.parameters or fault.gradients
        return NotFiniteError(text, step=step, epoch=self._epoch, variables=variables)


def _words(fault: NotFinite) -> list[str]:
    facts = [f"its batch holds such values, {_PARTS.sub(_part, path)}" for path in fault.inputs]
    if fault.parameters:
        facts.append(f"parameters were so before it: {_some(fault.parameters)}")
    if fault.operation:
        facts.append(f"the first such result is that of {fault.operation}")
    facts.append(f"its loss is {fault.loss:.6g}")
    if fault.gradients:
        facts.append(f"the gradients of {_some(fault.gradients)} are not finite")
    return facts


_PARTS = re.compile(r"^\[([012])\]")


def _part(match: re.Match[str]) -> str:
    return ("x", "y", "sample_weight")[int(match[1])]


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def _nbytes(steps: Sequence[Any]) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(list(steps)))


def _loss_of(logs: Logs) -> float:
    loss = logs.get("loss", 0.0)
    return loss if isinstance(loss, float) else 0.0
