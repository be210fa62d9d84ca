"""What two dense layers exchange, forward and backward: the closed forms, exactly.

y = relu(x w) v with x: [batch io] and a hidden layer [batch hidden]. What every device all-reduces
is read from the compiled gradient function, axis by axis (Shazeer et al. 2018, section 3).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import meshwright as mw
import meshwright.named as mn
from meshwright.hlo.collectives import read_collectives
from meshwright.named import layers

SIZES = {"batch": 64, "io": 16, "hidden": 32}
# The names of the rules and of the axes, and how often each dim is cut.
LAYOUTS = {
    "one device": ("", {"one": 1}),
    "data parallel": ("batch:all", {"all": 8}),
    "model parallel": ("hidden:all", {"all": 8}),
    "4x2": ("batch:rows;hidden:cols", {"rows": 4, "cols": 2}),
    "2x4": ("batch:rows;hidden:cols", {"rows": 2, "cols": 4}),
    "2x2x2": ("batch:rows;hidden:cols;io:planes", {"rows": 2, "cols": 2, "planes": 2}),
}
# The inventory's check point, for b=64, io=16, h=32.
KNOWN = {
    "one device": {},
    "data parallel": {"all": 1024},
    "model parallel": {"all": 2048},
    "4x2": {"cols": 512, "rows": 512},
    "2x2x2": {"planes": 1024, "cols": 512, "rows": 256},
}


def made(dims: str, seed: int) -> mn.NamedArray:
    named = [mn.Dim(name, SIZES[name]) for name in dims.split()]
    array = np.random.default_rng(seed).normal(size=[dim.size for dim in named])
    return mn.named(array.astype("float32") / 4, named)


def loss(params: dict[str, mn.NamedArray], x: mn.NamedArray) -> Any:
    hidden = mn.relu(mn.einsum([x, params["w"]]))
    return mn.reduce_mean(mn.square(mn.einsum([hidden, params["v"]]))).array


def gradient(layout: str, of_x: bool) -> tuple[Any, Any]:
    """The compiled gradient function of the loss, and what it gives."""
    rules, axes = LAYOUTS[layout]
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    with mn.rules(rules, mw.create_mesh(axes, devices)):
        params = {"w": made("io hidden", 1), "v": made("hidden io", 2)}
        x = made("batch io", 3)
        step = jax.value_and_grad(loss, (0, 1) if of_x else 0)
        compiled = jax.jit(step).lower(params, x).compile()
        return compiled, jax.tree.map(np.asarray, compiled(params, x))


def all_reduced(compiled: Any, axes: dict[str, int]) -> tuple[Counter[str], Counter[str]]:
    """Elements that each device all-reduces along each axis: of arrays, and of scalars.

    A reduce-scatter and an all-gather of one array are an all-reduce, so each counts half.
    """
    arrays: Counter[str] = Counter()
    scalars: Counter[str] = Counter()
    for collective in read_collectives(compiled.as_text(), tuple(axes.items())):
        halves = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}[collective.kind]
        for array in collective.arrays:
            result = arrays if array.dims else scalars
            result["+".join(collective.axes)] += halves * array.elements * (collective.count or 1)
    assert not any(twice % 2 for result in (arrays, scalars) for twice in result.values())
    return tuple(Counter({a: n // 2 for a, n in c.items()}) for c in (arrays, scalars))  # type: ignore[return-value]


def closed_form(layout: str, of_x: bool) -> Counter[str]:
    """Every sum over a split dim is one all-reduce of what a device holds of the sum."""
    rules, axes = mn.DimRules(LAYOUTS[layout][0]), LAYOUTS[layout][1]

    def held(*dims: str) -> int:
        cut = [axes[axis] for dim in dims if (axis := rules.axis(dim)) is not None]
        return int(np.prod([SIZES[dim] for dim in dims])) // int(np.prod(cut))

    sums = [("io", held("batch", "hidden")), ("hidden", held("batch", "io"))]  # x w, and h v
    sums += [("io", held("batch", "hidden")), ("batch", 2 * held("io", "hidden"))]  # dh; dw, dv
    sums += [("hidden", held("batch", "io"))] if of_x else []
    result: Counter[str] = Counter()
    for dim, elements in sums:
        if (axis := rules.axis(dim)) is not None:
            result[axis] += elements
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_layers_exchange_what_the_mathematics_asks_for(layout):
    compiled, _ = gradient(layout, of_x=True)
    arrays, scalars = all_reduced(compiled, LAYOUTS[layout][1])
    assert arrays == closed_form(layout, of_x=True)
    assert layout not in KNOWN or arrays == KNOWN[layout]
    rules = mn.DimRules(LAYOUTS[layout][0])
    mean_over = {rules.axis(dim) for dim in ("batch", "io")} - {None}
    assert scalars == dict.fromkeys(mean_over, 1)  # the mean of the loss


@pytest.mark.parametrize("layout", ["model parallel", "4x2", "2x2x2"])
def test_without_the_gradient_of_x_its_half_is_gone(layout):
    compiled, _ = gradient(layout, of_x=False)
    arrays, _ = all_reduced(compiled, LAYOUTS[layout][1])
    assert arrays == closed_form(layout, of_x=False)
    if layout == "model parallel":
        assert arrays == {"all": SIZES["batch"] * SIZES["io"]}


def test_the_same_loss_and_gradients_in_all_layouts():
    _, expected = gradient("one device", of_x=True)
    for layout in LAYOUTS:
        _, result = gradient(layout, of_x=True)
        for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_two_dims_of_one_product_cannot_share_an_axis():
    """The paper's illegal example: the hidden layer would be cut twice along one axis."""
    with (
        mn.rules("batch:all;hidden:all", mw.create_mesh({"all": 8})),
        pytest.raises(mw.LayoutError, match=r"einsum over \[batch:64 io:16 hidden:32\].*both lie"),
    ):
        mn.einsum([made("batch io", 3), made("io hidden", 1)])


def test_a_renamed_product_scatters_its_sums_and_gathers_what_it_needs():
    def in_rows(params: dict[str, mn.NamedArray], x: mn.NamedArray) -> Any:
        hidden = mn.relu(mn.einsum([x, params["w"]], rename={"rows": "batch"}))
        y = mn.einsum([hidden, params["v"]], rename={"batch": "rows"})
        return mn.reduce_mean(mn.square(y)).array

    with mn.rules("hidden:all;rows:all", mw.create_mesh({"all": 8})):
        params = {"w": made("io hidden", 1), "v": made("hidden io", 2)}
        x = mn.rename(made("batch io", 3), "batch", "rows")
        compiled = jax.jit(jax.grad(in_rows, (0, 1))).lower(params, x).compile()
    collectives = read_collectives(compiled.as_text(), (("all", 8),))
    whole = SIZES["batch"] * SIZES["io"]
    exchanged = sorted(
        (collective.kind, sum(a.elements for a in collective.arrays)) for collective in collectives
    )
    # x and the gradient of y are gathered, y and the gradient of x are scattered
    assert exchanged == [*[("all-gather", whole)] * 2, *[("reduce-scatter", whole)] * 2]


BLOCK_LAYERS = {
    "attention": layers.Attention("d_model:8", "heads:8", "d_kv:4"),
    "local attention": layers.Attention("d_model:8", "heads:8", "d_kv:4", radius=2),
    "gated units": layers.FeedForward("d_model:8", "d_ff:16", (mn.swish, None)),
}


@pytest.mark.parametrize("name", BLOCK_LAYERS)
def test_a_layer_sums_once_forwards_and_once_backwards(name):
    """Of its output, and of the gradient of its input, though several products make that."""
    layer = BLOCK_LAYERS[name]
    with mn.rules("heads:all;d_ff:all", mw.create_mesh({"all": 8}), strict=False):
        params = layer.init(jax.random.key(0))
        x = mn.named(np.ones([2, 8, 8], "float32"), "batch:2 length:8 d_model:8")
        call = jax.value_and_grad(lambda p, x: mn.reduce_sum(mn.square(layer(p, x))).array, (0, 1))
        compiled = jax.jit(call).lower(params, x).compile()
    arrays, _ = all_reduced(compiled, {"all": 8})
    assert arrays == {"all": 2 * x.size}
