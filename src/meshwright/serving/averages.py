"""The averages of weights that a run keeps for its end, of which a server answers (Polyak, 1992).

With ``use_ema=True`` Keras puts them into the weights where ``fit`` ends. The checkpoints of a run
hold the weights before that, and the averages among the optimizer's slots.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..checkpoint import CheckpointInfo
from ..program import TrainState

AVERAGE = "average"  # the slot, as Keras calls it


def averages_of(info: CheckpointInfo) -> dict[str, str]:
    """Name of each parameter that a checkpoint has an average of -> the name of that slot."""
    slots = [array.path for array in info.arrays if array.part == "slots"]
    averages = [path for path in slots if path.endswith(f"/{AVERAGE}")]
    result = {}
    for parameter in (array.path for array in info.arrays if array.part == "params"):
        own = [path for path in averages if path.endswith(f"/{parameter}/{AVERAGE}")]
        if own:  # the others are of parameters whose names end with this one
            result[parameter] = min(own, key=len)
    return result


def as_slots(shapes: TrainState, averages: Mapping[str, str]) -> TrainState:
    """The same shapes, with slots in the place of the parameters that they average."""
    params = {name: shape for name, shape in shapes.params.items() if name not in averages}
    slots = {averages[n]: shape for n, shape in shapes.params.items() if n in averages}
    return shapes._replace(params=params, slots=slots)


def as_parameters(state: TrainState, averages: Mapping[str, str]) -> TrainState:
    """The same values, with averages in the place of their parameters."""
    own = {name: state.slots[slot] for name, slot in averages.items() if slot in state.slots}
    return state._replace(params={**state.params, **own}, slots={})
