"""The inputs of a forward pass as values: a name, dims without the rows' number, a dtype."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Input:
    """One array that goes in; ``shape`` opens with ``None`` for the rows, others may be ragged."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


def inputs_of(batch: Any) -> Any:
    """What goes into the forward pass, of a batch that a model trains on: of ``(x, y)`` the first,
    of anything else all.

    >>> inputs_of(([1.0], [2.0])), inputs_of({"ids": [1]})
    ([1.0], {'ids': [1]})
    """
    return batch[0] if type(batch) is tuple and batch else batch


def inputs_like(example: Any, own: Any = None) -> Any:
    """The inputs of a tree of arrays, or of their shapes, in place of these.

    ``own`` are those that the model itself says, if it does: an array in the same place has its
    name.

    >>> import numpy as np
    >>> inputs_like({"ids": np.zeros([2, 8], "int32")})
    {'ids': Input(name='ids', shape=(None, 8), dtype='int32')}
    >>> inputs_like(np.zeros([2, 8])).name
    'input'
    """

    names = {path: spec.name for path, spec in jax.tree.leaves_with_path(own)}

    def one(path: Any, value: Any) -> Input:
        dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
        shape = (None, *np.shape(value)[1:])
        return Input(names.get(path, ""), shape, str(jax.dtypes.canonicalize_dtype(dtype)))

    return named(jax.tree.map_with_path(one, example))


def named(tree: Any) -> Any:
    """The tree with a name for each input; see :func:`leaf_names`."""
    with_paths, structure = jax.tree.flatten_with_path(tree)
    names = leaf_names([(path, spec.name) for path, spec in with_paths], "input")
    leaves = [
        Input(name, spec.shape, spec.dtype)
        for name, (_, spec) in zip(names, with_paths, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def leaf_names(leaves: list[tuple[Any, str]], kind: str) -> tuple[str, ...]:
    """A name for each of ``(path, name)``: the keys on its way, joined, its own name, its number.

    >>> import jax
    >>> paths = [path for path, _ in jax.tree.leaves_with_path({"q": {"a": 1, "b": 2}, "r": [3]})]
    >>> leaf_names([(path, "") for path in paths], "input")
    ('q_a', 'q_b', 'r_0')
    >>> leaf_names([(path, "") for path, _ in jax.tree.leaves_with_path([1, 2])], "input")
    ('input_0', 'input_1')
    """

    def one(number: int, path: Any, name: str) -> str:
        keys = [getattr(step, "key", getattr(step, "idx", step)) for step in path]
        if any(isinstance(key, str) for key in keys):
            return "_".join(map(str, keys))
        return name or (kind if len(leaves) == 1 else f"{kind}_{number}")

    names = [one(number, *leaf) for number, leaf in enumerate(leaves)]
    taken = Counter(names)
    return tuple(
        name if taken[name] == 1 else f"{kind}_{number}" for number, name in enumerate(names)
    )
