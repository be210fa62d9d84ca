"""The models that a strategy has on its servers: exported once, and used again by later calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from ... import _compat
from ...errors import ModelError
from ...step.local import Local
from ..options import Tables
from ..shared.variables import Variable
from .serving import Served
from .signature import Signature

_MOST_KEPT = 4  # exports of one model: for fit, evaluate and predict, and one for other data


def served(
    strategy: Any,
    model: keras.Model,
    batches: Sequence[Any],
    tables: Tables,
    *,
    local: Local | None = None,
    any_rows: bool = True,
) -> Served:
    """The model on this strategy's servers; what was exported before is used again."""
    signatures, optimizer = tuple(map(Signature.of, batches)), repr(tables.optimizer)
    asked = ("fit", signatures, tables.embeddings, local, any_rows, optimizer)
    return kept(
        strategy, model, asked, lambda: Served(strategy, model, batches, tables, local, any_rows)
    )


def kept(strategy: Any, model: keras.Model, asked: Any, make: Callable[[], Any]) -> Any:
    """What was made of a model for this strategy, unless it was compiled again since."""
    cached: dict[Any, tuple[tuple[Any, ...], Any]] = model.__dict__.setdefault(_KEPT, {})
    key = (id(strategy), asked)
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
