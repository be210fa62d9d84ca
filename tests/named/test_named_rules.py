"""Rules say along which axes the dims of named arrays lie, and are all used."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from named_arrays import counting, lies_by, mesh

import meshwright as mw
import meshwright.named as mn


def test_rules_from_texts_mappings_and_pairs():
    expected = mn.DimRules("batch:rows;hidden:cols")
    pairs = [("batch", "rows"), ("hidden", "cols")]
    for form in (
        "batch:rows hidden:cols",
        "batch:rows,hidden:cols;batch:rows",
        dict(pairs),
        pairs,
    ):
        assert mn.DimRules(form) == mn.DimRules(expected) == expected
    assert (str(expected), repr(expected)) == (
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

        def functions(x: Any) -> list[mn.NamedArray]:
            x = mn.named(x, "a:8 b:8 c:8")
            return [function(x) for function in INHERITING]

        traced = jax.jit(functions).trace(jax.ShapeDtypeStruct((8, 8, 8), jnp.float32))
        x = jnp.sin(counting(8, 8, 8))
        result = jax.jit(functions)(x) + functions(x)  # in a program, and one by one
    assert str(traced.jaxpr).count("sharding_constraint") == 1  # that of named()
    for x in result:
        assert lies_by(rules, x), x.dims
