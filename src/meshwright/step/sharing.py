"""What ZeRO does within a step: parameters gathered where they are used, updates made in pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from ..jaxprs.blocks import has_blocks
from ..jaxprs.edits import Edit, unchanged
from ..jaxprs.row_parts import Pieces, in_parts, scatter_parts, sum_narrow, sum_parts
from ..jaxprs.takes import as_slices
from ..layouts.layout import Layout
from ..layouts.params import ParamInfo
from ..layouts.placement import Placement
from ..program import Arrays, Aux, Batch, Program, TrainState
from .backward_order import leaving_in_turn
from .compression import UNSENT, loss_scale, sum_compressed
from .gradient import Gradient
from .layer_gathers import Spread, gathering_by_layers
from .loop_scatters import scattering_in_loops
from .own_checkpoints import with_own_checkpoints
from .platform import traced_for, traced_for_gpu
from .remat import BY_BLOCK, blocks, policy_of, recomputing, with_blocks
from .remat_stretches import Cut, Equations, Stretch, but_gathered, gathered, in_stretches
from .summing import GradientSum, sum_flat, way_of


@dataclass(frozen=True, eq=False)
class Sharing:
    """How parameters lie while they are used (``whole``) and while they are updated (``shared``).

    Both map paths to :class:`~meshwright.Layout`; ``level`` is that of ZeRO, ``mesh`` and ``axes``
    say over what the rows of a batch are split. Without ZeRO, gradients are summed ``by`` flat
    vectors, or where it is ``None`` as XLA sums them. ``by_block`` says whether blocks are computed
    again one by one.
    """

    level: int
    whole: dict[str, Any]
    shared: dict[str, Any]
    mesh: Any = None
    axes: tuple[str, ...] = ()
    by: GradientSum | None = None
    by_block: bool = False

    @property
    def pieces(self) -> int:
        """Into how many pieces the rows of a batch are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def layouts(self) -> list[tuple[Layout, Layout]]:
        """How parameters lie while they are used and while they are updated, by sorted paths."""
        return [(self.whole[path], self.shared[path]) for path in sorted(self.whole)]

    @classmethod
    def none(cls) -> Sharing:
        """Nothing is shared out."""
        return cls(0, {}, {})

    @classmethod
    def of(
        cls,
        placement: Placement,
        params: tuple[ParamInfo, ...],
        sums: Any = None,
        remat: str = "none",
    ) -> Sharing:
        """What the placement's level of ZeRO means for these parameters.

        ``sums`` and ``remat`` are options of a step. Raises :class:`~meshwright.LayoutError` where
        gradients cannot be summed so.
        """

        def layouts(level: int) -> dict[str, Any]:
            placed = placement.with_zero(level).place(params)
            return {entry.info.path: entry.layout for entry in placed}

        mesh, axes = placement.mesh.jax_mesh, placement.batch_axes
        shared = layouts(3 if placement.zero else 0)
        by, by_block = way_of(sums, placement), remat in BY_BLOCK
        return cls(placement.zero, layouts(0), shared, mesh, axes, by, by_block)

    def gather(self, params: Arrays) -> Arrays:
        """The parameters as they are used; at level 3 each is gathered from all replicas."""
        if self.level < 3:
            return params
        return {
            path: value
            if self.whole[path] == self.shared[path]
            else gathered(value, self.whole[path].sharding, self.shared[path].sharding)
            for path, value in params.items()
        }

    def share(self, values: Arrays) -> Arrays:
        """Gradients, or parameters, in the pieces that each replica updates."""
        return values if self.level == 0 else with_shardings(values, shardings_of(self.shared))

    def gradients(
        self, gradient: Gradient, whole: TrainState, batch: Batch
    ) -> tuple[Aux, Arrays, Arrays]:
        """The gradients of one batch, and slots of the sum; at levels 1 and 2 of ZeRO pieces.

        They travel in the type they are computed in, as without ZeRO.
        """
        if self.level in (1, 2) or self.by is not None or self._leaves_in_turn:
            gradient = self.in_parts(gradient, batch, narrow=True)
        gradient = self.leaving_in_turn(gradient)
        aux, grads = gradient(whole.params, whole, batch)
        if self.by is None or self.by.compress is None:
            return aux, self.summed(grads, whole.params), {}
        parts = {path: g for path, g in grads.items() if g.ndim > whole.params[path].ndim}
        slot = next(path for path in whole.slots if path.endswith(UNSENT))
        scale, how = loss_scale(whole.slots), self.by.compress
        before = whole.slots[slot] * scale  # kept without it, for it changes between steps
        sums, unsent = sum_compressed(parts, whole.params, before, self.mesh, self.axes, how)
        sums = {path: value.astype(whole.params[path].dtype) for path, value in sums.items()}
        return aux, {**grads, **sums}, {slot: unsent / scale}

    def in_parts(
        self, gradient: Gradient, batch: Batch, times: int = 0, narrow: bool = False
    ) -> Gradient:
        """The gradient with a part per piece of this batch in place of each sum over its rows.

        ``times`` says how many such batches there are, if their rows may be kept till then;
        ``narrow`` leaves parts in the type they are computed in.
        """
        pieces = Pieces(self.mesh, self.axes, _rows(batch), times, narrow)
        return in_parts(self.in_loops(gradient), pieces)

    def in_loops(self, gradient: Gradient) -> Gradient:
        """The gradient whose loops over layers sum that of each to what will be updated; at level 3
        they do so where they gather parameters."""
        if self.level not in (1, 2):
            return gradient
        return scattering_in_loops(gradient, self.layouts, self.axes)

    @property
    def _leaves_in_turn(self) -> bool:
        """Whether the backward pass is to leave one block after the other."""
        return self.by_block and self.level < 3 and traced_for_gpu()

    def leaving_in_turn(self, gradient: Gradient) -> Gradient:
        """The gradient, in parts or not, that leaves one block after the other where it saves
        memory; at level 3 that is where parameters are gathered, see ``_cut_for``."""
        return leaving_in_turn(gradient, self.pieces > 1) if self._leaves_in_turn else gradient

    def summed(self, grads: Arrays, params: Arrays) -> Arrays:
        """Gradients that may be in parts, summed over devices to what will be updated."""
        flat: Arrays = {}
        if self.by is not None:
            parts = {path: g for path, g in grads.items() if g.ndim > params[path].ndim}
            sums = sum_flat(parts, self.mesh, self.axes, self.by)
            flat = {path: total.astype(params[path].dtype) for path, total in sums.items()}
        return {
            path: flat[path] if path in flat else self._sum(path, grad, params[path])
            for path, grad in grads.items()
        }

    def _sum(self, path: str, gradient: Any, param: Any) -> Any:
        """A gradient of this parameter, maybe in parts: summed to what will be updated."""
        ndim = param.ndim
        if gradient.ndim > ndim and not self.level and gradient.dtype != param.dtype:
            return sum_narrow(gradient).astype(param.dtype)
        if gradient.ndim == ndim or not self.level:
            return sum_parts(gradient, ndim)
        lies = [self.whole[path].dim_axes(dim) for dim in range(ndim)]
        shared = [self.shared[path].dim_axes(dim) for dim in range(ndim)]
        split = [dim for dim in range(ndim) if shared[dim] == (*lies[dim], *self.axes)]
        if not split:
            return sum_parts(gradient, ndim).astype(param.dtype)
        with jax.named_scope(path):  # what a dry run calls the collective
            pieces = scatter_parts(gradient, self.mesh, self.axes, split[0], lies)
        return pieces.astype(param.dtype)

    def accumulate(self, grads: Arrays) -> Arrays:
        """Gradients while they are accumulated: in pieces from level 2 on."""
        return self.share(grads) if self.level >= 2 else grads

    def part(self, value: Any, ndim: int) -> Any:
        """A gradient that may be in parts, in its layout; see ``row_parts.py``."""
        if value.ndim == ndim:
            return value
        spec = jax.sharding.PartitionSpec
        free = [spec.UNCONSTRAINED] * ndim
        lies = jax.sharding.NamedSharding(self.mesh, spec(self.axes, *free))
        return jax.lax.with_sharding_constraint(value, lies)

    def keep(self, params: Arrays) -> Arrays:
        """Updated parameters as they are kept from one step to the next."""
        if self.level in (1, 2):
            return with_shardings(params, shardings_of(self.whole))
        return self.share(params)


def shared(program: Program, sharing: Sharing, remat: str = "none") -> Program:
    """The program with ZeRO, recomputed as ``remat`` says: the same numbers, and less on a device.

    At level 3 a parameter is gathered when the operations that use it can begin, and lives no
    longer than they: it is not kept for the backward pass but gathered again there, as PyTorch's
    FSDP does.
    """
    if sharing.level < 3:
        program = recomputing(program, remat)
    if sharing.level == 0:
        return program

    def gathering(predict: Callable[..., Any]) -> Callable[..., Any]:
        def by_pieces(params: Arrays, state: Arrays, inputs: Any, *modes: bool) -> Any:
            def of_pieces(params: Arrays, state: Arrays, inputs: Any) -> Any:
                return predict(sharing.gather(params), state, inputs, *modes)

            return _in_turn(sharing, of_pieces, where_read)(params, state, inputs)

        return by_pieces

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        def of_pieces(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
            return program.loss(sharing.gather(params), whole, batch, training)

        edit = with_own_checkpoints if remat == "none" else unchanged
        return _in_turn(sharing, of_pieces, _cut_for(remat), edit, remat)(params, whole, batch)

    def update(params: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
        new, new_slots = program.update(sharing.share(params), sharing.share(grads), slots)
        return sharing.keep(new), new_slots

    return replace(
        program,
        forward=gathering(program.forward),
        predict=program.predict and gathering(program.predict),
        loss=loss,
        update=update,
    )


def _rows(batch: Batch) -> int:
    """The rows that are computed; none where no array of the batch has dims."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim), 0)


def shardings_of(layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """What JAX places arrays by, for each layout by path."""
    return {path: layout.sharding for path, layout in layouts.items()}


def with_shardings(
    values: Arrays, shardings: Mapping[str, Any], before: Arrays | None = None
) -> Arrays:
    """The values, each with its sharding; one that is still that of ``before`` is left as it is.

    Micro-batches are computed side by side only where a program hands its state on untouched.
    """
    before = before or {}
    return {
        path: value
        if value is before.get(path)
        else jax.lax.with_sharding_constraint(value, shardings[path])
        for path, value in values.items()
    }


def _in_turn(
    sharing: Sharing,
    function: Callable[..., Any],
    cut: Cut,
    edit: Edit = unchanged,
    remat: str = "none",
) -> Callable[..., Any]:
    if sharing.level < 3:
        return function
    policy = but_gathered(jax.checkpoint_policies.everything_saveable)

    def by_layers(jaxpr: Any, params: Sequence[Any]) -> tuple[Any, list[Spread]]:
        by_var = dict(zip(params, sharing.layouts, strict=True))
        jaxpr = with_blocks(jaxpr) if remat in BY_BLOCK else jaxpr

        def keeps(loop: Any) -> Any:  # a loop whose blocks are computed again gathers again, too
            return None if remat in BY_BLOCK and has_blocks(loop) else policy

        return gathering_by_layers(jaxpr, by_var, sharing.axes, keeps)

    def with_slices(jaxpr: Any) -> Any:
        return as_slices(edit(jaxpr))

    return in_stretches(function, cut, with_slices, by_layers, writes_out=True)


def _cut_for(remat: str) -> Cut:
    """How a step is cut at level 3, where parameters are gathered and parts recomputed at once."""
    if remat in BY_BLOCK:
        # XLA for TPU puts off products for gradients where it takes them in a ring of devices; it
        # would hold what they read of all blocks, which is what "selective" keeps and more. XLA for
        # GPU puts them off anyway.
        on_tpu = remat == "selective" and traced_for() == "tpu"
        return also_between(blocks(remat), on_tpu or traced_for_gpu())
    return where_read if remat == "none" else from_one_to_the_next(policy_of(remat))


# Where a step of level 3 gathers parameters: where they are read, one after the other. Left to
# itself, XLA may gather all parameters before the first layer: none of it waits for anything. So
# each run of equations that read a gathered parameter is a stretch of its own, which gathers when
# what it computes with is there, and again in the backward pass when the gradient has come.

_NEAR = 24  # equations between two that read one parameter, so that it is gathered once for both


def where_read(traced: Equations, within: range | None = None) -> list[Stretch]:
    """A stretch for each parameter, or for several that are read among each other."""
    policy = but_gathered(jax.checkpoint_policies.everything_saveable)
    joined: list[Stretch] = []
    for start, end in sorted(_runs(traced, within or range(len(traced.rest)))):
        if joined and start < joined[-1].end:
            joined[-1] = replace(joined[-1], end=max(end, joined[-1].end))
        else:
            joined.append(Stretch(start, end, policy, in_turn=True))
    return joined


def from_one_to_the_next(policy: Callable[..., Any]) -> Cut:
    """All of a function in stretches, each of which begins where a parameter is gathered."""

    def cut(traced: Equations) -> list[Stretch]:
        starts = [0, *(stretch.start for stretch in where_read(traced)[1:]), len(traced.rest)]
        return [
            Stretch(start, end, but_gathered(policy), in_turn=True)
            for start, end in itertools.pairwise(starts)
        ]

    return cut


def also_between(cut: Cut, at_once: bool = False) -> Cut:
    """The stretches of ``cut``, and between them those where parameters are read."""

    def both(traced: Equations) -> list[Stretch]:
        stretches = [replace(s, in_turn=True, at_once=at_once) for s in cut(traced)]
        ends = [0, *(stretch.end for stretch in stretches)]
        starts = [*(stretch.start for stretch in stretches), len(traced.rest)]
        free = [range(*pair) for pair in zip(ends, starts, strict=True) if pair[0] < pair[1]]
        between = [stretch for part in free for stretch in where_read(traced, part)]
        return sorted([*stretches, *between], key=lambda stretch: stretch.start)

    return both


def _runs(traced: Equations, within: range) -> Iterator[tuple[int, int]]:
    read: dict[Any, list[int]] = {}
    for number in within:
        for var in traced.gathered(traced.rest[number]):
            read.setdefault(var, []).append(number)
    for numbers in read.values():
        start = before = numbers[0]
        for number in numbers[1:]:
            if number - before > _NEAR:
                yield start, before + 1
                start = number
            before = number
        yield start, before + 1
