"""What ``fit(checkpoint=...)`` writes and goes on from, and how it stops."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ... import _compat
from ...checkpoint import (
    PARTS,
    CheckpointInfo,
    Checkpoints,
    Position,
    read_checkpoint,
    restore_state,
)
from ...checkpoint.asked import Resume as Resume
from ...checkpoint.asked import checkpoints_of, to_go_on_from
from ...checkpoint.files import require_orbax
from ...checkpoint.randomness import read_randomness, write_randomness
from ...errors import CheckpointError, Preempted
from ...program import Logs, TrainState
from ...run.stopping import Stopping
from ...warn import warn
from .lasting import LastingNames
from .logs import as_json, history_from_json
from .program import KerasVariables, read_state, write_state

if TYPE_CHECKING:
    from .epochs import Epochs
    from .sharded import Sharded


def saver_for(
    strategy: Sharded,
    directory: str | Path | None,
    save_every: int | None,
    keep: int | None,
    resume: Resume,
) -> Saver:
    """The saver that these options of ``fit`` ask for; one that saves nothing without a directory.

    Raises :class:`CheckpointError` if they contradict each other or what the directory holds.
    """
    checkpoints = checkpoints_of(directory, save_every, keep)
    if checkpoints is None:
        return Saver(strategy)
    return Saver(strategy, checkpoints, save_every, to_go_on_from(checkpoints, resume))


def save_model(
    strategy: Sharded,
    model: keras.Model,
    directory: str | Path,
    step: int,
    parts: Sequence[str],
    dtype: str | None,
) -> None:
    """See :meth:`Sharded.save`."""
    check_parts(parts)
    with Checkpoints(directory, keep=None) as checkpoints:
        variables = strategy.prepare(model, forward_only=True)
        state = LastingNames.of(model, variables).to_checkpoint(read_state(variables))
        state = TrainState(
            *({} if p not in parts else v for p, v in zip(PARTS, state, strict=True))
        )
        checkpoints.save(step, state, layout=repr(strategy), dtype=dtype)


def check_parts(parts: Sequence[str]) -> None:
    """Raise :class:`CheckpointError` for parts that a training state does not have."""
    if isinstance(parts, str) or not set(parts) <= set(PARTS):
        raise CheckpointError(f"parts={parts!r}: expected a tuple of some of {PARTS}.")


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
    check_parts(parts)
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
    found = names.from_checkpoint(restore_state(info, like))
    write_state(variables, TrainState(*({**b, **f} for b, f in zip(before, found, strict=True))))
    return info


class Saver:
    """Saves a run of ``fit`` as it goes, and puts a new run where an old one stood."""

    def __init__(
        self,
        strategy: Sharded,
        checkpoints: Checkpoints | None = None,
        every: int | None = None,
        start: CheckpointInfo | None = None,
    ) -> None:
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._every = every
        self._start = start
        self._stopping = Stopping(saves=checkpoints is not None)
        self._position = start.position if start else Position()
        self._step = start.step if start else 0
        self._saved = (self._step, self._position.epoch, self._position.batches)
        self._random: Any = None  # what the data of this epoch (or, else, of the run) began with

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the whole run: signals are heard, and what is being written is finished."""
        with self._stopping, self._checkpoints or contextlib.nullcontext():
            yield
        if self._stopping.is_asked:
            raise self._stopping.error()

    # Where the run begins

    def restore(self, model: keras.Model, variables: KerasVariables) -> None:
        """Put the checkpoint to go on from, if there is one, into the variables."""
        self._model, self._variables = model, variables
        self._names = LastingNames.of(model, variables)
        if self._start is not None:
            self._load(self._start)

    def first_epoch(self, initial_epoch: int) -> int:
        """The epoch to begin with."""
        self._initial_epoch = initial_epoch
        return self._start.position.epoch if self._start else initial_epoch

    @property
    def was_stopped(self) -> bool:
        """Whether a callback (EarlyStopping, say) had ended the run."""
        return bool(self._start and self._start.notes.get("stopped"))

    def begin(self, callbacks: Any) -> None:
        """Give callbacks what they had counted, and the history what it held.

        Called after ``on_train_begin``, which resets them.
        """
        self._callbacks = callbacks
        self._fresh = _attributes(callbacks)
        if self._start is None:
            return
        for key, values in self._start.notes.get("callbacks", {}).items():
            if key in self._fresh:
                _named(callbacks)[key].__dict__.update(values)
        history = _history(callbacks)
        if history is not None:
            history.epoch = list(self._start.notes["history"]["epoch"])
            history.history = history_from_json(self._start.notes["history"]["logs"])

    def begin_epoch(self, epoch: int, data: Epochs) -> tuple[int, Logs | None]:
        """How many of the epoch's batches were trained on before, and the logs of the last one.

        Called after ``on_epoch_begin``: what callbacks change there was changed before the
        checkpoint was written, so the state is put back once more.
        """
        self._data = data
        start, self._start = self._start, None
        if start is None:
            if self._random is None or data.restarts:
                self._random = self._draw()
            self._position = Position(epoch, 0, self._random)
            return 0, None
        self._position, self._random = start.position, start.position.random
        if self._random is not None:
            _put_back(self._random)
        if not data.restarts:
            data.drop_epochs(epoch - self._initial_epoch)
        if start.position.batches:
            _warn_of_other_batches(start, data.num_batches)
            self._load(start)
        return start.position.batches, start.notes.get("logs")

    # While it runs

    def after_steps(self, count: int, batches: int, state: TrainState, logs: Logs) -> None:
        """Save if it is due; stop if a stop was requested."""
        self._step += count
        self._position = Position(self._position.epoch, batches, self._random)
        if self._stopping.asked():
            self._save(state, logs)
            raise self._stopping.error()
        if self._every and self._step // self._every > self._saved_step // self._every:
            self._save(state, logs)

    @contextlib.contextmanager
    def validating(self, logs: Logs) -> Iterator[None]:
        """Around a validation, which a signal may break off: it changes nothing that lasts."""
        try:
            with self._stopping.at_once():
                yield
        except (KeyboardInterrupt, Preempted):
            self._save(read_state(self._variables), logs)
            raise

    def after_epoch(self, epoch: int, last: bool) -> None:
        """Save after the callbacks of an epoch, if it is due or a stop was requested."""
        self._random = self._draw() if self._data.restarts else self._random
        self._position = Position(epoch + 1, 0, self._random)
        asked = self._stopping.asked()
        if last or asked or not self._every:
            self._save(read_state(self._variables), {})
        if asked:
            raise self._stopping.error()

    # How it is done

    def _load(self, info: CheckpointInfo) -> None:
        assert self._checkpoints is not None  # where the checkpoint comes from
        like = self._names.to_checkpoint(read_state(self._variables))
        found = self._checkpoints.restore(like, info)
        write_state(self._variables, self._names.from_checkpoint(found))

    def _save(self, state: TrainState, logs: Logs) -> None:
        here = (self._step, self._position.epoch, self._position.batches)
        if self._checkpoints is None or not self._stopping.saves or here == self._saved:
            return
        self._saved = here
        notes = {
            "history": _history_notes(self._callbacks),
            "callbacks": _changed(self._callbacks, self._fresh),
            "stopped": bool(self._model.stop_training),
            "num_batches": self._data.num_batches,
        }
        self._checkpoints.save(
            self._step,
            self._names.to_checkpoint(state),
            self._position,
            layout=repr(self._strategy),
            notes=notes,
            late_notes=lambda: {"logs": as_json(logs)},
        )

    @property
    def _saved_step(self) -> int:
        return self._saved[0]

    def _draw(self) -> dict[str, Any] | None:
        if self._checkpoints is None:
            return None
        return {**read_randomness(), "keras": _compat.global_seed()}


def _put_back(random: Any) -> None:
    write_randomness(random)
    _compat.set_global_seed(random["keras"])


def _warn_of_other_batches(start: CheckpointInfo, num_batches: int | None) -> None:
    before = start.notes.get("num_batches")
    if before != num_batches:
        warn(
            f"an epoch has {num_batches} batches now and had {before} when {start.directory} was "
            f"written, after {start.position.batches} of them. As many are left out now, which may "
            "be other rows. Train with the same batch size and data to repeat and miss none."
        )


def _history(callbacks: Any) -> Any:
    found = [each for each in callbacks.callbacks if isinstance(each, keras.callbacks.History)]
    return found[0] if found else None


def _history_notes(callbacks: Any) -> dict[str, Any]:
    history = _history(callbacks)
    if history is None:
        return {"epoch": [], "logs": {}}
    return {"epoch": list(history.epoch), "logs": as_json(history.history)}


# What callbacks have counted: their numbers, words and flags, as far as training changed them. What
# their constructors were given is the new run's own to say (and EarlyStopping turns its sign).

_OWN = (keras.callbacks.History, keras.callbacks.ProgbarLogger)


def _named(callbacks: Any) -> dict[str, Any]:
    return {
        f"{number}:{type(callback).__name__}": callback
        for number, callback in enumerate(callbacks.callbacks)
        if not isinstance(callback, _OWN)
    }


def _attributes(callbacks: Any) -> dict[str, dict[str, Any]]:
    return {
        key: {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in vars(callback).items()
            if (value is None or isinstance(value, bool | int | float | str | np.generic))
            and name not in inspect.signature(type(callback)).parameters
        }
        for key, callback in _named(callbacks).items()
    }


def _changed(callbacks: Any, fresh: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        key: {
            name: value
            for name, value in values.items()
            if name not in fresh[key] or fresh[key][name] != value
        }
        for key, values in _attributes(callbacks).items()
    }
