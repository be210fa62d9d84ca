"""The compiled steps of a Keras model under a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import keras

from ... import _compat
from ...program import Logs, TrainState
from ...step.finite import StandStill
from ...step.options import PLAIN, StepOptions
from ...step.several import AT_ONCE, is_short, several, together
from ...step.sharing import Sharing, shared
from ...step.train import make_test_step, make_train_step
from .finite import loss_metrics
from .program import KerasVariables, keras_program, own_test_step, predict_step, read_state
from .rowwise import RowWise

if TYPE_CHECKING:
    from .sharded import Sharded


@dataclass(frozen=True, eq=False)
class Functions:
    """The compiled steps of one model under one strategy, and what they were made from."""

    token: tuple[Any, ...]
    row_wise: RowWise
    train: Any = None
    train_several: Any = None
    train_together: Any = None
    test: Any = None
    predict: Any = None
    how: StepOptions = PLAIN

    def steps_at_once(self, state: TrainState, batch: Any) -> int:
        """How many steps to take in one call when no callback looks between them."""
        if self.train_several is None:
            return 1
        (batch,) = self.how.for_steps([batch] * self.how.accumulate)
        return AT_ONCE if is_short(self.train.trace(state, batch).jaxpr) else 1


def functions_of(
    strategy: Sharded, model: keras.Model, variables: KerasVariables, stands_still: bool = False
) -> Functions:
    """The compiled steps of this model under this strategy, made when first asked for.

    They are kept on the model, because they refer to it; ``model.compile`` invalidates them.
    ``stands_still`` makes training steps that change nothing once something is not finite.
    """
    token = (*_compat.compile_token(model), tuple(variables.params), tuple(variables.slots))
    kept: dict[Any, Functions] = model.__dict__.setdefault("_meshwright_functions", {})
    present = kept.get((strategy, stands_still))
    if present is None or not _same(present.token, token):
        present = _make_functions(strategy, model, variables, token, stands_still)
        kept[strategy, stands_still] = present
    return present


def _make_functions(
    strategy: Sharded,
    model: keras.Model,
    variables: KerasVariables,
    token: tuple[Any, ...],
    stands_still: bool,
) -> Functions:
    infos = tuple(variables.infos[id(v)] for v in variables.params.values())
    sharing = Sharing.of(strategy.placement, infos)
    predicting = strategy.traced_here(model, _gathering(predict_step(model, variables), sharing))
    row_wise = RowWise(model, variables)
    if not model.compiled:
        return Functions(token, row_wise, predict=jax.jit(predicting))
    program = keras_program(model, variables)
    own = _compat.has_own(model, "test_step")
    testing = own_test_step(model, variables) if own else make_test_step(shared(program, sharing))
    measuring = _measuring(testing)
    if stands_still:
        still = StandStill(program, loss_metrics(model, variables))
        step = still.step(make_train_step(still.program, sharing, strategy.how))
    else:
        step = make_train_step(program, sharing, strategy.how)
    if model.run_eagerly:
        return Functions(
            token, row_wise, step, test=measuring, predict=predicting, how=strategy.how
        )
    # A new state lies as the old one did, whatever XLA would prefer.
    lies = (jax.tree.map(lambda array: array.sharding, read_state(variables)), None)

    def training(step: Any) -> Any:
        return jax.jit(strategy.traced_here(model, step), donate_argnums=0, out_shardings=lies)

    whole = None
    if jax.process_count() > 1:  # every process returns all rows
        whole = jax.sharding.NamedSharding(strategy.mesh.jax_mesh, jax.sharding.PartitionSpec())
    return Functions(
        token,
        row_wise,
        train=training(step),
        train_several=training(several(step)),
        train_together=training(together(step, strategy.how.for_steps)),
        test=jax.jit(
            strategy.traced_here(model, measuring),
            out_shardings=(lies[0].state, lies[0].metrics, None),
        ),
        predict=jax.jit(predicting, out_shardings=whole),
        how=strategy.how,
    )


def _gathering(step: Any, sharing: Sharing) -> Any:
    """The prediction step on gathered parameters."""

    def gathering(params: Any, state: Any, batch: Any) -> Any:
        return step(sharing.gather(params), state, batch)

    return gathering


def _measuring(step: Any) -> Any:
    """The evaluation step without the parameters among its results: they do not change."""

    def measuring(whole: TrainState, batch: Any) -> tuple[Any, Any, Logs]:
        new, logs = step(whole, batch)
        return new.state, new.metrics, logs

    return measuring


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(a is b or (isinstance(a, tuple) and a == b) for a, b in zip(one, other, strict=True))
