"""What is made of the weights of one equal block outside of it, made at the end of the block.

A loss that adds the squares of all weights, or a log of their norm, reads the weights of every
block after all of them. Made in the blocks, the squares are results that are passed on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .repeats import LEAST, Run, Var, runs_with_weights
from .signatures import signs_of
from .slices import is_literal, needed, reached, variables


@dataclass(frozen=True)
class _Read:
    """An equation outside of the blocks that reads what is of one copy alone.

    ``operands`` and ``results`` are numbers of what it reads and makes, equal for the same in
    another copy. ``is_needed`` is whether blocks read it, as a cast of a weight.
    """

    number: int
    copy: int
    operands: frozenset[int]
    results: tuple[int, ...]
    is_needed: bool


def with_own_reads_inside(
    jaxpr: Any, params: Collection[Var], changed: Mapping[Var, Var], least: int = LEAST
) -> Any | None:
    """An open jaxpr with such equations in the blocks; ``None`` if no such equations are in all.

    The arguments are those of :func:`~meshwright.jaxprs.repeats.repeated`.
    """
    for run, rows in runs_with_weights(jaxpr, params, changed, least):
        if moved := _of_all(list(_reads(jaxpr, run, rows)), run.count, range(len(rows))):
            return _moved(jaxpr, run, moved)
    return None


def _reads(jaxpr: Any, run: Run, rows: Sequence[Sequence[Var]]) -> Iterator[_Read]:
    eqns, signs = jaxpr.eqns, signs_of(jaxpr.eqns)
    numbers, of_var = dict[Any, int](), dict[Var, tuple[int, int]]()  # its copy and its number
    for number, row in enumerate(rows):
        of_var |= {var: (copy, number) for copy, var in enumerate(row)}
    read_in_run = {var for eqn in eqns[run.start : run.end] for var in variables(eqn.invars)}
    of_run = set(needed(eqns[: run.start], read_in_run))
    for at in (*range(run.start), *range(run.end, len(eqns))):
        eqn = eqns[at]
        of = [of_var.get(var) for var in variables(eqn.invars)]
        copies = {tag[0] for tag in of if tag is not None}
        if len(copies) != 1 or None in of or eqn.effects:
            continue
        (copy,) = copies
        operands = [None if is_literal(atom) else of_var[atom][1] for atom in eqn.invars]
        keys = [(int(signs[at]), *operands, result) for result in range(len(eqn.outvars))]
        results = [numbers.setdefault(key, len(rows) + len(numbers)) for key in keys]
        of_var |= {v: (copy, n) for v, n in zip(eqn.outvars, results, strict=True)}
        read = frozenset(n for n in operands if n is not None)
        yield _Read(at, copy, read, tuple(results), at in of_run)


def _of_all(reads: Sequence[_Read], copies: int, weights: Iterable[int]) -> list[_Read]:
    """Those that every copy has, each after those whose results it reads."""
    alike, known = dict[tuple[int, ...], list[_Read]](), set(weights)
    for read in reads:
        alike.setdefault(read.results, []).append(read)
    moved = list[_Read]()
    for results, several in alike.items():
        times = {sum(read.copy == copy for read in several) for copy in range(copies)}
        is_needed = any(read.is_needed for read in several)
        if known.issuperset(several[0].operands) and (len(times) == 1 or is_needed):
            known.update(results)
            moved += () if is_needed else several
    return moved


def _moved(jaxpr: Any, run: Run, reads: Sequence[_Read]) -> Any:
    eqns = jaxpr.eqns
    numbers = {read.number for read in reads}
    made = {var for number in numbers for var in eqns[number].outvars}
    later = reached(eqns, made)
    before, after = list[Any](), list[Any]()
    for number, eqn in enumerate(eqns[: run.start]):
        if number not in numbers:
            waits = not later.isdisjoint(variables(eqn.invars))
            (after if waits else before).append(eqn)
    within = list[Any]()
    for copy, at in enumerate(run.starts):
        within += [
            *eqns[at : at + run.period],
            *(eqns[read.number] for read in reads if read.copy == copy),
        ]
    after += (eqn for n, eqn in enumerate(eqns[run.end :], run.end) if n not in numbers)
    return jaxpr.replace(eqns=[*before, *within, *after])
