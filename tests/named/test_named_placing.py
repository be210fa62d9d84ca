"""Moving elements along a dim: joins, parts and shifts, under every kind of rules."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from named_laws import USUAL, Case, check, of_each, x8

import meshwright as mw
import meshwright.named as mn
from meshwright.named import joining, placing, shifting

SPLIT = ("a", "b", "c")


def unary(
    name: str, named: Any, numpy: Any, split: Any = SPLIT, dims: str = "a:8 b:8 c:8", **how: Any
) -> Case:
    return Case(name, named, numpy, [dims], split, **how)


def moved(x: Any, offset: int, wrap: bool, axis: int = 0) -> Any:
    """NumPy's roll along one dim, with zeros for what comes round unless ``wrap``."""
    if wrap:
        return np.roll(x, offset, axis)
    places = np.arange(x.shape[axis]) - offset
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    inside = ((places >= 0) & (places < x.shape[axis])).reshape(shape)
    return np.where(inside, np.roll(x, offset, axis), np.zeros((), x.dtype))


def moved_each(x: Any, by: Any, wrap: bool) -> Any:
    return np.stack([moved(x[:, i], by[i], wrap) for i in range(8)], axis=1)


def traced(name: str, dims: str, by: Any, numpy: Callable[..., Any]) -> Case:
    """Shifts by numbers that are known at run time."""
    return Case(
        f"shift by what {name} at run time",
        lambda x, by: [shifting.shift(x, by, "a", wrap=wrap) for wrap in (True, False)],
        lambda x, by: [numpy(x, by, wrap) for wrap in (True, False)],
        ["a:8 b:8", dims],
        ("a", "b"),
        make=lambda random: [random.normal(size=[8, 8]).astype("float32"), np.int32(by)],
    )


def haloed(left: int, right: int, wrap: bool, split: tuple[str, ...]) -> Case:
    def numpy(x: Any) -> Any:
        flat = x.reshape(64, 8)
        if wrap:
            flat = np.concatenate([flat[-left:] if left else flat[:0], flat, flat[:right]])
        else:
            flat = np.pad(flat, ((left, right), (0, 0)))
        return np.stack([flat[8 * i : 8 * i + 8 + left + right] for i in range(8)])

    return unary(
        f"halo_exchange {left} {right} wrap={wrap} split={split[0]}",
        lambda x: shifting.halo_exchange(x, "b", left, right, blocks="a", wrap=wrap),
        numpy,
        split,
    )


OFFSETS = [(-5, True), (36, True), (3, False), (-20, False)]
SHIFTS = [
    unary(
        "shift",
        lambda x: [shifting.shift(x, by, "a", wrap=wrap) for by, wrap in OFFSETS],
        lambda x: [moved(x, by, wrap) for by, wrap in OFFSETS],
        ("a", "b"),
        "a:16 b:8",
    ),
    traced("is known", "", -3, moved),
    traced("each says", "b:8", [0, 1, -1, 5, 8, -8, 11, -20], moved_each),
    haloed(3, 0, True, ("a", "c")),
    haloed(2, 10, False, SPLIT),
    haloed(8, 8, True, ("b", "a", "c")),
]

JOINS = [
    Case("concat of one dim", lambda x, y: joining.concat([x, y], "a"),
         lambda x, y: np.concatenate([x, y]), ["a:16", "a:8"], ("a",), slopes=(0, 1)),
    Case("concat in another order", lambda x, y: joining.concat([x, y], "b"),
         lambda x, y: np.concatenate([x, y.T], 1), ["a:8 b:8", "b:16 a:8"], ("b", "a"),
         slopes=(0, 1)),
    Case("concat under another name", lambda x, y: joining.concat([x, y], "a", name="d"),
         lambda x, y: np.concatenate([x, y]), ["a:8 b:8", "a:16 b:8"], ("a", "b"), slopes=(0, 1)),
    Case("stack", lambda x, y: joining.stack([x, y] * 4, "a"), lambda x, y: np.stack([x, y] * 4),
         ["b:8 c:8", "b:8 c:8"], SPLIT, slopes=(0, 1)),
    Case("stack inside", lambda x, y: joining.stack([x, y], "d", 1),
         lambda x, y: np.stack([x, y.T], 1), ["b:8 c:8", "c:8 b:8"], ("b", "c"), slopes=(0, 1)),
    unary("unstack", lambda x: joining.unstack(x, "a"), list, ("a", "b"), "a:8 b:8",
          gathers="every device has every array"),
    unary("split in sizes", lambda x: joining.split(x, "a", [8, 16]), lambda x: np.split(x, [8]),
          ("a", "b"), "a:24 b:8"),
    unary("slice", lambda x: [joining.slice(x, "a", begin, 8) for begin in (0, 13)],
          lambda x: [x[:8], x[13:21]], ("a", "b"), "a:32 b:8"),
    unary("slice under another name",
          lambda x: [joining.slice(operand, "a", 3, 7, name="d") for operand in (x, x > 0)],
          lambda x: [x[3:10], x[3:10] > 0], ("a", "b"), "a:16 b:8"),
    Case("pad", lambda x, v: [joining.pad(x, "a", *by, v) for by in ((3, 5), (0, 24))],
         lambda x, v: [np.pad(x, (by, (0, 0)), constant_values=v) for by in ((3, 5), (0, 24))],
         ["a:8 b:8", ""], ("a", "b"), slopes=(0, 1)),
    unary("index", lambda x: x[{"a": 3, "b": slice(None, -1), "c": -1}], lambda x: x[3, :-1, -1],
          ("a", "c")),
    unary("index in steps", lambda x: x[{"a": slice(1, None, 2), "b": slice(None, None, -1)}],
          lambda x: x[1::2, ::-1], SPLIT, "a:16 b:8 c:8",
          gathers="the places, which are laid out as well"),
]  # fmt: skip

CASES = [*SHIFTS, *JOINS]


@pytest.mark.full_for("halo_exchange 2 10 wrap=False split=a-3-D")
@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)


def test_plan_moves_every_element_to_its_place() -> None:
    """Runs cover what two arrays of pieces have in common, and no round overloads a piece."""
    for piece, at, result, pieces in [(4, 3, 4, 4), (1, 5, 4, 4), (4, -5, 1, 4), (3, -2, 2, 8)]:
        every = placing.runs(piece, at, result, pieces)
        moved = {
            run.sender * piece + run.source + i: run.receiver * result + run.target + i
            for run in every
            for i in range(run.length)
        }
        expected = {i: i + at for i in range(piece * pieces) if 0 <= i + at < result * pieces}
        assert moved == expected
        assert sorted(map(repr, itertools.chain(*placing.rounds(every)))) == sorted(
            map(repr, every)
        )
        for pairs in placing.rounds(every):
            for place in ("sender", "receiver"):
                assert len({getattr(run, place) for run in pairs}) == len(pairs)


def messages(function: Callable[[Any], Any], *arrays: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The collectives of the compiled program: what they are, and the shape on one device."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    matches = re.findall(r"= \w+\[([\d,]*)\]\S* ([\w-]+?)(?:-start)?\(", text)
    names = ("all-", "collective-", "reduce-scatter")
    return [
        (name, tuple(map(int, dims.split(",")))) for dims, name in matches if name.startswith(names)
    ]


@pytest.mark.parametrize(
    ("function", "sent"),
    [
        (lambda x: shifting.shift(x, 3, "a"), [3]),
        (lambda x: shifting.shift(x, 9, "a", wrap=True), [7, 1]),
        (lambda x: joining.pad(x, "a", 4, 4), [2]),
        (lambda x: joining.slice(x, "a", 8, 16), [4]),
        (lambda x: joining.concat([x, x], "a"), [8] * 4),
    ],
    ids=["shift", "shift far", "pad", "slice", "concat"],
)
def test_devices_send_what_moves(function: Callable[[Any], Any], sent: list[int]) -> None:
    """And the gradient sends it back: nothing is gathered there either."""
    with mn.rules("a:rows", mw.create_mesh({"rows": 4, "cols": 2})):
        x = mn.named(np.ones([32, 3], "float32"), "a:32 b:3")
        expected = [("collective-permute", (n, 3)) for n in sent]
        assert sorted(messages(function, x)) == sorted(expected)
        slope = jax.grad(lambda x: jnp.sum(jnp.sin(function(x).array)))
        assert sorted(messages(slope, x)) == sorted(expected * 2)


def test_halos_are_all_that_is_sent() -> None:
    with mn.rules("blocks:rows", mw.create_mesh({"rows": 4, "cols": 2})):
        x = mn.named(np.ones([8, 16, 3], "float32"), "blocks:8 length:16 io:3")
        sent = messages(lambda x: shifting.halo_exchange(x, "length", 2, 1, blocks="blocks"), x)
    assert sorted(sent) == [("collective-permute", (1, n, 3)) for n in (1, 2)]


def test_under_vmap_and_scan() -> None:
    """What is written for each device's piece works inside JAX's transformations."""
    array = np.random.default_rng(0).normal(size=[3, 16]).astype("float32")

    def function(row: Any) -> Any:
        x = mn.named(row, "a:16")
        return joining.concat([shifting.shift(x, 3, "a"), x], "a").array

    def turned(x: mn.NamedArray) -> mn.NamedArray:
        step = jax.checkpoint(lambda x, _: (shifting.shift(x, 5, "a", wrap=True), None))
        return jax.lax.scan(step, x, None, length=3)[0]

    with mn.rules("a:rows", mw.create_mesh({"rows": 8})):
        mapped = jax.jit(jax.vmap(function))(array)
        x = mn.named(array[0], "a:16")
        scanned = jax.jit(turned)(x)
        slope = jax.jit(jax.grad(lambda x: jnp.vdot(turned(x).array, array[1])))(x)
    expected = np.concatenate([np.pad(array, ((0, 0), (3, 0)))[:, :16], array], 1)
    np.testing.assert_array_equal(mapped, expected)
    np.testing.assert_array_equal(scanned.array, np.roll(array[0], 15))
    np.testing.assert_allclose(slope.array, np.roll(array[1], -15), rtol=1e-6)


def test_under_named_vmap() -> None:
    """What vmap maps over may lie along an axis of its own, or the moved dim, or both may."""
    array = np.random.default_rng(0).normal(size=[8, 16]).astype("float32")

    def each(x: mn.NamedArray) -> list[mn.NamedArray]:
        return [shifting.shift(x, 3, "b"), mn.cumsum(x, "b"), mn.top_k(x, "b", "k:2")[0]]

    expected = [
        moved(array, 3, False, 1),
        np.cumsum(array, 1),
        np.sort(array, 1)[:, :-3:-1],
    ]
    for rules in ("a:rows;b:cols", "a:rows", "b:rows"):
        with mn.rules(rules, mw.create_mesh({"rows": 4, "cols": 2})):
            x = mn.named(array, "a:8 b:16")
            actual = jax.jit(mn.vmap(each, "a"))(x)
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(one.array, other, rtol=1e-5, atol=1e-6)


def test_an_abstract_mesh_lays_nothing_out() -> None:
    with mn.rules("a:rows", mw.Mesh({"rows": 64})):
        shape = jax.eval_shape(lambda x: shifting.shift(x, 1, "a"), mn.named(np.ones(64), "a:64"))
    assert shape.shape == {"a": 64}


def test_empty_runs() -> None:
    with mn.rules("a:rows", mw.create_mesh({"rows": 8})):
        x = mn.named(np.ones([8, 2]), "a:8 b:2")
        assert x[{"a": slice(3, 3)}].shape == {"a": 0, "b": 2}


REFUSED = [
    ("concat of none", lambda x: joining.concat([], "a"), "concat needs at least one array"),
    ("concat of others", lambda x: joining.concat([x, mn.rename(x, "b", "d")], "a"),
     r"dims \[a:8 b:8\], \[a:8 d:8\]; .* but for the one that is joined"),
    ("concat of other sizes", lambda x: joining.concat([x, x[{"b": slice(4)}]], "a"),
     r"dims \[a:8 b:8\], \[a:8 b:4\]"),
    ("split unevenly", lambda x: joining.split(x, "a", 3), "a:8 does not divide into 3"),
    ("split in sizes", lambda x: joining.split(x, "a", [4, 5]), "to 9; .*add up to a:8"),
    ("split in negative sizes", lambda x: joining.split(x, "a", [9, -1]), "add up to 8"),
    ("slice", lambda x: joining.slice(x, "a", 4, 5), "5 elements from 4 on .* 0 to 7"),
    ("pad", lambda x: joining.pad(x, "a", -1), "dim 'a'; received -1 and 0.*slice"),
    ("pad by several", lambda x: joining.pad(x, "a", 1, value=x), "value has dims .a:8 b:8."),
    ("stack of none", lambda x: joining.stack([], "d"), "stack needs at least one array"),
    ("stack of others", lambda x: joining.stack([x, x[{"a": 0}]], "d"), r"\[a:8 b:8\], \[b:8\]"),
    ("stack along a dim of theirs", lambda x: joining.stack([x, x], "a"), "have dim 'a'.*concat"),
    ("stack too far", lambda x: joining.stack([x, x], "d", 3), "position 3 is out of.*0 to 2"),
    ("index without names", lambda x: x[0], "an index names them.*unstack"),
    ("index of no dim", lambda x: x[{"d": 0}], "no dim 'd' in .a:8 b:8."),
    ("index too far", lambda x: x[{"a": 8}], "'a': 8.*elements of a:8 are 0 to 7"),
    ("shift along its offset", lambda x: shifting.shift(x, mn.arange("a:8"), "a"),
     r"along a:8 of \[a:8 b:8\]: the offset has dims \[a:8\]"),
    ("halo of one dim", lambda x: shifting.halo_exchange(x, "a", 1, blocks="a"), "split_dim"),
    ("negative halo", lambda x: shifting.halo_exchange(x, "a", -1, blocks="b"), "-1 and -1"),
    ("slice onto another", lambda x: joining.slice(x, "a", 0, 4, name="b"), "'b' appears twice"),
]  # fmt: skip


@of_each(REFUSED)
def test_refusals(call: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(mw.DimError, match=says):
        call(x8())


def test_an_offset_is_a_whole_number() -> None:
    with pytest.raises(mw.ArrayError, match="of type float32 are not whole numbers"):
        shifting.shift(x8(), 1.5, "a")


def test_a_result_that_cannot_be_split_is_refused() -> None:
    """The way out that the message leads to is a name that the rules do not split."""
    with mn.rules("a:rows", mw.create_mesh({"rows": 8})):
        with pytest.raises(
            mw.DivisibilityError, match=r"result of slice .a:5 b:8.: dim 'a' .size 5"
        ):
            joining.slice(x8(), "a", 0, 5)
        assert joining.slice(x8(), "a", 0, 5, name="head").shape == {"head": 5, "b": 8}
