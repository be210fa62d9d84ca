"""What a planner chooses beside axes, and what a choice costs: values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ...hlo.groups import Axes
from ...stages.pipeline import Pipeline

Remat = Literal["none", "selective", "block"]  # as a strategy's ``remat=`` takes it
EVERY_REMAT: tuple[Remat, ...] = ("none", "selective", "block")  # the fastest first

DATA_PARALLEL = "data parallel"  # layouts that are known by name, see ``classics.py``
FSDP = "FSDP"
TENSOR_PARALLEL = "tensor parallel"
FSDP_TENSOR = "FSDP × tensor parallel"
PIPELINE = "pipeline"

_IN_WORDS = {"none": "", "selective": "selective remat", "block": "remat"}


@dataclass(frozen=True)
class Choices:
    """The level of ZeRO, micro-batches per step, what of blocks is computed again, and the pipeline
    whose stages lie along the first axis of the mesh, if there is one."""

    zero: int = 0
    accumulate: int = 1
    remat: Remat = "none"
    pipeline: Pipeline | None = None

    def __str__(self) -> str:
        words = [f"zero={self.zero}"] if self.zero else []
        words += [f"accumulate={self.accumulate}"] if self.accumulate > 1 else []
        words += [remat_text(self.remat)] if self.remat != "none" else []
        words += [pipeline_text(self.pipeline)] if self.pipeline is not None else []
        return ", ".join(words) or "nothing else"


PLAIN = Choices()


def pipeline_text(pipeline: Pipeline) -> str:
    """A pipeline in a few words.

    >>> pipeline_text(Pipeline("stage", 16, "circular", 2, remat_stages=False))
    'circular x 2, 16 micro-batches, no remat of stages'
    """
    name = pipeline.schedule + (f" x {pipeline.repeats}" if pipeline.repeats > 1 else "")
    keeps = "" if pipeline.does_remat else ", no remat of stages"
    return f"{name}, {pipeline.micro_batches} micro-batches{keeps}"


def remat_of(remat: str) -> Remat:
    """The choice that a strategy's ``remat=`` is. What a policy of JAX recomputes is in the step's
    graph already, and no choice."""
    result: dict[str, Remat] = {name: name for name in EVERY_REMAT}
    return result.get(remat, "none")


def remat_text(remat: Remat) -> str:
    """What is computed again; empty where nothing is."""
    return _IN_WORDS[remat]


@dataclass(frozen=True)
class Term:
    """What operations of a kind, or ZeRO for parameters of a kind, take in one device in one step.

    ``path`` is that of the first of them. ``collective`` is what its communication mostly is, of
    arrays of ``bytes_per_device`` in all.
    """

    kind: str
    path: str
    compute_s: float
    communication_s: float
    bytes_per_device: float = 0.0
    collective: str = ""


@dataclass(frozen=True)
class Cost:
    """What one step takes in one device, by the model; times are ``None`` without its constants.

    ``compute_s`` holds the time in memory traffic too: each operation takes the longer of both.
    Nothing is taken to overlap: ``time_s`` is the sum of compute and communication.
    """

    time_s: float | None
    compute_s: float | None
    communication_s: float | None
    peak_bytes: int
    terms: tuple[Term, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class Layouts:
    """A mesh, the axes of each family of dims, and the other choices: one answer of the search."""

    axes: Axes
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    choices: Choices = PLAIN

    def of(self, family: str) -> tuple[str, ...]:
        """The axes that dims of a family lie along."""
        return dict(self.rules).get(family, ())

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.axes)
        rules = "; ".join(f"{family} over {'+'.join(axes)}" for family, axes in self.rules)
        return f"({mesh}): {rules or 'nothing is split'}; {self.choices}"
