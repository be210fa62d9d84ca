"""Which optimizer takes care of which variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import ModelError, TaskError
from .optimizers import Twin, phase, twin_of
from .shards import Shard
from .store import Store

AVERAGE, ACCUMULATOR, TOUCHED = "average", "gradient_accumulator", "touched"


@dataclass
class Group:
    """Some variables and their optimizer.

    ``rate`` is a learning rate that was set while training, and goes before the optimizer's own.
    ``no_decay`` are variables whose weights do not decay; ``compensated``: the server keeps for
    every peer what it last read of these variables (DC-ASGD). ``wholes`` describes a shard which
    variable it is a part of.
    """

    name: str
    config: Mapping[str, Any]
    twin: Twin
    names: tuple[str, ...]
    no_decay: frozenset[str] = frozenset()
    compensated: bool = False
    rate: float | None = None
    wholes: dict[str, str] = field(default_factory=dict)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped by a norm, which may go over several servers."""
        return phase(self.twin) == "two-phase"

    def rate_at(self, steps: int) -> float:
        """The learning rate after as many steps."""
        if self.rate is not None:
            return self.rate
        rate = self.twin.learning_rate
        return rate(steps) if callable(rate) else rate

    def decay_of(self, name: str) -> float | None:
        """The weight decay of one variable."""
        return None if name in self.no_decay else self.twin.weight_decay


class Groups:
    """The groups of one server; a variable is in at most one."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._of: dict[str, Group] = {}

    def __iter__(self):
        return iter(self._groups.values())

    def set(self, store: Store, head: Mapping[str, Any]) -> tuple[Group, bool]:
        """Give variables their optimizer, as the head of an ``optimizer`` message says.

        The same again changes nothing and keeps all slots, so that it may be sent after a restart;
        returns whether it was new to any of them. Raises :class:`~meshwright.errors.ModelError` for
        an optimizer that does not run here, or variables that have another, and
        :class:`~meshwright.errors.TaskError` for unknown names.
        """
        group = _group_of(head)
        shards = store.get(group.names)
        self._check_free(group)
        _check_floats(shards)
        there = self._groups.get(group.name)
        former: tuple[str, ...] = ()
        if there is not None and _same(there, group):
            former, group.rate = there.names, there.rate
            group.no_decay |= there.no_decay
            group.wholes = {**there.wholes, **group.wholes}
        elif there is not None:
            shards += [shard for shard in store.get(there.names) if shard not in shards]
            self._drop(there)
        fresh = [shard for shard in shards if shard.name not in self._of]
        for shard in fresh:
            add_slots(store, shard, group.twin)
        group.names = (*former, *(shard.name for shard in fresh))
        self.put(group)
        return group, bool(fresh)

    def put(self, group: Group) -> None:
        """Put a group in, whose variables have their slots."""
        self._groups[group.name] = group
        self._of.update(dict.fromkeys(group.names, group))

    def _drop(self, group: Group) -> None:
        del self._groups[group.name]
        for name in group.names:
            del self._of[name]

    def get(self, name: str) -> Group:
        """The group of this name; raises :class:`~meshwright.errors.TaskError` for another."""
        if name not in self._groups:
            names = ", ".join(map(repr, self._groups)) or "none"
            raise TaskError(f"there is no group {name!r} of variables here. Groups: {names}.")
        return self._groups[name]

    def of(self, name: str) -> Group | None:
        """The group that a variable is in."""
        return self._of.get(name)

    def set_rate(self, name: str, rate: float) -> None:
        """Set the learning rate of a group, in the place of its optimizer's own."""
        self.get(name).rate = float(rate)

    def _check_free(self, group: Group) -> None:
        # Another group of the very same optimizer is no conflict: a variable stays where it is.
        others = {
            name: other.name
            for name in group.names
            if (other := self._of.get(name)) and other.name != group.name
            if not _same(other, group)
        }
        if others:
            listed = ", ".join(f"{name!r} (in {other!r})" for name, other in others.items())
            raise ModelError(
                f"variables have an optimizer of other settings already: {listed}. They keep it, "
                "with its slots: apply gradients by that one. A learning rate that changes is a "
                "schedule of the optimizer, such as CosineDecay."
            )


def _group_of(head: Mapping[str, Any]) -> Group:
    config = dict(head["config"])
    return Group(
        str(head["group"]),
        config,
        twin_of(config),
        tuple(head["names"]),
        frozenset(head.get("exclude_from_weight_decay", ())),
        bool(head.get("compensation", False)),
        wholes=dict(head.get("wholes", {})),
    )


def add_slots(store: Store, shard: Shard, twin: Twin) -> None:
    """Make the slots that a variable needs, in the place of those it has."""
    elements: dict[str, float | None] = dict(twin.slots)
    if twin.use_ema:
        elements[AVERAGE] = None  # begins as the values, which a row without gradients keeps
    if twin.gradient_accumulation_steps:
        elements[ACCUMULATOR] = 0.0
    store.check_room(shard.name, len(elements) * shard.num_bytes - shard.slot_bytes)
    shard.slots, shard.steps = {}, 0
    for name, first in elements.items():
        shard.add_slot(name, first, shard.dtype, "element")
    for name, first in twin.scalars.items():
        shard.add_slot(name, first, shard.dtype, "variable")
    if twin.gradient_accumulation_steps and shard.shape:
        shard.add_slot(TOUCHED, False, np.dtype(bool), "row")


def begin_averages(shard: Shard) -> bool:
    """Set a shard's averages to its values until its first step; returns whether it has any.

    Keras' averages are zeros until then, and a model's slots are loaded before it.
    """
    if AVERAGE not in shard.slots:
        return False
    if not shard.steps:
        np.copyto(shard.full(AVERAGE), shard.full())
    return True


def answer_of(group: Group, is_new: bool) -> dict[str, Any]:
    """What a client must know of a group: who clips, and by what."""
    twin = group.twin
    return {
        "made": is_new,
        "phase": phase(twin),
        "clipnorm": twin.clipnorm,
        "global_clipnorm": twin.global_clipnorm,
        "slots": [*twin.slots],
        "scalars": [*twin.scalars],
    }


def _same(one: Group, other: Group) -> bool:
    both = set(one.names) & set(other.names)
    return one.twin == other.twin and one.no_decay & both == other.no_decay & both


def _check_floats(shards: Sequence[Shard]) -> None:
    wrong = [f"{shard.name!r} ({shard.dtype})" for shard in shards if shard.dtype.kind != "f"]
    if wrong:
        raise ModelError(f"optimizers update floats only; received {', '.join(wrong)}.")
