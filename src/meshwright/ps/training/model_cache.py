"""The models that a strategy has on its servers: exported once, and used again by later calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras

from ... import _compat
from ...errors import ModelError
from ...step.local import Local
from ..shared.variables import Variable
from .server_variables import Subject
from .serving import Served

_MOST_KEPT = 4  # exports of one model: for fit, evaluate and predict, and one for other data


def served(subject: Subject, local: Local | None = None, any_rows: bool = True) -> Served:
    """The model on its strategy's servers; what was exported before is used again."""
    tables = subject.tables
    purpose = ("fit", tables.embeddings, local, any_rows, repr(tables.optimizer))
    return cached_on_model(subject, purpose, lambda: Served(subject, local, any_rows))


def cached_on_model(subject: Subject, purpose: Any, make: Callable[[], Any]) -> Any:
    """What was made of a model for its strategy, unless it was compiled again since."""
    model, strategy = subject.model, subject.strategy
    cached: dict[Any, tuple[tuple[Any, ...], Any]] = model.__dict__.setdefault(_KEPT, {})
    key = (id(strategy), subject.signatures, purpose)
    token = _compat.compile_token(model)
    if key in cached:
        before, present = cached.pop(key)
        same = all(a is b for a, b in zip(token, before, strict=True))
        if same and present.belongs_to(strategy):
            cached[key] = before, present
            return present
    result = make()
    while len(cached) >= _MOST_KEPT:
        del cached[next(iter(cached))]
    cached[key] = _compat.compile_token(model), result
    return result


def table_of(strategy: Any, model: keras.Model, name: str) -> Variable:
    """The table of a layer of a model that was trained on this strategy, to look rows up in.

    ``name`` is that of the layer. Raises :class:`~meshwright.ModelError` if none travels by rows.

    >>> import keras, numpy as np, meshwright as mw
    >>> from meshwright.ps import Embedding
    >>> model = keras.Sequential([keras.Input([1], dtype="int32"), Embedding("users", 4, 100)])
    >>> model.compile("sgd", "mse")
    >>> with mw.ParameterServer() as strategy:
    ...     x, y = np.array([[3], [70]], "int32"), np.zeros([2, 1, 4], "float32")
    ...     _ = strategy.fit(model, x, y, verbose=0)
    ...     print(table_of(strategy, model, "users").lookup([70]).shape)
    (1, 4)
    """
    specs = {
        path: spec
        for entry in _all_of(strategy, model)
        for path, spec in entry.specs.tables.items()
    }
    for path, spec in specs.items():
        if path == name or path.removesuffix("/embeddings") == name:
            return Variable(spec, strategy)
    raise ModelError(
        f"model {model.name!r} has no table {name!r} on the servers of {strategy!r}. Its tables "
        f"there: {', '.join(sorted(specs)) or 'none; train or restore the model first'}."
    )


def _all_of(strategy: Any, model: keras.Model) -> Iterator[Any]:
    for _, entry in model.__dict__.get(_KEPT, {}).values():
        if entry.belongs_to(strategy):
            yield entry


_KEPT = "_meshwright_served"
