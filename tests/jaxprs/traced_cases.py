"""Steps of many kinds of model with their graphs."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import optax
import pytest
from jax import lax
from keras import layers
from models import shapes

import meshwright as mw
import meshwright.named as mn
from meshwright.frontends.keras.abstract import abstract
from meshwright.jaxprs.names import Argument
from meshwright.planning import traced_graph as tracing
from meshwright.planning.abstract_step import AbstractStep, abstract_step
from meshwright.planning.graph import Graph
from meshwright.planning.traced_graph import graph_of

ONE = mw.Mesh({"batch": 1})


class Case(NamedTuple):
    """A step, what its arguments are, and its graph."""

    jaxpr: Any
    arguments: list[Argument]
    carried: int
    graph: Graph


def of_jax(loss, params, *batch) -> Case:
    """A step of SGD with momentum."""

    def step(state, *batch):
        weights, momentum = state
        gradients = jax.grad(loss)(weights, *batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum

    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(params)
    ]
    arguments = [Argument(path) for path in paths]
    arguments += [Argument(f"momentum/{path}", "slot", owner=path) for path in paths]
    carried = len(arguments)
    arguments += [Argument(f"input/{i}", "input") for i, _ in enumerate(jax.tree.leaves(batch))]
    jaxpr = jax.make_jaxpr(step)((params, params), *batch)
    return Case(jaxpr, arguments, carried, graph_of(jaxpr, arguments, carried))


def of_described(described: AbstractStep) -> Case:
    step = tracing.traced_step(described)
    return Case(*step, graph_of(*step))


def of_keras(model: keras.Model, *batch: Any) -> Case:
    return of_described(abstract_step(model, batch, mw.Sharded(ONE, {}, unmatched="replicate")))


# Models


def mlp() -> Case:
    def loss(params, x):
        hidden = jax.nn.relu(x @ params["up"] + params["bias"])
        return jnp.sum((hidden @ params["down"] - x) ** 2)

    params = {"up": shapes(16, 32), "bias": shapes(32), "down": shapes(32, 16)}
    return of_jax(loss, params, shapes(64, 16))


def square() -> Case:
    def loss(params, x):
        for kernel in params:
            x = x + jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    return of_jax(loss, [shapes(16, 16), shapes(16, 16)], shapes(64, 16))


def convolutions() -> Case:
    with abstract():
        model = keras.Sequential(
            [
                keras.Input([16, 16, 4]),
                layers.Conv2D(8, 3, padding="same", name="first"),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.MaxPooling2D(2),
                layers.DepthwiseConv2D(3, padding="same"),
                layers.Conv2D(12, 1, name="one"),
                layers.AveragePooling2D(2),
                layers.Conv2D(16, 3, strides=2, groups=4, padding="same", name="grouped"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10, name="top"),
            ]
        )
        model.compile("sgd", "mse")
    return of_keras(model, shapes(8, 16, 16, 4), shapes(8, 10))


def large_window() -> Case:
    """A window as large as the image, which stands at nine places of it."""

    def loss(params, x):
        spec = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, params["kernel"], (1, 1), ((1, 1), (1, 1)), dimension_numbers=spec
        )
        return jnp.mean(y**2)

    return of_jax(loss, {"kernel": shapes(8, 8, 2, 4)}, shapes(8, 8, 8, 2))


def transformer_model(
    *, blocks: int, width: int, heads: int, length: int, vocab: int
) -> keras.Model:
    tokens = keras.Input([length], dtype="int32")
    x = layers.Embedding(vocab, width, name="tokens")(tokens)
    for i in range(blocks):
        name = f"block_{i}"
        y = layers.LayerNormalization(name=f"{name}_before")(x)
        attention = layers.MultiHeadAttention(
            heads, width // heads, dropout=0.1, name=f"{name}_attention"
        )
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"{name}_between")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"{name}_up")(y)
        y = layers.Dense(width, name=f"{name}_down")(y)
        x = x + layers.Dropout(0.1)(y)
    model = keras.Model(tokens, layers.Dense(vocab, name="head")(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def transformer() -> Case:
    with abstract():
        model = transformer_model(blocks=2, width=32, heads=4, length=16, vocab=96)
    tokens = shapes(8, 16, dtype="int32")
    return of_keras(model, tokens, tokens)


def recurrent() -> Case:
    with abstract():
        model = keras.Sequential(
            [
                keras.Input([6], dtype="int32"),
                layers.Embedding(48, 8, name="words"),
                layers.LSTM(16, return_sequences=True),
                layers.GRU(24),
                layers.Dense(4),
            ]
        )
        model.compile("rmsprop", "mse")
    return of_keras(model, shapes(8, 6, dtype="int32"), shapes(8, 4))


def scanned() -> Case:
    rows, length, width, heads = 8, 12, 16, 4

    def layer(x, params):
        q, k, v = (
            (x @ params[name]).reshape(rows, length, heads, width // heads) for name in "qkv"
        )
        weights = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k))
        x = x + jnp.einsum("bhqt,bthk->bqhk", weights, v).reshape(x.shape) @ params["o"]
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"], None

    def loss(params, tokens, labels):
        x = params["table"][tokens]
        x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
        log_probs = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], -1))

    stack = {name: shapes(3, width, width) for name in "qkvo"}
    stack |= {"up": shapes(3, width, 32), "down": shapes(3, 32, width)}
    tokens = shapes(rows, length, dtype="int32")
    return of_jax(loss, {"table": shapes(64, width), "layers": stack}, tokens, tokens)


def normal(key, dims):
    dims = mn.as_dims(dims)
    return mn.named(jax.random.normal(key, [dim.size for dim in dims]), dims)


def of_named(loss, init, batch, **named) -> Case:
    program = mw.named_program(loss, init, optax.adam(0.01), batch=named)
    return of_described(abstract_step(program, batch, mw.Placement.of(ONE)))


def named() -> Case:
    def init():
        one, two = jax.random.split(jax.random.key(0))
        return {"up": normal(one, "io:8 hidden:64"), "down": normal(two, "hidden:64 io:8")}

    def loss(params, batch):
        hidden = mn.relu(mn.einsum([batch["x"], params["up"]]))
        return mn.reduce_mean(mn.square(mn.einsum([hidden, params["down"]]) - batch["y"]))

    rows = {"x": shapes(16, 8), "y": shapes(16, 8)}
    return of_named(loss, init, rows, x="batch io", y="batch io")


def experts() -> Case:
    gating = mn.Gating("experts:4", choose="switch")
    layer = mn.MixtureOfExperts("d_model:8", "d_ff:16", gating)

    def loss(params, batch):
        mixed = layer(params, batch["x"], training=True)
        return mn.reduce_mean(mn.square(mixed.output - batch["x"])) + mixed.loss

    rows = {"x": shapes(4, 6, 8)}
    return of_named(loss, lambda: layer.init(jax.random.key(0)), rows, x="batch length d_model")


def derivatives() -> Case:
    @jax.custom_vjp
    def layer(x, kernel):
        return jnp.tanh(x @ kernel)

    def forwards(x, kernel):
        y = layer(x, kernel)
        return y, (x, kernel, y)

    def backwards(residuals, gradient):
        x, kernel, y = residuals
        gradient = gradient * (1 - y * y)
        return gradient @ kernel.T, x.T @ gradient

    layer.defvjp(forwards, backwards)

    def loss(params, x):
        hidden = layer(x, params["one"])
        hidden = jax.vmap(lambda row, other: row * jnp.sum(other))(hidden, x)
        return jnp.mean(jax.vmap(lambda kernel: jnp.sum((hidden @ kernel) ** 2))(params["many"]))

    return of_jax(loss, {"one": shapes(16, 24), "many": shapes(4, 24, 6)}, shapes(32, 16))


def lookups() -> Case:
    def loss(params, rows, places):
        result = params["table"][rows]
        added = jnp.zeros([20, 8]).at[places].add(result * params["scale"])
        best = lax.top_k(added, 4)[0]
        some = lax.dynamic_slice_in_dim(params["table"], places[0], 8, 0)
        both = jnp.concatenate([some, some], 0) * jnp.sort(result, axis=1)
        return jnp.sum(best) + jnp.mean(jnp.cumsum(added, 0) ** 2) + jnp.sum(jnp.flip(both, 0))

    numbers = shapes(16, dtype="int32")
    return of_jax(loss, {"table": shapes(40, 8), "scale": shapes(8)}, numbers, numbers)


ZOO = {
    case.__name__: functools.cache(case)
    for case in (
        *(mlp, square, convolutions, transformer, recurrent, scanned),
        *(named, experts, derivatives, lookups),
    )
}
every = pytest.mark.parametrize("name", ZOO)
