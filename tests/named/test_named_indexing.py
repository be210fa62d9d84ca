"""Elements by their numbers, by their size and summed up to each, under every kind of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from named_laws import USUAL, Case, check, of_each

import meshwright as mw
import meshwright.named as mn
from meshwright.named import cumulative, indexing, ordering

BEST = "just the best of each piece"


def whole(*shape: int, below: int = 16) -> Callable[[np.random.Generator], Any]:
    """Indices, of which some are out of range at both ends."""
    return lambda random: random.integers(-3, below + 3, shape).astype("int32")


def taken(x: Any, indices: Any) -> Any:
    """Along the first dim, with zeros for what is out of range."""
    inside = (indices >= 0) & (indices < len(x))
    result = x[np.where(inside, indices, 0)]
    return np.where(inside.reshape(inside.shape + (1,) * (x.ndim - 1)), result, 0)


def gathered(name: str, dims: list[str], numpy: Any, split: Any, **how: Any) -> Case:
    shapes = [[dim.size for dim in mn.as_dims(text)] for text in dims]
    return Case(
        f"gather {name}",
        lambda x, i: indexing.gather(x, i, "vocab"),
        numpy,
        dims,
        split,
        make=lambda random: [random.normal(size=shapes[0]).astype("float32"),
                             whole(*shapes[1])(random)],
        **how,
    )  # fmt: skip


GATHERS = [
    gathered("from a split dim", ["vocab:16 io:8", "batch:8 length:8"], taken,
             ("vocab", "batch", "io")),
    gathered("of a split dim", ["vocab:16 io:8", "batch:8 length:8"], taken,
             ("batch", "io", "length")),
    gathered("in the middle", ["io:8 vocab:16 heads:8", "batch:8"],
             lambda x, i: taken(x.swapaxes(0, 1), i).swapaxes(0, 1), ("vocab", "io", "heads")),
    gathered("within each of a batch", ["batch:8 vocab:16 io:8", "length:8 batch:8"],
             lambda x, i: np.stack([taken(a, b) for a, b in zip(x, i.T, strict=True)]),
             ("vocab", "batch", "length")),
    gathered("within each of a split batch", ["vocab:16 batch:8", "batch:8 vocab:8"],
             lambda x, i: np.stack([taken(a, b) for a, b in zip(x.T, i, strict=True)], 1),
             ("batch", "vocab"),
             gathers="the indices, which lie along the same axis"),
]  # fmt: skip


def scattered(x: Any, indices: Any, values: Any) -> Any:
    x, inside = x.copy(), (indices >= 0) & (indices < len(x))
    np.add.at(x, indices[inside], np.broadcast_to(values, indices.shape + x.shape[1:])[inside])
    return x


def scatter(name: str, dims: list[str], numpy: Any, split: Any, **how: Any) -> Case:
    shapes = [[dim.size for dim in mn.as_dims(text)] for text in dims]
    return Case(
        f"scatter_add {name}",
        lambda x, i, v: indexing.scatter_add(x, i, v, "vocab"),
        numpy,
        dims,
        split,
        make=lambda random: [random.normal(size=shapes[0]).astype("float32"),
                             whole(*shapes[1])(random),
                             random.normal(size=shapes[2]).astype("float32")],
        slopes=(0, 2),
        **how,
    )  # fmt: skip


SCATTERS = [
    scatter("to a split dim", ["vocab:16 io:8", "batch:8", "batch:8 io:8"], scattered,
            ("vocab", "batch", "io")),
    scatter("within each of a batch", ["batch:8 vocab:16", "length:8 batch:8", "length:8"],
            lambda x, i, v: np.stack([scattered(a, b, v) for a, b in zip(x, i.T, strict=True)]),
            ("batch", "vocab", "length")),
]  # fmt: skip


def hot(indices: Any) -> Any:
    return np.where(indices[..., None] == np.arange(16), 2.0, 0.5)


ONE_HOTS = [
    Case("one_hot", lambda i: indexing.one_hot(i, "vocab:16", on=2, off=0.5), hot,
         ["batch:8 length:8"], ("vocab", "batch", "length"), make=lambda r: [whole(8, 8)(r)],
         slopes=()),
    Case("arange", lambda x: x * indexing.arange("a:8", "float32"),
         lambda x: x * np.arange(8)[:, None], ["a:8 b:8"], ("a", "b")),
]  # fmt: skip


def summed(x: Any, exclusive: bool, reverse: bool) -> Any:
    x = x[::-1] if reverse else x
    sums = np.cumsum(x, 0)
    sums = np.concatenate([np.zeros_like(sums[:1]), sums[:-1]]) if exclusive else sums
    return sums[::-1] if reverse else sums


WAYS = [(exclusive, reverse) for exclusive in (False, True) for reverse in (False, True)]
SUMS = [
    Case("cumsum", lambda x: [cumulative.cumsum(x, "a", exclusive=e, reverse=r) for e, r in WAYS],
         lambda x: [summed(x, *way) for way in WAYS], ["a:16 b:8"], ("a", "b")),
    Case("cumsum of truths", lambda x: cumulative.cumsum(x > 0, "a"),
         lambda x: np.cumsum(x > 0, 0), ["a:16 b:8"], ("b", "a"), slopes=()),
]  # fmt: skip


def ranked(x: Any, k: int, axis: int) -> list[Any]:
    places = np.argsort(-x, axis, kind="stable").take(np.arange(k), axis)
    return [np.moveaxis(array, axis, -1) for array in (np.take_along_axis(x, places, axis), places)]


def ties(random: np.random.Generator) -> list[Any]:
    return [random.integers(0, 4, [16, 8]).astype("float32")]


def top(name: str, split: tuple[str, ...], k: int, axis: int, **how: Any) -> Case:
    return Case(
        f"top_k {name}",
        lambda x: ordering.top_k(x, "ab"[axis], f"k:{k}"),
        lambda x: ranked(x, k, axis),
        ["a:16 b:8"],
        split,
        **how,
    )


ORDERS = [
    top("of a split dim", ("a", "b"), 3, 0, gathers=BEST),
    top("of equals, and more than a piece has", ("a", "b"), 11, 0, gathers=BEST, make=ties,
        slopes=()),
    top("beside a split dim", ("a",), 2, 1),
    top("to a split dim", ("a", "k"), 8, 0, gathers=BEST),
    Case("argmax and argmin", lambda x: [ordering.argmax(x, "a"), ordering.argmin(x, "a")],
         lambda x: [np.argmax(x, 0), np.argmin(x, 0)], ["a:16 b:8"], ("a", "b"), gathers=BEST,
         make=ties, slopes=()),
    Case("top_1", lambda x: ordering.top_1(x, "a"), lambda x: [x.max(0), x.argmax(0)],
         ["a:16 b:8"], ("a", "b"), gathers=BEST),
    Case("nth", lambda x: ordering.nth_largest(x, 2, "a"), lambda x: np.sort(x, 0)[-3],
         ["a:16 b:8"], ("a", "b"), gathers=BEST),
    Case("nth of whole numbers",
         lambda x: [ordering.nth_smallest(x, 2, "a"), ordering.nth_largest(x, 9, "a")],
         lambda x: [np.sort(x, 0)[2], np.sort(x, 0)[-10]], ["a:16"], ("a",),
         make=lambda r: [whole(16)(r)], slopes=(), gathers=BEST),
    Case("reduce_first", lambda x: ordering.reduce_first(x, "a"), lambda x: x[0], ["a:16 b:8"],
         ("a", "b")),
]  # fmt: skip

CASES = [*GATHERS, *SCATTERS, *ONE_HOTS, *SUMS, *ORDERS]


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)


def test_dims_that_share_an_axis() -> None:
    """A table and the indices into it may be split along one axis, though no product may be."""
    random = np.random.default_rng(0)
    table, places = random.normal(size=[16, 8]).astype("float32"), whole(8)(random)
    values = random.normal(size=[8, 8]).astype("float32")
    with mn.rules("vocab:all;batch:all", mw.create_mesh({"all": 8})):
        x, i = mn.named(table, "vocab:16 io:8"), mn.named(places, "batch:8")
        result = jax.jit(lambda x, i: indexing.gather(x, i, "vocab"))(x, i)
        v = mn.named(values, "batch:8 io:8")
        put = jax.jit(lambda *xs: indexing.scatter_add(*xs, "vocab"))(x, i, v)
    np.testing.assert_array_equal(result.array, taken(table, places))
    np.testing.assert_allclose(put.array, scattered(table, places, values), rtol=1e-5)


def test_an_index_that_is_known_at_run_time() -> None:
    array = np.arange(32, dtype="float32").reshape(16, 2)
    with mn.rules("a:rows", mw.create_mesh({"rows": 8})):
        x = mn.named(array, "a:16 b:2")
        results = [jax.jit(lambda x, i: x[{"a": i}])(x, i).array for i in (5, 16, -1)]
    np.testing.assert_array_equal(results, [array[5], 0 * array[0], 0 * array[0]])


def test_infinite_and_missing_numbers_stay() -> None:
    """Where devices sum what they have, the others' zeros are added and not multiplied."""
    array = np.array([1, np.inf, -np.inf, np.nan, 5, 6, 7, 8], "float32")
    with mn.rules("a:rows", mw.create_mesh({"rows": 8})):
        x = mn.named(array, "a:8")
        result = jax.jit(lambda x: indexing.gather(x, mn.named([1, 2, 3], "k:3"), "a"))(x)
        place = jax.jit(lambda x: ordering.argmax(x, "a"))(x)
    np.testing.assert_array_equal(result.array, array[1:4])
    assert int(place) == np.argmax(array)


def test_only_candidates_are_gathered() -> None:
    with mn.rules("a:rows", mw.create_mesh({"rows": 8})):
        x = mn.named(np.ones([64, 2], "float32"), "a:64 b:2")
        text = jax.jit(lambda x: ordering.top_k(x, "a", "k:3")).lower(x).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather" in line]
    assert gathers
    assert all("[2,24]" in line for line in gathers)


def x8() -> mn.NamedArray:
    return mn.named(np.arange(64).reshape(8, 8), "a:8 b:8")


@pytest.mark.parametrize("rules", ["", "a:all"])
def test_zeros_of_either_sign_are_equals(rules: str) -> None:
    x = np.array([-0.0, 0.0, 2.0, -0.0, -1.0, 0.0, -0.0, 0.0], "float32")
    with mn.rules(rules, mw.create_mesh({"all": 8})):
        values, places = ordering.top_k(mn.named(x, "a:8"), "a", "k:4")
    np.testing.assert_array_equal(values, [2, 0, 0, 0])
    np.testing.assert_array_equal(places, [2, 0, 1, 3])


REFUSED = [
    ("arange of two", lambda x: indexing.arange("a:8 b:8"), "along one dim.*received .a:8 b:8."),
    ("one_hot of two", lambda x: indexing.one_hot(x, "d:8 e:8"), "one_hot goes along one dim"),
    ("one_hot along theirs", lambda x: indexing.one_hot(x, "a:8"), "'a' appears twice"),
    ("gather along no dim", lambda x: indexing.gather(x, 0, "d"), "no dim 'd' in .a:8 b:8."),
    ("gather of another size", lambda x: indexing.gather(x, indexing.arange("b:4"), "a"),
     "dim 'b' has size 8 and size 4"),
    ("scatter_add of more", lambda x: indexing.scatter_add(x, 0, x, "a"),
     r"values have a:8, .*gives for these indices, \[b:8\]"),
    ("top_k of too few", lambda x: ordering.top_k(x, "a", "k:9"), "k:9 of a:8; there are only 8"),
    ("top_k of two dims", lambda x: ordering.top_k(x, "a", "k:2 l:2"), "received .k:2 l:2."),
    ("top_k onto another", lambda x: ordering.top_k(x, "a", "b:8"), "'b' appears twice"),
    ("nth of too few", lambda x: ordering.nth_largest(x, 8, "a"), "n=8 is out of range"),
    ("argmax of none", lambda x: ordering.argmax(x[{"a": slice(0)}], "a"), "a:0 has no elements"),
    ("reduce_first of none", lambda x: ordering.reduce_first(x[{"a": slice(0)}], "a"), "a:0"),
]  # fmt: skip


@of_each(REFUSED)
def test_refusals(call: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(mw.DimError, match=says):
        call(x8())


@pytest.mark.parametrize("name", ["one_hot", "gather", "scatter_add"])
def test_indices_are_whole_numbers(name: str) -> None:
    i = mn.named(np.ones(8, "float32"), "b:8")
    calls = {
        "one_hot": lambda: indexing.one_hot(i, "d:8"),
        "gather": lambda: indexing.gather(x8(), i, "a"),
        "scatter_add": lambda: indexing.scatter_add(x8(), i, 1, "a"),
    }
    with pytest.raises(mw.ArrayError, match=f"{name}: the indices of type float32 are not.*int32"):
        calls[name]()


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_indices_of_few_bits_reach_every_row(dtype: str) -> None:
    """A dim of 256 has no size in uint8: compared in these bits, every index was out of range."""
    ids = np.array([3, 100], dtype)
    table = np.arange(256, dtype="float32")
    x, i = mn.named(table, "vocab:256"), mn.named(ids, "batch:2")
    np.testing.assert_array_equal(indexing.gather(x, i, "vocab").array, table[ids])
    added = indexing.scatter_add(x, i, 1.0, "vocab").array - table
    np.testing.assert_array_equal(np.flatnonzero(added), ids)


def test_what_is_taken_from_nothing_is_zero() -> None:
    x = mn.named(np.zeros([2, 0, 3], "float32"), "batch:2 vocab:0 io:3")
    taken = indexing.gather(x, mn.named([0, 1], "length:2"), "vocab")
    assert taken.shape == {"batch": 2, "length": 2, "io": 3}
    assert not np.any(taken.array)
