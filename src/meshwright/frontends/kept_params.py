"""A Program that keeps its parameters as others, which its functions are called through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..layouts.params import ParamInfo
from ..program import Arrays, Batch, Program


def kept_as(program: Program, params: tuple[ParamInfo, ...], call: Callable[..., Any]) -> Program:
    """The program with these parameters for its forward pass and predictions.

    ``call(function, values, *rest)`` calls a function of the program, whose own parameters it makes
    of ``values``.
    """

    def forward(values: Arrays, state: Arrays, inputs: Any, training: bool) -> tuple[Any, Arrays]:
        def run(values: Arrays, state: Arrays, inputs: Any) -> tuple[Any, Arrays]:
            return program.forward(values, state, inputs, training)

        return call(run, values, state, inputs)

    def predict(values: Arrays, state: Arrays, batch: Batch) -> tuple[Any, Arrays]:
        assert program.predict is not None  # or this is not used
        return call(program.predict, values, state, batch)

    return replace(program, params=params, forward=forward, predict=program.predict and predict)
