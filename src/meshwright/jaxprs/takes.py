"""Look-ups of one entry of an array's first dim, as ``jnp.take(stack, 3, axis=0)`` makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .edits import shapes_of
from .evaluation import bound, evaluated, take
from .slices import is_literal, needed

_Fold = Callable[..., Any]
_FOLDED: dict[str, _Fold] = {  # what a number goes through on its way to a look-up
    "lt": np.less,
    "ge": np.greater_equal,
    "add": np.add,
    "sub": np.subtract,
    "max": np.maximum,
    "min": np.minimum,
    "select_n": lambda which, no, yes: np.where(which, yes, no),
    "clamp": lambda low, x, high: np.clip(x, low, high),
}
_RESHAPED = ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type")


def is_of_one_entry(eqn: Any) -> bool:
    """Whether a gather takes one entry of the first dim, and all of the others.

    >>> import jax, jax.numpy as jnp
    >>> from .edits import equations
    >>> def gathers(axis):
    ...     traced = jax.make_jaxpr(lambda w: jnp.take(w, 3, axis=axis))(jnp.ones((8, 8)))
    ...     return [eqn for eqn in equations(traced) if eqn.primitive.name == "gather"]
    >>> [is_of_one_entry(eqn) for axis in (0, 1) for eqn in gathers(axis)]
    [True, False]
    """
    if eqn.primitive.name != "gather":
        return False
    stack, index = (var.aval.shape for var in eqn.invars[:2])
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    taken = numbers.collapsed_slice_dims, numbers.start_index_map, numbers.offset_dims
    of_first = taken == ((0,), (0,), tuple(range(len(stack) - 1)))
    return index == (1,) and of_first and tuple(sizes) == (1, *stack[1:])


def as_slices(jaxpr: Any) -> Any:
    """An open jaxpr in which such look-ups by numbers that are written into it are slices.

    >>> import jax, jax.numpy as jnp
    >>> layer = jax.make_jaxpr(lambda w: jnp.take(w, -1, axis=0))(jnp.ones((8, 4, 4)))
    >>> [eqn.primitive.name for eqn in as_slices(layer.jaxpr).eqns]
    ['slice', 'squeeze']
    """
    eqns = list[Any]()
    for eqn in jaxpr.eqns:
        taken = _stack_and_number(eqn)
        eqns += [eqn] if taken is None else _slice(eqn, *taken)
    return jaxpr.replace(eqns=eqns)


def _stack_and_number(eqn: Any) -> tuple[Any, int] | None:
    """What a jitted look-up takes one entry of, and which; ``None`` for any other equation."""
    if eqn.primitive.name != "jit" or len(eqn.outvars) != 1:
        return None
    closed = eqn.params["jaxpr"]
    inner = closed.jaxpr
    gather = next((some for some in inner.eqns if some.outvars[0] is inner.outvars[0]), None)
    if gather is None or not is_of_one_entry(gather) or gather.invars[0] not in inner.invars:
        return None
    stack, index = eqn.invars[inner.invars.index(gather.invars[0])], gather.invars[1]
    values = bound(inner, closed.consts, eqn.invars)
    values = {var: atom.val for var, atom in values.items() if is_literal(atom)}
    try:
        take([inner.eqns[n] for n in needed(inner.eqns, [index])], values, _folded)
        (number,) = values[index].tolist()
    except KeyError:  # it depends on something else
        return None
    return (stack, number) if 0 <= number < stack.aval.shape[0] else None


def _folded(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """The results for numbers. Raises ``KeyError`` for an equation that is not in the table."""
    name, (result, *_) = eqn.primitive.name, eqn.outvars
    if name == "jit":
        closed = eqn.params["jaxpr"]
        return evaluated(closed.jaxpr, closed.consts, operands, _folded)
    if name in _RESHAPED and np.size(operands[0]) == 1:
        return [np.full(result.aval.shape, np.asarray(operands[0]).item(), result.aval.dtype)]
    return [_FOLDED[name](*operands)]


def _slice(eqn: Any, stack: Any, number: int) -> list[Any]:
    import jax

    def entry(value: Any) -> Any:
        return jax.lax.squeeze(jax.lax.slice_in_dim(value, number, number + 1), (0,))

    cut, squeezed = jax.make_jaxpr(entry)(*shapes_of([stack])).jaxpr.eqns
    return [
        cut.replace(invars=[stack], source_info=eqn.source_info),
        squeezed.replace(outvars=eqn.outvars, source_info=eqn.source_info),
    ]
