"""The forward pass of a model as shapes: for batches of any size, under any placement."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ..layouts.mesh import Mesh
from ..layouts.placement import Placement
from ..planning.abstract_step import on_batch, unbound
from ..planning.faults import tracing
from ..planning.graph import Graph
from ..planning.serving import ForwardStep
from ..planning.serving_stages import StageStep
from ..planning.traced_graph import graph_of_step
from ..program import Program
from ..stages.forward_line import Paths
from ..stages.line import Line
from ..step.assemble import Assembly, assemble

_ONE_DEVICE = Mesh({"batch": 1})


@dataclass(frozen=True, eq=False)
class Forwards:
    """The forward pass of a Keras model or a Program, for batches of inputs like ``inputs``.

    ``precision`` is that which the model is served in, its own where it is ``None``.
    Raises :class:`~meshwright.ModelError` for a Program without a matrix in eight bits.
    """

    model: Any
    inputs: Any
    precision: str | None = None
    graphs: dict[int, Graph] = field(default_factory=dict)
    lines: dict[int, Line] = field(default_factory=dict)
    stages: dict[tuple[int, tuple[Paths, ...]], list[StageStep]] = field(default_factory=dict)
    stage_graphs: dict[tuple[int, tuple[Paths, ...], int], Graph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.precision is not None and isinstance(self.model, Program):
            self._forward_only()  # raises where it cannot be

    def steps(self, strategy: Any) -> Assembly:
        """The steps under a strategy, or a placement, on a mesh without devices."""
        placement = strategy if isinstance(strategy, Placement) else strategy.placement
        if isinstance(self.model, Program):
            return assemble(self._forward_only(), unbound(placement))
        from .keras import Sharded
        from .keras.forward import forward_of

        if isinstance(strategy, Placement):
            strategy = Sharded.from_placement(strategy)
        abstract = strategy.on(strategy.mesh.abstract())
        if self.precision == "int8":
            return forward_of(abstract, self._eight_bits, self.inputs).steps
        return forward_of(abstract, self.model, self.inputs, self.precision).steps

    def _forward_only(self) -> Program:
        from .precision import in_precision

        forward = replace(self.model, slots=(), metrics=())
        return forward if self.precision is None else in_precision(forward, self.precision)

    @functools.cached_property
    def _eight_bits(self) -> Any:
        from .keras.eight_bits import quantized_shapes

        return quantized_shapes(self.model, self.inputs)

    def batch(self, rows: int) -> Any:
        """The shapes of a batch, as the forward pass takes it."""

        def shape(like: Any) -> Any:
            dtype = like.dtype if hasattr(like, "dtype") else np.asarray(like).dtype
            return jax.ShapeDtypeStruct((rows, *np.shape(like)[1:]), dtype)

        like = jax.tree.map(shape, self.inputs)
        return like if isinstance(self.model, Program) else (like,)

    def on(self, steps: Assembly, rows: int) -> ForwardStep:
        """The forward pass of a batch of this size."""
        return ForwardStep.of(on_batch(steps, self.batch(rows), last=True))

    @functools.cached_property
    def alone(self) -> Assembly:
        """The steps on one device."""
        return self.steps(Placement.of(_ONE_DEVICE, batch="batch", unmatched="replicate"))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and state."""
        program = self.alone.program
        return sum(
            math.prod(info.dims) * jax.numpy.dtype(info.dtype).itemsize
            for info in (*program.params, *program.state)
        )

    def graph(self, rows: int) -> Graph:
        """The operations of a batch of this size, as one device would do them."""
        if rows not in self.graphs:
            step = self.on(self.alone, rows)
            with tracing(step.program.name):
                self.graphs[rows] = graph_of_step(step)
        return self.graphs[rows]
