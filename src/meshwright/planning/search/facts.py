"""What a planner reads between the lines of a graph: what its arrays are for, what is fused."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass

from ..graph import Graph, GraphTensor, Operation

KINDS = (
    *("parameter", "cast", "slot", "state", "input", "activation"),
    *("gradient", "layer gradient", "update"),
)

_CASTS = frozenset(("convert_element_type", "reduce_precision", "copy", "name", "stop_gradient"))
_COPIED = frozenset(("broadcast_in_dim", "iota"))  # made again where they are read
_STANDS_ALONE = frozenset(  # never fused into what reads their results
    (
        *("gather", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "cumsum", "cumprod"),
        *("cummax", "cumlogsumexp", "scan", "while", "cond", "custom_call", "dynamic_update_slice"),
        *("concatenate", "pallas_call", "reduce_window", "reduce_window_sum", "reduce_window_max"),
        *("select_and_scatter_add", "random_bits", "threefry2x32", "fft", "cholesky"),
    )
)
_BLOCK = re.compile(r"(?:^|[/(])([A-Za-z][\w.]*?\d+)(?=[/)_]|$)")


@dataclass(frozen=True)
class Facts:
    """Of each tensor: its kind, and whether fusion spares its memory. Of each operation: whether
    it is in the forward pass, its block, and whether it is a product such as those with weights.
    ``batch`` is the dim of the batch's rows.
    """

    kinds: tuple[str, ...]
    is_fused: tuple[bool, ...]
    is_forward: tuple[bool, ...]
    blocks: tuple[str, ...]
    is_of_weights: tuple[bool, ...]
    batch: int | None

    @functools.cached_property
    def has_backward(self) -> bool:
        """Whether some operation is of the backward pass."""
        return not all(self.is_forward)


@functools.lru_cache(maxsize=8)
def facts_of(graph: Graph) -> Facts:
    """Read a graph.

    Gradients and what updates make differ from other activations by their dims, those of a
    parameter, and because nothing that is made of them has a dim of the batch any more. A "cast" is
    a parameter in another type, as products of the forward pass take it, and a "layer gradient" is
    that of one layer of stacked parameters, as one turn of a loop makes it.

    >>> from ..graph import GraphDim
    >>> b, i = GraphDim("batch", 8, "batch"), GraphDim("w.in", 4, "w.in")
    >>> tensors = (GraphTensor("x", (0, 1), (8, 4), 4, "input"),
    ...            GraphTensor("w", (1,), (4,), 4, "parameter"), GraphTensor("g", (1,), (4,), 4))
    >>> step = Operation("dot_general", "", (0,), (2,), summed=(0,))
    >>> facts_of(Graph((b, i), tensors, (step,))).kinds
    ('input', 'parameter', 'gradient')
    """
    batch = batch_dim(graph)
    kinds = _kinds(graph, batch)
    begins = _first_gradient(graph, kinds, batch)
    return Facts(
        kinds=kinds,
        is_fused=_fused(graph),
        is_forward=tuple(place < begins for place in range(len(graph.operations))),
        blocks=tuple(operation.block or block_of(operation.path) for operation in graph.operations),
        is_of_weights=tuple(_is_of_weights(graph, operation) for operation in graph.operations),
        batch=batch,
    )


def batch_dim(graph: Graph) -> int | None:
    """The dim of the rows of a batch: the first dim of most of the inputs' bytes."""
    votes: Counter[int] = Counter()
    for tensor in graph.tensors:
        if tensor.role == "input" and tensor.dims and tensor.dims[0] is not None:
            votes[tensor.dims[0]] += tensor.nbytes
    return votes.most_common(1)[0][0] if votes else None


def block_of(path: str) -> str:
    """The first number of a path with the word before it; empty where there is none.

    >>> block_of("jvp(net)/block_3/ffn/dot"), block_of("block_3_ffn/dot"), block_of("head/dot")
    ('block_3', 'block_3', '')
    """
    result = _BLOCK.search(path)
    return result[1] if result else ""


def is_turn(operation: Operation) -> bool:
    """Whether it takes what one turn of a loop reads out of a stacked array."""
    return operation.kind == "scan" and bool(operation.whole)


def is_layer(graph: Graph, operation: Operation) -> bool:
    """Whether it takes one layer out of a stacked array, in a loop or by its number."""
    if operation.kind != "slice" or not len(operation.operands) == 1 == len(operation.results):
        return is_turn(operation)
    stack, layer = graph.tensors[operation.operands[0]], graph.tensors[operation.results[0]]
    if stack.shape[:1] == (1,):
        return False
    return layer.shape in ((1, *stack.shape[1:]), stack.shape[1:])


def _is_of_weights(graph: Graph, operation: Operation) -> bool:
    """Whether it is a convolution, or a product whose operands share no dim but what is summed.

    Constants do not count: a product with one has one operand, and a product of two has none.
    A product of an array with itself has one operand, too, and a joint for the dim it has twice.
    """
    if operation.kind != "dot_general":
        return operation.kind == "conv_general_dilated"
    dims = [set(graph.tensors[operand].dims) for operand in operation.operands]
    if len(dims) < 2:
        return not operation.joints
    return not set.intersection(*dims) - set(operation.summed) - {None}


def _kinds(graph: Graph, batch: int | None) -> tuple[str, ...]:
    leads = _leads_to_batch(graph, batch)
    shapes = {_shape_key(parameter) for parameter in graph.tensors if parameter.role == "parameter"}
    kinds = [parameter.role for parameter in graph.tensors]
    layers = {
        _shape_key(graph.tensors[operation.results[0]]) - {(None, 1)}
        for operation in graph.operations
        if is_layer(graph, operation) and kinds[operation.operands[0]] == "parameter"
    }
    for operation in graph.operations:
        if _is_cast(operation, kinds) and leads[operation.results[0]]:
            kinds[operation.results[0]] = "cast"
            continue
        updates = any(kinds[t] in ("slot", "parameter", "update") for t in operation.operands)
        for place in operation.results:
            tensor = graph.tensors[place]
            if kinds[place] != "activation" or leads[place] or batch in tensor.dims:
                continue
            if math.prod(tensor.shape) == 1:
                continue
            if _shape_key(tensor) in shapes:
                kinds[place] = "update" if updates and not operation.summed else "gradient"
            elif _shape_key(tensor) in layers and batch in operation.summed:
                kinds[place] = "layer gradient"
    return tuple(kinds)


def _is_cast(operation: Operation, kinds: list[str]) -> bool:
    return (
        operation.kind in _CASTS
        and len(operation.operands) == 1 == len(operation.results)
        and kinds[operation.operands[0]] in ("parameter", "cast")
    )


def _leads_to_batch(graph: Graph, batch: int | None) -> list[bool]:
    """Of each tensor, whether something that is made of it has a dim of the batch."""
    leads = [False] * len(graph.tensors)
    for operation in reversed(graph.operations):
        is_made = any(leads[t] or batch in graph.tensors[t].dims for t in operation.results)
        if is_made and batch is not None:
            for operand in operation.operands:
                leads[operand] = True
    return leads


def _shape_key(tensor: GraphTensor) -> frozenset[tuple[int | None, int]]:
    return frozenset(zip(tensor.dims, tensor.shape, strict=True))


def _first_gradient(graph: Graph, kinds: tuple[str, ...], batch: int | None) -> int:
    """Where the first gradient of a parameter is made, or the first loop of the backward pass."""
    for place, operation in enumerate(graph.operations):
        if operation.is_backward and operation.kind == "scan":
            return place
        if batch in operation.summed and any("gradient" in kinds[t] for t in operation.results):
            return place
    return len(graph.operations)


def _fused(graph: Graph) -> tuple[bool, ...]:
    """Which results are never written: elementwise work that one operation alone reads."""
    readers: Counter[int] = Counter()
    for operation in graph.operations:
        readers.update(set(operation.operands))
    fused = [False] * len(graph.tensors)
    for operation in graph.operations:
        if _is_elementwise(operation):
            for place in operation.results:
                copied = operation.kind in _COPIED and readers[place] > 0
                fused[place] = copied or readers[place] == 1
    return tuple(fused)


def _is_elementwise(operation: Operation) -> bool:
    parts = (operation.flops, operation.summed, operation.whole, operation.joints)
    return not any(parts) and operation.kind not in _STANDS_ALONE
