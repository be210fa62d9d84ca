"""How a step is computed, beside where its arrays lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelError
from ..program import Batch
from .remat import BY_BLOCK, check_remat
from .summing import GradientSum

Sums = Literal["float32"] | GradientSum | None


@dataclass(frozen=True)
class StepOptions:
    """Choices that leave the numbers of a step alone, up to rounding.

    ``accumulate`` micro-batches make one step of the optimizer. ``remat`` says what is computed
    again in the backward pass instead of being kept, see :mod:`meshwright.step.remat`.
    ``sums="float32"`` sums gradients over devices in that type, whatever they are computed in, and
    a :class:`~meshwright.GradientSum` sums them in another way.
    Raises :class:`~meshwright.ModelError` that lists every invalid choice.

    >>> StepOptions(accumulate=4, remat="block")
    StepOptions(accumulate=4, remat='block', sums=None)
    """

    accumulate: int = 1
    remat: str = "none"
    sums: Sums = None

    def __post_init__(self) -> None:
        faults = check_remat(self.remat)
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            faults.append(
                f"accumulate={self.accumulate!r}: say how many micro-batches make one step of the "
                "optimizer, 1 or more."
            )
        if self.sums not in (None, "float32") and not isinstance(self.sums, GradientSum):
            faults.append(
                f"sums={self.sums!r}: gradients are summed in the type they are computed in "
                "(None), in 'float32' or as a mw.GradientSum says."
            )
        if faults:
            raise ModelError("\n".join(faults))

    @property
    def by_block(self) -> bool:
        """Whether what is computed again is so one block at a time."""
        return self.remat in BY_BLOCK

    @property
    def computed_sums(self) -> str | None:
        """The type that gradients are made in before they are summed, where it is another."""
        sums = self.sums.wire if isinstance(self.sums, GradientSum) else self.sums
        return "float32" if sums == "float32" else None

    def for_steps(self, batches: Iterable[Batch]) -> Iterator[Any]:
        """What each step takes of these batches: one, or a tuple of those it accumulates.

        >>> list(StepOptions(accumulate=2).for_steps("abc"))
        [('a', 'b'), ('c',)]
        """
        if self.accumulate == 1:
            yield from batches
            return
        batches = iter(batches)
        while group := tuple(itertools.islice(batches, self.accumulate)):
            yield group

    def refuse_own_step(self, name: str) -> None:
        """Raise :class:`~meshwright.ModelError` if a model's own step would have to do more."""
        asked = [
            f"{option}={getattr(self, option)!r}"
            for option, default in (("accumulate", 1), ("remat", "none"), ("sums", None))
            if getattr(self, option) != default
        ]
        if asked:
            raise ModelError(
                f"{', '.join(asked)} is not supported with the train_step of model {name!r}. "
                "Implement it there, or use Keras' own train_step."
            )


PLAIN = StepOptions()
