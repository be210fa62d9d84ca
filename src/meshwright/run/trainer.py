"""A Program trained under a placement, at three heights: a step, a generator of steps, a run."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ..checkpoint import Checkpoints
from ..data import Putter
from ..data.fingerprint import noting_first
from ..data.shard import reading_of
from ..errors import ModelError, TopologyError
from ..launch.join import agree, naming_failures
from ..launch.progress import entering, is_watched
from ..layouts.explain import Explanation
from ..layouts.placement import Placement
from ..layouts.strict import inspect
from ..program import Batch, Logs, Program, TrainState
from ..step.assemble import Assembly, assemble
from ..step.options import PLAIN, StepOptions
from .backlog import Backlog
from .counted_step import CountedStep
from .epochs import Callbacks, Run
from .facts import fields_text, step_facts, weights_facts
from .program_steps import ProgramSteps
from .saver import SaveEvery, Saver


class StepInfo(NamedTuple):
    """One step that was taken; its arrays may still be under way."""

    number: int
    state: TrainState
    logs: Logs


@dataclass(frozen=True, eq=False)
class Trainer:
    """Trains a ``program`` under a ``placement``; enter at the height that is needed.

    ``trainer.step(state, batch)`` takes one compiled step, ``trainer.steps(state, batches)``
    yields one :class:`StepInfo` after another, ``trainer.train(state, batches)`` drains it. States
    that are passed in are donated: go on with the returned one. ``trainer.forward(state, inputs)``
    gives outputs. ``how`` has accumulation, recompute and the like; with ``accumulate`` above one,
    a step takes a tuple of batches. Raises :class:`~meshwright.TopologyError` for an abstract mesh.

    >>> import jax.numpy as jnp, numpy as np, optax, meshwright as mw
    >>> def loss(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> program = mw.jax_program(loss, {"w": np.zeros([4, 2])}, optax.sgd(0.1))
    >>> mesh = mw.create_mesh({"batch": 4, "model": 2})
    >>> trainer = mw.Trainer(program, mw.Placement.of(mesh, {"w": [None, "model"]}))
    >>> batch = {"x": np.ones([8, 4]), "y": np.ones([8, 2])}
    >>> state, logs = trainer.train(trainer.init(), [batch] * 20)
    >>> float(logs["loss"]) < 1e-3
    True
    """

    program: Program
    placement: Placement
    how: StepOptions = PLAIN

    def __post_init__(self) -> None:
        _check_kinds(self.program, self.placement, self.how)
        if self.placement.mesh.is_abstract:
            raise TopologyError(
                f"training needs devices, and the mesh ({self.placement.mesh}) is abstract. Use "
                f"placement.on(mw.create_mesh({dict(self.placement.mesh.axes)!r}))."
            )

    @functools.cached_property
    def layouts(self) -> TrainState:
        """How every array of the state lies; raises :class:`~meshwright.PlacementError`."""
        return self._inspected.layouts

    @functools.cached_property
    def _steps(self) -> Assembly:
        return assemble(self.program, self.placement, self.how)

    @functools.cached_property
    def _inspected(self) -> Assembly:
        named = self._steps.batch_layouts.placement
        name, stages = repr(self.program.name), self.how.stage_axes
        inspect(named, self.program.infos, name, stages, has_more_dims=self.program.has_more_dims)
        return self._steps

    def init(self) -> TrainState:
        """The first state, each array made directly in its layout."""
        return self._inspected.initial()

    def unpadded(self, state: TrainState) -> TrainState:
        """The state with every weight under its own path, in its own dims.

        It has others where a layout has ``pad=True``, and in a pipeline. Checkpoints hold it so.
        :meth:`padded` makes a state of it again that :attr:`step` takes.
        """
        return self._steps.outside.restore(state)

    def padded(self, state: TrainState) -> TrainState:
        """A state whose arrays have their own dims, as :attr:`step` takes it."""
        return self._steps.outside.store(state)

    @functools.cached_property
    def step(self) -> Any:
        """The compiled step ``(state, batch) -> (state, logs)``; it donates the state."""
        step = self._inspected.train
        return CountedStep(step) if is_watched() else step

    def forward(self, state: TrainState, inputs: Any) -> Any:
        """The outputs of a program that has a forward function, for inputs as they lie."""
        return self._steps.forward(state, inputs)

    @functools.cached_property
    def put(self) -> Putter:
        """Lays a batch of host arrays out on the mesh."""
        layouts = self._steps.batch_layouts
        return Putter(layouts.placement, layouts.label)

    def steps(self, state: TrainState, batches: Iterable[Batch]) -> Iterator[StepInfo]:
        """Train on one batch after another, waiting only for steps that were begun long ago."""
        first: dict[str, str] = {}
        batches = reading_of(batches, self.placement)
        if jax.process_count() > 1:
            batches = noting_first(batches, first)
        laid_out, backlog = self.put.all_of(batches, alone_is_last=False), Backlog()
        entering("input")
        for number, batch in enumerate(self.how.for_steps(laid_out)):
            if number == 0:
                agree("Trainer.steps", functools.partial(self._facts, state, batch, first))
            entering("step")
            with naming_failures():
                state, logs = self._inspected.train(state, batch)
                backlog.add(logs)
            entering("script")
            yield StepInfo(number, state, logs)
            entering("input")
        entering("script")

    def _facts(self, state: TrainState, batch: Any, first: dict[str, str]) -> dict[str, str]:
        return {
            **first,
            "mesh": repr(self.placement.mesh),
            "placement": fields_text(self.placement),
            "options": fields_text(self.how),
            "batch": str(jax.tree.map(lambda leaf: leaf.shape, batch)),
            **weights_facts(state),
            **step_facts(self.step, state, batch),
        }

    def train(
        self,
        state: TrainState,
        batches: Iterable[Batch],
        *,
        checkpoints: Checkpoints | None = None,
        save_every: SaveEvery = None,
        peer_copies: int = 0,
    ) -> tuple[TrainState, Logs]:
        """Train on every batch; the last state and the logs of the last step.

        With ``checkpoints`` the state is saved every ``save_every`` steps and at the end, and the
        same call, made again after whatever happened, goes on from the newest of them: ``state``
        then only says how the restored one lies, and the batches before are left out. Ctrl-C, and
        SIGTERM where there are checkpoints, finish the step and save; then KeyboardInterrupt or
        :class:`~meshwright.Preempted` is raised. ``peer_copies`` is as in
        :meth:`Sharded.fit <meshwright.Sharded.fit>`.
        """
        layout = repr(self.placement.mesh)
        saver = Saver(checkpoints, save_every, layout=layout, peer_copies=peer_copies)
        with saver.claimed():
            steps = ProgramSteps(self, state, batches, saver)
            logs = Run(steps, saver, Callbacks()).train()
        return steps.newest, logs

    def explain(self) -> Explanation:
        """Every variable: its layout, where that comes from, bytes per device; the stages."""
        return self._steps.explained


def _check_kinds(*values: object) -> None:
    """Raise :class:`ModelError` unless these are a Program, a Placement and StepOptions."""
    kinds = (Program, Placement, StepOptions)
    wrong = [
        f"expected a {kind.__name__}, received {reprlib.repr(value)}"
        for value, kind in zip(values, kinds, strict=True)
        if not isinstance(value, kind)
    ]
    if wrong:
        raise ModelError(
            f"{'; '.join(wrong)}. Use mw.Trainer(program, placement, options) with mw.jax_program"
            "(...), mw.Placement.of(mesh, ...) and mw.StepOptions(...); a Keras model trains by "
            "mw.Sharded(...).fit(model, ...)."
        )
