"""How a step stores arrays that do not divide: with zeros behind them, which are cut off for use.

A device array divides over the axes of its sharding, or JAX refuses it. A layout with ``pad=True``
lets a weight be stored with larger dims. Everything that computes sees the array in its own dims:
in the loss it is whole along the dims that are padded, for XLA's partitioner makes silent mistakes
where a split dim does not divide (``spatial.py``); in the optimizer's update, whose norms and means
must not count the padding, it stays in the pieces that it is stored in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..layouts.layout import Layout
from ..layouts.params import ParamInfo
from ..layouts.placement import Placement
from ..program import Arrays, Aux, Batch, Logs, Program, Step, TrainState
from .remat_stretches import GATHERED

Infos = Iterable[ParamInfo]


@dataclass(frozen=True)
class Stored:
    """One padded array: its own dims, how it is kept, and how it lies where it is used.

    The two layouts differ at level 3 of ZeRO; the stored dims are the same in both.

    >>> import jax.numpy as jnp, meshwright as mw
    >>> layout = mw.Layout([None, "model"], mw.create_mesh({"batch": 2, "model": 4}), pad=True)
    >>> kernel = Stored((2, 3), layout, layout)
    >>> kernel.pad(jnp.ones([2, 3])).shape, kernel.cut(jnp.ones([2, 4])).shape
    ((2, 4), (2, 3))
    """

    dims: tuple[int, ...]
    at_rest: Layout
    used: Layout

    def pad(self, value: Any) -> Any:
        """The array as it is stored."""
        return self._padded(value, self.at_rest)

    def cut(self, value: Any) -> Any:
        """The array in its own dims, in the pieces that it is stored in."""
        return jax.lax.slice(value, [0] * len(self.dims), self.dims)

    def take(self, value: Any) -> Any:
        """The array in its own dims, whole along those that are padded; its gradient is stored.

        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> layout = mw.Layout(["model"], mw.create_mesh({"batch": 2, "model": 4}), pad=True)
        >>> bias = Stored((3,), layout, layout)
        >>> jax.jit(jax.grad(lambda b: (2 * bias.take(b)).sum()))(jnp.ones([4])).tolist()
        [2.0, 2.0, 2.0, 0.0]
        """
        whole = self.used.fitting(self.dims).sharding
        constrain = jax.lax.with_sharding_constraint

        @jax.custom_vjp
        def take(value: Any) -> Any:
            # Both sides are held: what is between them would be split unevenly otherwise.
            return checkpoint_name(constrain(self.cut(constrain(value, whole)), whole), GATHERED)

        def backward(_: None, gradient: Any) -> tuple[Any]:
            return (self._padded(constrain(gradient, whole), self.used),)

        take.defvjp(lambda value: (take(value), None), backward)
        return take(value)

    def _padded(self, value: Any, layout: Layout) -> Any:
        stored = layout.stored_dims(self.dims)
        behind = [(0, more - size) for size, more in zip(self.dims, stored, strict=True)]
        return jax.lax.with_sharding_constraint(jnp.pad(value, behind), layout.sharding)


@dataclass(frozen=True, eq=False)
class Storing:
    """The padded arrays of a program by path, in the fields of :class:`TrainState`."""

    parts: tuple[dict[str, Stored], ...] = ({}, {}, {}, {})

    @classmethod
    def of(
        cls, placement: Placement, params: Infos, state: Infos, slots: Infos, metrics: Infos
    ) -> Storing:
        """What is padded under a placement; slots follow the parameters among these."""
        parts = [tuple(part) for part in (params, state, slots, metrics)]
        infos = [info for part in parts for info in part]
        if not any(entry.layout.pad for entry in placement.layouts) and not any(
            info.asked is not None and info.asked.pad for info in infos
        ):
            return cls()
        entries = {entry.info: entry for entry in placement.place(infos)}
        used = {entry.info: entry.layout for entry in placement.with_zero(0).place(infos)}
        return cls(
            tuple(
                {
                    info.path: Stored(info.dims, entries[info].layout, used[info])
                    for info in part
                    if entries[info].layout.pad
                }
                for part in parts
            )
        )

    def __bool__(self) -> bool:
        return any(self.parts)

    # Outside of a step

    def store(self, state: TrainState) -> TrainState:
        """The state as a step takes it; parts may lack some arrays."""
        return self._mapped_with(state, lambda stored, value: _padding(stored)(value))

    def restore(self, state: TrainState) -> TrainState:
        """The state with every array in its own dims, as a device array that divides."""
        return self._mapped_with(state, lambda stored, value: _cutting(stored)(value))

    def _mapped_with(self, state: TrainState, act: Callable[[Stored, Any], Any]) -> TrainState:
        if not self:
            return state
        return TrainState(*(_mapped(p, s, act) for p, s in zip(state, self.parts, strict=True)))

    # Within a step

    def pad(self, state: TrainState) -> TrainState:
        """The state as it is stored, inside a traced function."""
        return self._mapped_with(state, Stored.pad)

    def take(self, state: TrainState) -> TrainState:
        """The state as the model computes with it, inside a traced function; slots in pieces."""
        cut = self._mapped_with(state._replace(params={}, state={}), Stored.cut)
        whole = self._mapped_with(state._replace(slots={}, metrics={}), Stored.take)
        return cut._replace(params=whole.params, state=whole.state)

    def take_weights(self, params: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        """Parameters and state as the model computes with them."""
        whole = self.take(TrainState(params, state, {}, {}))
        return whole.params, whole.state


def stored(program: Program, storing: Storing) -> Program:
    """The program over arrays as they are stored: the same numbers."""
    if not storing:
        return program
    of_params, of_state, of_slots, _ = storing.parts

    def forward(params: Arrays, state: Arrays, inputs: Any, training: bool) -> tuple[Any, Arrays]:
        weights = storing.take_weights(params, state)
        outputs, new = program.forward(*weights, inputs, training)
        return outputs, _mapped(new, of_state, Stored.pad)

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        weights = _mapped(params, of_params, Stored.take)
        value, aux = program.loss(weights, storing.take(whole), batch, training)
        return value, aux._replace(state=_mapped(aux.state, of_state, Stored.pad))

    def update(params: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
        params, grads = (_mapped(arrays, of_params, Stored.cut) for arrays in (params, grads))
        new, new_slots = program.update(params, grads, _mapped(slots, of_slots, Stored.cut))
        return _mapped(new, of_params, Stored.pad), _mapped(new_slots, of_slots, Stored.pad)

    def predict(params: Arrays, state: Arrays, batch: Batch) -> tuple[Any, Arrays]:
        assert program.predict is not None  # or this is not used
        outputs, new = program.predict(*storing.take_weights(params, state), batch)
        return outputs, _mapped(new, of_state, Stored.pad)

    def whole_step(own: Step | None) -> Step | None:
        def step(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
            assert own is not None
            new, logs = own(storing.take(whole), batch)
            return storing.pad(new), logs

        return own and step

    infos = zip((program.params, program.state, program.slots), storing.parts, strict=False)
    params, state, slots = (tuple(_grown(info, part) for info in some) for some, part in infos)
    return replace(
        program,
        params=params,
        state=state,
        slots=slots,
        initial=lambda: storing.pad(program.initial()),
        forward=forward,
        loss=loss,
        update=update,
        predict=program.predict and predict,
        own_step=whole_step(program.own_step),
        own_test_step=whole_step(program.own_test_step),
    )


def _mapped(values: Arrays, part: dict[str, Stored], act: Callable[[Stored, Any], Any]) -> Arrays:
    return {p: act(part[p], value) if p in part else value for p, value in values.items()}


def _grown(info: ParamInfo, part: dict[str, Stored]) -> ParamInfo:
    """The description of a variable as it is stored."""
    if info.path not in part:
        return info
    return replace(info, dims=part[info.path].at_rest.stored_dims(info.dims))


@functools.lru_cache(maxsize=1024)
def _padding(stored: Stored) -> Any:
    return jax.jit(stored.pad, out_shardings=stored.at_rest.sharding)


@functools.lru_cache(maxsize=1024)
def _cutting(stored: Stored) -> Any:
    return jax.jit(stored.cut, out_shardings=stored.at_rest.fitting(stored.dims).sharding)
