"""What can be served, brought to one form: a Keras model or file, a Program, a plain function."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from ..checkpoint import CheckpointInfo, reader, restore_state
from ..errors import ModelError, TopologyError
from ..frontends.inputs import inputs_of
from ..frontends.staged_forwards import served_pipeline
from ..layouts.mesh import Mesh, create_mesh
from ..layouts.placement import Placement
from ..planning.search.plan import Plan
from ..program import Program, TrainState
from ..stages.pipeline import Pipeline
from ..step.assemble import Assembly
from .api import TensorSpec
from .averages import as_parameters, as_slots, averages_of
from .handover import Moved, handed_over
from .tables import ModelTables, OnServers, Rows, TableInputs, is_parameter_server
from .turns import turn_of_several

if TYPE_CHECKING:
    from ..stages.forward_line import Paths
    from .options import Precision
    from .stage_cut import Stages

Names = tuple[Mapping[str, str], Mapping[str, str]]  # path -> name in checkpoints: params, state


@dataclass(frozen=True, eq=False)
class Source:
    """A forward pass, where its arrays lie, and how to get values for them.

    ``like`` has an :class:`~meshwright.frontends.inputs.Input` per array that goes in. ``names``
    are those of parameters and state in checkpoints. ``values`` gives arrays in memory, in their
    own dims, or is ``None`` where there are only checkpoints. ``saved_dtypes`` are the types of the
    model itself by path, where parameters are served in another one. ``origins`` says of each path
    which ones of ``floats`` it is made of, where that is not the same path.
    """

    name: str
    steps: Assembly
    like: Any
    outputs: tuple[str, ...] = ()
    names: Names | None = None
    values: Callable[[TrainState], TrainState] | None = None  # of these shapes, or more
    given: Callable[[Any, TrainState], TrainState] | None = None  # the same of params from outside
    is_untrained: bool = False  # its values in memory are those that training begins with
    is_keras: bool = False
    saved_dtypes: Mapping[str, str] = field(default_factory=dict)
    floats: Source | None = None  # what ``convert`` makes the values of, where these are others
    convert: Callable[[TrainState], TrainState] | None = None
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # paths in ``floats``
    make: Callable[[], Any] | None = None  # makes the Keras model once more, as shapes only
    lasting: Any = None
    tables: TableInputs | None = None  # of a model with tables on parameter servers,
    live: OnServers | None = None  # whose values are those of the servers while it trains
    stages: Stages | None = None  # that it is cut into; ``steps`` are those of the first one
    only: Paths | None = None  # the weights that a stage reads: it has no others

    @functools.cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The arrays that clients send, in order."""
        leaves = jax.tree.leaves(self.like)
        specs = tuple(TensorSpec(leaf.name, leaf.dtype, leaf.shape) for leaf in leaves)
        return specs if self.tables is None else self.tables.specs(specs)

    def batch(self, arrays: list[Any]) -> Any:
        """The batch that the forward pass takes."""
        structure = jax.tree.structure(self.like)
        count = structure.num_leaves
        tree = jax.tree.unflatten(structure, arrays[:count])
        if self.tables is not None:
            return tree, self.tables.nested(arrays[count:])
        return (tree,) if self.is_keras else tree

    def check(self, arrays: list[Any]) -> None:
        """Raise :class:`~meshwright.RequestError` for values that the model cannot take."""
        if self.tables is not None:
            self.tables.check(self.inputs, arrays)

    def filled(self, arrays: list[Any], rows: Rows | None) -> list[Any]:
        """The arrays of a batch with what they look up in tables."""
        if self.tables is None or rows is None:
            return arrays
        added = self.tables.added(rows, arrays)
        return [a.astype(jax.dtypes.canonicalize_dtype(a.dtype)) for a in arrays] + added

    @property
    def mesh(self) -> Mesh:
        return self.steps.placement.mesh

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh of all stages."""
        return self.mesh if self.stages is None else self.stages.mesh

    def of_stage(self, weights: Paths) -> Source:
        """The same of a stage, which reads these weights."""
        floats = self.floats
        if floats is not None:
            origins = (self.origins.get(path, (path,)) for path in weights)
            floats = floats.of_stage(frozenset(itertools.chain.from_iterable(origins)))
        return replace(self, only=weights, floats=floats)

    # Weights. Whatever they come from, each device gets its piece and nothing else.

    def in_memory(self, params: Any = None) -> tuple[TrainState, Moved]:
        """The values of the model, or ``params`` in their place, where serving wants them, in
        memory of their own."""
        if self.stages is not None:
            pairs = self._by_stage(lambda source: source.in_memory(params))
            moved = [pair[1] for pair in pairs if pair is not None]
            states: Any = tuple(pair and pair[0] for pair in pairs)
            return states, Moved(sum(m.nbytes for m in moved), sum(m.seconds for m in moved))
        if self.floats is not None and self.convert is not None:
            state, moved = self.floats.in_memory(params)
            return self._converted(self.convert, state), moved
        if self.tables is not None and self.live is None:
            raise ModelError(
                f"the tables {', '.join(self.tables.layers)} of model {self.name!r} are on "
                "parameter servers. Pass the checkpoints of the run, checkpoint='runs/first', or "
                "serve beside training: Server(model, strategy) with the ParameterServer."
            )
        if self.values is None:
            raise ModelError(
                f"model {self.name!r} was built as shapes only: name the checkpoints that have its "
                "values, checkpoint='runs/first'."
            )
        shapes = self.shapes
        given = None if params is None else self.given
        values = self.values(shapes) if given is None else given(params, shapes)
        state, moved = handed_over(values, shapes)
        return self._used(state), moved

    def read(self, info: CheckpointInfo) -> Any:
        """The arrays of a checkpoint, each device its pieces; for :meth:`finished`.

        Each process reads for itself, and no program runs on the devices. Raises
        :class:`~meshwright.CheckpointError`.
        """
        if self.stages is not None:
            return self._by_stage(lambda source: source.read(info))
        if self.floats is not None:
            return self.floats.read(info)
        names = {path: name for part in self.names or () for path, name in part.items()}
        saved = {array.key: array.dtype for array in info.arrays}
        averages = averages_of(info) if self.is_keras else {}
        whole = replace(self, only=None)
        part = {i.path: p for p, i in whole._infos()}

        def name_and_dtype(each: Any) -> tuple[str, Any]:
            path: str = each.path
            name = names.get(path, path)
            dtype = self.saved_dtypes.get(each.path, each.dtype)
            rounded = saved.get(f"{part[each.path]}/{name}")
            is_rounded = rounded is not None and rounded == info.dtype and name not in averages
            return name, rounded if is_rounded else dtype

        own, all_of_it = (source._shapes(name_and_dtype) for source in (self, whole))
        restored = restore_state(info, as_slots(own, averages), reader(), whole=all_of_it)
        restored = as_parameters(restored, averages)
        paths = [{names.get(i.path, i.path): i.path for i in infos} for infos in self._parts()]
        params, state = ({paths[n][k]: v for k, v in restored[n].items()} for n in (0, 1))
        return TrainState(params, state, {}, {})

    def finished(self, state: Any) -> Any:
        """What :meth:`read` gave, as the forward pass takes it. All processes do so together."""
        if self.stages is not None:
            pairs = zip(self.stages.all, state, strict=True)
            return tuple(
                stage.source.finished(own) if stage.is_here else None for stage, own in pairs
            )
        if self.floats is not None and self.convert is not None:
            return self._converted(self.convert, self.floats.finished(state))
        return self._used(state)

    def saved_rows(self, info: CheckpointInfo) -> Rows | None:
        """The tables of a checkpoint. Raises :class:`~meshwright.CheckpointError`."""
        return None if self.tables is None else self.tables.saved(info)

    @property
    def shapes(self) -> TrainState:
        """Shapes of the weights in their own dims, with the shardings of serving."""
        return self._shapes(lambda info: (info.path, info.dtype))

    def _converted(
        self, convert: Callable[[TrainState], TrainState], state: TrainState
    ) -> TrainState:
        """The values that are made of these, of those that the forward pass reads."""
        with turn_of_several(self.mesh):
            made = convert(state)
        read = [{info.path for info in infos} for infos in self._parts()]
        params, others = (
            {path: value for path, value in values.items() if path in paths}
            for values, paths in zip(made[:2], read, strict=True)
        )
        return TrainState(params, others, {}, {})

    def _used(self, state: TrainState) -> TrainState:
        """As the forward pass takes it: in the type that is kept, and padded."""
        with turn_of_several(self.mesh):
            return self._kept_in_turn(state)

    def _kept_in_turn(self, state: TrainState) -> TrainState:
        dtypes = {info.path: info.dtype for _, info in self._infos()}
        different = [p for p in state.params if str(state.params[p].dtype) != dtypes[p]]
        if different:
            cast = jax.jit(
                lambda values: {p: v.astype(dtypes[p]) for p, v in values.items()},
                out_shardings={p: state.params[p].sharding for p in different},
            )
            changed = cast({p: state.params[p] for p in different})
            state = state._replace(params={**state.params, **changed})
        return jax.block_until_ready(self.steps.storing.store(state))

    def _by_stage(self, of: Callable[[Source], Any]) -> tuple[Any, ...]:
        """Something of each stage; ``None`` for those of other processes."""
        assert self.stages is not None
        return tuple(of(stage.source) if stage.is_here else None for stage in self.stages.all)

    @property
    def stored(self) -> TrainState:
        """Shapes of the weights as the forward pass takes them."""
        state = self.steps.state
        params, others = (
            {info.path: of[info.path] for info in infos}
            for of, infos in zip(state[:2], self._parts(), strict=True)
        )
        return TrainState(params, others, {}, {})

    def _parts(self) -> tuple[Any, Any]:
        program, only = self.steps.program, self.only
        if only is None:
            return program.params, program.state
        params, state = (
            tuple(info for info in infos if info.path in only)
            for infos in (program.params, program.state)
        )
        return params, state

    def _infos(self) -> list[tuple[str, Any]]:
        names = ("params", "state")
        return [(n, info) for n, infos in zip(names, self._parts(), strict=True) for info in infos]

    def _shapes(self, name_and_dtype: Callable[[Any], tuple[str, str]]) -> TrainState:
        """Shapes in their own dims, with the shardings of serving."""
        placed = {entry.info.path: entry for entry in self.steps.placed}

        def shape(info: Any, dtype: str) -> Any:
            sharding = placed[info.path].unpadded.sharding
            return jax.ShapeDtypeStruct(info.dims, jax.numpy.dtype(dtype), sharding=sharding)

        parts = []
        for infos in self._parts():
            pairs = [(info, *name_and_dtype(info)) for info in infos]
            parts.append({name: shape(info, dtype) for info, name, dtype in pairs})
        return TrainState(parts[0], parts[1], {}, {})


def source_of(
    model: Any,
    strategy: Any = None,
    *,
    build: Callable[[], Any] | None = None,
    params: Any = None,
    example: Any = None,
    name: str | None = None,
    precision: Precision | None = None,
) -> Source:
    """The source of whatever a :class:`~meshwright.Server` takes.

    ``params`` are the values of a Program or a function, and shapes will do for a function whose
    values are those of a checkpoint. Raises :class:`~meshwright.ModelError` for what cannot be
    served.
    """
    make, values, is_function = None, None, False
    if build is not None:
        model, example = _built(build, example)
        make = functools.partial(_built_again, build, model)
    if isinstance(model, str | Path):
        from ..frontends.keras.forward import load_file

        path, name = model, name or Path(model).stem
        model, values = load_file(path)
        make = functools.partial(lambda: load_file(path)[0])
        if params is not None:
            raise ModelError(f"{path} holds the values of its model: leave params= out.")
    elif isinstance(model, Program) and params is not None:
        from ..frontends.program_values import program_values

        program_values(model, params)  # raises where they do not fit
    elif params is not None:
        from ..frontends.jax import makes_parameters

        model, is_function = _forward_program(model, params), True
        params = None if makes_parameters(params) else params  # or whole on one device

    if example is None and isinstance(model, Program) and model.example is not None:
        example = inputs_of(model.example)

    def on(strategy: Any) -> Source:
        if isinstance(model, Program):
            from .program_source import source_of_program

            placement = _placement(strategy)
            source = source_of_program(model, placement, example, precision, params)
            return replace(source, is_untrained=False) if is_function else source
        return _of_keras(model, strategy, example, precision, make, values)

    _check_devices(strategy)
    pipeline = served_pipeline(strategy)
    source = on(strategy) if pipeline is None else _by_stages(strategy, pipeline, on)
    return source if name is None else replace(source, name=name)


def _check_devices(strategy: Any) -> None:
    """Raise :class:`~meshwright.TopologyError` for a mesh that is a plan of one."""
    mesh = strategy if isinstance(strategy, Mesh) else getattr(strategy, "mesh", None)
    if isinstance(mesh, Mesh) and mesh.is_abstract and not isinstance(strategy, Plan):
        raise TopologyError(
            f"serving needs devices, and the mesh ({mesh.axes_text}) is abstract. Use "
            f"mw.create_mesh({dict(mesh.axes)!r}) in place of mw.Mesh, or "
            "strategy.serving(mesh) with a mesh that has devices."
        )


def _by_stages(strategy: Any, pipeline: Pipeline, on: Callable[[Any], Source]) -> Source:
    """The source on the devices of each stage, cut there."""
    from .stage_cut import cut, meshes_of

    placement = _placement(strategy)
    sources = [on(placement.on(part)) for part in meshes_of(placement.mesh, pipeline.axis)]
    return cut(sources, placement.mesh, pipeline)


def _built(build: Callable[[], Any], example: Any) -> tuple[Any, Any]:
    """What a builder returns: a model, ``(model, batch, ...)`` or a case; built as shapes only."""
    from .. import _compat
    from ..frontends.keras.abstract import abstract

    with abstract():
        built = build()
    if not isinstance(built, tuple):
        built = (built.model, built.batch) if hasattr(built, "batch") else (built, None)
    model, batch, *_ = built
    if example is None and batch is not None:
        says_itself = not isinstance(model, Program) and _compat.input_tensors(model) is not None
        batch = batch[0] if isinstance(batch, list) else batch
        example = None if says_itself else inputs_of(batch)
    return model, example


def _built_again(build: Callable[[], Any], before: Any) -> Any:
    """One more model, also of a builder that returns the same one each time."""
    from ..frontends.keras.eight_bits import fresh_copy

    model, _ = _built(build, None)
    return fresh_copy(before)() if model is before else model


def _of_keras(
    model: Any,
    strategy: Any,
    example: Any,
    precision: Precision | None,
    make: Callable[[], Any] | None = None,
    values: Mapping[int, Any] | None = None,
) -> Source:
    """``make`` makes the model once more; ``values`` are those of a file, by variable."""
    import keras

    from ..frontends.keras.eight_bits import fresh_copy
    from ..frontends.keras.forward import forward_of, has_values

    if not isinstance(model, keras.Model):
        raise ModelError(
            "expected a Keras model, a .keras file, a Program, or a function with params=...; "
            f"received {model!r}."
        )
    trains = strategy if is_parameter_server(strategy) else None
    strategy = _sharded(None if trains else strategy)
    dtype = None if precision == "int8" else precision
    tables = ModelTables.of(model)
    if tables is not None and precision == "int8":
        raise ModelError(
            f"precision='int8' is not supported for model {model.name!r}, which has tables on "
            "parameter servers. Use precision='bfloat16'."
        )
    with tables.building() if tables else nullcontext():
        altered = tables.given_rows if tables else None
        forward = forward_of(strategy, model, example, dtype, altered)
    source = Source(
        model.name,
        forward.steps,
        forward.like,
        forward.outputs,
        (forward.names.of_parts[0], forward.names.of_parts[1]),
        (lambda _: forward.values(values)) if values is not None or has_values(model) else None,
        is_keras=True,
        saved_dtypes={} if dtype is None else forward.own_dtypes,
        make=make or fresh_copy(model),
        lasting=forward.names,
        tables=tables.inputs(forward.like) if tables else None,
    )
    if trains is not None:
        live = OnServers(trains, model, forward.variables)
        return replace(source, live=live, values=lambda _: live.values())
    return _eight_bits(source, model, strategy, example) if precision == "int8" else source


def _eight_bits(floats: Source, model: Any, strategy: Any, example: Any) -> Source:
    """The source of the same model, quantized by Keras each time that it gets values.

    Its forward pass is that of the model as shapes; the others have the same layers.
    """
    from ..frontends.keras.eight_bits import made_of, quantized, quantized_shapes
    from ..frontends.keras.forward import forward_of

    assert floats.make is not None
    make = floats.make
    forward = forward_of(strategy, quantized_shapes(model, example, make), example)
    names = forward.names.of_parts[:2]
    of_floats = {name: path for part in floats.names or () for path, name in part.items()}

    def convert(state: TrainState) -> TrainState:
        own = floats.steps.storing.restore(state)
        by_name = quantized(strategy, make, own, floats.lasting)
        params, others = (
            {path: by_name[name] for path, name in part.items() if name in by_name}
            for part in names
        )
        return forward.steps.storing.store(TrainState(params, others, {}, {}))

    return Source(
        floats.name,
        forward.steps,
        forward.like,
        forward.outputs,
        is_keras=True,
        values=floats.values,
        floats=floats,
        convert=convert,
        origins={
            path: tuple(of_floats[origin] for origin in made_of(name) if origin in of_floats)
            for part in names
            for path, name in part.items()
        },
    )


def _forward_program(function: Any, params: Any) -> Program:
    """A Program that can only predict."""
    from ..frontends.jax import forward_program

    if not callable(function) or hasattr(function, "get_config"):  # a Keras model can be called
        raise ModelError(
            "params= goes with a Program, or a function (params, inputs); received "
            f"{function!r}, which has values of its own: leave params= out."
        )
    return forward_program(function, params)


def _placement(strategy: Any) -> Any:
    """The placement of a strategy, of a mesh, or of one device."""
    if strategy is None:
        return Placement.of(Mesh({"batch": 1}, jax.local_devices()[:1]))
    if isinstance(strategy, Mesh):
        names = strategy.axis_names
        return Placement.of(strategy, batch="batch" if "batch" in names else None)
    if isinstance(strategy, Placement):
        return strategy
    if hasattr(strategy, "placement") and not callable(strategy.placement):
        return strategy.placement
    if isinstance(strategy, Plan):
        size = strategy.mesh.size  # a copy may take fewer devices than there are
        devices = jax.devices()[:size] if size < len(jax.devices()) else None
        return strategy.placement(create_mesh(dict(strategy.axes), devices))
    raise ModelError(
        f"expected a mw.Sharded, a mw.Placement, a mw.Plan or a mesh; received {strategy!r}."
    )


def _sharded(strategy: Any) -> Any:
    from ..frontends.keras.sharded import Sharded

    if isinstance(strategy, Sharded):
        return strategy
    return Sharded.from_placement(_placement(strategy))
