"""Other dims for the same elements, under every kind of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from named_laws import USUAL, Case, check, of_each, x8

import meshwright as mw
import meshwright.named as mn
from meshwright.named import shapes

X = "a:8 b:8 c:8"
SPLIT = ("a", "b", "c")
DIVIDED = "a dim that is split becomes one that is not"


def unary(name: str, named: Any, numpy: Any, split: Any = SPLIT, dims: str = X, **how: Any) -> Case:
    return Case(name, named, numpy, [dims], split, **how)


def reshaped(name: str, before: str, after: str, split: Any, **how: Any) -> Case:
    shape = [dim.size for dim in mn.as_dims(after)]
    return unary(
        f"reshape {name}",
        lambda x: shapes.reshape(x, after),
        lambda x: x.reshape(shape),
        split,
        before,
        **how,
    )


RESHAPES = [
    reshaped("that cuts", X, "a:8 d:2 e:4 c:8", ("a", "c")),
    reshaped("that keeps the outer part", "a:16 b:8", "a:8 d:2 b:8", ("a", "b")),
    reshaped("into one", "a:8 b:8 c:8", "a:64 c:8", ("a", "c")),
    reshaped("into none", "a:8 b:8", "a:8 d:8", ("b", "a", "d"), gathers=DIVIDED),
    reshaped("unaligned", "a:8 b:48", "a:16 b:24", ("a", "b"), gathers="pieces do not align"),
    reshaped("exchange", "a:8 b:8", "b:8 a:8", ("a", "b")),
]

SHAPES = [
    unary(
        "rename",
        lambda x: shapes.rename(x, "a", "d"),
        lambda x: x,
        ("a", "b", "d"),
        gathers=DIVIDED,
    ),
    unary("rename as a swap", lambda x: shapes.rename(x, {"a": "c", "c": "a"}), lambda x: x),
    unary(
        "split_dim",
        lambda x: shapes.split_dim(x, "a", "a:8 d:2"),
        lambda x: x.reshape(8, 2, 8, 8),
        dims="a:16 b:8 c:8",
    ),
    unary(
        "split_dim that splits the inner",
        lambda x: shapes.split_dim(x, "d", "e:2 a:8"),
        lambda x: x.reshape(2, 8, 8, 8),
        dims="d:16 b:8 c:8",
    ),
    unary(
        "merge_dims of distant ones",
        lambda x: shapes.merge_dims(x, "a d", "a"),
        lambda x: x.transpose(1, 2, 0, 3).reshape(8, 16, 8),
        dims="d:2 b:8 a:8 c:8",
    ),
    unary("transpose", lambda x: shapes.transpose(x, "c a b"), lambda x: x.transpose(2, 0, 1)),
    unary(
        "broadcast",
        lambda x: shapes.broadcast(x, "b:8 a:8 c:8"),
        lambda x: np.broadcast_to(x[:, None], [8, 8, 8]),
        dims="b:8 c:8",
    ),
]


CASES = [*RESHAPES, *SHAPES]


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)


ON_ONE_AXIS = [
    # One axis, another dim on it before and after: an all-to-all, as between batch and experts.
    ("reshape", lambda x: shapes.reshape(x, "d:8 e:8"), "a:8 b:8", {"a": 0, "e": 0}),
    ("rename", lambda x: shapes.rename(x, {"a": "d", "b": "e"}), "a:8 b:8", {"a": 0, "e": 0}),
    ("exchange", lambda x: shapes.reshape(x, "d:8 e:8"), "a:8 b:8",
     {"a": 0, "b": 1, "d": 1, "e": 0}),
    ("cut and exchange", lambda x: shapes.reshape(x, "d:4 e:8 b:8"), "a:32 b:8",
     {"a": 0, "d": 1, "e": 0}),
]  # fmt: skip


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)])
@pytest.mark.parametrize(("function", "dims", "axes"), [row[1:] for row in ON_ONE_AXIS],
                         ids=[row[0] for row in ON_ONE_AXIS])  # fmt: skip
def test_dims_change_axes(
    function: Callable[[Any], Any], dims: str, axes: dict[str, int], sizes: tuple[int, int]
) -> None:
    """No element gets lost when axes move between dims. (In Mesh-TensorFlow some did.)"""
    mesh = mw.create_mesh({"rows": sizes[0], "cols": sizes[1]})
    rules = mn.BoundRules(mn.DimRules({d: ("rows", "cols")[i] for d, i in axes.items()}), mesh)
    shape = [dim.size for dim in mn.as_dims(dims)]
    array = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    with mn.rules(rules):
        x = mn.named(array, dims)
        compiled = jax.jit(function).lower(x).compile()
        result = compiled(x)
        expected = array.reshape([dim.size for dim in result.dims])
        np.testing.assert_array_equal(np.asarray(result), expected)
        assert result.array.sharding.is_equivalent_to(
            rules.layout(result.dims).sharding, len(result.dims)
        )
        assert " all-gather" not in compiled.as_text()
        slope = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(function(x).array))))(x)
    np.testing.assert_allclose(np.asarray(slope), 2 * array)


REFUSED = [
    ("reshape", lambda x: shapes.reshape(x, "d:8 e:9"), r"\[a:8 b:8\] has 64 .*\[d:8 e:9\] 72"),
    ("rename of none", lambda x: shapes.rename(x, "d", "e"), "no dim 'd' in .a:8 b:8."),
    ("rename to none", lambda x: shapes.rename(x, "a"), "no new name for 'a'"),
    ("rename twice", lambda x: shapes.rename(x, {"a": "d"}, "e"), "not both"),
    ("rename to another's", lambda x: shapes.rename(x, "a", "b"), "'b' appears twice in .b:8 b:8."),
    ("split_dim", lambda x: shapes.split_dim(x, "a", "d:2 e:3"), r"a:8 .*\[d:2 e:3\].* to 6"),
    ("merge_dims", lambda x: shapes.merge_dims(x, "", "d"), "no dims to merge; name them"),
    ("merge_dims of one twice", lambda x: shapes.merge_dims(x, "a a", "d"), "'a' appears twice"),
    ("merge_dims into another", lambda x: shapes.merge_dims(x, "a", "b"), "'b' appears twice"),
    ("transpose", lambda x: shapes.transpose(x, "b"), r"\[b:8\] lacks a:8 of \[a:8 b:8\]"),
    ("broadcast", lambda x: shapes.broadcast(x, "d:2 a:8"), r"\[d:2 a:8\] lacks b:8"),
    ("broadcast to a size", lambda x: shapes.broadcast(x, "a:8 b:16"), "size 8 and size 16"),
]  # fmt: skip


@of_each(REFUSED)
def test_refusals(call: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(mw.DimError, match=says):
        call(x8())
