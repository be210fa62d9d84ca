"""A traced loss as equations in a line that can be cut anywhere: for models where nothing repeats.

What depends on no weight (masks, positions, random draws) is computed by every stage that needs it.
What depends on weights alone stands just before its first use. Equations behind the last weight
(the loss, metrics) and those of statistics that a model keeps are the tail, which the last stage
computes: statistics change there micro-batch by micro-batch, as metrics do.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import PipelineError
from ..jaxprs.flops import equation_flops
from ..jaxprs.signatures import signs_of
from ..jaxprs.slices import needed_behind, reached, variables
from .evaluating import evaluated
from .parts import listed
from .traced import Traced

Var = Any

# What a byte costs in FLOPs: of weights, which a stage reads for each micro-batch, and of what it
# sends to its neighbour. An accelerator could do much meanwhile (v5p: 166 and 5,100; H100 with
# NVLink: 295 and 2,200), a CPU little.
_ACCELERATOR, _CPU = (100.0, 2000.0), (1.0, 10.0)
_LIMITS = 12  # sizes of what may cross that are tried


@dataclass(frozen=True, eq=False)
class Line:
    """The equations of a loss that can be cut, by number in their new order, and the tail."""

    traced: Traced = field(repr=False)
    order: tuple[int, ...]
    statistics: tuple[str, ...]
    counted: tuple[str, ...]

    @classmethod
    def of(cls, traced: Traced) -> Line:
        """Raises :class:`PipelineError` for what cannot be computed by stages."""
        deps = _Reach(traced)
        statistics, counted = deps.changed()
        keys = {("state", path) for path in statistics}
        members = [var for var, key in traced.arguments.items() if key in keys]
        in_tail = reached(deps.eqns, members)
        visible = variables([traced.loss, *traced.metrics.values(), *traced.logs.values()])
        if not in_tail.isdisjoint(visible):
            raise PipelineError(
                f"the loss is computed from {listed(sorted(statistics))}, which changes with what "
                "the model computes. In a pipeline it would be that of an earlier micro-batch. "
                "Compute the loss from this batch's values."
            )
        outputs = [*visible, *variables(traced.state[path] for path in statistics)]
        live = deps.slice(outputs)
        main = [
            n
            for n in live
            if any(v in deps.of_params for v in deps.eqns[n].outvars)
            and in_tail.isdisjoint(deps.eqns[n].outvars)
        ]
        order = deps.weights_late(main)
        reads = [k for k, n in enumerate(order) if deps.is_weight_reader(n)]
        if not reads:
            raise PipelineError("the loss reads no parameter, so there is nothing to cut.")
        end = deps.first_use(order, reads[-1])
        return cls(traced, tuple(order[: end + 1]), tuple(statistics), tuple(counted))

    # What the line reads and what crosses a cut

    @functools.cached_property
    def eqns(self) -> Sequence[Any]:
        return self.traced.closed.jaxpr.eqns

    @functools.cached_property
    def signs(self) -> list[int]:
        """A number per equation: equal for those that do the same to arrays alike."""
        return signs_of(self.eqns).tolist()

    @functools.cached_property
    def producer(self) -> dict[Var, int]:
        """Which position of the line makes a variable."""
        return {v: k for k, n in enumerate(self.order) for v in self.eqns[n].outvars}

    @functools.cached_property
    def _producer(self) -> dict[Var, int]:
        return {v: n for n, eqn in enumerate(self.eqns) for v in eqn.outvars}

    @functools.cached_property
    def outputs(self) -> list[Any]:
        """What the tail computes: the loss, metrics, logs and statistics."""
        traced = self.traced
        values = [traced.loss, *traced.metrics.values(), *traced.logs.values()]
        return [*values, *(traced.state[path] for path in self.statistics)]

    @functools.cached_property
    def _last_read(self) -> dict[Var, int]:
        """The last position that reads a variable of the line; its length for the tail."""
        last: dict[Var, int] = {}
        for k, n in enumerate(self.order):
            for number in self._alone(self.eqns[n].invars):
                last |= {v: k for v in variables(self.eqns[number].invars) if v in self.producer}
            last |= {v: k for v in variables(self.eqns[n].invars) if v in self.producer}
        tail = {*variables(self.outputs)}
        for number in self.slice(self.outputs, self.producer):
            tail.update(variables(self.eqns[number].invars))
        return last | {v: len(self.order) for v in tail if v in self.producer}

    def _alone(self, atoms: Iterable[Any]) -> list[int]:
        return self.slice(atoms, self.producer)

    def is_sent(self, var: Var) -> bool:
        """Whether a variable of the line is sent to the stages behind that read it."""
        del var  # all are, so that their gradients come back
        return True

    def crossing(self, position: int) -> list[Var]:
        """What equations before a position make and those from it on read, in the line's order."""
        last, made = self._last_read, self.producer.items()
        return [v for v, k in made if k < position <= last.get(v, -1) and self.is_sent(v)]

    @functools.cached_property
    def bytes_crossing(self) -> np.ndarray:
        """Bytes that cross before each position; infinite where values without gradients do."""
        steps = np.zeros(len(self.order) + 2)
        odd = np.zeros(len(self.order) + 2)
        for var, k in self.producer.items():
            end = self._last_read.get(var, -1)
            if end > k:
                steps[k + 1] += var.aval.size * var.aval.dtype.itemsize
                steps[end + 1] -= var.aval.size * var.aval.dtype.itemsize
                is_odd = self.is_sent(var) and not _is_inexact(var)
                odd[k + 1] += is_odd
                odd[end + 1] -= is_odd
        return np.where(np.cumsum(odd) > 0, np.inf, np.cumsum(steps))[: len(self.order) + 1]

    @functools.cached_property
    def params_read(self) -> list[list[str]]:
        """Paths of the parameters that each equation of the line reads."""
        arguments = self.traced.arguments
        return [
            [
                arguments[v][1]
                for v in variables(self.eqns[n].invars)
                if arguments.get(v, ("", ""))[0] == "params"
            ]
            for n in self.order
        ]

    @functools.cached_property
    def _state_read(self) -> list[set[str]]:
        """Paths of the state that each equation of the line reads, some of it by way of others."""
        state = {v: path for v, (of, path) in self.traced.arguments.items() if of == "state"}
        return [
            {
                state[v]
                for number in (n, *self._alone(self.eqns[n].invars))
                for v in variables(self.eqns[number].invars)
                if v in state
            }
            for n in self.order
        ]

    @functools.cached_property
    def costs(self) -> tuple[np.ndarray, np.ndarray]:
        """FLOPs before each position, and the bytes of weights read before it."""
        flops = [float(equation_flops(self.eqns[n]) or 0) for n in self.order]
        by_path = {key[1]: v for v, key in self.traced.arguments.items() if key[0] == "params"}
        read_before = set[str]()
        nbytes = []
        for paths in self.params_read:
            new = [by_path[path].aval for path in paths if path not in read_before]
            read_before.update(paths)
            nbytes.append(sum(aval.size * aval.dtype.itemsize for aval in new))
        return (
            np.concatenate([[0.0], np.cumsum(flops)]),
            np.concatenate([[0.0], np.cumsum(nbytes)]),
        )

    # Where to cut

    def best_cuts(self, stages: int, on_cpu: bool) -> list[int]:
        """Positions to cut at, by a dynamic programme: the least time of the slowest stage, and of
        the largest transfer, which sets the size of all; ``on_cpu`` where a byte costs little.

        Raises :class:`PipelineError` if there are fewer places to cut at than that takes.
        """
        crossing = self.bytes_crossing
        starts = [k for k, paths in enumerate(self.params_read) if paths]
        inside = np.arange(starts[0] + 1, len(self.order)) if starts else np.arange(0)
        inside = inside[np.isfinite(crossing[inside])]
        if len(inside) < stages - 1 or len(starts) < stages:
            raise PipelineError(
                f"the model has {len(starts)} equations that read weights and {len(inside)} places "
                f"to cut between them, too few for {stages} stages. Use a smaller stage axis."
            )
        tried = np.unique(np.quantile(crossing[inside], np.linspace(0, 1, _LIMITS)))
        bytes_cost = _CPU if on_cpu else _ACCELERATOR
        answers = [
            self._cuts(stages, inside[crossing[inside] <= limit], *bytes_cost) for limit in tried
        ]
        possible = [option for option in answers if option is not None]
        return min(possible, key=lambda each: each[0])[1]

    def _cuts(
        self, stages: int, inside: np.ndarray, per_read: float, per_sent: float
    ) -> tuple[float, list[int]] | None:
        if len(inside) < stages - 1:
            return None
        places = np.array([0, *inside, len(self.order)])
        flops, nbytes = self.costs
        slowest, begins = divided(flops[places] + nbytes[places] * per_read, stages)
        cuts = [int(places[at]) for at in begins]
        sent = max((float(self.bytes_crossing[cut]) for cut in cuts), default=0.0)
        return slowest + sent * per_sent, cuts

    def cut_before(self, paths: set[str]) -> int | None:
        """The position with the least to send between the last equation that reads a parameter and
        the first that reads one of these; ``None`` if the line reads none of them."""
        readers = [k for k, read in enumerate(self.params_read) if read]
        first = next((k for k in readers if not paths.isdisjoint(self.params_read[k])), None)
        if first is None:  # frozen weights, then
            reads = (k for k, read in enumerate(self._state_read) if not paths.isdisjoint(read))
            first = next(reads, None)
        if first is None:
            return None
        after = max((k for k in readers if k < first), default=-1) + 1
        return after + int(np.argmin(self.bytes_crossing[after : first + 1]))

    def in_order(self, paths: Iterable[str]) -> list[str]:
        """Parameters in the order in which the line reads them."""
        first = self._first_read
        return sorted(paths, key=lambda path: first.get(path, len(self.order)))

    @functools.cached_property
    def _first_read(self) -> dict[str, int]:
        """The first position that reads a parameter."""
        first: dict[str, int] = {}
        for k, read in enumerate(self.params_read):
            for path in read:
                first.setdefault(path, k)
        return first

    def layer_at(self, position: int) -> str:
        """The first parameter that is read from a position on."""
        return next((paths[0] for paths in self.params_read[position:] if paths), "")

    # Values

    def slice(self, outputs: Iterable[Any], stops: Container[Var]) -> list[int]:
        """Numbers of the equations that these variables need, up to the stops."""
        return needed_behind(self.eqns, self._producer, outputs, stops)

    def evaluate(
        self, outputs: Sequence[Any], values: Mapping[Var, Any], *, counting: bool = False
    ) -> list[Any]:
        """The values of variables, from those that are known."""
        del counting  # for what is counted depends on no weight
        eqns = [self.eqns[number] for number in self.slice(outputs, values)]
        return evaluated(self.traced.closed, eqns, outputs, values)

    def params_of(self, outputs: Sequence[Any], stops: Container[Var]) -> list[str]:
        """Paths of the parameters that variables are computed from."""
        read = {*variables(outputs)}
        for number in self.slice(outputs, stops):
            read.update(variables(self.eqns[number].invars))
        arguments = self.traced.arguments
        return [arguments[v][1] for v in arguments if v in read and arguments[v][0] == "params"]


def divided(time: np.ndarray, parts: int) -> tuple[float, list[int]]:
    """The least that the longest part of a line takes, and where each part but the first begins.

    ``time`` is what has passed before each place; it never falls. Each part has a place or more.

    >>> divided(np.array([0.0, 4.0, 5.0, 6.0, 9.0]), 2)
    (5.0, [1])
    """
    best, choices = time - time[0], list[np.ndarray]()  # of the parts before each place
    for part in range(1, parts):
        # A later beginning makes the parts before it longer and this one shorter, so the least is
        # where they meet.
        meets = part + np.searchsorted(best[part:] + time[part:], time)
        here = np.minimum(meets, np.maximum(np.arange(len(time)) - 1, part))
        before = np.maximum(here - 1, part)
        is_before = _longest(best, time, before) <= _longest(best, time, here)
        first = np.searchsorted(time, time[np.where(is_before, before, here)])
        choices.append(np.maximum(first, part))
        best = _longest(best, time, choices[-1])
    at, begins = len(time) - 1, list[int]()
    for choice in reversed(choices):
        at = int(choice[at])
        begins.append(at)
    return float(best[-1]), begins[::-1]


def _longest(best: np.ndarray, time: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Of the parts before each place, where the last of them begins so."""
    return np.maximum(best[at], time - time[at])


class _Reach:
    """Which variables of a loss depend on what."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.eqns = traced.closed.jaxpr.eqns
        self._maker = {v: n for n, eqn in enumerate(self.eqns) for v in eqn.outvars}
        by_part = {part: set[Var]() for part in ("params", "state", "slots", "metrics", "batch")}
        for var, (part, _) in traced.arguments.items():
            by_part[part].add(var)
        self._params, self._batch = by_part["params"], by_part["batch"]
        self.of_params = reached(self.eqns, self._params)
        self._of_batch = reached(self.eqns, self._batch)

    def slice(self, outputs: Iterable[Any]) -> list[int]:
        return needed_behind(self.eqns, self._maker, outputs, set())

    def changed(self) -> tuple[list[str], list[str]]:
        """Paths of the state that changes with what is computed, and of what counts on."""
        statistics, counted = list[str](), list[str]()
        for var, (part, path) in self.traced.arguments.items():
            if part == "state" and (new := self.traced.state[path]) is not var:
                depends = not hasattr(new, "val") and new in self.of_params | self._of_batch
                (statistics if depends else counted).append(path)
        return statistics, counted

    def is_weight_reader(self, number: int) -> bool:
        return not self._params.isdisjoint(variables(self.eqns[number].invars))

    def first_use(self, order: Sequence[int], position: int) -> int:
        """A position, or where what is made there of weights alone is first read."""
        for at in range(position, len(order)):
            eqn = self.eqns[order[at]]
            if not self._of_batch.isdisjoint(variables(eqn.invars)):
                return at if all(map(_is_inexact, eqn.outvars)) else position
        return position

    def weights_late(self, main: Sequence[int]) -> list[int]:
        """With what depends on weights alone just before the first use of these weights."""
        roots: dict[Var, set[Var]] = {var: {var} for var in self._params}
        first: dict[Var, int] = {}
        alone = list[int]()
        for number in main:
            eqn = self.eqns[number]
            read = set[Var]().union(*(roots.get(v, set()) for v in variables(eqn.invars)))
            if self._of_batch.isdisjoint(variables(eqn.invars)):
                alone.append(number)
                roots |= dict.fromkeys(eqn.outvars, read)
            else:
                for var in read:
                    first.setdefault(var, number)
        end = len(self.eqns)
        places = {
            n: (
                max(
                    first.get(root, end)
                    for v in variables(self.eqns[n].invars)
                    for root in roots.get(v, ())
                ),
                0,
                n,
            )
            for n in alone
        }
        return sorted(main, key=lambda n: places.get(n, (n, 1, n)))


def _is_inexact(var: Var) -> bool:
    import jax.numpy as jnp

    return jnp.issubdtype(var.aval.dtype, jnp.inexact)
