"""What belongs to a kernel once its layer is quantized, or adapted by LoRA, and lies as it does.

Keras replaces ``kernel`` by a packed one and adds ``kernel_scale``, ``kernel_zero``,
``kernel_amax_history``, ``lora_kernel_a`` and others, whose dims are some of the kernel's. A layout
for the kernel, which is found in most of these names too, says how the kernel's own dims lie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from ... import _compat

Dims = tuple[int, ...]
Along = tuple[int | None, ...]  # which dim of the kernel each dim is; None: of none

KERNELS = ("kernel", "embeddings", "reverse_embeddings")
_OF_LAYER = (  # of the layer's inputs and outputs, so they have no dim of the kernel
    "inputs_scale",
    "inputs_amax_history",
    "outputs_grad_scale",
    "outputs_grad_amax_history",
    "g_idx",
    "awq_scales",
)


def companions(layer: keras.Layer) -> Iterator[tuple[Any, Any, Dims, Along]]:
    """``(variable, kernel, dims of the kernel as it was built, along)`` of one layer.

    A kernel that is packed is its own companion. A layer need not say yet that it is quantized:
    Keras asks for values before that.
    """
    by_name: dict[str, list[Any]] = {}
    for variable in _compat.own_variables(layer):
        by_name.setdefault(variable.name, []).append(variable)
    turned = _compat.is_stored_by_columns(layer)
    for name in KERNELS:
        if name not in by_name:
            continue
        kernel = by_name[name][-1]
        whole = _compat.unpacked_dims(layer, name) or tuple(by_name[name][0].shape)
        for variable, along in _of_kernel(name, by_name, whole, turned):
            yield variable, kernel, whole, along
        for other in _OF_LAYER:
            for variable in by_name.pop(other, ()):
                yield variable, kernel, whole, (None,) * len(variable.shape)


def _of_kernel(
    name: str, by_name: Mapping[str, list[Any]], whole: Dims, turned: bool
) -> Iterator[tuple[Any, Along]]:
    def called(*names: str) -> Iterator[tuple[Any, Dims]]:
        variables = itertools.chain.from_iterable(by_name.get(key, ()) for key in names)
        return ((variable, tuple(variable.shape)) for variable in variables)

    for variable, dims in called(name):  # GPTQ keeps both while it calibrates
        if dims != whole:
            yield variable, along_packed(dims, whole, turned)
    for variable, dims in called(f"{name}_scale", f"{name}_zero"):
        if name == "embeddings":  # (vocabulary,) or (vocabulary, groups)
            yield variable, (0, None)[: len(dims)]
        else:
            along = along_scale(dims[::-1] if turned else dims, whole)
            yield variable, along[::-1] if turned else along
    for variable, dims in called(f"{name}_amax_history"):
        yield variable, (None,) * len(dims)
    for variable, _ in called(f"lora_{name}_a"):
        yield variable, (*range(len(whole) - 1), None)
    for variable, _ in called(f"lora_{name}_b"):
        yield variable, (None, len(whole) - 1)


def along_packed(dims: Sequence[int], whole: Sequence[int], turned: bool = False) -> Along:
    """Which dims of a kernel those of a packed one are: rows and columns, two columns to a byte.

    ``turned`` ones are stored as columns by rows. Where several dims have become one, it is the
    outermost of them.

    >>> along_packed((8, 3), (8, 6)), along_packed((3, 8), (8, 6), turned=True)
    ((0, 1), (1, 0))
    >>> along_packed((8, 4), (8, 2, 4)), along_packed((8, 4), (2, 4, 8))
    ((0, 1), (0, 2))
    """
    rows, columns = reversed(dims) if turned else dims
    for cut in range(1, len(whole)):
        product = math.prod(whole[cut:])
        if math.prod(whole[:cut]) == rows and columns in (product, -(-product // 2)):
            return (cut, 0) if turned else (0, cut)
    return (0, 1) if len(whole) == 2 else (None, None)  # as reverse_embeddings, packed by rows


def along_scale(dims: Sequence[int], whole: Sequence[int]) -> Along:
    """Which dims of a kernel those of its scale are: of equal size, from the last on.

    >>> along_scale((6,), (8, 6)), along_scale((1, 1, 2, 4), (8, 2, 4)), along_scale((), (8, 6))
    ((1,), (None, None, 1, 2), ())
    >>> along_scale((2, 8), (16, 2, 4))  # two groups of rows; both dims of the columns in one
    (None, 1)
    """
    along: list[int | None] = []
    end = len(whole)
    for size in reversed(dims):
        start = next((i for i in reversed(range(end)) if math.prod(whole[i:end]) == size), None)
        if size == 1 or start is None:
            along.append(None)
        else:
            along.append(start)
            end = start
    return tuple(reversed(along))
