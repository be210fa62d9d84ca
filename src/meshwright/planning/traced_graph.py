"""A traced step as a graph over inferred dims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from .. import _compat
from ..errors import MeshError, ModelError
from ..jaxprs import products
from ..jaxprs.blocks import has_marks
from ..jaxprs.factors import Dim, Dims, Factor, label
from ..jaxprs.names import Argument, Created, Labels, families_of, names_of
from ..jaxprs.primitives import TABLE, opened, shape_of
from ..jaxprs.record import Equation, Record, Tensor, Value
from ..jaxprs.walk import LOOPS, At, follow
from ..layouts.dim_names import ANY
from ..layouts.placement_arguments import as_axes
from ..targets.target import Target
from .abstract_step import AbstractStep
from .ahead import trace
from .graph import Graph, GraphDim, GraphTensor, Joint, Operation, Product

_NEVER_SPLIT = ("seed", "metric")
_PARTS = {"parameter": "params", "slot": "slots", "metric": "metrics"}  # by role


def graph_of_step(described: AbstractStep) -> Graph:
    """The graph of a training step that is described for a mesh of one device.

    Raises :class:`~meshwright.MeshError` for another mesh, whose layouts would be in the step.
    """
    return graph_of(*traced_step(described))


def traced_step(described: AbstractStep) -> tuple[Any, list[Argument], int]:
    """The step as it is traced, what its arguments are, and how many of them it gives back: the
    state of a training step, and nothing of a forward pass.

    Without equations whose results nothing reads: derivatives leave some, and compilers drop them.
    """
    mesh = described.placement.mesh
    if mesh.size != 1:
        raise MeshError(
            f"dims are inferred from the step of one device, and {described.program.name!r} is "
            f"laid out over {mesh.size} ({mesh.axes_text}). Use a mesh whose axes all have size 1."
        )
    traced = trace(described.jitted, (described.state, described.batch), Target.of("cpu:1"))
    by_path = {}  # and part: a slot may be called as its parameter is
    for order, placed in enumerate(described.placed):
        info, names = placed.info, placed.names or placed.info.names
        part = _PARTS.get(info.role, "state")
        by_path[part, info.path] = Argument(
            info.path, info.role, names.names if names else None, info.owner, order
        )
    leaves = jax.tree.leaves_with_path(described.state)
    state = [by_path[path[0].name, path[-1].key] for path, _ in leaves]
    rows = set(described.placement.batch_axes)
    inputs = [
        Argument(input_path(path), "input", has_rows=_has_rows(array, rows))
        for path, array in jax.tree.leaves_with_path(described.batch)
    ]
    needed = traced.jaxpr.replace(jaxpr=_compat.without_dead_code(traced.jaxpr))
    return needed, [*state, *inputs], len(state) if described.has_gradients else 0


def _has_rows(array: Any, axes: set[str]) -> bool:
    """Whether the first dim of an array of the batch is laid out as its rows are."""
    first, *_ = (*array.sharding.spec, None)
    return bool(axes) and set(as_axes(first)) == axes


def input_path(path: Any) -> str:
    """What an array of the batch is called, by its place in the tree."""
    where = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"input/{where}" if where else "input"


def graph_of(jaxpr: Any, arguments: Sequence[Argument], carried: int = 0) -> Graph:
    """The graph of a traced function, whose flat arguments are described one by one.

    The first ``carried`` results take the place of the first arguments, as the state of a training
    step does, and lie as those. Raises :class:`~meshwright.ModelError` for another number of
    arguments. How dims are joined follows Mesh-TensorFlow (Shazeer et al. 2018), whose programs
    name them, and Shardy, which splits them into factors.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones([8, 4]), jnp.ones([4, 6]))
    >>> graph = graph_of(jaxpr, [Argument("x", "input"), Argument("dense/kernel")])
    >>> [(dim.name, dim.size) for dim in graph.dims]
    [('batch', 8), ('dense.in', 4), ('dense.out', 6)]
    >>> [graph.dims[dim].name for dim in graph.operations[0].summed]
    ['dense.in']
    """
    inner = opened(jaxpr)
    if len(inner.invars) != len(arguments):
        raise ModelError(
            f"the step has {len(inner.invars)} arrays as arguments and {len(arguments)} are "
            "described. Describe each leaf of its arguments, in the order of jax.tree.leaves."
        )
    record = Record(turns_are_blocks=not has_marks(inner))
    values = _begin(record, inner.invars, arguments)
    results = follow(record, inner, values, At())
    for argument, old, new in zip(arguments[:carried], values, results, strict=False):
        record.carry("store", argument.path, old, new)
    return _Assembled(record, arguments, values).graph()


def unknown_kinds(graph: Graph) -> tuple[str, ...]:
    """The kinds of operations that no rule is known for: they join no dims and are done whole.

    >>> unknown_kinds(Graph((), (), (Operation("dot_general", "", (), ()),)))
    ()
    """
    kinds = dict.fromkeys(operation.kind for operation in graph.operations)
    return tuple(kind for kind in kinds if kind not in TABLE and kind not in LOOPS)


def notes_of_unknown(graph: Graph) -> list[str]:
    """What a report says of operations that no rule is known for: one note, or none.

    >>> notes_of_unknown(Graph((), (), (Operation("ragged_dot_general", "", (), ()),)))
    ['no rule is known for ragged_dot_general: each device is taken to compute it whole']
    """
    if not (kinds := unknown_kinds(graph)):
        return []
    return [f"no rule is known for {', '.join(kinds)}: each device is taken to compute it whole"]


def _begin(record: Record, variables: Sequence[Any], arguments: Sequence[Argument]) -> list[Value]:
    """The arguments, joined already where a slot has an owner, or an author said so."""
    dims = [_dims(record, v, value) for v, value in zip(variables, arguments, strict=True)]
    owners = {a.path: place for place, a in enumerate(arguments) if a.role == "parameter"}
    named: dict[str, Dim] = {}
    rows: dict[int, Dim] = {}  # of inputs, which lie alike even if nothing compares them one by one
    values = []
    for place, argument in enumerate(arguments):
        own, var = dims[place], variables[place]
        owner = owners.get(argument.owner or "")
        if owner is not None and shape_of(var) == shape_of(variables[owner]):
            own = dims[owner]
        role = "state" if argument.role in _NEVER_SPLIT else argument.role
        values.append(record.value(var, own, argument.path, role))
        if argument.has_rows and own:
            record.factors.tie(rows.setdefault(shape_of(var)[0], own[0]), own[0])
        for name, dim in zip(argument.names or (), own, strict=False):
            if name != ANY:
                record.factors.tie(named.setdefault(name, dim), dim)
    return values


def _dims(record: Record, var: Any, argument: Argument) -> Dims:
    if argument.role in _NEVER_SPLIT:
        return ((),) * len(shape_of(var))
    return record.factors.new_dims(shape_of(var))


class _Assembled:
    """Gives numbers and names to what the record of a step holds."""

    def __init__(
        self, record: Record, arguments: Sequence[Argument], values: Sequence[Value]
    ) -> None:
        self._record = record
        self._arguments = [
            (argument, value.tensor)
            for argument, value in zip(arguments, values, strict=True)
            if value.tensor is not None
        ]
        self._owners = {place: argument.owner or "" for argument, place in self._arguments}
        used = [place for _, place in self._arguments]
        used += [
            place
            for equation in record.equations
            for place in (*equation.operands, *equation.results)
        ]
        self._tensors = {place: number for number, place in enumerate(sorted(set(used)))}
        self._labels: dict[int, Labels] = {
            place: tuple(label(dim) for dim in record.tensors[place].dims)
            for place in self._tensors
        }

    def graph(self) -> Graph:
        outputs = [
            Created(equation.path, equation.kind, self._labels[place])
            for equation in self._record.equations
            for place in (*equation.operands, *equation.results)
        ]
        names = names_of([(a, self._labels[place]) for a, place in self._arguments], outputs)
        self._dims = {factor: number for number, factor in enumerate(names)}
        sizes = {name: factor.size for factor, name in names.items()}
        together = {
            tuple(names[one] for one in labels if one is not None)
            for labels in self._labels.values()
        }
        own = {
            names[one]
            for _, place in self._arguments
            for one in self._labels[place]
            if one is not None
        }
        families = families_of(sizes, sorted(together), sizes.keys() - own)
        return Graph(
            dims=tuple(GraphDim(name, sizes[name], families[name]) for name in names.values()),
            tensors=tuple(self._tensor(place) for place in self._tensors),
            operations=tuple(map(self._operation, self._record.equations)),
        )

    def _tensor(self, place: int) -> GraphTensor:
        tensor: Tensor = self._record.tensors[place]
        dims = tuple(None if one is None else self._dims[one] for one in self._labels[place])
        twin = None if tensor.twin is None else self._tensors.get(tensor.twin)
        owner = self._owners.get(place, "")
        return GraphTensor(
            tensor.path, dims, tensor.shape, tensor.itemsize, tensor.role, twin, owner
        )

    def _operation(self, equation: Equation) -> Operation:
        joints = [
            Joint(self._tensors[move.tensor], before, after)
            for move in equation.moved
            if (before := self._dim(move.source)) != (after := self._dim(move.target))
            and before is not None
            and after is not None
        ]
        return Operation(
            kind=equation.kind,
            path=equation.path,
            operands=tuple(self._tensors[place] for place in equation.operands),
            results=tuple(self._tensors[place] for place in equation.results),
            flops=equation.flops,
            summed=self._several(equation.summed),
            whole=self._several(equation.whole),
            joints=tuple(dict.fromkeys(joints)),
            times=equation.times,
            between_groups=equation.between_groups,
            block=equation.block,
            is_backward=equation.is_backward,
            is_kept=equation.is_kept,
            product=None if equation.product is None else self._product(equation.product),
            rate=equation.rate,
        )

    def _product(self, product: products.Product) -> Product:
        rows, columns, depth = (
            tuple((self._dim(dim), size) for dim, size in dims) for dims in product[:3]
        )
        return Product(rows, columns, depth, product.is_transposed)

    def _several(self, dims: Iterable[Dim]) -> tuple[int, ...]:
        dims_there = [self._dim(dim) for dim in dims]
        return tuple(sorted({number for number in dims_there if number is not None}))

    def _dim(self, dim: Dim) -> int | None:
        one: Factor | None = label(dim)
        return None if one is None else self._dims.get(one)
