"""The plan: what a search decided, beside what it decided against, as a value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from ...errors import PlanError, TargetError
from ...files import write, wrong_kind
from ...hlo.groups import Axes
from ...layouts.layout import UNSHARDED
from ...layouts.mesh import Mesh
from ...layouts.placement import Placement
from ...stages.pipeline import Pipeline
from ...step.options import StepOptions
from ...targets.target import Target
from ...views import Viewable
from ..verdict import Verdict, verdict_of
from .choices import DATA_PARALLEL, EVERY_REMAT, Choices, Layouts, Remat

VERSION = 3
Along = tuple[tuple[str, ...], ...]  # the axes of each dim of an array


@dataclass(frozen=True)
class Option:
    """One way to lay a step out, and what it costs in one device.

    ``rules`` give the axes of each family of dims that is split. The stages of a ``pipeline`` lie
    along the axis that it names, each with its equal share of the model's blocks.
    ``dry_run_time_s`` and ``dry_run_peak_bytes`` are those of a dry run, where one was made.
    Served in stages, a batch takes ``time_s`` and the next one follows after ``interval_s``.
    """

    axes: Axes
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    zero: int
    accumulate: int
    remat: Remat
    time_s: float | None
    compute_s: float | None
    communication_s: float | None
    peak_bytes: int
    dry_run_time_s: float | None = None
    dry_run_peak_bytes: int | None = None
    pipeline: Pipeline | None = None
    interval_s: float | None = None

    @property
    def num_devices(self) -> int:
        """How many devices it takes."""
        return Mesh(dict(self.axes)).size

    @property
    def held_bytes(self) -> int:
        """Bytes at the peak of one device: by the dry run where there is one, else the model."""
        return self.peak_bytes if self.dry_run_peak_bytes is None else self.dry_run_peak_bytes

    @property
    def layouts(self) -> Layouts:
        """What was decided, without what it costs."""
        choices = Choices(self.zero, self.accumulate, self.remat, self.pipeline)
        return Layouts(self.axes, self.rules, choices)


class PlannedBatch(NamedTuple):
    """A size of batch that is served: how long one takes, and what a device holds at most.

    In stages the next one follows after ``interval_s``.
    """

    rows: int
    latency_s: float | None
    peak_bytes: int | None
    interval_s: float | None = None

    @property
    def rows_per_s(self) -> float | None:
        """Rows per second of one copy of the model, batch after batch.

        >>> PlannedBatch(8, 0.5, None).rows_per_s
        16.0
        """
        each_s = self.interval_s or self.latency_s
        return self.rows / each_s if each_s else None


@dataclass(frozen=True)
class Serving:
    """How a plan serves: it was chosen for batches of ``rows`` rows.

    The target has room for ``copies`` of the model, each on the mesh of the plan. ``precision`` is
    as :class:`~meshwright.Server` takes it, and ``batches`` are those worth compiling.
    """

    rows: int
    copies: int
    precision: str | None
    batches: tuple[PlannedBatch, ...]

    @property
    def buckets(self) -> tuple[int, ...]:
        """The rows of each batch."""
        return tuple(batch.rows for batch in self.batches)


class Reason(NamedTuple):
    """A choice of a plan, and what it changes beside the same plan without it.

    >>> print(Reason("ZeRO 1", ("saves 1.00 GiB", "costs 2.0 ms of all-gather")))
    ZeRO 1: saves 1.00 GiB, costs 2.0 ms of all-gather
    >>> print(Reason("remat of blocks", ()))
    remat of blocks: changes next to nothing
    """

    choice: str
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.choice}: {', '.join(self.changes) or 'changes next to nothing'}"


@dataclass(frozen=True)
class Plan(Viewable):
    """Where a step's parameters and inputs lie, and why; ``print`` it for a table.

    ``layouts`` has the axes of each dim of every parameter and input, by path; of inputs those
    named in ``inputs``, of which the first ``num_inputs`` are a model's inputs (none: all are), the
    next ``num_targets`` its targets (none: all others are), and the rest their sample weights,
    which lie as their targets do. ``batch`` are the axes of the batch's rows. ``runners_up`` are
    what else fits, the best first, ``data_parallel`` is the batch over all devices and nothing
    else, and ``classics`` are the other layouts that are known by name, FSDP, tensor parallel and
    both together: :attr:`named` has all of these. Of those that fit none is faster by the model.
    ``is_proven`` is false where the seconds ran out before all was looked at. ``serving`` is of
    plans for latency and throughput.

    A plan is a value: equal plans decide alike, and :meth:`to_json` keeps all of it.
    """

    target: str
    hardware: str
    objective: str
    limit_bytes: int | None
    chosen: Option
    runners_up: tuple[Option, ...]
    data_parallel: Option | None
    layouts: tuple[tuple[str, Along], ...]
    inputs: tuple[str, ...]
    batch: tuple[str, ...]
    why: tuple[Reason, ...]
    name: str = ""  # of the model
    notes: tuple[str, ...] = ()
    is_proven: bool = True
    num_inputs: int | None = None
    num_targets: int | None = None
    classics: tuple[tuple[str, Option], ...] = ()
    serving: Serving | None = None

    @property
    def named(self) -> dict[str, Option]:
        """The layouts that are known by name, as far as the step and the target have them."""
        parallel = {} if self.data_parallel is None else {DATA_PARALLEL: self.data_parallel}
        return {**parallel, **dict(self.classics)}

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler was asked about what was chosen, or the planner's model alone."""
        times = self.chosen.dry_run_time_s, self.chosen.dry_run_peak_bytes
        return any(time is not None for time in times)

    @property
    def verdict(self) -> Verdict | None:
        """Whether what was chosen fits: ``"may not fit"`` where it was not compiled and its
        estimated peak is too near the limit, which ``verify=1`` settles."""
        return self.verdict_of(self.chosen)

    def verdict_of(self, option: Option) -> Verdict | None:
        """The same of another option; ``None`` where the memory or the device is not known."""
        is_estimate = option.dry_run_peak_bytes is None
        try:
            target = Target.of(self.target)
        except TargetError:  # of a plan that was written elsewhere
            return None
        return verdict_of(option.held_bytes, self.limit_bytes, target, is_estimate)

    def rows_per_s(self, option: Option) -> float | None:
        """Of a plan that serves: what copies of an option on all devices answer together."""
        time_s = option.time_s if option.dry_run_time_s is None else option.dry_run_time_s
        time_s = option.interval_s or time_s
        if self.serving is None or not time_s:
            return None
        copies = self.serving.copies * self.chosen.num_devices // option.num_devices
        return max(1, copies) * self.serving.rows / time_s

    @property
    def axes(self) -> Axes:
        """``(name, size)`` of the axes of the mesh."""
        return self.chosen.axes

    @property
    def mesh(self) -> Mesh:
        """The mesh, without devices."""
        return Mesh(dict(self.axes))

    @property
    def rules(self) -> dict[str, tuple[str, ...]]:
        """The axes of each family of dims that is split."""
        return dict(self.chosen.rules)

    @property
    def zero(self) -> int:
        """The level of ZeRO."""
        return self.chosen.zero

    @property
    def accumulate(self) -> int:
        """How many micro-batches make one step."""
        return self.chosen.accumulate

    @property
    def remat(self) -> Remat:
        """What of blocks is computed again in the backward pass, as a strategy's ``remat=``."""
        return self.chosen.remat

    def layouts_of(self, inputs: bool) -> dict[str, list[Any]]:
        """Specs by path, as a strategy takes them: of the inputs, or of the parameters."""
        return {
            path: [_spec(axes) for axes in along]
            for path, along in self.layouts
            if (path in self.inputs) == inputs
        }

    @property
    def how(self) -> StepOptions:
        """How the step is computed, as a strategy or :class:`~meshwright.Trainer` takes it."""
        return StepOptions(
            accumulate=self.accumulate, remat=self.remat, pipeline=self.chosen.pipeline
        )

    def placement(self, mesh: Mesh | None = None) -> Placement:
        """The placement that lays parameters and inputs out so, on this mesh or the plan's own.

        Raises :class:`~meshwright.LayoutError` for a mesh without the plan's axes.

        >>> plan = Plan.from_json(_EXAMPLE)
        >>> plan.placement().layouts[0].pattern, plan.placement().batch
        ('dense/kernel', ('batch',))
        """
        ruled = {_pattern(path): specs for path, specs in self.layouts_of(inputs=False).items()}
        inputs, targets = self._data()
        return Placement.of(
            mesh or self.mesh,
            ruled,
            batch=self.batch or None,
            inputs=inputs or None,
            targets=targets or None,
            zero=self.zero,
            unmatched="replicate",
        )

    def _data(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """Specs of inputs and targets by position, where not just their rows are split."""
        split: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        first = len(self.inputs) if self.num_inputs is None else self.num_inputs
        end = None if self.num_targets is None else first + self.num_targets
        for place, specs in enumerate([*self.layouts_of(inputs=True).values()][:end]):
            is_target = place >= first
            by_rows = [_spec(self.batch), *[UNSHARDED] * (len(specs) - 1)][: len(specs)]
            if specs != by_rows:
                split[is_target][place - first if is_target else place] = specs
        return split

    def to_json(self) -> str:
        """The plan as text that :meth:`from_json` reads."""
        return json.dumps({"kind": "plan", "version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What :meth:`to_json` wrote. Raises :class:`~meshwright.PlanError` for anything else."""
        try:
            read = json.loads(text)
            if fault := wrong_kind(read, "plan"):
                raise PlanError(f"not a plan: {fault}.")
            read.pop("kind")
            if read.pop("version") != VERSION:
                raise PlanError(
                    f"unsupported version of the plan file; expected {VERSION}. Plan again."
                )
            return cls(**_values(read))
        except PlanError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"not a readable plan: {type(error).__name__}: {error}. Plan.to_json() writes one."
            ) from error

    def to_html(self) -> str:
        """The plan as one HTML page that needs no network: the alternatives side by side."""
        return self._page()

    def save(self, path: str | Path) -> None:
        """Write the plan to a file. Raises :class:`~meshwright.DataError` if it cannot."""
        write(path, self.to_json(), "the plan")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The plan in a file. Raises :class:`~meshwright.PlanError` if there is none."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"no plan can be read from {str(path)!r}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"no plan can be read from {str(path)!r}: {error}.") from error
        return cls.from_json(text)


def _spec(axes: tuple[str, ...]) -> Any:
    return UNSHARDED if not axes else axes[0] if len(axes) == 1 else axes


def _pattern(path: str) -> str:
    """The path itself, which a rule names exactly, unless it is not a valid regular expression."""
    try:
        re.compile(path)
    except re.error:
        return re.escape(path)
    return path


# Reading


def _values(read: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(Plan)}
    if unknown := set(read) - names:
        raise PlanError(f"unknown keys in the plan file: {', '.join(sorted(unknown))}.")
    values = {name: _tuples(value) for name, value in read.items()}
    values["chosen"] = _option(read["chosen"])
    values["runners_up"] = tuple(_option(saved) for saved in read["runners_up"])
    values["classics"] = tuple((name, _option(saved)) for name, saved in read.get("classics", []))
    values["why"] = tuple(Reason(choice, tuple(changes)) for choice, changes in read["why"])
    if read.get("serving") is not None:
        values["serving"] = _serving(read["serving"])
    values["data_parallel"] = None
    if read["data_parallel"] is not None:
        values["data_parallel"] = _option(read["data_parallel"])
    return values


def _serving(read: Mapping[str, Any]) -> Serving:
    return Serving(**{**read, "batches": tuple(PlannedBatch(*each) for each in read["batches"])})


def _option(read: Mapping[str, Any]) -> Option:
    if read["remat"] not in EVERY_REMAT:
        options = ", ".join(map(repr, EVERY_REMAT))
        raise PlanError(f"remat must be one of {options}; received {read['remat']!r}.")
    values = {name: _tuples(value) for name, value in read.items()}
    if read.get("pipeline") is not None:
        values["pipeline"] = Pipeline(**read["pipeline"])
    return Option(**values)


def _tuples(value: Any) -> Any:
    """Lists, which JSON makes of tuples, as tuples again."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


_EXAMPLE = """{"kind": "plan", "version": 3, "target": "h100:8", "hardware": "h100",
"objective": "time", "limit_bytes": null, "chosen": {"axes": [["batch", 8]],
"rules": [["batch", ["batch"]]], "zero": 1, "accumulate": 1, "remat": "none", "time_s": 0.1,
"compute_s": 0.1, "communication_s": 0.0, "peak_bytes": 4}, "runners_up": [],
"data_parallel": null, "layouts": [["x", [["batch"]]], ["dense/kernel", [[], []]]],
"inputs": ["x"], "batch": ["batch"], "why": []}"""
