"""What is known of a variable without its value, and where it is placed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .dim_names import DimNames
from .layout import Layout

Role = Literal["parameter", "state", "slot", "seed", "metric"]


class Follows(NamedTuple):
    """A variable whose dims are some of another one's, as a kernel's scales are.

    ``spellings`` and ``asked`` are those of the other one, which was built with ``dims``; ``along``
    says which of them each dim of this variable is, ``None`` for one that it has alone.
    """

    path: str
    spellings: tuple[str, ...]
    dims: tuple[int, ...]
    along: tuple[int | None, ...]
    asked: Layout | None = None


@dataclass(frozen=True)
class ParamInfo:
    """What is known of one variable without its value.

    ``path`` is its name inside its model and unique there; ``spellings`` are all the paths that a
    pattern may name it by (Keras' path, the path of layer names, the path of attributes). ``dims``
    is its size per dim, ``dtype`` its type and ``itemsize`` the bytes of one element. ``role`` is
    ``"parameter"``, ``"slot"``, ``"state"`` or ``"metric"``. ``owner`` is, for a slot, the path of
    its parameter. ``lasting`` is the path that it has again when its model is built again.
    ``asked`` is the layout that an argument of its layer gives, ``names`` the names of its dims,
    and ``follows`` the kernel whose layout it follows where it has none of its own.

    >>> info = ParamInfo("hidden/kernel", ("hidden/kernel",), (784, 128), "float32", itemsize=4)
    >>> info.role, info.dims
    ('parameter', (784, 128))
    """

    path: str
    spellings: tuple[str, ...]
    dims: tuple[int, ...]
    dtype: str
    itemsize: int
    role: Role = "parameter"
    owner: str | None = None  # for a slot: the path of its parameter
    lasting: str | None = None  # the path that it has again when its model is built again
    asked: Layout | None = None  # the layout that the model itself asks for, in a layer's argument
    names: DimNames | None = None  # of its dims, where the model itself names them
    follows: Follows | None = (
        None  # the kernel that it belongs to, where it has no layout of its own
    )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole variable."""
        return math.prod(self.dims) * self.itemsize


class Placed(NamedTuple):
    """A variable with the layout that it gets and the reason why."""

    info: ParamInfo
    layout: Layout
    reason: str
    names: DimNames | None = None  # of its dims, where they are named

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Its dims as a training step stores it: larger where the layout pads it."""
        return self.layout.stored_dims(self.info.dims)

    @property
    def unpadded(self) -> Layout:
        """How it lies with its own dims: whole along those that do not divide."""
        return self.layout.fitting(self.info.dims) if self.layout.pad else self.layout

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device of the mesh holds while it trains."""
        return self.layout.shard_bytes(self.stored_dims, self.info.itemsize)
