"""A traced loss cut into what comes before its equal blocks, the blocks, and what comes after.

Blocks are found by structure (:mod:`meshwright.jaxprs.repeats`); nothing is required of the model's
author. What is before and after is found by what it is needed for: the input of the first block,
what all blocks read alike, the loss and the state after it.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import PipelineError
from ..jaxprs.flops import equation_flops
from ..jaxprs.repeats import Run, repeated
from ..jaxprs.signatures import signs_of
from ..jaxprs.slices import Var, variables
from .evaluating import evaluated
from .traced import Traced


@dataclass(frozen=True, eq=False)
class Blocks:
    """The equal blocks of a traced loss.

    ``own`` are the variables that each block has of its own: a row of ``(part, path)`` by block.
    ``differing`` are what blocks read and do not have of their own, as a random key for each: a row
    of variables by block.
    """

    traced: Traced = field(repr=False)
    run: Run
    own: tuple[tuple[tuple[str, str], ...], ...]
    differing: tuple[tuple[Var, ...], ...] = field(repr=False)
    own_vars: tuple[tuple[Var, ...], ...] = field(repr=False)

    @classmethod
    def of(cls, traced: Traced, least: int) -> Blocks:
        """Those of a loss. Raises :class:`PipelineError` if there are fewer than ``least``, and for
        what they cannot hand on to each other."""
        arguments, jaxpr = traced.arguments, traced.closed.jaxpr
        params = [var for var, (part, _) in arguments.items() if part == "params"]
        changed = {
            var: traced.state[path] for var, (part, path) in arguments.items() if part == "state"
        }
        repeats, reason = repeated(jaxpr, frozenset(params), changed, least=2)
        if repeats is None:
            why = f": {reason}" if reason else ""
            raise PipelineError(
                f"the model has no chain of equal blocks to cut into {least} stages{why}. Give the "
                "devices of the stage axis to the batch instead, or build the model of blocks of "
                "one kind, one after the other."
            )
        if repeats.run.count < least:
            raise PipelineError(
                f"the model has {repeats.run.count} equal blocks, fewer than the {least} stages "
                "that they would be cut into. Use a smaller stage axis, or fewer repeats."
            )
        traced = traced.with_variables([place for row in repeats.literals for place in row])
        eqns, places = traced.closed.jaxpr.eqns, repeats.literals
        literals = [[eqns[number].invars[place] for number, place in row] for row in places]
        is_own = [arguments[row[0]][0] != "batch" for row in repeats.own]
        own_vars = tuple(itertools.compress(repeats.own, is_own))
        of_batch = itertools.compress(repeats.own, map(operator.not_, is_own))
        differing = *of_batch, *repeats.differing, *map(tuple, literals)
        own = tuple(tuple(arguments[var] for var in row) for row in own_vars)
        _check_entries(own, traced.entries)
        _check_frozen(own, traced.state.keys() - traced.fixed)
        blocks = cls(traced, repeats.run, own, differing, own_vars)
        _ = blocks.functions  # which refuses what cannot be passed on
        return blocks

    @property
    def count(self) -> int:
        """How many there are."""
        return self.run.count

    @functools.cached_property
    def params(self) -> tuple[tuple[str, ...], ...]:
        """Paths of the weights that some block has as a parameter: a row of one path per block."""
        return tuple(tuple(path for _, path in row) for row in self.own if is_trained(row))

    @functools.cached_property
    def trained(self) -> tuple[tuple[str | None, ...], ...]:
        """The same rows, with ``None`` for the blocks whose weight is frozen."""
        return tuple(
            tuple(path if part == "params" else None for part, path in row)
            for row in self.own
            if is_trained(row)
        )

    @property
    def begins(self) -> tuple[str, ...]:
        """The path of the weight that each block reads first, frozen or not."""
        rows = (
            row
            for row in self.own
            if all(part == "params" or path in self.traced.fixed for part, path in row)
        )
        return tuple(path for _, path in next(rows, ()))

    @property
    def are_of_loop(self) -> bool:
        """Whether weights are stacked by the model itself, which goes through them in a loop."""
        return bool(self.traced.entries)

    @property
    def largest_flops(self) -> float:
        """Floating-point operations of the largest equation, which no cut divides."""
        return max(float(equation_flops(eqn) or 0) for eqn in self.traced.closed.jaxpr.eqns)

    @functools.cached_property
    def functions(self) -> Functions:
        """What the loss is made of."""
        return Functions(self)


class _Reads(NamedTuple):
    """What blocks read: of the block before, of their own, and all of them alike.

    ``passed`` has what the first and the second block read, by the equation of a block that makes
    it and the number of its result; ``owned`` what each block reads, by what the second one reads.
    """

    passed: dict[tuple[int, int], tuple[Var, Var]]
    owned: dict[Var, list[Var]]
    shared: dict[Var, None]


class Functions:
    """The parts of a loss as functions of values by variable.

    ``enters`` are the variables that the first block begins with, ``leaves`` those of the last one,
    place by place; ``shared`` are read by every block alike. ``lent`` are the paths of parameters
    that every block reads, as a bias by distance: to :meth:`block` they come last.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self._jaxpr = blocks.traced.closed.jaxpr
        self._run = run = blocks.run
        self._maker = {
            var: (number, place)
            for number, eqn in enumerate(self._jaxpr.eqns)
            for place, var in enumerate(eqn.outvars)
        }
        self._second = range(run.start + run.period, run.start + 2 * run.period)
        self._body = [self._jaxpr.eqns[number] for number in self._second]
        reads = self._reads_of_blocks()
        self.enters = tuple(first for first, _ in reads.passed.values())
        self._inputs = tuple(second for _, second in reads.passed.values())
        self._results = tuple(self._body[at].outvars[result] for at, result in reads.passed)
        last = [self._jaxpr.eqns[n] for n in range(run.end - run.period, run.end)]
        self.leaves = tuple(last[at].outvars[result] for at, result in reads.passed)
        self._owned = reads.owned
        self.shared, lent, in_each = self._lend(reads.shared)
        self.lent = tuple(blocks.traced.arguments[var][1] for var in lent)
        self._own_roots = (*(row[1] for row in (*blocks.own_vars, *blocks.differing)), *lent)
        self._prefix = [self._jaxpr.eqns[n] for n in sorted(self._prefixes() | in_each)]
        self._check()

    def _reads_of_blocks(self) -> _Reads:
        reads = _Reads({}, {}, {})
        differing = {row[1] for row in self.blocks.differing}
        for number, eqn in zip(self._second, self._body, strict=True):
            for position, atom in enumerate(eqn.invars):
                if hasattr(atom, "val") or (copy := self._copy_of(atom)) == 1:
                    continue
                atoms = self._in_copies(number, position)
                if copy == 0:
                    self._pass_on(reads, atom, atoms[0])
                elif len(set(atoms)) == 1:
                    reads.shared[atom] = None
                elif atom not in differing:
                    reads.owned[atom] = atoms
        return reads

    def _in_copies(self, number: int, position: int) -> list[Any]:
        """What that operand of an equation is in each block; the number is of the second one."""
        run = self._run
        first = number - run.period
        eqns = [self._jaxpr.eqns[first + copy * run.period] for copy in range(run.count)]
        return [eqn.invars[position] for eqn in eqns]

    def _pass_on(self, reads: _Reads, atom: Var, first: Var) -> None:
        """Note what the second block reads of the first one, which reads ``first`` in its place."""
        number, result = self._maker[atom]
        place = number - self._run.start, result
        if reads.passed.setdefault(place, (first, atom))[0] is not first:
            raise PipelineError(
                "the first block reads two different inputs where the others read one, so they "
                "cannot be stages of one pipeline."
            )

    def _copy_of(self, var: Var) -> int | None:
        maker = self._maker.get(var)
        return None if maker is None else self._run.copy_of(maker[0])

    def _prefixes(self) -> set[int]:
        """The equations outside of blocks that make something of one block's weights alone."""
        numbers: set[int] = set()
        for copies in self._owned.values():
            chains = [self._chain(var) for var in copies]
            signs = signs_of([self._jaxpr.eqns[n] for chain in chains for n in chain])
            if len(set(map(len, chains))) > 1 or len({*map(tuple, _split(signs, chains))}) > 1:
                raise PipelineError(
                    "equal blocks use their weights in different ways, so they cannot be stages of "
                    "one pipeline."
                )
            numbers.update(chains[1])
        return numbers

    def _lend(self, shared: Iterable[Var]) -> tuple[tuple[Var, ...], tuple[Var, ...], set[int]]:
        """What all blocks read alike but for parameters, these, and the equations outside of blocks
        that make something of them, which every block computes itself."""
        arguments, read, numbers = self.blocks.traced.arguments, dict[Var, None](), set[int]()
        waiting = list(shared)[::-1]
        while waiting:
            var = waiting.pop()
            if var in arguments or not self._depends(var, ("params",)):
                read[var] = None
            elif (number := self._maker[var][0]) not in numbers:
                numbers.add(number)
                waiting += variables(self._jaxpr.eqns[number].invars)[::-1]
        lent = tuple(var for var in read if var in arguments and arguments[var][0] == "params")
        self._check_lent(lent, numbers)
        return tuple(var for var in read if var not in lent), lent, numbers

    def _check_lent(self, lent: Sequence[Var], numbers: Iterable[int]) -> None:
        """Refuse parameters of which every stage would hold and compute too much."""
        if not lent:
            return
        makes = [var for number in numbers for var in self._jaxpr.eqns[number].outvars]
        of_batch = any(self._depends(var, ("batch", "state", "slots")) for var in makes)
        sizes = [_nbytes(row[1]) for row in self.blocks.own_vars]
        if of_batch or sum(map(_nbytes, lent)) > sum(sizes):
            names = listed([self.blocks.traced.arguments[var][1] for var in lent])
            why = "with the batch" if of_batch else "and which are larger than a block's own"
            raise PipelineError(
                f"all blocks read what is computed from {names} {why}, which is not supported in a "
                "pipeline: each stage would compute it again for every block. Compute it in each "
                "block from weights of its own."
            )

    def _chain(self, var: Var) -> list[int]:
        chain: list[int] = []
        while (maker := self._maker.get(var)) is not None:
            chain.append(maker[0])
            (var,) = variables(self._jaxpr.eqns[maker[0]].invars)
        return chain[::-1]

    def _check(self) -> None:
        """Refuse what cannot be passed on from stage to stage, with the way out."""
        import jax.numpy as jnp

        run, last = self._run, self._run.start + (self._run.count - 1) * self._run.period
        inside = {var for e in self._jaxpr.eqns[last : last + run.period] for var in e.outvars}
        changed = {self.blocks.traced.state[p] for part, p in self._own_paths() if part == "state"}
        after = [*self._jaxpr.eqns[run.end :]]
        read = {var for eqn in after for var in variables(eqn.invars)}
        read |= set(variables(self._jaxpr.outvars)) - changed
        if extra := (read & inside) - set(self.leaves):
            shapes = ", ".join(str(var.aval.shape) for var in extra)
            raise PipelineError(
                f"what comes after the blocks reads more of the last block than a block passes on "
                f"to the next: {shapes}. Return such values through the blocks' output."
            )
        odd = [var for var in self.enters if not jnp.issubdtype(var.aval.dtype, jnp.inexact)]
        if odd:
            raise PipelineError(
                f"blocks pass on {', '.join(str(var.aval) for var in odd)} beside floating-point "
                "activations, which is not supported in a pipeline. Compute it in each block, or "
                "before all of them."
            )
        self._check_state()

    def _own_paths(self) -> list[tuple[str, str]]:
        return [path for row in self.blocks.own for path in row]

    def _check_state(self) -> None:
        """State may change from micro-batch to micro-batch by counting, as seeds do."""
        traced = self.blocks.traced
        stuck = [
            path
            for path, var in traced.state.items()
            if self._depends(var, ("params",)) or self._in_run_reads_batch(var)
        ]
        if stuck:
            raise PipelineError(
                f"{listed(stuck)} change with what the model computes, as the statistics of "
                "BatchNormalization do, so the blocks cannot be taken as equal ones, whose state "
                "stays as it is in a step. Use a normalization without running statistics "
                "(LayerNormalization, GroupNormalization)."
            )

    def _in_run_reads_batch(self, var: Any) -> bool:
        """Whether a state depends on the inputs through a block."""
        if hasattr(var, "val"):
            return False
        slice_ = self._slice([var], through_run=True)
        return any(self._run.copy_of(n) is not None for n in slice_) and self._depends(
            var, ("batch",)
        )

    # Slices of the equations

    def _slice(
        self, outputs: Iterable[Any], stops: Iterable[Var] = (), through_run: bool = False
    ) -> list[int]:
        """Numbers of the equations that these variables need, up to the given ones."""
        stop, numbers = set(stops), set[int]()
        waiting = [v for v in variables(outputs) if v not in stop]
        while waiting:
            maker = self._maker.get(waiting.pop())
            if maker is None or maker[0] in numbers:
                continue
            if self._run.copy_of(maker[0]) is not None and not through_run:
                raise PipelineError(
                    "what comes before the blocks, or beside them, reads what a block computes."
                )
            numbers.add(maker[0])
            waiting += [v for v in variables(self._jaxpr.eqns[maker[0]].invars) if v not in stop]
        return sorted(numbers)

    def _depends(self, var: Any, parts: tuple[str, ...]) -> bool:
        return bool(not hasattr(var, "val") and self._reads([var], parts))

    def _reads(self, outputs: Iterable[Any], parts: tuple[str, ...]) -> list[str]:
        """Arguments among these parts that variables are computed from."""
        outputs = variables(outputs)
        numbers = self._slice(outputs, through_run=True)
        read = {*outputs, *(v for n in numbers for v in variables(self._jaxpr.eqns[n].invars))}
        arguments = self.blocks.traced.arguments
        return [str(arguments[v][1]) for v in arguments if v in read and arguments[v][0] in parts]

    # The functions

    def evaluate(
        self, outputs: Sequence[Any], values: Mapping[Var, Any], *, counting: bool = False
    ) -> list[Any]:
        """The values of variables outside of blocks, from those that are known.

        ``counting`` goes through the blocks too: for state that depends on no activation.
        """
        numbers = self._slice(outputs, values, through_run=counting)
        eqns = [self._jaxpr.eqns[number] for number in numbers]
        return evaluated(self.blocks.traced.closed, eqns, outputs, values)

    def block(self, own: Sequence[Any], shared: Mapping[Var, Any], x: Sequence[Any]) -> list[Any]:
        """The results of one block: ``own`` by row of the blocks' own variables and of what they
        differ in, then ``lent``."""
        values = {**shared, **dict(zip(self._own_roots, own, strict=True))}
        values |= zip(self._inputs, x, strict=True)
        eqns = [*self._prefix, *self._body]
        return evaluated(self.blocks.traced.closed, eqns, self._results, values)

    def read(self, part: str) -> list[str]:
        """Which of a part of the state the loss reads."""
        return self._reads(self._jaxpr.outvars, (part,))

    @functools.cached_property
    def results(self) -> list[Any]:
        """What comes after the blocks: the loss, metrics and logs."""
        traced = self.blocks.traced
        return [traced.loss, *traced.metrics.values(), *traced.logs.values()]

    @property
    def loss_equations(self) -> list[Any]:
        """The equations that make the loss of what the last block makes."""
        numbers = self._slice([self.blocks.traced.loss], self.leaves)
        return [self._jaxpr.eqns[number] for number in numbers]

    @functools.cached_property
    def metric_inputs(self) -> tuple[Var, ...]:
        """What metrics and logs need of a micro-batch, whatever came before it."""
        traced = self.blocks.traced
        late = {var for var, (part, _) in traced.arguments.items() if part == "metrics"}
        outputs = [*traced.metrics.values(), *traced.logs.values()]
        read = dict.fromkeys(variables(outputs))
        for number in self._slice(outputs, self.leaves):
            eqn = self._jaxpr.eqns[number]
            if late.intersection(variables(eqn.invars)):
                late.update(eqn.outvars)
                read |= dict.fromkeys(variables(eqn.invars))
        made = {*self._maker, *self.leaves}
        return tuple(var for var in read if var in made and var not in late)

    @property
    def measures_little(self) -> bool:
        """Whether metrics and logs need less of a micro-batch than what its last block makes."""
        metric_inputs, made = (sum(map(_nbytes, of)) for of in (self.metric_inputs, self.leaves))
        return metric_inputs <= made

    @functools.cached_property
    def flops(self) -> tuple[float, float, float]:
        """Floating-point operations before the blocks, of one block, and after the blocks."""
        after = self._slice(self.results, self.leaves)
        return self._flops(self._slice(self.enters)), self._flops(self._second), self._flops(after)

    def _flops(self, numbers: Iterable[int]) -> float:
        return float(sum(equation_flops(self._jaxpr.eqns[number]) or 0 for number in numbers))

    @functools.cached_property
    def params_before(self) -> list[str]:
        """Paths of the parameters that the input of the first block is computed from."""
        return self._params(self._slice(self.enters), self.enters)

    @functools.cached_property
    def params_after(self) -> list[str]:
        """Paths of the parameters that are read after the blocks."""
        return self._params(self._slice(self.results, self.leaves), self.results)

    def _params(self, numbers: Sequence[int], outputs: Sequence[Any]) -> list[str]:
        read = {v for n in numbers for v in variables(self._jaxpr.eqns[n].invars)}
        read.update(variables(outputs))
        arguments = self.blocks.traced.arguments
        return [arguments[v][1] for v in arguments if v in read and arguments[v][0] == "params"]

    @functools.cached_property
    def of_batch(self) -> tuple[Var, ...]:
        """What all blocks read alike and which differs from one micro-batch to the next."""
        return tuple(v for v in self.shared if self._depends(v, ("batch", "state")))

    @functools.cached_property
    def constant(self) -> tuple[Var, ...]:
        """What all blocks read alike in every micro-batch."""
        return tuple(v for v in self.shared if v not in self.of_batch)

    @functools.cached_property
    def differs_by_micro(self) -> tuple[bool, ...]:
        """Of each row of what blocks differ in, whether it is another in the next micro-batch."""
        return tuple(
            any(self._depends(var, ("batch", "state")) for var in row)
            for row in self.blocks.differing
        )

    @functools.cached_property
    def counted(self) -> tuple[str, ...]:
        """Paths of the state that changes from one micro-batch to the next."""
        arguments = {path: v for v, (part, path) in self._state_arguments()}
        return tuple(
            path for path, var in self.blocks.traced.state.items() if var is not arguments[path]
        )

    def _state_arguments(self) -> list[tuple[Var, tuple[str, Any]]]:
        return [item for item in self.blocks.traced.arguments.items() if item[1][0] == "state"]


def _check_entries(
    own: Iterable[Sequence[tuple[str, str]]], entries: Mapping[str, tuple[str, int]]
) -> None:
    """Refuse loops over weights some entries of which are in no block, or in another order."""
    inside = {path for row in own for _, path in row}
    strange = {whole for path, (whole, _) in entries.items() if path not in inside}
    for row in own:
        places = [entries[path] for _, path in row if path in entries]
        if [number for _, number in places] not in ([], list(range(len(row)))):
            strange |= {whole for whole, _ in places}
    if strange:
        raise PipelineError(
            f"a loop over {listed(sorted(strange))} is not supported in a pipeline: its steps must "
            "be the equal blocks, from the first entry to the last, and nothing else may read what "
            "they read. Write the layers one after the other."
        )


def _check_frozen(own: Iterable[Sequence[tuple[str, str]]], changed: set[str]) -> None:
    """Refuse blocks in which a weight of one is a state of another that changes."""
    for row in filter(is_trained, own):
        if odd := [path for part, path in row if part != "params" and path in changed]:
            raise PipelineError(
                f"{odd[0]} changes with every step, and is in its block what a weight is in the "
                "others, so they cannot be stages of one pipeline."
            )


def is_trained(row: Iterable[tuple[str, str]]) -> bool:
    """Whether a row of the blocks' own variables has a parameter: the others are then frozen."""
    return any(part == "params" for part, _ in row)


def _split(signs: Any, chains: Sequence[Sequence[int]]) -> list[list[int]]:
    rest = iter(signs.tolist())
    return [[next(rest) for _ in chain] for chain in chains]


def _nbytes(var: Var) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def listed(paths: Sequence[str]) -> str:
    text = ", ".join(paths[:3])
    return text + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
