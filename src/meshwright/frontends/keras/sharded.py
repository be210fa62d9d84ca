"""The strategy for Keras: a placement that is also a ``keras.distribution.Distribution``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from ... import _compat
from ...checkpoint import PARTS, CheckpointInfo
from ...errors import LayoutError, ModelError, PipelineError
from ...layouts.context_mesh import outside_of_context
from ...layouts.dim_rules import RulesLike
from ...layouts.explain import Explanation
from ...layouts.layout_map import LayoutMap
from ...layouts.mesh import Mesh
from ...layouts.placement import BatchLike, Placement, Unmatched
from ...layouts.strict import refuse_idle_rules
from ...planning.abstract_step import AbstractStep
from ...program import Batch, Program, Step, TrainState
from ...run.options import Data, Schedule, Validation
from ...run.saver import Resume, SaveEvery, Saver
from ...stages.branches import Branches
from ...stages.faults import no_axis
from ...stages.pipeline import Pipeline
from ...step.assemble import Assembly
from ...step.compression import UNSENT, Compress, first_rows, rows_layout
from ...step.local import OUTER, DiLoCo, Local
from ...step.options import PLAIN, StepOptions, Sums
from . import batches, fitting, saving
from .abstract import abstract_step, check_batch, is_abstract
from .compiled import functions_of
from .distribution import LaidOut
from .nan_guard import NanGuard
from .options import check_model
from .paths import set_weight_layout
from .program import KerasVariables, check_state, read_state, write_state
from .replicas import Replicas


class Sharded(LaidOut, Replicas):
    """Lays Keras models, their optimizers and their data out on a mesh, and trains them there.

    ``mesh`` has the axes. ``layouts`` maps path patterns to layouts (see
    :class:`~meshwright.LayoutMap`); variables that no pattern matches are replicated. ``batch`` is
    the axis, or axes, that the first dim of every input and target lies on, or ``None``. ``inputs``
    and ``targets`` give one layout for the only input or target, or a mapping by name or position,
    and may split any dim, such as the height and width of images. ``activations`` maps layer paths
    to layouts of their outputs. A bare sequence of axes is an unbound layout. ``zero`` shares state
    out over the batch axes: 1 the optimizer's slots, 2 gradients too, 3 the parameters as well.
    ``unmatched`` says whether large parameters that no pattern matches are replicated with a
    warning (``"warn"``), silently (``"replicate"``) or not at all (``"error"``). A pattern that
    matches nothing is an error, with ``strict=False`` a warning. ``accumulate`` batches make one
    step of the optimizer; ``remat`` (``"none"``, ``"block"``, ``"selective"`` or the name of a
    policy) says what is computed again rather than kept; ``sums="float32"`` sums gradients over
    devices in that type, a :class:`~meshwright.GradientSum` in another way. ``local`` is a
    :class:`~meshwright.LocalSGD` or :class:`~meshwright.DiLoCo`. ``pipeline`` cuts the model into
    stages (:class:`~meshwright.Pipeline`). ``rules`` lay out what is given as names of dims
    (:func:`~meshwright.dims`), ``"batch:rows;d_ff:cols"``, and batches by the dim ``batch``.
    Raises :class:`~meshwright.LayoutError` for axes that the mesh does not have, and
    :class:`~meshwright.PipelineError` if the one of the pipeline is among them.

    >>> import keras, meshwright as mw
    >>> mesh = mw.create_mesh({"batch": 4, "model": 2})
    >>> strategy = mw.Sharded(mesh, {"hidden.*kernel": [mw.UNSHARDED, "model"]})
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input([8]), keras.layers.Dense(6, name="hidden")])
    >>> print(model.layers[0].kernel.layout)
    [unsharded, model] on batch=4, model=2 @ cpu:0-7
    """

    def __init__(
        self,
        mesh: Mesh,
        layouts: LayoutMap | Mapping[str, Any] | None = None,
        *,
        batch: BatchLike = ...,
        inputs: Any = None,
        targets: Any = None,
        activations: Mapping[str, Any] | None = None,
        zero: int = 0,
        unmatched: Unmatched = "warn",
        strict: bool = True,
        accumulate: int = 1,
        remat: str = "none",
        sums: Sums = None,
        local: Local | None = None,
        rules: RulesLike | None = None,
        pipeline: Pipeline | Branches | None = None,
    ) -> None:
        placement = Placement.of(
            mesh, layouts, batch, inputs, targets, activations, zero, unmatched, strict, rules
        )
        refuse_idle_rules(placement)
        how = StepOptions(accumulate, remat, sums, local, pipeline)
        if pipeline is not None and pipeline.axis not in mesh:
            what = "stages" if isinstance(pipeline, Pipeline) else "branches"
            raise PipelineError(no_axis(placement, pipeline.axis, what))
        self._take(placement, how)

    @classmethod
    def from_placement(cls, placement: Placement, how: StepOptions | None = None) -> Sharded:
        """The strategy that acts by this placement and computes its steps so."""
        strategy = cls.__new__(cls)
        strategy._take(placement, how or PLAIN)
        return strategy

    @classmethod
    def from_keras(
        cls, theirs: keras.distribution.ModelParallel | keras.distribution.DataParallel
    ) -> Sharded:
        """The strategy that lays a model out as Keras' own ``ModelParallel`` or ``DataParallel``.

        The layouts are those of its layout map, on a mesh of the same axes without devices.

        >>> import keras, meshwright as mw
        >>> theirs = keras.distribution.DataParallel()
        >>> mw.Sharded.from_keras(theirs).mesh.axes
        (('batch', 8),)
        """
        mesh = theirs.device_mesh
        axes = dict(zip(mesh.axis_names, map(int, mesh.shape), strict=True))
        layouts = _compat.keras_layout_map(theirs)
        return cls(Mesh(axes), layouts, batch=theirs.batch_dim_name, unmatched="replicate")

    def on(self, mesh: Mesh, rules: RulesLike | None = None) -> Sharded:
        """The same on another mesh, and with other rules for named dims, where they are given."""
        placement = self.placement.on(mesh, rules)
        refuse_idle_rules(placement)
        return Sharded.from_placement(placement, self.how)

    def serving(self, mesh: Mesh | None = None) -> Sharded:
        """The same layouts on another mesh, or on its own, for :class:`~meshwright.Server`.

        ZeRO and accumulation are of training and left out; an axis that the mesh does not have
        splits nothing there, and a pipeline over such an axis is left out.
        ``mw.Server(model, strategy.serving(mesh))`` hands the weights of training over in memory,
        piece by piece.

        >>> import meshwright as mw
        >>> strategy = mw.Sharded(mw.create_mesh({"batch": 8}), {"kernel": [None, "batch"]}, zero=2)
        >>> print(strategy.serving(mw.Mesh({"model": 4})).placement.layouts[0].layout)
        [unsharded, unsharded]
        >>> strategy.serving().placement.zero
        0
        """
        mesh, pipeline = self.mesh if mesh is None else mesh, self.how.pipeline
        if pipeline is not None and pipeline.axis not in mesh:
            pipeline = None
        return Sharded.from_placement(self.placement.serving(mesh), StepOptions(pipeline=pipeline))

    @property
    def unstaged(self) -> Sharded:
        """The same without a pipeline; it predicts and evaluates for this one."""
        if self.how.pipeline is None:
            return self
        plain = Sharded.from_placement(self.placement, replace(self.how, pipeline=None))
        plain._models, plain._inspected = self._models, self._inspected
        plain._of_stages = self._of_stages
        return plain

    def __eq__(self, other: object) -> bool:
        mine = self.placement, self.how
        return isinstance(other, Sharded) and mine == (other.placement, other.how)

    def __hash__(self) -> int:
        return hash((self.placement, self.how))

    def __reduce__(self) -> Any:
        """Copies and pickles decide alike; the models that a strategy has seen stay behind."""
        fresh = vars(type(self).from_placement(self.placement, self.how))
        added = {name: value for name, value in vars(self).items() if name not in fresh}
        return _revived, (type(self), self.placement, self.how), added

    def __repr__(self) -> str:
        named = "" if (rules := self.placement.rules) is None else f", rules={str(rules)!r}"
        return f"Sharded({self.mesh}, {len(self.placement.layouts)} layouts{named})"

    def explain(self, model: keras.Model, batch: Batch | None = None) -> Explanation:
        """Every variable of a built model: its layout, where that comes from, bytes per device.

        Of a pipeline, every variable as a step holds it, the stages and the tick table; ``batch``
        is then needed while nothing was trained. ``print`` it for a table. Raises
        :class:`~meshwright.ModelError` for a model that is not built, and
        :class:`~meshwright.BatchError` for a batch that does not divide into micro-batches.
        """
        check_model(model)
        if self.how.pipeline is not None:
            steps = self._steps(model, batch)
            if batch is not None and steps.staged is not None:
                steps.staged.check_rows(batches.abstract(batch))
            return steps.explained
        if not (variables := tuple(placed for _, placed in self._placed(model))):
            raise ModelError(f"model {model.name!r} has no variables to explain: build it first.")
        return Explanation(self.mesh, variables)

    # Training: our own loop over pure functions

    @outside_of_context()
    def fit(
        self,
        model: keras.Model,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        checkpoint: str | Path | None = None,
        save_every: SaveEvery = None,
        peer_copies: int = 0,
        keep: int | None = 3,
        resume: Resume = "auto",
        nan_guard: NanGuard = "warn",
    ) -> keras.callbacks.History:
        """Train a compiled model; takes what ``keras.Model.fit`` takes and returns its History.

        ``batch_size`` is that of the whole mesh. A batch that does not divide over the batch axes
        is padded where its rows leave each other alone, and else computed by every device in full:
        the numbers are those of the true rows either way. Warns once if it is not the last one.

        ``checkpoint`` is a directory that the run is saved to, after each epoch or every
        ``save_every`` steps (``"auto"``: as often as loses least time, by the measured cost of a
        save); the newest ``keep`` checkpoints are kept (``None``: all). ``resume``
        is ``"auto"`` (go on from the newest one, if there is one), ``True`` (there must be one) or
        ``False`` (there must be none). With ``peer_copies`` a group that ``meshwright launch``
        starts again resumes the step that it had reached: the launchers' memory holds the newest
        state, and each piece of it lies on ``peer_copies`` hosts besides its own. ``nan_guard`` is
        ``"warn"``, ``"raise"`` (stop at the step that is not finite, with the values before it) or
        ``"off"``.

        Raises :class:`~meshwright.ModelError` that lists all invalid arguments,
        :class:`~meshwright.DataError` and :class:`~meshwright.BatchError` for data that cannot be
        trained on, :class:`~meshwright.CheckpointError` for a directory that the run cannot resume
        from so, and :class:`~meshwright.NotFiniteError` where ``nan_guard="raise"``.
        """
        self._need_devices("fit(...)")
        return fitting.fit(
            self,
            model,
            Data(x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight),
            Validation(
                validation_data,
                validation_split,
                validation_batch_size,
                validation_steps,
                validation_freq,
            ),
            Schedule(epochs, initial_epoch, callbacks, verbose),
            lambda: Saver.of(checkpoint, save_every, keep, resume, repr(self), peer_copies),
            nan_guard,
        )

    @outside_of_context()
    def evaluate(
        self,
        model: keras.Model,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Loss and metrics over all rows, as ``keras.Model.evaluate``.

        A number, a list in the order of ``model.metrics_names``, or with ``return_dict`` a dict.
        """
        self._need_devices("evaluate(...)")
        data = Data(x, y, sample_weight, batch_size, steps)
        logs = fitting.evaluate(self, model, data, verbose, callbacks)
        return logs if return_dict else _compat.in_metric_order(model, logs)

    @outside_of_context()
    def predict(
        self,
        model: keras.Model,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Outputs for exactly the rows of ``x``, as ``keras.Model.predict``: NumPy arrays."""
        self._need_devices("predict(...)")
        data = Data(x, batch_size=batch_size, steps=steps)
        return fitting.predict(self, model, data, verbose, callbacks)

    # Training: a loop of one's own

    def program(self, model: keras.Model, batch: Batch | None = None) -> Program:
        """The compiled model as a :class:`~meshwright.Program`.

        ``batch`` (arrays ``(x, y)``) is needed while model, metrics or optimizer are not built.
        Whatever step its functions are called in, new values lie as the old ones do.
        """
        return self._steps(model, batch).custom_program

    def train_step(self, model: keras.Model, batch: Batch | None = None) -> Step:
        """The pure function ``(state, batch) -> (state, logs)``, to be called under ``jax.jit``.

        >>> import jax, keras, numpy as np, meshwright as mw
        >>> strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> batch = (np.ones([16, 4], "float32"), np.ones([16, 1], "float32"))
        >>> step = jax.jit(strategy.train_step(model, batch))
        >>> state = strategy.state(model)
        >>> for _ in range(3):
        ...     state, logs = step(state, strategy.put(batch))
        >>> strategy.load_state(model, state)
        """
        return self._steps(model, batch).custom_train_step

    def _steps(self, model: keras.Model, batch: Batch | None = None) -> Assembly:
        variables = self.prepare(model, _giving(batch))
        fitting.check_compiled(model)
        example = None if batch is None else batches.abstract(batch)
        return functions_of(self, model, variables, example=example).steps

    def state(self, model: keras.Model, batch: Batch | None = None) -> TrainState:
        """The values of a compiled model as a pytree by path.

        The arrays are the variables' own: after a step that donates them, give the newest state
        back with :meth:`load_state`. Weights whose layouts have ``pad=True`` are padded.
        """
        variables = self.prepare(model, _giving(batch))
        if self.how.pipeline is not None:
            variables = variables.stored_by(self._steps(model, batch).outside)
        return read_state(variables)

    def load_state(self, model: keras.Model, state: TrainState) -> None:
        """Write a state back into the model, its optimizer and its metrics.

        Raises :class:`~meshwright.ModelError` if it is not a state of this model.
        """
        variables = self.prepare(model)
        if self.how.pipeline is not None:
            state = self._steps(model).outside.restore(state)
        check_state(variables, state)
        write_state(variables, state)

    def save(
        self,
        model: keras.Model,
        directory: str | Path,
        step: int = 0,
        *,
        parts: Sequence[str] = PARTS,
        dtype: str | None = None,
    ) -> None:
        """Write a model and its optimizer, if it has one, as one more checkpoint.

        ``parts=("params", "state")`` writes the weights alone. ``dtype="bfloat16"`` rounds
        floating-point weights to that type, in half the bytes; :meth:`restore` puts them into
        models of any floating-point type. Raises :class:`~meshwright.CheckpointError` for another
        part or type.
        """
        self._need_devices("save(...)")
        saving.save_model(self, model, directory, step, parts, dtype)

    def restore(
        self,
        model: keras.Model,
        directory: str | Path,
        *,
        step: int | None = None,
        parts: Sequence[str] = ("params", "state", "slots"),
    ) -> CheckpointInfo:
        """Put a checkpoint into a model, laid out by this strategy, and say what it was.

        The newest of ``directory``, or that of ``step``; ``directory`` may also be one checkpoint.
        Whatever mesh it was written on, every process reads the pieces that its devices hold.
        ``parts=("params", "state")`` takes the weights alone and leaves the optimizer's slots.
        Raises :class:`~meshwright.CheckpointError` that lists every array which differs.
        """
        self._need_devices("restore(...)")
        return saving.restore_model(self, model, directory, step, parts)

    def put(self, batch: Batch, model: keras.Model | None = None) -> Batch:
        """A batch ``(x, y, sample_weight)`` of host arrays, laid out on the mesh.

        ``model`` is only needed where ``inputs=`` names inputs that are given as a list. Raises
        :class:`~meshwright.BatchError` if it does not divide.
        """
        self._need_devices("put(...)")
        return batches.putter(self.placement, model)(batch)

    @outside_of_context()
    def prepare(
        self,
        model: keras.Model,
        first_batch: Callable[[], Batch] | None = None,
        forward_only: bool = False,
    ) -> KerasVariables:
        """Build what is not built yet and lay out what lies elsewhere; the model's variables.

        ``first_batch`` is only called if a batch is needed to know the shapes. Raises
        :class:`~meshwright.ModelError` where it is needed and there is none.
        """
        check_model(model)
        training = model.compiled and not forward_only
        is_built = _compat.has_its_variables if first_batch is None else _compat.is_built
        lacks_batch = _compat.needs_batch_to_build(model) if training else not is_built(model)
        if lacks_batch or (training and _compat.has_unbuilt_optimizer(model)):
            if lacks_batch and first_batch is None:
                raise ModelError(
                    f"model {model.name!r} (or one of its metrics) is not built yet: pass a batch "
                    "(x, y) of arrays, or build it first."
                )
            self._build(model, first_batch() if lacks_batch and first_batch else None, training)
        self._inspect(model)
        if training and isinstance(self.how.local, DiLoCo):
            with self.scope():
                _compat.add_slots(model, OUTER)
        if training and self.how.compress is not None:
            self._keep_unsent(model, self.how.compress)
        variables = KerasVariables.of(model).under(self.placement)
        placed = functions_of(self.unstaged, model, variables).steps.placed
        # Another strategy may have laid it out, on this mesh or elsewhere.
        if not all(map(self._lies, variables.all, placed)):
            self.place(model)
        return variables

    def _keep_unsent(self, model: keras.Model, how: Compress) -> None:
        """Give the optimizer a variable for the gradients that devices have not sent yet."""
        variables = KerasVariables.of(model)
        dims = {p: variables.infos[id(v)].dims for p, v in variables.params.items()}
        with self.scope():
            weight = _compat.add_rows(model, UNSENT, lambda: first_rows(dims, self.placement, how))
        set_weight_layout(weight, rows_layout(self.placement))
        if weight.shape[0] != (count := self.placement.batch_shards):
            raise ModelError(
                f"the optimizer of model {model.name!r} keeps unsent gradients of "
                f"{weight.shape[0]} devices, and this strategy has {count}. Compile the model "
                "again, or rebuild it and resume from a checkpoint."
            )

    def _build(self, model: keras.Model, batch: Batch | None, training: bool) -> None:
        parts = batch if batch is None or isinstance(batch, tuple) else (batch,)
        shapes = batches.abstract(parts)
        self._models.add(model)
        with self.scope():
            if training:
                _compat.build_for(model, shapes)
            elif shapes is not None:
                _compat.build_forward(model, shapes[0])

    @outside_of_context()
    def abstract_step(self, model: keras.Model, batch: Batch) -> AbstractStep:
        """The training step, its state and its batch as shapes on the mesh without devices.

        For planning: no value is needed of a model that was built in
        :func:`~meshwright.abstract`, nor of the batch.
        """
        check_batch(model, batch)
        here = self
        if not self.mesh.is_abstract:
            here = self.on(self.mesh.abstract())
            if not any(map(is_abstract, model.variables)):
                self.prepare(model, _giving(batch))
                here._inspected.add(model)
        return abstract_step(here, model, batch)


def layout_map_scope(layout_map: LayoutMap) -> contextlib.AbstractContextManager[Any]:
    """Lay out what is built inside by a map with a mesh (TensorFlow Keras' name for it).

    The same as ``Sharded(mesh, layout_map, batch=<first axis>).scope()``. Raises
    :class:`~meshwright.LayoutError` if the map was made without a mesh.

    >>> import keras, meshwright as mw
    >>> layout_map = mw.LayoutMap(mw.create_mesh({"batch": 4, "model": 2}))
    >>> layout_map["hidden.*kernel"] = [None, "model"]
    >>> with layout_map_scope(layout_map):
    ...     model = keras.Sequential([keras.Input([8]), keras.layers.Dense(6, name="hidden")])
    >>> print(model.layers[0].kernel.layout.unbound())
    [unsharded, model]
    """
    if layout_map.mesh is None:
        raise LayoutError(
            "the layout map has no mesh. Use LayoutMap(mesh), or Sharded(mesh, layout_map).scope()."
        )
    mesh = layout_map.mesh
    return Sharded(mesh, layout_map, batch=mesh.axis_names[0]).scope()


def _revived(cls: type[Sharded], placement: Placement, how: StepOptions) -> Sharded:
    return cls.from_placement(placement, how)


def _giving(batch: Batch | None) -> Callable[[], Batch] | None:
    return None if batch is None else lambda: batch
