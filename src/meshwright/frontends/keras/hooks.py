"""Our answers where Keras asks; see ``_compat.install_keras_hooks`` for why it must be asked so."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer

from ... import _compat
from ...arrays import relayout
from ...arrays.tracing import is_tracing
from ...errors import AgreementError
from ...launch.join import agree
from ...layouts.layout import UNSHARDED, Layout
from ...layouts.params import Placed
from ...layouts.placement import Placement
from ...scoped import scoped
from ...step.remat import block_output
from ...step.spatial import guard, is_safe
from .batches import putter
from .memory import separate, variables_of
from .paths import model_infos
from .pending import is_pending, waiting_room


class OutputOf:
    """What to do with one layer's output; Keras hands it back to us together with the output."""

    def __init__(self, path: str, layout: Layout | None, is_block: bool = False) -> None:
        self.path = path
        self.layout = layout
        self.is_block = is_block

    def take(self, tensor: Any) -> Any:
        """The output in its layout. Raises :class:`LayoutError` if the layout does not fit."""
        if self.layout is not None:
            tensor = self._lay_out(tensor, self.layout)
        return block_output(tensor) if self.is_block else tensor

    def _lay_out(self, tensor: Any, layout: Layout) -> Any:
        if tensor.ndim == layout.rank and layout.rank and tensor.shape[0] % layout.num_shards(0):
            # A smaller last batch is computed by every device in full.
            layout = Layout([UNSHARDED, *layout.specs[1:]], layout.mesh)
        layout.check(tensor.shape, f"the output of layer {self.path!r}")
        return relayout(tensor, layout)


class Hooks:
    """Acts only inside a ``Sharded`` scope; everything else is left to Keras."""

    def defer(self, variable: Any, initializer: Any) -> bool:
        room = waiting_room()
        if room is None:
            return False
        room.defer(variable, initializer)
        return True

    def new_model(self, model: Any) -> None:
        room = waiting_room()
        if room is not None:
            room.note_model(model)

    def new_slot(self, slot: Any, parameter: Any) -> None:
        slot._meshwright_parameter = parameter

    def put_batches(self, distribution: Any, batches: Iterable[Any]) -> Iterator[Any] | None:
        if not _is_ours(distribution):
            return None
        return distribution.put_native_batches(batches)

    def put_batch(self, data: Any) -> Any | None:
        distribution: Any = keras.distribution.distribution()
        return distribution.put_native_batch(data) if _is_ours(distribution) else None

    def lay_out_activation(self, tensor: Any, layout: Any) -> Any:
        if isinstance(layout, OutputOf):
            return layout.take(tensor)
        if _is_alone(layout) and isinstance(tensor, jax.Array) and not isinstance(tensor, Tracer):
            # Keras leaves what lies on the device already without the mesh, and warns of that.
            return jax.device_put(tensor, layout)
        return NotImplemented

    def stateless_call(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        distribution: Any = keras.distribution.distribution()
        if _is_ours(distribution):
            placement = distribution.placement
        elif distribution is None and _in_keras.get():  # of a laid-out model, outside the scope
            placement = None
        else:
            return original(model, *args, **kwargs)
        if _unguarded.get() or not isinstance(model, keras.Model):
            return original(model, *args, **kwargs)
        return _guarded_call(original, placement, model, *args, **kwargs)

    def loss_and_updates(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        outside = keras.distribution.distribution() is None and _in_keras.get()
        if not outside or _unguarded.get() or len(args) > _ARRAYS_OF_LOSS:
            return original(model, *args, **kwargs)
        return _guarded_loss(original, model, *args, **kwargs)

    def on_host(self, variable: Any) -> Any | None:
        value = variable.value
        if isinstance(value, Tracer) or value.is_fully_addressable:
            return None
        mesh = Layout.from_sharding(value.sharding, value.ndim).bound_mesh()
        whole = relayout(value, Layout.replicated(mesh, value.ndim))
        return np.asarray(whole.addressable_data(0))

    def refuse_other_value(self, variable: Any, value: Any) -> None:
        field, array = f"the value of {variable.path}", np.asarray(value)
        agree(f"assigning {field.removeprefix('the ')}", lambda: {field: _value_text(array)})
        if np.isnan(array).any():
            raise AgreementError(
                f"{field} has NaN, which does not compare as equal between the processes. Assign "
                "finite numbers."
            )
        raise AgreementError(
            f"{field} is another in each process, and here it is {_value_text(array)}. All of "
            "them must assign the same one."
        )

    def holds_value(self, variable: Any) -> bool:
        return not is_pending(variable)

    @contextlib.contextmanager
    def keep_weights(self, model: Any) -> Iterator[None]:
        separate(model)
        with self._kept(model):
            yield
        separate(model)

    @contextlib.contextmanager
    def _kept(self, model: Any) -> Iterator[None]:
        if not _is_ours(keras.distribution.distribution()):
            yield
            return
        values = [(variable, _compat.raw_value(variable)) for variable in variables_of(model)]
        try:
            yield
        except BaseException:
            model.jax_state_sync()
            for variable, value in values:
                if _compat.raw_value(variable) is None:
                    _compat.restore_value(variable, value)
            raise

    def lay_out_model(self, model: Any) -> None:
        distribution: Any = keras.distribution.distribution()
        if not _is_ours(distribution):
            return
        here = set(distribution.mesh.bound_devices())
        if any(_lies_elsewhere(variable, here) for variable in variables_of(model)):
            (distribution.place if model.built else distribution.place_so_far)(model)

    def in_keras(self) -> contextlib.AbstractContextManager[None]:
        return scoped(_in_keras, True)


def _lies_elsewhere(variable: Any, devices: set[Any]) -> bool:
    value = _compat.raw_value(variable)
    return isinstance(value, jax.Array) and value.sharding.device_set != devices


def _value_text(array: np.ndarray) -> str:
    """A number as it is; of several their dims, type and a checksum of all of them."""
    if not array.ndim:
        return str(array)
    bits = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"{array.shape} {array.dtype} {bits:08x}"


# Right gradients where Keras itself, or a model's own step, calls the model; step/spatial.py says
# why. A model's Program is guarded as a whole, where its steps are put together.


_unguarded: ContextVar[bool] = ContextVar("unguarded", default=False)
_in_keras: ContextVar[bool] = ContextVar("in_keras", default=False)


def unguarded() -> contextlib.AbstractContextManager[None]:
    """Inside, models are called as Keras calls them: the caller guards the gradient."""
    return scoped(_unguarded, True)


def _guarded_call(
    original: Callable[..., Any],
    placement: Placement | None,
    model: keras.Model,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Keras' ``stateless_call``, with right numbers however its arguments are split.

    ``args`` are values of trainable and other variables, then the model's inputs, which are whole
    where there is no placement.
    """
    trained, others, *inputs = args
    masks_of_inputs = _compat.masks_of(inputs)
    lies = None
    if placement is not None:
        lies = _input_layouts(placement, model, tuple(inputs))
        inputs = _lying_so(inputs, lies)
    _compat.set_masks(inputs, masks_of_inputs)
    layouts = (
        _parameter_layouts(placement, model),
        _variable_layouts(model.non_trainable_variables),
        lies,
    )
    if is_safe(layouts) or (placement is None and _on_several_meshes(layouts)):
        return original(model, trained, others, *inputs, **kwargs)

    def forward(trained: Any, others: Any, inputs: Any) -> Any:
        _compat.set_masks(inputs, masks_of_inputs)
        results = original(model, trained, others, *inputs, **kwargs)
        return results, _compat.masks_of(results)

    results, masks = guard(forward, layouts)(trained, others, tuple(inputs))
    _compat.set_masks(results, masks)
    return results


_ARRAYS_OF_LOSS = 6  # values of three kinds of variables, x, y, weights; then come no arrays


def _guarded_loss(
    original: Callable[..., Any],
    model: keras.Model,
    *arrays: Any,
    training: bool = False,
    optimizer_variables: Any = None,
) -> Any:
    """Keras' ``compute_loss_and_updates``: a loss of the model's own may call its parts again."""
    layouts = _parameter_layouts(None, model), _variable_layouts(model.non_trainable_variables)
    if is_safe((*layouts, None)) or _on_several_meshes(layouts):
        return original(model, *arrays, training=training, optimizer_variables=optimizer_variables)

    every = (*arrays, optimizer_variables)
    present = {place: value for place, value in enumerate(every) if value is not None}

    def loss(present: dict[int, Any]) -> Any:
        *arrays, slots = (present.get(place) for place in range(len(every)))
        with unguarded():
            results = original(model, *arrays, training=training, optimizer_variables=slots)
        return results, _compat.masks_of(results)

    lies = {place: layouts[place] if place < len(layouts) else None for place in present}
    results, masks = guard(loss, (lies,))(present)
    _compat.set_masks(results, masks)
    return results


def _on_several_meshes(layouts: Any) -> bool:
    """Whether parts of a model were laid out by several strategies, which is left to XLA alone."""
    return len({layout.bound_mesh() for layout in jax.tree.leaves(layouts)}) > 1


def _parameter_layouts(placement: Placement | None, model: keras.Model) -> list[Layout | None]:
    """How parameters lie while they are used, which at level 3 of ZeRO is not how they are kept."""
    if placement is None or placement.zero < 3:
        return _variable_layouts(model.trainable_variables)
    infos = model_infos(model)
    used = [infos[id(variable)] for variable in model.trainable_variables]
    return [entry.unpadded for entry in placement.with_zero(0).place(used)]


def _variable_layouts(variables: list[Any]) -> list[Layout | None]:
    return [_noted(variable) for variable in variables]


def _noted(variable: Any) -> Layout | None:
    sharding = _compat.variable_layout(variable)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return Layout.from_sharding(sharding, len(variable.shape))


def _input_layouts(placement: Placement, model: keras.Model, inputs: tuple[Any, ...]) -> Any:
    """The layouts of the first input argument; Keras passes all inputs of a model in it."""
    if not inputs:
        return ()
    first = putter(placement, model).layouts(inputs[0])
    return (first, *jax.tree.map(lambda _: None, inputs[1:]))


def _lying_so(inputs: list[Any], lies: Any) -> list[Any]:
    """The inputs, which another model may have made and XLA laid out by that one's weights."""
    if not inputs or not is_tracing() or jax.sharding.get_abstract_mesh().manual_axes:
        return inputs

    def hold(layout: Layout, value: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, layout.sharding)

    return [jax.tree.map(hold, lies[0], inputs[0]), *inputs[1:]]


@contextlib.contextmanager
def lying(placed: list[tuple[Any, Placed]]) -> Iterator[None]:
    """Variables have these layouts for a while; before, perhaps others on another mesh, or none."""
    before = [_compat.variable_layout(variable) for variable, _ in placed]
    for variable, entry in placed:
        _compat.note_layout(variable, entry.unpadded.sharding)
    try:
        yield
    finally:
        for (variable, _), layout in zip(placed, before, strict=True):
            _compat.note_layout(variable, layout)


def _is_alone(layout: Any) -> bool:
    """Whether it is the layout of an array on our mesh, and that has one device."""
    is_named = isinstance(layout, jax.sharding.NamedSharding)
    return is_named and layout.mesh.size == 1 and _is_ours(keras.distribution.distribution())


def _is_ours(distribution: Any) -> bool:
    """Whether it is a ``Sharded``, which stands above this file and cannot be imported here."""
    return hasattr(distribution, "put_native_batches")


def parameter_of(slot: Any) -> Any | None:
    """The parameter that an optimizer variable belongs to, if any."""
    return getattr(slot, "_meshwright_parameter", None)


def find_parameters(slots: list[Any], parameters: list[Any]) -> None:
    """Note which parameters slots belong to that were made before anybody listened: by names.

    Keras calls the momentum of ``net/hidden/kernel`` ``net_hidden_kernel_momentum``. Layers inside
    two towers may have the same path, and so their slots the same name: these come in the order of
    their parameters.
    """
    unknown = [slot for slot in slots if parameter_of(slot) is None]
    if not unknown:
        return
    namesakes: dict[str, list[Any]] = {}
    for parameter in parameters:
        namesakes.setdefault(parameter.path.replace("/", "_") + "_", []).append(parameter)
    same_name: dict[str, list[Any]] = {}
    for slot in slots:
        same_name.setdefault(slot.name, []).append(slot)
    for slot in unknown:
        fitting = [begin for begin in namesakes if slot.name.startswith(begin)]
        if not fitting:
            continue
        owners = namesakes[max(fitting, key=len)]
        number = next(n for n, other in enumerate(same_name[slot.name]) if other is slot)
        if len(same_name[slot.name]) == len(owners) and owners[number].shape == slot.shape:
            slot._meshwright_parameter = owners[number]


def layout_of(variable: Any) -> Layout:
    """The layout that a Keras variable lies in; makes it first if it still waits."""
    value = variable.value
    return Layout.from_sharding(value.sharding, value.ndim)
