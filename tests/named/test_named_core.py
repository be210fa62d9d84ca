"""The core of the language: dims, rules, the named array among JAX's functions, operators."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import meshwright as mw
import meshwright.named as mn


def mesh(**axes: int) -> mw.Mesh:
    return mw.create_mesh(axes or {"rows": 4, "cols": 2})


def counting(*sizes: int) -> Any:
    return jnp.arange(1.0, 1 + np.prod(sizes)).reshape(sizes)


def lies_by(rules: mn.BoundRules, x: mn.NamedArray) -> bool:
    return x.array.sharding.is_equivalent_to(rules.layout(x.dims).sharding, x.array.ndim)


# Dims


def test_dims_from_texts_values_and_pairs():
    wanted = (mn.Dim("batch", 64), mn.Dim("io", 16))
    for between in (" ", ";", ", ", ".", "\n", " ;, "):
        assert mn.as_dims(f" batch:64{between}io:16{between}") == wanted
    assert mn.as_dims([("batch", 64), mn.Dim("io", 16)]) == wanted
    assert mn.as_dims(wanted[0]) == wanted[:1]
    assert mn.as_dims("") == mn.as_dims([]) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x;4", "'x' in 'x;4' is not of the form 'batch:64'"),
        ("x", "'x' in 'x' is not of the form 'batch:64'"),
        ("x:4:5", "'x:4:5' in 'x:4:5' is not of the form 'batch:64'"),
        (":4", "':4' in ':4' is not of the form 'batch:64'"),
        ("x:foo", "size 'foo' in 'x:foo' is not a whole number"),
        ("x:-4", "size '-4' in 'x:-4' is not a whole number"),
        ("x:4 y:2 x:4", "dim 'x' appears twice in [x:4 y:2 x:4]"),
        ("x:4 x:5", "dim 'x' appears twice in [x:4 x:5]"),
        ("4:x", "size 'x' in '4:x' is not a whole number"),
        ("4:4", "a dim name must be a word such as 'batch'; received '4'"),
    ],
)
def test_a_text_that_names_no_dims_is_refused(text, says):
    with pytest.raises(mw.DimError, match=re.escape(says)):
        mn.as_dims(text)


@pytest.mark.parametrize("dims", [5, [("a", 1, 2)], ["a"], [None]])
def test_what_is_no_text_of_dims_is_refused(dims):
    with pytest.raises(mw.DimError):
        mn.as_dims(dims)


@pytest.mark.parametrize("size", [-1, 2.0, True, "4", None])
def test_a_size_is_a_whole_number(size):
    with pytest.raises(mw.DimError, match="the size of dim 'x' must be a whole number"):
        mn.Dim("x", size)
    with pytest.raises(mw.DimError, match="a dim name must be a word"):
        mn.Dim(size, 4)


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
BETWEEN = st.text(" \t\n,.;", min_size=1, max_size=3)


@pytest.mark.full
@hypothesis.given(st.dictionaries(NAMES, st.integers(0, 10**9)), st.data())
def test_texts_of_dims_round_trip(sizes, data):
    dims = tuple(mn.Dim(name, size) for name, size in sizes.items())
    text = "".join(f"{dim}{data.draw(BETWEEN)}" for dim in dims)
    assert mn.as_dims(text) == dims
    assert mn.as_dims(" ".join(map(str, dims))) == dims


# Rules


def test_rules_from_texts_mappings_and_pairs():
    wanted = mn.DimRules("batch:rows;hidden:cols")
    pairs = [("batch", "rows"), ("hidden", "cols")]
    for given in (
        "batch:rows hidden:cols",
        "batch:rows,hidden:cols;batch:rows",
        dict(pairs),
        pairs,
    ):
        assert mn.DimRules(given) == mn.DimRules(wanted) == wanted
    assert (str(wanted), repr(wanted)) == (
        "batch:rows;hidden:cols",
        "DimRules('batch:rows;hidden:cols')",
    )
    assert mn.DimRules("").pairs == ()


def test_wrong_rules_are_refused():
    with pytest.raises(mw.DimError, match=r"'d_ff' in 'd_ff;heads' is not of the form 'batch:rows"):
        mn.DimRules("d_ff;heads")
    for wrong in (5, ["batch"], [("a", "b", "c")]):
        with pytest.raises(mw.LayoutError, match="does not say which dims lie along which axes"):
            mn.DimRules(wrong)  # pyright: ignore
    with pytest.raises(mw.LayoutError, match=r"dim 'a' is given 2 axes \('rows', 'cols'\)"):
        mn.DimRules("a:rows;a:cols")
    with pytest.raises(mw.LayoutError) as caught, mn.rules("a:row;b:cols;c:plane", mesh()):
        pass
    assert str(caught.value).splitlines() == [
        "rule 'a:row': 'row' is not an axis of the mesh (rows=4, cols=2).",
        "rule 'c:plane': 'plane' is not an axis of the mesh (rows=4, cols=2).",
    ]
    with (
        pytest.raises(mw.MeshError, match=r"the rules \(a:rows\) need the mesh"),
        mn.rules("a:rows"),
    ):
        pass
    with pytest.raises(mw.LayoutError, match="no rules are in force"):
        mn.layout_of("a:8")


def test_what_cannot_lie_so_is_refused():
    with mn.rules("a:rows;b:rows;c:cols", mesh(), strict=False):
        with pytest.raises(
            mw.LayoutError,
            match=r"array \[a:4 c:2 b:4\]: dims 'a:4' and 'b:4' would both lie along axis 'rows'",
        ):
            mn.named(jnp.ones([4, 2, 4]), "a:4 c:2 b:4")
        with pytest.raises(
            mw.DivisibilityError,
            match=r"array \[a:6 c:2\]: dim 'a' \(size 6\) does not divide over axis 'rows' "
            r"\(size 4\). Sizes that do: 4 and 8",
        ):
            mn.named(jnp.ones([6, 2]), "a:6 c:2")
        a, b = mn.named(jnp.ones([4, 2]), "a:4 c:2"), mn.named(jnp.ones([2, 4]), "c:2 b:4")
        with pytest.raises(mw.LayoutError, match=r"einsum over \[a:4 c:2 b:4\]"):
            mn.einsum([a, b], "c:2")  # no array of the three has both; the sum's full set does
        with pytest.raises(mw.LayoutError, match=r"einsum over \[c:2 b:4 a:4\]"):
            mn.einsum([b], "a:4 c:2")
        with pytest.raises(mw.LayoutError, match=r"result of multiply \[a:4 c:2 b:4\]"):
            a * b
        with pytest.raises(mw.LayoutError, match=r"result of multiply \[a:4 c:2 b:4\]"):
            jax.eval_shape(lambda a, b: a * b, a, b)


def test_rules_lay_out_what_is_made_and_traced():
    with mn.rules("batch:rows;hidden:cols", mesh()) as rules:
        x, w = mn.named(counting(8, 3), "batch:8 io:3"), mn.named(counting(3, 4), "io:3 hidden:4")
        for product in (mn.einsum([x, w]), jax.jit(lambda x, w: mn.einsum([x, w]))(x, w)):
            assert lies_by(rules, product)
            assert product.array.addressable_shards[0].data.shape == (2, 2)
        assert lies_by(rules, x)
        assert mn.in_force() is rules


def test_rules_nest_and_are_restored():
    with mn.rules("a:rows", mesh()) as outer:
        with mn.rules("a:cols", mesh()) as inner:
            assert lies_by(inner, mn.named(counting(8), "a:8"))
        with mn.no_rules():
            assert mn.in_force() is None
        assert mn.in_force() is outer
        assert lies_by(outer, mn.named(counting(8), "a:8"))
    assert mn.in_force() is None


def test_rules_are_restored_after_an_exception_and_say_nothing_on_top_of_it():
    with pytest.raises(ZeroDivisionError), mn.rules("never_there:rows", mesh()):
        _ = 1 / 0
    assert mn.in_force() is None


def test_an_unused_rule_is_refused_at_the_end():
    with pytest.raises(mw.LayoutError) as caught, mn.rules("a:rows;bacth:cols", mesh()):
        mn.named(counting(8, 3), "a:8 batch:3")
    assert str(caught.value) == (
        "no array had the dim of 'bacth:cols', so the rule laid nothing out. Dims that were seen: "
        "a, batch. Correct the name, or allow it: rules(..., strict=False)."
    )
    with mn.rules("a:rows;other:cols", mesh(), strict=False):
        mn.named(counting(8), "a:8")


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_unused_rule_is_refused_after_a_context_that_used_it(jit):
    def run(name):
        with mn.rules("a:rows;hidden:cols", mesh()):
            jit(lambda x: mn.reduce_sum(x, name).array)(mn.NamedArray(counting(8, 4), DIMS[name]))

    DIMS = {name: mn.as_dims(f"a:8 {name}:4") for name in ("hidden", "hiden")}
    run("hidden")
    for _ in range(2):
        with pytest.raises(mw.LayoutError, match=r"dim of 'hidden:cols'.*: a, hiden[.]"):
            run("hiden")
    run("hidden")


def test_a_compiled_function_may_have_a_dim_inside_in_every_context():
    half = jax.jit(lambda x: mn.reduce_sum(mn.rename(x, "length", "memory")).array)
    x = mn.NamedArray(counting(8), mn.as_dims("length:8"))
    for _ in range(2):
        with mn.rules("memory:cols", mesh()):
            half(x)


def test_a_dim_that_is_summed_over_is_used():
    x = mn.named(counting(8, 4), "a:8 gone:4")
    with mn.rules("gone:cols", mesh()):
        jax.jit(lambda x: mn.reduce_sum(x, "gone"))(x)


def test_explicit_rules():
    rules = mn.BoundRules(mn.DimRules("a:rows"), mesh())
    x = mn.named(counting(8), "a:8")
    assert lies_by(rules, mn.named(x, "a:8", rules=rules))
    assert lies_by(rules, mn.exp(x, rules=rules))
    assert lies_by(rules, mn.add(x, 1, rules=rules))
    assert lies_by(rules, mn.einsum([x, x], "a:8", rules=rules))
    assert mn.layout_of("a:8 b:2", "a:rows", mesh()) == rules.layout(mn.as_dims("a:8 b:2"))
    assert mn.in_force() is None


def test_a_jitted_function_is_traced_once_for_equal_rules_and_anew_for_others():
    traced = []

    @jax.jit
    def double(x: mn.NamedArray) -> mn.NamedArray:
        traced.append(str(mn.in_force()))
        return x + mn.NamedArray(x.array, x.dims)

    with mn.no_rules():
        x = mn.named(np.ones([8, 8]), "a:8 b:8")
    for text in ("a:rows;b:cols", "a:rows;b:cols", "a:cols;b:rows", "a:rows;b:cols"):
        with mn.rules(text, mesh()) as rules:  # no complaint where the trace is found again
            assert lies_by(rules, double(x))
    assert traced == ["a:rows;b:cols over (rows=4, cols=2)", "a:cols;b:rows over (rows=4, cols=2)"]


def test_an_abstract_mesh_checks_and_lays_nothing_out():
    with mn.rules("a:rows", mw.Mesh({"rows": 4})):
        assert mn.named(counting(8), "a:8").array.sharding.is_fully_replicated
        with pytest.raises(mw.DivisibilityError):
            mn.named(counting(6), "a:6")


def test_bound_rules_are_values():
    rules = mn.BoundRules(mn.DimRules("a:rows"), mesh())
    rules.layout(mn.as_dims("a:8"))
    same = pickle.loads(pickle.dumps(rules))
    assert (same, hash(same)) == (rules, hash(rules))
    assert rules != mn.BoundRules(mn.DimRules("a:cols"), mesh())


INHERITING: list[Callable[[mn.NamedArray], mn.NamedArray]] = [
    mn.exp,
    lambda x: x + mn.reduce_max(x, "b"),
    lambda x: mn.where(x > 0, x, 0.0),
    lambda x: mn.softmax(x, "b"),
    lambda x: mn.log_softmax(x, "c"),
    lambda x: mn.reduce_sum(x, "a"),
    lambda x: mn.reduce_mean(x, "b"),
    lambda x: mn.logsumexp(x, "a c"),
    mn.reduce_min,
]


@pytest.mark.full
def test_what_needs_no_constraint_lies_right_without():
    """Operations leave out the constraint where XLA derives it from their operand's."""
    with mn.rules("a:rows;b:cols;c:planes", mesh(rows=2, cols=2, planes=2)) as rules:

        def each(x: Any) -> list[mn.NamedArray]:
            x = mn.named(x, "a:8 b:8 c:8")
            return [function(x) for function in INHERITING]

        traced = jax.jit(each).trace(jax.ShapeDtypeStruct((8, 8, 8), jnp.float32))
        x = jnp.sin(counting(8, 8, 8))
        found = jax.jit(each)(x) + each(x)  # in a program, and one by one
    assert str(traced.jaxpr).count("sharding_constraint") == 1  # that of named()
    for x in found:
        assert lies_by(rules, x), x.dims


# The named array among JAX's functions


def test_a_named_array_says_what_it_is():
    x = mn.named(counting(2, 3), "a:2 b:3")
    assert (x.shape, x.size, x.dtype) == ({"a": 2, "b": 3}, 6, jnp.float32)
    assert (x.dim("b"), x.dim(mn.Dim("a", 2))) == (mn.Dim("b", 3), mn.Dim("a", 2))
    assert repr(x).startswith("NamedArray([a:2 b:3], float32)\n")
    np.testing.assert_array_equal(np.asarray(x), counting(2, 3))
    assert np.asarray(x, "int32").dtype == np.int32
    with pytest.raises(mw.DimError, match=r"there is no dim 'c' in \[a:2 b:3\]"):
        x.dim("c")
    with pytest.raises(mw.DimError, match=r"dim 'a' has size 2 in \[a:2 b:3\], not 5"):
        x.dim(mn.Dim("a", 5))
    with pytest.raises(mw.ArrayError, match=r"shape \(2, 3\), which is not \[a:2\]"):
        mn.named(x, "a:2")
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)


def test_numbers_and_truth_values():
    scalar = mn.named(2.5, "")
    assert (float(scalar), int(scalar), bool(scalar), bool(scalar < 2)) == (2.5, 2, True, False)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(mn.named(counting(2), "a:2") > 1)
    with pytest.raises(TypeError):
        float(mn.named(counting(2), "a:2"))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda x: x if x > 1 else -x)(scalar)


def test_jit_and_trees():
    x = mn.named(counting(2, 3), "a:2 b:3")
    same = jax.jit(lambda tree: tree)({"x": x})["x"]
    assert same.dims == x.dims
    np.testing.assert_array_equal(same, x)
    [(path, leaf)] = jax.tree.leaves_with_path({"x": x})
    assert (jax.tree_util.keystr(path), leaf is x.array) == ("['x'].array", True)
    assert jax.tree.map(lambda a: a * 2, x).array[0, 1] == 4
    assert jax.tree.structure(x) == jax.tree.structure(mn.named(counting(2, 3), "a:2 b:3"))
    assert jax.tree.structure(x) != jax.tree.structure(mn.named(counting(2, 3), "b:2 a:3"))
    abstract = jax.eval_shape(mn.exp, x)
    assert (abstract.dims, abstract.array.shape) == (x.dims, (2, 3))


def test_grad_value_and_grad_and_checkpoint():
    x, w = mn.named(counting(2, 3), "a:2 b:3"), mn.named(counting(3), "b:3")
    loss = lambda w: mn.reduce_sum(mn.square(x * w)).array  # noqa: E731
    wanted = 2 * np.sum(np.asarray(x) ** 2, 0) * np.asarray(w)
    for function in (loss, jax.checkpoint(loss), jax.jit(loss)):
        gradient = jax.grad(function)(w)
        assert gradient.dims == w.dims
        np.testing.assert_allclose(gradient, wanted)
        value, gradient = jax.value_and_grad(function)(w)
        np.testing.assert_allclose(value, np.sum((np.asarray(x) * np.asarray(w)) ** 2))
        np.testing.assert_allclose(gradient, wanted)


def test_vmap_and_scan_of_jax_take_the_leading_dim():
    x, w = mn.named(counting(2, 3), "a:2 b:3"), mn.named(counting(3), "b:3")
    seen = []

    def product(x: mn.NamedArray) -> Any:
        seen.append(x.dims)
        return mn.einsum([x, w], "").array

    np.testing.assert_allclose(jax.vmap(product)(x), np.asarray(x) @ np.asarray(w))
    _, found = jax.lax.scan(lambda carry, x: (carry, product(x)), None, x)
    np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(w))
    assert set(seen) == {mn.as_dims("b:3")}


def test_names_that_do_not_fit_any_more_are_found_out():
    x = mn.named(counting(2, 3), "a:2 b:3")
    out = jax.vmap(lambda x: x * 2)(x)  # it knows no name for what it mapped over
    with pytest.raises(mw.DimError, match=r"has shape \(2, 3\) and is named \[b:3\]"):
        _ = out.dims
    assert mn.named(out, "a:2 b:3").dims == x.dims
    with pytest.raises(mw.DimError, match=r"has shape \(1, 3\) and is named \[a:2 b:3\]"):
        mn.exp(jax.tree.map(lambda a: a[:1], x))
    with pytest.raises(mw.DimError, match=r"has shape \(2,\) and is named \[a:2 b:3\]"):
        jax.vmap(mn.exp, in_axes=1)(x)


# Operators


X, Y = np.array([[5.0, -2.0, 3.0], [1.0, 4.0, -7.0]]), np.array([2.0, 3.0, -4.0])
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
}


@pytest.mark.parametrize("sign", OPERATORS)
def test_operators(sign):
    operator = OPERATORS[sign]
    x, y = mn.named(X, "a:2 b:3"), mn.named(Y, "b:3")
    np.testing.assert_allclose(operator(x, y), operator(X, Y), rtol=1e-6)
    np.testing.assert_allclose(operator(y, x), operator(Y, X), rtol=1e-6)
    assert str(operator(y, x).dims) == str(x.dims)
    for number in (3, 3.0, np.float32(3), jnp.float32(3), np.array(3.0), mn.named(3.0, "")):
        for one, other in (x, number), (number, x):
            result = operator(one, other)
            assert isinstance(result, mn.NamedArray), type(number)
            plain = [np.asarray(each) for each in (one, other)]
            np.testing.assert_allclose(result, operator(*plain), rtol=1e-6)


def test_operators_of_one_operand_and_of_truth_values():
    x = mn.named(X, "a:2 b:3")
    np.testing.assert_array_equal(-x, -X)
    np.testing.assert_array_equal(abs(x), abs(X))
    yes, no = x > 0, x < 3
    np.testing.assert_array_equal(yes & no, (X > 0) & (X < 3))
    np.testing.assert_array_equal(yes | no, (X > 0) | (X < 3))
    np.testing.assert_array_equal(~yes, X <= 0)
    np.testing.assert_array_equal(True & yes, X > 0)


def test_powers_of_negative_numbers():
    """Mesh-TensorFlow computes a power by exponential and logarithm, and gets NaN."""
    x = mn.named([-2.0, 3.0], "a:2")
    np.testing.assert_array_equal(x**2, [4, 9])
    np.testing.assert_array_equal(2**x, [0.25, 8])
    slope = jax.grad(lambda x: mn.reduce_sum(mn.power(x, 2)).array)(x)
    np.testing.assert_array_equal(slope, [-4, 6])


def test_where_does_not_look_at_the_other_side():
    """Mesh-TensorFlow multiplies by a mask, and infinity times zero is NaN."""
    assert float(mn.where(True, 1.0, jnp.inf)) == 1
    x = mn.named([1.0, 2.0], "a:2")
    slope = jax.grad(lambda x: mn.reduce_sum(mn.where(x > 0, x, jnp.inf)).array)(x)
    np.testing.assert_array_equal(slope, [1, 1])


def test_element_types():
    whole, half = mn.named([1, 2], "a:2"), mn.cast(mn.named([1.0, 2.0], "a:2"), jnp.bfloat16)
    single = mn.named(np.ones(2, "float32"), "a:2")
    # A number of Python's changes no element type; of two arrays' types the wider is taken.
    assert (half * 2.5).dtype == (2 / half).dtype == (half**2).dtype == jnp.bfloat16
    assert (whole + 1).dtype == jnp.int32
    assert (whole + 1.5).dtype == (half * single).dtype == (single * whole).dtype == jnp.float32
    assert (half > whole).dtype == mn.reduce_all(half > 0).dtype == jnp.bool
    assert mn.where(whole > 1, half, 0).dtype == jnp.bfloat16
    assert mn.einsum([half, half], "").dtype == jnp.bfloat16
    assert mn.einsum([half, single], "").dtype == jnp.float32
    assert mn.einsum([half, half], "", dtype=jnp.float32).dtype == jnp.float32
    assert mn.einsum([half, half, half], "", dtype=jnp.float32).dtype == jnp.float32


def test_arrays_without_names_are_refused():
    x = mn.named(counting(2), "a:2")
    for add in (lambda: x + jnp.ones(2), lambda: np.ones(2) + x, lambda: mn.exp([1.0, 2.0])):
        with pytest.raises(
            mw.DimError, match=r"an array of shape \(2,\) has no names for its dims"
        ):
            add()


# Broadcasting by name


@pytest.mark.parametrize(
    ("one", "other", "result"),
    [
        ("a:2 b:3", "b:3", "a:2 b:3"),
        ("b:3", "a:2 b:3", "a:2 b:3"),  # the one that has the other's dims in their order
        ("a:2 b:3", "b:3 a:2", "a:2 b:3"),
        ("b:3", "a:2", "b:3 a:2"),  # else the first's, then what is new
        ("b:3 a:2", "a:2 b:3 c:4", "b:3 a:2 c:4"),
        ("", "a:2", "a:2"),
    ],
)
def test_the_order_of_dims_of_a_result(one, other, result):
    x, y = (mn.named(counting(*(d.size for d in mn.as_dims(t))), t) for t in (one, other))
    assert (x + y).dims == mn.as_dims(result)
    assert mn.add(x, y, out=result).dims == mn.as_dims(result)


def test_a_result_in_another_order():
    x, y = mn.named(counting(2), "a:2"), mn.named(counting(3), "b:3")
    found = mn.multiply(x, y, out="c:2 b:3 a:2")
    np.testing.assert_array_equal(found, np.broadcast_to(np.outer(y, x), [2, 3, 2]))
    with pytest.raises(mw.DimError, match=r"multiply: out=\[a:2\] lacks b:3, which the operands"):
        mn.multiply(x, y, out="a:2")


def test_dims_that_are_known_need_no_size():
    x, y = mn.named(counting(2), "a:2"), mn.named(counting(3), "b:3")
    found = mn.multiply(x, y, out="b a")
    assert found.dims == mn.as_dims("b:3 a:2")
    assert mn.where(x > 1, x, y, out=["b", "a"]).dims == found.dims
    assert mn.broadcast(x, "c:4 a").dims == mn.as_dims("c:4 a:2")
    assert mn.reshape(found, "b c:2").dims == mn.as_dims("b:3 c:2")
    assert mn.einsum([x, y], "b a c:2").dims == mn.as_dims("b:3 a:2 c:2")
    assert mn.einsum([x, y], "d b", rename={"a": "d"}).dims == mn.as_dims("d:2 b:3")
    for says, function in [
        ("no dim 'c' in [a:2 b:3]. A new dim needs its size, such as 'c:8'",
         lambda: mn.add(x, y, out="a b c")),
        ("there is no dim 'c' in [a:2]", lambda: mn.broadcast(x, "a c")),
        ("5 does not say names and sizes", lambda: mn.broadcast(x, 5)),
    ]:  # fmt: skip
        with pytest.raises(mw.DimError, match=re.escape(says)):
            function()


def test_methods_are_the_operations():
    x, w = mn.named(counting(2, 3), "a:2 b:3"), mn.named(counting(3, 4), "b:3 c:4")
    for found, wanted in [
        (x @ w, mn.einsum([x, w])),
        (x.sum("a"), mn.reduce_sum(x, "a")),
        (x.mean(), mn.reduce_mean(x)),
        (x.max("a b"), mn.reduce_max(x)),
        (x.min("b"), mn.reduce_min(x, "b")),
        (x.prod("b"), mn.reduce_prod(x, "b")),
        ((x > 1).all("b"), mn.reduce_all(x > 1, "b")),
        ((x > 5).any("a"), mn.reduce_any(x > 5, "a")),
        (x.argmax("b"), mn.argmax(x, "b")),
        (x.argmin("b"), mn.argmin(x, "b")),
        (x.reshape("c:3 d:2"), mn.reshape(x, "c:3 d:2")),
        (x.rename("a", "c"), mn.rename(x, "a", "c")),
        (x.transpose("b a"), mn.transpose(x, "b a")),
        (x.broadcast("a b c:2"), mn.broadcast(x, "a b c:2")),
        (x.astype("int32"), mn.cast(x, "int32")),
    ]:
        assert (found.dims, found.dtype) == (wanted.dims, wanted.dtype)
        np.testing.assert_array_equal(found, wanted)
    assert x.max().item() == 6
    rules = mn.BoundRules(mn.DimRules("b:rows"), mesh(rows=1, cols=8))
    assert lies_by(rules, x.sum("a", rules=rules))


def test_functions_of_jax_numpy_say_where_theirs_are():
    x = mn.named(counting(2, 3), "a:2 b:3")
    for function in (jnp.exp, jnp.sum, jax.nn.relu, lambda x: jnp.where(x > 0, x, 0.0)):
        with pytest.raises(mw.DimError, match=r"\[a:2 b:3\].*mn.exp.* bare array, x.array"):
            function(x)
    np.testing.assert_array_equal(jnp.asarray(x), x.array)
    for found in (jnp.float32(2) * x, jnp.float32(2) - x, jnp.float32(2) < x):
        assert found.dims == x.dims  # operators of a JAX scalar are the named array's


def test_strict_promotion_is_that_of_jax():
    whole, single = mn.named([1, 2], "a:2"), mn.named(np.ones(2, "float32"), "a:2")
    with jax.numpy_dtype_promotion("strict"):
        for function in (lambda: whole * single, lambda: mn.einsum([whole, single])):
            with pytest.raises(ValueError, match="explicitly casting"):
                function()
        assert (mn.cast(whole, "float32") * single).dtype == jnp.float32


def test_functions_of_numpy_keep_names_or_are_refused():
    x = mn.named(np.array([1, 4], "float32"), "a:2")
    y = mn.named(np.ones(3, "float32"), "b:3")
    for found in (np.sqrt(x), np.float32(2) * x, x / np.float32(2), np.negative(x)):
        assert found.dims == x.dims
    np.testing.assert_array_equal(np.sqrt(x), [1, 2])
    assert (np.sum(x), np.mean(x), np.max(x), np.any(x), np.argmax(x)) == (5, 2.5, 4, True, 1)
    for function, says in [(lambda: np.sum(x, 0), r"x.sum\('a'\); received axis=0"),
                           (lambda: np.argmax(x, axis=0), r"x.argmax\('a'\)"),
                           (lambda: np.transpose(x), "every dim of .a:2. by name")]:  # fmt: skip
        with pytest.raises(mw.DimError, match=says):
            function()
    assert np.add(x, y).dims == mn.as_dims("a:2 b:3")
    assert np.any(x > 3)
    assert not np.all(x > 3)
    assert np.sum(x) == 5
    for wrong in (lambda: np.matmul(x, x), lambda: np.add.outer(x, x)):
        with pytest.raises(TypeError, match="__array_ufunc__"):
            wrong()


def test_one_name_with_two_sizes_is_refused():
    x, y = mn.named(counting(2, 3), "a:2 b:3"), mn.named(counting(4), "b:4")
    says = r"dim 'b' has size 3 and size 4 in \[a:2 b:3\], \[b:4\].*rename one of them"
    for what, function in [
        ("add", lambda: x + y),
        ("where", lambda: mn.where(True, x, y)),
        ("einsum", lambda: mn.einsum([x, y])),
        ("einsum", lambda: mn.einsum([x], "b:4")),
    ]:
        with pytest.raises(mw.DimError, match=f"{what}: {says}"):
            function()


SIZES = {"a": 2, "b": 3, "c": 4, "d": 5}
SOME = st.permutations(list(SIZES)).flatmap(
    lambda names: st.integers(0, len(names)).map(lambda count: tuple(names[:count]))
)


@pytest.mark.full
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(SOME, SOME, SOME)
def test_broadcasting_equals_numpys(one, two, three):
    """Any dims in any order: as if NumPy had all dims, in the order of the result."""
    arrays = [
        np.random.default_rng(i).normal(size=[SIZES[name] for name in names]).astype("float32")
        for i, names in enumerate((one, two, three))
    ]
    x, y, z = (
        mn.named(array, [mn.Dim(name, SIZES[name]) for name in names])
        for array, names in zip(arrays, (one, two, three), strict=True)
    )
    found = mn.where(x > 0, x - y, z)
    names = list(found.shape)
    assert set(names) == {*one, *two, *three}

    def full(array: np.ndarray, have: tuple[str, ...]) -> np.ndarray:
        ordered = array.transpose([have.index(name) for name in names if name in have])
        return ordered.reshape([SIZES[name] if name in have else 1 for name in names])

    wide = [full(*each) for each in zip(arrays, (one, two, three), strict=True)]
    wanted = np.where(wide[0] > 0, wide[0] - wide[1], wide[2])
    np.testing.assert_allclose(found, np.broadcast_to(wanted, found.array.shape), rtol=1e-6)


# Sums of products


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(SOME, SOME, SOME)
def test_products_of_two_equal_numpys(one, two, out):
    x, y = (
        np.random.default_rng(i).normal(size=[SIZES[name] for name in names]).astype("float32")
        for i, names in enumerate((one, two))
    )
    kept = [name for name in out if name in one + two]
    wanted = np.einsum(f"{''.join(one)},{''.join(two)}->{''.join(kept)}", x, y)
    shape = [SIZES[name] if name in kept else 1 for name in out]
    wanted = np.broadcast_to(wanted.reshape(shape), [SIZES[name] for name in out])
    dims = [[mn.Dim(name, SIZES[name]) for name in names] for names in (one, two, out)]
    found = mn.einsum([mn.named(x, dims[0]), mn.named(y, dims[1])], dims[2])
    assert found.dims == tuple(dims[2])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_default_result_of_einsum():
    dims = ("a:2 b:3", "b:3 c:4", "c:4 d:5 b:3")
    xs = [mn.named(counting(*(d.size for d in mn.as_dims(text))), text) for text in dims]
    for count, result in [(1, "a:2 b:3"), (2, "a:2 c:4"), (3, "a:2 d:5")]:
        assert mn.einsum(xs[:count]).dims == mn.as_dims(result)
    assert mn.einsum(xs[:2], reduce="a, c").dims == mn.as_dims("b:3")
    assert mn.einsum(xs[0], reduce=mn.Dim("a", 2)).dims == mn.as_dims("b:3")
    assert mn.einsum([xs[0], 2.0], "a:2").array.tolist() == [12, 30]


def test_wrong_sums_of_products_are_refused():
    x, y = mn.named(counting(2, 3), "a:2 b:3"), mn.named(counting(3, 4), "b:3 c:4")
    for says, function in [
        ("einsum needs at least one array", lambda: mn.einsum([])),
        ("there is no dim 'd' in [a:2 b:3 c:4]", lambda: mn.einsum([x, y], reduce="d")),
        ("b:3 is in reduce= and in out=[a:2 b:3 c:4]",
         lambda: mn.einsum([x, y], "a:2 b:3 c:4", reduce="b")),
        ("no subscripts such as 'ab,bc'", lambda: mn.einsum("ab,bc")),
        ("dims are given by name, as 'batch' or ['h', 'w']; received 0 in 0",
         lambda: mn.reduce_sum(x, 0)),  # pyright: ignore
        ("received 1 in ['a', 1]", lambda: mn.softmax(x, ["a", 1])),  # pyright: ignore
        ("c:4 is neither in reduce= nor in out=[a:2]",
         lambda: mn.einsum([x, y], "a:2", reduce="b")),
        ("rename= names 'b', which the product over [a:2 c:4] does not keep",
         lambda: mn.einsum([x, y], rename={"b": "d"})),
        ("dim 'c' appears twice in [c:2 c:4]", lambda: mn.einsum([x, y], rename={"a": "c"})),
    ]:  # fmt: skip
        with pytest.raises(mw.DimError, match=re.escape(says)):
            function()
    with pytest.raises(mw.DimError, match=r"there is no dim 'z' in \[a:2 b:3\]"):
        mn.reduce_sum(x, "a z")


def test_names_in_texts_stand_apart_by_the_same_signs():
    x = mn.named(counting(2, 3, 4), "a:2 b:3 c:4")
    several = ("a c", "a,c", "a; c", ["a", "c"], ["a", mn.Dim("c", 4)])
    sums = [mn.reduce_sum(x, over) for over in several]
    for one, other in itertools.pairwise(sums):
        np.testing.assert_array_equal(one, other)
