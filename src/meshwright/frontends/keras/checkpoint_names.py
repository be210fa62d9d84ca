"""The names under which a checkpoint keeps the variables of a Keras model.

They are the same in every process and for every copy of a model, which Keras' own are not: it
counts the layers, optimizers and metrics that it names itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import keras

from ... import _compat
from ...program import TrainState
from ...stages.stacking import Stacking
from ...step.storing import Storing
from .hooks import parameter_of
from .paths import lasting_name, lasting_paths, unique
from .program import KerasVariables


@dataclass(frozen=True, eq=False)
class LastingNames:
    """Path of each variable -> its name in checkpoints, by the fields of :class:`TrainState`.

    Checkpoints hold every array in its own dims; ``storing`` says which ones a step pads.
    """

    of_parts: tuple[dict[str, str], ...]
    storing: Storing | Stacking

    @classmethod
    def of(cls, model: keras.Model, variables: KerasVariables) -> LastingNames:
        """Those of a built model, its optimizer and its metrics."""
        lasting = lasting_paths(model)
        v, others = variables, set[str]()
        names: dict[int, str] = {}
        for variable in v.all:
            if (name := lasting.get(id(variable))) is None:
                info = v.infos[id(variable)]
                name = _of_slot(model, variable, info.path, lasting) or _unnumbered(info.path)
            names[id(variable)] = unique(name, others)
            others.add(names[id(variable)])
        parts = (v.params, v.state, v.slots, v.metrics)
        by_path = tuple({p: names[id(variable)] for p, variable in part.items()} for part in parts)
        return cls(by_path, v.storing)

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """The same arrays under the names that last; parts may lack some."""
        parts = zip(self.storing.restore(state), self.of_parts, strict=True)
        return TrainState(*({names[p]: v for p, v in part.items()} for part, names in parts))

    def from_checkpoint(self, state: TrainState) -> TrainState:
        """The same arrays under the paths of the variables."""
        paths = ({name: path for path, name in names.items()} for names in self.of_parts)
        parts = zip(state, paths, strict=True)
        parts_by_path = ({names[p]: v for p, v in part.items()} for part, names in parts)
        return self.storing.store(TrainState(*parts_by_path))


def _of_slot(model: keras.Model, slot: object, path: str, lasting: dict[int, str]) -> str | None:
    """``adam/hidden/kernel/momentum``; or ``adam/iteration``, which belongs to no parameter."""
    optimizer = _compat.optimizer_of(model)
    if optimizer is None or not path.startswith(f"{optimizer.name}/"):
        return None
    owner = lasting.get(id(parameter_of(slot)))
    rest = path.removeprefix(f"{optimizer.name}/")
    if owner is not None and "/" in rest:
        rest = f"{owner}/{rest.rpartition('/')[2]}"
    return f"{lasting_name(optimizer)}/{rest}"


def _unnumbered(path: str) -> str:
    """``mean_2/total`` is that of a metric which Keras has named and counted."""
    owner, slash, rest = path.partition("/")
    return re.sub(r"_\d+$", "", owner) + slash + rest
