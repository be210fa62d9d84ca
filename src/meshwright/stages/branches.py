"""Independent branches of a model: where its graph forks, and where it joins again.

A fork is a value that all that follows goes through, or the inputs. Between two of them equations
that do not read each other's results are branches: Inception's towers, the towers of a retrieval
model, an ensemble's members, heads. They are dealt to the devices of an axis by FLOPs, the most
expensive first (longest processing time first, Graham 1969).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import PipelineError
from ..jaxprs.flops import equation_flops
from ..jaxprs.slices import variables
from .line import Line

Var = Any
_JOINS = 4  # equations at the end of a fork that may join its branches


@dataclass(frozen=True)
class Branches:
    """Independent branches of a model over an ``axis`` of the mesh; pass it as ``pipeline=``.

    Branches are found in the traced loss, dealt to devices by FLOPs, and joined where the graph
    joins; what all of them begin with and end in is computed by every device. The weights and
    slots of a branch lie on its device only. The busiest branch sets the time, so an axis of two
    fits most models. Raises :class:`~meshwright.PipelineError` for an invalid axis.

    >>> Branches("branch")
    Branches(axis='branch')
    """

    axis: str

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or not self.axis:
            raise PipelineError(
                f"axis must be the name of an axis of the mesh; received {self.axis!r}."
            )


@dataclass(frozen=True, eq=False)
class Region:
    """The branches between a fork and its join: equations of the line, by device.

    ``enters`` are computed before the fork, ``leaves`` are read after the join, and ``branches``
    are the equations of each branch by itself.
    """

    groups: tuple[tuple[int, ...], ...]
    enters: tuple[Var, ...]
    leaves: tuple[tuple[Var, ...], ...]
    flops: tuple[float, ...]
    branches: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, eq=False)
class Forks:
    """The regions of a line and the parameters of each device's branches."""

    line: Line = field(repr=False)
    devices: int
    regions: tuple[Region, ...]

    @classmethod
    def of(cls, line: Line, devices: int) -> Forks:
        """Raises :class:`PipelineError` for a model without branches."""
        finder = _Finder(line)
        regions = tuple(
            finder.region(branches, devices)
            for branches in map(finder.branches, finder.forks())
            if len(branches) > 1
        )
        if not regions:
            raise PipelineError(
                "the model has no independent branches: each layer reads what the one before it "
                "computes. Use mw.Pipeline for stages, or give the axis to the batch."
            )
        return cls(line, devices, regions)

    @functools.cached_property
    def schedule(self) -> list[int | Region]:
        """Equations of the line by number, and regions, each after what it reads."""
        at = {k: region for region in self.regions for group in region.groups for k in group}
        scheduled, steps = set[int](), list[int | Region]()
        for k, number in enumerate(self.line.order):
            if (region := at.get(k)) is None:
                steps.append(number)
            elif id(region) not in scheduled:
                scheduled.add(id(region))
                steps.append(region)
        return steps

    def params(self, region: Region, device: int) -> list[str]:
        """Paths of the parameters that a device's branches of a region read."""
        return self._read(region.groups[device])

    def branches(self, device: int) -> list[list[str]]:
        """Paths of the parameters of each branch that a device computes, in the model's order."""
        of_device = sorted(branch for region in self.regions for branch in region.branches[device])
        return [paths for branch in of_device if (paths := self._read(branch))]

    @property
    def at_once(self) -> int:
        """How many devices have something to compute where the most branches are."""
        return max(sum(map(bool, region.groups)) for region in self.regions)

    def _read(self, numbers: Sequence[int]) -> list[str]:
        read = self.line.params_read
        return list(dict.fromkeys(path for k in numbers for path in read[k]))

    @functools.cached_property
    def owner(self) -> dict[str, int]:
        """The device of each parameter that its branches alone read."""
        readers: dict[str, set[int | None]] = {}
        inside = {
            k: device
            for region in self.regions
            for device, group in enumerate(region.groups)
            for k in group
        }
        for k, paths in enumerate(self.line.params_read):
            for path in paths:
                readers.setdefault(path, set()).add(inside.get(k))
        for path in self.line.params_of(self.line.outputs, self.line.producer):
            readers.setdefault(path, set()).add(None)
        return {
            path: device
            for path, of in readers.items()
            if len(of) == 1 and (device := next(iter(of))) is not None
        }

    @functools.cached_property
    def flops(self) -> tuple[float, list[float]]:
        """Floating-point operations outside of branches, and in each device's branches."""
        eqns = self.line.eqns
        total = sum(float(equation_flops(eqns[n]) or 0) for n in self.line.order)
        by_device = [sum(region.flops[d] for region in self.regions) for d in range(self.devices)]
        return total - sum(by_device), by_device


class _Finder:
    """Forks of a line by what its equations read."""

    def __init__(self, line: Line) -> None:
        self._line = line
        eqns = line.eqns
        of_batch = {v for v, key in line.traced.arguments.items() if key[0] == "batch"}
        for eqn in eqns:
            if not of_batch.isdisjoint(variables(eqn.invars)):
                of_batch.update(eqn.outvars)
        self._inputs = [variables(eqns[n].invars) for n in line.order]
        self._acts = [k for k, read in enumerate(self._inputs) if not of_batch.isdisjoint(read)]
        self._maker = {v: k for k in self._acts for v in eqns[line.order[k]].outvars}
        self._weights = {v: k for v, k in line.producer.items() if v not in self._maker}

    def _before(self, k: int) -> set[int]:
        """The equations whose results one reads, those of weights alone left out."""
        return {self._maker[v] for v in self._inputs[k] if v in self._maker}

    def forks(self) -> list[list[int]]:
        """Equations between places that one value alone crosses."""
        last: dict[Var, int] = {}
        for k in self._acts:
            last |= {v: k for v in self._inputs[k] if v in self._maker}
        end = len(self._line.order)
        for var in self._line.crossing(end):
            if var in self._maker and not self._only_statistics(var):
                last[var] = end
        sources = [k for k in self._acts if not self._before(k)]
        parts, part, crossing = list[list[int]](), list[int](), set[Var]()
        for k in self._acts:
            part.append(k)
            crossing.update(v for v in self._line.eqns[self._line.order[k]].outvars if v in last)
            crossing = {v for v in crossing if last[v] > k}
            if len(crossing) <= 1 and k >= sources[-1]:
                parts.append(part)
                part = []
        return [*parts, part] if part else parts

    @functools.cached_property
    def _of_loss(self) -> set[Var]:
        line, traced = self._line, self._line.traced
        outputs = [traced.loss, *traced.metrics.values(), *traced.logs.values()]
        read = {*variables(outputs)}
        for number in line.slice(outputs, line.producer):
            read.update(variables(line.eqns[number].invars))
        return read

    def _only_statistics(self, var: Var) -> bool:
        return var not in self._of_loss

    def branches(self, part: Sequence[int]) -> list[list[int]]:
        """The equations of a part that hang together, each by itself, once what joins them is
        taken away; one where they all do."""
        for joins in range(min(_JOINS, len(part))):
            inside = part[: len(part) - joins]
            components = self._components(inside)
            if sum(self._flops(own) > 0 for own in components) > 1:
                return components
        return [list(part)]

    def _components(self, inside: Sequence[int]) -> list[list[int]]:
        of: dict[int, list[int]] = {}
        for k in inside:
            joined = [k]
            for other in {id(of[b]): of[b] for b in self._before(k) if b in of}.values():
                joined = [*other, *joined]
            of |= dict.fromkeys(joined, joined)
        return [sorted(part) for part in {id(joined): joined for joined in of.values()}.values()]

    def _flops(self, numbers: Sequence[int]) -> float:
        eqns, order = self._line.eqns, self._line.order
        return sum(float(equation_flops(eqns[order[k]]) or 0) for k in numbers)

    def region(self, branches: Sequence[list[int]], devices: int) -> Region:
        """Branches dealt to devices."""
        groups, times = [list[int]() for _ in range(devices)], [0.0] * devices
        dealt = [list[tuple[int, ...]]() for _ in range(devices)]
        for branch in sorted(branches, key=self._flops, reverse=True):
            device = times.index(min(times))
            groups[device] += branch
            dealt[device].append(tuple(sorted(branch + self._of_weights(branch))))
            times[device] += self._flops(branch)
        groups = [sorted(group + self._of_weights(group)) for group in groups]
        groups = [sorted(group + self._penalties(group)) for group in groups]
        line = self._line
        inside = [{v for k in of for v in line.eqns[line.order[k]].outvars} for of in groups]
        within = set(itertools.chain(*groups))
        read = {v for k, of in enumerate(self._inputs) if k not in within for v in of} | {
            *line.crossing(len(line.order))
        }
        enters = dict.fromkeys(
            v
            for device, group in enumerate(groups)
            for k in group
            for v in self._inputs[k]
            if v in line.producer and v not in inside[device]
        )
        leaves = tuple(tuple(v for v in line.producer if v in of and v in read) for of in inside)
        whole, by_device = tuple(map(tuple, groups)), tuple(map(tuple, dealt))
        return Region(whole, tuple(enters), leaves, tuple(times), by_device)

    def _of_weights(self, group: Sequence[int]) -> list[int]:
        """What is computed from weights alone and read in this group and in no other."""
        return sorted(self._weights_for(group) - self._weights_for(self._acts_outside(group)))

    def _penalties(self, group: Sequence[int]) -> list[int]:
        """Numbers that are computed from weights of this group alone, as regularizers' are: where
        they are read after the join, the weights need not be."""
        outside = self._acts_outside(group)
        outside += self._weights_for(outside)
        others = {v for k in outside for v in self._inputs[k]}
        own = {v for k in group for v in self._inputs[k] if v not in others}
        eqns, order, within = self._line.eqns, self._line.order, set(group)
        chosen_acts, numbers = list[int](), list[int]()
        for k in sorted({*self._weights.values()} - within - set(outside)):
            outvars = eqns[order[k]].outvars
            if own.issuperset(self._inputs[k]):
                own.update(outvars)
                chosen_acts.append(k)
                numbers += [k] if all(v.aval.size == 1 for v in outvars) else []
        penalty = {*numbers, *(self._weights_for(numbers) & {*chosen_acts})}
        read = {v for k in {*self._weights.values()} - penalty for v in self._inputs[k]}
        read.update(self._line.crossing(len(order)))
        leaves = [v for k in penalty for v in eqns[order[k]].outvars if v in read]
        return sorted(penalty) if all(v.aval.size == 1 for v in leaves) else []

    def _acts_outside(self, group: Sequence[int]) -> list[int]:
        within = set(group)
        return [k for k in self._acts if k not in within]

    def _weights_for(self, group: Sequence[int]) -> set[int]:
        """What is computed from weights alone, of all that these equations need."""
        result, waiting = set[int](), list(group)
        while waiting:
            new = {self._weights[v] for v in self._inputs[waiting.pop()] if v in self._weights}
            waiting += new - result
            result |= new
        return result
