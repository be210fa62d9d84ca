"""What the twins of Keras' optimizers share: their common settings, and what each must answer.

A twin is the optimizer's own arithmetic in NumPy, for a server that has no Keras. It works in
place on flat arrays of one size, one element beside the other: so it runs on a shard, on some rows
of one, or block by block, and comes out the same. Scalars are computed in the variable's own dtype,
as Keras does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .schedules import Schedule


class Moment(NamedTuple):
    """When a step is taken: ``step`` counts those before.

    ``rate`` is the learning rate as ``one``, the type that the variable's elements have.
    """

    step: int
    rate: Any
    scalars: Mapping[str, np.ndarray]
    one: type


class Block(NamedTuple):
    """What a step changes, flat arrays of one size; ``room`` is two more to work in."""

    value: np.ndarray
    gradient: np.ndarray  # not to be changed
    slots: Sequence[np.ndarray]
    room: Sequence[np.ndarray]
    constants: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Twin:
    """Settings that every Keras optimizer has; subclasses add their own, by Keras' names.

    ``clipnorm`` and ``global_clipnorm`` are kept but not done here: they need whole gradients. The
    worker clips before it pushes, or :mod:`meshwright.ps.server.rounds` does, in a round.
    """

    slot_names: ClassVar[tuple[str, ...]] = ()

    learning_rate: float | Schedule
    weight_decay: float | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None
    use_ema: bool = False
    ema_momentum: float = 0.99
    ema_overwrite_frequency: int | None = None
    loss_scale_factor: float | None = None
    gradient_accumulation_steps: int | None = None

    @property
    def slots(self) -> dict[str, float]:
        """Slots of the variable's shape, by Keras' names, and their first value."""
        return dict.fromkeys(self.slot_names, 0.0)

    @property
    def scalars(self) -> dict[str, float]:
        """Slots that are one number for the whole variable, and their first value."""
        return {}

    def constants(self, at: Moment) -> tuple[Any, ...]:
        """Numbers of one step, computed once for the whole variable.

        Changes the moment's ``scalars`` in place.
        """
        return (at.rate,)

    def update(self, on: Block) -> None:
        """Change the block's ``value`` and ``slots`` in place."""
        raise NotImplementedError


def toward(slot: np.ndarray, target: np.ndarray, share: Any, room: np.ndarray) -> None:
    """Move a slot by ``share`` of its way to ``target``: Keras' way to write a running mean."""
    np.subtract(target, slot, out=room)
    room *= share
    slot += room


def toward_square(slot: np.ndarray, target: np.ndarray, share: Any, room: np.ndarray) -> None:
    """The same toward the square of ``target``."""
    np.multiply(target, target, out=room)
    room -= slot
    room *= share
    slot += room


def mixed(slot: np.ndarray, target: np.ndarray, keep: Any, share: Any, room: np.ndarray) -> None:
    """``keep`` of the slot, and ``share`` of the target."""
    slot *= keep
    np.multiply(target, share, out=room)
    slot += room


def mixed_square(
    slot: np.ndarray, target: np.ndarray, keep: Any, share: Any, room: np.ndarray
) -> None:
    """``keep`` of the slot, and ``share`` of the square of the target."""
    slot *= keep
    np.multiply(target, target, out=room)
    room *= share
    slot += room


def root(squares: np.ndarray, epsilon: float, out: np.ndarray) -> np.ndarray:
    """The root of ``squares`` and a little more."""
    np.add(squares, epsilon, out=out)
    return np.sqrt(out, out=out)
