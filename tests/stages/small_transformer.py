"""A small Transformer in plain JAX whose step keeps its gradients, and the same in Keras."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

import meshwright as mw

WIDTH, TOKENS, WORDS, ROWS = 8, 4, 16, 16

# Its slots are the gradients themselves.
KEEPS_GRADIENTS = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda grads, state, params=None: (jax.tree.map(lambda g: -0.1 * g, grads), grads),
)


def batch_of(rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, WORDS, (rows, TOKENS)).astype("int32") for name in ("x", "y")}


def params_of(blocks: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)

    def weights(*dims: int) -> np.ndarray:
        return (0.5 * rng.normal(size=dims) / np.sqrt(dims[0])).astype("float32")

    return {
        "embed": weights(WORDS, WIDTH),
        "blocks": [
            {"qkv": weights(WIDTH, 3 * WIDTH), "up": weights(WIDTH, 16), "down": weights(16, WIDTH)}
            for _ in range(blocks)
        ],
        "head": weights(WIDTH, WORDS),
    }


def block(weights: Any, x: Any, mask: Any) -> Any:
    q, k, v = jnp.split(x @ weights["qkv"], 3, axis=-1)
    scores = jnp.where(mask, q @ k.swapaxes(-1, -2), -1e9)
    x = x + jax.nn.softmax(scores) @ v
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def loss(params: Any, batch: Any) -> Any:
    """Tied to nothing, with a causal mask that all blocks share and one of each row's padding."""
    causal = jnp.tril(jnp.ones([TOKENS, TOKENS], bool))
    mask = causal & (batch["x"] > 0)[:, None, :] | jnp.eye(TOKENS, dtype=bool)
    x = params["embed"][batch["x"]]
    for weights in params["blocks"]:
        x = block(weights, x, mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["y"])
    return losses.mean(), {"hits": ((x @ params["head"]).argmax(-1) == batch["y"]).mean()}


def tied_loss(params: Any, batch: Any) -> Any:
    return loss({**params, "head": params["embed"].T}, batch)


def program_of(blocks: int = 4, loss: Any = loss, optimizer: Any = KEEPS_GRADIENTS) -> mw.Program:
    return mw.jax_program(loss, params_of(blocks), optimizer, batch=batch_of())


def keras_model(blocks: int = 4, dropout: float = 0.0) -> keras.Model:
    """A Transformer as anybody writes it."""
    keras.utils.set_random_seed(3)
    tokens = keras.Input([TOKENS], dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(tokens)
    for _ in range(blocks):
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(2, 4)(normed, normed, use_causal_mask=True)
        normed = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(16, activation="gelu")(normed)
        x = x + keras.layers.Dropout(dropout)(keras.layers.Dense(WIDTH)(hidden))
    model = keras.Model(tokens, keras.layers.Dense(WORDS)(x))
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
