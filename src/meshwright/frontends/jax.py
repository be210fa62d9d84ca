"""The front end for plain JAX: a loss function, parameters and an Optax optimizer as a Program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ModelError
from ..placement import ParamInfo, Role
from ..program import Arrays, Aux, Batch, Logs, Program, TrainState

Params = Any  # a pytree of arrays


def jax_program(
    loss: Callable[..., Any],
    params: Params | Callable[[], Params],
    optimizer: Any,
    *,
    forward: Callable[[Params, Any], Any] | None = None,
    name: str = "program",
) -> Program:
    """A Program from a pure loss function, parameters and an optimizer.

    ``loss(params, batch)`` returns a scalar, or ``(scalar, logs)`` with a dict of scalars to show.
    ``params`` is a pytree of arrays, or a function without arguments that makes one; the function
    is traced, so that each array can be made directly in its layout. ``optimizer`` is Optax' pair
    of functions ``init`` and ``update``. ``forward(params, inputs)`` is only needed for prediction.
    Paths of parameters are their keys joined by ``/``.

    >>> import optax
    >>> program = jax_program(lambda p, b: p["w"] * b, {"w": jnp.ones([])}, optax.adam(0.1))
    >>> [info.path for info in program.slots]
    ['0/count', '0/mu/w', '0/nu/w']
    """
    make = params if callable(params) else lambda: jax.tree.map(jnp.asarray, params)
    shapes = jax.eval_shape(make)
    slot_shapes = jax.eval_shape(optimizer.init, shapes)
    tree, slot_tree = _Named(shapes), _Named(slot_shapes)
    param_infos = tree.infos("parameter")

    def initial() -> TrainState:
        values = make()
        return TrainState(tree.named(values), {}, slot_tree.named(optimizer.init(values)), {})

    def apply(values: Arrays, state: Arrays, inputs: Any, training: bool) -> tuple[Any, Arrays]:
        del training  # a plain function has no modes
        if forward is None:
            raise ModelError("this program has no forward function: pass forward= to jax_program.")
        return forward(tree.whole(values), inputs), state

    def whole_loss(
        values: Arrays, whole: TrainState, batch: Batch, training: bool
    ) -> tuple[Any, Aux]:
        del training
        result = loss(tree.whole(values), batch)
        value, logs = result if isinstance(result, tuple) else (result, {})
        return value, Aux(value, logs, whole.state, whole.metrics)

    def measure(metrics: Arrays, aux: Aux, batch: Batch) -> tuple[Arrays, Logs]:
        del batch
        return metrics, {"loss": aux.loss, **aux.outputs}

    def update(values: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
        changes, new = optimizer.update(
            tree.whole(grads), slot_tree.whole(slots), tree.whole(values)
        )
        moved = {path: values[path] + change for path, change in tree.named(changes).items()}
        return moved, slot_tree.named(new)

    return Program(
        name=name,
        params=param_infos,
        state=(),
        slots=slot_tree.infos("slot", param_infos),
        metrics=(),
        initial=initial,
        forward=apply,
        loss=whole_loss,
        measure=measure,
        update=update,
    )


class _Named:
    """Turns a pytree of one structure into a dict by path and back."""

    def __init__(self, tree: Any) -> None:
        with_paths, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._leaves = [leaf for _, leaf in with_paths]
        self._paths = [
            jax.tree_util.keystr(path, simple=True, separator="/") or "params"
            for path, _ in with_paths
        ]

    def named(self, tree: Any) -> Arrays:
        return dict(zip(self._paths, jax.tree.leaves(tree), strict=True))

    def whole(self, values: Arrays) -> Any:
        return jax.tree.unflatten(self._structure, [values[path] for path in self._paths])

    def infos(self, role: Role, owners: tuple[ParamInfo, ...] = ()) -> tuple[ParamInfo, ...]:
        return tuple(
            ParamInfo(
                path=path,
                spellings=(path,),
                dims=tuple(leaf.shape),
                dtype=str(leaf.dtype),
                itemsize=leaf.dtype.itemsize,
                role=role,
                owner=_owner(path, tuple(leaf.shape), owners),
            )
            for path, leaf in zip(self._paths, self._leaves, strict=True)
        )


def _owner(path: str, dims: tuple[int, ...], owners: tuple[ParamInfo, ...]) -> str | None:
    """The parameter whose tree this slot repeats: its path ends with the parameter's."""
    fitting = [o.path for o in owners if f"/{path}".endswith(f"/{o.path}") and o.dims == dims]
    return max(fitting, key=len, default=None)
