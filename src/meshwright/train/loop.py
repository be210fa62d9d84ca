"""The training loop for any Program; front ends with loops of their own use its parts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ..data import Putter
from ..errors import TopologyError
from ..explain import Explanation
from ..placement import Placement
from ..program import Batch, Logs, Program, TrainState
from ..step.train import guarded, make_train_step


class StepInfo(NamedTuple):
    """One step that was taken; its arrays may still be under way."""

    number: int
    state: TrainState
    logs: Logs


@dataclass(frozen=True, eq=False)
class Trainer:
    """Trains a Program under a placement; enter at the height that is needed.

    ``trainer.step(state, batch)`` takes one compiled step, ``trainer.steps(state, batches)``
    yields one :class:`StepInfo` after another, ``trainer.train(state, batches)`` drains it. States
    that are passed in are donated: go on with the returned one.

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

    def __post_init__(self) -> None:
        if self.placement.mesh.is_abstract:
            raise TopologyError(
                f"training needs devices, and the mesh ({self.placement.mesh}) is abstract. Use "
                f"placement.on(create_mesh({dict(self.placement.mesh.axes)!r}))."
            )

    @functools.cached_property
    def layouts(self) -> TrainState:
        """How every array of the state lies; raises :class:`~meshwright.PlacementError`."""
        program = self.program
        placed = {each.info: each for each in self.placement.place(program.infos)}
        return TrainState(
            *(
                {info.path: placed[info].layout for info in part}
                for part in (program.params, program.state, program.slots, program.metrics)
            )
        )

    @functools.cached_property
    def _shardings(self) -> TrainState:
        return jax.tree.map(lambda layout: layout.sharding, self.layouts)

    def init(self) -> TrainState:
        """The first state, each array made directly in its layout."""
        return jax.jit(self.program.initial, out_shardings=self._shardings)()

    @functools.cached_property
    def step(self) -> Any:
        """The compiled step ``(state, batch) -> (state, logs)``; it donates the state."""
        program = guarded(self.program, self.layouts, self.put.layouts)
        return jax.jit(
            make_train_step(program), donate_argnums=0, out_shardings=(self._shardings, None)
        )

    @functools.cached_property
    def put(self) -> Putter:
        """Lays a batch of host arrays out on the mesh."""
        return Putter(self.placement)

    def steps(self, state: TrainState, batches: Iterable[Batch]) -> Iterator[StepInfo]:
        """Train on one batch after another, never waiting for the devices."""
        for number, batch in enumerate(self.put.each(batches, alone_is_last=False)):
            state, logs = self.step(state, batch)
            yield StepInfo(number, state, logs)

    def train(self, state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, Logs]:
        """Train on every batch; the last state and the logs of the last step."""
        last = StepInfo(-1, state, {})
        for last in self.steps(state, batches):  # noqa: B007 - only the last one is wanted
            pass
        return last.state, last.logs

    def explain(self) -> Explanation:
        """Every variable: its layout, the rule that gave it, bytes per device."""
        return Explanation(self.placement.mesh, tuple(self.placement.place(self.program.infos)))
