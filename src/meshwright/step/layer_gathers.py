"""Stacked weights of layers, gathered one layer at a time, where it is read.

A ``jax.lax.scan`` over weights that are stacked along their first dim reads one layer of them in
each step, and a loop of Python reads each by its number. Gathered before the loop, they would all
be whole on every device while it runs, which is what ZeRO is there to avoid; MaxText gathers them
so as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from .. import _compat
from ..jaxprs.edits import call_of, shapes_of
from ..jaxprs.slices import variables
from ..layouts.layout import Layout
from ..layouts.zero import share_out
from .remat_stretches import but_complex, gathered, is_gather

Var = Any


@dataclass(frozen=True)
class Slices:
    """How a stacked parameter, or its gradient, lies: ``pieces`` in the loop; a layer of it
    ``whole`` and in a ``piece``."""

    shared: Layout  # outside of the loop
    pieces: Layout
    whole: Layout
    piece: Layout


@dataclass(frozen=True, eq=False)
class Spread:
    """A stacked parameter with a piece of every layer on each device: the variables of an edited
    jaxpr are what ``function`` returns for ``param``."""

    param: Var
    slices: Slices
    function: Callable[[Any], tuple[Any, ...]]
    variables: tuple[Var, ...]

    @classmethod
    def of(cls, key: _Key, slices: Slices, function: Callable[[Any], tuple[Any, ...]]) -> Spread:
        shape = jax.ShapeDtypeStruct(key.param.aval.shape, key.param.aval.dtype)
        variables = jax.make_jaxpr(function)(shape).jaxpr.outvars
        return cls(key.param, slices, function, tuple(variables))


class _Key(NamedTuple):
    """A parameter, and the type in which it is read."""

    param: Var
    dtype: Any


def gathering_by_layers(
    jaxpr: Any,
    params: Mapping[Var, tuple[Layout, Layout]],
    axes: tuple[str, ...],
    keeps: Callable[[Any], Callable[..., Any] | None],
) -> tuple[Any, list[Spread]]:
    """An open jaxpr that gathers each layer of these parameters where it is read: in a step of a
    loop, or by its number. What it reads in their place comes with it.

    ``params`` maps variables to the layouts they have while they are used and while they are shared
    out over ``axes``. ``keeps`` gives the policy of what each step of a loop keeps for the backward
    pass, or ``None`` where something inside the loop says it.
    """
    reader = _Reader(jaxpr, params, axes)
    eqns = list[Any]()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and not eqn.effects:
            eqns.append(_in_steps(eqn, reader, keeps))
        elif (read := reader.layer(eqn)) is not None:
            eqns.append(_gather(eqn, *read))
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), reader.spreads


@dataclass(frozen=True, eq=False)
class _Reader:
    """What an open jaxpr reads of stacked parameters."""

    jaxpr: Any
    params: Mapping[Var, tuple[Layout, Layout]]
    axes: tuple[str, ...]
    _stacks: dict[_Key, Spread] = field(default_factory=dict)

    @property
    def spreads(self) -> list[Spread]:
        """What has been read in their place."""
        return [*self._stacks.values(), *self._layers.values()]

    def stack(self, var: Var) -> Spread | None:
        """All layers of the parameter that this variable is; ``None`` for any other variable."""
        key = self._key(var)
        if key is not None and key not in self._stacks:
            spread = _spread(key, self._slices(key.param))
            self._stacks[key] = Spread.of(key, self._slices(key.param), lambda v: (spread(v),))
        return None if key is None else self._stacks[key]

    def layer(self, eqn: Any) -> tuple[Var, Slices] | None:
        """The pieces of the layer that an equation takes by its number; ``None`` if it does not."""
        key = self._key(eqn.invars[0]) if _is_of_one_layer(eqn) else None
        if key is None or key not in self._numbers:
            return None
        place = self._numbers[key].index(_number(eqn))
        return self._layers[key].variables[place], self._layers[key].slices

    @functools.cached_property
    def _layers(self) -> dict[_Key, Spread]:
        result = {}
        for key, numbers in self._numbers.items():
            slices = self._slices(key.param)
            result[key] = Spread.of(key, slices, _layers(_spread(key, slices), numbers))
        return result

    @functools.cached_property
    def _numbers(self) -> dict[_Key, list[int]]:
        """Which layers are taken by their numbers."""
        numbers: dict[_Key, set[int]] = {}
        for eqn in filter(_is_of_one_layer, self.jaxpr.eqns):
            key = self._key(eqn.invars[0])
            if key is not None and key.param not in self._read_whole:
                numbers.setdefault(key, set()).add(_number(eqn))
        return {key: sorted(some) for key, some in numbers.items()}

    @functools.cached_property
    def _read_whole(self) -> set[Var | None]:
        """Parameters that are gathered whole anyway."""
        read = variables(self.jaxpr.outvars)
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name == "scan":
                read += variables(eqn.invars[: sum(_compat.scan_counts(eqn))])
            elif not (is_gather(eqn) or _is_of_one_layer(eqn) or _is_cast(eqn)):
                read += variables(eqn.invars)
        return {_param_of(var, self._made_by) for var in read}

    @functools.cached_property
    def _made_by(self) -> dict[Var, Any]:
        return {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    def _key(self, var: Var) -> _Key | None:
        param = _param_of(var, self._made_by)
        is_shared = param in self.params and self._slices(param) is not None
        return _Key(param, var.aval.dtype) if is_shared else None

    def _slices(self, param: Var) -> Any:
        return slices_of(*self.params[param], param.aval.shape, self.axes)


def _in_steps(eqn: Any, reader: _Reader, keeps: Callable[[Any], Callable[..., Any] | None]) -> Any:
    """A loop that gathers in each step what it reads of stacked parameters."""
    operands, slots = list(eqn.invars), dict[int, Slices]()
    for number in range(sum(_compat.scan_counts(eqn)), len(operands)):
        if (spread := reader.stack(operands[number])) is not None:
            (operands[number],), slots[number] = spread.variables, spread.slices
    if not slots:
        return eqn
    closed = _gathering(eqn.params["jaxpr"], slots, keeps(eqn))
    return eqn.replace(invars=operands, params={**eqn.params, "jaxpr": closed})


def _is_of_one_layer(eqn: Any) -> bool:
    """Whether it takes one entry of the first dim, and all of the others."""
    if eqn.primitive.name != "slice" or any(step != 1 for step in eqn.params["strides"] or ()):
        return False
    starts, ends = eqn.params["start_indices"], eqn.params["limit_indices"]
    is_whole = not any(starts[1:]) and ends[1:] == eqn.invars[0].aval.shape[1:]
    return bool(starts) and ends[0] - starts[0] == 1 and is_whole


def _number(eqn: Any) -> int:
    return eqn.params["start_indices"][0]


def _gather(eqn: Any, piece: Var, slices: Slices) -> Any:
    """An equation that gathers a layer in the place of one that takes it."""
    whole, shared = stacked(slices.whole).sharding, stacked(slices.piece).sharding
    return call_of(lambda value: gathered(value, whole, shared), eqn.replace(invars=[piece]))


def _param_of(var: Var, made_by: Mapping[Var, Any]) -> Var | None:
    """The parameter that this is, gathered and maybe cast to another type of floats."""
    while (eqn := made_by.get(var)) is not None:
        if is_gather(eqn):
            return eqn.invars[0] if len(eqn.invars) == 1 else None
        if not _is_cast(eqn):
            return None
        (var,) = eqn.invars
    return None


def _is_cast(eqn: Any) -> bool:
    is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    return eqn.primitive.name == "convert_element_type" and is_float


def slices_of(
    whole: Layout, shared: Layout, dims: tuple[int, ...], axes: tuple[str, ...]
) -> Slices | None:
    """How one layer lies; ``None`` for a stack that is not shared out, or is split or padded."""
    if whole == shared or len(dims) < 2 or whole.dim_axes(0) or whole.pad or shared.pad:
        return None
    mesh = whole.bound_mesh()
    layer = Layout(whole.specs[1:], mesh)
    if shared.dim_axes(0):  # layers on different devices, of which a step needs one
        piece = share_out(layer, dims[1:], axes) or layer  # small ones are whole
    else:
        piece = Layout(shared.specs[1:], mesh)
    return Slices(shared, stacked(piece), layer, piece)


def stacked(layer: Layout) -> Layout:
    """The layout of layers that are stacked, one or more, each of which lies like this one."""
    return Layout([None, *layer.specs], layer.bound_mesh())


def _spread(key: _Key, slices: Slices) -> Callable[[Any], Any]:
    """Lays a parameter out in pieces of its layers. Its gradient is shared out as it is."""
    own = key.param.aval.dtype
    pieces, shared = slices.pieces.sharding, slices.shared.sharding
    constrained = jax.lax.with_sharding_constraint

    @jax.custom_vjp
    def spread(value: Any) -> Any:
        return constrained(value.astype(key.dtype), pieces)

    def backward(_: None, gradient: Any) -> tuple[Any]:
        return (constrained(constrained(gradient, pieces).astype(own), shared),)

    spread.defvjp(lambda value: (spread(value), None), backward)
    return spread


def _layers(
    spread: Callable[[Any], Any], numbers: Sequence[int]
) -> Callable[[Any], tuple[Any, ...]]:
    """Takes layers by their numbers out of a parameter that it spreads.

    Their gradients are put together at once: as that of a slice, each would be as large as all.
    """

    def cut(stack: Any) -> tuple[Any, ...]:
        return tuple(stack[number : number + 1] for number in numbers)

    @jax.custom_vjp
    def layers(stack: Any) -> tuple[Any, ...]:
        return cut(stack)

    def backward(count: int, gradients: tuple[Any, ...]) -> tuple[Any]:
        by_number = dict(zip(numbers, gradients, strict=True))
        zeros = jnp.zeros_like(gradients[0])
        return (jnp.concatenate([by_number.get(number, zeros) for number in range(count)]),)

    layers.defvjp(lambda stack: (cut(stack), stack.shape[0]), backward)
    return lambda value: layers(spread(value))


def _gathering(closed: Any, slots: Mapping[int, Slices], policy: Callable[..., Any] | None) -> Any:
    """The function of a loop that gathers these of its arguments."""

    def step(*args: Any) -> Any:
        values = [
            gathered(value, slots[n].whole.sharding, slots[n].piece.sharding)
            if n in slots
            else value
            for n, value in enumerate(args)
        ]
        return jaxpr_as_fun(closed)(*values)

    shapes = shapes_of(closed.jaxpr.invars)
    how = {"policy": but_complex(policy), "prevent_cse": False}
    kept = step if policy is None else jax.checkpoint(step, **how)
    return jax.make_jaxpr(kept)(*shapes)
