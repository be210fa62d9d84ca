"""Dims inferred from a step: which dims are one, and what they are called."""

from __future__ import annotations

import math
import time
from collections import Counter

import jax
import jax.numpy as jnp
import keras
import pytest
from jax import lax
from keras import layers
from models import shapes
from traced_cases import ONE, ZOO, every, transformer_model

import meshwright as mw
from meshwright.frontends.keras.abstract import abstract
from meshwright.jaxprs.flops import model_flops
from meshwright.jaxprs.names import Argument
from meshwright.planning import traced_graph as tracing
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.ahead import trace
from meshwright.planning.graph import Graph
from meshwright.planning.traced_graph import graph_of, graph_of_step, unknown_kinds
from meshwright.targets.target import Target

# Any step


@every
def test_no_operation_is_lost(name):
    case = ZOO[name]()
    counted = sum(operation.flops * operation.times for operation in case.graph.operations)
    assert counted == model_flops(case.jaxpr)
    assert name == "lookups" or counted > 0
    assert not unknown_kinds(case.graph)


@every
def test_a_dim_divides_each_array_that_lies_along_it_and_comes_once(name):
    graph = ZOO[name]().graph
    for tensor in graph.tensors:
        assert len(tensor.dims) == len(tensor.shape)
        results = [dim for dim in tensor.dims if dim is not None]
        assert len(set(results)) == len(results)
        for dim, size in zip(tensor.dims, tensor.shape, strict=True):
            assert dim is None or (graph.dims[dim].size > 1 and size % graph.dims[dim].size == 0)


@every
def test_arrays_of_one_operation_agree_on_the_sizes_of_dims(name):
    """A dim that is whole in an array of one operand and merged in another would be a false join;
    only reshapes, and what they are read by, have a dim as the slower part of a larger one."""
    graph = ZOO[name]().graph
    for operation in graph.operations:
        if operation.kind in ("dot_general", "add", "mul", "sub", "add_any", "transpose"):
            sizes: dict[int, set[int]] = {}
            for place in (*operation.operands, *operation.results):
                tensor = graph.tensors[place]
                for dim, size in zip(tensor.dims, tensor.shape, strict=True):
                    if dim is not None:
                        sizes.setdefault(dim, set()).add(size)
            assert all(len(result) == 1 for result in sizes.values()), operation


@every
def test_names_are_unique_and_the_same_each_time(name):
    jaxpr, arguments, carried, graph = ZOO[name]()
    assert len({dim.name for dim in graph.dims}) == len(graph.dims)
    assert graph_of(jaxpr, arguments, carried) == graph
    for tensor in graph.tensors:  # of one family and size lie alike, so no array has two
        results = [graph.dims[dim] for dim in tensor.dims if dim is not None]
        assert len({(dim.family, dim.size) for dim in results}) == len(results)


@every
def test_arguments_are_arrays_in_order(name):
    case = ZOO[name]()
    roles = [tensor.role for tensor in case.graph.tensors if tensor.role != "activation"]
    shapes_of = [tuple(v.aval.shape) for v in case.jaxpr.jaxpr.invars]
    large = [shape for shape in shapes_of if math.prod(shape) > 1]
    assert [tensor.shape for tensor in case.graph.tensors][: len(large)] == large
    assert len(roles) == len(large)
    assert case.graph.dims[case.graph.tensors[roles.index("input")].dims[0] or 0].name == "batch"


# Which dims are one


def dims_of(graph: Graph, path: str) -> list[str | None]:
    tensor = next(tensor for tensor in graph.tensors if tensor.path == path)
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
        operation
        for operation in graph.operations
        if operation.kind == "dot_general"
        and graph.tensors[operation.results[0]].shape == (8, 4, 16, 16)
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
    added = [
        operation for operation in graph.operations if operation.kind == "add" and operation.joints
    ]
    joints = [joint for operation in added for joint in operation.joints]
    moved = [(graph.dims[j.source].name, graph.dims[j.target].name) for j in joints]
    assert moved[:2] == [("0.out", "0.in"), ("1.out", "0.in")]


def test_names_of_an_author_win_and_equal_ones_are_one_dim():
    graph = ZOO["experts"]().graph
    assert dims_of(graph, "up") == ["experts", "d_model", "d_ff"]
    assert dims_of(graph, "down") == ["experts", "d_ff", "d_model"]
    assert [dim.name for dim in ZOO["named"]().graph.dims] == ["hidden", "io", "batch"]


def test_layers_that_are_scanned_are_followed_once_and_counted_often():
    graph = ZOO["scanned"]().graph
    inside = [operation for operation in graph.operations if operation.times == 3]
    assert any(operation.flops for operation in inside)
    assert dims_of(graph, "layers/up") == ["layers/down.in", "layers/down.out", "layers/down.dim1"]
    read = [
        operation for operation in graph.operations if operation.kind == "scan" and operation.whole
    ]
    assert {graph.dims[dim].name for operation in read for dim in operation.whole} == {
        "layers/down.in"
    }


def one(function, *args, names=None) -> Graph:
    jaxpr = jax.make_jaxpr(function)(*args)
    return graph_of(jaxpr, [Argument(f"arg{i}", "input") for i, _ in enumerate(args)])


def labels(graph: Graph, place: int) -> list[str | None]:
    dims = graph.tensors[graph.operations[-1].results[place]].dims
    return [None if dim is None else graph.dims[dim].name for dim in dims]


def test_the_slowest_of_merged_dims_carries_on_and_a_reshape_can_be_undone():
    merged = one(lambda x: x.reshape(6, 8).reshape(48), shapes(2, 3, 8))
    assert labels(merged, 0) == ["batch"]
    assert [[merged.dims[d].name for d in operation.whole] for operation in merged.operations] == [
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


def test_an_unknown_operation_joins_nothing_and_is_done_whole():
    graph = one(lambda x: lax.approx_max_k(x, 4)[0] * 2.0, shapes(8, 4, 4))
    assert unknown_kinds(graph) == ("approx_top_k",)
    unknown = next(operation for operation in graph.operations if operation.kind == "approx_top_k")
    assert set(unknown.whole) == set(graph.tensors[unknown.operands[0]].dims)
    operand, result = (
        set(graph.tensors[t].dims) for t in (unknown.operands[0], unknown.results[0])
    )
    assert operand.isdisjoint(result)


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
    assert sum(operation.flops for operation in graph.operations) == 2 * 8 * 4 * 4
    assert any(
        operation.joints for operation in graph.operations
    )  # 4 that is summed and 4 that is kept


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
