"""What a plain JAX model keeps and does not train, such as batch statistics."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ModelError
from ..layouts.params import ParamInfo
from ..program import Arrays
from .flax_variables import tree_of
from .trees import Tree


@dataclass(frozen=True, eq=False)
class State:
    """A tree of arrays that a loss takes; it returns new values of them.

    ``make`` makes its first values, and ``tree`` has its paths.
    """

    make: Callable[[], Any]
    tree: Tree

    def infos(self, params: tuple[ParamInfo, ...]) -> tuple[ParamInfo, ...]:
        """What is known of each array. Raises ModelError where a parameter has the same path."""
        infos = self.tree.infos("state")
        if both := sorted({info.path for info in infos} & {info.path for info in params}):
            raise ModelError(
                f"{both[0]!r} is the path of a parameter and of an array of state=: rename a key, "
                "or put the state into a dict, such as state={'batch_stats': ...}."
            )
        return infos

    def initial(self) -> Arrays:
        """The first values by path."""
        return self.tree.named(self.make())

    def taken_by(self, forward: Callable[..., Any], state: Arrays) -> dict[str, Any]:
        """The argument for a forward function that has one of this name."""
        takes = "state" in inspect.signature(forward).parameters
        return {"state": self.tree.whole(state)} if takes else {}

    def checked(self, new: Any) -> Arrays:
        """What a loss returned, by path. Raises ModelError where it is not of the first's kind."""
        before = {info.path: (info.dims, info.dtype) for info in self.tree.infos("state")}
        arrays = jax.tree.map(jnp.asarray, new)
        after = {info.path: (info.dims, info.dtype) for info in tree_of(arrays).infos("state")}
        if before != after:
            path = next(p for p in (*before, *after) if before.get(p) != after.get(p))
            raise ModelError(
                f"the new state that the loss returned has {_said(after.get(path))} at {path!r}, "
                f"where state= has {_said(before.get(path))}. Return a tree like state=."
            )
        return self.tree.named(arrays)


def state_of(make: Callable[[], Any], shapes: Any) -> State:
    """The state of these shapes."""
    return State(make, tree_of(shapes))


def _said(kind: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if kind is None else f"{kind[1]} of shape {kind[0]}"
