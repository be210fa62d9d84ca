"""Where a traced function repeats itself: the same equations, one copy after the other.

Copies are found by structure, not by name: a period in the sequence of what equations do. How they
hang together is then checked variable by variable. Nothing is required of the model's author.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .signatures import signs_of

LEAST = 4  # copies, below which all are compiled
_TRIED = 12

Var = Any
Place = tuple[int, int]  # which equation of a copy makes a variable, and as which result


@dataclass(frozen=True)
class Run:
    """``count`` copies of ``period`` equations, from equation ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    def copy_of(self, equation: int) -> int | None:
        """Which copy an equation is in."""
        inside = self.start <= equation < self.end
        return (equation - self.start) // self.period if inside else None


NO_RUN = Run(0, 1, 0)


@dataclass(frozen=True, eq=False)
class Repeated:
    """A run whose copies hang together in a chain. A row of ``own`` is one argument, or constant,
    that each copy has of its own: the one of each copy."""

    run: Run
    own: tuple[tuple[Var, ...], ...] = field(repr=False)


def repeated(
    jaxpr: Any, params: Collection[Var], changed: Mapping[Var, Var], least: int = LEAST
) -> tuple[Repeated | None, str]:
    """The run of most equations in an open jaxpr, or ``None`` and why the best one is none.

    ``params`` are arguments that blocks must not share; ``changed`` says which result an argument
    becomes: a block may change what is its own. Runs have ``least`` copies or more. The reason is
    empty where nothing repeats itself.
    """
    reason = ""
    uses = _Uses(jaxpr)
    for run in _runs(jaxpr, uses, max(2, least)):
        chain = _Chain(jaxpr, run, uses, params, changed)
        if not chain.fault:
            return Repeated(run, tuple(map(tuple, chain.mine.values()))), ""
        reason = reason or (chain.fault if chain.reads_weights else "")
    return None, reason


# Candidates, by structure alone


def _runs(jaxpr: Any, uses: _Uses, least: int) -> Iterator[Run]:
    """Runs of equal signs, those that cover most first, cut where the least bytes cross."""
    signs = signs_of(jaxpr.eqns)
    ranked: list[tuple[int, int, int, int]] = []
    for period in range(1, len(signs) // least + 1):
        for start, length in _stretches(signs[:-period] == signs[period:]):
            count = length // period + 1
            if count >= least:
                ranked.append((-count * period, period, start, length % period))
    for covered, period, start, slack in sorted(ranked)[:_TRIED]:
        count = -covered // period
        shift = int(np.argmin(uses.crossing[start + period :][: slack + 1]))
        yield Run(start + shift, period, count)


def _stretches(same: np.ndarray) -> Iterator[tuple[int, int]]:
    """``(start, length)`` of the stretches of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield int(start), int(end - start)


class _Uses:
    """Where the variables of a jaxpr are made and read."""

    def __init__(self, jaxpr: Any) -> None:
        self.producers: dict[Var, Place] = {
            var: (i, o) for i, eqn in enumerate(jaxpr.eqns) for o, var in enumerate(eqn.outvars)
        }
        self.read: dict[Var, list[int]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for atom in eqn.invars:
                if not hasattr(atom, "val"):
                    self.read.setdefault(atom, []).append(i)
        steps = np.zeros(len(jaxpr.eqns) + 2)
        for var, (i, _) in self.producers.items():
            if read := self.read.get(var):
                nbytes = getattr(var.aval, "size", 0) * getattr(var.aval.dtype, "itemsize", 1)
                steps[i + 1] += nbytes
                steps[read[-1] + 1] -= nbytes
        self.crossing = np.cumsum(steps)  # bytes that are made before an equation and read from it


# Whether the copies are a chain


class _Chain:
    """Compares the copies of a run with its second one; ``fault`` says what is in the way."""

    def __init__(
        self,
        jaxpr: Any,
        run: Run,
        uses: _Uses,
        params: Collection[Var],
        changed: Mapping[Var, Var],
    ) -> None:
        self.jaxpr, self.run, self.uses = jaxpr, run, uses
        self.params, self.changed = params, changed
        self.mine: dict[Var, list[Var]] = {}  # of the second copy -> the same of every copy
        self.reads_weights = False
        self.fault = self._compare() or self._outside()

    def _compare(self) -> str:
        for i in range(self.run.period):
            for place in range(len(self._eqn(1, i).invars)):
                atoms = [self._eqn(k, i).invars[place] for k in range(self.run.count)]
                if fault := self._alike(atoms):
                    return fault
        return "" if self.mine else "the repeated part has no weights of its own"

    def _eqn(self, copy: int, equation: int) -> Any:
        return self.jaxpr.eqns[self.run.start + copy * self.run.period + equation]

    def _alike(self, atoms: list[Any]) -> str:
        if hasattr(atoms[1], "val"):
            return ""  # equal signs have equal literals
        first, *kinds = [self._kind(k, atom) for k, atom in enumerate(atoms)]
        if kinds[0][0] in ("here", "before"):
            pattern = kinds[0] if kinds[0][0] == "here" else ("outside", atoms[0])
            same = first == pattern and all(kind == kinds[0] for kind in kinds)
            return "" if same else "equal blocks are not connected alike"
        if any(kind[0] != "outside" for kind in (first, *kinds)):
            return "a block reads what one further away has made"
        return self._from_outside(atoms)

    def _kind(self, copy: int, atom: Any) -> tuple[str, Any]:
        producer = self.uses.producers.get(atom)
        where = None if producer is None else self.run.copy_of(producer[0])
        if producer is None or where is None:
            return "outside", atom
        if where == copy or where == copy - 1:
            inside = (producer[0] - self.run.start) % self.run.period
            return ("here" if where == copy else "before"), (inside, producer[1])
        return "far", atom

    def _from_outside(self, per_copy: list[Var]) -> str:
        self.reads_weights |= self._root(per_copy[1]) in self.params
        if len(set(per_copy)) == 1:
            return "blocks share parameters" if self._root(per_copy[0]) in self.params else ""
        if len(set(per_copy)) < len(per_copy):
            return "some blocks share parameters"
        roots = [self._root(var) for var in per_copy]
        if len(set(roots)) < len(roots) or not all(map(self._is_argument, roots)):
            return "what blocks differ in is made outside of them"
        if self.mine.setdefault(roots[1], roots) != roots:
            return "some blocks share parameters"
        return ""

    def _is_argument(self, var: Var) -> bool:
        return var not in self.uses.producers

    def _root(self, var: Var) -> Var:
        """The argument that a variable is a copy of, such as a weight cast before all blocks."""
        while (place := self.uses.producers.get(var)) and self.run.copy_of(place[0]) is None:
            eqn = self.jaxpr.eqns[place[0]]
            operands = [invar for invar in eqn.invars if not hasattr(invar, "val")]
            if len(operands) != 1:
                return var
            var = operands[0]
        return var

    def _outside(self) -> str:
        """What reads more of the blocks than the results of the last one."""
        mine = {var for copies in self.mine.values() for var in copies}
        updates = {self.changed[var] for var in mine if var in self.changed}
        results = [var for var in self.jaxpr.outvars if var not in updates and var not in mine]
        eqns = self.jaxpr.eqns
        outer = [*eqns[: self.run.start], *eqns[self.run.end :]]
        readers = [[invar for invar in eqn.invars if not hasattr(invar, "val")] for eqn in outer]
        for read in (*readers, *([result] for result in results if not hasattr(result, "val"))):
            for var in read:
                producer = self.uses.producers.get(var)
                where = None if producer is None else self.run.copy_of(producer[0])
                if where is not None and where != self.run.count - 1:
                    return "what a block makes is read by more than the next one"
                if len(read) > 1 and where is None and self._root(var) in mine:
                    return "weights of blocks are read outside of them too"
        return ""
