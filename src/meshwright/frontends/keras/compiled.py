"""The compiled steps of a Keras model under a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import keras

from ... import _compat
from ...program import Logs, TrainState
from ...step.several import AT_ONCE, is_short, several
from ...step.train import make_test_step, make_train_step
from .program import KerasVariables, keras_program, own_test_step, predict_step, read_state

if TYPE_CHECKING:
    from .sharded import Sharded


@dataclass(frozen=True, eq=False)
class Functions:
    """The compiled steps of one model under one strategy, and what they were made from."""

    token: tuple[Any, ...]
    train: Any = None
    train_several: Any = None
    test: Any = None
    predict: Any = None

    def steps_at_once(self, state: TrainState, batch: Any) -> int:
        """How many steps to take in one call when nobody looks between them."""
        if self.train_several is None:
            return 1
        return AT_ONCE if is_short(self.train.trace(state, batch).jaxpr) else 1


def functions_of(strategy: Sharded, model: keras.Model, variables: KerasVariables) -> Functions:
    """The compiled steps of this model under this strategy, made when first asked for.

    They are kept on the model, for they hold it; a model that is compiled anew gets new ones.
    """
    token = (*_compat.compile_token(model), tuple(variables.params), tuple(variables.slots))
    kept: dict[Any, Functions] = model.__dict__.setdefault("_meshwright_functions", {})
    present = kept.get(strategy)
    if present is None or not _same(present.token, token):
        present = kept[strategy] = _make_functions(strategy, model, variables, token)
    return present


def _make_functions(
    strategy: Sharded, model: keras.Model, variables: KerasVariables, token: tuple[Any, ...]
) -> Functions:
    predicting = strategy.traced_here(model, predict_step(model, variables))
    if not model.compiled:
        return Functions(token, predict=jax.jit(predicting))
    program = keras_program(model, variables)
    own = _compat.has_own(model, "test_step")
    testing = own_test_step(model, variables) if own else make_test_step(program)
    measuring = _measuring(testing)
    if model.run_eagerly:
        return Functions(token, make_train_step(program), None, measuring, predicting)
    # A new state lies as the old one did, whatever XLA would prefer.
    lies = (jax.tree.map(lambda array: array.sharding, read_state(variables)), None)
    whole = None
    if jax.process_count() > 1:  # every process returns all rows
        whole = jax.sharding.NamedSharding(strategy.mesh.jax_mesh, jax.sharding.PartitionSpec())
    training = strategy.traced_here(model, make_train_step(program))
    return Functions(
        token,
        train=jax.jit(training, donate_argnums=0, out_shardings=lies),
        train_several=jax.jit(several(training), donate_argnums=0, out_shardings=lies),
        test=jax.jit(
            strategy.traced_here(model, measuring),
            out_shardings=(lies[0].state, lies[0].metrics, None),
        ),
        predict=jax.jit(predicting, out_shardings=whole),
    )


def _measuring(step: Any) -> Any:
    """The evaluation step without the parameters among its results: they do not change."""

    def measuring(whole: TrainState, batch: Any) -> tuple[Any, Any, Logs]:
        new, logs = step(whole, batch)
        return new.state, new.metrics, logs

    return measuring


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(a is b or (isinstance(a, tuple) and a == b) for a, b in zip(one, other, strict=True))
