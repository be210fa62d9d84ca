"""Dims inferred from a step: XLA's partitioner, the paper and the FLOPs of its trace are asked."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from keras import layers
from models import shapes
from volumes import communication

import meshwright as mw
import meshwright.named as mn
from meshwright.frontends.keras.abstract import abstract
from meshwright.hlo.collectives import read_collectives
from meshwright.jaxprs.flops import model_flops
from meshwright.jaxprs.names import Argument
from meshwright.planning import traced_graph as tracing
from meshwright.planning.abstract_step import AbstractStep, abstract_step
from meshwright.planning.ahead import trace
from meshwright.planning.graph import Graph
from meshwright.planning.traced_graph import graph_of, graph_of_step, unknown_kinds
from meshwright.targets.target import Target

_QUICKLY = {"xla_backend_optimization_level": 0}  # LLVM's, after the partitioner
ONE = mw.Mesh({"batch": 1})


class Case(NamedTuple):
    """A step, what its arguments are, and its graph."""

    jaxpr: Any
    arguments: list[Argument]
    carried: int
    graph: Graph


def of_jax(loss, params, *batch, wanted=jax.grad) -> Case:
    """A step of SGD with momentum."""

    def step(state, *batch):
        weights, momentum = state
        gradients = wanted(loss)(weights, *batch)
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
        said = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(said, labels[..., None], -1))

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

    def backwards(kept, gradient):
        x, kernel, y = kept
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
        found = params["table"][rows]
        added = jnp.zeros([20, 8]).at[places].add(found * params["scale"])
        best = lax.top_k(added, 4)[0]
        some = lax.dynamic_slice_in_dim(params["table"], places[0], 8, 0)
        both = jnp.concatenate([some, some], 0) * jnp.sort(found, axis=1)
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


# Any step


@every
def test_no_operation_is_lost(name):
    case = ZOO[name]()
    counted = sum(each.flops * each.times for each in case.graph.operations)
    assert counted == model_flops(case.jaxpr)
    assert name == "lookups" or counted > 0
    assert not unknown_kinds(case.graph)


@every
def test_a_dim_divides_each_array_that_lies_along_it_and_comes_once(name):
    graph = ZOO[name]().graph
    for tensor in graph.tensors:
        assert len(tensor.dims) == len(tensor.shape)
        found = [dim for dim in tensor.dims if dim is not None]
        assert len(set(found)) == len(found)
        for dim, size in zip(tensor.dims, tensor.shape, strict=True):
            assert dim is None or (graph.dims[dim].size > 1 and size % graph.dims[dim].size == 0)


@every
def test_arrays_of_one_operation_agree_on_the_sizes_of_dims(name):
    """A dim that is whole in an array of one operand and merged in another would be a false join;
    only reshapes, and what they are read by, have a dim as the slower part of a larger one."""
    graph = ZOO[name]().graph
    for each in graph.operations:
        if each.kind in ("dot_general", "add", "mul", "sub", "add_any", "transpose"):
            sizes: dict[int, set[int]] = {}
            for place in (*each.operands, *each.results):
                tensor = graph.tensors[place]
                for dim, size in zip(tensor.dims, tensor.shape, strict=True):
                    if dim is not None:
                        sizes.setdefault(dim, set()).add(size)
            assert all(len(found) == 1 for found in sizes.values()), each


@every
def test_names_are_unique_and_the_same_each_time(name):
    jaxpr, arguments, carried, graph = ZOO[name]()
    assert len({dim.name for dim in graph.dims}) == len(graph.dims)
    assert graph_of(jaxpr, arguments, carried) == graph
    for tensor in graph.tensors:  # of one family and size lie alike, so no array has two
        found = [graph.dims[dim] for dim in tensor.dims if dim is not None]
        assert len({(dim.family, dim.size) for dim in found}) == len(found)


@every
def test_arguments_are_arrays_in_order(name):
    case = ZOO[name]()
    roles = [each.role for each in case.graph.tensors if each.role != "activation"]
    shapes_of = [tuple(v.aval.shape) for v in case.jaxpr.jaxpr.invars]
    kept = [each for each in shapes_of if math.prod(each) > 1]
    assert [each.shape for each in case.graph.tensors][: len(kept)] == kept
    assert len(roles) == len(kept)
    assert case.graph.dims[case.graph.tensors[roles.index("input")].dims[0] or 0].name == "batch"


# The law: what the graph says is what XLA does


def found_by_xla(case: Case, axes: Mapping[str, int], lies: Mapping[str, str]) -> Any:
    """Collectives of more than a number, where arguments lie along axes as their dims do."""
    graph, jaxpr = case.graph, case.jaxpr
    mesh = mw.create_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
    known = {each.path: each for each in graph.tensors if each.role != "activation"}

    def sharding(argument: Argument) -> NamedSharding:
        dims = known[argument.path].dims if argument.path in known else ()
        along = [None if dim is None else lies.get(graph.dims[dim].name) for dim in dims]
        return NamedSharding(mesh.jax_mesh, PartitionSpec(*along))

    ins = [sharding(each) for each in case.arguments]
    outs = [*ins[: case.carried], *[None] * (len(jaxpr.out_avals) - case.carried)]
    given = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=each)
        for aval, each in zip(jaxpr.in_avals, ins, strict=True)
    ]
    jitted = jax.jit(jaxpr_as_fun(jaxpr), in_shardings=ins, out_shardings=outs)
    text = jitted.lower(*given).compile(_QUICKLY).as_text()
    assert text is not None
    return [
        each
        for each in read_collectives(text, tuple(axes.items()))
        if any(array.elements > 1 for array in each.arrays)
    ]


def moved_by_xla(case: Case, axes: Mapping[str, int], lies: Mapping[str, str]) -> Counter[Any]:
    """Elements by kind and axis."""
    moved: Counter[Any] = Counter()
    for each in found_by_xla(case, axes, lies):
        elements = sum(array.elements for array in each.arrays if array.elements > 1)
        moved[each.kind, *each.axes] += elements * (each.count or 1)
    return moved


def sums(case: Case, axes: Mapping[str, int], lies: Mapping[str, str]) -> Counter[Any]:
    """The same of the graph, which must sum and nothing else."""
    said: Counter[Any] = Counter()
    for each in communication(case.graph, axes, lies):
        assert each.kind == "sum"
        said["all-reduce", each.axis] += each.elements * each.times
    return said


ROWS, IO, HIDDEN = 64, 16, 32  # the check point of shared tables: 8 processors
CLOSED = {  # elements summed over each axis in one processor, forwards and backwards with dL/dx
    "data parallel": ({"all": 8}, {"batch": "all"}, {"all": 2 * IO * HIDDEN}),
    "model parallel": ({"all": 8}, {"hidden": "all"}, {"all": 2 * ROWS * IO}),
    "2-D": (
        {"rows": 4, "cols": 2},
        {"batch": "rows", "hidden": "cols"},
        {"cols": 2 * ROWS * IO // 4, "rows": 2 * IO * HIDDEN // 2},
    ),
    "3-D": (
        {"rows": 2, "cols": 2, "planes": 2},
        {"batch": "rows", "hidden": "cols", "io": "planes"},
        {
            "planes": 2 * (ROWS // 2) * (HIDDEN // 2),
            "cols": 2 * (ROWS // 2) * (IO // 2),
            "rows": 2 * (IO // 2) * (HIDDEN // 2),
        },
    ),
}


@functools.cache
def two_layers() -> Case:
    """y = relu(x w) v with all its gradients, that of x included, as in the paper."""

    def loss(params, x):
        return jnp.sum((jax.nn.relu(x @ params["w"]) @ params["v"]) ** 2)

    def step(w, v, x):
        return jax.grad(loss, (0, 1))({"w": w, "v": v}, x)

    jaxpr = jax.make_jaxpr(step)(shapes(IO, HIDDEN), shapes(HIDDEN, IO), shapes(ROWS, IO))
    arguments = [
        Argument("w", names=("io", "hidden")),
        Argument("v", names=("hidden", "io")),
        Argument("x", "input", ("batch", "io")),
    ]
    return Case(jaxpr, arguments, 0, graph_of(jaxpr, arguments))


@pytest.mark.parametrize("layout", CLOSED)
def test_two_layers_move_what_the_paper_says(layout):
    """Shazeer et al. 2018, section 4, with constants: and XLA does so."""
    axes, lies, closed = CLOSED[layout]
    wanted = Counter({("all-reduce", axis): number for axis, number in closed.items()})
    assert sums(two_layers(), axes, lies) == wanted
    assert moved_by_xla(two_layers(), axes, lies) == wanted


def test_a_keras_model_moves_what_the_paper_says_and_its_names_are_its_layers():
    with abstract():
        model = keras.Sequential(
            [
                keras.Input([IO]),
                layers.Dense(HIDDEN, activation="relu", name="w"),
                layers.Dense(IO, use_bias=False, name="v"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    case = of_keras(model, shapes(ROWS, IO), shapes(ROWS, IO))
    names = {dim.name: dim.size for dim in case.graph.dims}
    assert names == {"batch": ROWS, "w.in": IO, "w.out": HIDDEN, "v.out": IO}
    for axes, lies, wanted in (
        ({"all": 8}, {"batch": "all"}, {"all": 2 * IO * HIDDEN + HIDDEN}),
        ({"all": 8}, {"w.out": "all"}, {"all": ROWS * IO}),  # dL/dx is not needed
    ):
        counted = Counter({("all-reduce", axis): number for axis, number in wanted.items()})
        assert sums(case, axes, lies) == counted
        assert moved_by_xla(case, axes, lies) == counted


EXACT = [  # the graph says sums alone, and XLA does the same, element for element
    ("mlp", "batch"),
    ("mlp", "bias.out"),
    ("mlp", "down.out"),
    ("named", "hidden"),
    ("named", "io"),
    ("named", "batch"),
    ("experts", "d_ff"),
    ("experts", "d_model"),
    ("experts", "batch"),
    ("square", "batch"),
    ("derivatives", "one.in"),
    ("scanned", "batch"),
    ("scanned", "layers/down.dim1"),
    ("transformer", "batch"),
]
EXACT_TOO = [
    ("transformer", "tokens.vocab"),
    ("transformer", "tokens.out"),
    ("transformer", "block_0_attention/query_dense.dim1"),
    ("transformer", "block_0_attention/query_dense.out"),
    ("transformer", "block_1_attention/value_dense.out"),
    ("transformer", "block_1_up.out"),
    ("transformer", "head.out"),
    ("scanned", "layers/down.out"),
    ("scanned", "layers/k.out"),
    ("convolutions", "first.in"),
    ("convolutions", "top.out"),
    ("recurrent", "batch"),
    ("recurrent", "words.vocab"),
    ("recurrent", "words.out"),
]


@pytest.mark.full_for("scanned-batch", "transformer-batch")
@pytest.mark.parametrize(
    ("name", "dim"),
    [*EXACT, *(pytest.param(*each, marks=pytest.mark.full) for each in EXACT_TOO)],
)
def test_xla_sums_exactly_what_the_graph_says(name, dim):
    axes, lies = {"axis": 2}, {dim: "axis"}
    wanted = sums(ZOO[name](), axes, lies)
    assert wanted
    assert moved_by_xla(ZOO[name](), axes, lies) == wanted


def test_a_window_as_large_as_the_image_is_split_with_it():
    """Each device sums over its piece of both, of the image with margins, and gathers neither."""
    case, axes = large_window(), {"axis": 2}
    dims = {each.path: each.dims for each in case.graph.tensors}
    image, window = dims["input/0"][1], dims["kernel"][0]
    assert image == window
    assert image is not None
    lies = {case.graph.dims[image].name: "axis"}
    moved = moved_by_xla(case, axes, lies)
    assert {kind for kind, _ in moved} == {"all-reduce", "collective-permute"}
    found = [each for each in communication(case.graph, axes, lies) if each.kind == "sum"]
    assert moved["all-reduce", "axis"] == sum(each.elements for each in found) == 8 * 3 * 3 * 4


def splittable(graph: Graph) -> list[str]:
    """Dims that two devices can share in all arrays that have them."""
    uneven = {
        dim
        for tensor in graph.tensors
        for dim, size in zip(tensor.dims, tensor.shape, strict=True)
        if dim is not None and size % 2
    }
    return [dim.name for i, dim in enumerate(graph.dims) if i not in uneven and dim.size % 2 == 0]


@pytest.mark.full
@every
def test_xla_moves_nothing_where_the_graph_says_so(name):
    """And sums no more than it says, whichever one dim is split."""
    case = ZOO[name]()
    for dim in splittable(case.graph):
        law_holds(case, dim)


def law_holds(case: Case, dim: str) -> None:
    said: Counter[str] = Counter()
    for each in communication(case.graph, {"axis": 2}, {dim: "axis"}):
        said[each.kind] += each.elements * each.times
    moved = moved_by_xla(case, {"axis": 2}, {dim: "axis"})
    assert said or not moved, dim
    kept_whole = said["gather"] or said["move"]  # XLA has other ways there, which it chooses
    assert kept_whole or moved.total() <= said["sum"], dim


def row_steps() -> list[Any]:
    """Functions of rows that need no other rows."""
    return [
        lambda x: jnp.where(x > 0, x, jnp.exp(x)).T.reshape(4, 6, 8).transpose(2, 0, 1),
        lambda x: jax.vmap(lambda row: jnp.sort(row) + jnp.cumsum(row))(x),
        lambda x: lax.scan(lambda c, row: (c + row, c * row), x[:, 0], x.T)[1].T,
        lambda x: lax.cond(x.shape[0] > 4, jnp.sin, jnp.cos, x) @ jnp.ones([24, 3]),
        lambda x: lax.fori_loop(0, 3, lambda i, c: c * c - x, x),
        lambda x: jax.nn.softmax(x.reshape(8, 4, 6), axis=-1).reshape(8, 24),
        lambda x: jnp.einsum("bk,bl->bkl", x, x)[:, 0],
        lambda x: jnp.pad(x, ((0, 0), (1, 2)))[:, ::2],
        lambda x: jnp.concatenate([x, lax.rev(x, (1,))], 1),
        lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 2), "SAME"),
        lambda x: x - jnp.argmax(x, axis=1, keepdims=True),
    ]


@pytest.mark.parametrize("number", range(len(row_steps())))
def test_rows_that_need_no_others_are_split_for_nothing(number):
    function = row_steps()[number]
    jaxpr = jax.make_jaxpr(function)(shapes(8, 24))
    case = Case(jaxpr, [Argument("x", "input")], 0, graph_of(jaxpr, [Argument("x", "input")]))
    assert not unknown_kinds(case.graph)
    axes, lies = {"axis": 2}, {"batch": "axis"}
    assert not communication(case.graph, axes, lies)
    assert not found_by_xla(case, axes, lies)


# Unforeseen programs


def matched(a: Any, b: Any) -> Any:
    """A product over the last dim of the first and the first dim of the second, if they fit."""
    return jnp.tensordot(a, b, 1) if a.ndim and b.ndim and a.shape[-1] == b.shape[0] else a * 2.0


STEPS = {
    "product": matched,
    "turned product": lambda a, b: matched(a, b.T),
    "sum": lambda a, b: a + b if a.shape == b.shape else a - 1.0,
    "turned sum": lambda a, b: a + b.T if a.shape == b.shape[::-1] else a.T,
    "outer": lambda a, b: a[:, None, None] * b if a.ndim == 1 and b.ndim == 2 else jnp.tanh(a),
    "total": lambda a, b: jnp.sum(a, 0) if a.ndim > 1 else a,
    "mean": lambda a, b: a - jnp.mean(a, -1, keepdims=True),
    "weights": lambda a, b: jax.nn.softmax(a, axis=0),
    "merged": lambda a, b: a.reshape(-1, a.shape[-1]) if a.ndim > 2 else a.reshape(-1),
    "split": lambda a, b: a.reshape(2, -1, *a.shape[1:]) if a.ndim < 3 else a,
    "part": lambda a, b: a[: a.shape[0] // 2] if a.shape[0] > 2 else a,
    "twice": lambda a, b: jnp.concatenate([a, a]) if a.size < 512 else a,
    "running": lambda a, b: jnp.cumsum(a, axis=0),
    "picked": lambda a, b: a[jnp.argmax(b.reshape(b.shape[0], -1), 1) % a.shape[0]],
    "looped": lambda a, b: lax.scan(lambda c, row: (c + row, c * row), a[0], a)[1],
}
programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=2,
    max_size=6,
)


def of_program(steps: list[tuple[str, int, int]]) -> Case:
    def loss(params, x):
        values = [x, *params]
        for name, one, two in steps:
            made = STEPS[name](values[one % len(values)], values[two % len(values)])
            values.append(made if made.ndim else made[None])
        return sum(jnp.sum(jnp.sin(value) ** 2) for value in values[3:])

    return of_jax(loss, [shapes(8, 8), shapes(8, 4)], shapes(16, 8))


@pytest.mark.full
@settings(max_examples=40, deadline=None, derandomize=True)
@given(programs, st.integers(0, 99))
def test_xla_does_what_the_graph_says_of_any_program(steps, which):
    case = of_program(steps)
    assert not unknown_kinds(case.graph)
    names = splittable(case.graph)
    law_holds(case, names[which % len(names)])


# Which dims are one


def dims_of(graph: Graph, path: str) -> list[str | None]:
    tensor = next(each for each in graph.tensors if each.path == path)
    return [None if dim is None else graph.dims[dim].name for dim in tensor.dims]


def test_a_transformer_has_the_dims_that_people_give_it():
    graph = ZOO["transformer"]().graph
    for block in range(2):
        name = f"block_{block}"
        up, down = f"{name}_up.out", "tokens.out"
        assert dims_of(graph, f"{name}_up/kernel") == ["tokens.out", up]
        assert dims_of(graph, f"{name}_down/kernel") == [up, down]
        heads, key, value = (
            f"{name}_attention/query_dense.dim1",
            f"{name}_attention/query_dense.out",
            f"{name}_attention/value_dense.out",
        )
        of = f"{name}_attention"
        assert dims_of(graph, f"{of}/query_dense/kernel") == ["tokens.out", heads, key]
        assert dims_of(graph, f"{of}/key_dense/kernel") == ["tokens.out", heads, key]
        assert dims_of(graph, f"{of}/output_dense/kernel") == [heads, value, "tokens.out"]
        slots = [e for e in graph.tensors if e.path.endswith(f"{of}/output_dense/kernel/momentum")]
        assert dims_of(graph, slots[0].path) == [heads, value, "tokens.out"]
    assert dims_of(graph, "head/kernel") == ["tokens.out", "head.out"]
    assert dims_of(graph, "input/0") == ["batch", "input/0.dim1"]
    families = Counter(dim.family for dim in graph.dims)
    assert families["block_up.out"] == families["block_attention/query_dense.dim1"] == 2
    assert len(graph.dims) == 15


def test_queries_and_keys_have_lengths_of_their_own():
    graph = ZOO["transformer"]().graph
    product = next(
        each
        for each in graph.operations
        if each.kind == "dot_general" and graph.tensors[each.results[0]].shape == (8, 4, 16, 16)
    )
    (joint,) = product.joints
    moved = graph.tensors[joint.tensor]
    assert moved.shape == (8, 16, 4, 8)
    assert graph.dims[joint.source].name == "input/0.dim1"
    rows, heads, queries, keys = graph.tensors[product.results[0]].dims
    assert joint.target in (queries, keys)
    assert joint.source in (queries, keys)
    assert None not in (rows, heads)


def test_both_dims_of_a_square_kernel_stay_apart():
    graph = ZOO["square"]().graph
    assert dims_of(graph, "0") == ["0.in", "0.out"]
    assert dims_of(graph, "1") == ["0.in", "1.out"]
    added = [each for each in graph.operations if each.kind == "add" and each.joints]
    joints = [joint for each in added for joint in each.joints]
    moved = [(graph.dims[j.source].name, graph.dims[j.target].name) for j in joints]
    assert moved[:2] == [("0.out", "0.in"), ("1.out", "0.in")]


def test_names_of_an_author_win_and_equal_ones_are_one_dim():
    graph = ZOO["experts"]().graph
    assert dims_of(graph, "up") == ["experts", "d_model", "d_ff"]
    assert dims_of(graph, "down") == ["experts", "d_ff", "d_model"]
    assert [dim.name for dim in ZOO["named"]().graph.dims] == ["hidden", "io", "batch"]


def test_layers_that_are_scanned_are_followed_once_and_counted_often():
    graph = ZOO["scanned"]().graph
    inside = [each for each in graph.operations if each.times == 3]
    assert any(each.flops for each in inside)
    assert dims_of(graph, "layers/up") == ["layers/down.in", "layers/down.out", "layers/down.dim1"]
    read = [each for each in graph.operations if each.kind == "scan" and each.whole]
    assert {graph.dims[dim].name for each in read for dim in each.whole} == {"layers/down.in"}


def one(function, *args, names=None) -> Graph:
    jaxpr = jax.make_jaxpr(function)(*args)
    return graph_of(jaxpr, [Argument(f"arg{i}", "input") for i, _ in enumerate(args)])


def labels(graph: Graph, place: int) -> list[str | None]:
    dims = graph.tensors[graph.operations[-1].results[place]].dims
    return [None if dim is None else graph.dims[dim].name for dim in dims]


def test_the_slowest_of_merged_dims_carries_on_and_a_reshape_can_be_undone():
    merged = one(lambda x: x.reshape(6, 8).reshape(48), shapes(2, 3, 8))
    assert labels(merged, 0) == ["batch"]
    assert [[merged.dims[d].name for d in each.whole] for each in merged.operations] == [
        ["arg0.dim1"],
        ["arg0.dim2"],
    ]
    undone = one(lambda x: x.reshape(48).reshape(2, 3, 8), shapes(2, 3, 8))
    assert labels(undone, 0) == ["batch", "arg0.dim1", "arg0.dim2"]
    split = one(lambda x: x.reshape(5, 4, 6), shapes(5, 24))
    assert [dim.size for dim in split.dims] == [5, 4, 6]
    assert split.tensors[0].dims == (0, 1)
    apart = one(lambda x: x.reshape(4, 6), shapes(6, 4))  # no factor of either is one of the other
    assert set(apart.operations[0].whole) == set(apart.tensors[0].dims)


def test_the_best_of_rows_are_gathered_as_xla_does():
    jaxpr = jax.make_jaxpr(lambda x: lax.top_k(x, 3))(shapes(8, 24))
    arguments = [Argument("x", "input")]
    case = Case(jaxpr, arguments, 0, graph_of(jaxpr, arguments))
    (said,) = communication(case.graph, {"axis": 2}, {"batch": "axis"})
    assert (said.kind, said.elements) == ("gather", 8 * 24)
    assert moved_by_xla(case, {"axis": 2}, {"batch": "axis"}) == {("all-gather", "axis"): 8 * 24}


def test_an_unknown_operation_joins_nothing_and_is_done_whole():
    graph = one(lambda x: lax.approx_max_k(x, 4)[0] * 2.0, shapes(8, 4, 4))
    assert unknown_kinds(graph) == ("approx_top_k",)
    unknown = next(each for each in graph.operations if each.kind == "approx_top_k")
    assert set(unknown.whole) == set(graph.tensors[unknown.operands[0]].dims)
    given, made = (set(graph.tensors[t].dims) for t in (unknown.operands[0], unknown.results[0]))
    assert given.isdisjoint(made)


def test_loops_and_branches_join_what_they_carry():
    def looped(x, y):
        return lax.while_loop(lambda c: jnp.sum(c[0]) < 9, lambda c: (c[1] + 1, c[0] * 2), (x, y))

    graph = one(looped, shapes(8, 4), shapes(8, 4))
    assert graph.tensors[0].dims == graph.tensors[1].dims
    turned = one(lambda x: lax.fori_loop(0, 5, lambda i, c: 2 * c.T, x), shapes(8, 8))
    assert len(turned.dims) == 2
    moved = turned.operations[-1]
    assert moved.kind == "scan"
    assert moved.joints
    assert turned.tensors[moved.results[0]].dims == turned.tensors[0].dims

    def branched(which, x, w):
        return lax.cond(which, lambda: x @ w, lambda: x + 1.0)

    graph = one(branched, shapes(dtype="bool"), shapes(8, 4), shapes(4, 4))
    assert sum(each.flops for each in graph.operations) == 2 * 8 * 4 * 4
    assert any(each.joints for each in graph.operations)  # 4 that is summed and 4 that is kept


def test_what_depends_on_no_argument_ties_nothing_together():
    def both(x, y):
        zeros = jnp.zeros([8, 8])
        return x + zeros, (y + zeros).T

    graph = one(both, shapes(8, 8), shapes(8, 8))
    assert not set(graph.tensors[0].dims) & set(graph.tensors[1].dims)


def test_a_custom_derivative_and_recomputation_are_looked_into():
    def layer(x, w):
        return jax.nn.relu(jax.checkpoint(jax.nn.silu)(x @ w))

    graph = one(jax.jit(layer), shapes(8, 4), shapes(4, 6))
    assert not unknown_kinds(graph)
    assert labels(graph, 0) == ["batch", "arg1.dim1"]


# Bad input, and a large model


def test_arguments_are_counted():
    jaxpr = jax.make_jaxpr(jnp.add)(1.0, 2.0)
    with pytest.raises(mw.ModelError, match="has 2 arrays as arguments and 1 are described"):
        graph_of(jaxpr, [Argument("x")])


def test_a_step_that_is_laid_out_already_is_refused():
    model = keras.Sequential([keras.Input([4]), layers.Dense(2)])
    model.compile("sgd", "mse")
    strategy = mw.Sharded(mw.Mesh({"batch": 8}))
    described = abstract_step(model, (shapes(8, 4), shapes(8, 2)), strategy)
    with pytest.raises(mw.MeshError, match=r"over 8 \(batch=8\).*axes all have size 1"):
        graph_of_step(described)


@pytest.mark.full
def test_a_model_of_the_size_of_gpt_2_takes_seconds(monkeypatch):
    with abstract():
        model = transformer_model(blocks=24, width=2304, heads=24, length=1024, vocab=50257)
    assert model.count_params() > 1.5e9
    tokens = shapes(8, 1024, dtype="int32")
    strategy = mw.Sharded(ONE, {}, unmatched="replicate")
    described = abstract_step(model, (tokens, tokens), strategy)
    traced = trace(described.train, (described.state, described.batch), Target.of("cpu:1"))
    monkeypatch.setattr(tracing, "trace", lambda *_: traced)  # its time is not ours
    begun = time.process_time()
    graph = graph_of_step(described)
    assert time.process_time() - begun < 5
    assert len({(dim.family, dim.size) for dim in graph.dims}) < 12
