"""The Transformers of ``meshwright.named.models``, written again over bare arrays: the oracle.

Parameters are those of the models without their names; letters of the einsums are b(atch),
l(ength), m(emory), d(_model), f (d_ff), h(eads), k (d_kv) and v(ocab).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshwright.named as mn


def bare(tree: Any) -> Any:
    """The arrays without their names."""
    return jax.tree.map(lambda x: x.array, tree, is_leaf=lambda x: isinstance(x, mn.NamedArray))


def parameters(model: Any) -> Any:
    """Parameters for a model, of which every number is drawn: norms begin with more than ones."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(
        lambda x: jnp.asarray(random.normal(size=x.shape).astype("float32") * 0.4), shapes
    )


def check_steps(model: Any, params: Any, tokens: Any) -> None:
    """The logits of one position after another are those of all positions at once."""
    batch, length = tokens.shape

    @jax.jit
    def both(params: Any, tokens: Any) -> Any:
        step, states = model.stepper(params, f"batch:{batch}", length)

        def body(states: Any, turn: Any) -> Any:
            at, token = turn
            logits, states = step(mn.named(token, f"batch:{batch}"), at, states)
            return states, logits.array

        _, steps = jax.lax.scan(body, states, (jnp.arange(length), tokens.T))
        whole = model(params, mn.named(tokens, f"batch:{batch} length:{length}"))
        return steps.swapaxes(0, 1), whole.array

    np.testing.assert_allclose(*both(params, tokens), rtol=1e-5, atol=3e-6)


def norm(params: Any, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["scale"] + params["bias"]


def attention(params: Any, x: Any, memory: Any, mask: Any) -> Any:
    q = jnp.einsum("bld,dhk->blhk", x, params["query"])
    k = jnp.einsum("bmd,dhk->bmhk", memory, params["key"])
    v = jnp.einsum("bmd,dhk->bmhk", memory, params["value"])
    logits = jnp.einsum("blhk,bmhk->bhlm", q, k) / jnp.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30))
    return jnp.einsum("bhlm,bmhk,hkd->bld", weights, v, params["output"])


def block(params: Any, x: Any, mask: Any, memory: Any = None, memory_mask: Any = None) -> Any:
    actual = norm(params["attention_norm"], x)
    x = x + attention(params["attention"], actual, actual, mask)
    if memory is not None:
        actual = norm(params["cross_norm"], x)
        x = x + attention(params["cross"], actual, memory, memory_mask)
    actual = norm(params["feed_forward_norm"], x)
    kernels = params["feed_forward"]
    return x + jax.nn.relu(actual @ kernels["up"]["kernel"]) @ kernels["down"]["kernel"]


def blocks(params: Any, x: Any, *args: Any) -> Any:
    for i in range(len(params)):
        x = block(params[f"layer_{i}"], x, *args)
    return x


def embedded(params: Any, ids: Any) -> Any:
    return params["table"][ids] + params["places"][: ids.shape[1]]


def logits_of(params: Any, x: Any) -> Any:
    if "output" in params:
        return x @ params["output"]
    return x @ params["table"].T / jnp.sqrt(x.shape[-1])


def causal(length: int) -> Any:
    return jnp.tril(jnp.ones([length, length], bool))


def transformer(params: Any, ids: Any) -> Any:
    x = blocks(params["stack"], embedded(params["tokens"], ids), causal(ids.shape[1]))
    return logits_of(params["tokens"], norm(params["last"], x))


def encoder_decoder(params: Any, source: Any, target: Any) -> Any:
    real = (source != 0)[:, None, None]
    x = blocks(params["encoder"], embedded(params["tokens"], source), real)
    memory = norm(params["encoder_last"], x)
    x = embedded(params["tokens"], target)
    x = blocks(params["decoder"], x, causal(target.shape[1]), memory, real)
    return logits_of(params["tokens"], norm(params["decoder_last"], x))


def before(ids: Any) -> Any:
    return jnp.pad(ids, [(0, 0), (1, 0)])[:, :-1]


def cross_entropy(logits: Any, ids: Any, weights: Any, z_loss: float = 0.0) -> Any:
    total = jax.nn.logsumexp(logits, -1)
    losses = total - jnp.take_along_axis(logits, ids[..., None], -1)[..., 0] + z_loss * total**2
    return (losses * weights).sum() / weights.sum()


def t5_bucket(offset: Any, causal: bool, buckets: int, furthest: int) -> Any:
    """The function of T5's code, in doubles."""
    n = -offset
    first = np.zeros(n.shape, int)
    if not causal:
        buckets //= 2
        first, n = np.where(n < 0, buckets, 0), np.abs(n)
    n = np.maximum(n, 0)
    exact = buckets // 2
    far = np.log(np.maximum(n, 1) / exact) / np.log(furthest / exact) * (buckets - exact)
    return first + np.where(
        n < exact, n, np.minimum(exact + np.floor(far + 1e-9), buckets - 1)
    ).astype(int)
