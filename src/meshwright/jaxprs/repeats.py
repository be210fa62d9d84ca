"""Where a traced function repeats itself: the same equations, one copy after the other.

Copies are found by structure, not by name: a period in the sequence of what equations do. How they
hang together is then checked variable by variable. Nothing is required of the model's author.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .signatures import signs_and_forms
from .slices import reached, variables

LEAST = 4  # copies, below which all are compiled
_TRIED = 12
_NOT_ALIKE = "equal blocks are not connected alike"
_READ_ON = "what a block makes is read by more than the next one"
_WEIGHTS_READ = "weights of blocks are read outside of them too"

Var = Any
Place = tuple[int, int]  # an equation, and which of its results or operands


@dataclass(frozen=True)
class Run:
    """``count`` copies of ``period`` equations, from equation ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    @property
    def starts(self) -> range:
        """The first equation of each copy."""
        return range(self.start, self.end, self.period)

    def copy_of(self, equation: int) -> int | None:
        """Which copy an equation is in."""
        inside = self.start <= equation < self.end
        return (equation - self.start) // self.period if inside else None


NO_RUN = Run(0, 1, 0)


@dataclass(frozen=True, eq=False)
class Repeated:
    """A run whose copies hang together in a chain.

    Rows have an entry for each copy: ``own`` an argument that no other copy reads, ``differing``
    what is made outside of the copies, as of a batch, or a constant, and ``literals`` the place of
    a literal: the number of an equation, and which operand.
    """

    run: Run
    own: tuple[tuple[Var, ...], ...] = field(repr=False)
    differing: tuple[tuple[Var, ...], ...] = field(default=(), repr=False)
    literals: tuple[tuple[Place, ...], ...] = field(default=(), repr=False)


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
            return chain.repeated(), ""
        reason = reason or (chain.fault if chain.reads_weights else "")
    return None, reason


def side_results(
    jaxpr: Any, params: Collection[Var], changed: Mapping[Var, Var], least: int = LEAST
) -> tuple[Run, tuple[Place, ...]] | None:
    """A run that hangs together but for what is read after it, and the places of that in a copy.

    Such are the auxiliary losses of layers of experts: each copy makes one, and their sum comes
    after all copies. ``None`` if there is no such run, or nothing of the kind.
    """
    uses = _Uses(jaxpr)
    for run in _runs(jaxpr, uses, max(2, least)):
        chain = _Chain(jaxpr, run, uses, params, changed)
        if chain.fault in ("", _READ_ON) and (places := chain.side_results()):
            return run, places
    return None


def runs_with_weights(
    jaxpr: Any, params: Collection[Var], changed: Mapping[Var, Var], least: int = LEAST
) -> Iterator[tuple[Run, tuple[tuple[Var, ...], ...]]]:
    """Runs that hang together but for what is read outside of them, and the own weights of their
    copies: a row has one of each copy."""
    uses = _Uses(jaxpr)
    for run in _runs(jaxpr, uses, max(2, least)):
        chain = _Chain(jaxpr, run, uses, params, changed)
        if chain.fault in (_READ_ON, _WEIGHTS_READ):
            yield run, tuple(tuple(row) for row in chain.mine.values() if row[0] in chain.params)


# Candidates, by structure alone


def _runs(jaxpr: Any, uses: _Uses, least: int) -> Iterator[Run]:
    """Runs of equal signs or forms, the longest first, cut where the least bytes cross."""
    ranked = {run for numbers in signs_and_forms(jaxpr.eqns) for run in _ranked(numbers, least)}
    for covered, period, start, slack in sorted(ranked)[:_TRIED]:
        count = -covered // period
        shift = int(np.argmin(uses.crossing[start + period :][: slack + 1]))
        yield Run(start + shift, period, count)


def _ranked(numbers: np.ndarray, least: int) -> Iterator[tuple[int, int, int, int]]:
    """How many equations runs of equal numbers cover, negative; their periods and starts, and by
    how much these may shift."""
    for period in range(1, len(numbers) // least + 1):
        for start, length in _stretches(numbers[:-period] == numbers[period:]):
            count = length // period + 1
            if count >= least:
                yield -count * period, period, start, length % period


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
            for var in variables(eqn.invars):
                self.read.setdefault(var, []).append(i)
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
        self.differing: dict[Var, list[Var]] = {}  # likewise, what is not a copy's own
        self.outside: dict[Var, list[Var]] = {}  # likewise, all that is made outside of copies
        self.literals: list[list[Place]] = []
        self.passed: set[Place] = set()  # what the next copy reads, by its place in a copy
        self.reads_weights = False
        self.fault = self._compare() or self._outside()

    def repeated(self) -> Repeated:
        """The run, if nothing is in the way."""
        rows = self.mine.values(), self.differing.values(), self.literals
        return Repeated(self.run, *(tuple(map(tuple, row)) for row in rows))

    def _compare(self) -> str:
        for i in range(self.run.period):
            for place in range(len(self._eqn(1, i).invars)):
                atoms = [self._eqn(k, i).invars[place] for k in range(self.run.count)]
                if hasattr(atoms[1], "val"):
                    if len({repr(atom.val) for atom in atoms}) > 1:
                        self.literals.append([(at + i, place) for at in self.run.starts])
                elif fault := self._alike(atoms):
                    return fault
        return "" if self.mine else "the repeated part has no weights of its own"

    def _eqn(self, copy: int, equation: int) -> Any:
        return self.jaxpr.eqns[self.run.start + copy * self.run.period + equation]

    def _alike(self, atoms: list[Any]) -> str:
        first, *kinds = [self._kind(k, atom) for k, atom in enumerate(atoms)]
        if kinds[0][0] == "before":
            self.passed.add(kinds[0][1])
        if kinds[0][0] in ("here", "before"):
            pattern = kinds[0] if kinds[0][0] == "here" else ("outside", atoms[0])
            same = first == pattern and all(kind == kinds[0] for kind in kinds)
            return "" if same else _NOT_ALIKE
        if any(kind[0] != "outside" for kind in (first, *kinds)):
            return "a block reads what one further away has made"
        return self._from_outside(atoms)

    def _kind(self, copy: int, atom: Any) -> tuple[str, Any]:
        where, inside = self._place(atom)
        if where is None:
            return "outside", atom
        if where == copy or where == copy - 1:
            return ("here" if where == copy else "before"), inside
        return "far", atom

    def _place(self, atom: Any) -> tuple[int | None, Place]:
        """Which copy makes it, if one does, and where in it."""
        number, result = self.uses.producers.get(atom, (-1, 0))
        inside = (number - self.run.start) % self.run.period, result
        return (None if number < 0 else self.run.copy_of(number)), inside

    def _from_outside(self, per_copy: list[Var]) -> str:
        root = self._root(per_copy[1])
        is_param = root in self.params
        self.reads_weights |= is_param
        if self.outside.setdefault(per_copy[1], per_copy) != per_copy:
            return "some blocks share parameters" if is_param else _NOT_ALIKE
        if len(set(per_copy)) == 1:
            return "blocks share parameters" if is_param else ""
        roots = list(map(self._root, per_copy))
        if len(set(roots)) == len(roots) and self._arguments.issuperset(roots):
            same = self.mine.setdefault(root, roots) == roots
            return "" if same else "some blocks share parameters"
        if self._of_params.isdisjoint(per_copy):
            self.differing[per_copy[1]] = per_copy
            return ""
        if len(set(per_copy)) < len(per_copy):
            return "some blocks share parameters"
        return "what blocks differ in is made of weights outside of them"

    @functools.cached_property
    def _arguments(self) -> set[Var]:
        return set(self.jaxpr.invars)

    @functools.cached_property
    def _of_params(self) -> set[Var]:
        """All that depends on parameters."""
        return reached(self.jaxpr.eqns, self.params)

    def _root(self, var: Var) -> Var:
        """The argument that a variable is a copy of, such as a weight cast before all blocks."""
        while (place := self.uses.producers.get(var)) and self.run.copy_of(place[0]) is None:
            eqn = self.jaxpr.eqns[place[0]]
            operands = variables(eqn.invars)
            if len(operands) != 1:
                return var
            var = operands[0]
        return var

    def _outside(self) -> str:
        """What reads more of the blocks than the results of the last one."""
        for read in self._reads_outside():
            for var in read:
                where, _ = self._place(var)
                if where is not None and where != self.run.count - 1:
                    return _READ_ON
                if len(read) > 1 and where is None and self._root(var) in self._own:
                    return _WEIGHTS_READ
        return ""

    def side_results(self) -> tuple[Place, ...]:
        """Places in a copy of what is read after all copies, and not passed on by the last one."""
        last, places = self.run.count - 1, dict[Place, None]()
        for read in self._reads_outside():
            for copy, inside in map(self._place, read):
                if copy is not None and (copy != last or inside not in self.passed):
                    places[inside] = None
        return tuple(places)

    def _reads_outside(self) -> Iterator[list[Var]]:
        """What each equation outside of the copies reads, and the results but for their state."""
        eqns = self.jaxpr.eqns
        for eqn in (*eqns[: self.run.start], *eqns[self.run.end :]):
            yield variables(eqn.invars)
        updates = variables(self.changed[var] for var in self._own if var in self.changed)
        passed = self._own.union(updates)
        yield from ([var] for var in variables(self.jaxpr.outvars) if var not in passed)

    @functools.cached_property
    def _own(self) -> set[Var]:
        return {var for copies in self.mine.values() for var in copies}
