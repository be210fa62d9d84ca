"""What is known of a pipeline's step before it is traced: its blocks, its plan, its mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ..program import Arrays
from .deal import Deal
from .parts import Blocks, is_trained
from .plan import TickPlan
from .segments import Segments
from .traced import Traced


class Own(NamedTuple):
    """The arrays that blocks have of their own, or differ in, stacked: parameters, with those that
    all blocks read behind them, what stays as it is in a step, and what is another in the next
    micro-batch, with a dim of these in front; and whether there is a block in each place."""

    params: Any
    fixed: Any
    counted: Any
    taken: Any


class Rest(NamedTuple):
    """Slots and metrics that the loss reads."""

    slots: Arrays
    metrics: Arrays


@dataclass(frozen=True, eq=False)
class Setting:
    """The blocks of a loss, the plan of its passes, and the mesh on which they run.

    ``mesh`` is a :class:`jax.sharding.Mesh`, ``axis`` the stages', and ``rows`` the axes that split
    the rows of a batch: gradients of blocks then come with a dim of pieces in front, which is still
    to be summed over. ``by_piece`` are the blocks for the rows of one of those pieces, where rows
    leave each other alone. With ``recompute`` a stage keeps its inputs alone, else what its blocks
    make; with ``recompute_blocks`` of each block its input alone. With ``unrolls`` a run's blocks
    are written out one by one, else they are a loop over their stack. ``by_rules`` is whether
    operations are laid out by rules for named dims, and ``in_branches`` whether buffers are written
    inside of the branches that stages skip.
    """

    blocks: Blocks | Segments
    deal: Deal
    by_piece: Blocks | None
    plan: TickPlan
    mesh: Any
    axis: str
    rows: tuple[str, ...]
    recompute: bool
    recompute_blocks: bool
    unrolls: bool
    takes_mean: bool
    logs_of_one: bool
    by_rules: bool
    in_branches: bool = True

    @property
    def functions(self) -> Any:
        """What the loss is made of."""
        return self.blocks.functions

    @property
    def traced(self) -> Traced:
        """The loss of one micro-batch."""
        return self.blocks.traced

    def known(
        self, params: Arrays, state: Arrays, rest: Rest, leaves: Sequence[Any]
    ) -> dict[Any, Any]:
        """The values of the loss's arguments, as far as these have them."""
        values = {
            "params": params,
            "state": state,
            "slots": rest.slots,
            "metrics": rest.metrics,
            "batch": dict(enumerate(leaves)),
        }
        return {
            var: values[part][key]
            for var, (part, key) in self.traced.arguments.items()
            if key in values[part]
        }

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """Of each row of the blocks' own arrays, of what they differ in, and of what is lent to
        all, which field of :class:`Own` it is in."""
        assert isinstance(self.blocks, Blocks)
        counted = self.functions.counted
        own = tuple(
            "params" if is_trained(row) else "counted" if row[0][1] in counted else "fixed"
            for row in self.blocks.own
        )
        changes = self.functions.differs_by_micro
        differing = ("counted" if does else "fixed" for does in changes)
        return (*own, *differing, *["params"] * len(self.functions.lent))

    @functools.cached_property
    def skips(self) -> bool:
        """Whether a stage may leave out what it has nothing to do for.

        Not where XLA splits more than rows: some of its collectives wait for every device.
        """
        return runs_alone(self.mesh.shape, self.axis, self.rows)

    @property
    def shares_rooms(self) -> bool:
        """Whether sums of what comes before the blocks and after them may have one room: no stage
        makes both, and no axis splits them in another way."""
        return self.skips and self.plan.table.stages > 1 and not self.deal.shares_loss

    @property
    def writes_in_branches(self) -> bool:
        """Whether buffers go through branches, which write them in place."""
        return self.skips and self.in_branches

    def either(self, holds: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """One of two results; both are computed where devices must stay together."""
        if self.skips and self.by_rules:
            # XLA refuses branches whose results ask for different layouts.
            barrier = jax.lax.optimization_barrier
            return jax.lax.cond(holds, lambda: barrier(yes()), lambda: barrier(no()))
        if self.skips:
            return jax.lax.cond(holds, yes, no)
        return jax.tree.map(lambda a, b: jax.numpy.where(holds, a, b), yes(), no())

    @property
    def pieces(self) -> int:
        """Into how many pieces the rows of a batch are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.rows)

    def laid(self, value: Any, dim: int) -> Any:
        """An activation, or buffers of it, with the rows in ``dim`` over the axes of the batch."""
        spec, pieces = jax.sharding.PartitionSpec, self.pieces
        if pieces == 1 or value.ndim <= dim or value.shape[dim] % pieces:
            return value
        free = [spec.UNCONSTRAINED] * (value.ndim - dim - 1)
        return jax.lax.with_sharding_constraint(value, spec(*[None] * dim, self.rows, *free))

    def exactly(self, value: Any, by_row: bool) -> Any:
        """See :func:`laid_exactly`."""
        return laid_exactly(value, by_row, self.rows, self.mesh)


def laid_exactly(value: Any, by_row: bool, rows: tuple[str, ...], mesh: Any) -> Any:
    """A value with its rows over axes of a mesh, or whole on each device: what XLA would split
    further it would join by collectives that not all stages take part in."""
    spec, pieces = jax.sharding.PartitionSpec, math.prod(mesh.shape[axis] for axis in rows)
    if pieces == 1:
        return value
    lies = spec(rows) if by_row and value.shape[0] % pieces == 0 else spec()
    return jax.lax.with_sharding_constraint(value, lies)


def runs_alone(sizes: Mapping[str, int], axis: str, rows: Collection[str]) -> bool:
    """Whether a mesh of these sizes splits nothing but stages and the rows of a batch."""
    return {name for name, size in sizes.items() if size > 1} <= {axis, *rows}
