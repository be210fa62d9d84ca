"""Stretches of a traced function, each computed by itself and again when its gradient is asked for.

A stretch is a run of equations under a ``jax.checkpoint`` of its own. Its backward pass begins when
the gradient of its results is there, so what it computes again is not held for longer than that.
What is made of parameters alone and cheaply, as a cast or a gathered copy, belongs to no stretch:
each one that reads it makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .. import _compat
from ..jaxprs.edits import (
    Edit,
    equations,
    jaxprs_inside,
    shapes_of,
    throughout,
    unchanged,
)
from ..jaxprs.evaluation import bound, read, take
from ..jaxprs.flops import equation_flops
from ..jaxprs.primitives import CONTROL_FLOW, MAKES_COMPLEX
from ..jaxprs.slices import variables

Var = Any
GATHERED = "gathered parameter"  # the name of what is not kept for the backward pass


@dataclass(frozen=True)
class Stretch:
    """Equations from ``start`` to before ``end``; ``policy`` says what of them is kept.

    ``in_turn`` has parameters gathered no sooner than what else is read has been computed, and
    ``at_once`` has the backward pass leave it no sooner than they have their gradients. With
    ``inside`` it is one call or loop, and the function in it is cut; it is a stretch itself only
    if parameters are gathered for it.
    """

    start: int
    end: int
    policy: Callable[..., Any] | None = None
    in_turn: bool = False
    at_once: bool = False
    in_loop: bool = False
    inside: Cut | None = None


Cut = Callable[["Equations"], Sequence[Stretch]]
ByLayers = Callable[[Any, Sequence[Var]], tuple[Any, Sequence[Any]]]


class Equations:
    """The equations of an open jaxpr, without those that make something of parameters alone."""

    def __init__(self, jaxpr: Any, params: Iterable[Var]) -> None:
        self.jaxpr = jaxpr
        self.rest: list[Any] = []
        early = set(params)
        self.args: set[Var] = {*jaxpr.constvars, *jaxpr.invars, *early}
        self.depends: set[Var] = set(early)  # on parameters
        self._early: dict[Var, int] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            read = variables(eqn.invars)
            if not self.depends.isdisjoint(read):
                self.depends.update(eqn.outvars)
            if early.issuperset(read) and _is_cheap(eqn):
                early.update(eqn.outvars)
                self._early.update(dict.fromkeys(eqn.outvars, number))
            else:
                self.rest.append(eqn)
        self.last_read = {
            var: number for number, eqn in enumerate(self.rest) for var in variables(eqn.invars)
        }
        self.last_read.update(dict.fromkeys(variables(jaxpr.outvars), len(self.rest)))

    def before(self, read: Iterable[Var]) -> list[Any]:
        """The equations that make these variables of parameters alone, in order."""
        numbers: set[int] = set()
        waiting = [*read]
        while waiting:
            number = self._early.get(waiting.pop())
            if number is not None and number not in numbers:
                numbers.add(number)
                waiting += variables(self.jaxpr.eqns[number].invars)
        return [self.jaxpr.eqns[number] for number in sorted(numbers)]

    def gathered(self, eqn: Any) -> tuple[Var, ...]:
        """The gathered parameters that an equation reads."""
        before = self.before(variables(eqn.invars))
        return tuple(eqn_before.outvars[0] for eqn_before in before if is_gather(eqn_before))


def in_stretches(
    function: Callable[..., Any],
    cut: Cut,
    edit: Edit = unchanged,
    by_layers: ByLayers = lambda jaxpr, params: (jaxpr, ()),
    writes_out: bool = False,
) -> Callable[..., Any]:
    """``function(params, *others)`` of pytrees, edited and computed in the stretches that it is cut
    into.

    ``by_layers`` is an edit of the whole function, which gets the variables of the parameters and
    may add others (``Spread`` of ``layer_gathers.py``). With ``writes_out`` jitted parts are cut,
    too.
    """

    def run(params: Any, *others: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(params, *others)
        if writes_out:
            closed = _compat.written_out(closed, _has_layers)
        edited = throughout(closed.jaxpr, edit)
        of_params = edited.invars[: len(jax.tree.leaves(params))]
        edited, spreads = by_layers(edited, of_params)
        value_of = dict(zip(of_params, jax.tree.leaves(params), strict=True))
        pieces: dict[Var, Any] = {}
        for spread in spreads:
            values = spread.function(value_of[spread.param])
            pieces.update(zip(spread.variables, values, strict=True))
        traced = Equations(edited, [*of_params, *pieces])
        values = [*closed.consts, *jax.tree.leaves((params, *others))]
        results = evaluated(traced, cut(traced), values, pieces)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _has_layers(eqn: Any) -> bool:
    """Whether it is a jitted part of a model, of several products or with a loop inside."""
    if eqn.primitive.name != "jit":
        return False
    given = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    if any(isinstance(sharding, jax.sharding.Sharding) for sharding in given):
        return False
    inside = [*equations(eqn.params["jaxpr"])]
    products = sum(equation_flops(inner) != 0 for inner in inside)
    return products > 1 or any(inner.primitive.name == "scan" for inner in inside)


def evaluated(
    traced: Equations,
    stretches: Sequence[Stretch],
    values: Sequence[Any],
    pieces: Mapping[Var, Any] = MappingProxyType({}),
) -> list[Any]:
    """The results for these constants and arguments, and ``pieces`` that are read besides."""
    jaxpr = traced.jaxpr
    env = {**bound(jaxpr, values, ()), **pieces}
    at = 0
    for stretch in stretches:
        _plainly(traced, traced.rest[at : stretch.start], env)
        eqns = traced.rest[stretch.start : stretch.end]
        if stretch.inside is not None:
            eqns = [_cut_inside(eqn, stretch.inside) for eqn in eqns]
        if stretch.inside is None or stretch.in_turn:
            if stretch.at_once:
                _hold_back(traced, stretch, env)
            _by_itself(traced, stretch, eqns, env)
        else:
            _plainly(traced, eqns, env)
        at = stretch.end
    _plainly(traced, traced.rest[at:], env)
    _make_early(traced.before(variables(jaxpr.outvars)), env)
    return read(jaxpr.outvars, env)


def gathered(value: Any, whole: Any, shared: Any) -> Any:
    """The value gathered; its gradient is summed into pieces, never whole on one device.

    ``whole`` and ``shared`` are shardings.
    """

    @jax.custom_vjp
    def gather(value: Any) -> Any:
        return checkpoint_name(jax.lax.with_sharding_constraint(value, whole), GATHERED)

    def backward(_: None, gradient: Any) -> tuple[Any]:
        return (jax.lax.with_sharding_constraint(gradient, shared),)

    gather.defvjp(lambda value: (gather(value), None), backward)
    return gather(value)


def is_gather(eqn: Any) -> bool:
    """Whether it gathers a parameter, or makes something of a gathered one."""
    if eqn.primitive.name == "name":
        return eqn.params["name"] == GATHERED
    within = jaxprs_inside(eqn) if eqn.primitive.name == "custom_vjp_call" else []
    return any(
        is_gather(inner_eqn)
        for inner in within
        for inner_eqn in getattr(inner, "jaxpr", inner).eqns
    )


def but_gathered(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The same policy of what is kept, but for gathered parameters and what they waited for."""

    def keeps(primitive: Any, *args: Any, **params: Any) -> Any:
        if primitive.name == "optimization_barrier":
            return False
        if primitive.name == "custom_vjp_call" and _gathers(params["call_jaxpr"]):
            return False
        return policy(primitive, *args, **params)

    return keeps


def but_complex(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The same policy of what is kept, but for complex values, which are computed again.

    JAX rounds what a checkpoint keeps by an operation that takes real numbers only, and so cannot
    trace a policy that keeps complex ones (0.10).
    """
    if policy is None:
        return None

    def keeps(primitive: Any, *args: Any, **params: Any) -> Any:
        return not _is_complex(primitive, args, params) and policy(primitive, *args, **params)

    return keeps


def _is_complex(primitive: Any, args: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Whether it takes complex values, or makes them of real ones."""
    inside = (params.get(name) for name in ("call_jaxpr", "jaxpr"))
    made = [aval for closed in inside for aval in getattr(closed, "out_avals", ())]
    dtypes = [getattr(aval, "dtype", None) for aval in (*args, *made)]
    return primitive.name in MAKES_COMPLEX or any(
        dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
        for dtype in (*dtypes, params.get("new_dtype"))
    )


def _gathers(closed: Any) -> bool:
    return any(is_gather(eqn) for eqn in getattr(closed, "jaxpr", closed).eqns)


def _is_cheap(eqn: Any) -> bool:
    """Whether it may be done once more for each stretch that reads it."""
    name = eqn.primitive.name
    if name in CONTROL_FLOW or name == "name" or eqn.effects:
        return False
    return equation_flops(eqn) == 0


def _plainly(traced: Equations, eqns: Sequence[Any], env: dict[Var, Any]) -> None:
    for eqn in eqns:
        _make_early(traced.before(variables(eqn.invars)), env)
        take([eqn], env)


def _make_early(eqns: Sequence[Any], env: dict[Var, Any]) -> None:
    take([eqn for eqn in eqns if any(var not in env for var in eqn.outvars)], env)


def _by_itself(
    traced: Equations, stretch: Stretch, eqns: Sequence[Any], env: dict[Var, Any]
) -> None:
    """Evaluate a stretch; of what it makes, what is read after it becomes known."""
    produced = [var for eqn in eqns for var in eqn.outvars]
    read = [var for eqn in eqns for var in variables(eqn.invars)]
    early = traced.before(read)
    inputs = _outside([*early, *eqns])
    results = [var for var in produced if traced.last_read.get(var, -1) >= stretch.end]

    def part(*values: Any) -> list[Any]:
        here = dict(zip(inputs, values, strict=True))
        if stretch.in_turn:
            _in_turn(traced, early, here)
        _make(early, read, here)
        take(eqns, here)
        return [here[var] for var in results]

    policy = but_complex(stretch.policy)
    checkpointed = jax.checkpoint(part, policy=policy, prevent_cse=not stretch.in_loop)
    values = checkpointed(*(env[var] for var in inputs))
    env.update(zip(results, values, strict=True))


def _cut_inside(eqn: Any, cut: Cut) -> Any:
    """A call or loop with the function in it computed in stretches."""
    closed = eqn.params["jaxpr"]
    traced = Equations(closed.jaxpr, ())
    in_loop = eqn.primitive.name == "scan"
    stretches = [replace(stretch, in_loop=in_loop) for stretch in cut(traced)]
    shapes = shapes_of(closed.jaxpr.invars)
    changed = jax.make_jaxpr(lambda *args: evaluated(traced, stretches, [*closed.consts, *args]))
    return eqn.replace(params={**eqn.params, "jaxpr": changed(*shapes)})


def _outside(eqns: Sequence[Any]) -> list[Var]:
    """What equations read and do not make, each once."""
    produced = {var for eqn in eqns for var in eqn.outvars}
    read = dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars))
    return [var for var in read if var not in produced]


def _in_turn(traced: Equations, early: Sequence[Any], here: dict[Var, Any]) -> None:
    """Let parameters be gathered after what else is read here has been computed."""
    pieces, others = _pieces(traced, early), _computed(traced, here)
    if pieces and others:
        both = [*pieces, *others]
        here.update(zip(both, _together([here[var] for var in both]), strict=True))


def _pieces(traced: Equations, early: Sequence[Any]) -> list[Var]:
    """What is gathered of parameters, as it is before that."""
    return _outside([*traced.before(eqn.outvars[0] for eqn in early if is_gather(eqn))])


def _computed(traced: Equations, here: Mapping[Var, Any]) -> list[Var]:
    """Those values that were computed with parameters, and can have gradients."""
    return [
        var
        for var, value in here.items()
        if var not in traced.args and var in traced.depends and _is_float(value)
    ]


def _is_float(value: Any) -> bool:
    return jax.numpy.issubdtype(value.dtype, jax.numpy.floating)


def _hold_back(traced: Equations, stretch: Stretch, env: dict[Var, Any]) -> None:
    """Let the backward pass leave a stretch only when its parameters have their gradients.

    Nothing else waits for those. XLA for TPU may put off products for them to the end of the step,
    and hold what they read of every block till then.
    """
    eqns = traced.rest[stretch.start : stretch.end]
    early = traced.before(var for eqn in eqns for var in variables(eqn.invars))
    pieces = [var for var in _pieces(traced, early) if _is_float(env[var])]
    waiting = _computed(traced, {var: env[var] for var in _outside([*early, *eqns])})
    if pieces and waiting:
        both = [*pieces, *waiting]
        env.update(zip(both, _gradients_together([env[var] for var in both]), strict=True))


def _gradients_together(values: list[Any]) -> list[Any]:
    """The same values, none of whose gradients is there before all are."""

    @jax.custom_vjp
    def together(values: list[Any]) -> list[Any]:
        return values

    together.defvjp(
        lambda values: (values, None), lambda _, grads: (jax.lax.optimization_barrier(grads),)
    )
    return together(values)


def _together(values: list[Any]) -> list[Any]:
    """The same values, none of which is there before all are; gradients do not wait."""

    @jax.custom_jvp
    def together(values: list[Any]) -> list[Any]:
        return jax.lax.optimization_barrier(values)

    @together.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.lax.optimization_barrier(primals[0]), tangents[0]

    return together(values)


def _make(early: Sequence[Any], read: Sequence[Var], here: dict[Var, Any]) -> None:
    """Make what the stretch reads of parameters; gathered ones, cast or not, are not kept."""
    gathered = {var for eqn in early if is_gather(eqn) for var in eqn.outvars}
    for eqn in early:
        if not gathered.isdisjoint(variables(eqn.invars)):
            gathered.update(eqn.outvars)
    take([eqn for eqn in early if gathered.isdisjoint(eqn.outvars)], here)
    rest = [eqn for eqn in early if not gathered.isdisjoint(eqn.outvars)]
    if not rest:
        return
    inputs, outputs = _outside(rest), [var for var in dict.fromkeys(read) if var in gathered]

    def make(*values: Any) -> list[Any]:
        inner = dict(zip(inputs, values, strict=True))
        take(rest, inner)
        return [inner[var] for var in outputs]

    unit = jax.custom_vjp(make)
    unit.defvjp(
        lambda *values: (unit(*values), values),
        lambda values, gradients: jax.vjp(make, *values)[1](gradients),
    )
    here.update(zip(outputs, unit(*(here[var] for var in inputs)), strict=True))
