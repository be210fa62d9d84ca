"""One micro-batch's loss as equations, in the form in which equal blocks are looked for.

Models hide that blocks are equal: each layer has a constant of its own, a random key is split on
the way. Equal constants are one variable here, and keys can come first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..jaxprs.calls import without_calls
from ..jaxprs.gathered import with_gathered_results
from ..jaxprs.slices import Var, needed, read_instead, variables
from ..program import Aux, Batch, Program, TrainState

_COMPARED_BYTES = 2**26  # of a constant, at most, to be compared by its values
_LITTLE_BYTES = 2**16  # of what each block may read from before all blocks


@dataclass(frozen=True, eq=False)
class Traced:
    """One micro-batch's loss as equations, and what its arguments and results are.

    ``arguments`` maps each argument to ``(part, path)``: a field of the state, or ``"batch"`` and
    the number of the leaf. ``loss``, ``state``, ``metrics`` and ``logs`` are results. ``entries``
    are the paths of arguments that are entries of a stacked parameter: its path, and which one.
    ``written_out`` is the same loss without its loops over weights, if it has any.
    """

    closed: Any
    arguments: Mapping[Var, tuple[str, Any]]
    loss: Any
    state: Mapping[str, Any]
    metrics: Mapping[str, Any]
    logs: Mapping[str, Any]
    entries: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    written_out: Traced | None = field(default=None, repr=False)

    @property
    def results(self) -> tuple[Mapping[str, Any], ...]:
        """All that there is beside the loss."""
        return self.state, self.metrics, self.logs

    @functools.cached_property
    def fixed(self) -> frozenset[str]:
        """Paths of the state that stays as it is, as frozen weights do."""
        arguments = self.arguments.items()
        return frozenset(p for v, (of, p) in arguments if of == "state" and self.state[p] is v)

    @classmethod
    def of(cls, program: Program, whole: TrainState, batch: Batch, share: float) -> Traced:
        """That of a program, for arrays or their shapes; ``share`` is the micro-batch's of a step.

        Metrics count each micro-batch by its rows, as they do where gradients are accumulated.
        """
        import jax

        def run(whole: TrainState, batch: Batch) -> Any:
            value, aux = program.loss(whole.params, whole, batch, True)
            metrics, logs = program.measure(aux.metrics, _with_share(program, aux, share), batch)
            return value, dict(aux.state), dict(metrics), dict(logs)

        closed, shapes = jax.make_jaxpr(run, return_shape=True)(whole, batch)
        closed = with_equal_constants_once(_with_constants_of_no_mesh(closed))
        invars = iter(closed.jaxpr.invars)
        tree = jax.tree.structure(whole)
        count = tree.num_leaves
        parts = jax.tree.unflatten(tree, [next(invars) for _ in range(count)])
        arguments = {
            var: (name, path)
            for name, part in zip(TrainState._fields, parts, strict=True)
            for path, var in part.items()
        }
        arguments |= {var: ("batch", number) for number, var in enumerate(invars)}
        results = jax.tree.unflatten(jax.tree.structure(shapes), closed.jaxpr.outvars)
        return cls(closed, arguments, *results)

    def with_little_first(self) -> Traced:
        """The same, where what is small and made of no weights comes before all else, as random
        keys and an entry of a table for each block; what nothing reads is left out."""
        eqns = self.closed.jaxpr.eqns
        late = {var for var, (part, _) in self.arguments.items() if part == "params"}
        first, rest = list[Any](), list[Any]()
        for number in needed(eqns, self.closed.jaxpr.outvars):
            eqn = eqns[number]
            is_late = not (
                all(map(_is_little, eqn.outvars)) and late.isdisjoint(variables(eqn.invars))
            )
            (rest if is_late else first).append(eqn)
            late.update(eqn.outvars if is_late else ())
        return self._with([*first, *rest])

    def without_calls(self) -> Iterator[Traced]:
        """The same with calls that hold several layers written out, if there are any."""
        params = [v for v, (part, _) in self.arguments.items() if part == "params"]
        names = [self.arguments[var] for var in self.closed.jaxpr.invars]
        for closed in without_calls(self.closed, params):
            yield self.rewritten(with_equal_constants_once(closed), names)

    def rewritten(self, closed: Any, names: Iterable[tuple[str, Any]]) -> Traced:
        """The same loss in other equations, whose arguments are ``names``."""
        import jax

        arguments = dict(zip(closed.jaxpr.invars, names, strict=True))
        tree = jax.tree.structure((self.loss, *map(dict, self.results)))
        loss, *results = jax.tree.unflatten(tree, closed.jaxpr.outvars)
        return Traced(closed, arguments, loss, *results)

    def with_gathered_results(self) -> Traced | None:
        """The same, where blocks pass on small results that are read after all of them; ``None``
        if there are none."""
        params = frozenset(v for v, (part, _) in self.arguments.items() if part == "params")
        changed = {v: self.state[p] for v, (part, p) in self.arguments.items() if part == "state"}
        result = with_gathered_results(self.closed.jaxpr, params, changed, least=2)
        if result is None:
            return None
        jaxpr, instead = result
        (loss,) = read_instead([self.loss], instead)
        state, metrics, logs = [
            dict(zip(of, read_instead([*of.values()], instead), strict=True)) for of in self.results
        ]
        closed = self.closed.replace(jaxpr=jaxpr)
        return replace(self, closed=closed, loss=loss, state=state, metrics=metrics, logs=logs)

    def with_variables(self, places: Sequence[tuple[int, int]]) -> Traced:
        """The same, where literals are constants; ``places`` are equations and their operands."""
        import jax

        eqns = list(self.closed.jaxpr.eqns)
        literals = [eqns[number].invars[operand] for number, operand in places]
        shapes = [jax.ShapeDtypeStruct((), literal.aval.dtype) for literal in literals]
        constants = jax.make_jaxpr(lambda *values: values)(*shapes).jaxpr.invars
        for (number, operand), var in zip(places, constants, strict=True):
            invars = list(eqns[number].invars)
            invars[operand] = var
            eqns[number] = eqns[number].replace(invars=invars)
        values = [np.asarray(of.val, of.aval.dtype) for of in literals]
        return self._with(eqns, constants, values)

    def _with(
        self, eqns: Sequence[Any], constants: Sequence[Var] = (), values: Sequence[Any] = ()
    ) -> Traced:
        """With these equations, and constants beside those that there are."""
        jaxpr = self.closed.jaxpr
        jaxpr = jaxpr.replace(eqns=list(eqns), constvars=[*jaxpr.constvars, *constants])
        consts = [*self.closed.consts, *values]
        return replace(self, closed=self.closed.replace(jaxpr=jaxpr, consts=consts))


def _is_little(var: Var) -> bool:
    import jax

    is_key = jax.numpy.issubdtype(var.aval.dtype, jax.dtypes.prng_key)
    return is_key or math.prod(var.aval.shape) * var.aval.dtype.itemsize <= _LITTLE_BYTES


def _is_traced(value: Any) -> bool:
    from jax.core import Tracer

    return isinstance(value, Tracer)


def _with_constants_of_no_mesh(closed: Any) -> Any:
    """The same, where what a layer has made from laid-out values, as Keras' ``Normalization`` its
    mean, is a constant of any mesh: a stage computes in one of its own."""
    import jax

    def free(value: Any) -> Any:
        lies = None if _is_traced(value) else getattr(value, "sharding", None)
        if not isinstance(lies, jax.sharding.NamedSharding) or not lies.is_fully_replicated:
            return value
        is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)
        return value if is_key else np.asarray(value)

    return closed.replace(consts=[free(value) for value in closed.consts])


def with_equal_constants_once(closed: Any) -> Any:
    """The same with one variable for constants of equal values: Keras makes the step of a seed once
    more in every layer, and a model may make its mask in every block; blocks that differ in nothing
    else are equal."""
    jaxpr, first, instead = closed.jaxpr, dict[Any, Var](), dict[Var, Var]()
    for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
        if getattr(value, "nbytes", math.inf) <= _COMPARED_BYTES and not _is_traced(value):
            instead[var] = first.setdefault(_key_of(value), var)

    eqns = [eqn.replace(invars=read_instead(eqn.invars, instead)) for eqn in jaxpr.eqns]
    outvars = read_instead(jaxpr.outvars, instead)
    return closed.replace(jaxpr=jaxpr.replace(eqns=eqns, outvars=outvars))


def _key_of(value: Any) -> tuple[Any, ...]:
    """What equal constants have in common."""
    import jax

    is_random_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    with jax.ensure_compile_time_eval():  # a step may be traced around this
        array = np.asarray(jax.random.key_data(value) if is_random_key else value)
    return value.shape, str(value.dtype), array.tobytes()


def _with_share(program: Program, aux: Aux, share: float) -> Aux:
    return aux._replace(loss=aux.loss / share) if program.reduction == "sum" else aux
