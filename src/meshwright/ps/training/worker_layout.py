"""How a worker's step lies on the worker's own devices, as the worker's strategy says.

The coordinator needs none of these devices: the step is traced and exported for the same mesh
without devices, and a worker runs it on the mesh that it makes of its own (see ``devices.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import keras

from ...data.putter import Putter, row_count
from ...equal_layers import merged
from ...errors import ModelError
from ...frontends.keras.batches import putter
from ...frontends.keras.program import KerasVariables, steps_of, take_constants_off_meshes
from ...frontends.keras.rowwise import RowWise
from ...layouts.layout_map import Finder
from ...layouts.mesh import Mesh
from ...layouts.params import ParamInfo, Placed
from ...layouts.placement import Placement
from ...layouts.strict import inspect
from ...program import Batch, Program
from ...stages.branches import Branches
from ...stages.pipeline import Pipeline
from ...step.assemble import Assembly, assemble
from ...step.padding import Padded
from ...warn import warn
from .exported import Filling

if TYPE_CHECKING:
    from ...frontends.keras.sharded import Sharded
    from .gradients import Parts

_PIECES = 2  # from this level of ZeRO on, gradients are summed in the pieces that are updated


@dataclass(frozen=True, eq=False)
class WorkerLayout:
    """The shardings of a step's arrays, on a mesh without devices.

    ``arrays`` holds those of parameters, state and slots by path, ``gradients`` those in which
    gradients leave the step; ``put`` knows those of batches, and ``row_wise`` whether their rows
    leave each other alone. ``around`` puts a function under the strategy while it is traced, as
    ``context`` does, and ``mesh`` is what workers make theirs like. With a ``pipeline`` gradients
    are taken by its stages; ``strategy`` is without it.
    """

    mesh: Mesh
    arrays: Mapping[str, Any]
    gradients: Mapping[str, Any]
    put: Putter
    row_wise: RowWise
    around: Callable[[Callable[..., Any]], Callable[..., Any]]
    strategy: Sharded
    context: Callable[..., Any] | None = None
    pipeline: Pipeline | Branches | None = None

    @property
    def whole(self) -> Any:
        """The sharding of what every device has whole."""
        return self._sharding()

    def arguments(
        self,
        parts: Parts,
        rows: Sequence[str],
        positions: Sequence[Any],
        batch: Batch,
        filling: Filling | None,
    ) -> tuple[Any, ...]:
        """What lies how of the arguments of :meth:`StepFunctions.gradients`, in their order.

        ``rows`` names tables of which it takes rows, ``positions`` are shapes. A batch that does
        not divide is filled up, or whole on every device.
        """
        layouts = jax.tree.leaves(self.put.layouts(batch))
        if filling is not None:
            layouts = [layout for _, layout in self.put.layouts.padded(batch)]
        leaves = [layout.sharding for layout in layouts]
        num_rows, along = jax.tree.leaves(batch)[0].shape[:1], leaves[0].spec[:1]
        return (
            self._of(parts.params),
            self._of(parts.moving),
            self._of(parts.frozen),
            self._of(parts.seeds),
            dict.fromkeys(rows, self.whole),
            [self._sharding(*along) if p.shape[:1] == num_rows else self.whole for p in positions],
            leaves,
        )

    def returned(self, parts: Parts) -> tuple[Any, ...]:
        """The same of its results."""
        gradients = {path: self.gradients[path] for path in parts.params}
        moves, seeds = self._of(parts.moving), self._of(parts.seeds)
        return gradients, self.whole, moves, seeds, self.whole, self.whole

    def local(
        self, parts: Parts, slots: Iterable[str], batch: Batch, filling: Filling | None
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arguments of :meth:`StepFunctions.local`, and its results, which lie as they did."""
        params, moving, frozen, seeds, *_, leaves = self.arguments(parts, (), (), batch, filling)
        of_slots = self._of(slots)
        arguments = params, moving, frozen, seeds, of_slots, leaves
        return arguments, (params, moving, seeds, of_slots, self.whole, self.whole)

    def row_shards(self, batch: Batch) -> int:
        """Into how many pieces the rows of such batches are cut, where they divide."""
        one = jax.tree.map(lambda v: jax.ShapeDtypeStruct((1, *v.shape[1:]), v.dtype), batch)
        return self.put.padded_rows(one)

    def filling(self, batch: Batch) -> Filling | None:
        """How a batch is filled up that does not divide; ``None`` if it is taken as it is."""
        rows = row_count(batch)
        alike = {leaf.shape[:1] for leaf in jax.tree.leaves(batch)} == {(rows,)}
        if not isinstance(rows, int) or not alike or rows % self.row_shards(batch) == 0:
            return None
        padded = self.put.padded_rows(batch)
        if any(self.row_wise.why_not(kind, batch, rows, padded) for kind in ("train", "test")):
            return None
        return Filling(padded, tuple(grows for grows, _ in self.put.layouts.padded(batch)))

    def padded(self, filled: Batch, batch: Batch) -> Padded:
        """A filled batch, of which the rows of ``batch`` count."""
        return Padded(filled, row_count(batch), self.strategy.mesh.jax_mesh)

    def warn_of_rows(self, batch: Batch) -> None:
        """Say what becomes of batches that do not divide, where the first one is so."""
        shards, rows = self.row_shards(batch), row_count(batch)
        if rows % shards:
            filling, below = self.filling(batch), rows // shards * shards
            becomes = (
                f"each is padded to {filling.rows}" if filling else "every device computes all rows"
            )
            warn(
                f"batches of {rows} rows do not divide over {shards} devices of a worker, so "
                f"{becomes}. Results are the same, but steps are slower. Use batches of "
                f"{f'{below} or ' if below else ''}{below + shards} rows."
            )

    def step(self, program: Program) -> Assembly:
        """The step there: guarded, recomputed, and shared out by ZeRO."""
        named = replace(program, label=self.put.layouts.label)
        return assemble(named, self.strategy.placement, self.strategy.how)

    def stages(self, program: Program, example: Batch) -> Assembly | None:
        """The step by the stages of the pipeline, if there is one; ``example`` is a batch, or its
        shapes. Raises :class:`~meshwright.PipelineError` for what cannot be cut."""
        if self.pipeline is None:
            return None
        label, how = self.put.layouts.label, replace(self.strategy.how, pipeline=self.pipeline)
        named = replace(program, label=label, context=self.context, example=example)
        return assemble(named, self.strategy.placement, how)

    def _of(self, paths: Iterable[str]) -> dict[str, Any]:
        return {path: self.arrays[path] for path in paths}

    def _sharding(self, *along: Any) -> Any:
        spec = jax.sharding.PartitionSpec(*along)
        return jax.sharding.NamedSharding(self.strategy.mesh.jax_mesh, spec)


def worker_layout(
    worker: Sharded, model: keras.Model, variables: KerasVariables, tables: Sequence[str]
) -> WorkerLayout:
    """How a model's step lies by the strategy of a worker; ``tables`` travel by rows.

    Raises :class:`~meshwright.PlacementError` for patterns that match nothing and variables that
    cannot be laid out so, and :class:`~meshwright.ModelError` for rules of such tables.
    """
    here = worker if worker.mesh.is_abstract else worker.on(worker.mesh.abstract())
    placement, pipeline = here.placement, worker.how.pipeline
    here = here.from_placement(placement, replace(here.how, pipeline=None))
    if pipeline is not None:
        take_constants_off_meshes(model)
    infos = list(dict.fromkeys(variables.infos[id(v)] for v in variables.all))
    dense = [info for info in infos if info.path not in tables]
    _refuse_tables(placement, infos, dense)
    inspect(placement, dense, f"model {model.name!r}", (pipeline.axis,) if pipeline else ())
    steps = steps_of(here, model, variables)
    placed = {entry.info.path: entry for entry in placement.place(infos)}
    return WorkerLayout(
        mesh=worker.mesh,
        arrays=_shardings(placed.values()),
        gradients=_shardings(_summed(placement, dense)),
        put=putter(placement, model),
        row_wise=RowWise(model, variables),
        around=steps.under,
        strategy=here,
        context=steps.program.context,
        pipeline=pipeline,
    )


def _summed(placement: Placement, infos: list[ParamInfo]) -> list[Placed]:
    """Where gradients are summed to."""
    params = [info for info in infos if info.role == "parameter"]
    level = 3 if placement.zero >= _PIECES else 0
    return placement.with_zero(level).place(params) if params else []


def _shardings(placed: Iterable[Placed]) -> dict[str, Any]:
    # Arrays come and go in their own dims, so what a step would pad is whole along such dims.
    return {entry.info.path: entry.unpadded.sharding for entry in placed}


def _refuse_tables(placement: Placement, infos: list[ParamInfo], dense: list[ParamInfo]) -> None:
    finder = Finder(placement.layouts)
    placing = {finder.find(info.spellings) for info in dense}
    away = [info for info in infos if info not in dense and info.role == "parameter"]
    entries = {info.path: finder.find(info.spellings) for info in away}
    if faults := [
        f"  layout {entry.pattern!r} is for {path!r}"
        for path, entry in entries.items()
        if entry is not None and entry not in placing
    ]:
        raise ModelError(
            "layouts do not apply to tables that travel by rows, because a worker has only the "
            "rows of its batch:\n"
            + "\n".join(merged(faults))
            + "\nRemove them, or keep the tables "
            "whole with Tables(embeddings=None)."
        )
