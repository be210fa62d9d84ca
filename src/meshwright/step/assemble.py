"""The one place where the steps of a program are put together.

What a Trainer, Keras' ``fit``, ``mw.measure``, the check of equivalence and the workers of
parameter servers run, and what a dry run compiles, all comes from :func:`assemble`. A program goes
through these, each of which leaves its numbers as they are:

=========================  ===================================================================
stages                     equal blocks stacked, a loop over ticks; ``meshwright.stages``
the guard                  right numbers however arrays are split; ``spatial.py``
storing                    arrays that do not divide are stored with zeros behind; ``storing.py``
standing still             nothing changes once something is not finite; ``nan_guard.py``
ZeRO and remat             gathered where read, computed again, updated in pieces; ``sharing.py``
the gradient               products and sums as a mesh wants them; ``gradient.py``
accumulation               several micro-batches, one update; ``accumulate.py``
sums over devices          flat vectors, parts, steps apart; ``summing``, ``compression``, ``local``
several steps              in one program, where dispatch counts; ``steps_per_execution.py``
the program's context      the rules, or the Keras strategy, under which it is traced
``jax.jit``                the state is donated, and lies afterwards as before
=========================  ===================================================================

Evaluation and prediction leave out what only gradients need. A custom loop compiles its step
itself, so its program names the layouts of its results: :attr:`Assembly.custom_program`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .. import _compat
from ..jaxprs.branches import with_free_results
from ..jaxprs.edits import edited
from ..layouts.explain import Explanation
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..layouts.params import Placed
from ..layouts.placement import Placement
from ..program import Arrays, Aux, Batch, Logs, Program, Step, TrainState
from ..stages.branched import Branched
from ..stages.branches import Branches
from ..stages.pipeline import Pipeline
from ..stages.running import Taken
from ..stages.setting import runs_alone
from ..stages.stacking import Stacking
from ..stages.staged import Staged
from .accumulate import accumulating_step
from .batches import BatchLayouts
from .compression import with_unsent
from .gradient import Gradient, gradient
from .local import DiLoCo, local_step, with_outer
from .nan_guard import StandStill
from .options import PLAIN, StepOptions
from .padding import Padded, rows_of
from .sharing import Sharing, shardings_of, shared, with_shardings
from .spatial import guarded
from .staged_gradients import StagedGradients
from .steps_per_execution import several, together
from .storing import Storing, stored


def assemble(
    program: Program,
    placement: Placement,
    how: StepOptions = PLAIN,
    *,
    losses: tuple[str, ...] | None = None,
) -> Assembly:
    """The steps of a program under a placement; the mesh may be abstract.

    With ``losses``, the paths of the metrics that average the loss, a training step changes nothing
    once something is not finite.

    >>> import jax.numpy as jnp, optax, meshwright as mw
    >>> def loss(params, x):
    ...     return jnp.mean((x @ params["w"]) ** 2)
    >>> program = mw.jax_program(loss, {"w": jnp.ones([4, 2])}, optax.sgd(0.1))
    >>> steps = assemble(program, Placement.of(mw.Mesh({"batch": 8}), zero=1))
    >>> print(steps.layouts.params["w"])
    [unsharded, unsharded] on batch=8
    """
    if isinstance(how.local, DiLoCo):
        program = with_outer(program)
    if how.compress is not None:
        program = with_unsent(program, placement, how.compress)
    if how.pipeline is None:
        return Assembly(program, placement, how, losses)
    if placement.rules is not None:  # "layers:stage" says what the stages split
        beside = [axis for axis, _ in placement.mesh.axes if axis != how.pipeline.axis]
        placement = replace(placement, rules=placement.rules.on(beside))
    plain = Assembly(program, placement, replace(how, pipeline=None))
    staged = _staged(program, plain.guarded, placement, how.pipeline, how.remat == "block")
    return Assembly(staged.program, placement, how, losses, staged)


def _staged(
    program: Program,
    guarded: Program,
    placement: Placement,
    how: Pipeline | Branches,
    by_block: bool,
) -> Staged:
    """Inside of a stage rows of the batch alone may be split, which needs no guard."""
    alone = runs_alone(dict(placement.mesh.axes), how.axis, placement.batch_axes)
    whole = program if alone else guarded
    if isinstance(how, Branches):
        return Branched.by_branch(whole, placement, how, guarded)
    return Staged.of(whole, placement, how, by_block, guarded)


@dataclass(frozen=True, eq=False)
class Assembly:
    """How the steps of a program are computed, where their arrays lie, how they are compiled.

    ``train_step``, ``test_step`` and ``predict_step`` are pure functions, new ones each time, for
    JAX remembers how a function was traced. ``train``, ``test`` and ``predict`` are compiled.
    """

    program: Program
    placement: Placement
    how: StepOptions = PLAIN
    losses: tuple[str, ...] | None = None
    staged: Staged | None = None  # that ``program`` is, where it is a pipeline

    # Where arrays lie

    @functools.cached_property
    def placed(self) -> tuple[Placed, ...]:
        """Every variable of the program with its layout and the reason for it."""
        placed = self.placement.place(self.program.infos)
        return tuple(placed if self.staged is None else self.staged.stacking.explained(placed))

    @functools.cached_property
    def layouts(self) -> TrainState:
        """The layouts of the state between steps."""
        return self._by_path(self.placed, lambda placed: placed.layout)

    @functools.cached_property
    def shardings(self) -> TrainState:
        """The same layouts as shardings of JAX."""
        return self._by_path(self.placed, lambda placed: placed.layout.sharding)

    @functools.cached_property
    def state(self) -> TrainState:
        """The state without values, as it is stored."""

        def array(placed: Placed) -> Any:
            dtype, sharding = jnp.dtype(placed.info.dtype), placed.layout.sharding
            return jax.ShapeDtypeStruct(placed.stored_dims, dtype, sharding=sharding)

        return self._by_path(self.placed, array)

    @functools.cached_property
    def storing(self) -> Storing:
        """Which arrays are stored with padding."""
        return Storing.of(self.placement, *self.program.parts)

    @property
    def explained(self) -> Explanation:
        """Where every variable of a step lies and why, and what each stage of a pipeline does."""
        mesh, staged = self.placement.mesh, self.staged
        if staged is None:
            return Explanation(mesh, self.placed)
        notes = staged.notes
        return Explanation(mesh, self.placed, staged.shares, staged.ticks, staged.layers, notes)

    @property
    def outside(self) -> Storing | Stacking:
        """Converts the arrays of a step to those that users see, and back."""
        return self.storing if self.staged is None else self.staged.stacking

    @functools.cached_property
    def sharing(self) -> Sharing:
        """What ZeRO shares out."""
        return Sharing.of(self.placement, self.program.params, self.how.sums, self.how.remat)

    @functools.cached_property
    def batch_layouts(self) -> BatchLayouts:
        """The layouts of batches."""
        named = self.placement.naming(self.program.inputs)
        return BatchLayouts(named, self.program.label)

    def _by_path(self, placed: tuple[Placed, ...], of: Callable[[Placed], Any]) -> TrainState:
        values = iter(map(of, placed))
        return TrainState(*({info.path: next(values) for info in p} for p in self.program.parts))

    # The program at the stages of the table above

    @functools.cached_property
    def used(self) -> TrainState:
        """The layouts of the state where the program computes with it: in its own dims."""
        gathered = tuple(self.placement.with_zero(0).place(self.program.infos))
        used, whole = (
            self._by_path(placed, lambda placed: placed.unpadded)
            for placed in (self.placed, gathered)
        )
        return used._replace(params=whole.params)

    @functools.cached_property
    def guarded(self) -> Program:
        """The program with right numbers however its arrays are split."""
        if self.staged is not None:
            return self.program
        return guarded(self.program, self.used, self.batch_layouts)

    @functools.cached_property
    def stored(self) -> Program:
        """The guarded program over arrays as they are stored."""
        return stored(self.guarded, self.storing)

    @property
    def computed(self) -> Program:
        """The program with ZeRO over arrays in their own dims, which nothing stores here."""
        return shared(self.guarded, self.sharing, self.how.remat)

    @property
    def custom_program(self) -> Program:
        """The stored program for custom steps: its results have the layouts of the state."""
        here = replace(
            self.stored,
            forward=self.under(self.stored.forward),
            loss=self.under(self.stored.loss),
        )
        return _keeping(here, self.shardings, self.sharing)

    # Pure steps

    @property
    def train_step(self) -> Step:
        """``(state, batch) -> (state, logs)``; a tuple of micro-batches where it accumulates.

        Raises :class:`~meshwright.ModelError` for a model that brings a step of its own which
        cannot do what is asked.
        """
        if self.losses is None:
            return self.under(self._training(self.stored), whole=True)
        still = StandStill(self.stored, self.losses)
        return self.under(still.step(self._training(still.program)), whole=True)

    @property
    def custom_train_step(self) -> Step:
        """The training step of :attr:`custom_program`."""
        return self.under(self._training(self.custom_program), whole=True)

    @property
    def test_step(self) -> Step:
        """``(state, batch) -> (state, logs)``, which only measures."""
        own = self.stored.own_test_step
        return self.under(own or _measuring(shared(self.stored, self.sharing)))

    @property
    def predict_step(self) -> Callable[[Arrays, Arrays, Batch], Any]:
        """``(params, state, batch) -> outputs``."""
        step = self.moving_step
        return lambda *arguments: step(*arguments)[0]

    @property
    def moving_step(self) -> Callable[[Arrays, Arrays, Batch], tuple[Any, Arrays]]:
        """``(params, state, batch) -> (outputs, state)``, of the state only what has changed."""
        program = shared(self.stored, self.sharing)

        def forward(params: Arrays, state: Arrays, batch: Batch) -> tuple[Any, Arrays]:
            return program.forward(params, state, batch, False)

        predict = program.predict or forward

        def moving(params: Arrays, state: Arrays, batch: Batch) -> tuple[Any, Arrays]:
            outputs, new = predict(params, state, batch)
            # Weights that are frozen are a part of the state, and may be large.
            return outputs, {path: new[path] for path in new if new[path] is not state[path]}

        return self.under(moving)

    def _forward_of(self, lies: Any) -> Any:
        """The compiled forward pass for inputs with these layouts, ``None`` where they are whole.

        XLA has got nothing wrong in it but what is split beyond the rows of a batch.
        """
        program = self.program
        if any(layout.axes != layout.dim_axes(0) for layout in jax.tree.leaves(lies)):
            program = guarded(program, self.used, lambda _: lies)
        program = shared(stored(program, self.storing), self.sharing)

        def forward(state: TrainState, inputs: Any) -> Any:
            return program.forward(state.params, state.state, inputs, False)[0]

        return jax.jit(self.under(forward))

    def _training(self, program: Program) -> Step:
        how, sharing = self.how, self.sharing
        if program.own_step is not None:
            how.refuse_own_step(program)
            return program.own_step
        program = shared(program, sharing, how.remat)
        of = self.gradient_of
        if how.local is not None:
            return local_step(program, how.local, of, self.placement)
        if how.accumulate > 1:
            return accumulating_step(program, of, sharing)
        differentiate = of(program)
        if self.staged is not None:
            return _by_stages(self.staged, program, sharing, differentiate)

        def train_step(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
            aux, grads, slots_of_sums = sharing.gradients(differentiate, whole, batch)
            slots = program.noting(whole.slots, aux.loss)
            params, slots = program.update(whole.params, grads, slots)
            metrics, logs = program.measure(aux.metrics, aux, batch)
            return TrainState(params, aux.state, {**slots, **slots_of_sums}, metrics), logs

        return train_step

    @property
    def stages(self) -> StagedGradients | None:
        """The gradients by stages, of a state with every variable under its own path."""
        return None if self.staged is None else StagedGradients(self.staged, self.sharing)

    @property
    def gradient_of(self) -> Callable[..., Gradient]:
        """Makes the gradient of a program, as :func:`~meshwright.step.gradient.gradient` does."""
        lies = self.batch_layouts.placement
        rows_only = not (lies.inputs or lies.targets or lies.activations)
        return functools.partial(gradient, sums=self.how.computed_sums, splits_rows_only=rows_only)

    def under(self, function: Callable[..., Any], *, whole: bool = False) -> Callable[..., Any]:
        """A function of the program, traced as it is under the placement."""
        return self.program.under(self.placement, function, whole=whole)

    # Compiled steps

    @functools.cached_property
    def initial(self) -> Any:
        """Makes the first state, each array directly in its layout."""
        initial = stored(self.program, self.storing).initial
        return jax.jit(self.under(initial), out_shardings=self.shardings)

    @functools.cached_property
    def train(self) -> Any:
        """The training step; it donates the state."""
        return self._compiled(self._traced)

    @functools.cached_property
    def train_several(self) -> Any:
        """``(state, batches) -> (state, logs of the last step)``."""
        return self._compiled(several(self._traced))

    @functools.cached_property
    def train_together(self) -> Any:
        """The same of stacked batches (:class:`~meshwright.step.steps_per_execution.Together`)."""
        return self._compiled(together(self._traced, self.how.for_steps))

    @functools.cached_property
    def _traced(self) -> Any:
        """The training step where it is a part of another function; JAX keeps its trace."""
        return _compat.jit_inlined(self.train_step)

    def _compiled(self, step: Callable[..., Any]) -> Any:
        # A new state lies as the old one did, whatever XLA would prefer.
        return jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, None))

    @functools.cached_property
    def test(self) -> Any:
        """``(state, batch) -> (state of the model, metrics, logs)``: nothing else changes."""
        lies = self.shardings.state, self.shardings.metrics, None
        return jax.jit(measured(self.test_step), out_shardings=lies)

    @functools.cached_property
    def predict(self) -> Any:
        """:attr:`moving_step`, compiled; of several processes every one returns all rows."""
        whole, step, lies = None, self.moving_step, self.shardings.state

        def moving(params: Arrays, state: Arrays, batch: Batch) -> tuple[Any, Arrays]:
            outputs, new = step(params, state, batch)
            return outputs, jax.lax.with_sharding_constraint(
                new, {path: lies[path] for path in new}
            )

        if jax.process_count() > 1:
            whole = jax.sharding.NamedSharding(
                self.placement.mesh.jax_mesh, jax.sharding.PartitionSpec()
            )
        return jax.jit(moving, out_shardings=(whole, None))

    def forward(self, state: TrainState, inputs: Any) -> Any:
        """The outputs of the program for inputs as they lie; compiled once for each layout."""
        leaves, tree = jax.tree.flatten(inputs)
        key = tree, tuple(_layout_of(leaf, self.placement.mesh) for leaf in leaves)
        if key not in self._forwards:
            self._forwards[key] = self._forward_of(jax.tree.unflatten(tree, key[1]))
        return self._forwards[key](state, inputs)

    @functools.cached_property
    def _forwards(self) -> dict[Any, Any]:
        return {}


def _by_stages(staged: Staged, program: Program, sharing: Sharing, differentiate: Gradient) -> Step:
    """The step of a pipeline; a last batch that does not divide is taken without its stages."""

    def gradients(whole: TrainState, batch: Batch) -> Taken:
        if not isinstance(batch, Padded) and staged.takes(batch):
            return staged.gradients(whole, batch)
        staged.warn_of_none(rows_of(batch))
        aux, grads = differentiate(whole.params, whole, batch)
        return grads, aux.state, *program.measure(aux.metrics, aux, batch)

    def train_step(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        grads, state, metrics, logs = gradients(whole, batch)
        grads = sharing.summed(grads, whole.params)
        slots = program.noting(whole.slots, logs.get("loss"))
        params, slots = program.update(whole.params, grads, slots)
        return TrainState(params, state, slots, metrics), logs

    return train_step


def _layout_of(value: Any, mesh: Mesh) -> Layout | None:
    """How an array lies on this mesh; ``None`` for what is elsewhere, or traced."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return None
    sharding = value.sharding
    on_mesh = isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh == mesh.jax_mesh
    return Layout.from_sharding(sharding, value.ndim) if on_mesh else None


def measured(test_step: Step) -> Callable[[TrainState, Batch], tuple[Arrays, Arrays, Logs]]:
    """An evaluation step that returns what it changes only."""

    def measure(whole: TrainState, batch: Batch) -> tuple[Arrays, Arrays, Logs]:
        new, logs = test_step(whole, batch)
        return new.state, new.metrics, logs

    return measure


def _measuring(program: Program) -> Step:
    def loss(whole: TrainState, batch: Batch) -> Any:
        return program.loss(whole.params, whole, batch, False)

    def test_step(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        _, aux = edited(loss, with_free_results)(whole, batch)
        metrics, logs = program.measure(aux.metrics, aux, batch)
        return whole._replace(state=aux.state, metrics=metrics), logs

    return test_step


# Custom steps. XLA lays a result out as suits the step, not as its argument lay: a replicated
# bias beside a split kernel comes back split, and the next call compiles again.


def _keeping(program: Program, lies: TrainState, sharing: Sharing) -> Program:
    """The program whose results and gradients lie as the state does.

    ``lies`` has a :class:`jax.sharding.Sharding` per array of the state. Gradients lie as their
    parameters, or with ZeRO as the pieces that are updated.
    """

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        value, aux = program.loss(params, whole, batch, training)
        state = with_shardings(aux.state, lies.state, whole.state)
        metrics = with_shardings(aux.metrics, lies.metrics, whole.metrics)
        return value, aux._replace(state=state, metrics=metrics)

    def measure(metrics: Arrays, aux: Aux, batch: Batch) -> tuple[Arrays, Logs]:
        new, logs = program.measure(metrics, aux, batch)
        return with_shardings(new, lies.metrics), logs

    pieces = shardings_of(sharing.shared)

    def update(params: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
        new, new_slots = program.update(params, with_shardings(grads, pieces), slots)
        return with_shardings(new, lies.params), with_shardings(new_slots, lies.slots)

    own = program.own_step

    def own_step(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        assert own is not None
        new, logs = own(whole, batch)
        return TrainState(*map(with_shardings, new, lies)), logs

    return replace(program, loss=loss, measure=measure, update=update, own_step=own and own_step)
