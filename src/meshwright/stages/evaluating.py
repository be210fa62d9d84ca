"""Equations of a traced loss, evaluated in the mesh of a stage, whatever mesh they were traced in.

A value behind a layout is typed by a mesh, and so is what JAX has traced of functions that read it.
In a stage the mesh is another one: its axis of stages is taken by hand. So the equations of calls,
loops and branches are evaluated one by one, and so are those of the gradients that functions have
of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import _compat
from ..errors import PipelineError
from ..jaxprs.primitives import inner_jaxprs, opened
from .window_products import is_product, product

Var = Any
Values = dict[Var, Any]
_SHARDINGS = ("sharding", "out_sharding")


def evaluated(
    closed: Any, eqns: Sequence[Any], outputs: Sequence[Any], known_values: Mapping[Var, Any]
) -> list[Any]:
    """The values of variables, by those of a jaxpr's equations that are given in their order."""
    values: Values = {
        **dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)),
        **known_values,
    }
    for eqn in eqns:
        if any(var not in values for var in eqn.outvars):
            read = [_read(atom, values) for atom in eqn.invars]
            values.update(zip(eqn.outvars, _results(eqn, read), strict=True))
    return [atom.val if hasattr(atom, "val") else values[atom] for atom in outputs]


def _read(atom: Any, values: Values) -> Any:
    """The value of an atom; a constant's is typed by no mesh."""
    if not hasattr(atom, "val"):
        return values[atom]
    return atom.val if atom.aval.sharding.mesh.empty else np.asarray(atom.val)


def _results(eqn: Any, read: list[Any]) -> list[Any]:
    """Of one equation."""
    make = _MADE_ANEW.get(eqn.primitive.name)
    if make is not None and _is_other_here(eqn):
        return make(eqn, read)
    if is_product(eqn):
        return [product(eqn, *read)]
    if eqn.primitive.name == "sharding_constraint":
        return [_with_sharding(eqn, read[0])]
    typed = [name for name in _SHARDINGS if eqn.params.get(name) is not None]
    if typed:  # by an operand that has a layout
        eqn = eqn.replace(params={**eqn.params, **dict.fromkeys(typed)})
    return _in_this_mesh(eqn, _compat.evaluate_here(eqn, read))


def _is_other_here(eqn: Any) -> bool:
    """Whether what it reads or makes is typed by a mesh, as behind a layout, or laid out within, or
    it holds a convolution that is taken as a product."""
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    if any(not aval.sharding.mesh.empty for aval in avals):
        return True
    inner = itertools.chain.from_iterable(inner_jaxprs(eqn).values())
    own = itertools.chain.from_iterable(opened(jaxpr).eqns for jaxpr in inner)
    return any(
        one.primitive.name == "sharding_constraint" or is_product(one) or _is_other_here(one)
        for one in own
    )


def _with_sharding(eqn: Any, value: Any) -> Any:
    """A layout names the axes that are left to XLA. It is left out where there is no mesh, as where
    rows alone are looked at."""
    import jax

    if jax.sharding.get_abstract_mesh().empty:
        return value
    spec = jax.sharding.PartitionSpec
    free = eqn.params["unconstrained_dims"]
    lies = [*eqn.params["sharding"].spec, *[None] * value.ndim][: value.ndim]
    lies = [spec.UNCONSTRAINED if dim in free else axes for dim, axes in enumerate(lies)]
    return jax.lax.with_sharding_constraint(value, spec(*lies))


def _in_this_mesh(eqn: Any, results: list[Any]) -> list[Any]:
    """Results of an equation. Raises :class:`PipelineError` where they are typed by another mesh,
    as those of a call are that is not evaluated here, and reads what has a layout."""
    import jax

    mesh = jax.sharding.get_abstract_mesh()
    types = [jax.typeof(result).sharding.mesh for result in results]
    if not mesh.empty and any(not type_mesh.empty and type_mesh != mesh for type_mesh in types):
        raise PipelineError(
            f"{eqn.primitive.name} reads a value that is laid out inside of the model, which is "
            "not supported in a stage. Lay weights out by their paths, layouts=, in place of "
            "rules= or activations=, or leave out the axes beside the stages' and the batch's."
        )
    return results


# Equations that call others


def _called(closed: Any, read: Sequence[Any]) -> list[Any]:
    arguments = dict(zip(closed.jaxpr.invars, read, strict=True))
    return evaluated(closed, closed.jaxpr.eqns, closed.jaxpr.outvars, arguments)


def _call(eqn: Any, read: list[Any]) -> list[Any]:
    return _called(eqn.params["jaxpr"], read)


def _own_gradient(eqn: Any, read: list[Any]) -> list[Any]:
    return _compat.evaluate_by(eqn, read, _called)


def _checkpointed(eqn: Any, read: list[Any]) -> list[Any]:
    import jax
    from jax.extend.core import ClosedJaxpr

    closed = ClosedJaxpr(eqn.params["jaxpr"], ())
    how = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return list(jax.checkpoint(lambda *xs: _called(closed, xs), **how)(*read))


def _scanned(eqn: Any, read: list[Any]) -> list[Any]:
    import jax

    params = eqn.params
    num_consts, num_carry = _compat.scan_counts(eqn)
    ends = num_consts + num_carry
    consts, carry, rows = read[:num_consts], read[num_consts:ends], read[ends:]

    def body(carry: Any, xs: Any) -> tuple[list[Any], list[Any]]:
        results = _called(params["jaxpr"], [*consts, *carry, *xs])
        return results[:num_carry], results[num_carry:]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, carry, rows, **how)
    return [*carry, *ys]


def _while(eqn: Any, read: list[Any]) -> list[Any]:
    import jax

    params = eqn.params
    begins, ends = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_test, of_body = read[:begins], read[begins:ends]
    return jax.lax.while_loop(
        lambda carry: _called(params["cond_jaxpr"], [*of_test, *carry])[0],
        lambda carry: _called(params["body_jaxpr"], [*of_body, *carry]),
        read[ends:],
    )


def _branched(eqn: Any, read: list[Any]) -> list[Any]:
    import jax

    branches = [lambda *xs, branch=branch: _called(branch, xs) for branch in eqn.params["branches"]]
    return jax.lax.switch(read[0], branches, *read[1:])


def _by_hand(eqn: Any, read: list[Any]) -> list[Any]:
    """What a device does on its pieces: more axes are taken by hand than that of the stages."""
    import jax
    from jax.extend.core import ClosedJaxpr

    params = eqn.params
    closed = ClosedJaxpr(params["jaxpr"], ())
    # Where rows alone are looked at there is no mesh, and any will do.
    mesh = params["mesh"] if jax.sharding.get_abstract_mesh().empty else None
    run = jax.shard_map(
        lambda *xs: tuple(_called(closed, xs)),
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(run(*read))


def _as_it_is(eqn: Any, read: list[Any]) -> list[Any]:
    """A change of type alone: where XLA lays values out, no type says how they lie."""
    return read


_MADE_ANEW = {
    "jit": _call,
    "custom_jvp_call": _own_gradient,
    "custom_vjp_call": _own_gradient,
    "remat2": _checkpointed,
    "scan": _scanned,
    "while": _while,
    "cond": _branched,
    "shard_map": _by_hand,
    "reshard": _as_it_is,
}
