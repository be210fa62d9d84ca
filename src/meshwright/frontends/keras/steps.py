"""The steps of ``fit`` on the devices of a mesh, by pure functions of a Keras model.

They never wait for the devices within an epoch, and however a run ends, the variables end up with
the newest state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import keras

from ... import _compat
from ...checkpoint import CheckpointInfo, Position
from ...checkpoint.randomness import read_randomness, write_randomness
from ...errors import BatchError
from ...jaxprs.flops import model_flops
from ...launch.join import agree
from ...launch.progress import entering
from ...program import Logs, TrainState
from ...run.backlog import Backlog
from ...run.epochs import Steps, Taken
from ...run.facts import step_facts, weights_facts
from ...run.logs import on_host
from ...run.progress import Part
from ...run.stopping import Stopping
from ...step.steps_per_execution import Together
from ...units import count_text
from ...warn import warn
from .batches import abstract
from .callbacks import TrainingSetup, listen
from .checkpoint_names import LastingNames
from .compiled import Functions
from .epochs import Epochs, chunk_size
from .nan_guard import FiniteGuard
from .program import KerasVariables, read_state, take_state, write_state
from .work import StepWork, peak_flops_per_s, samples_and_tokens

if TYPE_CHECKING:
    from .sharded import Sharded


@dataclass
class KerasSteps(Steps):
    """Takes the steps of one run of ``fit``."""

    strategy: Sharded
    model: keras.Model
    variables: KerasVariables
    functions: Functions
    data: Epochs
    callbacks: keras.callbacks.CallbackList
    guard: FiniteGuard
    measure: Callable[[], Logs]
    initial_epoch: int
    is_saved: bool

    def __post_init__(self) -> None:
        self._begins = listen(self.callbacks, "on_train_batch_begin", "on_batch_begin")
        self._ends = listen(self.callbacks, "on_train_batch_end", "on_batch_end")
        # The guard looks at single batches again.
        self._stacks = self.functions.train_together is not None and not self.guard.stands_still
        self._setup = TrainingSetup(self.model)
        self._at_once: int | None = None
        self._backlog = Backlog()
        self._state: TrainState | None = None
        self._last: Any = None  # step's batches, or the shapes of several that were stacked
        self._random: Any = None  # what the data of this epoch (or, else, of the run) began with
        self._epoch = -1

    @functools.cached_property
    def _names(self) -> LastingNames:
        return LastingNames.of(self.model, self.variables)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.settle(ends=True)

    @property
    def num_batches(self) -> int | None:
        return self.data.num_batches

    def begin_epoch(self, epoch: int, start: CheckpointInfo | None) -> None:
        self._epoch = epoch
        if start is None:
            if self._random is None or self.data.restarts:
                self._random = self._draw()
        else:
            self._random = start.position.random
            if self._random is not None:
                write_randomness(self._random)
                _compat.set_global_seed(self._random["keras"])
            if not self.data.restarts:
                self.data.drop_epochs(epoch - self.initial_epoch)
            if start.position.batches:
                _warn_of_other_batches(start, self.num_batches)
        self.data.begin(epoch, None if start is None else start.position)
        self.guard.begin(epoch)
        _compat.attach_state(self.model, None)

    def take(self, epoch: int, done: int) -> Iterator[Taken]:
        model, callbacks = self.model, self.callbacks
        entering("input")
        for number, chunk in self.data.chunks(done, self._size_for, self._stacks):
            size = chunk_size(chunk)
            if self._begins:
                entering("batch callbacks")
                callbacks.on_train_batch_begin(number)
            if self._begins or self._ends:
                self._setup.check()
            if self._state is None or _compat.state_was_synced(model):
                self._state = take_state(self.variables)  # a callback may have changed it
            entering("step")
            self._state, logs = self._call(self._state, chunk)
            if self._begins or self._ends:
                _compat.attach_state(model, self._in_keras_order())
            if self._ends:
                entering("batch callbacks")
                callbacks.on_train_batch_end(number + size - 1, logs)
            yield Taken(size, number + size, logs)
            self.guard.check(self._newest)
            if model.stop_training:
                break
            entering("input")
        entering("step")  # the last ones are waited for
        self.guard.wait(self._newest)

    def logs(self, last: Logs) -> Logs:
        if not last:
            raise BatchError("there is nothing to train on: the data holds no batch.")
        if self._state is not None and _compat.has_own(self.model, "train_step"):
            values = self._in_keras_order()["metrics_variables"]
            last = _compat.logs_at_the_end(self.model, last, values)
        logs = on_host(last)
        self.guard.end(logs)
        return logs

    def settle(self, ends: bool) -> None:
        """Write the newest state into the variables, unless a callback has done so."""
        if self._state is not None and not _compat.state_was_synced(self.model):
            write_state(self.variables, self._state)
        _compat.detach_state(self.model)
        self._state = None

    def validate(self, stopping: Stopping) -> Logs:
        with stopping.at_once():  # it changes nothing that lasts
            return self.measure()

    def finish(self) -> None:
        self.model.optimizer.finalize_variable_values(self.model.trainable_weights)

    # What a checkpoint holds

    def state(self) -> TrainState:
        return self._names.to_checkpoint(self._newest())

    def load(self, state: TrainState) -> None:
        write_state(self.variables, self._names.from_checkpoint(state))

    def position(self, epoch: int, batches: int) -> Position:
        begins = epoch > self._epoch and self.data.restarts
        data = self.data.place(batches) if batches and epoch == self._epoch else None
        return Position(epoch, batches, self._draw() if begins else self._random, data)

    def _draw(self) -> dict[str, Any] | None:
        return {**read_randomness(), "keras": _compat.global_seed()} if self.is_saved else None

    # One call of the devices

    def _newest(self) -> TrainState:
        """The state after the last step, or as a callback has changed it."""
        if self._state is None or _compat.state_was_synced(self.model):
            return read_state(self.variables)
        return self._state

    def _size_for(self, batch: Any) -> int:
        """How many batches, from this one on the host on, are trained on in one call."""
        accumulate, per_execution = self.functions.how.batches, self.model.steps_per_execution
        if per_execution > 1:
            return per_execution * accumulate
        if self._begins or self._ends:
            return accumulate
        if self._at_once is None:
            state = read_state(self.variables)
            self._at_once = self.functions.steps_at_once(state, abstract(batch))
        return self._at_once * accumulate

    def _call(self, state: TrainState, chunk: list[Any] | Together) -> tuple[TrainState, Logs]:
        functions = self.functions
        if self._last is None:
            agree("first step", lambda: self._facts(state, chunk))
        if isinstance(chunk, Together):
            state, logs = functions.train_together(state, chunk)
            self._last = Together(abstract(chunk.arrays))
            self._backlog.add(logs)
            return state, logs
        steps = list(functions.how.for_steps(chunk))
        if len(steps) > 1 and functions.train_several is not None and _alike(steps):
            state, logs = functions.train_several(state, tuple(steps))
        else:
            logs: Logs = {}
            for step in steps:
                state, logs = functions.train(state, step)
        self._backlog.add(logs)
        self.guard.took(steps, logs)
        self._last = steps[-1]
        return state, logs

    def _last_step(self) -> Any:
        """What the last step took, or arrays of its shapes without values."""
        if not isinstance(self._last, Together):
            return self._last
        how, one = self.functions.how, self._one_of(self._last)
        return next(iter(how.for_steps([one] * how.batches)))

    def _one_of(self, batches: Together) -> Any:
        layouts = self.functions.steps.batch_layouts
        return layouts.abstract(abstract(batches.arrays, without=1))

    def _facts(self, state: TrainState, chunk: list[Any] | Together) -> dict[str, str]:
        how, size = self.functions.how, chunk_size(chunk)
        if isinstance(chunk, Together):
            chunk = [self._one_of(chunk)] * how.batches
        step = next(iter(how.for_steps(chunk)))
        return {
            "batches in one call (callbacks of batches make it fewer)": str(size),
            **self.data.first_facts,
            **weights_facts(state),
            **step_facts(self.functions.train, state, step),
        }

    def _in_keras_order(self) -> dict[str, list[Any]]:
        v = self.variables
        assert self._state is not None  # a step was taken
        state = v.storing.restore(self._state)
        return {
            "trainable_variables": [state.params[path] for path in v.params],
            "non_trainable_variables": [state.state[path] for path in v.state],
            "optimizer_variables": [state.slots[path] for path in v.slots],
            "metrics_variables": v.metrics_as_listed(state.metrics),
        }

    def work(self) -> StepWork:
        """What training on one batch takes, on all devices; FLOPs as the step is traced."""
        train, how = self.functions.train, self.functions.how
        step = self._last_step()
        batch = step if how.batches == 1 else step[0]
        samples, tokens = samples_and_tokens(batch)
        flops = None
        if self._state is not None and hasattr(train, "trace"):
            flops = model_flops(train.trace(self._state, step).jaxpr)
        return StepWork(
            samples,
            tokens,
            flops and flops / how.batches,
            peak_flops_per_s(self.strategy.mesh.devices or (), self.model.compute_dtype),
            is_recomputed=how.remat != "none",
        )


class WorkRates:
    """The end of the line of progress: what steps of this work amount to in a second."""

    def __init__(self, work: Callable[[], StepWork]) -> None:
        self._count, self._work = work, StepWork()
        self._counted = False

    def begin(self) -> None: ...

    def look(self) -> None:
        """Count the work of a step, once: it takes a trace."""
        if not self._counted:
            self._work, self._counted = self._count(), True

    def parts(self, steps_per_s: float | None, ended: bool) -> list[Part]:
        if not steps_per_s:
            return []
        return [
            Part(self._work.items_text(steps_per_s), 4),
            Part(f"{count_text(steps_per_s)} steps/s", 7),
            Part(self._work.speed_text(steps_per_s), 4 if self._work.peak_flops_per_s else 9),
        ]


def _warn_of_other_batches(start: CheckpointInfo, num_batches: int | None) -> None:
    before = start.notes.get("num_batches")
    if before != num_batches:
        warn(
            f"an epoch has {num_batches} batches now and had {before} when {start.directory} was "
            f"written, after {start.position.batches} of them. As many are left out now, which may "
            "be other rows. Train with the same batch size and data to repeat and miss none."
        )


def _alike(steps: list[Any]) -> bool:
    """Whether all batches have equal shapes; a smaller last one would recompile the whole call."""
    trees = [jax.tree.map(lambda leaf: leaf.shape, batch) for batch in steps]
    return all(tree == trees[0] for tree in trees)
