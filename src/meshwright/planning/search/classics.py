"""The layouts that engineers know by name: every plan is compared with them, and none is faster.

* Data parallel: the rows of the batch over all devices.
* FSDP: the same with parameters, gradients and slots shared out, ZeRO of level 3 (Rajbhandari et
  al. 2020).
* Tensor parallel: dims of weights over all devices (Shoeybi et al., "Megatron-LM", 2019).
* FSDP × tensor parallel: the rows over some axes, dims of weights over the others.

They cost little to look at, so the search has answers before it begins. Which dims of weights
tensor parallelism splits, how much is recomputed and into how many micro-batches a batch is cut is
chosen for the objective, within the limit of memory if anything is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...hlo.groups import Axes
from .candidates import Candidate, in_words, plain
from .choices import DATA_PARALLEL, FSDP, FSDP_TENSOR, TENSOR_PARALLEL, Choices
from .clique_tables import Tables, tables_of
from .compact import Compact
from .cost import divides
from .frame import Options, frame_of
from .lagrangian import relaxed
from .meshes import meshes
from .request import Request

NAMES = (DATA_PARALLEL, TENSOR_PARALLEL, FSDP, FSDP_TENSOR)  # those without ZeRO first

Classics = dict[str, Candidate]


class _Way(NamedTuple):
    """A mesh, and the sets of its axes for the rows of the batch and for dims of weights."""

    axes: Axes
    rows: int
    weights: int


def classics(request: Request, fsdp_zero: int = 3) -> Classics:
    """The best of each name by the model; one that fits, if any does.

    A name is missing where the step, the target or ``space`` has nothing for it: a batch that does
    not divide, no weights to split, a level of ZeRO that may not be chosen. ``fsdp_zero`` is
    that of FSDP, less than 3 where a step supports no more.
    """
    search = _Classics(request, fsdp_zero)
    best = {name: search.best(name) for name in NAMES}
    return {name: candidate for name, candidate in best.items() if candidate is not None}


@dataclass(frozen=True)
class _Classics:
    request: Request
    fsdp_zero: int

    def best(self, name: str) -> Candidate | None:
        """The best of a name: of those that fit the fastest or smallest, else the smallest."""
        zero = self.fsdp_zero if name in (FSDP, FSDP_TENSOR) else min(self.request.space.zero)
        if zero not in self.request.space.zero:
            return None
        best: Candidate | None = None
        for accumulate in self._accumulate():
            for way in self._ways(name):
                for candidate in self._of_way(way, zero, accumulate, best):
                    best = candidate if best is None else min(best, candidate, key=self._rank)
            if best is not None and self._fits(best):
                break  # more micro-batches only help what does not fit
        return best

    def _accumulate(self) -> Iterator[int]:
        batch = self.request.problem.batch
        rows = 1 if batch is None else self.request.problem.units[batch].size
        least = min(self.request.space.accumulate)
        yield from (k for k in sorted(self.request.space.accumulate) if k == least or rows % k == 0)

    def _fits(self, candidate: Candidate) -> bool:
        return self.request.fits(candidate.cost)

    def _rank(self, candidate: Candidate) -> tuple[bool, float, float]:
        if not self._fits(candidate):
            return True, candidate.cost.peak_bytes, candidate.cost.time_s or 0.0
        return (False, *self.request.rank(candidate.cost))

    # Meshes

    def _ways(self, name: str) -> Iterator[_Way]:
        if name == FSDP_TENSOR:
            yield from self._ways_of_both()
        elif name == TENSOR_PARALLEL:
            axes = self.request.space.axes or (("a", self.request.num_devices),)
            yield _Way(axes, 0, 2 ** len(axes) - 1)
        elif (axes := self._axes_of_rows()) is not None:
            yield _Way(axes, 2 ** len(axes) - 1, 0)

    def _axes_of_rows(self) -> Axes | None:
        """All devices, or as many as divide the batch."""
        if self.request.space.axes is not None:
            return self.request.space.axes if self._divides(self.request.space.axes) else None
        counts = range(self.request.num_devices, 1, -1)
        return next((axes for n in counts if self._divides(axes := (("a", n),))), None)

    def _divides(self, axes: Axes, mask: int | None = None) -> bool:
        return self.request.divides(axes, mask or 2 ** len(axes) - 1)

    def _ways_of_both(self) -> Iterator[_Way]:
        every = (
            (self.request.space.axes,)
            if self.request.space.axes is not None
            else self._pairs_of_axes()
        )
        for axes in every:
            everything = 2 ** len(axes) - 1
            for rows in range(1, everything):
                if self._divides(axes, rows):
                    yield _Way(axes, rows, everything & ~rows)

    def _pairs_of_axes(self) -> Iterator[Axes]:
        most = min(2, self.request.space.max_axes)
        request = self.request
        result = meshes(request.target, request.hardware, most, False, request.stages)
        yield from (axes for axes in result if len(axes) == 2)

    # One way

    def _of_way(
        self, way: _Way, zero: int, accumulate: int, best: Candidate | None
    ) -> Iterator[Candidate]:
        """Its best, in which some weight is split if the way has axes for that; what cannot beat
        one of these or ``best`` may be missing."""
        options, choices = self._options(way, accumulate), Choices(zero, accumulate)
        if options is None:
            return
        result = list(self._of_options(way, options, choices, best))
        good = [c for c in result if len(c.layouts.rules) > bool(way.rows)]
        yield from good if way.weights else result
        if good or not result or not way.weights:
            return
        # It is fastest to split no weight: the best of those that split one.
        for least_s, one in self._with_a_split(way, options, choices):
            if best is not None and self._fits(best) and self._is_slower(least_s, best):
                return
            for candidate in self._of_options(way, one, choices, best):
                yield candidate
                best = candidate if best is None else min(best, candidate, key=self._rank)

    def _with_a_split(
        self, way: _Way, options: Options, choices: Choices
    ) -> list[tuple[float, Options]]:
        """The same options with one dim of weights split, and the least seconds of each, the most
        promising first."""
        problem, space = self.request.problem, self.request.space
        frame = frame_of(problem, self.request.setting(way.axes), choices.accumulate, options)
        # More remat takes more time.
        kinds = space.remat if problem.is_spared_by_remat else space.remat[:1]
        tables = [tables_of(frame, replace(choices, remat=remat)) for remat in kinds]
        units = [unit for unit in options if unit != problem.batch]
        least_s = {
            unit: min(each.least_time_with_s(unit, way.weights) for each in tables)
            for unit in units
        }
        units.sort(key=least_s.__getitem__)
        return [(least_s[unit], {**options, unit: (way.weights,)}) for unit in units]

    def _is_slower(self, least_s: float, best: Candidate) -> bool:
        return self.request.objective == "time" and least_s >= (best.cost.time_s or 0.0)

    def _of_options(
        self, way: _Way, options: Options, choices: Choices, best: Candidate | None
    ) -> Iterator[Candidate]:
        """The best with each kind of remat, but for those that cannot beat one that fits."""
        frame = frame_of(
            self.request.problem, self.request.setting(way.axes), choices.accumulate, options
        )
        for remat in self.request.space.remat:
            tables = tables_of(frame, replace(choices, remat=remat))
            if best is not None and self._fits(best) and self._is_beaten(tables, best):
                continue
            masks = self._masks(tables)
            result = self._candidate(tables, masks)
            yield result
            is_fastest = (
                self.request.objective == "time" and tables.time_s(masks) <= tables.least_time_s
            )
            if is_fastest and self._fits(result) and not self.request.problem.is_spared_by_remat:
                return  # more remat takes more time

    def _is_beaten(self, tables: Tables, best: Candidate) -> bool:
        if self.request.objective == "memory":
            return tables.least_bytes >= best.cost.peak_bytes
        if self.request.limit_bytes is not None and tables.least_bytes > self.request.limit_bytes:
            return True
        return tables.least_time_s >= (best.cost.time_s or 0.0)

    def _options(self, way: _Way, accumulate: int) -> Options | None:
        """The rows along their axes, weights along theirs or none; ``None`` if nothing divides."""
        problem, batch, options = self.request.problem, self.request.problem.batch, Options()
        if way.rows and batch is not None:
            if not divides(problem, way.axes, batch, way.rows, accumulate):
                return None
            options[batch] = (way.rows,)
        for unit in _units_of_weights(problem) if way.weights else ():
            if divides(problem, way.axes, unit, way.weights, 1):
                options[unit] = (0, way.weights)
        return None if way.weights and options.keys() <= {batch} else options

    def _masks(self, tables: Tables) -> dict[int, int]:
        elimination = tables.frame.elimination
        if elimination is None or tables.free is None:
            return _largest_first(self.request.problem, tables.options)
        if self.request.objective == "memory":
            most = tables.alive.max(axis=0)
            sizes = [most[list(clique.columns)] @ clique.bytes_of for clique in tables.cliques]
            return elimination.least([np.asarray(table, float) for table in sizes])[1]
        masks = tables.free[1]
        if (
            self.request.limit_bytes is None
            or tables.peaks(masks).max() <= self.request.limit_bytes
        ):
            return masks
        return relaxed(tables, self.request.limit_bytes).masks or masks

    def _candidate(self, tables: Tables, masks: Mapping[int, int]) -> Candidate:
        fixed = self.request.space.axes is not None
        layouts = plain(self.request.problem, tables, masks, fixed)
        return self.request.candidate(layouts if fixed else in_words(self.request.problem, layouts))


@functools.lru_cache(maxsize=8)
def _units_of_weights(problem: Compact) -> tuple[int, ...]:
    """The dims of parameters that are multiplied or looked up, the largest parameters' first.

    What is added, such as embeddings of places, has dims of activations alone.
    """
    bytes_of: dict[int, int] = {}
    for piece in problem.pieces:
        for unit in piece.scope if piece.kind == "parameter" else ():
            bytes_of[unit] = bytes_of.get(unit, 0) + piece.nbytes
    multiplied = {
        unit
        for work in problem.works
        if work.flops or work.kind == "gather"
        for place in work.operands
        if problem.batch not in problem.pieces[place].scope  # a weight, in whatever type
        for unit in problem.pieces[place].scope
    }
    result = bytes_of.keys() & multiplied - {problem.batch}
    return tuple(sorted(result, key=lambda unit: (-bytes_of[unit], unit)))


def _largest_first(problem: Compact, options: Options) -> dict[int, int]:
    """Units that are split as long as none meets another, where too many meet to choose best."""
    masks: dict[int, int] = {}
    for unit, allowed in options.items():
        clashing = {other for other in masks if masks[other] and (unit, other) in problem.clashes}
        masks[unit] = max(
            (m for m in allowed if not any(m & masks[o] for o in clashing)), default=0
        )
    return masks
