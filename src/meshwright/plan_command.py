"""The command ``meshwright plan``: build a model as shapes, dry-run it on a target, print."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _compat
from .equivalence.cases import Case, case_of, setups
from .equivalence.finding import find_build
from .errors import BatchError, LayoutError, ModelError
from .layout import Layout
from .mesh import Mesh
from .placement import Placement
from .planning import Target
from .planning.asking import watching
from .planning.changes import compare, notes
from .planning.dry_run import dry_run
from .planning.files import check_folder
from .planning.lock import Lock, lock_of
from .program import Program
from .topology import virtual_devices

if TYPE_CHECKING:
    from .frontends.plans import Plan
    from .planning.dry_run import DryRun


def check_folders(report: str | None = None, plan: str | None = None) -> None:
    """Raise :class:`~meshwright.DataError` for a file that could not be written in the end."""
    for path, what in ((report, "the report"), (plan, "the plan")):
        if path is not None:
            check_folder(path, what)


def run(
    build: str,
    target_text: str,
    mesh_text: str | None,
    rules: Sequence[tuple[str, str]],
    zero: int | None,
    batch_size: int | None,
    options: Mapping[str, Any],
    timeout_s: float,
    html_path: str | None = None,
) -> DryRun:
    """The dry run of the model that ``build`` makes, on a mesh over all devices of a target.

    The report is written to ``html_path``, too, as a page for a browser.
    """
    target = Target.of(target_text)
    mesh = Mesh({"batch": target.num_devices}) if mesh_text is None else Mesh.from_string(mesh_text)
    if "layouts" in options:
        raise LayoutError("--option layouts is an option of the command: --layout.")
    asked = dict(options) if zero is None else {**options, "zero": zero}
    layouts = {pattern: Layout.from_string(f"[{axes}]") for pattern, axes in rules}
    if not _compat.jax_is_running():
        virtual_devices(1)  # an accelerator that is here, or its driver, is not woken up
    case = _built(build, layouts, asked)
    setup = setups(case, [mesh.abstract()])[0]
    batch = _micro_batch(case.batches[0], batch_size, setup.options.get("accumulate", 1))
    strategy = _strategy(case, setup)
    progress = _Progress(target)
    try:
        with watching(progress.told):
            report = dry_run(
                case.model, batch, strategy=strategy, target=target, timeout_s=timeout_s
            )
    finally:
        progress.end()
    if html_path is not None:
        report.save(html_path)
    return report


class _Progress:
    """Says on standard error that a compiler is at work, and on a terminal for how long."""

    def __init__(self, target: Target) -> None:
        self._words = f"compiling for {target} ..."
        self._is_said = False

    def told(self, elapsed_s: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{self._words} {elapsed_s:.0f} s ")
        elif not self._is_said:
            sys.stderr.write(f"{self._words}\n")
        sys.stderr.flush()
        self._is_said = True

    def end(self) -> None:
        if self._is_said and sys.stderr.isatty():
            sys.stderr.write("\n")


def choose(
    build: str,
    target_text: str,
    mesh_text: str | None,
    batch_size: int | None,
    *,
    objective: Any,
    memory_limit: int | None,
    verify: int,
    limit_s: float,
    timeout_s: float,
) -> Plan:
    """The planner's layout of the model that ``build`` makes, whatever layouts it comes with."""
    from .frontends.plans import plan

    if not _compat.jax_is_running():
        virtual_devices(1)
    case = _built(build, {}, {})
    return plan(
        case.model,
        _micro_batch(case.batches[0], batch_size, 1),
        target=target_text,
        objective=objective,
        memory_limit=memory_limit,
        axes=mesh_text,
        verify=verify,
        limit_s=limit_s,
        timeout_s=timeout_s,
    )


def checked(report: DryRun, before: Lock, tolerance: float | None) -> tuple[str, bool]:
    """What changed since a plan was kept, in words, and whether any of it got worse."""
    now = lock_of(report)
    found = compare(before, now, tolerance)
    count = sum(each.verdict == "worse" for each in found)
    things = "1 thing" if count == 1 else f"{count} things"
    verdict = f"{things} got worse than the plan" if count else "nothing got worse"
    said = [*(f"  {each}" for each in found), *(f"note: {each}" for each in notes(before, now))]
    return "\n".join([f"{verdict} (written for {before.target}, {before.name})", *said]), count > 0


def _built(build: str, layouts: Mapping[str, Any], options: Mapping[str, Any]) -> Case:
    """What ``build`` returns; a Keras model is made of shapes only."""
    from .frontends.keras.abstract import abstract

    function = find_build(build)
    with abstract():
        case = case_of(function(), layouts, options)
    if not isinstance(case.model, Program) and not hasattr(case.model, "compiled"):
        raise ModelError(
            f"build() returned a {type(case.model).__name__} for a model; it is a compiled Keras "
            "model or a Program."
        )
    return case


def _strategy(case: Case, setup: Any) -> Any:
    from .frontends.keras import Sharded

    try:
        if not isinstance(case.model, Program):
            return Sharded(setup.mesh, setup.layouts, **setup.options)
        ways = {"accumulate", "remat", "sums"} & setup.options.keys()
        own = {k: v for k, v in setup.options.items() if k not in ways}
        how = {k: setup.options[k] for k in ways}
        placement = Placement.of(setup.mesh, setup.layouts, **own)
        return Sharded.from_placement(placement, _how(how))
    except TypeError as error:
        raise LayoutError(f"--option: {error}.") from error


def _how(options: Mapping[str, Any]) -> Any:
    from .step.options import StepOptions

    return StepOptions(**options)


def _micro_batch(batch: Any, rows: int | None, parts: int) -> Any:
    """The shapes of a batch of so many rows, or of the part of it that is taken at once."""
    import jax
    import numpy as np

    def shape(value: Any) -> Any:
        value = value if hasattr(value, "dtype") else np.asarray(value)
        if not value.shape:
            return jax.ShapeDtypeStruct((), value.dtype)
        wanted = rows or value.shape[0]
        if wanted % parts:
            raise BatchError(
                f"a batch of {wanted} rows does not make {parts} micro-batches of the same size; "
                f"take {wanted // parts * parts or parts}."
            )
        return jax.ShapeDtypeStruct((wanted // parts, *value.shape[1:]), value.dtype)

    return jax.tree.map(shape, batch)
