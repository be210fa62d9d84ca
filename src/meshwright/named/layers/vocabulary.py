"""Other ends of a language model: embeddings of less rank, and logits of more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ...layouts.dim_rules import Dim
from ..array import NamedArray
from ..contraction import einsum
from ..elementwise import tanh
from ..operation import operation
from ..reductions import log_softmax, logsumexp
from .dense import dense
from .embedding import By, Embedding
from .initialisers import SCALED, STANDARD
from .layer import Params, as_dim, in_dtype, under_rules, without


class Vocabulary(Protocol):
    """What a model takes for its embedding and logits in place of one table.

    >>> from meshwright.named import named
    >>> layer: Vocabulary = FactorizedVocabulary("vocab:16", "inner:2", "d_model:8")
    >>> layer(layer.init(jax.random.key(0)), named([3, 5], "length:2")).shape
    {'length': 2, 'd_model': 8}
    """

    def init(self, key: Any) -> Params: ...

    def __call__(self, params: Params, ids: NamedArray) -> NamedArray: ...

    def logits(self, params: Params, x: NamedArray) -> NamedArray: ...


@dataclass(frozen=True)
class FactorizedVocabulary:
    """A table of few numbers for each word, and a kernel from them to ``d_model`` and back.

    Parameters are ``table``, of ``vocab`` and ``inner``, and ``up``, of ``inner`` and ``d_model``.
    (ALBERT, Lan et al. 2020.)

    >>> from meshwright.named import named
    >>> layer = FactorizedVocabulary("vocab:16", "inner:2", "d_model:8")
    >>> params = layer.init(jax.random.key(0))
    >>> x = layer(params, named(jnp.array([3, 5]), "length:2"))
    >>> x.shape, layer.logits(params, x).shape
    ({'length': 2, 'd_model': 8}, {'length': 2, 'vocab': 16})
    """

    vocab: str | Dim
    inner: str | Dim
    d_model: str | Dim
    by: By = "gather"
    dtype: Any = jnp.float32

    @under_rules
    def init(self, key: Any) -> Params:
        table, up = jax.random.split(key)
        vocab, inner, d_model = self._dims
        return {
            "table": STANDARD(table, (vocab,), (inner,)),
            "up": SCALED(up, (inner,), (d_model,)),
        }

    @under_rules
    def __call__(self, params: Params, ids: NamedArray) -> NamedArray:
        vocab, inner, d_model = self._dims
        rows = Embedding(vocab, inner, by=self.by, dtype=self.dtype)
        return dense(rows(params, ids), params["up"], d_model)

    @under_rules
    def logits(self, params: Params, x: NamedArray) -> NamedArray:
        vocab, inner, d_model = self._dims
        few = dense(x * d_model.size**-0.5, params["up"], inner)
        return dense(few, params["table"], vocab)

    @property
    def _dims(self) -> tuple[Dim, Dim, Dim]:
        return (
            as_dim(self.vocab, "vocab"),
            as_dim(self.inner, "inner"),
            as_dim(self.d_model, "d_model"),
        )


@dataclass(frozen=True)
class MixtureOfSoftmaxes:
    """Chances of words as a mixture of several softmaxes, which may be of more rank than one.

    Logits are the logarithms of the chances. Parameters are ``table``, of ``vocab`` and
    ``d_model``, which also embeds; ``prior``, of ``d_model`` and ``mixture``; and ``heads``, from
    ``d_model`` to ``mixture`` and ``d_model``. (Yang et al. 2018.)

    >>> layer = MixtureOfSoftmaxes("vocab:16", "d_model:8", "mixture:3")
    >>> jax.eval_shape(layer.init, jax.random.key(0))["prior"].shape
    {'d_model': 8, 'mixture': 3}
    """

    vocab: str | Dim
    d_model: str | Dim
    mixture: str | Dim
    by: By = "gather"
    dtype: Any = jnp.float32

    @under_rules
    def init(self, key: Any) -> Params:
        table, prior, heads = jax.random.split(key, 3)
        vocab, d_model, mixture, inner = self._dims
        return {
            "table": STANDARD(table, (vocab,), (d_model,)),
            "prior": SCALED(prior, (d_model,), (mixture,)),
            "heads": SCALED(heads, (d_model,), (mixture, inner)),
        }

    @under_rules
    def __call__(self, params: Params, ids: NamedArray) -> NamedArray:
        vocab, d_model, _, _ = self._dims
        return Embedding(vocab, d_model, by=self.by, dtype=self.dtype)(params, ids)

    @under_rules
    def logits(self, params: Params, x: NamedArray) -> NamedArray:
        return _mixed(self, params, x)

    @property
    def _dims(self) -> tuple[Dim, Dim, Dim, Dim]:
        d_model = as_dim(self.d_model, "d_model")
        inner = d_model.renamed(f"{d_model.name}_of_head")
        return as_dim(self.vocab, "vocab"), d_model, as_dim(self.mixture, "mixture"), inner


@operation
def _mixed(layer: MixtureOfSoftmaxes, params: Params, x: NamedArray) -> NamedArray:
    vocab, d_model, mixture, inner = layer._dims
    heads = tanh(dense(x, params["heads"], (mixture, inner)))
    table = in_dtype(params["table"], x.dtype).rename(d_model, inner.name)
    others = without(heads.dims, (mixture, inner))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = einsum([heads * inner.size**-0.5, table], (*others, mixture, vocab), dtype=wide)
    prior = log_softmax(in_dtype(dense(x, params["prior"], mixture), wide), mixture)
    return logsumexp(log_softmax(logits, vocab) + prior, mixture)
