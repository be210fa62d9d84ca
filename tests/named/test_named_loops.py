"""Loops and maps over named dims: beside NumPy's loops, under every kind of rules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from named_laws import USUAL, Case, check, ones

import meshwright as mw
import meshwright.named as mn
from meshwright.hlo.collectives import read_collectives
from meshwright.named import loops
from meshwright.named.ordering import top_k
from meshwright.named.shapes import rename

X = "a:8 b:8 c:8"


def running(x: mn.NamedArray, dim: str, **how: Any) -> Any:
    """A carry that forgets, and a result of each turn that lacks its last dim."""

    def turn(carry: mn.NamedArray, x: mn.NamedArray) -> Any:
        carry = carry * 0.5 + x
        return carry, mn.reduce_sum(mn.sin(carry), carry.dims[-1])

    rest = [d for d in x.dims if d.name != dim]
    zero = mn.named(jnp.zeros([d.size for d in rest]), rest)
    return loops.scan(turn, zero, x, dim, **how)


def np_running(x: np.ndarray, place: int, reverse: bool = False) -> Any:
    slices = list(np.moveaxis(x, place, 0))
    carry, stacked = np.zeros_like(slices[0]), []
    for piece in reversed(slices) if reverse else slices:
        carry = carry * 0.5 + piece
        stacked.append(np.sin(carry).sum(-1))
    return carry, np.stack(stacked[::-1] if reverse else stacked)


def doubled(x: mn.NamedArray) -> mn.NamedArray:
    return loops.while_loop(lambda x: mn.reduce_max(x) < 20, lambda x: x * 2, x)


def np_doubled(x: np.ndarray) -> np.ndarray:
    while x.max() < 20:
        x = x * 2
    return x


def counted(x: mn.NamedArray) -> mn.NamedArray:
    return loops.fori_loop(1, 5, lambda i, x: x + mn.sin(x) / i, x)


def np_counted(x: np.ndarray) -> np.ndarray:
    for i in range(1, 5):
        x = x + np.sin(x) / i
    return x


def product(x: mn.NamedArray, w: mn.NamedArray) -> mn.NamedArray:
    return mn.tanh(mn.einsum([x, w])) + mn.reduce_max(x)


def np_product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    tops = x.max((0, 2))[:, None]
    return np.tanh(np.einsum("abc,cd->bad", x, w)) + tops[..., None]


GATHERED = "every device takes every turn"
CASES = [
    Case("scan over the first dim", lambda x: running(x, "a"), lambda x: np_running(x, 0), [X],
         ("b", "c")),
    Case("scan over the middle", lambda x: running(x, "b"), lambda x: np_running(x, 1), [X],
         ("a", "c")),
    Case("scan over the last dim", lambda x: running(x, "c"), lambda x: np_running(x, 2), [X],
         ("a", "b")),
    Case("scan backwards", lambda x: running(x, "b", reverse=True, unroll=2),
         lambda x: np_running(x, 1, reverse=True), [X], ("c", "a")),
    Case("scan over a split dim", lambda x: running(x, "b"), lambda x: np_running(x, 1), [X],
         ("b", "a", "c"), gathers=GATHERED),
    Case("while_loop", doubled, np_doubled, [X], ("a", "b", "c"), slopes=()),
    Case("fori_loop", counted, np_counted, [X], ("a", "b", "c")),
    Case("vmap", loops.vmap(product, "b"), np_product, [X, "c:8 d:8"], ("a", "c"), slopes=(0, 1)),
    Case("vmap over a split dim", loops.vmap(product, "b"), np_product, [X, "c:8 d:8"],
         ("b", "d", "a"), slopes=(0, 1)),
]  # fmt: skip


@pytest.mark.full_for("scan over a split dim-3-D")
@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)


# Loops


def test_a_carry_is_a_pytree_and_keeps_its_order():
    """A body may return dims in another order: they are the same dims."""
    init = {"x": ones("a:2 b:3"), "turns": 0}

    def turn(carry: Any, x: Any) -> Any:
        swapped = mn.add(carry["x"], x, out="b:3 a:2")
        return {"x": swapped, "turns": carry["turns"] + 1}, (carry["turns"], None)

    carry, (turns, nothing) = loops.scan(turn, init, ones("a:2 t:4"), "t")
    assert str(carry["x"].dims) == str(init["x"].dims)
    np.testing.assert_array_equal(carry["x"].array, np.full([2, 3], 5))
    assert (int(carry["turns"]), turns.tolist(), nothing) == (4, [0, 1, 2, 3], None)


def test_bare_arrays_are_scanned_along_their_first_dim():
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda carry, key: (carry, mn.named(jax.random.normal(key, (2,)), "io:2"))  # noqa: E731
    _, drawn = loops.scan(draw, None, keys, "layers")
    assert drawn.shape == {"layers": 3, "io": 2}
    np.testing.assert_allclose(drawn.array, [jax.random.normal(key, (2,)) for key in keys])


def test_scan_without_xs():
    count = lambda carry, x: (carry * 2, carry)  # noqa: E731
    total, powers = loops.scan(count, ones("io:1"), None, "steps:4")
    assert powers.shape == {"steps": 4, "io": 1}
    assert powers.array.ravel().tolist() == [1, 2, 4, 8]
    assert total.array.tolist() == [16]


def test_layers_are_scanned_over_their_parameters():
    """Depth as a dim: one body is traced, whatever the depth is."""
    traced = []

    def layer(x: mn.NamedArray, w: mn.NamedArray) -> Any:
        traced.append(w.shape)
        return rename(mn.tanh(mn.einsum([x, w])), "out", "io"), None

    w = mn.named(jnp.linspace(-1, 1, 36).reshape(3, 4, 3), "io:3 layers:4 out:3")
    x, _ = jax.jit(lambda x, w: loops.scan(layer, x, w, "layers"))(ones("batch:2 io:3"), w)
    expected = np.ones([2, 3])
    for i in range(4):
        expected = np.tanh(expected @ np.asarray(w)[:, i])
    np.testing.assert_allclose(x.array, expected, rtol=1e-5)
    assert traced == [{"io": 3, "out": 3}]


def test_sums_in_parts_are_exchanged_once():
    """The recipe for what Mesh-TensorFlow calls accumulators, beside a plain carried sum."""
    mesh = mw.create_mesh({"rows": 8})

    def gram(dims: str) -> Any:
        def turn(total: Any, x: Any) -> Any:
            return total + mn.einsum([x, rename(x, "io", "o")], total.dims), None

        def all_of(x: mn.NamedArray) -> mn.NamedArray:
            zero = mn.named(jnp.zeros([d.size for d in mn.as_dims(dims)]), dims)
            total, _ = loops.scan(turn, zero, x, "micro")
            return mn.einsum([total], "io:4 o:4")

        return jax.jit(all_of)

    x = np.random.default_rng(0).normal(size=(4, 64, 4)).astype("float32")
    with mn.rules("batch:rows;parts:rows", mesh, strict=False):
        plain = mn.named(x, "micro:4 batch:64 io:4")
        parts = mn.named(x.reshape(4, 8, 8, 4), "micro:4 parts:8 rows:8 io:4")
        results = []
        for dims, xs in [("io:4 o:4", plain), ("parts:8 io:4 o:4", parts)]:
            compiled = gram(dims).lower(xs).compile()
            traffic = read_collectives(compiled.as_text(), mesh.axes)
            results.append(
                [(collective.kind, collective.elements, collective.count) for collective in traffic]
            )
            np.testing.assert_allclose(
                compiled(xs).array, np.einsum("mbi,mbo->io", x, x), rtol=1e-4
            )
    assert results == [[("all-reduce", 16, 4)], [("all-reduce", 16, 1)]]


def test_explicit_rules_reach_the_body():
    rules = mn.BoundRules(mn.DimRules("a:all"), mw.create_mesh({"all": 8}))
    _, sums = loops.scan(lambda c, x: (c, mn.sin(x)), None, ones("t:2 a:8"), "t", rules=rules)
    assert sums.array.addressable_shards[0].data.shape == (2, 1)


def test_a_carry_that_changes_its_dims_is_refused():
    init = {"x": ones("a:2 b:3"), "y": [ones("a:2")], "n": 0.0}

    def turn(carry: Any) -> Any:
        return {"x": mn.reduce_sum(carry["x"], "b"), "y": [jnp.ones(2)], "n": ones("b:3")}

    with pytest.raises(mw.DimError) as caught:
        loops.while_loop(lambda carry: True, turn, init)
    assert str(caught.value).splitlines() == [
        "while_loop: carry['n'] goes in as a number and comes out as [b:3].",
        "while_loop: carry['x'] goes in as [a:2 b:3] and comes out as [a:2].",
        "while_loop: carry['y'][0] goes in as [a:2] and comes out without names.",
        "A carry keeps its dims: rename or reduce what the body returns, or begin with an array "
        "that has these dims.",
    ]
    with pytest.raises(mw.DimError, match=r"scan: carry goes in as \[a:2\] and comes out as \[b:2"):
        loops.scan(lambda c, x: (mn.named(c.array, "b:2"), None), ones("a:2"), ones("t:4"), "t")
    with pytest.raises(mw.DimError, match=r"fori_loop: carry goes in without dims and comes out"):
        loops.fori_loop(0, 3, lambda i, x: x + ones("a:2"), ones(""))


def test_a_carry_keeps_its_form_and_its_element_types():
    with pytest.raises(mw.ModelError, match=r"goes in as \{'x': \*\} and comes out as \(\*, \*\)"):
        loops.while_loop(lambda c: True, lambda c: (c["x"], c["x"]), {"x": ones("a:2")})
    with pytest.raises(
        mw.ArrayError, match=r"carry\['x'\] goes in as int32 and comes out as float"
    ):
        loops.scan(
            lambda c, _: ({"x": c["x"] * 1.5}, None), {"x": mn.arange("a:2")}, None, "steps:3"
        )
    with pytest.raises(mw.ArrayError, match="fori_loop: carry goes in as float32 and comes out as"):
        loops.fori_loop(0, 3, lambda i, c: mn.cast(c, jnp.int32), np.zeros([], "float32"))
    total = loops.fori_loop(0, 3, lambda i, c: c + jnp.float32(2), 1)  # a number has no type yet
    assert float(total) == 7


def test_wrong_loops_are_refused():
    x, y = ones("a:2 t:3"), ones("a:2")
    keep = lambda carry, x: (carry, None)  # noqa: E731
    with pytest.raises(mw.DimError, match=r"the condition has dims \[a:2\].*reduce_any"):
        loops.while_loop(lambda x: x > 0, lambda x: x, y)
    with pytest.raises(mw.ArrayError, match=r"the condition is of type float32.*x > 0"):
        loops.while_loop(mn.reduce_sum, lambda x: x, y)
    with pytest.raises(mw.DimError, match=r"scan over 't': xs\[1\] is one number"):
        loops.scan(keep, y, [x, 3.0], "t")
    with pytest.raises(
        mw.DimError, match=r"scan over 't': xs\['y'\] \[a:2\] has no such dim.*simply use"
    ):
        loops.scan(keep, y, {"x": x, "y": y}, "t")
    with pytest.raises(mw.DimError, match="dim 't' has size 3 and size 4"):
        loops.scan(keep, y, [x, ones("t:4")], "t")
    with pytest.raises(mw.DimError, match=r"dim 't' has size 3 in \[a:2 t:3\], not 4"):
        loops.scan(keep, y, x, mn.Dim("t", 4))
    with pytest.raises(mw.DimError, match="takes the dim with its size, 'steps:10'; not 'steps'"):
        loops.scan(keep, y, None, "steps")
    with pytest.raises(mw.ModelError, match=r"the body returns two things.*received NamedArray"):
        loops.scan(lambda carry, x: carry, y, x, "t")
    with pytest.raises(
        mw.DimError, match=r"scan over 't:3': result\[0\] \[t:5\] has a dim of this"
    ):
        loops.scan(lambda carry, x: (carry, [ones("t:5")]), y, x, "t")


# Maps


def test_vmap_maps_what_has_the_dim():
    def function(x: mn.NamedArray, more: Any, *, scale: float) -> Any:
        assert x.shape == {"io": 3}
        return {"sum": mn.einsum([x, more["w"]], ""), "w": more["w"] * scale, "same": scale}

    x, w = mn.named(jnp.arange(6.0).reshape(3, 2), "io:3 batch:2"), ones("io:3")
    result = loops.vmap(function, "batch")(x, {"w": w}, scale=2.0)
    assert result["sum"].array.tolist() == [6, 9]
    assert (result["w"].shape, result["same"].tolist()) == ({"batch": 2, "io": 3}, [2, 2])


def test_vmap_of_vmap_and_of_what_runs_on_pieces():
    x = mn.named(jnp.sin(jnp.arange(512.0)).reshape(8, 8, 8), "a:8 b:8 c:8")
    largest = loops.vmap(lambda x: top_k(x, "c", "k:2")[0], "a")
    total = loops.vmap(loops.vmap(lambda x: mn.reduce_sum(x, "c"), "b"), "a")
    with mn.rules("a:rows;c:cols", mw.create_mesh({"rows": 4, "cols": 2})):
        result, sums = jax.jit(lambda x: (largest(x), total(x)))(x)
    assert (result.shape, sums.shape) == ({"a": 8, "b": 8, "k": 2}, {"a": 8, "b": 8})
    np.testing.assert_array_equal(result.array, -np.sort(-np.asarray(x))[..., :2])
    np.testing.assert_allclose(sums.array, np.asarray(x).sum(-1), rtol=1e-5)
    assert result.array.addressable_shards[0].data.shape == (2, 8, 2)
    assert sums.array.addressable_shards[0].data.shape == (2, 8)


def test_rules_hold_inside_vmap_as_if_the_dim_were_there():
    x = ones("batch:8 hidden:8 io:2")
    rules = mn.BoundRules(mn.DimRules("batch:all;hidden:all"), mw.create_mesh({"all": 8}))
    total = loops.vmap(lambda x: mn.reduce_sum(x, "io"), "batch")
    with pytest.raises(
        mw.LayoutError,
        match=r"inside vmap: result of reduce_sum \[batch:8 hidden:8\].*both lie along axis",
    ):
        total(x, rules=rules)
    product = loops.vmap(lambda x: mn.einsum([x], "io:2"), "batch")
    with pytest.raises(mw.LayoutError, match=r"inside vmap: einsum over \[batch:8 hidden:8 io"):
        product(x, rules=rules)


def test_wrong_maps_are_refused():
    x = ones("a:2 b:3")
    with pytest.raises(mw.DimError, match=r"vmap over 'c': no argument has this dim.*\[a:2 b:3\]"):
        loops.vmap(mn.sin, "c")(x)
    with pytest.raises(mw.DimError, match="they are no named array"):
        loops.vmap(mn.sin, "c")(2.0)
    with pytest.raises(mw.DimError, match=r"dim 'a' has size 2 in \[a:2\], not 3"):
        loops.vmap(mn.sin, mn.Dim("a", 3))(x)
    with pytest.raises(mw.DimError, match="dim 'a' has size 2 and size 3"):
        loops.vmap(mn.add, "a")(x, ones("a:3"))
    with pytest.raises(
        mw.DimError, match=r"vmap over 'a:2': result \[a:4\] has a dim of this name"
    ):
        loops.vmap(lambda x: ones("a:4"), "a")(x)
