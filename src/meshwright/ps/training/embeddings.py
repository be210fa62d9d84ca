"""Embedding layers whose tables lie on the servers and travel by rows.

Two kinds: the Embedding layers of an unchanged model, whose call is caught while the model is
traced, and :class:`Embedding`, which never has a table of its own. Either way a worker sees only
the rows that its batch looks up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal, get_args

import keras
from keras import ops

from ... import _compat
from ...errors import ModelError
from ...frontends.keras.program import KerasVariables
from ...scoped import scoped
from .tables import Note, Table, Take, Taken

_taking: ContextVar[Take | None] = ContextVar("taking", default=None)
Combiner = Literal["sum", "mean", "sqrtn"]
COMBINERS: tuple[str, ...] = get_args(Combiner)
# What layers of one table must agree on.
_OF_TABLE = ("dim", "size", "initializer", "seed", "padding_id", "optimizer", "trainable")


def _hollow(name: str, ids: Any) -> Taken:
    """Stands for a lookup while a model is built; the layer itself knows what to give."""
    raise AssertionError((name, ids))


@keras.saving.register_keras_serializable("meshwright.ps")
class Embedding(keras.layers.Layer):
    """A lookup table that lies on the servers only; may be larger than any worker's memory.

    ``name`` is that of the table, ``dim`` the length of its rows and ``size`` their number, or
    ``"hash"``: then any whole number is a key, and its row is made when it is first trained on.
    ``initializer`` is ``"uniform"`` (from -0.05 to 0.05, as Keras) or another that servers know.
    The table keeps its rows from one fit to the next, and is spread over all servers. Layers of the
    same name in one model share it, and must describe it alike.

    ``padding_id`` is an id that stands for none: its row is 0 and is never trained. With
    ``combiner`` the rows of the ids' last dim are combined into one, by ``"sum"``, ``"mean"`` or
    ``"sqrtn"``, and a second input may weigh them. Padding does not count, and where there is
    nothing else the result is 0, as in TensorFlow's ``safe_embedding_lookup_sparse``.
    ``optimizer`` is one of Keras' for this table alone; else it is trained by the model's, or by
    ``Tables(optimizer=)`` of ``fit``. With ``trainable=False`` its rows are read and stay.

    A model with this layer trains, evaluates and predicts through :class:`ParameterServer`;
    ``strategy.export(model)`` makes a plain Keras model of it. ``model.summary()`` lists the layer
    as unbuilt, for it has no weights. Ids are declared as ``int32``; keys of 64 bits reach the
    servers as they are in the batch. Raises
    :class:`~meshwright.ModelError` when it is called outside of a strategy.

    >>> layer = Embedding("users", 8, "hash")
    >>> layer.compute_output_shape((32, 4))
    (32, 4, 8)
    >>> Embedding("bought", 8, 1000, combiner="mean", padding_id=0).compute_output_shape((32, 4))
    (32, 8)
    """

    def __init__(
        self,
        name: str,
        dim: int,
        size: int | Literal["hash"] = "hash",
        *,
        initializer: str = "uniform",
        seed: int = 0,
        combiner: Combiner | None = None,
        padding_id: int | None = None,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(name=name, **options)
        _check_options(name, dim, size, combiner, padding_id)
        self.dim, self.size = dim, size
        self.initializer, self.seed = initializer, seed
        self.combiner, self.padding_id = combiner, padding_id
        # Written down: the layer's own optimizer would be saved among the weights of the model.
        self._optimizer = MappingProxyType(serialized(optimizer)) if optimizer is not None else None

    @property
    def built(self) -> bool:
        """Whether lookups are answered now: only under a strategy.

        Elsewhere Keras tries to build the layer first, and so is refused before it has taken the
        values out of the model's variables, which it does not put back after an error.
        """
        return _taking.get() is not None

    @built.setter
    def built(self, value: bool) -> None:
        del value

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The table's own optimizer, as Keras writes it."""
        return None if self._optimizer is None else dict(self._optimizer)

    @property
    def table(self) -> Table:
        """What a step knows of the table."""
        rows = None if self.size == "hash" else int(self.size)
        return Table(
            self.name,
            rows,
            self.dim,
            "float32",
            in_model=False,
            padding_id=self.padding_id,
            trains=_trains(self),
        )

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """The rows of these ids, combined if the layer has a combiner."""
        take = _taking.get()
        if take is None:
            raise ModelError(
                f"the rows of table {self.name!r} are on parameter servers, so the model cannot "
                "run on its own. Use strategy.fit, strategy.evaluate or strategy.predict, or make "
                "a plain Keras model of it: strategy.export(model)."
            )
        self._check_inputs(inputs, weights)
        if take is _hollow:
            shape = self.compute_output_shape(inputs.shape)
            return keras.ops.zeros(shape, self.compute_dtype)
        rows, present = take(self.name, inputs)
        rows = keras.ops.cast(rows, self.compute_dtype)
        return rows if self.combiner is None else combine(rows, present, weights, self.combiner)

    def compute_output_shape(self, input_shape: Any, weights_shape: Any = None) -> tuple[Any, ...]:
        """The shape of the ids and ``dim``; a combiner takes the last dim of the ids away."""
        del weights_shape
        return (*(input_shape if self.combiner is None else input_shape[:-1]), self.dim)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """The same as a symbol; nothing is looked up."""
        self._check_inputs(inputs, weights)
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """What the layer is made from."""
        names = ("dim", "size", "initializer", "seed", "combiner", "padding_id", "optimizer")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}

    def _check_inputs(self, ids: Any, weights: Any) -> None:
        dtype = keras.backend.standardize_dtype(ids.dtype)
        if "int" not in dtype:
            raise ModelError(
                f"the ids of table {self.name!r} must be integers; received {dtype}. Declare the "
                'input with its dtype: keras.Input(shape, dtype="int32").'
            )
        if self.combiner is not None and len(ids.shape) < 2:
            raise ModelError(
                f"combiner={self.combiner!r} of table {self.name!r} needs ids with at least 2 "
                f"dims, (batch, ids); received shape {tuple(ids.shape)}."
            )
        if weights is None:
            return
        if self.combiner is None:
            raise ModelError(
                f"table {self.name!r} received weights, which need a combiner: give combiner="
                "'sum', 'mean' or 'sqrtn'."
            )
        if len(weights.shape) != len(ids.shape):
            raise ModelError(
                f"the weights of table {self.name!r} must have the shape of its ids "
                f"{tuple(ids.shape)}; received {tuple(weights.shape)}."
            )


def serialized(optimizer: Any) -> dict[str, Any]:
    """An optimizer as Keras writes it, from its name, its config or the optimizer itself.

    Raises :class:`~meshwright.ModelError` for anything else.

    >>> serialized("adagrad")["class_name"]
    'Adagrad'
    """
    try:
        config: Any = keras.optimizers.serialize(keras.optimizers.get(optimizer))
    except ValueError as error:
        raise ModelError(
            "the optimizer of a table must be a Keras optimizer, its name or its config; received "
            f"{optimizer!r}."
        ) from error
    return config


def _check_options(
    name: str, dim: Any, size: Any, combiner: str | None, padding_id: int | None
) -> None:
    """Raise :class:`~meshwright.ModelError` that lists every argument that is invalid."""
    faults: list[str] = []
    if not isinstance(dim, int) or dim < 1:
        faults.append(f"dim must be an integer of at least 1; received {dim!r}")
    if size != "hash" and (not isinstance(size, int) or size < 1):
        faults.append(f"size must be an integer of at least 1, or 'hash'; received {size!r}")
    if combiner is not None and combiner not in COMBINERS:
        faults.append(f"combiner must be 'sum', 'mean', 'sqrtn' or None; received {combiner!r}")
    if padding_id is not None and not isinstance(padding_id, int):
        faults.append(f"padding_id must be an integer or None; received {padding_id!r}")
    if faults:
        raise ModelError(f"invalid arguments of Embedding({name!r}): {'; '.join(faults)}.")


class KerasLookups:
    """The tables of a model that travel by rows, and how their layers' calls are caught.

    ``embeddings`` is the least number of bytes of a table that does, or names of layers; ``None``
    for none. Raises :class:`~meshwright.ModelError` for a name that no Embedding layer has.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: KerasVariables,
        embeddings: int | Sequence[str] | None,
    ) -> None:
        self.layers: dict[str, Any] = {}  # table name -> the model's own Embedding layer
        self.served: dict[str, Embedding] = {}
        paths = {id(variable): path for path, variable in variables.params.items()}
        inside = list(_compat.layers_inside(model))
        for layer in inside:
            if isinstance(layer, Embedding):
                _check_namesakes(layer, self.served.setdefault(layer.name, layer))
        plain = {layer.name: layer for layer in inside if _is_plain(layer)}
        for layer in _layers_by_rows(plain, embeddings, model.name):
            path = paths.get(id(layer.embeddings if layer.built else None))
            if path is not None:
                self.layers[path] = layer
        whole = {**variables.params, **variables.state}
        paths = {id(variable): path for path, variable in whole.items()}
        self._whole: dict[str, Any] = {
            path: layer
            for layer in inside
            if _is_plain(layer) and layer.built
            if (path := paths.get(id(layer.embeddings))) is not None and path not in self.layers
        }
        own = [
            Table(path, layer.input_dim, layer.output_dim, _compat.stored_dtype(layer.embeddings))
            for path, layer in self.layers.items()
        ]
        self.tables = (*own, *(layer.table for layer in self.served.values()))

    @contextlib.contextmanager
    def taking(self, take: Take) -> Iterator[None]:
        """Let the lookups of these layers ask ``take`` while the block runs."""
        token = _taking.set(take)
        with contextlib.ExitStack() as stack:
            stack.callback(_taking.reset, token)
            for path, layer in self.layers.items():
                stack.enter_context(_caught(layer, path, take))
            yield

    @contextlib.contextmanager
    def watching(self, note: Note) -> Iterator[None]:
        """Let the lookups of the model's other tables tell their ids while the block runs."""
        with contextlib.ExitStack() as stack:
            for path, layer in self._whole.items():
                stack.enter_context(_watched(layer, path, note))
            yield


def building() -> contextlib.AbstractContextManager[None]:
    """While the block runs, layers whose table is on the servers give zeros: shapes are looked at.

    Not outside of it: a model that silently predicts from zeros would look as if it worked.
    """

    return scoped(_taking, _hollow)


def _check_namesakes(layer: Embedding, first: Embedding) -> None:
    """Raise :class:`~meshwright.ModelError` for layers of one table that describe two.

    They may combine rows in their own ways; the table, with its padding, is one.
    """
    one, other = (
        {key: value for key, value in table.get_config().items() if key in _OF_TABLE}
        for table in (first, layer)
    )
    if differing := {key: (one[key], other[key]) for key in one if one[key] != other[key]}:
        listed = ", ".join(f"{key}={a!r} and {b!r}" for key, (a, b) in differing.items())
        raise ModelError(
            f"two layers of the model share table {layer.name!r}, but differ in {listed}. Give "
            "them different names, one for each table, or the same arguments."
        )


@contextlib.contextmanager
def _caught(layer: Any, name: str, take: Take) -> Iterator[None]:
    """A layer whose lookups ask ``take``; its class, its name and all else stay."""

    def call(inputs: Any) -> Any:
        rows, _ = take(name, keras.ops.cast(inputs, "int32"))
        return keras.ops.cast(rows, layer.compute_dtype)

    # Not by Keras' own __setattr__, which would look for variables in it.
    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


@contextlib.contextmanager
def _watched(layer: Any, name: str, note: Note) -> Iterator[None]:
    """A layer whose lookups tell their ids first."""
    plain = layer.call

    def call(inputs: Any) -> Any:
        note(name, layer.input_dim, inputs)
        return plain(inputs)

    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


def _is_plain(layer: Any) -> bool:
    """Whether it looks up as Keras' own layer does; a subclass may do anything."""
    kind = keras.layers.Embedding
    return isinstance(layer, kind) and type(layer).call is kind.call and not layer.lora_enabled


def _layers_by_rows(
    layers: Mapping[str, Any], embeddings: int | Sequence[str] | None, model: str
) -> list[Any]:
    if embeddings is None:
        return []
    if not isinstance(embeddings, int | Sequence) or (
        isinstance(embeddings, int) and embeddings < 0
    ):
        raise ModelError(
            "Tables(embeddings=) must be a whole number of bytes, 0 or more, the names of layers, "
            f"or None; received {embeddings!r}."
        )
    if isinstance(embeddings, int):
        return [one for one in layers.values() if _nbytes(one) >= embeddings and _trains(one)]
    names = [embeddings] if isinstance(embeddings, str) else list(embeddings)
    if unknown := [name for name in names if name not in layers]:
        raise ModelError(
            f"unknown names in Tables(embeddings=): model {model!r} has no Embedding layer "
            f"{unknown}. It has {sorted(layers)}; layers of other classes are trained densely."
        )
    return [layers[name] for name in names if _trains(layers[name])]


def _nbytes(layer: Any) -> int:
    return 4 * layer.input_dim * layer.output_dim


def _trains(layer: Any) -> bool:
    return bool(layer.trainable)


def combine(rows: Any, present: Any, weights: Any, combiner: str) -> Any:
    """Rows of shape (..., ids, dim) as (..., dim); ``present`` and ``weights`` are (..., ids).

    As ``tf.nn.embedding_lookup_sparse``: ``mean`` divides the weighted sum by the sum of the
    weights, ``sqrtn`` by the root of the sum of their squares; no ids at all give 0.

    >>> import numpy as np
    >>> rows = np.array([[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]], "float32")
    >>> there = np.array([True, True, False])
    >>> [np.asarray(combine(rows, there, None, how)).tolist() for how in ("sum", "mean")]
    [[4.0, 6.0], [2.0, 3.0]]
    """
    weighs = ops.cast(present, rows.dtype)
    if weights is not None:
        weighs = ops.where(present, ops.cast(weights, rows.dtype), 0)
    total = ops.sum(rows * ops.expand_dims(weighs, -1), axis=-2)
    if combiner == "sum":
        return total
    size = ops.sum(weighs if combiner == "mean" else ops.square(weighs), axis=-1, keepdims=True)
    is_empty = ops.equal(size, 0)
    divisor = ops.where(is_empty, 1, size)  # so that gradients of what is not taken are finite
    divisor = divisor if combiner == "mean" else ops.sqrt(divisor)
    return ops.where(is_empty, 0, total / divisor)
