"""A program as a pipeline: the same model, with its blocks stacked and its gradients by ticks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import BatchError, PipelineError
from ..jaxprs.row_sums import Meeting, Sum
from ..layouts.params import ParamInfo
from ..layouts.placement import Placement
from ..program import Arrays, Aux, Batch, Program, TrainState
from ..units import bytes_text
from ..warn import warn
from .apart import apart
from .cuts import line_cuts, sizes_of, warn_of_loop
from .deal import Deal
from .faults import check_callbacks, check_stages
from .line import Line
from .lookups import with_whole_lookups
from .loops import without_loops
from .notes import LossNote, TracedLoss, note_of_loss, notes_of
from .packing import Packing
from .parts import Blocks
from .pipeline import Pipeline
from .plan import TickPlan
from .running import Runner, Taken
from .segments import Segments
from .setting import Setting, runs_alone
from .shares import (
    LayerStages,
    StageShare,
    equal_shares,
    layers_of_blocks,
    layers_of_parts,
    unequal_shares,
    with_bytes,
)
from .stacking import Stacking
from .table import TickTable
from .traced import Traced
from .unequal import UnequalRunner

_FAR_LESS = 0.6  # of the FLOPs of the busiest stage, below which stages differ rather


@dataclass(frozen=True, eq=False)
class Staged:
    """A program cut into the stages of a pipeline under a placement.

    ``whole`` is the program over variables by their own paths, with right numbers as arrays are
    split in a stage; ``program`` is the same over stacks, with right numbers outside of stages.
    ``sent`` has the shapes of what a stage passes on of a micro-batch of the example, ``flops``
    those of its forward pass before the blocks, in one block, and after them; of stages that
    differ, all are the slowest one's.
    """

    whole: Program
    placement: Placement
    pipeline: Pipeline
    stacking: Stacking
    program: Program
    recompute_blocks: bool
    shares: tuple[StageShare, ...]
    dealt: Deal | tuple[int, ...]  # blocks to runs, or where a line of equations is cut
    sent: tuple[Any, ...] = ()
    flops: tuple[float, float, float] = (0.0, 0.0, 0.0)
    layers: tuple[LayerStages, ...] = ()
    of_cut: tuple[str, ...] = ()  # what to know of how it was cut
    may_share_loss: bool = False  # all stages may compute what comes after the blocks
    of_loss: Sum | Meeting | None = None  # what it is of the rows, where that is certain

    @classmethod
    def of(
        cls,
        program: Program,
        placement: Placement,
        pipeline: Pipeline,
        recompute_blocks: bool = False,
        guarded: Program | None = None,
    ) -> Staged:
        """With the steps of ``guarded``, if that is given, where no stages are taken.

        Raises :class:`PipelineError` with the reason where the program cannot be cut.
        """
        check_stages(program, placement, pipeline)
        assert program.example is not None
        micro = _micro(program.example, pipeline.micro_batches)
        count = pipeline.micro_batches
        traced = traced_of(program, placement, count, abstract_of(program), micro)
        check_callbacks(traced.closed, placement, pipeline.axis, "stages")
        cut, why = _cut(program, traced, placement, pipeline)
        may_share = False
        notes = () if why is None else (f"the stages differ: {why}",)
        if isinstance(cut, Segments):
            notes += notes_of(cut, placement, leaves_of(micro)[0][0].shape[0], count)
            layers = layers_of_parts(cut.params)
            stacking: Stacking = Packing.by_owner(program, placement, pipeline.axis, cut.owner)
            functions, dealt, shares = cut, cut.cuts, unequal_shares(cut)
            flops = 0.0, max(cut.flops), 0.0
        else:
            blocks, dealt = cut
            may_share = _may_share_loss(blocks, pipeline)
            wholes = {path: whole for path, (whole, _) in blocks.traced.entries.items()}
            rows = blocks.trained
            stacking = Stacking.of(program, placement, pipeline.axis, rows, dealt, wholes)
            functions, shares = blocks.functions, equal_shares(blocks, dealt)
            layers = layers_of_blocks(blocks, dealt)
            flops = blocks.functions.flops
        return cls(
            program,
            placement,
            pipeline,
            stacking,
            over_stacks(guarded or program, stacking),
            recompute_blocks,
            shares=with_bytes(shares, stacking),
            dealt=dealt,
            sent=tuple(var.aval for var in functions.enters),
            flops=flops,
            layers=layers,
            of_cut=notes,
            may_share_loss=may_share,
            of_loss=_loss_of(cut[0] if isinstance(cut, tuple) else cut).of_rows,
        )

    @property
    def ticks(self) -> TickTable | None:
        """What each stage does at each tick of a step, where stages take turns."""
        stages = self.placement.mesh[self.pipeline.axis]
        return self.pipeline.table(stages, self.shares_loss)

    @property
    def shares_loss(self) -> bool:
        """Whether all stages compute what comes after the blocks, each for its micro-batches."""
        return isinstance(self.dealt, Deal) and self.dealt.shares_loss

    @property
    def skips(self) -> bool:
        """Whether a stage leaves out what it has no work for."""
        placement = self.placement
        return runs_alone(dict(placement.mesh.axes), self.pipeline.axis, placement.batch_axes)

    @property
    def is_of_loop(self) -> bool:
        """Whether blocks are steps of the model's own loop over stacked weights."""
        return any(stack.is_whole for stack in self.stacking.params)

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """What was done in another way than it might have been, and why."""
        notes = self.of_cut
        if note := self._note_of_loss(self.whole.example, self._of_more):
            notes = (*notes, note.text)
        if not isinstance(self.dealt, Deal) or self.placement.rules is not None:
            return notes
        micro = _micro(self.whole.example, self.pipeline.micro_batches)

        def sums_often() -> bool:
            arguments = self.pipeline.micro_batches, abstract_of(self.whole), micro
            traced = traced_of(self.whole, self.placement, *arguments, in_context=True)
            blocks = _blocks(traced, self.placement, self.pipeline)
            return self._by_piece(blocks, micro) is None

        pieces = self.placement.batch_shards
        if pieces == 1 or leaves_of(micro)[0][0].shape[0] % pieces:
            return notes
        if not self.whole.under(self.placement, sums_often, whole=True)():
            return notes
        axes = ", ".join(self.placement.batch_axes)
        return (
            *notes,
            f"gradients of the blocks are summed over {axes} for every micro-batch, not once a "
            "step: rows do not go through a block each by itself, as where it draws random numbers",
        )

    def _note_of_loss(
        self, batch: Batch, of_more: Callable[[], Sum | Meeting | None] | None = None
    ) -> LossNote | None:
        count, reduction = self.pipeline.micro_batches, self.whole.reduction
        rows = leaves_of(batch)[0][0].shape[0] // count
        return note_of_loss(self.of_loss, max(1, rows), count, reduction, of_more)

    def _of_more(self) -> Sum | Meeting | None:
        """What the loss of a larger micro-batch is of the rows."""
        count = self.pipeline.micro_batches
        micro = _micro(self.whole.example, max(1, count // 2))
        traced = traced_of(self.whole, self.placement, count, abstract_of(self.whole), micro)
        try:
            if isinstance(self.dealt, Deal):
                return _loss_of(_blocks(traced, self.placement, self.pipeline)).of_rows
            return _loss_of(Segments(Line.of(traced), self.dealt)).of_rows
        except PipelineError:  # of another form for so many rows
            return None

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is cut into micro-batches: not one that is smaller than the example and
        does not divide, as the last batch of an epoch may be."""
        rows = leaves_of(batch)[0][0].shape[0]
        most = leaves_of(self.whole.example)[0][0].shape[0]
        return (
            rows >= most or rows % (self.pipeline.micro_batches * self.placement.batch_shards) == 0
        )

    def check_rows(self, batch: Batch) -> None:
        """Raises :class:`BatchError` for a batch that would be cut into micro-batches and does not
        divide into them."""
        rows = leaves_of(batch)[0][0].shape[0]
        least = self.pipeline.micro_batches * self.placement.batch_shards
        if rows % least and self.takes(batch):
            below = rows // least * least
            nearest = " and ".join(str(n) for n in (below, below + least) if n)
            raise BatchError(
                f"a batch of {rows} does not divide into {self._pieces_text}. The nearest sizes "
                f"that do: {nearest}."
            )

    def warn_of_none(self, rows: int) -> None:
        """Say what a step costs that takes a batch without stages."""
        kind = "branches" if self.ticks is None else "stages"
        placed = self.placement.place(self.whole.params)
        nbytes = 2 * sum(entry.bytes_per_device for entry in placed)
        warn(
            f"a batch of {rows} rows does not divide into {self._pieces_text}: its step takes no "
            f"{kind}. Each device gathers all weights and makes all gradients, "
            f"{bytes_text(nbytes)}. If that is too much, leave the last rows of the data out, or "
            "choose a batch size that divides the data."
        )

    @property
    def _pieces_text(self) -> str:
        count, pieces = self.pipeline.micro_batches, self.placement.batch_shards
        micros = f"micro_batches={count}" if self.ticks else ""
        over = f"{pieces} pieces of the batch" if pieces > 1 else ""
        return " over ".join(filter(None, (micros, over)))

    def gradients(self, whole: TrainState, batch: Batch) -> Taken:
        """The gradients of a step of a state with stacks; inside a traced function.

        Raises :class:`BatchError` for a batch that does not divide into micro-batches.
        """
        micros = self._micros(batch)
        if (note := self._note_of_loss(batch)) and note.is_sum:
            warn(f"{note.text}.")
        shapes, tree = abstract_of(self.whole), leaves_of(batch)[1]
        micro = tree.unflatten([shape_of(leaf.shape[1:], leaf.dtype) for leaf in micros])
        pipeline, placement = self.pipeline, self.placement
        count = pipeline.micro_batches
        traced = traced_of(self.whole, placement, count, shapes, micro, in_context=True)
        if isinstance(self.dealt, tuple):
            return self._unequal(traced, self.dealt)(whole, micros)
        deal, blocks = self.dealt, _blocks(traced, placement, pipeline)
        stacks = {stack.members: stack.info.path for stack in self.stacking.params}
        order = [block for block in deal.places if block is not None]
        is_same = blocks.count == deal.count
        paths = [
            stacks.get(tuple(filter(None, (row[block] for block in order))))
            for row in blocks.trained * is_same
        ]
        if None in paths or len(paths) != len(stacks):
            raise self.is_other()
        setting = self._setting(blocks, deal, self._by_piece(blocks, micro))
        own = tuple(path for path in paths if path is not None)
        return Runner(setting, own, placement.mesh.platform)(whole, micros)

    def _unequal(self, traced: Traced, cuts: tuple[int, ...]) -> Runner:
        segments, packing = Segments(Line.of(traced), cuts), self.stacking
        assert isinstance(packing, Packing)
        if segments.owner != packing.owner:
            raise self.is_other()
        setting = self._setting(segments, Deal(segments.count, 1, (1,) * segments.count), None)
        return UnequalRunner(setting, (), None, packing, segments)

    def is_other(self) -> PipelineError:
        """What is raised for a batch by which the program is another one."""
        return PipelineError(
            f"program {self.whole.name!r} has other layers for this batch than for the example "
            "that it was cut by. Give an example with the shapes that are trained on."
        )

    def _setting(self, blocks: Blocks | Segments, deal: Deal, by_piece: Blocks | None) -> Setting:
        pipeline, placement = self.pipeline, self.placement
        table = pipeline.table(placement.mesh[pipeline.axis], deal.shares_loss)
        return Setting(
            blocks=blocks,
            deal=deal,
            by_piece=by_piece,
            plan=TickPlan.of(table, keeps_results=not pipeline.does_remat),
            mesh=placement.mesh.jax_mesh,
            axis=pipeline.axis,
            rows=placement.batch_axes,
            recompute=pipeline.does_remat,
            recompute_blocks=self.recompute_blocks,
            unrolls=deal.most == 1,
            takes_mean=self.whole.reduction == "mean",
            logs_of_one=self.whole.logs == "of one batch",
            by_rules=placement.rules is not None,
        )

    def _by_piece(self, blocks: Blocks, micro: Batch) -> Blocks | None:
        """The blocks for the rows of one piece of a micro-batch, if rows leave each other alone."""
        pieces = self.placement.batch_shards
        leaves, tree = leaves_of(micro)
        if pieces == 1:
            return None
        rows = leaves[0].shape[0] // pieces
        less = tree.unflatten([shape_of((rows, *leaf.shape[1:]), leaf.dtype) for leaf in leaves])
        try:
            whole = abstract_of(self.whole)
            count, placement = self.pipeline.micro_batches, self.placement
            if placement.rules is not None:  # the rows of a piece are not split further
                free = [axis for axis, _ in placement.mesh.axes if axis not in placement.batch_axes]
                rules = placement.rules.on(free)
                placement = replace(placement, rules=rules, batch=None, zero=0)
            ruled = placement.rules is not None
            traced = traced_of(self.whole, placement, count, whole, less, in_context=not ruled)
            few = _blocks(traced, self.placement, self.pipeline)
        except PipelineError:  # of another form for so few rows
            return None
        return few if apart(few, blocks, pieces) else None

    def _micros(self, batch: Batch) -> list[Any]:
        """The leaves of a batch with a dim of micro-batches in front, in the order of its rows.

        Rows travel to the devices of their micro-batch, so that what is drawn for a row by its
        place in the batch is the same on every mesh.
        """
        count = self.pipeline.micro_batches
        leaves, _ = leaves_of(batch)
        rows = leaves[0].shape[0]
        self.check_rows(batch)
        spec, axes = jax.sharding.PartitionSpec, self.placement.batch_axes
        mesh = self.placement.mesh.jax_mesh

        def cut(leaf: Any) -> Any:
            micros = leaf.reshape(count, rows // count, *leaf.shape[1:])
            free = [spec.UNCONSTRAINED] * (leaf.ndim - 1)
            lies = jax.sharding.NamedSharding(mesh, spec(None, axes or None, *free))
            return jax.lax.with_sharding_constraint(micros, lies)

        return [cut(leaf) for leaf in leaves]


def traced_of(
    program: Program,
    placement: Placement,
    micro_batches: int,
    whole: TrainState,
    micro: Batch,
    in_context: bool = False,
) -> Traced:
    """The loss of a micro-batch; in the program's context unless that is entered already."""

    def trace() -> Traced:
        try:
            traced = Traced.of(program, whole, micro, 1 / micro_batches)
        except Exception as error:
            if micro_batches > 1:
                error.add_note(_of_micro_batch(micro, micro_batches))
            raise
        traced = with_whole_lookups(traced, program, placement)
        written = map(without_loops, itertools.chain([traced], traced.without_calls()))
        return replace(traced, written_out=next(filter(None, written), None))

    return trace() if in_context else program.under(placement, trace, whole=True)()


def _of_micro_batch(micro: Batch, count: int) -> str:
    rows = leaves_of(micro)[0][0].shape[0]
    return (
        f"This happened in a micro-batch of the pipeline: {rows} of {count * rows} rows. If the "
        "loss needs the whole batch, as a loss of pairs of rows does, use micro_batches=1, or "
        "all devices for the batch."
    )


def looped_over(program: Program, placement: Placement) -> tuple[str, ...]:
    """Paths of the stacked weights that a program goes through in a loop; it has an example."""
    assert program.example is not None
    micro = _micro(program.example, 1)
    written = traced_of(program, placement, 1, abstract_of(program), micro).written_out
    return tuple(sorted({whole for whole, _ in written.entries.values()})) if written else ()


def _cut(
    program: Program, traced: Traced, placement: Placement, pipeline: Pipeline
) -> tuple[Segments | tuple[Blocks, Deal], str | None]:
    """Equal blocks if there are any, else stages that differ; these too where few blocks are equal
    and the others would leave one stage with most of the work. And why stages differ, if so."""
    try:
        blocks = _blocks(traced, placement, pipeline)
        deal = _deal(program, blocks, placement, pipeline)
        better = _better(program, blocks, deal, placement, pipeline)
        if better is None:
            return (blocks, deal), None
        return better, f"with the {blocks.count} equal blocks one would have far more to do"
    except PipelineError as error:
        try:
            return _segments(program, traced, placement, pipeline), str(error).partition(". ")[0]
        except PipelineError as other:
            if str(other) == str(error):
                raise
            raise PipelineError(
                f"{error}\nNor can it be cut into stages that differ: {other}"
            ) from None


def _better(
    program: Program, blocks: Blocks, deal: Deal, placement: Placement, pipeline: Pipeline
) -> Segments | None:
    """Stages that differ, where the busiest has far less to do than that of equal blocks."""
    before, block, after = flops = blocks.functions.flops
    share = after / deal.stages * deal.shares_loss
    enough = _FAR_LESS * (deal.tick_flops(flops) + share)
    even = (before + block * blocks.count + after) / deal.stages
    if pipeline.cuts is not None or even >= enough or blocks.largest_flops >= enough:
        return None
    try:
        segments = _segments(program, blocks.traced, placement, pipeline)
    except PipelineError:
        return None
    return segments if max(segments.flops) < enough else None


def _loss_of(cut: Blocks | Segments) -> TracedLoss:
    """The loss of what the last block makes; of stages that differ, of the batch, and nothing of it
    beside statistics that are a micro-batch's, of which there is a note."""
    if isinstance(cut, Segments):
        traced, begins = cut.traced, list[Any]()
        eqns = [] if cut.line.statistics else traced.closed.jaxpr.eqns
    else:
        traced, begins = cut.traced, list(cut.functions.leaves)
        eqns = cut.functions.loss_equations
    of_batch = [var for var, (part, _) in traced.arguments.items() if part == "batch"]
    return TracedLoss(eqns, [*begins, *of_batch], traced.loss)


def _segments(
    program: Program, traced: Traced, placement: Placement, pipeline: Pipeline
) -> Segments:
    stages, faults = placement.mesh[pipeline.axis], list[str]()
    if pipeline.schedule not in ("gpipe", "1f1b"):
        faults.append(f"schedule={pipeline.schedule!r} needs stages of equal blocks; use '1f1b'.")
    beside = {axis for axis, size in placement.mesh.axes if size > 1}
    beside -= {pipeline.axis, *placement.batch_axes}
    if beside:
        faults.append(
            f"axis {min(beside)!r} splits more than the rows of a batch, which needs equal blocks. "
            f"Give it to the batch, batch={[*placement.batch_axes, min(beside)]!r}."
        )
    if placement.zero:
        faults.append(
            f"zero={placement.zero} needs equal blocks; leave it out: each stage holds the slots "
            "of its own weights alone."
        )
    if faults:
        raise PipelineError(" ".join(faults))
    line, on_cpu = Line.of(traced), placement.mesh.platform == "cpu"
    if pipeline.cuts is None:
        warn_of_loop(line, stages)
        return Segments(line, tuple(line.best_cuts(stages, on_cpu)))
    if len(pipeline.cuts) != stages - 1:
        raise PipelineError(
            f"{stages} stages need {stages - 1} cuts; received {list(pipeline.cuts)}."
        )
    return Segments(line, line_cuts(line, pipeline.cuts, weights_of(program, traced), on_cpu))


def weights_of(program: Program, traced: Traced) -> tuple[ParamInfo, ...]:
    """The parameters of a program, and its state that no step changes, as frozen weights."""
    return (*program.params, *(info for info in program.state if info.path in traced.fixed))


def _blocks(traced: Traced, placement: Placement, pipeline: Pipeline) -> Blocks:
    """The equal blocks of a loss, in the first form of it that has any."""
    least, errors = placement.mesh[pipeline.axis] * pipeline.repeats, list[PipelineError]()
    for form in _forms(traced):
        try:
            return Blocks.of(form, least)
        except PipelineError as error:
            errors.append(error)
    raise errors[0]


def _forms(traced: Traced) -> Iterator[Traced]:
    """The loss in all forms in which its blocks may be equal, those that cost least first."""
    forms = list[Traced]()
    before = filter(None, (traced.written_out, traced))
    for form in itertools.chain(before, traced.without_calls()):
        for as_read in (form, form.with_little_first()):
            forms.append(as_read)
            yield as_read
    yield from filter(None, (form.with_gathered_results() for form in forms))


def _deal(program: Program, blocks: Blocks, placement: Placement, pipeline: Pipeline) -> Deal:
    """Which blocks each stage gets: as a person cuts the model, or those of the shortest tick."""
    stages, repeats = placement.mesh[pipeline.axis], pipeline.repeats
    skips = runs_alone(dict(placement.mesh.axes), pipeline.axis, placement.batch_axes)
    flops, count = blocks.functions.flops, blocks.count
    may_share = _may_share_loss(blocks, pipeline)
    if blocks.are_of_loop:
        _check_loop(count, placement, pipeline)
        even = Deal.even(count, stages)
        return even.or_shared(even, flops, skips, pipeline.micro_batches) if may_share else even
    if pipeline.cuts is None and may_share:
        return Deal.fastest(count, stages, repeats, flops, skips, pipeline.micro_batches)
    if pipeline.cuts is None:
        return Deal.best(count, stages, repeats, flops, skips)
    sizes = sizes_of(pipeline.cuts, blocks.begins, weights_of(program, blocks.traced))
    if sizes is None:
        first = ", ".join(blocks.begins[:3])
        raise PipelineError(
            f"cuts={list(pipeline.cuts)}: a pipeline of equal blocks is cut between two of them. "
            f"The model's {blocks.count} blocks begin with {first}, ..."
        )
    if len(sizes) != stages * repeats:
        raise PipelineError(
            f"{stages} stages{f' x {repeats} repeats' * (repeats > 1)} need "
            f"{stages * repeats - 1} cuts; received {list(pipeline.cuts)}."
        )
    deal = Deal(stages, repeats, sizes)
    return deal.or_shared(deal, flops, skips, pipeline.micro_batches) if may_share else deal


def _check_loop(count: int, placement: Placement, pipeline: Pipeline) -> None:
    """Raises :class:`PipelineError` where stages would not have the layers of a loop in order."""
    stages, faults = placement.mesh[pipeline.axis], list[str]()
    if count % stages:
        faults.append(f"{count} layers do not divide over {stages} stages.")
    if pipeline.repeats > 1:
        faults.append(f"repeats={pipeline.repeats} is not supported.")
    if pipeline.cuts is not None:
        faults.append("cuts= is not supported: each stage has the same number of layers.")
    if faults:
        raise PipelineError(
            f"the layers are a loop over stacked weights: {' '.join(faults)} Write them one after "
            "the other to deal them otherwise."
        )


def _may_share_loss(blocks: Blocks, pipeline: Pipeline) -> bool:
    return pipeline.schedule != "zero_bubble" and blocks.functions.measures_little


def over_stacks(program: Program, stacking: Stacking) -> Program:
    """The program over stacks, for all but training steps: blocks are taken out of their stacks."""

    def unstack(params: Arrays) -> Arrays:
        return stacking.unstack(TrainState(params, {}, {}, {})).params

    def forward(params: Arrays, state: Arrays, inputs: Any, training: bool) -> tuple[Any, Arrays]:
        return program.forward(unstack(params), state, inputs, training)

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        return program.loss(unstack(params), stacking.unstack(whole), batch, training)

    def predict(params: Arrays, state: Arrays, batch: Batch) -> tuple[Any, Arrays]:
        assert program.predict is not None  # or this is not used
        return program.predict(unstack(params), state, batch)

    def own_test_step(whole: TrainState, batch: Batch) -> Any:
        assert program.own_test_step is not None
        new, logs = program.own_test_step(stacking.unstack(whole), batch)
        return whole._replace(state=new.state, metrics=new.metrics), logs

    params, state, slots, metrics = stacking.infos
    return replace(
        program,
        params=params,
        state=state,
        slots=slots,
        metrics=metrics,
        initial=lambda: stacking.stack(program.initial()),
        forward=forward,
        loss=loss,
        update=stacking.update(program),
        predict=program.predict and predict,
        own_test_step=program.own_test_step and own_test_step,
    )


def abstract_of(program: Program) -> TrainState:
    return TrainState(
        *({i.path: shape_of(i.dims, jnp.dtype(i.dtype)) for i in part} for part in program.parts)
    )


def _micro(example: Batch, count: int) -> Batch:
    """The shapes of a micro-batch; of an example that is too small, of one row."""
    leaves, tree = leaves_of(example)
    rows = max(1, leaves[0].shape[0] // count)

    def micro(leaf: Any) -> Any:
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        dtype = leaf.dtype if is_key else jax.dtypes.canonicalize_dtype(leaf.dtype)
        return shape_of((rows, *leaf.shape[1:]), dtype)

    return tree.unflatten(map(micro, leaves))


def leaves_of(batch: Batch) -> tuple[Sequence[Any], Any]:
    """The arrays of a batch; raises :class:`BatchError` for one without rows."""
    leaves, tree = jax.tree.flatten(batch)
    rows = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(rows) != 1 or None in rows:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise BatchError(
            "a pipeline cuts batches along their rows, the first dim of every array; received "
            f"arrays of {shapes or 'no shape'}."
        )
    return leaves, tree


def shape_of(dims: Sequence[int], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(dims), dtype)
