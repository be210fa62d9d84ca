"""Functions with their jaxprs edited: what the files beside this one have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .primitives import CHECKPOINTS
from .slices import variables

Edit = Callable[[Any], Any]  # of an open jaxpr


def unchanged(jaxpr: Any) -> Any:
    """The edit that changes nothing."""
    return jaxpr


_WITH_INNER = CHECKPOINTS | {"jit", "scan"}


def edited(function: Callable[..., Any], edit: Edit) -> Callable[..., Any]:
    """The same function of pytrees, traced and edited; ``edit`` is applied to inner jaxprs too."""
    import jax
    from jax.extend.core import jaxpr_as_fun

    def run(*args: Any) -> Any:
        closed, tree = traced(function, *args)
        changed = closed.replace(jaxpr=throughout(closed.jaxpr, edit))
        return jax.tree.unflatten(tree, jaxpr_as_fun(changed)(*jax.tree.leaves(args)))

    return run


def traced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The closed jaxpr of a call with arrays, or their shapes, and the tree of its results."""
    import jax

    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
    return closed, jax.tree.structure(shapes)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, also those of inner jaxprs (a loop's body counts once)."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs_inside(eqn):
            yield from equations(inner)


def jaxprs_inside(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs; derivatives that wait to be asked for are functions."""
    values = (v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values())
    return [
        one
        for several in values
        for one in several
        if hasattr(one, "eqns") or hasattr(one, "jaxpr")
    ]


def count_uses(jaxpr: Any) -> Counter[Any]:
    """How often each variable is read, results included."""
    read = [var for eqn in jaxpr.eqns for var in eqn.invars] + list(jaxpr.outvars)
    return Counter(variables(read))


def shapes_of(variables: Iterable[Any]) -> list[Any]:
    """A ``jax.ShapeDtypeStruct`` for each variable, to trace a function of them with."""
    import jax

    avals = (var.aval for var in variables)
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in avals
    ]


def call_of(function: Callable[..., Any], eqn: Any) -> Any:
    """An equation that calls ``function`` in the place of another one.

    It is traced rather than built, so that only public names of JAX are needed.
    """
    import jax

    (call,) = jax.make_jaxpr(function)(*shapes_of(eqn.invars)).jaxpr.eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def constraint_on(value: Any, mesh: Any, entries: Sequence[Any], like: Any) -> Any:
    """An equation that lays ``value`` out, at the source line of the equation ``like``.

    ``entries`` are those of a ``PartitionSpec``. The equation has a variable of its own for the
    result. It is traced rather than built, so that only public names of JAX are needed.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))
    (eqn,) = traced(*shapes_of([value])).jaxpr.eqns
    return eqn.replace(invars=[value], source_info=like.source_info)


def throughout(jaxpr: Any, edit: Edit) -> Any:
    """An open jaxpr edited, inner jaxprs too."""
    changed = edit(jaxpr)
    return changed.replace(eqns=[_inside(eqn, edit) for eqn in changed.eqns])


def _inside(eqn: Any, edit: Edit) -> Any:
    """The equation; the backward pass of what is recomputed is an equation with a jaxpr inside."""
    inner = eqn.params.get("jaxpr") if eqn.primitive.name in _WITH_INNER else None
    if inner is None:
        return eqn
    closed = hasattr(inner, "jaxpr")
    changed = throughout(inner.jaxpr if closed else inner, edit)
    changed = inner.replace(jaxpr=changed) if closed else changed
    return eqn.replace(params={**eqn.params, "jaxpr": changed})
