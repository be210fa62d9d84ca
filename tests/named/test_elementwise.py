"""Element-wise operations, sums of products and reductions: each under every kind of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from named_laws import USUAL, Case, check

import meshwright as mw
import meshwright.named as mn

X = "a:8 b:8 c:8"
SPLIT = ("a", "b", "c")


def positive(random: np.random.Generator) -> list[Any]:
    return [random.uniform(0.5, 2, [8, 8, 8]).astype("float32")]


def unary(name: str, numpy: Callable[[Any], Any], **how: Any) -> Case:
    return Case(name, getattr(mn, name), numpy, [X], SPLIT, **how)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


UNARY = [
    unary("exp", np.exp),
    unary("log", np.log, make=positive),
    unary("log1p", np.log1p, make=positive),
    unary("sqrt", np.sqrt, make=positive),
    unary("rsqrt", lambda x: 1 / np.sqrt(x), make=positive),
    unary("square", np.square),
    unary("reciprocal", np.reciprocal, make=positive),
    unary("sin", np.sin),
    unary("cos", np.cos),
    unary("tanh", np.tanh),
    unary("sigmoid", sigmoid),
    unary("relu", lambda x: np.maximum(x, 0)),
    unary("leaky_relu", lambda x: np.where(x > 0, x, 0.01 * x)),
    unary("elu", lambda x: np.where(x > 0, x, np.expm1(x))),
    unary(
        "selu",
        lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
    ),
    unary("gelu", lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    unary("swish", lambda x: x * sigmoid(x)),
    unary("softplus", lambda x: np.logaddexp(x, 0)),
    unary("absolute", np.abs),
    unary("negative", np.negative),
    unary("sign", np.sign),
    unary("floor", np.floor),
    unary("ceil", np.ceil),
    unary("is_finite", np.isfinite),
    Case("logical_not", lambda x: mn.logical_not(x > 0), lambda x: ~(x > 0), [X], SPLIT),
    Case("cast", lambda x: mn.cast(x, jnp.int32), lambda x: x.astype("int32"), [X], SPLIT),
    Case("clip", lambda x: mn.clip(x, -0.5, 0.5), lambda x: np.clip(x, -0.5, 0.5), [X], SPLIT),
]


def pair(random: np.random.Generator) -> list[Any]:
    """Divisors and bases that are far from zero, of other dims and in another order."""
    return [
        random.uniform(0.5, 2, [8, 8, 8]).astype("float32"),
        random.uniform(0.5, 2, [8, 8]).astype("float32"),
    ]


def binary(name: str, numpy: Callable[[Any, Any], Any]) -> Case:
    return Case(
        name,
        getattr(mn, name),
        lambda x, y: numpy(x, y.T[:, None, :]),
        [X, "c:8 a:8"],
        SPLIT,
        make=pair,
        slopes=(0, 1),
    )


BINARY = [
    binary("add", np.add),
    binary("subtract", np.subtract),
    binary("multiply", np.multiply),
    binary("divide", np.divide),
    binary("floor_divide", np.floor_divide),
    binary("mod", np.mod),
    binary("power", np.power),
    binary("minimum", np.minimum),
    binary("maximum", np.maximum),
    *(
        binary(name, getattr(np, name))
        for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
    ),
    binary("logical_and", np.logical_and),
    binary("logical_or", np.logical_or),
    Case(
        "where",
        lambda x, y: mn.where(x > y, x, y * 2),
        lambda x, y: np.where(x > y.T[:, None, :], x, 2 * y.T[:, None, :]),
        [X, "c:8 a:8"],
        SPLIT,
        slopes=(0, 1),
    ),
    Case("outer", mn.multiply, np.multiply.outer, ["a:8", "b:8 c:8"], SPLIT, slopes=(0, 1)),
    Case(
        "elementwise",
        lambda x, y: mn.elementwise(jnp.hypot, x, y),
        lambda x, y: np.hypot(x, y.T[:, None, :]),
        [X, "c:8 a:8"],
        SPLIT,
        make=pair,
        slopes=(0, 1),
    ),
]


def reduction(name: str, numpy: Callable[..., Any]) -> list[Case]:
    function = getattr(mn, name)
    return [
        Case(
            f"{name} over {over}",
            lambda x, over=over: function(x, over),
            lambda x, axes=axes: numpy(x, axis=axes),
            [X],
            SPLIT,
        )
        for over, axes in (("a", 0), ("a c", (0, 2)), (None, None))
    ]


def np_logsumexp(x: Any, axis: Any) -> Any:
    return np.log(np.sum(np.exp(x), axis=axis))


def np_softmax(x: Any, axis: Any) -> Any:
    return np.exp(x) / np.sum(np.exp(x), axis=axis, keepdims=True)


REDUCTIONS = [
    *reduction("reduce_sum", np.sum),
    *reduction("reduce_mean", np.mean),
    *reduction("reduce_max", np.max),
    *reduction("reduce_min", np.min),
    *reduction("logsumexp", np_logsumexp),
    Case(
        "reduce_prod",
        lambda x: mn.reduce_prod(x, "a"),
        lambda x: np.prod(x, 0),
        [X],
        SPLIT,
        gathers="a product is not a collective of XLA's CPU; its gradient needs every factor",
    ),
    Case(
        "reduce_all", lambda x: mn.reduce_all(x > -1, "a"), lambda x: np.all(x > -1, 0), [X], SPLIT
    ),
    Case("reduce_any", lambda x: mn.reduce_any(x > 1, "a"), lambda x: np.any(x > 1, 0), [X], SPLIT),
    Case("softmax", lambda x: mn.softmax(x, "a"), lambda x: np_softmax(x, 0), [X], SPLIT),
    Case(
        "softmax of two",
        lambda x: mn.softmax(x, "a c"),
        lambda x: np_softmax(x, (0, 2)),
        [X],
        SPLIT,
    ),
    Case(
        "log_softmax",
        lambda x: mn.log_softmax(x, "b"),
        lambda x: np.log(np_softmax(x, 1)),
        [X],
        SPLIT,
    ),
    Case(
        "log_softmax with a logit",
        lambda x: mn.log_softmax(x, "b", extra_logit=0.5),
        lambda x: x - np.log(np.sum(np.exp(x), 1, keepdims=True) + np.exp(0.5)),
        [X],
        SPLIT,
    ),
]

IO = ("batch:8 io:8", "io:8 hidden:8", "hidden:8 io:8")
EINSUMS = [
    Case(
        "product",
        lambda x, w: mn.einsum([x, w]),
        np.matmul,
        IO[:2],
        ("batch", "hidden"),
        slopes=(0, 1),
    ),
    Case(
        "product over a split dim",
        lambda x, w: mn.einsum([x, w]),
        np.matmul,
        IO[:2],
        ("io", "batch", "hidden"),
        slopes=(0, 1),
    ),
    Case(
        "three operands",
        lambda x, w, v: mn.einsum([x, w, v], "batch:8 io:8"),
        lambda x, w, v: x * np.sum(w * v.T, 1),
        IO,
        ("batch", "hidden", "io"),
        slopes=(0, 1, 2),
    ),
    Case(
        "a new dim",
        lambda x: mn.einsum([x], "copies:8 batch:8"),
        lambda x: np.broadcast_to(x.sum(1), [8, 8]),
        IO[:1],
        ("batch", "copies"),
        slopes=(0,),
    ),
    Case(
        "reduce=",
        lambda x, w: mn.einsum([x, w], reduce="batch"),
        lambda x, w: x.sum(0)[:, None] * w,
        IO[:2],
        ("hidden", "batch"),
        slopes=(0, 1),
    ),
    Case(
        "rename=, with no other dim in the way",
        lambda x, w: mn.einsum([x, w], rename={"batch": "rows"}),
        np.matmul,
        IO[:2],
        ("batch", "hidden"),
        more_rules={"rows": "batch"},
        slopes=(0, 1),
    ),
    Case(
        "rename=, a sum that is scattered",
        lambda x, w: mn.einsum([x, w], "rows:8 hidden:8", rename={"batch": "rows"}),
        np.matmul,
        IO[:2],
        ("io", "hidden"),
        more_rules={"rows": "io"},
        slopes=(0, 1),
    ),
    Case(
        "rename=, a dim that is gathered before",
        lambda x, w: mn.einsum([x, w], rename={"batch": "whole"}),
        np.matmul,
        IO[:2],
        ("hidden", "io"),
        more_rules={"batch": "hidden"},
        gathers="batch shares its axis with hidden",
        slopes=(0, 1),
    ),
    Case(
        "rename=, a scattered sum of three operands",
        lambda x, w, v: mn.einsum([x, w, v], "rows:8 hidden:8", rename={"batch": "rows"}),
        lambda x, w, v: x @ (w * v.T),
        IO,
        ("io", "hidden"),
        more_rules={"rows": "io"},
        slopes=(0, 1),
    ),
]

CASES = [*UNARY, *BINARY, *REDUCTIONS, *EINSUMS]


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)


@pytest.mark.parametrize(
    "function",
    [
        mn.reduce_max,
        mn.reduce_min,
        mn.argmax,
        mn.argmin,
        lambda x, dim: mn.top_k(x, dim, "k:2"),
        lambda x, dim: mn.nth_largest(x, 1, dim),
    ],
    ids=["reduce_max", "reduce_min", "argmax", "argmin", "top_k", "nth_largest"],
)
def test_complex_numbers_have_no_order(function: Callable[..., Any]) -> None:
    x = mn.named(np.ones(8, "complex64"), "a:8")
    with pytest.raises(mw.ArrayError, match="of complex64 elements none is the largest or"):
        function(x, "a")


@pytest.mark.parametrize(
    ("function", "gives"),
    [
        (jnp.sum, r"an array of shape \(\) where its operands together have shape \(8,\)"),
        (jnp.modf, "the function gives tuple"),
        (lambda array: None, "the function gives NoneType"),
    ],
)
def test_a_function_of_each_element_gives_one_number_for_each(function: Any, gives: str) -> None:
    with pytest.raises(mw.ArrayError, match=gives):
        mn.elementwise(function, mn.named(np.ones(8, "float32"), "a:8"))


def test_a_softmax_of_complex_numbers_may_be_split() -> None:
    x = np.random.default_rng(0).normal(size=[2, 8]).astype("complex64") * (1 + 2j)
    with mn.rules("a:rows", mw.create_mesh({"rows": 8})):
        result = mn.softmax(mn.named(x, "b:2 a:8"), "a")
    np.testing.assert_allclose(result, np_softmax(x, 1), rtol=1e-4)


@pytest.mark.parametrize("rules", ["a:rows", "a:rows+cols", "b:rows;a:cols"])
@pytest.mark.parametrize("function", [mn.reduce_max, mn.reduce_min])
def test_what_is_missing_is_missing_in_the_extremes_of_a_split_dim(
    function: Callable[..., Any], rules: str
) -> None:
    x = np.arange(64.0, dtype="float32").reshape(8, 8)
    x[3, 5] = x[0, 1] = np.nan
    expected = getattr(np, function.__name__.removeprefix("reduce_"))(x, 0)
    with mn.rules(rules, mw.create_mesh({"rows": 4, "cols": 2})):
        result = function(mn.named(x, "a:8 b:8"), "a")
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("function", [mn.reduce_max, mn.reduce_min])
def test_no_elements_have_no_extreme(function: Callable[..., Any]) -> None:
    with pytest.raises(mw.DimError, match="a:0 has no elements"):
        function(mn.named(np.ones([0, 8]), "a:0 b:8"), "a")


def test_a_dim_is_reduced_once() -> None:
    with pytest.raises(mw.DimError, match="dim 'a' appears twice"):
        mn.softmax(mn.named(np.ones(8, "float32"), "a:8"), "a a")
