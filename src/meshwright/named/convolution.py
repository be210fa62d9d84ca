"""Convolution over named dims, any of which may be split.

Mesh-TensorFlow cuts images into blocks by hand and has a second set of functions for them
(``conv2d_with_blocks`` and its kin). Here a rule for the spatial dim does that, ``"h:rows"``: each
device takes the rows that it lacks from its neighbours, at any stride, dilation and padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import DimError
from ..layouts.dim_rules import text_of
from .array import NamedArray, as_named, union
from .contraction import einsum
from .operation import operation
from .reductions import Over
from .sliding import Windows, convolve, in_place, window_pairs
from .windowed import Numbers, Padding


@operation
def conv(
    x: Any,
    kernel: Any,
    windows: Windows,
    *,
    reduce: Over = None,
    strides: Numbers = 1,
    dilation: Numbers = 1,
    padding: Padding = "SAME",
    precision: Any = None,
    dtype: Any = None,
) -> NamedArray:
    """Slide the kernel over dims of ``x``, and sum their product over the channels that both have.

    ``windows="h:fh w:fw"`` says that dim ``fh`` of the kernel moves along dim ``h`` of ``x``. The
    other dims mean what they mean in :func:`einsum`: those that only ``x`` has are batch; those
    that only the kernel has are output channels; those that both have are input channels, and
    summed over. ``reduce`` names the dims to sum over instead: one that both have and that it
    leaves out stays, with a kernel of its own for each index (groups; of single channels,
    depthwise). The result has the dims of ``x`` in their order, spatial ones with their new size,
    and the output channels where the input channels stood.

    ``strides`` and ``dilation`` (of the kernel) are whole numbers, for all or per dim: ``2``,
    ``"h:2 w:1"``, ``{"h": 2}``. ``padding`` is "SAME", "VALID", or rows of zeros before and after:
    ``[(1, 1), (0, 2)]``, ``{"h": (1, 1), "w": "VALID"}``. ``dtype`` is the element type of sums and
    result. The kernel is not turned over.

    Every dim may be split, also those of the kernel, and several at once. A split spatial dim
    exchanges edges with its neighbours; it is gathered only where a window reaches so far that
    devices need each other's rows whole. Raises :class:`DimError` for dims, strides and sizes that
    do not fit, :class:`LayoutError` if the rules lay two of all these dims along one axis, and
    :class:`DivisibilityError` for a spatial dim of the result that does not divide.

    >>> import jax.numpy as jnp
    >>> from meshwright.named import named
    >>> x = named(jnp.ones([2, 8, 8, 3]), "batch:2 h:8 w:8 io:3")
    >>> kernel = named(jnp.ones([3, 3, 3, 4]), "fh:3 fw:3 io:3 hidden:4")
    >>> conv(x, kernel, "h:fh w:fw", strides=2).shape
    {'batch': 2, 'h': 4, 'w': 4, 'hidden': 4}
    """
    return convolve(
        x, kernel, windows, "conv", reduce=reduce, strides=strides, dilation=dilation,
        padding=padding, precision=precision, dtype=dtype,
    )  # fmt: skip


@operation
def conv_transposed(
    x: Any,
    kernel: Any,
    windows: Windows,
    *,
    reduce: Over = None,
    strides: Numbers = 1,
    dilation: Numbers = 1,
    padding: Padding = "SAME",
    precision: Any = None,
    dtype: Any = None,
) -> NamedArray:
    """Lay the kernel, times each element of ``x``, at ``strides`` into the result.

    It is the adjoint of :func:`conv` with the same strides, dilation and padding, and takes the
    same arguments: channels that both have are summed over, those that only the kernel has are the
    result's. SAME gives ``strides`` times the size; VALID gives every place that a window touches
    (and at least that much); pairs cut rows off the ends of VALID's.

    >>> import jax.numpy as jnp
    >>> from meshwright.named import named
    >>> x = named(jnp.ones([2, 4, 3]), "batch:2 t:4 io:3")
    >>> kernel = named(jnp.ones([2, 3, 5]), "taps:2 io:3 hidden:5")
    >>> conv_transposed(x, kernel, "t:taps", strides=2).shape
    {'batch': 2, 't': 8, 'hidden': 5}
    """
    return convolve(
        x, kernel, windows, "conv_transposed", reduce=reduce, strides=strides, dilation=dilation,
        padding=padding, precision=precision, dtype=dtype, transposed=True,
    )  # fmt: skip


@operation
def depthwise_conv(
    x: Any,
    kernel: Any,
    windows: Windows,
    *,
    strides: Numbers = 1,
    dilation: Numbers = 1,
    padding: Padding = "SAME",
    precision: Any = None,
    dtype: Any = None,
) -> NamedArray:
    """:func:`conv` that sums over no channel: each has a kernel of its own, in any number of dims.

    Dims that only the kernel has multiply the channels.

    >>> import jax.numpy as jnp
    >>> from meshwright.named import named
    >>> x = named(jnp.ones([2, 8, 3]), "batch:2 t:8 io:3")
    >>> depthwise_conv(x, named(jnp.ones([4, 3]), "taps:4 io:3"), "t:taps").shape
    {'batch': 2, 't': 8, 'io': 3}
    """
    return convolve(
        x, kernel, windows, "depthwise_conv", reduce=(), strides=strides, dilation=dilation,
        padding=padding, precision=precision, dtype=dtype,
    )  # fmt: skip


@operation
def separable_conv(
    x: Any,
    depthwise: Any,
    pointwise: Any,
    windows: Windows,
    *,
    strides: Numbers = 1,
    dilation: Numbers = 1,
    padding: Padding = "SAME",
    precision: Any = None,
) -> NamedArray:
    """:func:`depthwise_conv`, and then a product over all channels that ``pointwise`` shares.

    In any number of dims; output channels stand where the first channel that is summed over stood.

    >>> import jax.numpy as jnp
    >>> from meshwright.named import named
    >>> x = named(jnp.ones([2, 8, 3]), "batch:2 t:8 io:3")
    >>> taps, mixed = named(jnp.ones([4, 3]), "taps:4 io:3"), named(jnp.ones([3, 5]), "io:3 out:5")
    >>> separable_conv(x, taps, mixed, "t:taps").shape
    {'batch': 2, 't': 8, 'out': 5}
    """
    pointwise = as_named(pointwise)
    y = convolve(
        x, depthwise, windows, "separable_conv", reduce=(), strides=strides, dilation=dilation,
        padding=padding, precision=precision,
    )  # fmt: skip
    union(y.dims, pointwise.dims, what="separable_conv")
    summed = [dim for dim in y.dims if dim in pointwise.dims]
    if not summed:
        raise DimError(
            f"separable_conv: pointwise [{text_of(pointwise.dims)}] shares no dim with the result "
            f"of the depthwise part, [{text_of(y.dims)}]. Use one name for the channels in both."
        )
    new = [dim for dim in pointwise.dims if dim not in summed]
    return einsum([y, pointwise], in_place(y.dims, summed, new), precision=precision)


def _front(
    name: str, number: int, whole: Callable[..., NamedArray], shape: str
) -> Callable[..., NamedArray]:
    """``conv`` or ``conv_transposed`` along this many dims."""
    dims = f"{number} dim{'s' * (number > 1)}"

    @functools.wraps(whole)
    def call(x: Any, kernel: Any, windows: Windows, **how: Any) -> NamedArray:
        if len(pairs := window_pairs(windows)) != number:
            raise DimError(
                f"{name} moves along {dims}, and windows={windows!r} names {len(pairs)}. "
                f"{whole.__name__} takes any number."
            )
        return convolve(x, kernel, pairs, name, transposed=whole is conv_transposed, **how)

    call.__name__ = call.__qualname__ = name
    spatial = [*"dhw"[-number:]]
    windows = [f"f{dim}" for dim in spatial]
    pairing = " ".join(map(":".join, zip(spatial, windows, strict=True)))
    call.__doc__ = f""":func:`{whole.__name__}` along {dims}; takes the same arguments.

    ``x``, ``kernel`` and ``windows`` are as there. Raises :class:`DimError` for another number of
    windows.

    >>> import jax.numpy as jnp
    >>> import meshwright.named as mn
    >>> x = mn.named(jnp.ones({[8] * number + [3]}), "{_named(spatial, 8)} io:3")
    >>> kernel = mn.named(jnp.ones({[2] * number + [3, 4]}), "{_named(windows, 2)} io:3 out:4")
    >>> mn.{name}(x, kernel, "{pairing}", strides=2).shape
    {shape}
    """
    return operation(call)


def _named(names: Sequence[str], size: int) -> str:
    return " ".join(f"{name}:{size}" for name in names)


conv1d = _front("conv1d", 1, conv, "{'w': 4, 'out': 4}")
conv2d = _front("conv2d", 2, conv, "{'h': 4, 'w': 4, 'out': 4}")
conv3d = _front("conv3d", 3, conv, "{'d': 4, 'h': 4, 'w': 4, 'out': 4}")
conv1d_transposed = _front("conv1d_transposed", 1, conv_transposed, "{'w': 16, 'out': 4}")
conv2d_transposed = _front("conv2d_transposed", 2, conv_transposed, "{'h': 16, 'w': 16, 'out': 4}")
conv3d_transposed = _front(
    "conv3d_transposed", 3, conv_transposed, "{'d': 16, 'h': 16, 'w': 16, 'out': 4}"
)
