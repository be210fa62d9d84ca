"""A program whose independent branches are computed side by side, on the devices of an axis.

Every device computes what all branches begin with and what joins them; of the branches it computes
its own (``lax.switch``), and the results are exchanged where the graph joins. Gradients are taken
inside of each branch, never through one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays.by_hand import over_axes
from ..errors import PipelineError
from ..layouts.placement import Placement
from ..program import Arrays, Batch, Program, TrainState
from ..warn import warn
from .branches import Branches, Forks, Region
from .by_stage import from_row, packed_row, summed
from .faults import check_callbacks, faults_of
from .line import Line
from .packing import Packing
from .pipeline import Pipeline
from .running import Taken
from .segments import Packed
from .setting import laid_exactly
from .shares import StageShare, layers_of_branches, spans_of, with_bytes
from .staged import (
    Staged,
    abstract_of,
    leaves_of,
    over_stacks,
    shape_of,
    traced_of,
)


@dataclass(frozen=True, eq=False)
class Branched(Staged):
    """A program whose branches are dealt to the devices of an axis, under a placement."""

    @classmethod
    def by_branch(
        cls,
        program: Program,
        placement: Placement,
        branches: Branches,
        guarded: Program | None = None,
    ) -> Branched:
        """With the steps of ``guarded``, if that is given, where branches are not dealt.

        Raises :class:`~meshwright.PipelineError` with the reason where it has none.
        """
        _check(program, placement, branches)
        traced = traced_of(program, placement, 1, abstract_of(program), program.example)
        check_callbacks(traced.closed, placement, branches.axis, "branches")
        forks = Forks.of(Line.of(traced), placement.mesh[branches.axis])
        packing = Packing.by_owner(program, placement, branches.axis, forks.owner)
        _warn_of_idle(forks, branches.axis)
        outside, own = forks.flops
        total = outside + sum(own) or 1.0
        shares = tuple(
            StageShare(
                device,
                (),
                False,
                False,
                flops / total,
                _paths(forks, device),
                "branches",
                spans=spans_of(forks.branches(device)),
            )
            for device, flops in enumerate(own)
        )
        return cls(
            program,
            placement,
            Pipeline(branches.axis, 1, "gpipe"),
            packing,
            over_stacks(guarded or program, packing),
            recompute_blocks=False,
            shares=with_bytes(shares, packing),
            dealt=(),
            layers=layers_of_branches([share.spans for share in shares]),
        )

    @property
    def ticks(self) -> None:
        """Branches take no turns."""

    def takes(self, batch: Batch) -> bool:
        """Every batch."""
        return True

    def check_rows(self, batch: Batch) -> None:
        """No batch is cut into micro-batches."""

    def gradients(self, whole: TrainState, batch: Batch) -> Taken:
        """The gradients of a step of a state with packs; inside a traced function."""
        leaves, tree = leaves_of(batch)
        shapes = tree.unflatten([shape_of(leaf.shape, leaf.dtype) for leaf in leaves])
        placement, packing = self.placement, self.stacking
        assert isinstance(packing, Packing)
        traced = traced_of(
            self.whole, placement, 1, abstract_of(self.whole), shapes, in_context=True
        )
        forks = Forks.of(Line.of(traced), packing.stages)
        if forks.owner != packing.owner:
            raise self.is_other()
        runner = ForkRunner(
            forks, packing, placement.mesh.jax_mesh, packing.axis, placement.batch_axes
        )
        return runner(whole, leaves)


def _check(program: Program, placement: Placement, branches: Branches) -> None:
    mesh = placement.mesh
    faults = faults_of(program, placement, branches.axis, "branches")
    beside = {axis for axis, size in mesh.axes if size > 1}
    if beside := beside - {branches.axis, *placement.batch_axes}:
        faults.append(
            f"axis {min(beside)!r} splits more than the rows of a batch, which is not supported "
            "beside branches."
        )
    if 0 < placement.zero < 3:
        faults.append(f"zero={placement.zero} is not supported with branches; leave it out.")
    if faults:
        raise PipelineError("\n".join(faults))


def _warn_of_idle(forks: Forks, axis: str) -> None:
    idle = forks.devices - forks.at_once
    if idle:
        warn(
            f"axis {axis!r} splits {forks.devices} ways, and no more than {forks.at_once} branches "
            f"are side by side: {idle / forks.devices:.0%} of the devices compute none. Use "
            f"{axis}={max(2, forks.at_once)}, and give the others to the batch."
        )


def _paths(forks: Forks, device: int) -> tuple[str, ...]:
    of = [path for region in forks.regions for path in forks.params(region, device)]
    return tuple(dict.fromkeys(of))


@dataclass(frozen=True, eq=False)
class ForkRunner:
    """The gradients of one step; ``rows`` are the axes that split the rows of a batch."""

    forks: Forks
    packing: Packing
    mesh: Any
    axis: str
    rows: tuple[str, ...]

    def __call__(self, whole: TrainState, leaves: Sequence[Any]) -> Taken:
        """Of a state with packs, and the leaves of a batch."""
        packs = self.packing.packs.params
        own = [whole.params[path] for path in packs]
        others = {p: v for p, v in whole.params.items() if p not in packs}
        slots = {p: v for p, v in whole.slots.items() if p not in self.packing.packs.slots}
        rest = whole._replace(params={}, slots=slots)
        spec = jax.sharding.PartitionSpec
        along, everywhere = spec(self.axis), spec()
        run = over_axes(
            self._on_device,
            mesh=self.mesh,
            in_specs=(along, along, *[everywhere] * 3),
            out_specs=(along, everywhere, everywhere),
            axis_names={self.axis},
        )
        numbers = jax.numpy.arange(self.forks.devices)
        rows, grads, results = run(numbers, own, others, rest, list(leaves))
        traced, values = self.forks.line.traced, iter(results)
        metrics, logs, state = (
            {path: next(values) for path in of}
            for of in (traced.metrics, traced.logs, traced.state)
        )
        return {**grads, **dict(zip(packs, rows, strict=True))}, state, metrics, logs

    def _on_device(
        self, number: Any, own: list[Any], others: Arrays, rest: TrainState, leaves: list[Any]
    ) -> tuple[list[Any], Arrays, list[Any]]:
        def loss(own: list[Any], others: Arrays) -> tuple[Any, list[Any]]:
            results = _OnDevice(self, number[0], own, others, rest, leaves).results()
            return results[0], results[1:]

        (_, results), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(own, others)
        return *grads, results


class _OnDevice:
    """One device's values, region by region."""

    def __init__(
        self,
        runner: ForkRunner,
        number: Any,
        own: list[Any],
        others: Arrays,
        rest: TrainState,
        leaves: Sequence[Any],
    ) -> None:
        self._runner, self._forks, self._number = runner, runner.forks, number
        self._line, self._own, self._others = runner.forks.line, own, others
        self._trees: dict[tuple[int, int], Any] = {}  # by region and device
        self._packed: dict[int, Packed] = {}
        self._rows = leaves[0].shape[0]
        values = {**rest._asdict(), "params": others, "batch": dict(enumerate(leaves))}
        self._values = {
            var: values[part][key]
            for var, (part, key) in self._line.traced.arguments.items()
            if key in values[part]
        }

    def results(self) -> list[Any]:
        """The loss, metrics, logs, and the state of the model."""
        line, values = self._line, dict(self._values)
        for step in self._forks.schedule:
            if isinstance(step, Region):
                values |= self._region(step, line.evaluate(step.enters, values))
            else:
                outs = line.eqns[step].outvars
                values |= zip(outs, line.evaluate(outs, values), strict=True)
        traced = line.traced
        outputs = [traced.loss, *traced.metrics.values(), *traced.logs.values()]
        return line.evaluate([*outputs, *traced.state.values()], values)

    def _region(self, region: Region, enters: list[Any]) -> dict[Any, Any]:
        """What is read after the join, of what is computed before the fork."""
        read = {p for d in range(self._forks.devices) for p in self._forks.params(region, d)}
        shared = {path: value for path, value in self._others.items() if path in read}
        joined = jax.custom_vjp(lambda *values: self._forward(region, *values)[0])
        joined.defvjp(
            lambda *values: self._forward(region, *values),
            lambda residuals, gradient: self._backward(region, residuals, gradient),
        )
        leaves = [v for of in region.leaves for v in of]
        return dict(zip(leaves, joined(self._own, shared, enters), strict=True))

    def _forward(
        self, region: Region, own: list[Any], shared: Arrays, enters: list[Any]
    ) -> tuple[list[Any], Any]:
        def differentiated(device: int) -> tuple[list[Any], list[Any]]:
            weights = self._weights(region, device, own, shared)
            inside = lambda weights, enters: self._leaves_of(region, device, weights, enters)  # noqa: E731
            y, pull = jax.vjp(inside, weights, enters)
            leaves, tree = jax.tree.flatten(pull)
            self._trees[id(region), device] = tree
            return y, leaves

        devices = range(self._forks.devices)
        shapes = [jax.eval_shape(lambda d=d: differentiated(d)[1]) for d in devices]
        packed = self._packed[id(region)] = Packed(shapes, self._rows)

        def branch(device: int) -> tuple[list[Any], list[Any]]:
            y, leaves = differentiated(device)
            whole = [
                value
                for d, of in enumerate(region.leaves)
                for value in (y if d == device else [_zeros(v.aval) for v in of])
            ]
            return whole, packed.pack(leaves, self._exactly)

        sums, residuals = self._switch(branch)
        return self._summed(sums), (residuals, shared)

    def _backward(
        self, region: Region, residuals: tuple[Any, Arrays], gradient: list[Any]
    ) -> tuple[list[Any], Arrays, list[Any]]:
        packed, shared = residuals
        packs = self._runner.packing.packs.params.values()

        def branch(device: int) -> tuple[list[Any], Arrays, list[Any]]:
            leaves = self._packed[id(region)].unpack(device, packed, self._exactly)
            begin = sum(len(of) for of in region.leaves[:device])
            mine = gradient[begin : begin + len(region.leaves[device])]
            grads, enters = self._trees[id(region), device].unflatten(leaves)(mine)
            rows = [
                packed_row(
                    [p for p in pack.pieces if p.path in grads],
                    grads,
                    pack.info.dims[1],
                    pack.info.dtype,
                )[None]
                for pack in packs
            ]
            return rows, {p: grads.get(p, _zeros(v)) for p, v in shared.items()}, enters

        rows, of_shared, of_enters = self._switch(branch)
        of_shared, of_enters = self._summed((of_shared, of_enters))
        return [self._exactly(row, False) for row in rows], of_shared, of_enters

    def _weights(self, region: Region, device: int, own: list[Any], shared: Arrays) -> Arrays:
        weights = dict(shared)
        for pack, row in zip(self._runner.packing.packs.params.values(), own, strict=True):
            weights |= from_row([p for p in pack.pieces if p.stage == device], row[0])
        return {p: self._exactly(weights[p], False) for p in self._forks.params(region, device)}

    def _leaves_of(
        self, region: Region, device: int, weights: Arrays, enters: list[Any]
    ) -> list[Any]:
        """The results of a device's branches."""
        line, arguments = self._line, self._line.traced.arguments
        values = {v: x for v, x in self._values.items() if arguments[v][0] != "params"}
        values |= {v: weights[key] for v, (part, key) in arguments.items() if key in weights}
        values |= zip(region.enters, enters, strict=True)
        return line.evaluate(region.leaves[device], values)

    def _switch(self, branch: Callable[[int], Any]) -> Any:
        branches = [lambda d=d: branch(d) for d in range(self._forks.devices)]
        return jax.lax.switch(self._number, branches)

    def _summed(self, values: Any) -> Any:
        return jax.tree.map(lambda value: summed(value, self._runner.axis), values)

    def _exactly(self, value: Any, by_row: bool) -> Any:
        return laid_exactly(value, by_row, self._runner.rows, self._runner.mesh)


def _zeros(like: Any) -> Any:
    return jnp.zeros(like.shape, like.dtype)
