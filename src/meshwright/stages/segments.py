"""A loss cut into stages that differ, and how what crosses from one to the next is packed.

What crosses is one array per type for values with a row per row of the batch, shaped ``(rows,
width)`` so that the batch stays split, and one for all others. All are as wide as the widest cut's:
stages of one program send arrays of one shape. Skips across stages travel with the micro-batch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ..errors import PipelineError
from .line import Line
from .parts import listed
from .traced import Traced

Var = Any
Lay = Callable[[Any, bool], Any]
Group = tuple[str, bool]  # a type, and whether values have a row per row of the batch


def _as_it_is(value: Any, by_row: bool) -> Any:
    return value


class Packed:
    """Lists of arrays of several shapes, in arrays of the same shapes for every list.

    >>> import jax.numpy as jnp
    >>> lists = [[jnp.ones([4, 2])], [jnp.ones([4, 3]), jnp.ones([5])]]
    >>> packed = Packed(lists, rows=4)
    >>> [array.shape for array in packed.pack(lists[0])], packed.unpack(1, packed.pack(lists[1]))[1]
    ([(4, 3), (1, 5)], Array([1., 1., 1., 1., 1.], dtype=float32))
    """

    def __init__(self, lists: Iterable[Sequence[Any]], rows: int) -> None:
        self._rows = rows
        self._shapes = [[(tuple(a.shape), str(a.dtype)) for a in values] for values in lists]
        self._widths: dict[Group, int] = {}
        for shapes in self._shapes:
            widths: dict[Group, int] = {}
            for shape, dtype in shapes:
                group = self._group(shape, dtype)
                widths[group] = widths.get(group, 0) + self._width(shape, group)
            for group, width in widths.items():
                self._widths[group] = max(self._widths.get(group, 0), width)

    def _group(self, shape: tuple[int, ...], dtype: str) -> Group:
        return dtype, bool(shape) and shape[0] == self._rows

    def _width(self, shape: tuple[int, ...], group: Group) -> int:
        return math.prod(shape[1:] if group[1] else shape)

    @property
    def shapes(self) -> list[Any]:
        """Of the packed arrays."""
        import jax

        return [
            jax.ShapeDtypeStruct((self._rows if by_row else 1, width), dtype)
            for (dtype, by_row), width in self._widths.items()
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed arrays."""
        return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in self.shapes)

    def pack(self, values: Sequence[Any], lay: Lay = _as_it_is) -> list[Any]:
        """The arrays of one list; ``lay`` says how an array lies, by whether it has rows."""
        import jax.numpy as jnp

        packed = []
        for (dtype, by_row), width in self._widths.items():
            rows = self._rows if by_row else 1
            own = [
                lay(lay(value, by_row).reshape(rows, -1), by_row)
                for value in values
                if self._group(tuple(value.shape), str(value.dtype)) == (dtype, by_row)
            ]
            used = sum(value.shape[1] for value in own)
            row = jnp.concatenate([*own, jnp.zeros([rows, width - used], dtype)], 1)
            packed.append(lay(row, by_row))
        return packed

    def unpack(self, number: int, packed: Sequence[Any], lay: Lay = _as_it_is) -> list[Any]:
        """The values of a list, by its number, out of packed arrays."""
        begin, arrays = dict.fromkeys(self._widths, 0), dict(zip(self._widths, packed, strict=True))
        values = []
        for shape, dtype in self._shapes[number]:
            group = self._group(shape, dtype)
            first, end = begin[group], begin[group] + self._width(shape, group)
            flat = lay(lay(arrays[group], group[1])[:, first:end], group[1])
            values.append(lay(flat.reshape(shape), group[1]))
            begin[group] = end
        return values


@dataclass(frozen=True, eq=False)
class Segments:
    """The stages of a line between cuts, under the names that a pipeline's step knows blocks by."""

    line: Line = field(repr=False)
    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        if paths := self.line.params_of(self.line.outputs, set(self.boundaries[-1])):
            raise PipelineError(
                f"what comes after the last layer is computed from {listed(paths)}, which is not "
                "supported in a pipeline."
            )

    @property
    def count(self) -> int:
        """How many stages there are."""
        return len(self.cuts) + 1

    @property
    def traced(self) -> Traced:
        """The loss."""
        return self.line.traced

    @functools.cached_property
    def boundaries(self) -> list[list[Var]]:
        """What each stage begins with, and what the tail begins with."""
        return [self.line.crossing(at) for at in (0, *self.cuts, len(self.line.order))]

    @functools.cached_property
    def packed(self) -> Packed:
        """How what crosses is packed."""
        leaf = next(v for v, (part, _) in self.traced.arguments.items() if part == "batch")
        lists = [[var.aval for var in boundary] for boundary in self.boundaries]
        return Packed(lists, leaf.aval.shape[0])

    @functools.cached_property
    def params(self) -> list[list[str]]:
        """Paths of the parameters that each stage reads."""
        ends = itertools.pairwise(self.boundaries)
        read = (self.line.params_of(leaves, set(enters)) for enters, leaves in ends)
        return [self.line.in_order(paths) for paths in read]

    @functools.cached_property
    def owner(self) -> dict[str, int]:
        """The stage of each parameter that one stage alone reads."""
        stages: dict[str, list[int]] = {}
        for stage, paths in enumerate(self.params):
            for path in paths:
                stages.setdefault(path, []).append(stage)
        return {path: of[0] for path, of in stages.items() if len(of) == 1}

    @functools.cached_property
    def shared(self) -> tuple[str, ...]:
        """The parameters that several stages read."""
        read = dict.fromkeys(path for paths in self.params for path in paths)
        return tuple(path for path in read if path not in self.owner)

    @functools.cached_property
    def flops(self) -> list[float]:
        """Floating-point operations of each stage's forward pass."""
        total, _ = self.line.costs
        ends = (0, *self.cuts, len(self.line.order))
        return [float(total[end] - total[at]) for at, end in itertools.pairwise(ends)]

    def run(
        self, stage: int, values_known: Mapping[Var, Any], x: Sequence[Any], lay: Lay = _as_it_is
    ) -> list[Any]:
        """What a stage passes on, of what it begins with: both packed."""
        enters, leaves = self.boundaries[stage : stage + 2]
        values = dict(zip(enters, self.packed.unpack(stage, x, lay), strict=True))
        return self.packed.pack(self.line.evaluate(leaves, {**values_known, **values}), lay)

    # As Functions are

    @property
    def functions(self) -> Segments:
        """Itself: a step asks the same of it."""
        return self

    @functools.cached_property
    def enters(self) -> tuple[Any, ...]:
        """What a stage begins with."""
        return tuple(SimpleNamespace(aval=shape) for shape in self.packed.shapes)

    @property
    def counted(self) -> tuple[str, ...]:
        """Paths of the state that changes from one micro-batch to the next."""
        return self.line.counted

    def evaluate(
        self, outputs: Sequence[Any], values: Mapping[Var, Any], *, counting: bool = False
    ) -> list[Any]:
        """The values of variables, from those that are known."""
        return self.line.evaluate(outputs, values, counting=counting)

    def read(self, part: str) -> list[str]:
        """Which of a part of the state the loss reads."""
        numbers = self.line.slice(self.line.outputs, ())
        read = {v for n in numbers for v in self.line.eqns[n].invars if not hasattr(v, "val")}
        return [p for v, (of, p) in self.traced.arguments.items() if of == part and v in read]

    @property
    def params_before(self) -> tuple[str, ...]:
        """None: a stage has all that it reads."""
        return ()

    params_after = params_before
