"""A placement as a ``keras.distribution.Distribution``: where Keras' variables and arrays lie."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import keras

from ... import _compat
from ...data import put
from ...errors import ModelError, TopologyError
from ...layouts.layout import Layout
from ...layouts.mesh import Mesh
from ...layouts.params import ParamInfo, Placed
from ...layouts.placement import Placement
from ...layouts.strict import inspect, refuse_idle_layouts, unnamed
from ...step.options import StepOptions
from ...step.summing import GradientSum, refuse_split
from . import batches
from .abstract import AbstractRoom, adopt
from .hooks import Hooks, OutputOf, layout_of, parameter_of
from .options import check_model
from .paths import block_paths, layer_spellings, model_infos, other_info, slot_info
from .pending import WaitingRoom, is_pending, settle, waiting_room
from .program import KerasVariables

_compat.add_layout_property(layout_of)
_Distribution: Any = _compat.keras_distribution_class()


class _Laid(keras.distribution.TensorLayout):
    """A layout as Keras reads it, and as ``keras.distribution.distribute_tensor`` takes it."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout.partition_spec)  # without the mesh: Keras' has one axis for a dim
        self._sharding = layout.sharding

    @property
    def backend_layout(self) -> Any:
        return self._sharding


class LaidOut(_Distribution):
    """Lays out what is built in its scope, and answers what Keras asks of a Distribution."""

    placement: Placement
    how: StepOptions

    def _take(self, placement: Placement, how: StepOptions) -> None:
        if isinstance(how.sums, GradientSum):
            how.sums.check(placement)
        if how.local is not None:
            refuse_split(placement, f"local={how.local!r}")
        self.placement = placement
        self.how = how
        self._models: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._inspected: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._of_stages = how.stage_axes  # which no layout takes
        self._layer_spellings: dict[str, tuple[str, ...]] = {}  # of the model now being traced
        self._blocks: frozenset[str] = frozenset()  # of the same, Keras' paths
        if not placement.mesh.is_abstract:  # Keras' constructor asks JAX for its processes
            batch = placement.batch
            super().__init__(
                _keras_mesh(placement.mesh),
                batch if isinstance(batch, str) else None,
                auto_shard_dataset=False,
            )

    @property
    def mesh(self) -> Mesh:
        """The mesh that everything is laid out on."""
        return self.placement.mesh

    # Building models

    @contextlib.contextmanager
    def scope(self) -> Iterator[Self]:
        """Build and compile models inside: their variables are made directly in their layouts.

        They are checked together when the block ends (or when a value is first needed): raises
        one :class:`~meshwright.PlacementError` that lists every variable whose layout does not fit,
        before anything is allocated. Inside :func:`~meshwright.abstract` nothing is made.
        """
        if isinstance(waiting_room(), AbstractRoom):
            with super().scope():
                yield self
            return
        self._need_devices("scope()")
        _compat.install_keras_hooks(Hooks())
        room = WaitingRoom(self._place_new, self._models)
        with super().scope(), room.open():
            yield self
            self._refuse_mistyped(room.models)

    def place(self, model: keras.Model) -> None:
        """Lay out a model that was built or loaded before, with its optimizer and metrics.

        Raises :class:`~meshwright.ModelError` if it is not built, and
        :class:`~meshwright.PlacementError` for patterns that match nothing of it.
        """
        self._need_devices("place(model)")
        check_model(model)
        if not model.built:
            raise ModelError(
                f"model {model.name!r} is not built, so it has no variables to lay out. Call it "
                "on a batch first, or build it inside strategy.scope()."
            )
        self._inspect(model)
        self.place_so_far(model)

    def place_so_far(self, model: keras.Model) -> None:
        """The same for the variables that a model has now; of one that is not built, a few."""
        everywhere = self._placed(model)
        room = WaitingRoom(self._place_new, self._models)
        room.note_model(model)
        adopt([variable for variable, _ in everywhere], room)
        for variable, placed in everywhere:
            settle(variable)
            value, sharding = _compat.raw_value(variable), placed.unpadded.sharding
            if not self._lies(variable, placed):
                value = put(value, sharding)
            _compat.set_variable(variable, value, sharding)

    # The questions that Keras asks a Distribution

    def get_data_layout(self, data_shape: Sequence[int]) -> Any:
        """Keras' question: the layout of a batch, of which it knows only the shape."""
        batches.refuse_named_inputs(self.placement)
        return _Laid(batches.by_shape(self.placement, tuple(data_shape)))

    def get_variable_layout(self, variable: Any) -> Any:
        """Keras' question: the sharding of a variable."""
        noted = _compat.variable_layout(variable)
        return noted if noted is not None else self._place_new([variable], [])[0].unpadded.sharding

    def get_tensor_layout(self, path: str) -> Any:
        """Keras' question: the layout of the output of a layer, or ``None`` to leave it."""
        layer = path.removesuffix("/output")
        spellings = self._layer_spellings.get(layer, (layer,))
        layout = self.placement.activation_layout(spellings)
        is_block = self.how.by_block and layer in self._blocks
        return OutputOf(layer, layout, is_block) if layout or is_block else None

    def distribute_dataset(self, dataset: Any) -> Any:
        """Keras' question: every process reads the same whole batches, so nothing changes."""
        return dataset

    @property
    def num_model_replicas(self) -> int:
        """Keras' question: into how many pieces the batch is cut."""
        return self.placement.batch_shards

    def put_native_batch(self, data: Any) -> Any:
        """One batch, whole on every device if it does not divide."""
        batches.refuse_named_inputs(self.placement)
        return batches.putter(self.placement)(data, last=True)

    def put_native_batches(self, data: Iterable[Any]) -> Iterator[Any]:
        """The batches of Keras' own ``fit``, laid out one after the other."""
        batches.refuse_named_inputs(self.placement)
        return batches.putter(self.placement).all_of(data)

    # How it is done

    @contextlib.contextmanager
    def in_force(self, model: keras.Model) -> Iterator[None]:
        """Layers see this strategy, so activations are laid out, and uneven ones kept whole."""
        _compat.install_keras_hooks(Hooks())
        if self.placement.activations:
            self._layer_spellings = layer_spellings(model)
        if self.how.by_block:
            self._blocks = block_paths(model)
        alone = self.placement.mesh.size == 1
        cut = contextlib.nullcontext() if alone else _compat.keras_splits_attention()
        with super().scope(), cut:
            yield

    def _place_new(self, variables: list[Any], models: list[keras.Model]) -> list[Placed]:
        """Where variables lie of which only the models around them are known."""
        infos: dict[int, ParamInfo] = {}
        for model in _outermost(models):
            infos = {**model_infos(model), **infos}
        for variable in variables:
            _add_lone(variable, infos)
        return self._place_known(variables, infos)

    def _place_known(self, variables: list[Any], infos: dict[int, ParamInfo]) -> list[Placed]:
        """Where variables lie; the parameters of slots are asked for too, as slots follow them."""
        owners = [owner for v in variables if (owner := parameter_of(v)) is not None]
        wider = [*variables, *owners]
        return self.placement.place([infos[id(v)] for v in wider])[: len(variables)]

    def _inspect(self, model: keras.Model) -> None:
        """Check once that every pattern matches a variable of this model, or another one here."""
        if model in self._inspected:
            return
        infos = self._all_infos([*self._models, model])
        inspect(self.placement, infos, f"model {model.name!r}", self._of_stages)
        self._inspected.add(model)

    def _refuse_mistyped(self, models: list[keras.Model]) -> None:
        """Refuse a pattern that matches nothing while a large parameter has no layout."""
        infos = self._all_infos(models)
        if infos and self.placement.strict and unnamed(self.placement, infos):
            refuse_idle_layouts(self.placement, infos, "what was built in this scope")

    def _all_infos(self, models: Iterable[keras.Model]) -> list[ParamInfo]:
        built = list(dict.fromkeys(model for model in models if model.built))
        infos: dict[int, ParamInfo] = {}
        for model in _outermost(built):
            infos = {**model_infos(model), **infos}
        return list(infos.values())

    def _placed(self, model: keras.Model) -> list[tuple[Any, Placed]]:
        """Every variable of a model, its optimizer and its metrics, with where it lies."""
        variables = KerasVariables.of(model)
        placed = self._place_known(variables.all, variables.infos)
        return list(zip(variables.all, placed, strict=True))

    def _lies(self, variable: Any, placed: Placed) -> bool:
        """Whether a variable lies here as it is to be placed; one that merely lies on the only
        device of the mesh does not, for a step would be compiled for it once more."""
        value = None if is_pending(variable) else _compat.raw_value(variable)
        if value is None or getattr(value.sharding, "mesh", None) != self.mesh.jax_mesh:
            return False
        return value.sharding.is_equivalent_to(placed.unpadded.sharding, value.ndim)

    def _need_devices(self, what: str) -> None:
        if self.mesh.is_abstract:
            raise TopologyError(
                f"{what} needs devices, and the mesh ({self.mesh}) is abstract. Use "
                f"strategy.on(mw.create_mesh({dict(self.mesh.axes)!r})).{what}."
            )


def _keras_mesh(mesh: Mesh) -> Any:
    """The mesh as Keras' ``DeviceMesh``, for code that reads ``distribution.device_mesh``."""
    names = [f"{device.platform}:{device.id}" for device in mesh.bound_devices()]
    return keras.distribution.DeviceMesh(mesh.shape, list(mesh.axis_names), names)


def _outermost(models: list[keras.Model]) -> list[keras.Model]:
    """The models that are not layers of another one."""
    layers = [layer for model in models for layer in _compat.layers_inside(model)]
    inside = {id(layer) for layer in layers}
    inside |= {id(_compat.functional_of(layer)) for layer in (*models, *layers)}
    return [model for model in models if id(model) not in inside]


def _add_lone(variable: Any, infos: dict[int, ParamInfo]) -> None:
    """Note what is known of a variable that no model has: an optimizer's, a metric's, a layer's."""
    parameter = parameter_of(variable)
    if parameter is not None:
        _add_lone(parameter, infos)
        infos[id(variable)] = slot_info(variable, parameter, infos[id(parameter)])
    elif id(variable) not in infos:
        role = "parameter" if variable.trainable else "metric"
        infos[id(variable)] = other_info(variable, role)
