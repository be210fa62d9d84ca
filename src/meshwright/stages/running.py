"""A step of a pipeline as one program for all devices: a loop over ticks, stages side by side.

Each device takes the passes that the tick table has for its stage. The axis of the stages is taken
by hand (``jax.shard_map``), all others are left to XLA.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays.by_hand import over_axes
from ..program import Arrays, Logs, TrainState
from .parts import Blocks, is_trained
from .passes import Passes
from .plan import Row
from .setting import Own, Rest, Setting
from .ticks import Ticks

_FEW_BLOCKS = 8  # of a run

Taken = tuple[Arrays, Arrays, Arrays, Logs]  # gradients, state, metrics, logs


@dataclass(frozen=True, eq=False)
class Runner:
    """The gradients of one step by a plan.

    ``stacks`` are the paths of the stacked parameters, in the order of ``blocks.params``;
    ``platform`` is the devices', if it is known.
    """

    setting: Setting
    stacks: tuple[str, ...]
    platform: str | None

    def __call__(self, whole: TrainState, micros: Sequence[Any]) -> Taken:
        """Of a state with stacks, and the leaves of the batch as ``(micro-batches, rows, ...)``."""
        setting, functions = self.setting, self.setting.functions
        others = {p: value for p, value in whole.params.items() if p not in self.stacks}
        states, state = self._counted(whole, others, micros)
        rest = Rest(self._read_slots(whole.slots), whole.metrics)
        context = setting.known(others, whole.state, rest, [])
        own = self._own(whole, states, self._differing(context, states, micros))
        shared = functions.evaluate(functions.constant, context)
        spec = jax.sharding.PartitionSpec
        along, by_tick = spec(setting.axis), spec(None, setting.axis)
        run = self._over_stages((along if setting.pieces == 1 else by_tick, *[along] * 4))
        fixed = {p: value for p, value in whole.state.items() if p not in states}
        results = run(own, others, (fixed, states), rest, shared, micros, self._rows())
        own_grads, grads_before, grads_after, metrics, logs = results
        own_rows = setting.blocks.own if isinstance(setting.blocks, Blocks) else ()
        grads = {
            path: self._without_frozen(value, whole.params[path], row)
            for path, value, row in zip(
                self.stacks, own_grads, filter(is_trained, own_rows), strict=False
            )
        }
        blocks = (0,) if setting.pieces == 1 else (0, 1)
        lent = own_grads[len(self.stacks) :]
        of_lent = {p: g.sum(blocks) for p, g in zip(functions.lent, lent, strict=True)}
        for path, value in others.items():
            around = [of[path] for of in (grads_before, grads_after) if path in of]
            parts = [of.sum(tuple(range(of.ndim - value.ndim))) for of in around]
            parts += [of_lent[path]] if path in of_lent else []
            grads[path] = sum(parts) if parts else jax.numpy.zeros_like(value)
        metrics, logs = jax.tree.map(lambda value: value[-1], (metrics, logs))
        return grads, state, metrics, logs

    # What is made before the loop

    def _read_slots(self, slots: Arrays) -> Arrays:
        """Those that the loss reads, as the scale of a loss is; the others stay on their stages."""
        read = self.setting.functions.read("slots")
        return {path: value for path, value in slots.items() if path in read}

    def _rows(self) -> Row:
        return Row(*map(jnp.asarray, self.setting.plan.rows))

    def _counted(
        self, whole: TrainState, others: Arrays, micros: Sequence[Any]
    ) -> tuple[Arrays, Arrays]:
        """State that counts, as each micro-batch begins with it, and all state after the step."""
        paths = self.setting.functions.counted
        if not paths:
            return {}, dict(whole.state)

        def count(state: Arrays, leaves: Sequence[Any]) -> tuple[Arrays, Arrays]:
            rest = Rest(whole.slots, whole.metrics)
            values = self.setting.known(others, {**whole.state, **state}, rest, leaves)
            outputs = [self.setting.traced.state[path] for path in paths]
            new = self.setting.functions.evaluate(outputs, values, counting=True)
            return dict(zip(paths, new, strict=True)), state

        first = {path: whole.state[path] for path in paths}
        last, before = jax.lax.scan(count, first, list(micros))
        return before, {**whole.state, **last}

    def _differing(
        self, context: Mapping[Any, Any], states: Arrays, micros: Sequence[Any]
    ) -> list[list[Any]]:
        """What blocks differ in, by row and block, with a dim of micro-batches in front where it
        changes with them."""
        functions, arguments = self.setting.functions, self.setting.traced.arguments
        rows = functions.blocks.differing
        by_micro = list(itertools.compress(rows, functions.differs_by_micro))
        by_name = {name: var for var, name in arguments.items()}

        def of_micro(at: tuple[Arrays, list[Any]]) -> list[list[Any]]:
            state, leaves = at
            values = {**context, **{by_name["state", path]: of for path, of in state.items()}}
            values |= {by_name["batch", number]: leaf for number, leaf in enumerate(leaves)}
            return [functions.evaluate(row, values) for row in by_micro]

        changing = iter(jax.lax.map(of_micro, (states, list(micros))) if by_micro else ())
        return [
            next(changing) if changes else functions.evaluate(row, context)
            for row, changes in zip(rows, functions.differs_by_micro, strict=True)
        ]

    def _own(self, whole: TrainState, states: Arrays, differing: Sequence[Sequence[Any]]) -> Own:
        stacks = iter(self.stacks)
        places = self.setting.deal.places
        own = Own([], [], [], [jnp.array([block is not None for block in places])])
        blocks = self.setting.blocks
        assert isinstance(blocks, Blocks)
        for kind, row in zip(self.setting.kinds, blocks.own, strict=False):
            paths = [row[block or 0][1] for block in places]  # of any block where there is none
            if kind == "params":
                stack = whole.params[next(stacks)]
                own.params.append(self._with_frozen(stack, row, whole.state))
            elif kind == "counted":
                own.counted.append(jnp.stack([states[path] for path in paths], 1))
            else:
                own.fixed.append(jnp.stack([whole.state[path] for path in paths]))
        kinds = self.setting.kinds[len(blocks.own) :]
        for kind, row in zip(kinds, differing, strict=False):
            by_place = [row[block or 0] for block in places]
            if kind == "counted":
                own.counted.append(jnp.stack(by_place, 1))
            else:
                own.fixed.append(jnp.stack(by_place))
        lent = [whole.params[path] for path in blocks.functions.lent]
        own.params.extend(jnp.broadcast_to(value, (len(places), *value.shape)) for value in lent)
        return own

    # Frozen weights, which lie beside the stack of those that are trained

    def _frozen(self, row: Sequence[tuple[str, str]]) -> dict[int, str]:
        """The paths of frozen weights by place."""
        members = {
            place: row[block]
            for place, block in enumerate(self.setting.deal.places)
            if block is not None
        }
        return {place: path for place, (part, path) in members.items() if part != "params"}

    def _with_frozen(self, stack: Any, row: Sequence[tuple[str, str]], state: Arrays) -> Any:
        """The stack with frozen weights in their places, each of which its own stage alone writes:
        a stack of them would be as large as that of all stages on every device."""
        for place, path in self._frozen(row).items():
            stack = stack.at[place].set(state[path])
        return stack

    def _without_frozen(self, grads: Any, stack: Any, row: Sequence[tuple[str, str]]) -> Any:
        """Gradients of a stack, with zeros in the places of frozen weights."""
        if not (frozen := self._frozen(row)):
            return grads
        return jnp.where(_at(frozen, stack, grads.ndim - stack.ndim), 0, grads)

    # The loop, on one stage

    def _over_stages(self, out_specs: Any) -> Any:
        """The loop over ticks on every stage, each with its own arrays and column of rows."""
        axis, spec = self.setting.axis, jax.sharding.PartitionSpec
        along, by_tick = spec(axis), spec(None, axis)
        return over_axes(
            self._ticks,
            mesh=self.setting.mesh,
            in_specs=(Own(along, along, by_tick, along), *[spec()] * 5, by_tick),
            out_specs=out_specs,
            axis_names={axis},
        )

    def _passes(self, setting: Setting, *values: Any) -> Passes:
        return Passes(setting, *values)

    def _ticks(self, *values: Any) -> Any:
        """The loop, as suits the devices.

        A CPU copies every weight that it takes out of a stack, so it has the blocks of a run one by
        one, if they are few; others read it where it lies, and their compilers take long for many
        blocks. A GPU copies every buffer that a branch writes.
        """
        few = 1 < self.setting.deal.most <= _FEW_BLOCKS
        on_cpu = replace(self.setting, unrolls=True) if few else self.setting
        on_gpu = replace(self.setting, in_branches=False)
        cpu, gpu, others = (
            functools.partial(self._stepped, setting) for setting in (on_cpu, on_gpu, self.setting)
        )
        if self.platform is not None:
            return {"cpu": cpu, "gpu": gpu}.get(self.platform, others)(*values)
        return jax.lax.platform_dependent(*values, cpu=cpu, cuda=gpu, rocm=gpu, default=others)

    def _stepped(
        self,
        setting: Setting,
        own: Own,
        others: Arrays,
        state: tuple[Arrays, Arrays],
        rest: Rest,
        shared: Any,
        micros: Any,
        rows: Row,
    ) -> Any:
        passes = self._passes(setting, own, others, state, rest, shared, micros)
        ticks = Ticks(setting, passes)
        last = ticks.first()
        for phase in setting.plan.loops(setting.skips):
            part = Row(*(values[phase.first : phase.end] for values in rows))
            last, _ = jax.lax.scan(functools.partial(ticks.take, phase), last, part)
        metrics, logs = last.metrics, last.logs
        if setting.deal.shares_loss:
            metrics, logs = passes.measured(metrics, logs, last.metric_inputs)
        tops = *passes.apart(last.around, rows.stage[0, 0]), metrics, logs
        return passes.joined(last.own_grads), *jax.tree.map(lambda value: value[None], tops)


def _at(places: Collection[int], stack: Any, before: int) -> Any:
    """Whether each place of a stack is one of these, behind some dims and in front of others."""
    are = jnp.array([place in places for place in range(len(stack))])
    return are.reshape([1] * before + [-1] + [1] * (stack.ndim - 1))
