"""Replica groups in every spelling, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hlo.groups import axes_of, parse_groups

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@st.composite
def meshes_and_axes(draw):
    shape = tuple(draw(sizes))
    chosen = draw(st.lists(st.sampled_from(range(len(shape))), unique=True))
    return shape, tuple(chosen)


def by_numpy(positions: np.ndarray, chosen: tuple[int, ...]) -> list[list[int]]:
    """Groups along the chosen dims of a grid of positions, the first chosen varying slowest."""
    rest = [dim for dim in range(positions.ndim) if dim not in chosen]
    length = math.prod(positions.shape[dim] for dim in chosen)
    return positions.transpose(*rest, *chosen).reshape(-1, length).tolist()


def as_lists(groups):
    return [list(group) for group in groups]


@given(meshes_and_axes())
def test_lists(drawn):
    shape, chosen = drawn
    expected = by_numpy(np.arange(math.prod(shape)).reshape(shape), chosen)
    text = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in expected) + "}, more"
    assert as_lists(parse_groups(text, math.prod(shape))) == expected


@given(st.data(), sizes)
def test_iota(data, shape):
    order = data.draw(st.permutations(range(len(shape))))
    count = math.prod(shape)
    length = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    flat = np.arange(count).reshape(shape).transpose(order).reshape(-1, length)
    text = f"[{count // length},{length}]<=[{','.join(map(str, shape))}]"
    turned = f"{text}T({','.join(map(str, order))}), use_global_device_ids=true"
    assert as_lists(parse_groups(turned, count)) == flat.tolist()
    plain = np.arange(count).reshape(-1, length)
    assert as_lists(parse_groups(f"{text}, dimensions={{0}}", count)) == plain.tolist()


@given(meshes_and_axes())
def test_axes_of_a_mesh_of_xla(drawn):
    shape, chosen = drawn
    axes = ",".join(f"'axis_{i}'={size}" for i, size in enumerate(shape))
    named = ",".join(f"'axis_{i}'" for i in chosen)
    groups = parse_groups(f"mesh[{axes}] {{{named}}}, dimensions={{0}}", math.prod(shape))
    assert as_lists(groups) == by_numpy(np.arange(math.prod(shape)).reshape(shape), chosen)


@given(st.lists(st.integers(2, 3), min_size=3, max_size=3), st.integers(1, 2))
def test_a_part_of_an_axis(parts, other):
    before, part, after = parts
    axis = before * part * after
    positions = np.arange(axis * other).reshape(other, before, part, after)
    text = f"mesh['a'={other},'b'={axis}] {{'b':({before}){part}}}"
    assert as_lists(parse_groups(text, axis * other)) == by_numpy(positions, (2,))


@given(st.permutations(range(8)))
def test_a_mesh_whose_devices_are_listed(order):
    ids = ",".join(map(str, order))
    groups = parse_groups(f"mesh['a'=2,'b'=4], device_ids=({ids}) {{'a'}}, dimensions={{0}}", 8)
    assert as_lists(groups) == by_numpy(np.array(order).reshape(2, 4), (0,))


def test_a_mesh_whose_devices_are_transposed():
    groups = parse_groups("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", 8)
    assert groups == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_no_groups_are_all_devices():
    assert parse_groups("{}, to_apply=%add", 4) == ((0, 1, 2, 3),)


def test_an_unknown_spelling_is_an_error_and_not_a_guess():
    with pytest.raises(ValueError, match="unknown spelling: 'v9<4>'"):
        parse_groups("v9<4>", 4)


@given(meshes_and_axes())
def test_groups_along_axes_lie_along_these_axes(drawn):
    shape, chosen = drawn
    axes = tuple((f"x{i}", size) for i, size in enumerate(shape))
    groups = by_numpy(np.arange(math.prod(shape)).reshape(shape), chosen)
    expected = tuple(name for i, (name, size) in enumerate(axes) if i in chosen and size > 1)
    assert axes_of(tuple(map(tuple, groups)), axes) == expected
