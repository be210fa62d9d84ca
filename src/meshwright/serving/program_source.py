"""The source of a Program: its forward pass, and values from a checkpoint or from memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from ..errors import ModelError
from ..frontends.eight_bits import made_of, quantized
from ..frontends.inputs import inputs_like
from ..frontends.precision import in_precision
from ..frontends.program_values import program_values
from ..layouts.placement import Placement
from ..program import Program, TrainState
from ..step.assemble import assemble
from .source import Source
from .turns import turn_of_several

if TYPE_CHECKING:
    from .options import Precision


def source_of_program(
    program: Program,
    placement: Placement,
    example: Any,
    precision: Precision | None,
    params: Any = None,
) -> Source:
    """``params`` are its values, or ``None`` for those that it begins with.

    Raises :class:`~meshwright.ModelError`.
    """
    if example is None:
        raise ModelError(
            f"program {program.name!r}: pass example=, inputs of any number of rows, whose shapes "
            "and dtypes are those of requests. A function that builds it, as on the command line, "
            "returns (program, batch): of a batch (x, y) the example is x."
        )
    if precision == "int8":
        floats = source_of_program(program, placement, example, None, params)
        return _eight_bits(floats, program, placement)
    from ..layouts.strict import inspect

    inspect(
        placement.naming(program.inputs),
        program.infos,
        repr(program.name),
        has_more_dims=program.has_more_dims,
    )
    forward = replace(program, slots=(), metrics=())
    if precision is not None:
        forward = in_precision(forward, precision)

    def given(params: Any, like: TrainState) -> TrainState:
        values = program_values(program, params)
        state = values.state or _beginning(program, placement, like._replace(params={})).state
        return values._replace(state=state)

    begins = functools.partial(_beginning, program, placement)
    return Source(
        program.name,
        assemble(forward, replace(placement, strict=False)),
        inputs_like(example),
        values=begins if params is None else functools.partial(given, params),
        saved_dtypes={info.path: info.dtype for info in program.params},
        given=given,
        is_untrained=params is None,
    )


def _eight_bits(floats: Source, program: Program, placement: Placement) -> Source:
    """The same forward pass, whose values are quantized where they lie each time it gets some."""
    narrow = replace(in_precision(program, "int8"), slots=(), metrics=())
    steps = assemble(narrow, replace(placement, strict=False))
    origins = made_of(program)
    source = replace(floats, steps=steps, floats=floats, saved_dtypes={}, origins=origins)
    shardings = {path: shape.sharding for path, shape in source.shapes.params.items()}

    @functools.cache
    def quantizing(paths: frozenset[str]) -> Any:
        """Compiled for these parameters of the program: all, or those of a stage."""
        made = {path: shardings[path] for path, (origin,) in origins.items() if origin in paths}
        return jax.jit(functools.partial(quantized, program), out_shardings=made)

    def convert(state: TrainState) -> TrainState:
        own = floats.steps.storing.restore(state)
        params = quantizing(frozenset(own.params))(own.params)
        return jax.block_until_ready(steps.storing.store(own._replace(params=params)))

    return replace(source, convert=convert)


def _beginning(program: Program, placement: Placement, like: TrainState) -> TrainState:
    """The values that a program begins with, of these shapes, made where they are wanted."""
    if not any(like):
        return like
    initial = program.initial

    def part(whole: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
        return {path: whole[path] for path in wanted}

    def weights() -> TrainState:
        whole = initial()
        return TrainState(part(whole.params, like.params), part(whole.state, like.state), {}, {})

    shardings = jax.tree.map(lambda shape: shape.sharding, like)
    with turn_of_several(placement.mesh):
        return jax.block_until_ready(jax.jit(weights, out_shardings=shardings)())
