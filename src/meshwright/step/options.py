"""How a step is computed, beside where its arrays lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelError
from ..program import Batch, Program
from ..stages.branches import Branches
from ..stages.pipeline import Pipeline
from .compression import Compress
from .local import Local
from .remat import BY_BLOCK, check_remat
from .summing import GradientSum

Sums = Literal["float32"] | GradientSum | None


@dataclass(frozen=True)
class StepOptions:
    """Choices that leave the numbers of a step alone, up to rounding.

    ``accumulate`` micro-batches make one step of the optimizer. ``remat`` says what is computed
    again in the backward pass instead of being kept, see :mod:`meshwright.step.remat`.
    ``sums="float32"`` sums gradients over devices in that type, whatever they are computed in, and
    a :class:`~meshwright.GradientSum` sums them in another way. ``local`` is a
    :class:`~meshwright.LocalSGD` or :class:`~meshwright.DiLoCo`: each piece of the batch takes
    several steps of its own, and then they exchange what they arrived at. This one changes the
    numbers. ``pipeline`` cuts the model into stages, see :class:`~meshwright.Pipeline`, or
    deals its branches to devices, see :class:`~meshwright.Branches`.
    Raises :class:`~meshwright.ModelError` that lists every invalid choice.

    >>> StepOptions(accumulate=4, remat="block")
    StepOptions(accumulate=4, remat='block', sums=None, local=None, pipeline=None)
    """

    accumulate: int = 1
    remat: str = "none"
    sums: Sums = None
    local: Local | None = None
    pipeline: Pipeline | Branches | None = None

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
        if self.local is not None and not isinstance(self.local, Local):
            faults.append(
                f"local={self.local!r}: expected mw.LocalSGD(every) or mw.DiLoCo(every), or None."
            )
        elif self.local is not None and (self.accumulate != 1 or self.sums is not None):
            faults.append(
                f"local={self.local!r} is not supported together with accumulate= or sums=."
            )
        if self.compress is not None and self.accumulate != 1:
            faults.append(f"sums={self.sums!r} is not supported together with accumulate=.")
        faults += self._pipeline_faults()
        if faults:
            raise ModelError("\n".join(faults))

    def _pipeline_faults(self) -> list[str]:
        if self.pipeline is None:
            return []
        if not isinstance(self.pipeline, (Pipeline, Branches)):
            return [f"pipeline must be a mw.Pipeline or mw.Branches; received {self.pipeline!r}."]
        if isinstance(self.pipeline, Branches):
            return self._branches_faults()
        faults = []
        if self.accumulate != 1:
            faults.append(
                f"accumulate={self.accumulate!r} is not supported with a pipeline, which cuts each "
                "batch into micro-batches itself: raise micro_batches= and the batch size instead."
            )
        if self.remat not in ("none", "block"):
            faults.append(
                f"remat={self.remat!r} is not supported with a pipeline, whose stages keep what "
                "mw.Pipeline(remat_stages=) says. Use 'block' to recompute one block at a time, or "
                "'none'."
            )
        elif self.remat == "block" and self.pipeline.schedule == "zero_bubble":
            faults.append(
                "remat='block' is not supported with schedule='zero_bubble', whose gradients of "
                "weights would compute each block a third time. Use schedule='1f1b', or leave it "
                "out."
            )
        if self.sums is not None:
            faults.append(f"sums={self.sums!r} is not supported with a pipeline; leave it out.")
        if self.local is not None:
            faults.append(f"local={self.local!r} is not supported with a pipeline; leave it out.")
        return faults

    def _branches_faults(self) -> list[str]:
        options = [
            f"{name}={getattr(self, name)!r}"
            for name in ("accumulate", "remat", "sums", "local")
            if getattr(self, name) != getattr(PLAIN, name)
        ]
        if not options:
            return []
        return [
            f"{', '.join(options)} {'is' if len(options) == 1 else 'are'} not supported with "
            "branches, which take each batch whole, in one pass; leave it out."
        ]

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axis of a pipeline's stages, if there is one."""
        return () if self.pipeline is None else (self.pipeline.axis,)

    @property
    def by_block(self) -> bool:
        """Whether what is computed again is so one block at a time."""
        return self.remat in BY_BLOCK

    @property
    def computed_sums(self) -> str | None:
        """The type that gradients are made in before they are summed, where it is another."""
        sums = self.sums.wire if isinstance(self.sums, GradientSum) else self.sums
        return "float32" if sums == "float32" else None

    @property
    def compress(self) -> Compress | None:
        """How gradients are made smaller for their way between devices, if they are."""
        return self.sums.compress if isinstance(self.sums, GradientSum) else None

    @property
    def batches(self) -> int:
        """How many batches one call of the step takes."""
        return self.accumulate if self.local is None else self.local.every

    def for_steps(self, batches: Iterable[Batch]) -> Iterator[Any]:
        """What each step takes of these batches: one, or a tuple of several.

        >>> list(StepOptions(accumulate=2).for_steps("abc"))
        [('a', 'b'), ('c',)]
        """
        if self.batches == 1:
            yield from batches
            return
        batches = iter(batches)
        while group := tuple(itertools.islice(batches, self.batches)):
            yield group

    def refuse_own_step(self, program: Program) -> None:
        """Raise :class:`~meshwright.ModelError` if a program's own step would have to do more."""
        options = [
            f"{option}={getattr(self, option)!r}"
            for option, default in _DEFAULTS.items()
            if getattr(self, option) != default
        ]
        if not options:
            return
        listed = f"{', '.join(options)} is not supported with"
        if program.step_of == "optimizer":
            raise ModelError(
                f"{listed} an optimizer that evaluates the loss again (lbfgs, line searches, "
                "sophia). Leave it out, or take another optimizer."
            )
        raise ModelError(
            f"{listed} the train_step of model {program.name!r}. "
            "Implement it there, or use Keras' own train_step."
        )


_DEFAULTS = {"accumulate": 1, "remat": "none", "sums": None, "local": None}
PLAIN = StepOptions()
