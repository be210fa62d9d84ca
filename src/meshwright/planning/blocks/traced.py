"""A Program's loss as it is traced, and as it is evaluated with some of it left out."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from ...jaxprs.calls import without_calls
from ...jaxprs.edits import traced
from ...jaxprs.gathered import with_gathered_results
from ...jaxprs.repeats import Run, Var
from ...jaxprs.slices import read_instead, variables
from ...program import Aux, Program, TrainState
from .marks import mark_of


def evaluated(closed: Any, results: Sequence[Var], args: Any, run: Run) -> list[Any]:
    """Some variables of a jaxpr for these arguments; what they do not need is left out.

    The equations of each copy of a run are put under a name scope of their own.
    """
    needed = {_key(result) for result in results}
    numbered: list[tuple[int, Any]] = []
    for number, eqn in reversed(list(enumerate(closed.jaxpr.eqns))):
        if eqn.effects or any(var in needed for var in eqn.outvars):
            needed.update(invar for invar in eqn.invars if not hasattr(invar, "val"))
            numbered.append((number, eqn))
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))
    later = Counter(var for _, eqn in numbered for var in variables(eqn.invars))
    later.update(variables(results))
    for copy, part in itertools.groupby(numbered[::-1], lambda pair: run.copy_of(pair[0])):
        eqns = [eqn for _, eqn in part]
        later.subtract(var for eqn in eqns for var in variables(eqn.invars))
        with contextlib.nullcontext() if copy is None else jax.named_scope(mark_of(copy)):
            _run(closed, eqns, values, later)
    return [result.val if hasattr(result, "val") else values[result] for result in results]


def _run(closed: Any, eqns: list[Any], values: dict[Var, Any], later: Counter[Var]) -> None:
    """Evaluate some equations; of what they make, what is read later is kept."""
    outputs = [var for eqn in eqns for var in eqn.outvars]
    inputs = dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars))
    inputs = [var for var in inputs if var not in set(outputs)]
    later_outputs = [var for var in outputs if later[var] > 0]
    part = closed.jaxpr.replace(constvars=[], invars=inputs, outvars=later_outputs, eqns=eqns)
    results = jaxpr_as_fun(closed.replace(jaxpr=part, consts=[]))(*(values[v] for v in inputs))
    values.update(zip(later_outputs, results, strict=True))


def _key(atom: Any) -> Any:
    return id(atom) if hasattr(atom, "val") else atom  # literals cannot be hashed


def shortened(closed: Any, run: Run, count: int) -> Any:
    """A jaxpr with the first ``count`` blocks of a run, after which goes on what came after all.

    The blocks between are still there, and nothing reads them.
    """
    eqns = closed.jaxpr.eqns
    last = run.start + (run.count - 1) * run.period
    last_period = run.start + (count - 1) * run.period
    instead = {
        old: new
        for i in range(run.period)
        for old, new in zip(eqns[last + i].outvars, eqns[last_period + i].outvars, strict=True)
    }
    after = [eqn.replace(invars=read_instead(eqn.invars, instead)) for eqn in eqns[run.end :]]
    outvars = read_instead(closed.jaxpr.outvars, instead)
    return closed.replace(
        jaxpr=closed.jaxpr.replace(eqns=[*eqns[: run.end], *after], outvars=outvars)
    )


@dataclass(frozen=True, eq=False)
class TracedLoss:
    """The training loss of a Program. ``paths`` are those of arguments that are parameters or
    state; ``changed`` says which result an argument becomes. ``results`` are the variables of the
    loss and what comes with it."""

    closed: Any
    results: tuple[Any, Aux]
    paths: Mapping[Var, str]
    params: Collection[Var]
    changed: Mapping[Var, Var]

    @classmethod
    def of(
        cls, program: Program, state: TrainState, batch: Any, training: bool = True
    ) -> TracedLoss:
        """Of arrays, or shapes, such as a step takes."""
        args = state.params, state._replace(params={}), batch
        closed, tree = traced(training_loss(program, training), *args)
        params, whole, _ = jax.tree.unflatten(jax.tree.structure(args), closed.jaxpr.invars)
        value, aux = jax.tree.unflatten(tree, closed.jaxpr.outvars)
        values = {**params, **whole.state}
        return cls(
            closed=closed,
            results=(value, aux),
            paths={var: path for path, var in values.items()},
            params=frozenset(params.values()),
            changed={whole.state[path]: var for path, var in aux.state.items()},
        )

    def forms(self) -> Iterator[TracedLoss]:
        """The loss in all forms in which its blocks may be equal, always in the same order."""
        forms = list[TracedLoss]()
        for form in itertools.chain([self], self._without_calls()):
            forms.append(form)
            yield form
        yield from filter(None, (form._with_gathered_results() for form in forms))

    def _without_calls(self) -> Iterator[TracedLoss]:
        """With calls that hold several layers written out, if there are any."""
        for closed in without_calls(self.closed, self.params):
            new = dict(zip(self.closed.jaxpr.invars, closed.jaxpr.invars, strict=True))
            tree = jax.tree.structure(self.results)
            value, aux = jax.tree.unflatten(tree, closed.jaxpr.outvars)
            yield TracedLoss(
                closed=closed,
                results=(value, aux),
                paths={new[var]: path for var, path in self.paths.items()},
                params=frozenset(new[var] for var in self.params),
                changed={new[var]: aux.state[self.paths[var]] for var in self.changed},
            )

    def _with_gathered_results(self) -> TracedLoss | None:
        """Where blocks pass on small results that are read after all of them, if there are any."""
        result = with_gathered_results(self.closed.jaxpr, self.params, self.changed)
        if result is None:
            return None
        jaxpr, _ = result
        results = jax.tree.unflatten(jax.tree.structure(self.results), jaxpr.outvars)
        return replace(self, closed=self.closed.replace(jaxpr=jaxpr), results=results)


def training_loss(program: Program, training: bool = True) -> Callable[..., Any]:
    """The loss with its parameters given once."""

    def loss(params: Any, whole: TrainState, batch: Any) -> Any:
        return program.loss(params, whole._replace(params=params), batch, training)

    return loss
