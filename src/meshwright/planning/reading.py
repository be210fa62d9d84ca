"""The report on a step, read from what the compiler made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax

from ..errors import DoesNotFitError
from ..hlo.peak import LiveTensor, alive_at_peak
from ..hlo.text import parse
from ..hlo.traffic import transfers
from ..jaxprs.flops import least_flops, model_flops
from ..layouts.params import Placed
from ..program import TrainState
from ..targets import gpu
from ..targets.hardware import Hardware
from ..targets.target import Target
from ..units import bytes_text
from .abstract_step import AbstractStep, unstaged
from .ahead import Compiled, trace
from .blocks import Blocks, Reduced, heights_of, unmarked
from .blocks import extended as extending
from .estimate import estimate
from .pipelined.compiled import turns_of
from .report import DryRun, Memory

_TENSORS = 32  # that are kept of those alive at the peak, and all that are as large
_BESIDES = 0.2  # of the peak, from where it wants a word
_NEAR = 0.8  # of a device's memory, from where compilers give up time for room


def extended(
    described: AbstractStep,
    repeats: Reduced,
    fewer: Sequence[AbstractStep],
    compiled: Sequence[Compiled],
    hardware: Hardware,
) -> DryRun | None:
    """The report on all equal blocks, from the steps with one of them and with two.

    ``None`` where the compiler's figure for two of them is more than what we see.
    """
    bare = [replace(program, text=unmarked(program.text)) for program in compiled]
    one, two = (read(d, c, hardware, all_tensors=True) for d, c in zip(fewer, bare, strict=True))
    if not extending.is_understood(two):
        return None
    heights = [heights_of(program.text) for program in compiled]
    memory, most, tensors = extending.memory((one, two), heights, repeats)
    assert one.estimate is not None
    assert two.estimate is not None
    blocks = Blocks(repeats.count, repeats.names, (compiled[0].compile_s, compiled[1].compile_s))
    return replace(
        two,
        memory=replace(memory, **sizes(described)),
        collectives=extending.transfers(one.collectives, two.collectives, repeats),
        tensors=_largest(tensors),
        alive_bytes=most,
        estimate=extending.estimate(one.estimate, two.estimate, repeats),
        notes=(*two.notes, str(blocks), *_doubts(memory, two.target)),
        placed=described.placed,
        blocks=blocks,
    )


def _doubts(memory: Memory, target: Target) -> tuple[str, ...]:
    """Why the peak of all blocks may be another."""
    if target.platform == "cuda":
        return (
            "XLA for GPUs orders many blocks otherwise than two, so the peak may be far off: "
            'blocks="whole" compiles all of them',
        )
    if memory.available_bytes is None or (memory.peak_bytes or 0) < _NEAR * memory.available_bytes:
        return ()
    return (
        "with so much in a device the compiler computes things again rather than hold them: "
        'blocks="whole" compiles all blocks, and may find that the step fits',
    )


def read(
    described: AbstractStep, compiled: Compiled, hardware: Hardware, all_tensors: bool = False
) -> DryRun:
    """The report on a step that was compiled, with the largest of the tensors at the peak, or all
    of them."""
    alive = alive_at_peak(parse(compiled.text))
    nbytes = sizes(described)
    peak, peak_is = _peak(compiled)
    whole, least = _model_flops(described, compiled.target)
    staged = described.staged
    estimated = estimate(
        compiled,
        hardware,
        model_flops=whole,
        least_flops=least,
        recomputes=staged is None,
        turns=() if staged is None else turns_of(staged),
    )
    return DryRun(
        name=described.program.name,
        target=compiled.target,
        axes=compiled.axes,
        memory=Memory(
            **nbytes,
            padding_bytes=compiled.argument_bytes - sum(nbytes.values()) + nbytes["gradient_bytes"],
            temporary_bytes=compiled.temporary_bytes,
            peak_bytes=peak,
            peak_is=peak_is,
            available_bytes=hardware.memory_bytes,
        ),
        collectives=transfers(
            compiled.collectives, arguments(described), described.placement, compiled.lines
        ),
        tensors=_named(alive if all_tensors else _largest(alive), arguments(described)),
        alive_bytes=sum(tensor.nbytes for tensor in alive),
        estimate=estimated,
        notes=(
            *_notes(compiled.target),
            *_besides(compiled),
            *estimated.uncertain,
            *(() if staged is None else staged.notes),
        ),
        compiled=compiled,
        placed=described.placed,
        hardware=hardware,
    )


def _largest(tensors: Sequence[LiveTensor]) -> tuple[LiveTensor, ...]:
    """The first of tensors that are sorted by size, and not a part of those of equal blocks."""
    least = tensors[_TENSORS - 1].nbytes if len(tensors) > _TENSORS else 0
    return tuple(tensor for tensor in tensors if tensor.nbytes >= least)


def _named(
    tensors: Sequence[LiveTensor], variables: Sequence[Placed | None]
) -> tuple[LiveTensor, ...]:
    """Copies of variables under their paths, where they belong to no layer."""
    named = []
    for tensor in tensors:
        number = tensor.argument
        variable = None if number is None or number >= len(variables) else variables[number]
        if variable is not None and not tensor.origin.path:
            tensor = replace(tensor, origin=replace(tensor.origin, path=variable.info.path))
        named.append(tensor)
    return tuple(named)


def refused(
    described: AbstractStep, target: Target, hardware: Hardware, error: DoesNotFitError
) -> DryRun:
    """The report on a step that the compiler found too large."""
    return DryRun(
        name=described.program.name,
        target=target,
        axes=described.placement.mesh.axes,
        memory=Memory(
            **sizes(described),
            peak_bytes=error.needed_bytes,
            peak_is="what the compiler says it needs",
            available_bytes=error.available_bytes or hardware.memory_bytes,
        ),
        notes=_notes(target),
        refusal=error.breakdown,
        placed=described.placed,
        hardware=hardware,
    )


def sizes(described: AbstractStep) -> dict[str, int]:
    """The exact bytes of what a step takes, in one device, and of one gradient per parameter."""
    by_role = {"parameter": 0, "slot": 0}
    for entry in described.placed:
        role = entry.info.role if entry.info.role in by_role else "state"
        by_role[role] = by_role.get(role, 0) + entry.bytes_per_device
    updated = described.placement.with_zero(3 if described.placement.zero else 0)
    whose = described.placed if described.has_gradients else ()
    gradients = updated.place(entry.info for entry in whose)
    return {
        "parameter_bytes": by_role["parameter"],
        "slot_bytes": by_role["slot"],
        "state_bytes": by_role.get("state", 0),
        "input_bytes": _bytes_of_batch(described),
        "gradient_bytes": sum(p.bytes_per_device for p in gradients if p.info.role == "parameter"),
    }


def _model_flops(described: AbstractStep, target: Target) -> tuple[float | None, float | None]:
    """FLOPs of the step as it was written, before it is split over devices, and the fewest of them
    that a compiler can leave."""
    if described.staged is not None:  # whose ticks have more branches than are taken
        described = unstaged(described)
    traced = trace(described.jitted, (described.state, described.batch), target)
    return model_flops(traced.jaxpr), least_flops(traced.jaxpr)


def _bytes_of_batch(described: AbstractStep) -> int:
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(described.batch)
    )


def arguments(described: AbstractStep) -> Sequence[Placed | None]:
    """Which variable each argument of the compiled step is; ``None`` for those of the batch."""
    by_path = [{entry.info.path: entry for entry in described.placed}] * len(described.state)
    named = TrainState(
        *(
            {path: variable[path] for path in part}
            for part, variable in zip(described.state, by_path, strict=True)
        )
    )
    flat = jax.tree.leaves(named, is_leaf=lambda entry: isinstance(entry, Placed))
    return [*flat, *[None] * len(jax.tree.leaves(described.batch))]


def _peak(compiled: Compiled) -> tuple[int, str]:
    """XLA for CPU leaves temporary buffers out of its own figure; there they are added up."""
    if compiled.target.platform != "cpu":
        return compiled.peak_bytes, "the compiler's peak_memory_in_bytes"
    new = compiled.output_bytes - compiled.donated_bytes
    whole = compiled.argument_bytes + new + compiled.temporary_bytes
    return whole, "arguments, new outputs and temporaries of the compiler, added up"


def _besides(compiled: Compiled) -> tuple[str, ...]:
    """What a TPU's compiler counts in its peak, and in none of the other figures."""
    counted = compiled.argument_bytes + compiled.temporary_bytes
    rest = compiled.peak_bytes - counted - (compiled.output_bytes - compiled.donated_bytes)
    if compiled.target.platform != "tpu" or rest < _BESIDES * compiled.peak_bytes:
        return ()
    return (
        f"the compiler's peak has {bytes_text(rest)} that no other of its figures names: where a "
        "step is small, arrays in the chip's own memory count there, too",
    )


def _notes(target: Target) -> tuple[str, ...]:
    if target.platform == "cuda":
        return (gpu.NOT_TUNED,)
    if target.platform != "cpu":
        return ()
    return ("compiled by XLA for CPU, which orders and fuses otherwise than for an accelerator",)
