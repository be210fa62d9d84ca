"""Layer normalisation, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...layouts.dim_rules import DimsLike, as_dims
from ..array import NamedArray
from ..elementwise import rsqrt, square
from ..operation import operation
from ..reductions import reduce_mean
from .layer import Params, fit, in_dtype, ones, under_rules, widened, zeros


@operation
def layer_norm(
    x: NamedArray,
    over: DimsLike,
    scale: NamedArray | None = None,
    bias: NamedArray | None = None,
    *,
    epsilon: float = 1e-6,
) -> NamedArray:
    """The input less its mean, over its standard deviation, along the dims ``over``.

    Computed in float32 at least; the result has the input's dims and element type. Where a dim of
    ``over`` is split, two sums per position are exchanged. (Ba et al. 2016.)

    >>> from meshwright.named import named
    >>> x = named([[1.0, 3.0]], "batch:1 d_model:2")
    >>> print(layer_norm(x, "d_model:2").array.round(3))
    [[-1.  1.]]
    """
    over = as_dims(over)
    fit(x, "layer_norm", needs=over)
    wide = widened(x)
    centred = wide - reduce_mean(wide, over)
    return _finished(x, centred, reduce_mean(square(centred), over), scale, bias, epsilon)


@operation
def rms_norm(
    x: NamedArray, over: DimsLike, scale: NamedArray | None = None, *, epsilon: float = 1e-6
) -> NamedArray:
    """The input over the root of its mean square, along the dims ``over``.

    Computed in float32 at least; the result has the input's dims and element type. (Zhang and
    Sennrich 2019.)

    >>> from meshwright.named import named
    >>> print(rms_norm(named([[3.0, -3.0]], "batch:1 d_model:2"), "d_model:2").array.round(3))
    [[ 1. -1.]]
    """
    over = as_dims(over)
    fit(x, "rms_norm", needs=over)
    wide = widened(x)
    return _finished(x, wide, reduce_mean(square(wide), over), scale, None, epsilon)


def _finished(
    x: NamedArray, y: NamedArray, variance: NamedArray, scale: Any, bias: Any, epsilon: float
) -> NamedArray:
    y = y * rsqrt(variance + epsilon)
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias
    return in_dtype(y, x.dtype)


@dataclass(frozen=True)
class _Norm:
    dims: DimsLike
    epsilon: float = 1e-6


@dataclass(frozen=True)
class LayerNorm(_Norm):
    """:func:`layer_norm` over ``dims``, with a ``scale`` and a ``bias`` that are learned.

    >>> from meshwright.named import named
    >>> layer = LayerNorm("d_model:2")
    >>> layer(layer.init(), named([[1.0, 3.0]], "batch:1 d_model:2")).array.round(3).tolist()
    [[-1.0, 1.0]]
    """

    @under_rules
    def init(self, key: Any = None) -> Params:
        return {"scale": ones(self.dims), "bias": zeros(self.dims)}

    @under_rules
    def __call__(self, params: Params, x: NamedArray) -> NamedArray:
        return layer_norm(x, self.dims, params["scale"], params["bias"], epsilon=self.epsilon)


@dataclass(frozen=True)
class RMSNorm(_Norm):
    """:func:`rms_norm` over ``dims``, with a ``scale`` that is learned.

    >>> from meshwright.named import named
    >>> layer = RMSNorm("d_model:2")
    >>> layer(layer.init(), named([[3.0, -3.0]], "batch:1 d_model:2")).array.round(3).tolist()
    [[1.0, -1.0]]
    """

    @under_rules
    def init(self, key: Any = None) -> Params:
        return {"scale": ones(self.dims)}

    @under_rules
    def __call__(self, params: Params, x: NamedArray) -> NamedArray:
        return rms_norm(x, self.dims, params["scale"], epsilon=self.epsilon)
