"""Gradients of named functions: of one's own, recomputed, reversed and clipped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from named_laws import USUAL, Case, check

import meshwright as mw
import meshwright.named as mn
from meshwright.named import gradients

X = "a:8 b:8 c:8"

cube = gradients.custom_gradient(
    lambda x, y: x * x * x + y,
    # The dims of the second come in another order than the input's.
    lambda inputs, result, g: (3 * inputs[0] * inputs[0] * g, mn.einsum([g], "c:8 a:8")),
)
halves = gradients.reversible([lambda w, x: mn.tanh(x * w)] * 3)


def stacked(x: mn.NamedArray, w: mn.NamedArray) -> Any:
    return halves([w, 2 * w, 3 * w], x, mn.sin(x))


def np_stacked(x: np.ndarray, w: np.ndarray) -> Any:
    x1, x2 = x, np.sin(x)
    for i in range(1, 4):
        x1, x2 = x2, x1 + np.tanh(x2 * (i * w))
    return x1, x2


CASES = [
    Case("custom_gradient", cube, lambda x, y: x**3 + y.T[:, None, :], [X, "c:8 a:8"],
         ("a", "b", "c"), slopes=(0, 1)),
    Case("remat", gradients.remat(lambda x: mn.sin(mn.exp(x))),
         lambda x: np.sin(np.exp(x)), [X], ("a", "b", "c")),
    Case("reversible", stacked, np_stacked, [X, X], ("a", "b", "c"), slopes=(0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)


def vector(*numbers: float) -> mn.NamedArray:
    return mn.named(jnp.array(numbers, jnp.float32), mn.Dim("io", len(numbers)))


# grad


def test_grad_takes_named_losses_and_numbers():
    x, w = vector(1, 2, 3), vector(1, -1, 1)
    named = lambda x, w: mn.einsum([x, x, w], "")  # noqa: E731
    assert gradients.grad(named)(x, w).array.tolist() == [2, -4, 6]
    assert gradients.grad(lambda x, w: named(x, w).array, 1)(x, w).array.tolist() == [1, 4, 9]
    value, (dx, dw) = gradients.value_and_grad(named, (0, 1))(x, w)
    assert (value.dims, float(value), dx.dims, dw.dims) == ((), 6, x.dims, w.dims)


def test_grad_with_more_results():
    f = lambda x: (mn.reduce_sum(x * x), {"mean": mn.reduce_mean(x)})  # noqa: E731
    dx, more = gradients.grad(f, has_aux=True)(vector(1, 2, 3))
    assert (dx.array.tolist(), float(more["mean"])) == ([2, 4, 6], 2)
    (value, more), dx = gradients.value_and_grad(f, has_aux=True)(vector(1, 2, 3))
    assert (float(value), float(more["mean"]), dx.array.tolist()) == (14, 2, [2, 4, 6])


def test_gradients_lie_as_what_they_belong_to():
    mesh = mw.create_mesh({"rows": 4, "cols": 2})
    x, w = np.ones([8, 4], "float32"), np.ones([4, 2], "float32")
    loss = lambda w, x: mn.reduce_mean(mn.einsum([x, w]))  # noqa: E731
    rules = mn.BoundRules(mn.DimRules("batch:rows;hidden:cols"), mesh)
    w, x = mn.named(w, "io:4 hidden:2"), mn.named(x, "batch:8 io:4")
    dw = jax.jit(lambda w, x: gradients.grad(loss)(w, x, rules=rules))(w, x)
    assert dw.array.sharding.is_equivalent_to(rules.layout(w.dims).sharding, 2)


def test_a_loss_with_dims_is_refused():
    with pytest.raises(mw.DimError, match=r"has dims \[io:2\]; a gradient is that of one number"):
        gradients.grad(mn.sin)(vector(1, 2))


# custom_gradient


def test_none_is_a_gradient_of_zero_and_inputs_may_be_trees():
    def backward(inputs: Any, result: Any, g: Any) -> Any:
        weights, _ = inputs
        assert result.dims == g.dims == weights["w"].dims
        return {"w": g * 7, "b": None}, None

    f = gradients.custom_gradient(lambda tree, n: tree["w"] * tree["b"] * n, backward)
    tree = {"w": vector(1, 2), "b": vector(3, 4)}
    n = mn.named(jnp.array([2, 2]), "io:2")
    gradient = jax.jit(gradients.grad(lambda tree: mn.reduce_sum(f(tree, n))))(tree)
    assert {name: x.array.tolist() for name, x in gradient.items()} == {"w": [7, 7], "b": [0, 0]}


def test_gradients_of_other_dims_are_refused():
    f = gradients.custom_gradient(
        lambda tree, y: tree["x"] + y,
        lambda inputs, result, g: ({"x": mn.reduce_sum(g)}, mn.named(g.array, "out:2")),
    )
    with pytest.raises(mw.DimError) as caught:
        gradients.grad(lambda x: mn.reduce_sum(f({"x": x}, vector(1, 2))))(vector(1, 2))
    assert str(caught.value).splitlines() == [
        "custom_gradient: input 0['x'] [io:2] has the gradient [].",
        "custom_gradient: input 1 [io:2] has the gradient [out:2].",
        "A gradient has the dims of its input.",
    ]


def test_too_few_gradients_are_refused():
    f = gradients.custom_gradient(mn.add, lambda inputs, result, g: g)
    with pytest.raises(mw.ModelError, match="returns 1 gradients for 2 inputs"):
        gradients.grad(lambda x: mn.reduce_sum(f(x, x)))(vector(1, 2))


# remat


def test_remat_keeps_what_the_policy_says():
    x = vector(1, 2)
    f = lambda x: mn.reduce_sum(mn.sin(mn.cos(mn.sin(x))))  # noqa: E731
    cosines = []
    for policy in ("everything_saveable", jax.checkpoint_policies.nothing_saveable):
        again = gradients.remat(f, policy)
        text = str(jax.make_jaxpr(gradients.grad(again))(x))
        cosines.append(text.count(" sin ") + text.count(" cos "))
        np.testing.assert_allclose(
            gradients.grad(again)(x).array, gradients.grad(f)(x).array, rtol=1e-6
        )
    assert cosines[0] < cosines[1]


@pytest.mark.parametrize("policy", ["nothing_savable", "save_only_these_names", "block", "none"])
def test_a_name_of_no_policy_is_refused(policy):
    with pytest.raises(
        mw.ModelError, match=f"unknown policy '{policy}': expected one of jax.checkpoint_policies"
    ):
        gradients.remat(mn.sin, policy)


# reversible


def test_reversible_memory_does_not_grow_with_depth():
    def block(w: mn.NamedArray, x: mn.NamedArray) -> mn.NamedArray:
        hidden = mn.gelu(mn.einsum([x, w]))
        return mn.einsum([hidden, w], "batch:8 io:64")

    def plain(params: Any, x1: mn.NamedArray, x2: mn.NamedArray) -> Any:
        for w in params:
            x1, x2 = x2, x1 + block(w, x2)
        return x1, x2

    def temporary_bytes(run: Any, depth: int) -> tuple[int, Any]:
        def loss(params: Any) -> mn.NamedArray:
            x1, x2 = run(params, x, x)
            return mn.reduce_sum(mn.sin(x1) + x2 * x2)

        compiled = jax.jit(gradients.grad(loss)).lower(params[:depth]).compile()
        grads = jax.tree.map(np.asarray, compiled(params[:depth]))
        return compiled.memory_analysis().temp_size_in_bytes, grads

    random = np.random.default_rng(0)
    x = mn.named(random.normal(size=(8, 64)).astype("float32"), "batch:8 io:64")
    params = [
        mn.named(random.normal(size=(64, 128)).astype("float32") / 32, "io:64 hidden:128")
        for _ in range(8)
    ]
    shallow, _ = temporary_bytes(gradients.reversible([block] * 4), 4)
    deep, result = temporary_bytes(gradients.reversible([block] * 8), 8)
    actual, expected = temporary_bytes(plain, 8)
    assert deep - shallow < 8 * 64 * 4  # less than one array between blocks
    assert actual > 2 * deep
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_wrong_blocks_are_refused():
    x = vector(1, 2)
    with pytest.raises(mw.ModelError, match=r"3 blocks take as many parameters.*received 1"):
        halves([x], x, x)
    wide = gradients.reversible([lambda w, x: mn.einsum([x, w], "io:2 out:2")])
    with pytest.raises(
        mw.DimError, match=r"block 0 gives \[io:2 out:2\], which is added to \[io:2"
    ):
        wide([mn.named(jnp.ones(2), "out:2")], x, x)


# clip_activation_gradient


def test_only_large_gradients_are_clipped():
    x = vector(1, 2)
    for scale, expected in [(100.0, [0.6, 0.8]), (1e-3, [3e-3, 4e-3])]:
        weights = scale * vector(3, 4)
        f = lambda x, w=weights: mn.einsum(  # noqa: E731
            [gradients.clip_activation_gradient(x, 0.5**0.5), w], ""
        )
        np.testing.assert_allclose(gradients.grad(f)(x).array, expected, rtol=1e-5)
    np.testing.assert_array_equal(gradients.clip_activation_gradient(x, 1e-9), x)
    with pytest.raises(
        mw.ModelError, match=r"rms=-1\.0 is the largest root mean square, at least 0"
    ):
        gradients.clip_activation_gradient(x, -1.0)
    wide = mn.cast(x, jnp.bfloat16)
    f = lambda x: mn.reduce_sum(gradients.clip_activation_gradient(x, 1.0) * 1e30)  # noqa: E731
    assert gradients.grad(f)(wide).array.tolist() == [1, 1]
    assert gradients.grad(lambda x: f(x) * 0)(wide).array.tolist() == [0, 0]


def test_gradients_of_another_form_are_refused() -> None:
    x = mn.named(np.ones(3, "float32"), "io:3")
    for backward, says in [
        (lambda inputs, result, gradient: [gradient], "is a list of another form"),
        (lambda inputs, result, gradient: 0.0, r"input 0 \[io:3\] has the gradient \[\]"),
    ]:
        function = gradients.custom_gradient(mn.square, backward)
        with pytest.raises(mw.DimError, match=says):
            mn.grad(lambda x, function=function: mn.reduce_sum(function(x)))(x)
    with pytest.raises(mw.ModelError, match="has_aux=True the function returns two things"):
        mn.grad(mn.reduce_sum, has_aux=True)(x)
    both = gradients.custom_gradient(
        lambda tree: tree["a"] * tree["b"], lambda inputs, result, g: {"a": g, "b": None}
    )
    tree = {"a": x, "b": x}
    of = mn.grad(lambda tree: mn.reduce_sum(both(tree)))(tree)
    np.testing.assert_array_equal([of["a"], of["b"]], [[1, 1, 1], [0, 0, 0]])
