"""A compiled step that a program calls in a loop of its own, under the eyes of an agent."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

from ..launch.join import naming_failures
from ..launch.progress import inside, is_in_script


class CountedStep:
    """The ``step``, each call of which says that it begins; in everything else it is the step."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __call__(self, *args: Any) -> Any:
        """Take the step; a call that JAX only traces is none."""
        is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
        if is_traced or not is_in_script():
            return self._step(*args)
        with naming_failures(), inside("step"):
            return self._step(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)
