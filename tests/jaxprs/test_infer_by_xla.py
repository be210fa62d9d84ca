"""The communication that a graph predicts is what XLA's partitioner inserts."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from keras import layers
from models import shapes
from traced_cases import ZOO, Case, every, large_window, of_jax, of_keras
from volumes import communication

import meshwright as mw
from meshwright.frontends.keras.abstract import abstract
from meshwright.hlo.collectives import read_collectives
from meshwright.jaxprs.names import Argument
from meshwright.planning.graph import Graph
from meshwright.planning.traced_graph import graph_of, unknown_kinds

_QUICKLY = {"xla_backend_optimization_level": 0}  # LLVM's, after the partitioner


def found_by_xla(case: Case, axes: Mapping[str, int], lies: Mapping[str, str]) -> Any:
    """Collectives of more than a number, where arguments lie along axes as their dims do."""
    graph, jaxpr = case.graph, case.jaxpr
    mesh = mw.create_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
    known = {tensor.path: tensor for tensor in graph.tensors if tensor.role != "activation"}

    def sharding(argument: Argument) -> NamedSharding:
        dims = known[argument.path].dims if argument.path in known else ()
        along = [None if dim is None else lies.get(graph.dims[dim].name) for dim in dims]
        return NamedSharding(mesh.jax_mesh, PartitionSpec(*along))

    ins = [sharding(arg) for arg in case.arguments]
    outs = [*ins[: case.carried], *[None] * (len(jaxpr.out_avals) - case.carried)]
    avals = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place)
        for aval, place in zip(jaxpr.in_avals, ins, strict=True)
    ]
    jitted = jax.jit(jaxpr_as_fun(jaxpr), in_shardings=ins, out_shardings=outs)
    text = jitted.lower(*avals).compile(_QUICKLY).as_text()
    assert text is not None
    return [
        collective
        for collective in read_collectives(text, tuple(axes.items()))
        if any(array.elements > 1 for array in collective.arrays)
    ]


def moved_by_xla(case: Case, axes: Mapping[str, int], lies: Mapping[str, str]) -> Counter[Any]:
    """Elements by kind and axis."""
    traffic: Counter[Any] = Counter()
    for collective in found_by_xla(case, axes, lies):
        elements = sum(array.elements for array in collective.arrays if array.elements > 1)
        traffic[collective.kind, *collective.axes] += elements * (collective.count or 1)
    return traffic


def sums(case: Case, axes: Mapping[str, int], lies: Mapping[str, str]) -> Counter[Any]:
    """The same of the graph, which must sum and nothing else."""
    elements: Counter[Any] = Counter()
    for transfer in communication(case.graph, axes, lies):
        assert transfer.kind == "sum"
        elements["all-reduce", transfer.axis] += transfer.elements * transfer.times
    return elements


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
    expected = Counter({("all-reduce", axis): number for axis, number in closed.items()})
    assert sums(two_layers(), axes, lies) == expected
    assert moved_by_xla(two_layers(), axes, lies) == expected


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
    for axes, lies, expected in (
        ({"all": 8}, {"batch": "all"}, {"all": 2 * IO * HIDDEN + HIDDEN}),
        ({"all": 8}, {"w.out": "all"}, {"all": ROWS * IO}),  # dL/dx is not needed
    ):
        counted = Counter({("all-reduce", axis): number for axis, number in expected.items()})
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
    [*EXACT, *(pytest.param(*pair, marks=pytest.mark.full) for pair in EXACT_TOO)],
)
def test_xla_sums_exactly_what_the_graph_says(name, dim):
    axes, lies = {"axis": 2}, {dim: "axis"}
    expected = sums(ZOO[name](), axes, lies)
    assert expected
    assert moved_by_xla(ZOO[name](), axes, lies) == expected


def test_a_window_as_large_as_the_image_is_split_with_it():
    """Each device sums over its piece of both, of the image with margins, and gathers neither."""
    case, axes = large_window(), {"axis": 2}
    dims = {tensor.path: tensor.dims for tensor in case.graph.tensors}
    image, window = dims["input/0"][1], dims["kernel"][0]
    assert image == window
    assert image is not None
    lies = {case.graph.dims[image].name: "axis"}
    traffic = moved_by_xla(case, axes, lies)
    assert {kind for kind, _ in traffic} == {"all-reduce", "collective-permute"}
    results = [
        transfer for transfer in communication(case.graph, axes, lies) if transfer.kind == "sum"
    ]
    assert (
        traffic["all-reduce", "axis"]
        == sum(transfer.elements for transfer in results)
        == 8 * 3 * 3 * 4
    )


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
    elements: Counter[str] = Counter()
    for transfer in communication(case.graph, {"axis": 2}, {dim: "axis"}):
        elements[transfer.kind] += transfer.elements * transfer.times
    traffic = moved_by_xla(case, {"axis": 2}, {dim: "axis"})
    assert elements or not traffic, dim
    kept_whole = (
        elements["gather"] or elements["move"]
    )  # XLA has other ways there, which it chooses
    assert kept_whole or traffic.total() <= elements["sum"], dim


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


def test_the_best_of_rows_are_gathered_as_xla_does():
    jaxpr = jax.make_jaxpr(lambda x: lax.top_k(x, 3))(shapes(8, 24))
    arguments = [Argument("x", "input")]
    case = Case(jaxpr, arguments, 0, graph_of(jaxpr, arguments))
    (transfer,) = communication(case.graph, {"axis": 2}, {"batch": "axis"})
    assert (transfer.kind, transfer.elements) == ("gather", 8 * 24)
    assert moved_by_xla(case, {"axis": 2}, {"batch": "axis"}) == {("all-gather", "axis"): 8 * 24}


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
            output = STEPS[name](values[one % len(values)], values[two % len(values)])
            values.append(output if output.ndim else output[None])
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
