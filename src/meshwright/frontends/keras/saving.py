"""``Sharded.save`` and ``Sharded.restore``: a Keras model as one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import keras

from ... import _compat
from ...checkpoint import PARTS, CheckpointInfo, Checkpoints, read_checkpoint, restore_state
from ...checkpoint.files import require_orbax
from ...errors import CheckpointError, ModelError
from ...program import TrainState
from .checkpoint_names import LastingNames
from .options import check_model
from .program import read_state, write_state

if TYPE_CHECKING:
    from .sharded import Sharded


def save_model(
    strategy: Sharded,
    model: keras.Model,
    directory: str | Path,
    step: int,
    parts: Sequence[str],
    dtype: str | None,
) -> None:
    """See :meth:`Sharded.save`."""
    _check_parts(parts)
    _check_built(strategy, model)
    with Checkpoints(directory, keep=None) as checkpoints:
        variables = strategy.prepare(model, forward_only=True)
        state = LastingNames.of(model, variables).to_checkpoint(read_state(variables))
        checkpoints.save(step, _only(parts, state), layout=repr(strategy), dtype=dtype)


def _check_parts(parts: Sequence[str]) -> None:
    """Raise :class:`CheckpointError` for parts that a training state does not have."""
    if isinstance(parts, str) or not set(parts) <= set(PARTS):
        raise CheckpointError(f"parts={parts!r}: expected a tuple of some of {PARTS}.")


def _check_built(strategy: Sharded, model: keras.Model) -> None:
    check_model(model)
    if _compat.has_its_variables(model):
        return
    with strategy.scope():
        is_declared = _compat.build_as_declared(model)
    if not is_declared:
        raise ModelError(
            f"model {model.name!r} is not built, so it has no variables yet. Call it on one batch, "
            "such as model(x[:1]), or model.build(shape), before it is saved or restored."
        )


def _only(parts: Sequence[str], state: TrainState) -> TrainState:
    return TrainState(*(v if p in parts else {} for p, v in zip(PARTS, state, strict=True)))


def restore_model(
    strategy: Sharded,
    model: keras.Model,
    directory: str | Path,
    step: int | None,
    parts: Sequence[str],
) -> CheckpointInfo:
    """See :meth:`Sharded.restore`."""
    _check_parts(parts)
    _check_built(strategy, model)
    require_orbax()
    info = read_checkpoint(directory, step)
    variables = strategy.prepare(model, forward_only=True)
    if "slots" in parts and model.compiled and _compat.has_unbuilt_optimizer(model):
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        variables = strategy.prepare(model, forward_only=True)
    before = read_state(variables)
    names = LastingNames.of(model, variables)
    like = names.to_checkpoint(_only(parts, before))
    restored = names.from_checkpoint(restore_state(info, like))
    write_state(variables, TrainState(*({**b, **f} for b, f in zip(before, restored, strict=True))))
    return info
