"""The front end for plain JAX: a loss function, parameters and an Optax optimizer as a Program."""

from __future__ import annotations

import functools
import inspect
import reprlib
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ModelError
from ..layouts.params import ParamInfo
from ..program import Arrays, Aux, Batch, Logs, Program, TrainState
from ..step.gradient import check_dtypes
from .extras import Extras, zeros
from .flax_variables import tree_of
from .kept_state import State, state_of
from .optimizer_needs import Needs, again, loss_slot, needs_of, taking_loss
from .trees import Tree

Params = Any  # a pytree of arrays


def jax_program(
    loss: Callable[..., Any],
    params: Params | Callable[[], Params],
    optimizer: Any,
    *,
    forward: Callable[..., Any] | None = None,
    name: str = "program",
    seed: int = 0,
    batch: Batch | None = None,
    state: Params | Callable[[], Params] | None = None,
) -> Program:
    """A Program from a pure loss function, parameters and an optimizer.

    ``loss(params, batch)`` returns a scalar, or ``(scalar, logs)`` with a dict of scalars to show,
    each a mean over the rows of the batch. It may also take, by these names, ``key``, a random key
    that is new for each batch and micro-batch, ``keys``, one for each row of it, and ``step``, the
    number of the step from 0. Keys begin with ``seed`` and are equal on every mesh and layout;
    those of rows also however a step is cut into micro-batches. What is drawn from ``key`` is not,
    for every micro-batch has another. ``params`` is a pytree of arrays, or a function without
    arguments that makes one; the function is traced, so that each array can be made directly in its
    layout. Where it is a pytree of ``jax.ShapeDtypeStruct``, the program is one to plan with. A
    pytree that can be called, such as an Equinox module, is parameters: its arrays; what else is in
    it stays, also where the function makes it. ``optimizer`` is Optax' pair of functions ``init``
    and ``update``; an update that computes with ``value=`` gets the mean loss of the step.
    ``forward(params, inputs)`` is only needed for prediction. ``state`` is a pytree, as ``params``,
    of what a model keeps beside its parameters and does not train, such as the batch statistics of
    Flax: the loss has an argument of this name then and returns ``(scalar, logs, new_state)``, and
    ``forward`` may have one. ``name`` is shown in reports. ``batch`` is an example, or its shapes,
    and is only needed for a pipeline, which is cut by it. Paths of parameters are their keys joined
    by ``/``, and the names that a model of Flax gives to their dims are what ``rules`` of a
    placement split by. Raises :class:`~meshwright.ModelError` for a loss with other
    arguments that have no default, for ``params`` that needs arguments, and for two arrays of one
    path; a step raises it for a loss that returns something else, for parameters that are integers
    and for an optimizer that needs more than gradients, slots, parameters and the loss.

    >>> import optax
    >>> program = jax_program(lambda p, b: p["w"] * b, {"w": jnp.ones([])}, optax.adam(0.1))
    >>> [info.path for info in program.slots]
    ['0/count', '0/mu/w', '0/nu/w']
    >>> def dropped(params, batch, keys):
    ...     kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, [4]))(keys)
    ...     return jnp.mean(batch @ params["w"] * kept / 0.9)
    >>> [info.path for info in jax_program(dropped, {"w": jnp.ones([3, 4])}, optax.sgd(0.1)).state]
    ['counts/rows']
    """
    extras = Extras.of(loss, seed, is_stateful=state is not None)
    kept = None if state is None else state_of(*made(state))
    rest = _Rest()
    params, loss = rest.taken_from(params), rest.filling(loss)
    forward = None if forward is None else rest.filling(forward)
    program = program_of(loss, params, optimizer, forward, name, tree_of, extras, kept)
    return program if batch is None else replace(program, example=shapes_of(batch))


def forward_program(
    forward: Callable[[Params, Any], Any], params: Params | Callable[[], Params]
) -> Program:
    """A Program that can only predict: ``forward(params, inputs)``, which is never trained."""
    name = getattr(forward, "__name__", "function")
    rest = _Rest()
    params, forward = rest.taken_from(params), rest.filling(forward)
    return program_of(_not_trained, params, _NoOptimizer, forward, name, tree_of, Extras((), 0))


def _not_trained(*_: Any) -> Any:
    raise ModelError("this program has a forward function only: it cannot be trained.")


class _NoOptimizer:
    update = staticmethod(_not_trained)

    @staticmethod
    def init(params: Params) -> Params:
        return {}


def program_of(
    loss: Callable[..., Any],
    params: Params | Callable[[], Params],
    optimizer: Any,
    forward: Callable[..., Any] | None,
    name: str,
    tree_of: Callable[[Any], Tree],
    extras: Extras,
    state: State | None = None,
) -> Program:
    """The Program of plain functions over trees, whose arrays ``tree_of`` gives their paths.

    ``loss(params, batch, **more)`` takes what ``extras`` says, and ``state`` where there is one.
    """
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        what = textwrap.shorten(repr(optimizer), 80, placeholder=" ...")
        inner = " Pass its tx." if hasattr(optimizer, "tx") else ""  # that of Flax holds one
        raise ModelError(
            "expected an Optax optimizer, such as optax.adam(0.001); received "
            f"{what}, which has no init and update.{inner}"
        )
    make, shapes = made(params)
    slot_shapes = jax.eval_shape(optimizer.init, shapes)
    tree, slot_tree = tree_of(shapes), tree_of(slot_shapes)
    param_infos = tree.infos("parameter")

    needs = needs_of(optimizer, shapes, slot_shapes)
    evaluates = needs in ("value_fn", "obj_fn")
    slot = loss_slot(shapes) if needs == "value" else None
    state_infos = (*(() if state is None else state.infos(param_infos)), *extras.state)
    functions = _Functions(
        loss, make, optimizer, forward, tree, slot_tree, extras, state, slot, needs
    )
    return Program(
        name=name,
        params=param_infos,
        state=state_infos,
        slots=(*slot_tree.infos("slot", param_infos), *extras.slots),
        metrics=(),
        initial=functions.initial,
        forward=functions.apply,
        loss=functions.whole_loss,
        measure=functions.measure,
        update=functions.update,
        logs="of one batch",
        loss_slot=slot,
        own_step=functions.search_step if evaluates else None,
        step_of="optimizer" if evaluates else "model",
    )


@dataclass(frozen=True, eq=False)
class _Functions:
    """The functions of a :class:`Program` over arrays by path, by those over trees."""

    loss: Callable[..., Any]
    make: Callable[[], Params]
    optimizer: Any
    forward: Callable[..., Any] | None
    tree: Tree
    slot_tree: Tree
    extras: Extras
    state: State | None = None
    loss_slot: ParamInfo | None = None
    needs: Needs = "nothing"

    def initial(self) -> TrainState:
        values = self.make()
        slots = self.slot_tree.named(self.optimizer.init(values))
        kept = {} if self.state is None else self.state.initial()
        more, counts = zeros(self.extras.slots), zeros(self.extras.state)
        return TrainState(self.tree.named(values), {**kept, **counts}, {**slots, **more}, {})

    def apply(
        self, values: Arrays, state: Arrays, inputs: Any, training: bool
    ) -> tuple[Any, Arrays]:
        del training  # a plain function has no modes
        if self.forward is None:
            raise ModelError(
                "this program has no forward function: pass forward= where it is made."
            )
        kept = {} if self.state is None else self.state.taken_by(self.forward, state)
        return self.forward(self.tree.whole(values), inputs, **kept), state

    def whole_loss(
        self, values: Arrays, whole: TrainState, batch: Batch, training: bool
    ) -> tuple[Any, Aux]:
        more, state = self.extras.values(whole, batch), whole.state
        if self.state is None:
            result = self.loss(self.tree.whole(values), batch, **more)
        else:
            more["state"] = self.state.tree.whole(state)
            *result, new = _three_parts(self.loss(self.tree.whole(values), batch, **more))
            result, state = tuple(result), {**state, **self.state.checked(new)}
        value, logs = _value_and_logs(result)
        state = self.extras.after_batch(state, batch) if training else whole.state
        return value, Aux(value, logs, state, whole.metrics)

    def measure(self, metrics: Arrays, aux: Aux, batch: Batch) -> tuple[Arrays, Logs]:
        del batch
        return metrics, {"loss": aux.loss, **aux.outputs}

    def update(self, values: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
        more = {} if self.loss_slot is None else taking_loss(slots, self.loss_slot)
        return self._update(values, grads, slots, more)

    def search_step(self, whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        """A whole step, in which the optimizer evaluates the loss of the batch again."""
        check_dtypes(whole.params)

        def loss(values: Arrays) -> tuple[Any, Aux]:
            return self.whole_loss(values, whole, batch, True)

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(whole.params)
        tree = self.tree
        more = again(self.needs, value, tree.whole(grads), lambda p: loss(tree.named(p))[0])
        params, slots = self._update(whole.params, grads, whole.slots, more)
        metrics, logs = self.measure(aux.metrics, aux, batch)
        return TrainState(params, aux.state, slots, metrics), logs

    def _update(
        self, values: Arrays, grads: Arrays, slots: Arrays, more: dict[str, Any]
    ) -> tuple[Arrays, Arrays]:
        tree, slot_tree = self.tree, self.slot_tree
        taken = tree.whole(grads), slot_tree.whole(slots), tree.whole(values)
        try:
            changes, new = self.optimizer.update(*taken, **more)
        except (AttributeError, TypeError, ValueError) as error:
            raise ModelError(
                f"the update of the optimizer raised {type(error).__name__}: {error}\nIt gets "
                "gradients, slots and parameters, each a tree of one structure, and the loss as "
                "value=. Optimizers that evaluate the loss again (lbfgs, sophia) take whole steps: "
                "call trainer.step or program.own_step. Those that need a gradient for each row "
                "(dpsgd), or trees of another structure (lookahead), are not supported."
            ) from error
        by_path = tree.named(changes)
        _check_shapes(by_path, values)
        moved = {path: _moved(values[path], change) for path, change in by_path.items()}
        return moved, {**slot_tree.named(new), **self.extras.after_step(slots)}


def _three_parts(result: Any) -> tuple[Any, Any, Any]:
    if isinstance(result, tuple) and len(result) == 3:
        return result
    got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
    raise ModelError(
        "a loss that takes state returns (number, logs, new_state), logs as a dict that may be "
        f"empty; received {got}."
    )


def _value_and_logs(result: Any) -> tuple[Any, Logs]:
    """Both parts of what a loss returned, or :class:`~meshwright.ModelError` for anything else."""
    value: Any = result
    logs: Any = {}
    if isinstance(result, tuple) and len(result) == 2:
        value, logs = result
    dtype, dims = getattr(value, "dtype", None), getattr(value, "shape", ())
    is_float = isinstance(value, float) if dtype is None else jnp.issubdtype(dtype, jnp.floating)
    if dims or not is_float:
        kind = type(value).__name__ if dtype is None else f"{dtype} of shape {dims}"
        raise ModelError(
            "the loss must return one floating-point number, or (number, logs); received "
            f"{kind}. Take a mean over the rows, such as jnp.mean."
        )
    if not isinstance(logs, Mapping):
        raise ModelError(
            "the logs that a loss returns must be a dict of scalars, such as {'accuracy': value}; "
            f"received {type(logs).__name__}."
        )
    if nested := [name for name, log in logs.items() if isinstance(log, Mapping)]:
        raise ModelError(f"log {nested[0]!r} of the loss is a dict: name each scalar by itself.")
    if "loss" in logs:
        raise ModelError("'loss' is the name of the loss itself in the logs; choose another name.")
    return value, dict(logs)


def _check_shapes(changes: Arrays, values: Arrays) -> None:
    """Raise :class:`~meshwright.ModelError` where adding a change would repeat it over a parameter.

    ``optax.contrib.dpsgd`` takes the first dim of each gradient for rows, and sums over it.
    """
    lines = [
        f"  {path} has shape {jnp.shape(values[path])}; received a change of shape {shape}"
        for path, change in changes.items()
        if (shape := jnp.shape(change)) != jnp.shape(values[path])
    ]
    if lines:
        listed = "\n".join(lines)
        raise ModelError(
            "the optimizer changes parameters by arrays of other shapes, as those do that need a "
            f"gradient for each row (dpsgd), which is not supported:\n{listed}"
        )


def _moved(value: Any, change: Any) -> Any:
    """In the dtype of the parameter, as by ``optax.apply_updates``."""
    return (value + change).astype(value.dtype)


def arrays_of(params: Any) -> Any:
    """The tree of the arrays of parameters, which a pytree that can be called has beside others."""
    return _parted(params)[0] if callable(params) else params


def makes_parameters(params: Any) -> bool:
    """Whether it is a function that makes parameters, rather than a pytree of them."""
    is_function = jax.tree_util.all_leaves([params]) or isinstance(params, functools.partial)
    return callable(params) and is_function


def made(params: Any) -> tuple[Callable[[], Any], Any]:
    """The function that makes a tree of arrays, and the shapes of what it makes."""
    if makes_parameters(params):
        _refuse_arguments(params)
        return params, jax.eval_shape(lambda: _checked(params()))
    return lambda: jax.tree.map(_valued, params), _shapes_of_arrays(params)


def _refuse_arguments(make: Callable[..., Any]) -> None:
    """Raise ModelError for a function that needs arguments, such as a random key."""
    try:
        every = inspect.signature(make).parameters.values()
    except ValueError:  # of a function that is written in C, nothing is known
        return
    any_number = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [p.name for p in every if p.default is p.empty and p.kind not in any_number]
    if needed:
        name = getattr(make, "__name__", "init")
        name = name if name.isidentifier() else "init"  # of a lambda
        raise ModelError(
            "expected a function without arguments, which makes parameters or state; received "
            f"{name}({', '.join(needed)}). Fill in what it needs, as in "
            f"lambda: {name}(jax.random.key(0))."
        )


def _checked(tree: Any) -> Any:
    """The tree, if it is one of arrays and numbers."""
    _shapes_of_arrays(tree)
    return tree


def _shapes_of_arrays(tree: Any) -> Any:
    """The shapes of a tree; raises ModelError for leaves other than arrays, numbers and shapes."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    shapes, wrong = list[Any](), list[str]()
    for path, leaf in leaves:
        try:
            shapes.append(_shape(leaf))
        except TypeError:
            at = f" at {jax.tree_util.keystr(path)}" if path else ""
            wrong.append(f"{reprlib.repr(leaf)}{at}")
    if wrong:
        raise ModelError(
            f"expected arrays or numbers as parameters and state; received {', '.join(wrong)}. "
            "Leave them out of the tree, and let the loss close over them."
        )
    return jax.tree.unflatten(structure, shapes)


def _parted(tree: Any) -> tuple[Any, Any]:
    """The arrays of a pytree, and what else is in it, each with ``None`` for the other."""
    is_array = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")  # noqa: E731
    arrays = jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)
    return arrays, jax.tree.map(lambda leaf: None if is_array(leaf) else leaf, tree)


class _Rest:
    """What a pytree that can be called has beside its arrays, such as an Equinox module."""

    def __init__(self) -> None:
        self._others: Any = None  # until it has been made; of other pytrees for ever

    def taken_from(self, params: Any) -> Any:
        """Parameters, or the function that makes them, without it."""
        if not makes_parameters(params):
            return self._arrays_of(params)
        _refuse_arguments(params)
        return lambda: self._arrays_of(params())

    def filling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of arrays alone, which gets the rest with them in one tree."""

        @functools.wraps(function)
        def filled(arrays: Any, *args: Any, **options: Any) -> Any:
            return function(self._whole(arrays), *args, **options)

        return filled

    def _arrays_of(self, tree: Any) -> Any:
        if not callable(tree):
            return tree
        arrays, self._others = _parted(tree)
        return arrays

    def _whole(self, arrays: Any) -> Any:
        if self._others is None:
            return arrays
        return jax.tree.map(
            lambda array, other: other if array is None else array,
            arrays,
            self._others,
            is_leaf=lambda leaf: leaf is None,
        )


def shapes_of(batch: Any) -> Any:
    """The shapes of a batch's arrays, some of which may be shapes already."""
    return jax.tree.map(_shape, batch)


def _shape(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    return jax.eval_shape(jnp.asarray, value)


def _valued(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ModelError(
            "this program's parameters are shapes only: plan with it, or give jax_program arrays, "
            "or a function that makes them."
        )
    return jnp.asarray(value)
