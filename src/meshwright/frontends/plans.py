"""Plans for models and Programs: the planner beside the dry run, and the strategy that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from ..errors import TargetError
from ..layouts.context_mesh import outside_of_context
from ..layouts.mesh import Mesh, create_mesh
from ..layouts.placement import Placement
from ..planning.abstract_step import abstract_step
from ..planning.dry_run import Blocks, DryRun, dry_run_of, not_compiled
from ..planning.faults import tracing
from ..planning.goals import Aim, ServingGoal, goal_of
from ..planning.pipelined.cutting import pipelines_of
from ..planning.search.plan import Along
from ..planning.search.plan import Plan as Decided
from ..planning.search.planner import plan_step
from ..planning.search.request import Objective
from ..planning.search.solve import require_solver
from ..planning.search.verification import NoReport, Report
from ..planning.traced_graph import graph_of_step
from ..program import Batch, Program
from ..step.assemble import Assembly
from ..targets.hardware import Hardware, hardware_of
from ..targets.target import Target
from .serving_plans import plan_serving
from .serving_question import Question

if TYPE_CHECKING:
    import keras

    from .keras import Sharded

_ONE_DEVICE = Mesh({"batch": 1})
_NO_EXAMPLE = (
    "the program is cut into stages by an example of a batch: to train by this plan, make it with "
    "mw.jax_program(..., batch=example)"
)


class Plan(Decided):
    """Where a step's parameters and inputs lie, and why; ``print`` it for a table.

    A value: equal plans decide alike, and :meth:`to_json`, :meth:`from_json`, :meth:`save` and
    :meth:`load` keep all of it. :meth:`strategy` trains a Keras model by it; ``placement(mesh)``
    and ``how`` are what :class:`~meshwright.Trainer` takes.

    ``name`` is the model's, ``target`` the machine and ``hardware`` the figures that it was costed
    with; ``objective`` was minimized within ``limit_bytes`` of a device. ``chosen`` is the best
    option, ``runners_up`` are what else fits, ``data_parallel`` and ``classics`` the layouts with
    a name, ``why`` has a line for each choice and ``notes`` what to know about the figures.
    ``layouts`` has the axes of each dim of parameters and inputs, by path; ``inputs`` are the
    paths of the batch's arrays, the first ``num_inputs`` of them inputs and the next
    ``num_targets`` targets, and ``batch`` the axes of the rows. ``is_proven`` is false if the time
    limit ended the search. ``serving``, of a plan for latency or throughput, has its batches,
    copies and precision.

    >>> import jax, jax.numpy as jnp, optax, meshwright as mw
    >>> shapes = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
    >>> program = mw.jax_program(lambda p, x: jnp.mean((x @ p["w"]) ** 2), shapes, optax.sgd(0.1))
    >>> rows = jax.ShapeDtypeStruct((64, 64), "float32")
    >>> plan = mw.plan(program, rows, target="h100:8", axes={"batch": 8})
    >>> Plan.from_json(plan.to_json()) == plan, plan.axes
    (True, (('batch', 8),))
    """

    def strategy(self, mesh: Mesh | None = None) -> Sharded:
        """The strategy that lays a Keras model out so, on this mesh or on devices that are here.

        Raises :class:`~meshwright.MeshError` if there are not as many.
        """
        from .keras import Sharded

        here = create_mesh(dict(self.axes)) if mesh is None else mesh
        return Sharded.from_placement(self.placement(here), self.how)


@outside_of_context()
def plan(
    model: keras.Model | Program,
    batch: Batch,
    *,
    target: Target | str,
    objective: Objective | Aim | ServingGoal = "time",
    memory_limit: int | None = None,
    axes: Mesh | Mapping[str, int] | str | None = None,
    hardware: Hardware | None = None,
    verify: int = 0,
    blocks: Blocks = "auto",
    limit_s: float = 10.0,
    timeout_s: float = 3600.0,
) -> Plan:
    """The best way to lay a training step out on a target, which need not be there, and why.

    Mesh, the axes that dims lie along, ZeRO, accumulation and remat are chosen together, for the
    least time of a step or, with ``objective="memory"``, the least bytes at the peak of one device.
    Nothing takes more than ``memory_limit`` bytes, or a device's memory if it is left out. ``axes``
    fixes the mesh, ``"batch=4,model=2"``. ``target`` is such as ``"h100:8"``, and ``hardware``
    takes the place of what is known of its chips. ``model`` and ``batch`` are those of
    :func:`~meshwright.dry_run`: dims are inferred from the traced step. Data parallel, FSDP, tensor
    parallel and both together are columns of the printed plan, and by the model none of them that
    fits is faster than the plan. A model with equal blocks is looked at as a pipeline, too, unless
    ``axes`` or another objective is given; one is chosen where it is faster than all else would be
    even with its communication hidden behind compute, else a note says how much slower it is. The
    step is traced and the layouts known by name are looked at first; the search that follows ends
    after ``limit_s`` seconds with the best so far;
    with ``verify=k`` the best ``k`` are compiled after that, each in ``timeout_s`` at most, with
    less ZeRO, plain data parallel and FSDP beside them, and ranked by their dry runs, for which
    ``blocks`` is as in :func:`~meshwright.dry_run`; where the best does not fit, others follow that
    hold less; one that does not compile is left out, with a note. Where no compiler is here for a
    GPU target, nothing is compiled, and a note of the plan says so. Raises
    :class:`~meshwright.PlanError`, with the nearest miss and what would help, if nothing fits, and
    :class:`~meshwright.CompileError` if nothing compiles.

    With ``objective="latency"`` or ``"throughput"`` the forward pass alone is planned, for serving:
    ``batch`` is then the inputs, as for :func:`~meshwright.dry_serve`. Layouts are chosen for the
    least latency of the smallest batch, or for the most rows per second of the largest where the
    target holds as many copies of the model as fit; a :class:`~meshwright.ServingGoal` in place of
    the word says which batches and precisions. ``plan.serving`` has the batches worth compiling,
    the copies and the precision: a narrower one where that is 1.1 times as fast or nothing else
    fits. Where the weights take more than three quarters of a device and ``axes`` is not given, the
    model in 2, 4, 8 or 16 stages is looked at, too. :class:`~meshwright.Server` takes such a plan
    as its strategy.

    (Joint search of mesh and layouts after Mesh-TensorFlow's ``auto_mtf`` and Alpa.)

    >>> import jax, keras, meshwright as mw
    >>> with mw.abstract():
    ...     model = keras.Sequential([keras.Input([64]), keras.layers.Dense(8192, name="wide")])
    ...     model.compile("adam", "mse")
    >>> batch = [jax.ShapeDtypeStruct((16, features), "float32") for features in (64, 8192)]
    >>> chosen = plan(model, tuple(batch), target="h100:4")
    >>> chosen == mw.Plan.from_json(chosen.to_json())
    True
    """
    require_solver()
    target = Target.of(target)
    if (goal := goal_of(objective)) is not None:
        question = Question(
            target=target,
            goal=goal,
            hardware=hardware or hardware_of(target),
            memory_limit=memory_limit,
            axes=axes,
            verify=verify,
            limit_s=limit_s,
            timeout_s=timeout_s,
        )
        return _of_serving(model, batch, question)
    described = abstract_step(model, batch, _strategy(model, Placement.of(_ONE_DEVICE)))

    def report_of(candidate: Decided) -> Report:
        return _report(model, batch, candidate, target, hardware, blocks, timeout_s)

    with tracing(described.program.name):
        graph = graph_of_step(described)
    search, uncut = (None, "") if axes else pipelines_of(described, batch)
    lacks = not_compiled(target) if verify else ""
    is_own = described.program.own_step is not None  # which micro-batches and remat cannot cut
    best = plan_step(
        graph,
        target,
        objective=cast(Objective, objective),
        memory_limit=memory_limit,
        axes=axes,
        hardware=hardware,
        limit_s=limit_s,
        verify=verify,
        dry_run_of=None if lacks else report_of,
        pipelines_of=search,
        **({"accumulate": (1,), "remat": ("none",)} if is_own else {}),
    )
    if uncut:
        best = replace(best, notes=(*best.notes, f"no pipeline: {uncut}"))
    if lacks:
        best = replace(best, notes=(*best.notes, f"nothing was compiled to verify it: {lacks}"))
    if best.chosen.pipeline is not None and isinstance(model, Program) and model.example is None:
        best = replace(best, notes=(*best.notes, _NO_EXAMPLE))
    return _named(best, described, _counts(model, batch))


def _of_serving(model: Any, inputs: Any, question: Question) -> Plan:
    best, forwards = plan_serving(model, inputs, question)
    steps = forwards.steps(Placement.of(_ONE_DEVICE))
    return _named(best, steps, {})


def _named(decided: Decided, described: Assembly, counts: Mapping[str, int]) -> Plan:
    """The plan of a model, by the names that it and its variables keep."""
    values: dict[str, Any] = {field.name: getattr(decided, field.name) for field in fields(decided)}
    values |= {**counts, "name": described.program.name}
    values["layouts"] = _lasting(decided.layouts, described)
    return Plan(**values)


def _lasting(layouts: Sequence[tuple[str, Along]], described: Assembly) -> Any:
    """The layouts by paths that variables have again when their model is built again."""
    lasting = {entry.info.path: entry.info.lasting or entry.info.path for entry in described.placed}
    return tuple((lasting.get(path, path), along) for path, along in layouts)


def _strategy(model: Any, placement: Placement, how: Any = None) -> Any:
    """What describes the step of this model under the placement."""
    if isinstance(model, Program) and how is None:
        return placement
    from .keras import Sharded

    return Sharded.from_placement(placement, how)


def _counts(model: Any, batch: Batch) -> dict[str, int]:
    """How many of the batch's arrays are a Keras model's inputs and targets."""
    if isinstance(model, Program):
        return {}
    inputs, targets = (len(jax.tree.leaves(part)) for part in (batch[0], batch[1:2]))
    return {"num_inputs": inputs, "num_targets": targets}


def _report(
    model: Any, batch: Batch, candidate: Decided, whole: Target, hardware: Hardware | None,
    blocks: Blocks, timeout_s: float,
) -> DryRun | Report:  # fmt: skip
    """The dry run of one candidate; :class:`NoReport` where its devices do not form a TPU slice."""
    try:
        part = whole.part(candidate.mesh.size)
    except TargetError:
        return NoReport()
    candidate = replace(candidate, **_counts(model, batch))
    strategy = _strategy(model, candidate.placement(), candidate.how)
    micro, hardware = _micro_batch(batch, candidate.accumulate), hardware or hardware_of(part)
    return dry_run_of(model, micro, strategy, part, hardware, blocks, True, timeout_s)


def _micro_batch(batch: Batch, count: int) -> Batch:
    """The shapes of one of ``count`` equal parts of a batch."""

    def part(array: Any) -> Any:
        dtype = array.dtype if hasattr(array, "dtype") else np.asarray(array).dtype
        dims = np.shape(array)
        return jax.ShapeDtypeStruct((dims[0] // count, *dims[1:]) if dims else dims, dtype)

    return batch if count == 1 else jax.tree.map(part, batch)
