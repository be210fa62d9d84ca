"""Operators, broadcasting by name and sums of products equal NumPy's."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from named_arrays import counting, lies_by, mesh

import meshwright as mw
import meshwright.named as mn

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
            plain = [np.asarray(operand) for operand in (one, other)]
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


@pytest.mark.parametrize("kind", ["bool", "int8", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_sums_of_a_product_are_of_the_dtype(kind, count):
    x = np.ones([300, 2], jnp.dtype(kind))  # a sum of 300 is in no int8 and not in bfloat16
    arrays = [mn.named(x, "a:300 b:2"), mn.named(x[:, 0], "c:300"), mn.named(x[:1, 0], "d:1")]
    result = mn.einsum(arrays[:count], "b", dtype="float32")
    np.testing.assert_array_equal(result, np.full(2, 300.0 ** min(count, 2), "float32"))
    both = mn.einsum([arrays[0], arrays[0]], "", dtype="float32")
    assert float(both) == 600


def test_a_product_of_several_types_is_of_their_promoted_one():
    kinds = [("int8", "a:2 d:2"), ("int32", ""), ("uint8", ""), ("bfloat16", "c:2 a:2")]
    arrays = [
        mn.named(jnp.ones([dim.size for dim in mn.as_dims(dims)], kind), dims)
        for kind, dims in kinds
    ]
    result = mn.einsum(arrays, "a d")
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(result, "float32"), [[2, 2], [2, 2]])


def test_arrays_without_names_are_refused():
    x = mn.named(counting(2), "a:2")
    for add in (lambda: x + jnp.ones(2), lambda: np.ones(2) + x, lambda: mn.exp([1.0, 2.0])):
        with pytest.raises(
            mw.DimError, match=r"an array of shape \(2,\) has no names for its dims"
        ):
            add()


def test_what_is_no_array_is_refused():
    x = mn.named(counting(2), "a:2")
    for wrong in (lambda: x + None, lambda: x == {}, lambda: mn.named([[1], [2, 3]], "a:2 b:2")):
        with pytest.raises(mw.ArrayError, match=r"cannot make an array of .*holds numbers"):
            wrong()
    for wrong in (lambda: mn.cast(x, "flot32"), lambda: mn.einsum([x, x], dtype="flot32")):
        with pytest.raises(mw.ArrayError, match="unknown element type 'flot32'"):
            wrong()
    with pytest.raises(mw.DimError, match=r"einsum\(\[x, w\]\).* not an array \[a:2\]"):
        mn.einsum(x, x)  # type: ignore[arg-type]


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
    result = mn.multiply(x, y, out="c:2 b:3 a:2")
    np.testing.assert_array_equal(result, np.broadcast_to(np.outer(y, x), [2, 3, 2]))
    with pytest.raises(mw.DimError, match=r"multiply: out=\[a:2\] lacks b:3, which the operands"):
        mn.multiply(x, y, out="a:2")


def test_dims_that_are_known_need_no_size():
    x, y = mn.named(counting(2), "a:2"), mn.named(counting(3), "b:3")
    result = mn.multiply(x, y, out="b a")
    assert result.dims == mn.as_dims("b:3 a:2")
    assert mn.where(x > 1, x, y, out=["b", "a"]).dims == result.dims
    assert mn.broadcast(x, "c:4 a").dims == mn.as_dims("c:4 a:2")
    assert mn.reshape(result, "b c:2").dims == mn.as_dims("b:3 c:2")
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
    for actual, expected in [
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
        assert (actual.dims, actual.dtype) == (expected.dims, expected.dtype)
        np.testing.assert_array_equal(actual, expected)
    assert x.max().item() == 6
    rules = mn.BoundRules(mn.DimRules("b:rows"), mesh(rows=1, cols=8))
    assert lies_by(rules, x.sum("a", rules=rules))


def test_functions_of_jax_numpy_say_where_theirs_are():
    x = mn.named(counting(2, 3), "a:2 b:3")
    for function in (jnp.exp, jnp.sum, jax.nn.relu, lambda x: jnp.where(x > 0, x, 0.0)):
        with pytest.raises(mw.DimError, match=r"\[a:2 b:3\].*mn.exp.* bare array, x.array"):
            function(x)
    np.testing.assert_array_equal(jnp.asarray(x), x.array)
    for result in (jnp.float32(2) * x, jnp.float32(2) - x, jnp.float32(2) < x):
        assert result.dims == x.dims  # operators of a JAX scalar are the named array's


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
    for result in (np.sqrt(x), np.float32(2) * x, x / np.float32(2), np.negative(x)):
        assert result.dims == x.dims
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
    actual = mn.where(x > 0, x - y, z)
    names = list(actual.shape)
    assert set(names) == {*one, *two, *three}

    def full(array: np.ndarray, have: tuple[str, ...]) -> np.ndarray:
        ordered = array.transpose([have.index(name) for name in names if name in have])
        return ordered.reshape([SIZES[name] if name in have else 1 for name in names])

    wide = [full(*operand) for operand in zip(arrays, (one, two, three), strict=True)]
    expected = np.where(wide[0] > 0, wide[0] - wide[1], wide[2])
    np.testing.assert_allclose(actual, np.broadcast_to(expected, actual.array.shape), rtol=1e-6)


# Sums of products


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(SOME, SOME, SOME)
def test_products_of_two_equal_numpys(one, two, out):
    x, y = (
        np.random.default_rng(i).normal(size=[SIZES[name] for name in names]).astype("float32")
        for i, names in enumerate((one, two))
    )
    shared = [name for name in out if name in one + two]
    expected = np.einsum(f"{''.join(one)},{''.join(two)}->{''.join(shared)}", x, y)
    shape = [SIZES[name] if name in shared else 1 for name in out]
    expected = np.broadcast_to(expected.reshape(shape), [SIZES[name] for name in out])
    dims = [[mn.Dim(name, SIZES[name]) for name in names] for names in (one, two, out)]
    actual = mn.einsum([mn.named(x, dims[0]), mn.named(y, dims[1])], dims[2])
    assert actual.dims == tuple(dims[2])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("name", ["reduce_max", "reduce_min"])
def test_the_largest_of_a_whole_dim_is_missing_where_an_element_is(name: str) -> None:
    """XLA's reductions on one CPU leave NaN out of such an array; those over a split dim, too."""
    array = np.random.default_rng(0).normal(size=[16, 16, 16]).astype("float32")
    array[array > 1.5] = np.nan
    result = getattr(mn, name)(mn.named(array, "a:16 b:16 c:16"), "c")
    expected = array.max(2) if name == "reduce_max" else array.min(2)
    np.testing.assert_array_equal(result.array, expected)
