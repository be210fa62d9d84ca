"""A training step as operations over named dims: what a planner chooses layouts for, a value.

Dims that must lie alike wherever they meet are one dim here, as in a program of Mesh-TensorFlow
(Shazeer et al. 2018), so that a choice of axes for each dim settles the layout of every tensor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphDim:
    """A dim of the whole step: its name, its size, and the family of equal dims of other blocks.

    ``family`` is the name without the number of a block, ``block/ffn.hidden`` for all of
    ``block_0/ffn.hidden``, ``block_1/ffn.hidden``; dims of one family and size lie alike.
    """

    name: str
    size: int
    family: str


@dataclass(frozen=True)
class GraphTensor:
    """An array of the step. ``dims`` are places in :attr:`Graph.dims`; ``None`` is never split.

    ``role`` is "parameter", "slot", "state", "input" or "activation" (gradients are activations).
    No dim appears twice in one tensor. ``twin`` is the place of an array before that has the same
    value, as where a block is computed again. ``owner`` is the parameter that a slot belongs to.
    """

    path: str
    dims: tuple[int | None, ...]
    shape: tuple[int, ...]
    itemsize: int
    role: str = "activation"
    twin: int | None = None
    owner: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        total = self.itemsize
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class Joint:
    """Two dims that one operation takes for the same, and that are two because a tensor has both.

    If they lie along different axes, ``tensor`` is moved there from the layout of ``source`` to
    that of ``target``.
    """

    tensor: int
    source: int
    target: int


@dataclass(frozen=True)
class Product:
    """What a matrix product multiplies: the dims of its ``rows``, ``columns`` and ``depth``, each
    with its size. One that ``is_transposed`` sums over the rows of both operands."""

    rows: tuple[tuple[int | None, int], ...]
    columns: tuple[tuple[int | None, int], ...]
    depth: tuple[tuple[int | None, int], ...]
    is_transposed: bool = False


@dataclass(frozen=True)
class Operation:
    """What one equation of the step does, ``times`` times.

    ``operands`` and ``results`` are places in :attr:`Graph.tensors`. ``summed`` are dims that it
    sums over: where they are split, the results are summed over devices. ``whole`` are dims that it
    needs whole: where they are split, operands that have them are gathered. ``between_groups``
    are FLOPs on top of ``flops`` that XLA for CPU does in vain (``jaxprs/flops.py``). ``block`` is
    the loop around it, if turns of that are blocks; what the loop stacks is ``is_kept`` if it
    stands for what one block hands on to the next. ``is_backward`` says that a derivative made it.
    ``product`` is there for one matrix product, and not for many small ones; ``rate`` is the kind
    of rates of a hardware by which the FLOPs of all others run.
    """

    kind: str
    path: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    flops: float = 0.0
    summed: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    joints: tuple[Joint, ...] = ()
    times: int = 1
    between_groups: float = 0.0
    block: str = ""
    is_backward: bool = False
    is_kept: bool = False
    product: Product | None = None
    rate: str = "product"


@dataclass(frozen=True)
class Graph:
    """The step: operations in the order in which they were traced."""

    dims: tuple[GraphDim, ...]
    tensors: tuple[GraphTensor, ...]
    operations: tuple[Operation, ...]

    def __hash__(self) -> int:
        # Tables by graph look one up hundreds of times, and its operations are tens of thousands.
        return hash((self.dims, len(self.tensors), len(self.operations)))
