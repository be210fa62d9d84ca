"""Dense layers, products of them, and the feed-forward layer of the Transformer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ...layouts.dim_rules import Dim, DimsLike, as_dims
from ..array import NamedArray
from ..contraction import einsum
from ..elementwise import gelu, multiply, relu, sigmoid, swish
from ..joining import stack, unstack
from ..operation import operation
from ..random import dropout
from .initialisers import SCALED, Initialiser
from .layer import Params, fit, in_dtype, under_rules, without, zeros

Activation = Callable[[NamedArray], NamedArray]


@operation
def dense(
    x: NamedArray,
    kernel: NamedArray,
    outputs: DimsLike,
    bias: NamedArray | None = None,
    activation: Activation | None = None,
) -> NamedArray:
    """The input times a kernel, plus a bias, through an activation; in the input's element type.

    The dims of the kernel that are not ``outputs`` are summed over. Raises :class:`DimError` if the
    input lacks one of those, or has one of ``outputs``.

    >>> import numpy as np
    >>> from meshwright.named import named
    >>> x, w = named(np.ones([4, 3]), "batch:4 io:3"), named(np.ones([3, 2]), "io:3 hidden:2")
    >>> dense(x, w, "hidden:2", activation=relu).shape
    {'batch': 4, 'hidden': 2}
    """
    outputs = as_dims(outputs)
    inputs = without(kernel.dims, outputs)
    fit(x, "dense", needs=inputs, makes=outputs)
    y = einsum([x, in_dtype(kernel, x.dtype)], (*without(x.dims, inputs), *outputs))
    if bias is not None:
        y = y + in_dtype(bias, x.dtype)
    return y if activation is None else activation(y)


@operation
def dense_together(
    x: NamedArray, kernels: Sequence[NamedArray], outputs: DimsLike
) -> list[NamedArray]:
    """:func:`dense` with each of several kernels of the same dims, as one product.

    The gradient of the input is one sum over all of them. Where ``outputs`` are split, it is
    exchanged once, on targets whose compiler would exchange that of each kernel, too.
    """
    if len(kernels) == 1:
        return [dense(x, kernels[0], outputs)]
    which = Dim("kernel", len(kernels))
    together = stack([in_dtype(kernel, x.dtype) for kernel in kernels], which.name)
    return unstack(dense(x, together, (which, *as_dims(outputs))), which)


@dataclass(frozen=True)
class Dense:
    """A dense layer: from the dims ``inputs`` to the dims ``outputs``, each any number of them.

    Parameters are ``kernel`` and, if there is one, ``bias``. Other dims of the input stay.

    >>> from meshwright.named import named
    >>> layer = Dense("heads:2 d_kv:4", "d_model:6", activation=relu)
    >>> params = layer.init(jax.random.key(0))
    >>> layer(params, named(jax.numpy.ones([3, 2, 4]), "batch:3 heads:2 d_kv:4")).shape
    {'batch': 3, 'd_model': 6}
    """

    inputs: DimsLike
    outputs: DimsLike
    activation: Activation | None = None
    bias: bool = True
    initialiser: Initialiser = SCALED

    @under_rules
    def init(self, key: Any) -> Params:
        kernel = self.initialiser(key, as_dims(self.inputs), as_dims(self.outputs))
        if not self.bias:
            return {"kernel": kernel}
        return {"kernel": kernel, "bias": zeros(self.outputs)}

    @under_rules
    def __call__(self, params: Params, x: NamedArray, *, key: Any = None) -> NamedArray:
        return self.finished(params, dense(x, params["kernel"], self.outputs))

    def finished(self, params: Params, y: NamedArray) -> NamedArray:
        """A product with the kernel, plus the bias, through the activation."""
        if self.bias:
            y = y + in_dtype(params["bias"], y.dtype)
        return y if self.activation is None else self.activation(y)


@dataclass(frozen=True)
class DenseProduct:
    """The product of several dense layers of one input, each with its own activation or none.

    Two of them are a gated linear unit (Dauphin et al. 2017; Shazeer 2020 compares the family):
    :func:`glu`, :func:`reglu`, :func:`geglu` and :func:`swiglu`.

    >>> from meshwright.named import named
    >>> layer = DenseProduct("d_model:4", "d_ff:8", (swish, None))
    >>> params = layer.init(jax.random.key(0))
    >>> layer(params, named(jax.numpy.ones([3, 4]), "batch:3 d_model:4")).shape
    {'batch': 3, 'd_ff': 8}
    """

    inputs: DimsLike
    outputs: DimsLike
    activations: tuple[Activation | None, ...]
    bias: bool = False
    initialiser: Initialiser = SCALED

    @property
    def factors(self) -> list[Dense]:
        """The dense layers whose product it is."""
        return [
            Dense(self.inputs, self.outputs, activation, self.bias, self.initialiser)
            for activation in self.activations
        ]

    @under_rules
    def init(self, key: Any) -> Params:
        keys = jax.random.split(key, len(self.activations))
        return {
            f"factor_{i}": factor.init(key)
            for i, (factor, key) in enumerate(zip(self.factors, keys, strict=True))
        }

    @under_rules
    def __call__(self, params: Params, x: NamedArray, *, key: Any = None) -> NamedArray:
        return _product(self, params, x)


@operation
def _product(layer: DenseProduct, params: Params, x: NamedArray) -> NamedArray:
    own = [params[f"factor_{i}"] for i, _ in enumerate(layer.factors)]
    products = dense_together(x, [factor_params["kernel"] for factor_params in own], layer.outputs)
    factors = (
        factor.finished(factor_params, y)
        for factor, factor_params, y in zip(layer.factors, own, products, strict=True)
    )
    return functools.reduce(multiply, factors)


def glu(inputs: DimsLike, outputs: DimsLike) -> DenseProduct:
    """A linear layer, gated by the logistic function of another.

    Its layers go from the dims ``inputs`` to the dims ``outputs``.

    >>> from meshwright.named import named
    >>> layer = glu("d_model:4", "d_ff:8")
    >>> layer(layer.init(jax.random.key(0)), named(jax.numpy.ones([4]), "d_model:4")).shape
    {'d_ff': 8}
    """
    return DenseProduct(inputs, outputs, (sigmoid, None))


def reglu(inputs: DimsLike, outputs: DimsLike) -> DenseProduct:
    """A linear layer, gated by the positive part of another.

    Its layers go from the dims ``inputs`` to the dims ``outputs``.

    >>> from meshwright.named import named
    >>> layer = reglu("d_model:4", "d_ff:8")
    >>> layer(layer.init(jax.random.key(0)), named(jax.numpy.ones([4]), "d_model:4")).shape
    {'d_ff': 8}
    """
    return DenseProduct(inputs, outputs, (relu, None))


def geglu(inputs: DimsLike, outputs: DimsLike) -> DenseProduct:
    """A linear layer, gated by the Gaussian error linear unit of another.

    Its layers go from the dims ``inputs`` to the dims ``outputs``.

    >>> from meshwright.named import named
    >>> layer = geglu("d_model:4", "d_ff:8")
    >>> layer(layer.init(jax.random.key(0)), named(jax.numpy.ones([4]), "d_model:4")).shape
    {'d_ff': 8}
    """
    return DenseProduct(inputs, outputs, (gelu, None))


def swiglu(inputs: DimsLike, outputs: DimsLike) -> DenseProduct:
    """A linear layer, gated by the swish of another.

    Its layers go from the dims ``inputs`` to the dims ``outputs``.

    >>> from meshwright.named import named
    >>> layer = swiglu("d_model:4", "d_ff:8")
    >>> layer(layer.init(jax.random.key(0)), named(jax.numpy.ones([4]), "d_model:4")).shape
    {'d_ff': 8}
    """
    return DenseProduct(inputs, outputs, (swish, None))


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward layer of the Transformer: up to ``d_ff``, and down to ``d_model`` again.

    ``activations`` of ``(relu,)`` is that of Vaswani et al. 2017; more than one make a product of
    dense layers, ``(swish, None)`` the gated layer of Shazeer 2020. Where a ``key`` is given,
    ``dropout`` is the part of what lies between that is left out.

    >>> from meshwright.named import named
    >>> layer = FeedForward("d_model:4", "d_ff:8")
    >>> params = layer.init(jax.random.key(0))
    >>> params["up"]["kernel"].shape
    {'d_model': 4, 'd_ff': 8}
    >>> layer(params, named(jax.numpy.ones([3, 4]), "length:3 d_model:4")).shape
    {'length': 3, 'd_model': 4}
    """

    d_model: DimsLike
    d_ff: DimsLike
    activations: tuple[Activation | None, ...] = (relu,)
    bias: bool = False
    dropout: float = 0.0

    @property
    def up(self) -> Dense | DenseProduct:
        if len(self.activations) == 1:
            return Dense(self.d_model, self.d_ff, self.activations[0], self.bias)
        return DenseProduct(self.d_model, self.d_ff, self.activations, self.bias)

    @property
    def down(self) -> Dense:
        return Dense(self.d_ff, self.d_model, bias=self.bias)

    @under_rules
    def init(self, key: Any) -> Params:
        up, down = jax.random.split(key)
        return {"up": self.up.init(up), "down": self.down.init(down)}

    @under_rules
    def __call__(self, params: Params, x: NamedArray, *, key: Any = None) -> NamedArray:
        hidden = self.up(params["up"], x)
        if key is not None and self.dropout:
            hidden = dropout(hidden, key, rate=self.dropout)
        return self.down(params["down"], hidden)
