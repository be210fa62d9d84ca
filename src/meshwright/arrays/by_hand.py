"""What devices compute on their pieces along some axes of a mesh, in compiled steps and others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.core import Tracer


def over_axes(
    function: Callable[..., Any],
    *,
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    axis_names: Collection[str],
) -> Callable[..., Any]:
    """``jax.shard_map`` over some axes of a mesh; the others are left to XLA.

    Called with arrays that have values it is compiled: piece by piece, as steps are run with Keras'
    ``run_eagerly=True`` and under ``jax.disable_jit``, JAX knows ``shard_map`` over all axes only.

    >>> import jax.numpy as jnp, numpy as np
    >>> mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 4)), ("rows", "cols"))
    >>> spec, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    >>> total = over_axes(lambda piece: jax.lax.psum(piece, "rows"), mesh=mesh, in_specs=spec,
    ...                   out_specs=whole, axis_names={"rows"})
    >>> total(jnp.arange(4.0)).tolist()
    [2.0, 4.0]
    """
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*axis_names},
        check_vma=False,
    )

    def call(*operands: Any) -> Any:
        return at_once(mapped, *operands)

    return call


def at_once(function: Callable[..., Any], *operands: Any) -> Any:
    """A call that holds a ``shard_map`` over some axes: compiled where its operands have values."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands)):
        return function(*operands)
    with jax.disable_jit(False):
        return jax.jit(function)(*operands)


def run_compiled(call: Callable[..., Any], *operands: Any) -> Any:
    """What a program that was compiled ahead returns, also under ``jax.disable_jit``, in which JAX
    refuses to run it."""
    if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return call(*operands)
    with jax.disable_jit(False):
        return call(*operands)
