"""relayout inside JAX's transformations: jit, grad, vmap and shard_map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from placements import PLACES, U, assert_lies, layout_of, mesh, place_id, values

import meshwright as mw
from meshwright import Layout
from meshwright.errors import (
    TracingError,
)


@pytest.mark.parametrize("source", PLACES[3:7], ids=place_id)
@pytest.mark.parametrize("target", PLACES[3:7], ids=place_id)
def test_relayout_inside_jit_lays_the_result_out(source, target):
    expected = values(np.float32)
    x = mw.relayout(expected, layout_of(source))
    assert_lies(
        jax.jit(lambda t: mw.relayout(t, layout_of(target)))(x), layout_of(target), expected
    )


@pytest.mark.parametrize("constant", [np.arange(8.0), list(range(8)), jnp.arange(8.0)])
def test_relayout_inside_jit_lays_constants_out(constant):
    layout = Layout([("b", "a")], mesh("a4b2"))
    out = jax.jit(lambda t: mw.relayout(constant, layout) * 1 + t)(np.float32(0))
    np.testing.assert_array_equal(out, np.arange(8))
    alone = jax.jit(lambda: mw.relayout(constant, layout))()
    assert_lies(alone, layout, np.arange(8).astype(alone.dtype))


def test_relayout_inside_jit_takes_lists_of_traced_values():
    layout = Layout([U, "a"], mesh("a4b2"))
    row = np.arange(4.0, dtype=np.float32)
    out = jax.jit(lambda t: mw.relayout([t, 2 * t], layout))(row)
    assert_lies(out, layout, np.stack([row, 2 * row]))


def test_relayout_inside_jit_takes_an_abstract_mesh_with_the_same_axes():
    x = mw.relayout(values(np.float32), Layout(["a", "b"], mesh("a4b2")))
    abstract = Layout(["b", U], mesh("a4b2").abstract())
    out = jax.jit(lambda t: mw.relayout(t, abstract))(x)
    assert_lies(out, abstract.on(mesh("a4b2")), values(np.float32))


@pytest.mark.parametrize(("name", "specs"), [("a2b4", ["b"]), ("middle", ["x"]), ("x8", ["x"])])
def test_relayout_to_another_mesh_inside_jit_is_refused(name, specs):
    x = mw.relayout(np.zeros(8), Layout(["a"], mesh("a4b2")))
    layout = Layout(specs, mesh(name))
    with pytest.raises(
        TracingError, match=r"names another mesh than the array's \(a=4, b=2\).*outside"
    ):
        jax.jit(lambda t: mw.relayout(t + 1, layout))(x)


def test_relayout_inside_shard_map_is_refused():
    layout = Layout(["a"], mesh("a4b2"))
    spec = layout.partition_spec
    mapped = jax.shard_map(
        lambda t: mw.relayout(t, layout),
        mesh=mesh("a4b2").jax_mesh,
        in_specs=spec,
        out_specs=spec,
    )
    with pytest.raises(TracingError, match=r"inside shard_map \(over 'a', 'b'\).*before or after"):
        mapped(mw.relayout(np.zeros(32), layout))


def test_relayout_under_vmap_means_the_dims_of_one_example():
    expected = values(np.float32)
    x = mw.relayout(expected, Layout(["a", U], mesh("a4b2")))
    inner = Layout(["b"], mesh("a4b2"))
    out = jax.vmap(lambda t: mw.relayout(t, inner))(x)
    np.testing.assert_array_equal(out, expected)
    assert mw.fetch_layout(out).dim_axes(1) == ("b",)
    with pytest.raises(TracingError, match="devices that the array does not lie on"):
        jax.vmap(lambda t: mw.relayout(t, inner.on(mesh("a4b2 backwards"))))(x)


@pytest.mark.parametrize("target", PLACES, ids=place_id)
def test_the_gradient_through_relayout_is_that_of_the_identity(target):
    expected, source = values(np.float32), Layout(["a", "b"], mesh("a4b2"))
    x = mw.relayout(expected, source)

    def cubed(t: jax.Array) -> jax.Array:
        return (mw.relayout(t, layout_of(target)) ** 3).sum()

    assert_lies(jax.grad(cubed)(x), source, 3 * expected**2)
    if target[0] == "a4b2":
        np.testing.assert_array_equal(jax.jit(jax.grad(cubed))(x), 3 * expected**2)


@pytest.mark.parametrize("name", ["a4b2", "backwards", "a2b4"])
def test_second_derivatives_go_through_relayout(name):
    expected = values(np.float32)
    x = mw.relayout(expected, Layout(["a", "b"], mesh("a4b2")))
    layout = Layout(["b", "a"], mesh(name))
    slope = jax.grad(lambda t: (mw.relayout(t, layout) ** 3).sum())
    tangent = jax.jvp(slope, (x,), (jnp.ones_like(x),))[1]
    assert_lies(tangent, Layout(["a", "b"], mesh("a4b2")), 6 * expected)


def test_gradients_of_single_examples_go_through_relayout():
    expected = values(np.float32)
    x = mw.relayout(expected, Layout(["a", "b"], mesh("a4b2")))
    layout = Layout(["b"], mesh("a4b2"))
    by_row = jax.vmap(jax.grad(lambda t: (mw.relayout(t, layout) ** 3).sum()))
    np.testing.assert_array_equal(by_row(x), 3 * expected**2)


def test_the_gradient_of_an_array_on_one_device_comes_back_to_it():
    x = jax.device_put(np.arange(8.0, dtype=np.float32), jax.devices()[2])
    layout = Layout(["x"], mesh("x8"))
    slope = jax.grad(lambda t: (mw.relayout(t, layout) ** 2).sum())(x)
    assert slope.devices() == {jax.devices()[2]}
    np.testing.assert_array_equal(slope, 2 * np.arange(8.0))
