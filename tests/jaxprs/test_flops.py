"""The operations of a traced step, against those counted by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.jaxprs.flops import model_flops
from meshwright.jaxprs.names import Argument
from meshwright.planning.traced_graph import graph_of


def of(function: Any, *shapes: Any) -> float | None:
    return model_flops(jax.make_jaxpr(function)(*(jnp.ones(s) for s in shapes)))


def test_a_dense_net_takes_six_operations_per_weight_and_row_but_for_its_first_layer() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ params[0]) @ params[1])

    params = [jnp.ones([8, 16]), jnp.ones([16, 4])]
    traced = jax.make_jaxpr(jax.grad(loss))(params, jnp.ones([32, 8]))
    assert model_flops(traced) == 32 * (4 * 8 * 16 + 6 * 16 * 4)


def convolve(x: Any, filters: Any, stride: int = 1, groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x,
        filters,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_both_gradients_of_a_convolution_take_what_it_takes_itself(
    stride: int, groups: int
) -> None:
    def loss(x: Any, filters: Any) -> Any:
        return jnp.sum(convolve(x, filters, stride, groups))

    shapes = [2, 8, 8, 4], [3, 3, 4 // groups, 12]
    forward = 2 * (2 * (8 // stride) ** 2 * 12) * (3 * 3 * 4 // groups)
    assert of(loss, *shapes) == forward
    assert of(jax.grad(loss, argnums=(0, 1)), *shapes) in (2 * forward, 3 * forward)
    assert of(jax.value_and_grad(loss, argnums=(0, 1)), *shapes) == 3 * forward


def test_a_product_of_groups_multiplies_each_row_once_forward_and_in_both_gradients() -> None:
    def loss(rows: Any, weights: Any) -> Any:
        sizes = jnp.array([3, 0, 4, 1])
        return jnp.sum(jax.lax.ragged_dot(rows, weights, sizes) ** 2)

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(jnp.ones([8, 16]), jnp.ones([4, 16, 6]))
    assert model_flops(traced) == 3 * 2 * 8 * 16 * 6
    graph = graph_of(traced, [Argument("rows", "input"), Argument("weights")], 0)
    assert sum(operation.flops for operation in graph.operations) == model_flops(traced)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def several(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c @ c, None), x, length=5)[0]

    assert of(several, [4, 4]) == 5 * 2 * 4**3


@pytest.mark.parametrize("axes", [{"batch": 8}, {"batch": 4, "model": 2}])
def test_pieces_are_counted_together_and_axes_left_to_the_compiler_make_none(axes) -> None:
    mesh = mw.create_mesh(axes)
    rows = jax.sharding.PartitionSpec("batch")
    product = jax.shard_map(
        lambda x, w: x @ w,
        mesh=mesh.jax_mesh,
        in_specs=(rows, jax.sharding.PartitionSpec()),
        out_specs=rows,
        axis_names={"batch"},
    )
    assert of(jax.jit(product), [16, 4], [4, 4]) == 2 * 16 * 4 * 4


def test_of_branches_the_longest_counts() -> None:
    def either(x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda a: a @ a @ a, lambda a: a @ a, x)

    assert of(either, [4, 4]) == 4 * 4**3


def test_a_loop_that_ends_by_a_condition_is_not_guessed() -> None:
    def until(x: Any) -> Any:
        return jax.lax.while_loop(lambda a: a[0, 0] < 9, lambda a: a @ a, x)

    assert of(until, [4, 4]) is None
    counted = jax.make_jaxpr(lambda: jax.lax.while_loop(lambda i: i < 9, lambda i: i + 1, 0))()
    assert model_flops(counted) == 0


def test_what_is_no_product_is_left_out() -> None:
    assert of(lambda x: jnp.exp(x) + np.pi, [64, 64]) == 0
