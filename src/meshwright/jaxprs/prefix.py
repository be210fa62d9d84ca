"""Whether rows that are added to a batch leave what is computed from the others as it was.

A function is traced twice, for a few rows and for more, and the two jaxprs are walked side by side.
Each value of the small trace must be the beginning of the same value of the large one along the
one dim whose size differs, or equal to it where none does. Every primitive either carries that on
(elementwise, contractions over other dims, a reshape that keeps rows apart, random bits that count
from the first row on) or ends it: a sum over rows, a literal that is the number of rows, a trace of
another form. What is not known ends it too, so the answer errs to "mixed" and never to "apart".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .row_rules import RULES
from .twins import Dim, Pair, RowsMixError, check_constants, dim_of, dim_of_atoms


def row_dims(small: Any, large: Any) -> list[Dim]:
    """For each output of two closed jaxprs, the dim along which the small one is a beginning.

    The inputs of the small trace are taken to be beginnings of the large one's. Raises
    :class:`RowsMixError` where that is lost on the way.

    >>> import jax, jax.numpy as jnp
    >>> def two(f):
    ...     return [jax.make_jaxpr(f)(jnp.ones([rows, 3])) for rows in (5, 8)]
    >>> row_dims(*two(lambda x: (jnp.tanh(x), x.mean(1), x.T)))
    [0, 0, 1]
    >>> row_dims(*two(lambda x: x - x.mean(0)))
    Traceback (most recent call last):
    ...
    meshwright.jaxprs.twins.RowsMixError: reduce_sum over dim 0
    """
    check_constants(small.consts, large.consts)
    return _walk(small.jaxpr, large.jaxpr)


def _walk(small: Any, large: Any) -> list[Dim]:
    """One pair of open jaxprs, whose inputs are beginnings."""
    pairs: dict[Any, Any] = {}
    for a, b in zip(
        [*small.constvars, *small.invars], [*large.constvars, *large.invars], strict=True
    ):
        dim_of(a, b, "an argument")
        pairs[a] = b
    if len(small.eqns) != len(large.eqns):
        raise RowsMixError("the function has another form for more rows")
    for number in _needed(small):
        a, b = small.eqns[number], large.eqns[number]
        _check(Pair(a, b, pairs))
        pairs.update(zip(a.outvars, b.outvars, strict=True))
    return [dim_of_atoms(a, b, pairs) for a, b in zip(small.outvars, large.outvars, strict=True)]


def _needed(jaxpr: Any) -> list[int]:
    """The numbers of the equations that the outputs depend on."""
    from jax.extend.core import Literal

    wanted = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    found: list[int] = []
    for number in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[number]
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            wanted.update(v for v in eqn.invars if not isinstance(v, Literal))
            found.append(number)
    return found[::-1]


def _check(eqn: Pair) -> None:
    """Raise unless the results are beginnings, as the operands are."""
    if eqn.name in _CALLS:
        _calls(eqn)
    elif eqn.name in RULES:
        RULES[eqn.name](eqn)
    else:
        known = all(dim is None for dim in (*eqn.dims, *eqn.outs))
        eqn.need(known and eqn.name not in _OUTSIDE, "is not known to keep rows apart")
        eqn.same()


def _calls(eqn: Pair) -> None:
    """The jaxprs inside, whose inputs and outputs have the shapes that say how rows lie."""
    for key in _CALLS[eqn.name]:
        small, large = (e.params.get(key) for e in (eqn.small, eqn.large))
        for a, b in zip(_several(small), _several(large), strict=True):
            check_constants(getattr(a, "consts", ()), getattr(b, "consts", ()))
            _walk(getattr(a, "jaxpr", a), getattr(b, "jaxpr", b))
    if eqn.name == "scan":
        eqn.same("length", "reverse", "num_consts", "num_carry")
        over = eqn.dims[eqn.params["num_consts"] + eqn.params["num_carry"] :]
        eqn.need(all(dim != 0 for dim in over), "over rows")
        eqn.need(all(dim != 0 for dim in eqn.outs[eqn.params["num_carry"] :]), "over rows")
    if eqn.name == "cond":
        eqn.need(eqn.dims[0] is None, "by rows")


def _several(jaxprs: Any) -> Sequence[Any]:
    if jaxprs is None:
        raise RowsMixError("a call without a jaxpr")
    return jaxprs if isinstance(jaxprs, tuple | list) else (jaxprs,)


_CALLS: dict[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}

# Not even on values that are equal: these act on devices or on the host.
_OUTSIDE = {"pure_callback", "io_callback", "shard_map", "pallas_call"}
