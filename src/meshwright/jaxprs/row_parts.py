"""Gradients left as one part per piece of the batch, to be summed over devices when it is best.

Where rows are split, a gradient is a sum over devices, which XLA makes right where the gradient
comes out: with k micro-batches, k times. Here the operation that sums over rows (the last product
of a kernel's gradient, the sum of a bias') is taken on each piece of the rows by itself and its
results stay where they are, as an array with one more dim in front. They are added up over
micro-batches in place, and over devices once. Where the rows of all micro-batches are smaller than
the sum over them, they are kept instead and summed together. Nothing is assumed of the model:
whatever rows do to each other happens before, and what is not such a sum is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from ..arrays.by_hand import at_once, over_axes
from .edits import count_uses
from .evaluation import evaluated
from .links import How
from .primitives import CHECKPOINTS, MOVES, SUMS, links_of

# What may stand between such a sum and the gradient: it does to each part what it does to the sum.
_KEEPS_PARTS = MOVES | {"convert_element_type", "reduce_sum"}
_FOLLOWED = CHECKPOINTS | {"jit"}


@dataclass(frozen=True)
class Pieces:
    """The pieces of a batch: a :class:`jax.sharding.Mesh`, the axes that split rows, the rows.

    ``times`` is the number of batches to sum over, if their rows may be kept till then. ``narrow``
    leaves each part in the type it is computed in where it is widened afterwards: it travels
    narrow, and is widened where the parts are summed.
    """

    mesh: Any
    axes: tuple[str, ...]
    rows: int
    times: int = 0  # so many batches may be kept unsummed
    narrow: bool = False

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
    what it was. One whose rows are to be kept comes as :class:`Unsummed`, any other as it is.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        others, sums = shapes
        first = len(jax.tree.leaves(others))
        places = range(first, first + len(jax.tree.leaves(sums)))
        results = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), set(places), pieces)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run if pieces.are_even else function


@dataclass(frozen=True, eq=False)
class Unsummed:
    """A sum over rows that is not taken yet: the operation, its operands, the moves after it."""

    pieces: Pieces
    eqn: Any
    operands: tuple[Any, ...]
    dims: dict[int, int]  # operand -> its dim of rows
    moves: tuple[Any, ...] = ()

    def moved(self, eqn: Any) -> Unsummed:
        """The same with one more move after it."""
        return replace(self, moves=(*self.moves, eqn))

    @property
    def is_small(self) -> bool:
        """Whether the rows of all batches, on one device, are less than the sum over them."""
        elements = sum(math.prod(self.operands[i].shape) for i in self.dims) // self.pieces.number
        return 0 < self.pieces.times * elements < math.prod(self.eqn.outvars[0].aval.shape)

    def in_parts(self, others: Sequence[Unsummed] = ()) -> Any:
        """The sum over these rows and those of others, one part per piece."""
        spec = jax.sharding.PartitionSpec
        params = {k: None if k == "out_sharding" else v for k, v in self.eqn.params.items()}
        alone = self.eqn.replace(params=params)

        def part(*several: Any) -> Any:
            operands = [
                jax.numpy.concatenate([operands[i] for operands in several], self.dims[i])
                if i in self.dims
                else first
                for i, first in enumerate(several[0])
            ]
            return _compat.evaluate_here(alone, operands)[0][None]

        axes, count = self.pieces.axes, len(self.operands)
        lies = [
            spec(*[None] * self.dims[i], axes) if i in self.dims else spec() for i in range(count)
        ]
        operands = [product.operands for product in (self, *others)]
        value = over_axes(
            part,
            mesh=self.pieces.mesh,
            in_specs=(tuple(lies),) * len(operands),
            out_specs=spec(axes),
            axis_names=axes,
        )(*operands)
        for move in self.moves:
            value = jax.vmap(lambda v, move=move: _compat.evaluate(move, [v])[0])(value)
        return value


@dataclass(frozen=True)
class Gathered:
    """The gradients of one variable so far, of several batches."""

    unsummed: tuple[Unsummed, ...] = ()
    summed: tuple[Any, ...] = ()  # at most one in parts and one that is not

    def plus(self, gradient: Any) -> Gathered:
        """With one more."""
        if isinstance(gradient, Unsummed):
            return replace(self, unsummed=(*self.unsummed, gradient))
        return self.plus_summed(gradient)

    def plus_summed(self, gradient: Any) -> Gathered:
        """With one more whose rows are summed."""
        others = [total for total in self.summed if total.ndim != gradient.ndim]
        same = [total + gradient for total in self.summed if total.ndim == gradient.ndim]
        return replace(self, summed=(*others, *(same or [gradient])))

    def totals(self) -> tuple[Any, ...]:
        """Their sum in parts, and that of those which are not in parts; one may be missing."""
        if not self.unsummed:
            return self.summed
        first, *others = self.unsummed
        return self.plus_summed(first.in_parts(others)).summed


def sum_parts(gradient: Any, ndim: int) -> Any:
    """A gradient of a variable with ``ndim`` dims, no longer in parts."""
    return gradient.sum(0) if gradient.ndim > ndim else gradient


def sum_narrow(gradient: Any) -> Any:
    """The sum of parts, which travel in the type that they have: ``sum`` widens bfloat16 first."""
    return jax.lax.reduce(gradient, jax.numpy.zeros((), gradient.dtype), jax.lax.add, (0,))


def scatter_parts(
    gradient: Any, mesh: Any, axes: tuple[str, ...], dim: int, lies: Sequence[tuple[str, ...]]
) -> Any:
    """The sum of a gradient's parts, of which each device gets its piece along ``dim`` alone.

    ``lies`` says along which axes each dim of the sum is split besides. Half of what
    :func:`sum_parts` sends, and an operation that not all of XLA's compilers find. All these axes
    are taken by hand: of one that is left to XLA it gathers every gradient first.
    """
    spec = jax.sharding.PartitionSpec
    after = [(*along, *axes) if at == dim else along for at, along in enumerate(lies)]

    def scatter(part: Any) -> Any:
        return jax.lax.psum_scatter(part[0], axes, scatter_dimension=dim, tiled=True)

    return over_axes(
        scatter,
        mesh=mesh,
        in_specs=spec(axes, *(along or None for along in lies)),
        out_specs=spec(*(along or None for along in after)),
        axis_names={*axes, *(axis for along in lies for axis in along)},
    )(gradient)


def _run(jaxpr: Any, consts: Any, args: Sequence[Any], places: set[int], pieces: Pieces) -> Any:
    """The results; those at ``places`` that are sums over rows come in parts."""
    return evaluated(jaxpr, consts, args, _Plan(jaxpr, places, pieces).take)


class _Plan:
    """Which equations of a jaxpr are taken in parts."""

    def __init__(self, jaxpr: Any, places: set[int], pieces: Pieces) -> None:
        self._pieces = pieces
        self._uses = count_uses(jaxpr)
        self._makes = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._sums: dict[int, dict[int, int]] = {}  # of such an equation: operand -> dim of rows
        self._moves: set[int] = set()
        self._left_off: set[int] = set()  # widenings that the sum over the parts makes up for
        self._inner: dict[int, set[int]] = {}  # of a call: places of the results to sum
        for number in places:
            self._follow(jaxpr.outvars[number])

    def _follow(self, var: Any) -> None:
        """Note where a result comes from, if that is a sum over rows, moved or not."""
        moves: list[int] = []
        is_last, left_off = self._pieces.narrow, set[int]()  # nothing is computed after a widening
        while self._uses[var] == 1 and (eqn := self._makes.get(var)) is not None:
            name = eqn.primitive.name
            if (dims := self._rows_of(eqn)) is not None:
                self._sums[id(eqn)] = dims
                self._moves.update(moves)
                self._left_off |= left_off
            elif name in _FOLLOWED:
                if not moves:  # within the call it may be left as it is: not known yet
                    self._inner.setdefault(id(eqn), set()).add(eqn.outvars.index(var))
            elif name in _KEEPS_PARTS:
                moves.append(id(eqn))
                if is_last and _widens(eqn):
                    left_off.add(id(eqn))
                is_last = is_last and name != "reduce_sum"
                var = eqn.invars[0]
                continue
            return

    def _rows_of(self, eqn: Any) -> dict[int, int] | None:
        if eqn.primitive.name not in SUMS or len(eqn.outvars) != 1:
            return None
        dims = _summed(eqn)
        if dims is None or not self._begins_with_zeros(eqn):
            return None
        sizes = {eqn.invars[operand].aval.shape[dim] for operand, dim in dims.items()}
        return dims if sizes == {self._pieces.rows} else None

    def _begins_with_zeros(self, eqn: Any) -> bool:
        """Whether a sum that is added to something is added to nothing: each part would add it."""
        if eqn.primitive.name != "scatter-add":
            return True
        producer = self._makes.get(eqn.invars[0])
        if producer is None or producer.primitive.name != "broadcast_in_dim":
            return False
        return getattr(producer.invars[0], "val", None) == 0

    def take(self, eqn: Any, values: list[Any]) -> list[Any]:
        """The results of one equation."""
        if id(eqn) in self._sums:
            rows = Unsummed(self._pieces, eqn, tuple(values), self._sums[id(eqn)])
            return [rows if rows.is_small else rows.in_parts()]
        if id(eqn) in self._left_off:
            return [values[0]]
        if id(eqn) in self._moves:
            if isinstance(values[0], Unsummed):
                return [values[0].moved(eqn)]
            return [jax.vmap(lambda value: _compat.evaluate(eqn, [value])[0])(values[0])]
        if id(eqn) in self._inner:
            inner, places = eqn.params["jaxpr"], self._inner[id(eqn)]
            if eqn.primitive.name == "jit":
                return _run(inner.jaxpr, inner.consts, values, places, self._pieces)
            pieces = replace(self._pieces, times=0)  # what is kept could not leave the call
            changed = jax.make_jaxpr(lambda *args: _run(inner, (), args, places, pieces))
            params = {**eqn.params, "jaxpr": changed(*values).jaxpr}
            changed_eqn = eqn.replace(params=params)
            return at_once(lambda *args: _compat.evaluate(changed_eqn, list(args)), *values)
        return _compat.evaluate(eqn, values)


def _widens(eqn: Any) -> bool:
    """Whether all that an equation does is to make numbers of a narrower type wider."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return jnp.issubdtype(before, jnp.floating) and before.itemsize < after.itemsize


def _summed(eqn: Any) -> dict[int, int] | None:
    """The dim of rows of each operand that has one, of an operation that may sum over them.

    Of a gradient of a kernel the rows are features of any dim.
    """
    links = links_of(eqn)
    grouped = {link.ins[0] for link in links if link.how is How.GROUPS}
    for link in links:
        if link.how is How.SUM and grouped.isdisjoint(link.ins):
            dims = dict(link.ins)
            if eqn.primitive.name == "conv_general_dilated" or set(dims.values()) == {0}:
                return dims
    return None
