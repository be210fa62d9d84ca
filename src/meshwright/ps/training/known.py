"""The models that a strategy has on its servers: exported once, found again by the next ``fit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ... import _compat
from ...errors import ModelError
from ..variables import Variable
from .local import Local
from .serving import Served
from .signature import Signature


def served(
    strategy: Any,
    model: keras.Model,
    batches: Sequence[Any],
    *,
    embeddings: int | Sequence[str] | None,
    local: Local | None = None,
    any_rows: bool = True,
) -> Served:
    """The model on this strategy's servers; what was exported before is used again."""
    names = tuple(embeddings) if isinstance(embeddings, list) else embeddings
    signatures = tuple(Signature.of(batch) for batch in batches)
    asked = (signatures, names, local, any_rows)
    kept: dict[Any, tuple[Any, Any, Served]] = model.__dict__.setdefault("_meshwright_served", {})
    if id(strategy) in kept:
        before, token, present = kept[id(strategy)]
        same = all(a is b for a, b in zip(token, _compat.compile_token(model), strict=True))
        if before == asked and same and present.belongs_to(strategy):
            return present
    made = Served(strategy, model, batches, embeddings=embeddings, local=local, any_rows=any_rows)
    kept[id(strategy)] = (asked, _compat.compile_token(model), made)
    return made


def table_of(strategy: Any, model: keras.Model, name: str) -> Variable:
    """The table of a layer of a model that was trained on this strategy, to look rows up in.

    ``name`` is that of the layer. Raises :class:`~meshwright.ModelError` if none travels by rows.
    """
    kept = model.__dict__.get("_meshwright_served", {}).get(id(strategy))
    specs = kept[2].specs.tables if kept is not None and kept[2].belongs_to(strategy) else {}
    for path, spec in specs.items():
        if path == name or path.removesuffix("/embeddings") == name:
            return Variable(spec, strategy)
    raise ModelError(
        f"model {model.name!r} has no table {name!r} on the servers of {strategy!r}. Tables that "
        f"travel by rows: {sorted(specs) or 'none; train the model there first'}."
    )
