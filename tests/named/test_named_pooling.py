"""Pooling by name, with every dim split: values and gradients are those of a loop in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from named_laws import Case, check, of_each, ones, under_each_kind

import meshwright as mw
import meshwright.named as mn
from meshwright import errors
from meshwright.hlo.collectives import read_collectives
from meshwright.named import pooling as p


def looped(
    x: Any, reduce: Callable[..., Any], windows: Sequence[int], strides: Sequence[int], pads: Any
) -> Any:
    """``reduce`` of each window of [batch, spatial..., channels], one window at a time.

    Places beyond the edges hold NaN, so that NumPy's ``nanmax`` and ``nanmean`` leave them out.
    """
    whole = np.pad(x, [(0, 0), *pads, (0, 0)], constant_values=np.nan)
    sizes = [(n - w) // s + 1 for n, w, s in zip(whole.shape[1:], windows, strides, strict=False)]
    result = np.empty([len(x), *sizes, x.shape[-1]], x.dtype)
    over = tuple(range(1, 1 + len(windows)))
    for at in np.ndindex(*sizes):
        rows = [slice(i * s, i * s + w) for i, s, w in zip(at, strides, windows, strict=True)]
        result[(slice(None), *at)] = reduce(whole[(slice(None), *rows)], axis=over)
    return result


IMAGE = "batch:8 h:16 w:8 io:2"
EVEN = "batch:8 h:8 w:16 io:8"


def pooled(
    name: str, split: str, windows: Any, strides: Any, pads: Any, x: str = IMAGE, **how: Any
) -> list[Case]:
    """The largest and the mean of the same windows; ``pads`` are worked out by hand."""
    sizes = [dim.size for dim in mn.as_dims(windows)]
    apart = sizes if strides is None else list(strides)
    return [
        Case(
            f"{word} {name}, {split}".removesuffix(", "),
            lambda x, function=function: function(x, windows, strides=strides, **how),
            lambda x, reduce=reduce: looped(x, reduce, sizes, apart, pads),
            [x],
            split.split(),
            gathers="a window reaches over the whole dim" if name == "gathered" else "",
        )
        for word, function, reduce in (
            ("max_pool", p.max_pool, np.nanmax),
            ("avg_pool", p.avg_pool, np.nanmean),
        )
    ]


CASES = [
    *pooled("side by side", "h w batch", "h:2 w:1", None, [(0, 0), (0, 0)]),
    *pooled("overlapping", "h w io", "h:3 w:2", (1, 1), [(1, 1), (0, 1)], padding="SAME"),
    *pooled("overlapping, strides", "h batch w", "h:4 w:3", (2, 1), [(1, 1), (0, 2)],
            padding=["SAME", (0, 2)]),
    *pooled("a rest dropped", "batch w io", "h:3 w:3", (5, 2), [(0, 0), (1, 1)],
            padding={"h": "VALID", "w": 1}),
    *pooled("wide windows", "h batch io", "h:9 w:5", (1, 1), [(0, 0), (0, 0)]),
    *pooled("gathered", "h w io", "h:16 w:1", (1, 1), [(7, 8), (0, 0)], padding="SAME"),
    Case("max_pool 1d", lambda x: p.max_pool(x, {"h": 2}),
         lambda x: x.reshape(8, 8, 2, 8, 2).max(2), [IMAGE], ("h", "w", "batch")),
    Case("avg_pool 3d, channels among them", lambda x: p.avg_pool(x, "h:2 w:2 io:2"),
         lambda x: x.reshape(8, 8, 2, 4, 2, 1, 2).mean((2, 4, 6)), [IMAGE], ("h", "batch", "w")),
    Case("max_pool of whole numbers", lambda x: p.max_pool(x, "h:3", strides=1, padding="SAME"),
         lambda x: np.stack([x[max(i - 1, 0) : i + 2].max(0) for i in range(16)]),
         ["h:16 w:8"], ("h", "w"), slopes=(),
         make=lambda random: [random.integers(-9, 9, [16, 8])]),
    Case("avg_pool of whole numbers", lambda x: p.avg_pool(x, "h:2"),
         lambda x: x.reshape(8, 2, 8).mean(1), ["h:16 w:8"], ("h", "w"), slopes=(),
         make=lambda random: [random.integers(-9, 9, [16, 8])]),
    Case("pool", lambda x: p.pool(x, "h:2 w:2", mn.reduce_sum),
         lambda x: x.reshape(8, 8, 2, 4, 2, 2).sum((2, 4)), [IMAGE], ("h", "w", "batch")),
    Case("pool by another reduction", lambda x: p.pool(x, "w:4", mn.logsumexp),
         lambda x: np.log(np.exp(x.reshape(8, 16, 2, 4, 2)).sum(3)), [IMAGE], ("h", "w", "batch")),
    Case("stride", lambda x: p.stride(x, "h:2 w:3"), lambda x: x[:, ::2, ::3], [IMAGE],
         ("h", "batch", "io")),
    Case("stride that leaves a rest", lambda x: p.stride(x, "w:5"), lambda x: x[:, :, ::5], [IMAGE],
         ("batch", "h", "w")),
    Case("stride beyond a device's own", lambda x: p.stride(x, "h:5"), lambda x: x[:, ::5], [IMAGE],
         ("batch", "h", "w")),
]  # fmt: skip


FEW = {str(CASES[2]), str(CASES[3])}
TABLE = [row for case in CASES for row in under_each_kind(case, FEW)]


@pytest.mark.full_for("max_pool wide windows, h batch io-3-D")
@pytest.mark.parametrize(("case", "kind"), TABLE)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)


# Every combination of split dims


def combined() -> Iterator[Any]:
    cases = [
        *pooled("same", "", "h:3 w:4", (1, 2), [(1, 1), (1, 1)], padding="SAME", x=EVEN),
        *pooled("valid", "", "h:2 w:9", (1, 1), [(0, 1), (0, 0)], padding=[(0, 1), 0], x=EVEN),
    ]
    names = "batch", "h", "w", "io"
    for case in cases:
        for kind, several in (
            ("1-D", itertools.permutations(names, 1)),
            ("3-D", itertools.permutations(names, 1)),  # with axes left over
            ("2-D", itertools.permutations(names, 2)),
            ("3-D", itertools.combinations(names, 3)),
        ):
            for split in several:
                yield replace(case, name=f"{case.name} {' '.join(split)}", split=split), kind


@pytest.mark.full
@pytest.mark.parametrize(("case", "kind"), list(combined()), ids=str)
def test_every_combination_of_split_dims(case: Case, kind: str) -> None:
    check(case, kind)


# What devices say to each other


def moved(function: Any, rules: str, axes: dict[str, int]) -> list[tuple[str, Any]]:
    """Every collective of the gradient: kind and sizes."""
    with mn.rules(rules, mw.create_mesh(axes)):
        x = mn.named(jnp.ones([8, 16, 8, 2]), IMAGE)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(function(x).array))))
        text = gradient.lower(x).compile().as_text() or ""
    collectives = read_collectives(text, tuple(axes.items()))
    return [
        (collective.kind, array.dims) for collective in collectives for array in collective.arrays
    ]


@pytest.mark.parametrize("function", [p.max_pool, p.avg_pool])
def test_overlapping_windows_exchange_edges_alone(function: Any) -> None:
    def overlapping(x: Any) -> Any:
        return function(x, "h:3 w:3", strides=1, padding="SAME")

    assert moved(overlapping, "h:all", {"all": 8}) == [("collective-permute", (8, 1, 8, 2))] * 4


@pytest.mark.parametrize(
    "function",
    [lambda x: p.max_pool(x, "h:2 w:2"), lambda x: p.stride(x, "h:2"),
     lambda x: p.pool(x, "h:2", mn.reduce_max)],
    ids=["max_pool", "stride", "pool"],
)  # fmt: skip
def test_windows_side_by_side_move_nothing(function: Any) -> None:
    assert moved(function, "h:rows;w:cols", {"rows": 4, "cols": 2}) == []


# Other laws


def test_short_floats_are_added_up_in_long_ones() -> None:
    x = mn.named(jnp.full([512], 1.01, "bfloat16"), "t:512")
    result = p.avg_pool(x, "t:512")
    assert result.dtype == jnp.bfloat16
    assert float(result.array[0]) == float(x.array[0])


def test_the_largest_of_equals_gets_the_gradient_whole_however_split() -> None:
    def gradient() -> Any:
        total = lambda x: jnp.sum(p.max_pool(x, "t:3", strides=1, padding="SAME").array)  # noqa: E731
        return np.asarray(jax.jit(jax.grad(total))(ones("t:16")))

    expected = gradient()
    with mn.rules("t:all", mw.create_mesh({"all": 8})):
        np.testing.assert_array_equal(gradient(), expected)
    assert expected.sum() == 16


def test_a_reduction_of_ones_own_may_have_a_dim_of_the_windows_name() -> None:
    x = mn.named(jnp.arange(8.0).reshape(4, 2), "t:4 t_window:2")
    np.testing.assert_array_equal(np.asarray(p.pool(x, "t:2", mn.reduce_max)), [[2, 3], [6, 7]])


def test_on_an_abstract_mesh_rules_are_checked() -> None:
    with mn.rules("t:all", mw.Mesh({"all": 4})):
        assert p.max_pool(ones("t:16"), "t:2").shape == {"t": 8}
        with pytest.raises(errors.DivisibilityError):
            p.max_pool(ones("t:8"), "t:4")


# Errors

X = "batch:4 h:8 w:8"
FAULTS = [
    ("dims that are not there", lambda: p.max_pool(ones(X), "height:2 width:2"),
     r"max_pool: x \[batch:4 h:8 w:8\] has no dim 'height', 'width'"),
    ("an empty window", lambda: p.avg_pool(ones(X), "h:0"),
     "avg_pool: windows must be whole numbers, at least 1; received 0 for dim 'h'"),
    ("a window of no dim", lambda: p.max_pool(ones(X), 2),  # pyright: ignore
     "max_pool: 2 does not say how many elements of which dims: give 'h:2 w:2'"),
    ("a window without a size", lambda: p.max_pool(ones(X), "h"), "'h' in 'h' is not of the form"),
    ("a stride of 0", lambda: p.max_pool(ones(X), "h:2", strides=0),
     "max_pool: strides must be whole numbers, at least 1; received 0 for dim 'h'"),
    ("padding as wide as the window", lambda: p.max_pool(ones(X), "h:2 w:1", padding=[(0, 2), 1]),
     r"(?s)padding \(0, 2\) of dim 'h' leaves a window of 2 without an element.*\n.*dim 'w'"),
    ("a window larger than its dim", lambda: p.max_pool(ones(X), "h:9"),
     r"dim 'h' \(size 8\) gives no result for a window of 9 \(stride 9, padding VALID\)"),
    ("a rest", lambda: p.pool(ones(X), "h:3 w:5"),
     "pool: 'h:8' in windows of 3, 'w:8' in windows of 5 leaves a rest"),
    ("a stride below 1", lambda: p.stride(ones(X), {"h": 0}), "stride: windows must be"),
    ("a bare array", lambda: p.max_pool(jnp.ones(3), "h:2"), "has no names for its dims"),
    ("truth values", lambda: p.max_pool(ones(X) > 0, "h:2"),
     "max_pool: of bool elements none is the largest"),
    ("complex numbers", lambda: p.max_pool(mn.cast(ones(X), "complex64"), "h:2"),
     "max_pool: of complex64 elements none is the largest"),
]  # fmt: skip


@of_each(FAULTS)
def test_faults(call: Any, says: str) -> None:
    with pytest.raises((errors.DimError, errors.ArrayError), match=says):
        call()


UNEVEN = [
    (lambda x: p.max_pool(x, "h:3", strides=1),
     r"max_pool: dim 'h' \(size 8\) becomes 6 .* use padding='SAME', which gives 8; or pad 'h' by "
     r"\(0, 2\), which gives 8; or rename 'h' before"),
    (lambda x: p.pool(x, "h:4"), "pool: dim 'h' .* becomes 2 .* Ways out: rename"),
    (lambda x: p.stride(x, "h:4"), "stride: dim 'h' .* becomes 2 .* Ways out: rename"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), UNEVEN, ids=["max_pool", "pool", "stride"])
def test_results_that_do_not_divide(call: Any, message: str) -> None:
    with (
        mn.rules("h:rows", mw.Mesh({"rows": 4})),
        pytest.raises(errors.DivisibilityError, match=message),
    ):
        call(ones(X))
