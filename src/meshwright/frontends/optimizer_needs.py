"""What the update of an optimizer needs beside gradients, slots and parameters.

Transformations of Optax take extra arguments by name, and chains of them take any. So the signature
does not say whether one of them reads the loss. To trace the update says it for certain, but takes
2 s for AdamW with 300 arrays. So its functions are searched for the words first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from ..errors import ModelError
from ..layouts.params import ParamInfo
from ..program import Arrays

Needs = Literal["nothing", "value", "value_fn", "obj_fn"]  # as Optax calls them

LOSS = "step/loss"  # where an update finds the mean loss of its step among its slots


def needs_of(optimizer: Any, params: Any, slots: Any) -> Needs:
    """What the update of an optimizer needs; the trees are of shapes.

    The loss, or the loss as a function of the parameters: line searches call that ``value_fn``,
    and estimates of second derivatives ``obj_fn``.

    >>> import optax
    >>> def of(optimizer):
    ...     shapes = jax.ShapeDtypeStruct([2], "float32")
    ...     return needs_of(optimizer, shapes, jax.eval_shape(optimizer.init, shapes))
    >>> of(optax.sgd(0.1)), of(optax.polyak_sgd()), of(optax.lbfgs())
    ('nothing', 'value', 'value_fn')
    """
    functions = _functions(optimizer.update)
    words = {word for function in functions for word in _words(function.__code__)}
    if not words & {*get_args(Needs)}:
        return "nothing"
    trees = _shape(params), params, slots, params

    def with_value(value: Any, *trees: Any) -> Any:
        return optimizer.update(*trees, value=value)

    if (jaxpr := _traced(with_value, *trees)) is not None:
        return "value" if _reads_first(jaxpr) else "nothing"
    for name in ("value_fn", "obj_fn"):

        def searching(value: Any, grads: Any, slots: Any, params: Any, name: Needs = name) -> Any:
            def loss(params: Any) -> Any:
                return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(params)), value)

            return optimizer.update(grads, slots, params, **again(name, value, grads, loss))

        if _traced(searching, *trees) is not None:
            return name
    return "nothing"


def again(name: Needs, value: Any, grads: Any, loss: Callable[[Any], Any]) -> dict[str, Any]:
    """The arguments of an update that evaluates the loss again; ``name`` is what it needs."""
    return {"value": value, "grad": grads, name: loss} if name == "value_fn" else {name: loss}


def _traced(update: Callable[..., Any], *shapes: Any) -> Any:
    try:
        return jax.make_jaxpr(update)(*shapes).jaxpr
    except Exception:  # it needs more, or takes no step at all: the first one says so
        return None


def _reads_first(jaxpr: Any) -> bool:
    """Whether a jaxpr computes with its first argument."""
    read = [atom for eqn in jaxpr.eqns for atom in eqn.invars] + jaxpr.outvars
    return any(atom is jaxpr.invars[0] for atom in read)


def loss_slot(params: Any) -> ParamInfo:
    """How an update finds the loss: in the type of the parameters, or float32 where that is wider.

    >>> loss_slot({"w": jax.ShapeDtypeStruct([2], "bfloat16")}).dtype
    'float32'
    """
    dtype = _shape(params).dtype
    return ParamInfo(LOSS, (LOSS,), (), str(dtype), dtype.itemsize, "slot")


def taking_loss(slots: Arrays, slot: ParamInfo) -> dict[str, Any]:
    """The loss as the update takes it. Raises ModelError where no step has noted it."""
    if slot.path not in slots:
        raise ModelError(
            "the optimizer computes with the loss, and its slots are without it. Write "
            "program.update(params, grads, program.noting(slots, loss)), with the mean loss."
        )
    return {"value": slots[slot.path]}


def _shape(params: Any) -> Any:
    """The shape of a loss: of the type of the parameters, which is at least float32."""
    floats = [p.dtype for p in jax.tree.leaves(params) if jnp.issubdtype(p.dtype, jnp.floating)]
    return jax.ShapeDtypeStruct((), jnp.result_type("float32", *floats))


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
