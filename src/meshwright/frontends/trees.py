"""Trees of arrays, of one structure, as dicts by path and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..errors import ModelError
from ..layouts.dim_names import DimNames
from ..layouts.params import ParamInfo, Role
from ..program import Arrays


class Tree:
    """The paths of a pytree's arrays: keys joined by ``/``.

    Random keys, which optimizers that add noise keep, are their numbers by path: these can be laid
    out, saved and compared as other arrays can.

    ``is_array`` says of nodes that hold one array each that they are it, and a path ends with
    theirs; the whole one is a second spelling. Their dims may have names, which ``names`` tells.
    Raises :class:`~meshwright.ModelError` for two arrays with one path.

    >>> Tree({"a": [1.0, 2.0]}).named({"a": [3.0, 4.0]})
    {'a/0': 3.0, 'a/1': 4.0}
    """

    def __init__(
        self,
        tree: Any,
        is_array: Callable[[Any], bool] | None = None,
        names: Callable[[Any], DimNames | None] = lambda _: None,
    ) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._impls = [_impl_of(leaf) for leaf in leaves]
        self._leaves = [
            leaf if impl is None else jax.eval_shape(jax.random.key_data, leaf)
            for leaf, impl in zip(leaves, self._impls, strict=True)
        ]

        def holds_one(node: Any) -> bool:
            # Of a parameter that a mask leaves out, Optax keeps the node and nothing in it.
            return is_array is not None and is_array(node) and len(jax.tree.leaves(node)) == 1

        with_paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=holds_one)
        self._names = [names(node) for _, node in with_paths]
        self._paths = [_path_of(keys) for keys, _ in with_paths]
        with_ends, _ = jax.tree_util.tree_flatten_with_path(tree)
        self._spellings = [
            tuple(dict.fromkeys((path, _path_of(keys))))
            for path, (keys, _) in zip(self._paths, with_ends, strict=True)
        ]
        if len({*self._paths}) < len(self._paths):
            _refuse_clash(self._paths, [jax.tree_util.keystr(path) for path, _ in with_paths])

    def named(self, tree: Any) -> Arrays:
        """The arrays of a tree of this structure by path."""
        return {
            path: leaf if impl is None else jax.random.key_data(leaf)
            for path, leaf, impl in zip(
                self._paths, jax.tree.leaves(tree), self._impls, strict=True
            )
        }

    def whole(self, values: Arrays) -> Any:
        """The tree again."""
        leaves = [
            values[path] if impl is None else jax.random.wrap_key_data(values[path], impl=impl)
            for path, impl in zip(self._paths, self._impls, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)

    def infos(self, role: Role, owners: tuple[ParamInfo, ...] = ()) -> tuple[ParamInfo, ...]:
        """What is known of each array; slots belong to whichever of ``owners`` they repeat."""
        return tuple(
            ParamInfo(
                path=path,
                spellings=spellings,
                dims=tuple(leaf.shape),
                dtype=str(leaf.dtype),
                itemsize=leaf.dtype.itemsize,
                role=role,
                owner=_owner(path, tuple(leaf.shape), owners),
                names=names,
            )
            for path, spellings, leaf, names in zip(
                self._paths, self._spellings, self._leaves, self._names, strict=True
            )
        )


def _path_of(keys: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/") or "params"


def _impl_of(leaf: Any) -> Any:
    """The kind of random keys that an array, or the shape of one, has; ``None`` for numbers."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), leaf)
    return found[0]


def _refuse_clash(paths: list[str], keys: list[str]) -> None:
    twice = next(path for path in paths if paths.count(path) > 1)
    same = " and ".join(key for path, key in zip(paths, keys, strict=True) if path == twice)
    raise ModelError(f"{same} have the same path, {twice!r}: rename a key.")


def _owner(path: str, dims: tuple[int, ...], owners: tuple[ParamInfo, ...]) -> str | None:
    """The parameter whose tree this slot repeats: its path ends with the parameter's, unless there
    is one alone, which may be no tree."""
    if len(owners) == 1 and dims:
        return owners[0].path if owners[0].dims == dims else None
    fitting = [o.path for o in owners if f"/{path}".endswith(f"/{o.path}") and o.dims == dims]
    return max(fitting, key=len, default=None)
