"""What the update of an optimizer asks for beside gradients, slots and parameters: the loss.

Transformations of Optax take extra arguments by name, and chains of them take any. So the signature
does not say whether one of them reads ``value``. Its functions are searched for the word, which is
cheap, and only where it is there is the update traced, which says it for certain.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ..errors import ModelError
from ..layouts.params import ParamInfo
from ..program import Arrays

LOSS = "step/loss"  # where an update finds the mean loss of its step among its slots
_VALUE = "value"  # what Optax calls it


def loss_slot_of(optimizer: Any, params: Any, slots: Any) -> ParamInfo | None:
    """How the update of an optimizer finds the loss, if it computes with it.

    The trees are of shapes. The loss has the type of the parameters, or float32 where that is
    wider.

    >>> import optax
    >>> shapes = jax.ShapeDtypeStruct([2], "float32")
    >>> plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    >>> loss_slot_of(plateau, shapes, jax.eval_shape(plateau.init, shapes)).path
    'step/loss'
    >>> loss_slot_of(optax.sgd(0.1), shapes, jax.eval_shape(optax.sgd(0.1).init, shapes))
    """
    if not _reads_loss(optimizer, params, slots):
        return None
    dtype = _shape(params).dtype
    return ParamInfo(LOSS, (LOSS,), (), str(dtype), dtype.itemsize, "slot")


def _reads_loss(optimizer: Any, params: Any, slots: Any) -> bool:
    """Whether the update of an optimizer computes with ``value``; the trees are of shapes."""
    if not any(map(_has_the_word, _functions(optimizer.update))):
        return False

    def update(value: Any, *trees: Any) -> Any:
        return optimizer.update(*trees, **{_VALUE: value})

    try:
        closed = jax.make_jaxpr(update)(_shape(params), params, slots, params)
    except Exception:  # it cannot take a step, or asks for more: the first step says so
        return False
    value = closed.jaxpr.invars[0]
    read = [atom for eqn in closed.jaxpr.eqns for atom in eqn.invars] + closed.jaxpr.outvars
    return any(atom is value for atom in read if not isinstance(atom, Literal))


def taking_loss(slots: Arrays, slot: ParamInfo) -> dict[str, Any]:
    """The loss as the update takes it. Raises ModelError where no step has noted it."""
    if slot.path not in slots:
        raise ModelError(
            "the optimizer computes with the loss, and its slots are without it. Write "
            "program.update(params, grads, program.noting(slots, loss)), with the mean loss."
        )
    return {_VALUE: slots[slot.path]}


def _shape(params: Any) -> Any:
    """The shape of a loss: of the type of the parameters, which is at least float32."""
    floats = [p.dtype for p in jax.tree.leaves(params) if jnp.issubdtype(p.dtype, jnp.floating)]
    return jax.ShapeDtypeStruct((), jnp.result_type("float32", *floats))


def _has_the_word(function: Any) -> bool:
    return _VALUE in _words(function.__code__)


def _words(code: CodeType) -> Iterator[Any]:
    yield from code.co_varnames
    for constant in code.co_consts:
        yield from _words(constant) if isinstance(constant, CodeType) else [constant]


def _functions(function: Any) -> Iterator[Any]:
    """The functions that may be called by one: what it has closed over, and other optimizers."""
    todo, seen = [function], dict[int, Any]()  # which keeps them: a number is used again else
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, functools.partial):
            todo += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, (tuple, list)):
            todo += one
        elif inspect.ismethod(one):
            todo += [one.__func__, getattr(one.__self__, "__dict__", one.__self__)]
        elif inspect.isfunction(one):
            yield one
            todo += _closed_over(one)
        elif (inner := getattr(one, "__wrapped__", None)) is not None:  # by jax.jit
            todo.append(inner)
        elif _is_optimizer(one):
            todo.append(one.update)


def _closed_over(function: Any) -> list[Any]:
    cells = [cell for cell in function.__closure__ or () if _is_filled(cell)]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    optimizers = [value for value in named if _is_optimizer(value)]
    return [*(cell.cell_contents for cell in cells), *(function.__defaults__ or ()), *optimizers]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not yet
        return False


def _is_optimizer(value: Any) -> bool:
    is_class = inspect.isclass(value) or inspect.ismodule(value)
    return not is_class and all(callable(getattr(value, name, None)) for name in ("init", "update"))
