"""The forward pass, compiled ahead for each size of batch; weights are arguments of it."""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..arrays.by_hand import run_compiled
from ..data import put
from ..frontends.inputs import leaf_names
from ..frontends.typical_length import typical_length
from ..jaxprs.rows import RowsMixError, row_dims
from ..launch.progress import inside
from ..planning.faults import tracing_forward
from ..program import TrainState, shapes_of
from .api import TensorSpec
from .ragged import Ragged, ragged_of
from .requests import Lengths
from .source import Source
from .turns import turn

_MOST_SHAPES = 64  # that are compiled when a request first has them; the oldest are forgotten
_TIMED = 3  # batches of each size, of which the fastest counts


@dataclass(frozen=True)
class Shape:
    """What a batch is compiled for: its rows, and the sizes of its ragged dims."""

    rows: int
    lengths: Lengths = ()


class Forward:
    """Computes batches of a source; see :meth:`compile` and :meth:`__call__`.

    ``why_alone`` says why rows cannot be computed together, in one batch with those of others;
    ``None`` where they leave each other alone, which is read from the traced function.
    """

    depth = 1  # batches that are under way at once
    is_split = False  # whether other processes compute a part of it that this one does not

    def __init__(self, source: Source) -> None:
        self.source = source
        self.before: Callable[[Shape, list[np.ndarray]], None] | None = None  # each batch
        self.inputs = source.inputs
        self._jitted = jax.jit(source.steps.predict_step, out_shardings=self._whole())
        self.has_form_of_one_row = False  # once ``why_alone`` has looked
        self._compiled: OrderedDict[Shape, _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        state = source.steps.state
        self.state = TrainState(state.params, state.state, {}, {})
        self.num_lengths = sum(size is None for spec in self.inputs for size in spec.shape[1:])

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """What was compiled."""
        return tuple(self._compiled)

    @property
    def is_on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return self.source.mesh.platform == "cpu"

    @property
    def is_alone(self) -> bool:
        """Whether no other process computes with this one."""
        return jax.process_count() == 1

    @functools.cached_property
    def typical(self) -> Shape:
        """A batch by which the function is looked at: the shortest in which it can be traced."""
        if not self.num_lengths:
            return Shape(self.source.mesh.size)  # not traced for nothing
        rows, count = self.source.mesh.size, self.num_lengths

        def trace(length: int) -> Any:
            batch = self.laid(Shape(rows, (length,) * count))
            return jax.make_jaxpr(self._jitted)(self.state.params, self.state.state, batch)

        return Shape(rows, (typical_length(trace),) * count)

    @property
    def shards(self) -> int:
        """Into how many pieces the rows of a batch are cut."""
        like = self.shapes_of(self.typical)
        layouts = self.source.steps.batch_layouts(self.source.batch(like), last=False)
        return max(layout.num_shards(0) for layout in jax.tree.leaves(layouts))

    def shapes_of(self, shape: Shape) -> list[Any]:
        """Shapes and dtypes of the arrays of a batch."""
        lengths = iter(shape.lengths)
        inputs = [
            jax.ShapeDtypeStruct(
                (shape.rows, *(next(lengths) if n is None else n for n in spec.shape[1:])),
                jax.dtypes.canonicalize_dtype(np.dtype(spec.dtype)),
            )
            for spec in self.inputs
        ]
        tables = self.source.tables
        return inputs if tables is None else inputs + tables.shapes(inputs)

    def outputs(self) -> tuple[TensorSpec, ...]:
        """The arrays that come out, in order; dims that follow a ragged one are ``None``."""
        lengths = self.typical.lengths
        shapes = self.outputs_at(lengths)
        others = self.outputs_at(tuple(length * 3 // 2 for length in lengths))
        leaves = [(path, "") for path, _ in jax.tree.flatten_with_path(shapes)[0]]
        names = self.source.outputs
        if len(names) != len(leaves):
            names = leaf_names(leaves, "output")
        return tuple(
            TensorSpec(
                name,
                str(one.dtype),
                tuple(
                    None if dim == 0 or a != b else a
                    for dim, (a, b) in enumerate(zip(one.shape, two.shape, strict=True))
                ),
            )
            for name, one, two in zip(
                names, jax.tree.leaves(shapes), jax.tree.leaves(others), strict=True
            )
        )

    def ragged(self) -> Ragged:
        """How the dims of any size, of inputs and outputs, hang together."""

        def dims_of(lengths: Lengths) -> list[tuple[int, ...]]:
            return [shape.shape for shape in jax.tree.leaves(self.outputs_at(lengths))]

        return ragged_of(dims_of, self.typical.lengths)

    def why_alone(self, most: int) -> str | None:
        """Why the rows of a batch are not computed each by itself; ``None`` if they are.

        The function is traced for one row, for two, and for more than ``most``; see
        :mod:`..jaxprs.rows`. One row has none beside it, and may be computed in another form.
        """
        program = self.source.steps.program

        def forward(params: Any, state: Any, batch: Any) -> Any:
            if program.predict is not None:
                return program.predict(params, state, batch)[0]
            return program.forward(params, state, batch, False)[0]

        bare = jax.tree.map(_bare, self._own())

        def traced(rows: int) -> Any:
            batch = self.source.batch(self.shapes_of(Shape(rows, self.typical.lengths)))
            with tracing_forward(self.source.name, batch):
                return jax.make_jaxpr(forward)(bare.params, bare.state, batch)

        large = traced(max(most, 2) + 1)
        for rows in (2, 1):
            small = traced(rows)
            try:
                if any(dim != 0 for dim in row_dims(small, large)):
                    return "an output has no dim of the rows"
            except RowsMixError as mixed:
                if rows > 1 or not _is_one_row(small.out_avals, large.out_avals):
                    return str(mixed)
                self.has_form_of_one_row = True
        return None

    def compile(self, shapes: Sequence[Shape]) -> None:
        """Compile for these shapes, what is not compiled yet; XLA does several at once."""
        from concurrent.futures import ThreadPoolExecutor

        missing = [shape for shape in shapes if shape not in self._compiled]
        lowered = [self._lowered(shape) for shape in missing]
        with ThreadPoolExecutor(4) as pool:
            compiled = list(pool.map(lambda each: each.compile(), lowered))
        for shape, program in zip(missing, compiled, strict=True):
            self._keep(shape, program)

    def __call__(self, weights: TrainState, shape: Shape, arrays: list[np.ndarray]) -> list[Any]:
        """The outputs of a batch as NumPy arrays, in order; compiles if need be."""
        return [np.asarray(output) for output in self._started(weights, shape, arrays)]

    def begun(
        self, state: Any, shape: Shape, arrays: list[np.ndarray], version: str = ""
    ) -> Callable[[], list[Any]]:
        """Begin a batch, of weights of a version; what is returned gives its outputs."""
        del version
        if self.is_on_cpu or not self.is_alone:  # CPUs share their cores, processes keep an order
            return functools.partial(self, state, shape, arrays)
        outputs = self._started(state, shape, arrays)
        for output in outputs:
            output.copy_to_host_async()
        return lambda: [np.asarray(output) for output in outputs]

    def _started(self, weights: TrainState, shape: Shape, arrays: list[np.ndarray]) -> list[Any]:
        """The outputs on their devices, which may still compute them."""
        if shape not in self._compiled:
            self.compile([shape])
        compiled = self._compiled[shape]
        batch = self.source.batch([compiled.put(n, array) for n, array in enumerate(arrays)])
        with turn(self.source.mesh):
            if self.before is not None:
                self.before(shape, arrays)
            with inside("step"):  # what a group waits in is watched by its agents
                outputs = run_compiled(compiled.call, weights.params, weights.state, batch)
                if self.is_on_cpu:
                    jax.block_until_ready(outputs)
        return jax.tree.leaves(outputs)

    def close(self) -> None:
        """End the threads that compute, if there are any; another batch begins them again."""

    def seconds(self, state: Any, shape: Shape) -> float:
        """What a batch of zeros takes after the first time."""
        zeros = [np.zeros(spec.shape, spec.dtype) for spec in self.shapes_of(shape)]
        return fastest(lambda: self(state, shape, zeros))

    def memory(self, shape: Shape) -> Any:
        """What the compiler says of the memory that this shape takes."""
        return self._compiled[shape].call.memory_analysis()

    # How it is done

    def _whole(self) -> Any:
        if jax.process_count() == 1:
            return None
        mesh = self.source.mesh.jax_mesh
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def _own(self) -> TrainState:
        """Shapes of the weights in their own dims."""
        program = self.source.steps.program
        return TrainState(shapes_of(program.params), shapes_of(program.state), {}, {})

    def outputs_at(self, lengths: Lengths) -> Any:
        """The outputs as shapes, in the structure of the function, for these ragged dims."""
        batch = self.laid(Shape(self.source.mesh.size, lengths))
        return jax.eval_shape(self._jitted, self.state.params, self.state.state, batch)

    def laid(self, shape: Shape) -> Any:
        batch = self.source.batch(self.shapes_of(shape))
        layouts = self.source.steps.batch_layouts(batch, last=True)
        return jax.tree.map(
            lambda spec, layout: jax.ShapeDtypeStruct(
                spec.shape, spec.dtype, sharding=layout.sharding
            ),
            batch,
            layouts,
        )

    def _lowered(self, shape: Shape) -> Any:
        return self._jitted.lower(self.state.params, self.state.state, self.laid(shape))

    def _keep(self, shape: Shape, call: Any) -> None:
        shardings = [spec.sharding for spec in jax.tree.leaves(self.laid(shape))]
        is_here = all(sharding.is_fully_addressable for sharding in shardings)
        with self._lock:
            self._compiled[shape] = _Compiled(call, shardings, is_here)
            while len(self._compiled) > _MOST_SHAPES:
                self._compiled.popitem(last=False)


@dataclass(frozen=True, eq=False)
class _Compiled:
    call: Any
    shardings: list[Any]
    is_here: bool  # every device is one of this process

    def put(self, number: int, array: np.ndarray) -> Any:
        """An input on its devices; JAX itself does so on the way, where all are here."""
        return array if self.is_here else put(array, self.shardings[number])


def fastest(function: Callable[[], Any]) -> float:
    """The least seconds of a few calls after the first one."""
    times = []
    for _ in range(_TIMED + 1):
        begin_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin_s)
    return min(times[1:])


def _is_one_row(small: Sequence[Any], large: Sequence[Any]) -> bool:
    """Whether these shapes are those of one row where the others have more."""
    pairs = zip(small, large, strict=False)
    return len(small) == len(large) and all(a.shape == (1, *b.shape[1:]) for a, b in pairs)


def _bare(shape: Any) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype)
