"""Meshes and layouts for hypothesis to draw, so that laws are tried on unforeseen shapes."""

from __future__ import annotations

import jax
from hypothesis import settings
from hypothesis import strategies as st

from meshwright import MATCH, UNSHARDED, Layout, Mesh
from meshwright.layouts.mesh import RESERVED

settings.register_profile("meshwright", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("meshwright")

axis_names = st.from_regex(r"[^\W\d]\w{0,5}", fullmatch=True).filter(lambda n: n not in RESERVED)
mesh_names = st.just("") | st.from_regex(r"\w{1,6}", fullmatch=True)
bound_shapes = st.sampled_from([(1,), (2,), (8,), (4, 2), (2, 4), (2, 2, 2), (1, 8), (3, 2), (5,)])
abstract_shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@st.composite
def bound_meshes(draw: st.DrawFn, names: st.SearchStrategy[str] = mesh_names) -> Mesh:
    """A mesh on some of this process's devices, in any order."""
    shape = draw(bound_shapes)
    order = draw(st.permutations(jax.devices()))
    return _mesh(draw, shape, order, names)


@st.composite
def abstract_meshes(draw: st.DrawFn, names: st.SearchStrategy[str] = mesh_names) -> Mesh:
    return _mesh(draw, draw(abstract_shapes), None, names)


def _mesh(draw, shape, order, names):
    axes = draw(st.lists(axis_names, min_size=len(shape), max_size=len(shape), unique=True))
    mesh = Mesh(list(zip(axes, shape, strict=True)), name=draw(names))
    return mesh if order is None else mesh.update(devices=order[: mesh.size])


meshes = bound_meshes() | abstract_meshes()
anywhere = meshes | st.none()


@st.composite
def layouts(
    draw: st.DrawFn,
    on: st.SearchStrategy[Mesh | None] = anywhere,
    unsplit: tuple[str, ...] = (UNSHARDED, MATCH),
    max_rank: int = 4,
) -> Layout:
    """Any layout: a dim may lie on several axes, in any order; rank 0 occurs."""
    mesh = draw(on)
    names = draw(st.lists(axis_names, max_size=3, unique=True)) if mesh is None else mesh.axis_names
    specs: list[list[str]] = [[] for _ in range(draw(st.integers(0, max_rank)))]
    for axis in draw(st.permutations(names)) if specs else []:
        dim = draw(st.none() | st.integers(0, len(specs) - 1))
        if dim is not None:
            specs[dim].append(axis)
    return Layout([tuple(axes) or draw(st.sampled_from(unsplit)) for axes in specs], mesh)


@st.composite
def layouts_with_dims(
    draw: st.DrawFn, on: st.SearchStrategy[Mesh] = meshes
) -> tuple[Layout, tuple[int, ...]]:
    """A layout on a mesh and the dims of a tensor that divides over it."""
    layout = draw(layouts(on, unsplit=(UNSHARDED,), max_rank=3))
    dims = [draw(st.integers(1, 3)) * layout.num_shards(dim) for dim in range(layout.rank)]
    return layout, tuple(dims)
