"""Embedding layers whose tables lie on the servers and travel by rows.

Two kinds: the Embedding layers of an unchanged model, whose call is caught while the model is
traced, and :class:`Embedding`, which never has a table of its own. Either way a worker sees only
the rows that its batch looks up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import keras

from ... import _compat
from ...errors import ModelError
from ...frontends.keras.program import KerasVariables
from .tables import Table, Take

LEAST_BYTES = 4 << 20  # smaller tables travel whole: rows would save nothing


def _hollow(name: str, ids: Any) -> Any:
    """Stands for a lookup while a model is built; the layer itself knows what to give."""
    raise AssertionError((name, ids))


_taking: ContextVar[Take | None] = ContextVar("taking", default=None)


@keras.saving.register_keras_serializable("meshwright.ps")
class Embedding(keras.layers.Layer):
    """A lookup table that lies on the servers only; may be larger than any worker's memory.

    ``name`` is that of the table, ``dim`` the length of its rows and ``size`` their number, or
    ``"hash"``: then any whole number is a key, and its row is made when it is first asked for.
    ``initializer`` is ``"uniform"`` (from -0.05 to 0.05, as Keras) or another that servers know.
    The layer trains under :meth:`ParameterServer.fit`. The table keeps its rows from one fit to the
    next, and is spread over all servers. Raises :class:`~meshwright.ModelError` when
    it is called outside of it.

    >>> layer = Embedding("users", 8, "hash")
    >>> layer.compute_output_shape((32, 4))
    (32, 4, 8)
    """

    def __init__(
        self,
        name: str,
        dim: int,
        size: int | Literal["hash"] = "hash",
        *,
        initializer: str = "uniform",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(name=name, **options)
        if dim < 1 or (size != "hash" and (not isinstance(size, int) or size < 1)):
            raise ModelError(
                f"Embedding({name!r}, dim={dim!r}, size={size!r}): dim is a number from 1, and "
                "size one too, or 'hash'."
            )
        self.dim, self.size = dim, size
        self.initializer, self.seed = initializer, seed
        self.built = True

    @property
    def table(self) -> Table:
        """What a step knows of the table."""
        rows = None if self.size == "hash" else int(self.size)
        return Table(self.name, rows, self.dim, "float32", in_model=False)

    def call(self, inputs: Any) -> Any:
        """The rows of these keys."""
        take = _taking.get()
        if take is None:
            raise ModelError(
                f"the table {self.name!r} lies on the servers, and the layer was called outside of "
                "them. Use strategy.fit, strategy.evaluate or strategy.predict."
            )
        if take is _hollow:
            return keras.ops.zeros((*inputs.shape, self.dim), self.compute_dtype)
        return keras.ops.cast(take(self.name, inputs), self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """The shape of the ids, and ``dim``."""
        return (*input_shape, self.dim)

    def compute_output_spec(self, inputs: Any) -> Any:
        """The same as a symbol; nothing is looked up."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """What the layer is made from."""
        config = super().get_config()
        own = {"dim": self.dim, "size": self.size, "initializer": self.initializer}
        return {**config, **own, "seed": self.seed}


class KerasLookups:
    """The tables of a model that travel by rows, and how their layers' calls are caught.

    ``embeddings`` is the least number of bytes of a table that does, or names of layers; ``None``
    for none. Raises :class:`~meshwright.ModelError` for a name that no Embedding layer has.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: KerasVariables,
        embeddings: int | Sequence[str] | None = LEAST_BYTES,
    ) -> None:
        self.layers: dict[str, Any] = {}  # table name -> the model's own Embedding layer
        self.served: dict[str, Embedding] = {}
        paths = {id(variable): path for path, variable in variables.params.items()}
        inside = list(_compat.layers_inside(model))
        for layer in inside:
            if isinstance(layer, Embedding):
                self.served[layer.name] = layer
        plain = {layer.name: layer for layer in inside if _is_plain(layer)}
        for layer in _chosen(plain, embeddings, model.name):
            path = paths.get(id(layer.embeddings if layer.built else None))
            if path is not None:
                self.layers[path] = layer
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
def building() -> Iterator[None]:
    """While the block runs, layers whose table is on the servers give zeros: shapes are looked at.

    Not outside of it: a model that silently predicts from zeros would look as if it worked.
    """

    token = _taking.set(_hollow)
    try:
        yield
    finally:
        _taking.reset(token)


@contextlib.contextmanager
def _caught(layer: Any, name: str, take: Take) -> Iterator[None]:
    """A layer whose lookups ask ``take``; its class, its name and all else stay."""

    def call(inputs: Any) -> Any:
        return keras.ops.cast(take(name, keras.ops.cast(inputs, "int32")), layer.compute_dtype)

    # Not by Keras' own __setattr__, which would look for variables in it.
    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


def _is_plain(layer: Any) -> bool:
    """Whether it looks up as Keras' own layer does; a subclass may do anything."""
    kind = keras.layers.Embedding
    return isinstance(layer, kind) and type(layer).call is kind.call and not layer.lora_enabled


def _chosen(
    layers: Mapping[str, Any], embeddings: int | Sequence[str] | None, model: str
) -> list[Any]:
    if embeddings is None:
        return []
    if isinstance(embeddings, int):
        return [one for one in layers.values() if _nbytes(one) >= embeddings and _trains(one)]
    names = [embeddings] if isinstance(embeddings, str) else list(embeddings)
    if unknown := [name for name in names if name not in layers]:
        raise ModelError(
            f"embeddings={names!r}: model {model!r} has no Embedding layer {unknown}. It has "
            f"{sorted(layers)}; layers of other classes are trained densely."
        )
    return [layers[name] for name in names if _trains(layers[name])]


def _nbytes(layer: Any) -> int:
    return 4 * layer.input_dim * layer.output_dim


def _trains(layer: Any) -> bool:
    return bool(layer.trainable)
