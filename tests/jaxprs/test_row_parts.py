"""Gradients in parts: the same numbers, and one sum over the devices for all micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

import meshwright as mw
from meshwright.hlo.collectives import read_collectives
from meshwright.jaxprs.row_parts import Gathered, Pieces, in_parts, sum_parts
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.ahead import compile_abstract
from meshwright.step.accumulate import Way, accumulating_in
from meshwright.step.gradient import summed_in

ROWS = 16
MESHES = {
    "batch": (mw.create_mesh({"batch": 8}), ("batch",)),
    "batch and model": (mw.create_mesh({"batch": 4, "model": 2}), ("batch",)),
    "two axes of rows": (mw.create_mesh({"slow": 2, "fast": 4}), ("slow", "fast")),
}


def normal(*dims: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(dims)).normal(size=dims), "float32")


def convolution(groups: int) -> Callable[[Any, Any], Any]:
    def convolve(x: Any, w: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (2, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    return convolve


IMAGES = normal(ROWS, 6, 6, 4)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 9, [ROWS, 3]))
CASES: dict[str, tuple[Callable[[Any, Any], Any], Any, Any]] = {
    "dense": (lambda x, w: x @ w, normal(ROWS, 5), normal(5, 4)),
    "dense on sequences": (lambda x, w: x @ w, normal(ROWS, 3, 5), normal(5, 4)),
    "bias": (lambda x, w: x + w, normal(ROWS, 3, 5), normal(5)),
    "scalar": (lambda x, w: x * w, normal(ROWS, 3), normal()),
    "convolution": (convolution(1), IMAGES, normal(3, 3, 4, 8)),
    "depthwise": (convolution(4), IMAGES, normal(3, 3, 1, 8)),
    "lookup": (lambda x, w: jnp.take(w, x, axis=0), TOKENS, normal(9, 4)),
    "narrow": (
        lambda x, w: x.astype("bfloat16") @ w.astype("bfloat16"),
        normal(ROWS, 5),
        normal(5, 4),
    ),
}


def gradient_of(case: str) -> tuple[Callable[..., Any], Any, Any]:
    function, x, w = CASES[case]

    def gradient(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.sin(function(x, w)).astype("float32"))

        value, grad = jax.value_and_grad(loss)(w)
        return value, {"w": grad}

    return gradient, w, x


@pytest.mark.full_for("kept-narrow-batch and model")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "recomputed"])
def test_parts_add_up_to_the_gradient(case: str, mesh: str, remat: bool) -> None:
    gradient, w, x = gradient_of(case)
    (on, axes) = MESHES[mesh]
    pieces = Pieces(on.jax_mesh, axes, ROWS)
    rows = jax.sharding.PartitionSpec(axes)
    laid = jax.device_put(x, jax.sharding.NamedSharding(on.jax_mesh, rows))
    whole = jax.device_put(w, jax.sharding.NamedSharding(on.jax_mesh, jax.sharding.PartitionSpec()))

    def taken(w: Any, x: Any) -> Any:
        if not remat:
            return gradient(w, x)
        value, back = jax.vjp(jax.checkpoint(lambda w: gradient_loss(case, w, x)), w)
        return value, {"w": back(jnp.ones_like(value))[0]}

    value, parts = jax.jit(in_parts(taken, pieces))(whole, laid)
    expected, grads = gradient(w, x)
    assert parts["w"].shape == (pieces.number, *w.shape)
    assert parts["w"].sharding.shard_shape(parts["w"].shape) == (1, *w.shape)
    tolerance = 1e-2 if case == "narrow" else 1e-5
    np.testing.assert_allclose(value, expected, rtol=tolerance)
    result = sum_parts(parts["w"], w.ndim)
    np.testing.assert_allclose(result, grads["w"], rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("sums", [None, "float32"])
def test_narrow_parts_are_left_in_the_type_they_are_computed_in(sums: str | None) -> None:
    gradient, w, x = gradient_of("narrow")
    mesh, axes = MESHES["batch"]
    taken = gradient if sums is None else summed_in(gradient, sums)
    result = in_parts(taken, Pieces(mesh.jax_mesh, axes, ROWS, narrow=True))(w, x)[1]["w"]
    assert result.dtype == (sums or "bfloat16")
    expected = gradient(w, x)[1]["w"]
    np.testing.assert_allclose(result.astype("float32").sum(0), expected, rtol=1e-2, atol=1e-3)


def test_what_is_computed_after_a_widening_is_computed_wide() -> None:
    """Ones of which 8 bits hold 256 at most."""
    mesh, axes = MESHES["batch"]
    x = jnp.ones([ROWS, 2, 300], "bfloat16")

    def function(x: Any) -> Any:
        return (), {"sum": x.sum(0, dtype="bfloat16").astype("float32").sum(1)}

    result = in_parts(function, Pieces(mesh.jax_mesh, axes, ROWS, narrow=True))(x)[1]["sum"]
    assert result.dtype == "float32"
    assert result.sum(0).tolist() == [300 * ROWS] * 2


def gradient_loss(case: str, w: Any, x: Any) -> Any:
    return jnp.mean(jnp.sin(CASES[case][0](x, w)).astype("float32"))


def test_what_is_no_sum_over_rows_comes_back_as_it_is() -> None:
    mesh, axes = MESHES["batch"]
    pieces = Pieces(mesh.jax_mesh, axes, ROWS)

    def function(w: Any, x: Any) -> Any:
        shared = x.T @ x  # is used twice, so its parts would have to be too
        return jnp.sum(shared), {"shared": shared, "scan": jax.lax.scan(add, w, x)[0], "none": w}

    def add(total: Any, row: Any) -> Any:
        return total + row, None

    args = normal(5), normal(ROWS, 5)
    result, expected = in_parts(function, pieces)(*args), function(*args)
    assert jax.tree.map(jnp.shape, result) == jax.tree.map(jnp.shape, expected)


def test_rows_that_do_not_divide_are_left_alone() -> None:
    mesh, axes = MESHES["batch"]
    gradient, *_ = gradient_of("dense")
    assert in_parts(gradient, Pieces(mesh.jax_mesh, axes, 12)) is gradient


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", ["dense", "dense on sequences", "lookup"])
def test_rows_may_be_kept_and_summed_together(case: str, mesh: str) -> None:
    """Where three batches of rows are smaller than the kernel."""
    function, _, _ = CASES[case]
    w = normal(300, 40)
    rng = np.random.default_rng(1)
    tokens = [jnp.asarray(rng.integers(0, 300, [ROWS, 3])) for _ in range(3)]
    x = (
        tokens
        if case == "lookup"
        else [normal(*([ROWS, 2, 300] if "sequences" in case else [ROWS, 300]))] * 3
    )
    on, axes = MESHES[mesh]
    pieces = Pieces(on.jax_mesh, axes, ROWS, times=3)

    def gradient(w: Any, x: Any) -> Any:
        return (), {"w": jax.grad(lambda w: jnp.sum(jnp.sin(function(x, w))))(w)}

    def total(w: Any, xs: Any) -> Any:
        gathered = Gathered()
        for x in xs:
            gathered = gathered.plus(in_parts(gradient, pieces)(w, x)[1]["w"])
        assert len(gathered.unsummed) == 3
        return sum(sum_parts(total, w.ndim) for total in gathered.totals())

    expected = sum(gradient(w, rows)[1]["w"] for rows in x)
    np.testing.assert_allclose(jax.jit(total)(w, x), expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_which_some_are_in_parts_are_added() -> None:
    whole, parts = normal(3), normal(8, 3)
    for gradients in ([whole, parts], [parts, whole], [parts, parts, whole, whole]):
        gathered = functools.reduce(Gathered.plus, gradients, Gathered())
        expected = sum(sum_parts(gradient, 1) for gradient in gradients)
        total = sum(sum_parts(gradient, 1) for gradient in gathered.totals())
        np.testing.assert_allclose(total, expected, rtol=1e-5)


def images() -> tuple[keras.Model, Any]:
    net = [layers.Conv2D(4, 3), layers.Flatten(), layers.Dropout(0.1), layers.Dense(10)]
    return keras.Sequential([keras.Input([8, 8, 1]), *net]), np.ones([ROWS, 8, 8, 1], "float32")


def words() -> tuple[keras.Model, Any]:
    net = [layers.Embedding(50, 8), layers.LayerNormalization(), layers.Flatten()]
    stack = [*net, layers.Dense(10, activation="tanh"), layers.Dense(10)]
    return keras.Sequential([keras.Input([6], dtype="int32"), *stack]), np.ones([ROWS, 6], "int32")


def reduced_elements(
    build: Callable[[], Any], accumulate: int, zero: int = 0, way: Way = "written out"
) -> tuple[int, int]:
    """All-reduced elements of one step, and elements of the parameters."""
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}), accumulate=accumulate, zero=zero)
    with strategy.scope():
        model, x = build()
        model.compile("sgd", "mse")
    batch = strategy.put((x, np.zeros([len(x), 10], "float32")))
    taken = (batch,) * accumulate if accumulate > 1 else batch
    step = jax.jit(strategy.train_step(model, (x, np.zeros([len(x), 10], "float32"))))
    with accumulating_in(way):
        text = step.lower(strategy.state(model), taken).compile().as_text()
    collectives = read_collectives(text, (("batch", 8),))
    total = sum(
        collective.elements * collective.count for collective in collectives if collective.reduces
    )
    return total, model.count_params()


@pytest.mark.full
@pytest.mark.parametrize("build", [images, words])
@pytest.mark.parametrize("zero", [0, 1])
def test_micro_batches_share_one_sum_over_the_devices(build: Callable[[], Any], zero: int) -> None:
    alone, parameters = reduced_elements(build, 1)
    together, _ = reduced_elements(build, 4, zero)
    assert parameters <= alone <= parameters + 4  # and a loss
    assert parameters <= together <= parameters + 16  # and four


def test_side_by_side_there_is_one_sum_too() -> None:
    together, parameters = reduced_elements(words, 4, zero=2, way="side by side")
    assert parameters <= together <= parameters + 16


@pytest.mark.full
def test_level_2_sums_each_micro_batch() -> None:
    """So the measure above can tell one sum from four."""
    together, parameters = reduced_elements(words, 4, zero=2)
    assert together > 3 * parameters


SPLITS = {
    "out": (64, [None, "model"]),
    "in": (64, ["model", None]),
    "of what does not divide": (65, [None, "model"]),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("zero", [1, 2])
def test_a_gradient_is_scattered_as_it_lies_along_other_axes(split: str, zero: int) -> None:
    """None is gathered along the axis that its variable is split over."""
    rows, specs = SPLITS[split]
    params = {"w": jnp.zeros([rows, 256])}
    program = mw.jax_program(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, optax.sgd(0.1))
    placement = mw.Placement.of(mw.Mesh({"batch": 2, "model": 4}), {"w": specs}, zero=zero)
    step = abstract_step(program, jax.ShapeDtypeStruct((ROWS, rows), "float32"), placement)
    large = [
        collective
        for collective in compile_abstract(step, "cpu:8").collectives
        if collective.elements > 2048
    ]
    results = {collective.kind: (collective.axes, collective.elements) for collective in large}
    assert results["reduce-scatter"] == (("batch",), rows * 256 // 4)
    assert results["all-gather"] == (("batch",), rows * 256 // 4)  # of the new value
    assert len(results) == len(large) == 2
