"""Variables that wait: described when the model is built, made when all of them are known to fit.

Inside ``Sharded.scope()`` a variable is only recorded. When the scope ends, or when a value is
first read, all recorded variables are checked together, and each is then made directly in its
layout. So no large variable is ever whole on one device.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from ... import _compat
from ...data import put
from ...jaxprs.edits import edited
from ...layouts.params import Placed
from ...scoped import scoped

Place = Callable[[list[Any], list[keras.Model]], list[Placed]]

_waiting_room: ContextVar[WaitingRoom | None] = ContextVar("waiting_room", default=None)


class WaitingRoom:
    """The variables of one scope; ``place`` says where each lies, or raises.

    ``models`` are those that the variables may belong to; the ones made in the scope join them.
    """

    def __init__(self, place: Place, models: weakref.WeakSet[keras.Model]) -> None:
        self._place = place
        self._variables: list[Any] = []
        self._models = models

    def defer(self, variable: Any, initializer: Any) -> None:
        """Note a variable that is to be made later."""
        variable._value = None
        variable.__class__ = _pending_class(type(variable))
        self.take_over(variable, initializer)

    def take_over(self, variable: Any, initializer: Any) -> None:
        """Note a variable that waits elsewhere; it is made here."""
        variable._meshwright_waits = (self, initializer)
        self._variables.append(variable)

    @property
    def models(self) -> list[keras.Model]:
        """The models that are known here."""
        return list(self._models)

    def note_model(self, model: keras.Model) -> None:
        """Note a model, from which the paths of its variables will be read."""
        self._models.add(model)

    def early_value(self, variable: Any) -> Any:
        """The value of a variable that can be said before it is made; else ``None``."""
        del variable

    def keeps(self, variable: Any, value: Any) -> bool:
        """Whether the room keeps what is assigned to a variable, which goes on waiting."""
        del variable, value
        return False

    def settle(self) -> None:
        """Check all that wait, then make them; if one cannot be laid out, nothing is made."""
        variables = self._variables
        if not variables:
            return
        placed = self._place(variables, list(self._models))
        self._variables = []
        _make(variables, placed)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Let variables wait here while the block runs; settle at its end."""
        with self.waiting():
            yield
        self.settle()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Let variables wait here while the block runs."""
        return scoped(_waiting_room, self)


def waiting_room() -> WaitingRoom | None:
    """The room that new variables wait in, or ``None`` outside every scope."""
    return _waiting_room.get()


def is_pending(variable: Any) -> bool:
    """Whether the variable has no value yet."""
    return hasattr(variable, "_meshwright_waits")


def settle(variable: Any) -> None:
    """Make the variable, and all that wait with it."""
    if is_pending(variable):
        variable._meshwright_waits[0].settle()


@functools.cache
def _pending_class(of: type) -> type:
    """A subclass that makes the variable when its value is first asked for."""

    class Pending(of):  # type: ignore[misc, valid-type]
        @property
        def _initializer(self) -> Any:  # Keras shows what this makes while it only traces shapes
            return _initializer(self)

        @_initializer.setter
        def _initializer(self, value: Any) -> None:
            pass

        @property
        def value(self) -> Any:
            if not _compat.in_stateless_scope():
                value = self._meshwright_waits[0].early_value(self)
                if value is not None:
                    return value
                settle(self)
                return self.value
            return of.value.fget(self)  # type: ignore[attr-defined]

        def assign(self, value: Any) -> Any:
            if not is_pending(self):  # made meanwhile, by what computed the value
                return self.assign(value)
            if not _compat.in_stateless_scope() and self._meshwright_waits[0].keeps(self, value):
                return value
            return of.assign(self, value)

        def _direct_assign(self, value: Any) -> None:
            settle(self)
            self._direct_assign(value)

    Pending.__name__, Pending.__qualname__ = of.__name__, of.__qualname__
    Pending._meshwright_made = of  # type: ignore[attr-defined]
    return Pending


def _make(variables: list[Any], placed: list[Placed]) -> None:
    shardings = [entry.unpadded.sharding for entry in placed]
    values: dict[int, Any] = {}
    for i, variable in enumerate(variables):
        fill = _FILLS.get(type(_initializer(variable)))
        if fill is not None:
            dtype = _compat.stored_dtype(variable)
            values[i] = jnp.full(variable.shape, fill, dtype, device=shardings[i])
    others = [i for i in range(len(variables)) if i not in values]
    arrays, seeds = _made_in_one_program(
        [variables[i] for i in others], [shardings[i] for i in others]
    )
    values.update(zip(others, arrays, strict=True))
    for i, variable in enumerate(variables):
        give(variable, values[i], shardings[i])
    for generator, seed in seeds:
        generator.state.assign(seed)


def give(variable: Any, value: Any, sharding: Any) -> None:
    """Give a variable that waits, or one that was made, its value and its layout."""
    if is_pending(variable):
        variable.__class__ = type(variable)._meshwright_made
        del variable._meshwright_waits
        variable._initializer = None
    _compat.set_variable(variable, value, sharding)


def filled(variable: Any) -> Any:
    """What a variable of zeros or ones will hold; ``None`` for any other that waits."""
    fill = _FILLS.get(type(_initializer(variable)))
    dtype = _compat.stored_dtype(variable)
    return None if fill is None else jnp.full(variable.shape, fill, dtype)


_FILLS = {keras.initializers.Zeros: 0, keras.initializers.Ones: 1}


def _initializer(variable: Any) -> Any:
    return variable._meshwright_waits[1]


def initial_value(variable: Any) -> Any:
    """What a variable that waits begins with."""
    dtype = _compat.stored_dtype(variable)
    return jnp.asarray(_initializer(variable)(variable.shape, dtype=dtype), dtype)


def begun(variable: Any) -> Any:
    """The same now; it still waits, and what seeds it still draws what it would have drawn."""
    with keras.StatelessScope():
        return initial_value(variable)


def begin_with(variable: Any, value: Any) -> None:
    """Let a variable that waits begin with a value that is known already.

    Raises :class:`ValueError` for one of another shape, as Keras does.
    """
    room, _ = variable._meshwright_waits
    value = np.asarray(value, _compat.stored_dtype(variable))
    if value.shape != tuple(variable.shape):
        raise ValueError(f"{variable.path} is {tuple(variable.shape)} and not {value.shape}.")
    variable._meshwright_waits = room, lambda shape, dtype=None: value


def _made_in_one_program(
    variables: list[Any], shardings: list[Any]
) -> tuple[list[Any], list[tuple[keras.random.SeedGenerator, Any]]]:
    """The values, each made in its layout, and new states of the generators that seeded them."""
    seeds = [getattr(_initializer(variable), "seed", None) for variable in variables]
    generators = [s for s in dict.fromkeys(seeds) if isinstance(s, keras.random.SeedGenerator)]

    def program() -> tuple[list[Any], list[Any]]:
        with keras.StatelessScope() as scope:  # a generator's new state is returned, not assigned
            values = [initial_value(variable) for variable in variables]
        return values, [scope.get_current_value(generator.state) for generator in generators]

    if not variables:
        return [], []
    try:
        with jax.disable_jit(False):  # else nothing would be laid out
            values, states = jax.jit(
                edited(program, _drawn_flat), out_shardings=(shardings, None)
            )()
    except jax.errors.JAXTypeError:
        # Somebody's initializer looks at values while it computes: it cannot be compiled.
        values = [
            put(np.asarray(initial_value(variable)), sharding)
            for variable, sharding in zip(variables, shardings, strict=True)
        ]
        return values, []
    return values, list(zip(generators, states, strict=True))


_FLAT = 1 << 20  # elements; above, an array that is split would be drawn whole on each device


def _drawn_flat(jaxpr: Any) -> Any:
    """The open jaxpr, whose random bits for kernels of three dims or more are drawn as one dim.

    They are the same bits, for Threefry counts elements, and XLA compiles the counts of one dim
    nine times as fast (0.24 s of CPU for a 3 x 3 kernel in place of 2.0).
    """
    config: Any = jax.config
    if config.jax_default_prng_impl != "threefry2x32" or not config.jax_threefry_partitionable:
        return jaxpr
    return jaxpr.replace(eqns=[flat_eqn for eqn in jaxpr.eqns for flat_eqn in _flat(eqn)])


def _flat(eqn: Any) -> list[Any]:
    if eqn.primitive.name != "random_bits" or eqn.invars[0].aval.shape:
        return [eqn]
    (out,) = eqn.outvars
    if len(out.aval.shape) < 3 or out.aval.size > _FLAT:
        return [eqn]
    flat = jax.ShapeDtypeStruct((out.aval.size,), out.aval.dtype)
    traced = jax.make_jaxpr(lambda bits: bits.reshape(out.aval.shape))(flat).jaxpr
    (reshape,) = traced.eqns
    bits = eqn.replace(params={**eqn.params, "shape": flat.shape}, outvars=traced.invars)
    return [bits, reshape.replace(outvars=[out])]
