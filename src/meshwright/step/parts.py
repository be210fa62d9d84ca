"""Gradients left as one part per piece of the batch, so that many are added before they travel.

Where rows are split, a gradient is a sum over devices, which XLA makes right where the gradient
comes out: with k micro-batches, k times. Here the operation that sums over rows (the last product
of a kernel's gradient, the sum of a bias') is taken on each piece of the rows by itself and its
results stay where they are, as an array with one more dim in front. They are added up over
micro-batches in place, and over devices once. Nothing is assumed of the model: whatever rows do to
each other happens before, and what is not such a sum is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _compat
from .jaxprs import count_uses

# What may stand between such a sum and the gradient: it does to each part what it does to the sum.
_MOVES = ("convert_element_type", "reduce_sum", "reshape", "rev", "squeeze", "transpose")
_CALLS = ("checkpoint", "jit", "remat2")


@dataclass(frozen=True)
class Pieces:
    """The pieces of a batch: a :class:`jax.sharding.Mesh`, the axes that split rows, the rows."""

    mesh: Any
    axes: tuple[str, ...]
    rows: int

    @property
    def number(self) -> int:
        """How many pieces there are."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def are_even(self) -> bool:
        """Whether there are several, all of one size."""
        return self.number > 1 and self.rows % self.number == 0


def in_parts(function: Callable[..., Any], pieces: Pieces) -> Callable[..., Any]:
    """``function(*args) -> (others, sums)`` with a part per piece in place of each sum over rows.

    ``sums`` is a dict of arrays. One that is a sum over the rows of a batch comes back with a dim
    of ``pieces.number`` before its own, which lies over ``pieces.axes``; its sum over that dim is
    what it was. Any other comes back as it is.
    """

    def run(*args: Any) -> Any:
        import jax

        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        others, sums = shapes
        first = len(jax.tree.leaves(others))
        wanted = range(first, first + len(jax.tree.leaves(sums)))
        results = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), set(wanted), pieces)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run if pieces.are_even else function


def add_parts(one: Any, other: Any) -> Any:
    """The sum of two gradients of one variable, either of which may be in parts."""
    ndim = min(one.ndim, other.ndim)
    return one + other if one.ndim == other.ndim else sum_parts(one, ndim) + sum_parts(other, ndim)


def sum_parts(gradient: Any, ndim: int) -> Any:
    """A gradient of a variable with so many dims, no longer in parts."""
    return gradient.sum(0) if gradient.ndim > ndim else gradient


def _run(jaxpr: Any, consts: Any, args: Sequence[Any], wanted: set[int], pieces: Pieces) -> Any:
    """The results, with parts for those of the wanted that are sums over rows."""
    from jax.extend.core import Literal

    in_place = _Plan(jaxpr, wanted, pieces)
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
        known.update(zip(eqn.outvars, in_place.take(eqn, values), strict=True))
    return [v.val if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]


class _Plan:
    """Which equations of a jaxpr are taken in parts."""

    def __init__(self, jaxpr: Any, wanted: set[int], pieces: Pieces) -> None:
        self._pieces = pieces
        self._uses = count_uses(jaxpr)
        self._makes = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._sums: dict[int, dict[int, int]] = {}  # of such an equation: operand -> dim of rows
        self._moves: set[int] = set()
        self._inner: dict[int, set[int]] = {}  # of a call: which results of it are wanted
        for number in wanted:
            self._follow(jaxpr.outvars[number])

    def _follow(self, var: Any) -> None:
        """Note where a result comes from, if that is a sum over rows, moved or not."""
        moves: list[int] = []
        while self._uses[var] == 1 and (eqn := self._makes.get(var)) is not None:
            name = eqn.primitive.name
            if (dims := self._rows_of(eqn)) is not None:
                self._sums[id(eqn)] = dims
                self._moves.update(moves)
            elif name in _CALLS:
                if not moves:  # within the call it may be left as it is, and nobody knows yet
                    self._inner.setdefault(id(eqn), set()).add(eqn.outvars.index(var))
            elif name in _MOVES:
                moves.append(id(eqn))
                var = eqn.invars[0]
                continue
            return

    def _rows_of(self, eqn: Any) -> dict[int, int] | None:
        find = _SUMS.get(eqn.primitive.name)
        if find is None or len(eqn.outvars) != 1:
            return None
        dims = find(eqn)
        if dims is None or not self._begins_with_zeros(eqn):
            return None
        sizes = {eqn.invars[operand].aval.shape[dim] for operand, dim in dims.items()}
        return dims if sizes == {self._pieces.rows} else None

    def _begins_with_zeros(self, eqn: Any) -> bool:
        """Whether a sum that is added to something is added to nothing: each part would add it."""
        if eqn.primitive.name != "scatter-add":
            return True
        made = self._makes.get(eqn.invars[0])
        if made is None or made.primitive.name != "broadcast_in_dim":
            return False
        return getattr(made.invars[0], "val", None) == 0

    def take(self, eqn: Any, values: list[Any]) -> list[Any]:
        """The results of one equation."""
        import jax

        if id(eqn) in self._sums:
            return [self._sum(eqn, values, self._sums[id(eqn)])]
        if id(eqn) in self._moves:
            return [jax.vmap(lambda value: _compat.evaluate(eqn, [value])[0])(values[0])]
        if id(eqn) in self._inner:
            inner, wanted = eqn.params["jaxpr"], self._inner[id(eqn)]
            if eqn.primitive.name == "jit":
                return _run(inner.jaxpr, inner.consts, values, wanted, self._pieces)
            changed = jax.make_jaxpr(lambda *args: _run(inner, (), args, wanted, self._pieces))
            params = {**eqn.params, "jaxpr": changed(*values).jaxpr}
            return _compat.evaluate(eqn.replace(params=params), values)
        return _compat.evaluate(eqn, values)

    def _sum(self, eqn: Any, values: list[Any], dims: dict[int, int]) -> Any:
        """One part per piece of the rows."""
        import jax

        spec = jax.sharding.PartitionSpec
        params = {k: None if k == "out_sharding" else v for k, v in eqn.params.items()}
        alone = eqn.replace(params=params)

        def part(*operands: Any) -> Any:
            return _compat.evaluate(alone, list(operands))[0][None]

        axes = self._pieces.axes
        return jax.shard_map(
            part,
            mesh=self._pieces.mesh,
            in_specs=tuple(
                spec(*[None] * dims[i], axes) if i in dims else spec() for i in range(len(values))
            ),
            out_specs=spec(axes),
            axis_names=set(axes),
            check_vma=False,
        )(*values)


# For each operation that may sum over rows: the dim of rows of each operand that has one.


def _product(eqn: Any) -> dict[int, int] | None:
    (left, right), _ = eqn.params["dimension_numbers"]
    return {0: 0, 1: 0} if (0, 0) in zip(left, right, strict=True) else None


def _sum_of(eqn: Any) -> dict[int, int] | None:
    return {0: 0} if 0 in eqn.params["axes"] else None


def _convolution(eqn: Any) -> dict[int, int] | None:
    """The gradient of a kernel is a convolution whose features are the rows."""
    numbers = eqn.params["dimension_numbers"]
    grouped = eqn.params["feature_group_count"] != 1
    features = numbers.lhs_spec[1], numbers.rhs_spec[1]
    return None if grouped else {0: features[0], 1: features[1]}


def _scatter(eqn: Any) -> dict[int, int] | None:
    """The gradient of a lookup adds rows to a table of zeros."""
    numbers = eqn.params["dimension_numbers"]
    per_row = 0 not in numbers.update_window_dims and not numbers.operand_batching_dims
    return {1: 0, 2: 0} if per_row else None


_SUMS: dict[str, Callable[[Any], dict[int, int] | None]] = {
    "dot_general": _product,
    "reduce_sum": _sum_of,
    "conv_general_dilated": _convolution,
    "scatter-add": _scatter,
}
