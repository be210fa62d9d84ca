"""The front end for programs over named dims: a loss over named arrays as a Program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from ..errors import DimError, ModelError
from ..layouts.dim_names import DimNames, dims
from ..layouts.dim_rules import text_of
from ..layouts.params import ParamInfo
from ..layouts.placement import Placement
from ..named.array import named
from ..named.operation import is_named
from ..named.rules import bound, no_rules, rules
from ..program import Program
from .extras import Extras
from .jax import Params, program_of, shapes_of
from .trees import Tree


def named_program(
    loss: Callable[..., Any],
    params: Params | Callable[[], Params],
    optimizer: Any,
    *,
    batch: Any = None,
    forward: Callable[[Params, Any], Any] | None = None,
    name: str = "program",
    seed: int = 0,
    example: Any = None,
) -> Program:
    """A Program from a loss over named arrays, its parameters and an optimizer.

    As :func:`~meshwright.jax_program`, with its ``params``, ``optimizer`` and ``name``, but a
    parameter that is a named array has a path without an end of its own, and its dims are known:
    under ``Placement.of(mesh, rules="batch:rows; hidden:cols")`` one string lays out parameters,
    slots, batches and every operation of ``loss``, which may return a named scalar. A rule for a
    dim that nothing has is an error when the step is traced.

    ``batch`` names the dims of a batch's arrays, as a tree of texts: they are then laid out by the
    rules as they come from the host, and ``loss`` gets them named. Without it, it gets them as they
    are. ``forward`` is only needed for prediction, and gets its inputs as they are. ``loss`` may
    take ``key``, ``keys`` and ``step`` as well, which begin with ``seed``. ``example`` is a
    batch, or its shapes, which a pipeline is cut by.

    >>> import jax.numpy as jnp, numpy as np, optax, meshwright as mw, meshwright.named as mn
    >>> def loss(params, batch):
    ...     h = mn.relu(mn.einsum([batch["x"], params["w"]]))
    ...     y = mn.einsum([h, params["v"]])
    ...     return mn.reduce_mean(mn.square(y - batch["y"]))
    >>> def init():
    ...     draw = jax.random.normal
    ...     return {
    ...         "w": mn.named(draw(jax.random.key(0), [4, 8]), "io:4 hidden:8"),
    ...         "v": mn.named(draw(jax.random.key(1), [8, 2]), "hidden:8 out:2"),
    ...     }
    >>> program = mw.named_program(
    ...     loss, init, optax.adam(0.01), batch={"x": "batch io", "y": "batch out"}
    ... )
    >>> mesh = mw.create_mesh({"rows": 4, "cols": 2})
    >>> trainer = mw.Trainer(program, mw.Placement.of(mesh, rules="batch:rows;hidden:cols"))
    >>> state, logs = trainer.train(
    ...     trainer.init(), [{"x": np.ones([8, 4]), "y": np.ones([8, 2])}] * 3
    ... )
    >>> print(trainer.explain()["0/mu/w"].layout.unbound())
    [unsharded, cols]
    """
    batch_names = None if batch is None else _batch_names(batch)

    def scalar_loss(params: Params, batch: Any, **more: Any) -> Any:
        batch = batch if batch_names is None else _with_names(batch, batch_names)
        result = loss(params, batch, **more)
        if isinstance(result, tuple) and not _has_logs(result):
            return result  # which is refused as that of any program is
        value, logs = result if isinstance(result, tuple) else (result, {})
        return _scalar(value, "the loss"), {k: _scalar(v, f"log {k!r}") for k, v in logs.items()}

    extras = Extras.of(loss, seed)
    program = program_of(scalar_loss, params, optimizer, forward, name, _named_tree, extras)

    def update(*args: Any) -> Any:
        # ZeRO updates in pieces that no rule knows of; where they lie is told from outside.
        with no_rules():
            return program.update(*args)

    return replace(
        program,
        update=update,
        inputs=() if batch_names is None else tuple(enumerate(jax.tree.leaves(batch_names))),
        context=functools.partial(_context, program.infos),
        example=None if example is None else shapes_of(example),
    )


@contextmanager
def _context(infos: tuple[ParamInfo, ...], placement: Placement, whole: bool) -> Iterator[None]:
    """The placement's rules for dims in force; with ``whole``, each has to be of some use."""
    if placement.rules is None:
        yield
        return
    in_force = bound(placement.rules, placement.mesh)
    # On a mesh without devices the step is compiled for those of another machine.
    in_force = replace(in_force, ahead=placement.mesh.is_abstract)
    with rules(in_force, strict=whole and placement.strict):
        for info in infos:
            if info.names is not None:
                in_force.see(info.names.of(info.dims))
        yield


def _named_tree(tree: Any) -> Tree:
    return Tree(tree, is_named, _names_of)


def _names_of(node: Any) -> DimNames | None:
    """The names of an array's dims; none where an optimizer has made another array of it."""
    if not is_named(node):
        return None
    dims = node._dims
    if tuple(dim.size for dim in dims) != tuple(node.array.shape):
        return None
    return DimNames(tuple(dim.name for dim in dims))


def _batch_names(batch: Any) -> Any:
    """The tree of texts as one of names."""
    return jax.tree.map(
        lambda node: node if isinstance(node, DimNames) else dims(node),
        batch,
        is_leaf=lambda node: isinstance(node, str | DimNames),
    )


def _with_names(batch: Any, names: Any) -> Any:
    """The batch with its arrays named. Raises :class:`DimError` if it is not like the names."""
    arrays, tree = jax.tree.flatten(batch, is_leaf=is_named)
    if tree != jax.tree.structure(names):
        raise DimError(
            f"a batch has arrays {_keys(batch)}, and batch= of named_program names "
            f"{_keys(names)}. Name each array, as batch={{'x': 'batch io'}}."
        )
    return jax.tree.unflatten(
        tree,
        [
            named(array, dim_names.of(array.array.shape if is_named(array) else array.shape))
            for array, dim_names in zip(arrays, jax.tree.leaves(names), strict=True)
        ],
    )


def _keys(tree: Any) -> str:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    return ", ".join(
        repr(jax.tree_util.keystr(path, simple=True, separator="/")) for path, _ in paths
    )


def _has_logs(result: tuple[Any, ...]) -> bool:
    """Whether these are a loss and its logs."""
    return len(result) == 2 and isinstance(result[1], Mapping)


def _scalar(value: Any, what: str) -> Any:
    """A bare scalar. Raises :class:`ModelError` for a named array with dims."""
    if not is_named(value):
        return value
    if value.dims:
        raise ModelError(
            f"{what} has dims [{text_of(value.dims)}], and is to be one number: take reduce_mean "
            "or reduce_sum of it."
        )
    return value.array
