"""The steps of a Keras model under a strategy, compiled once and kept on the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from ... import _compat
from ...program import TrainState
from ...step.assemble import Assembly, measured
from ...step.options import StepOptions
from ...step.steps_per_execution import AT_ONCE, is_short, is_small
from .program import KerasVariables, loss_metrics, steps_of
from .rowwise import RowWise

if TYPE_CHECKING:
    from .sharded import Sharded


@dataclass(frozen=True, eq=False)
class Functions:
    """The steps of one model under one strategy, and what they were made from.

    With ``run_eagerly=True`` they are not compiled.
    """

    token: tuple[Any, ...]
    row_wise: RowWise
    steps: Assembly
    is_eager: bool

    @property
    def how(self) -> StepOptions:
        return self.steps.how

    @property
    def train(self) -> Any:
        return self.steps.train_step if self.is_eager else self.steps.train

    @property
    def train_several(self) -> Any:
        return None if self.is_eager else self.steps.train_several

    @property
    def train_together(self) -> Any:
        return None if self.is_eager else self.steps.train_together

    @property
    def test(self) -> Any:
        return measured(self.steps.test_step) if self.is_eager else self.steps.test

    @property
    def predict(self) -> Any:
        return self.steps.moving_step if self.is_eager else self.steps.predict

    def steps_at_once(self, state: TrainState, batch: Any) -> int:
        """How many steps to take in one call when no callback looks between them."""
        if self.is_eager or not is_small(batch):
            return 1
        batch = self.steps.batch_layouts.abstract(batch)  # else the first step is traced anew
        (batch,) = self.how.for_steps([batch] * self.how.batches)
        return AT_ONCE if is_short(self.train.trace(state, batch).jaxpr) else 1


def functions_of(
    strategy: Sharded,
    model: keras.Model,
    variables: KerasVariables,
    stands_still: bool = False,
    example: Any = None,
) -> Functions:
    """The steps of this model under this strategy, made when first asked for.

    They are kept on the model, because they refer to it; ``model.compile`` invalidates them.
    ``stands_still`` makes training steps that change nothing once something is not finite;
    ``example`` is a batch by which a pipeline is cut.
    """
    # Metrics have no variables before their first batch.
    parts = variables.params, variables.slots, variables.state, variables.metrics
    token = (*_compat.compile_token(model), *map(tuple, parts))
    cache: dict[Any, Functions] = model.__dict__.setdefault("_meshwright_functions", {})
    present = cache.get((strategy, stands_still))
    if present is None or not _same(present.token, token):
        losses = loss_metrics(model, variables) if stands_still else None
        steps = steps_of(strategy, model, variables, losses, example)
        is_eager = model.compiled and model.run_eagerly
        present = Functions(token, RowWise(model, variables), steps, is_eager)
        cache[strategy, stands_still] = present
    return present


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(a is b or (isinstance(a, tuple) and a == b) for a, b in zip(one, other, strict=True))
