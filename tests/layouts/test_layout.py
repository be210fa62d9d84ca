"""The layout as a value, its arithmetic against JAX's own, and what keeps tensors from lying so."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import jax
import numpy as np
import pytest
from generated import abstract_meshes, bound_meshes, layouts, layouts_with_dims
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright import (
    MATCH,
    UNSHARDED,
    DivisibilityError,
    Layout,
    LayoutError,
    Mesh,
    MeshwrightError,
    create_mesh,
)
from meshwright.layouts.layout import as_layout
from meshwright.testing import run_in_fresh_process

MESH = Mesh({"batch": 4, "model": 2})
nameless_bound = bound_meshes(names=st.just(""))
nameless_abstract = abstract_meshes(names=st.just(""))


# A value


def test_says_what_it_is():
    layout = Layout([("batch", "model"), UNSHARDED], MESH)
    assert layout.specs == (("batch", "model"), "unsharded")
    assert layout.rank == 2
    assert layout.axes == ("batch", "model")
    assert layout.dim_axes(0) == layout.dim_axes(-2) == ("batch", "model")
    assert layout.dim_axes(1) == ()
    assert layout.num_shards(0) == layout.total_shards == 8
    assert layout.num_shards(-1) == 1
    assert layout.is_bound
    assert not Layout([UNSHARDED]).is_bound


def test_nothing_of_a_layout_is_called_shape():
    assert not hasattr(Layout([UNSHARDED, "model"], MESH), "shape")


def test_none_an_empty_tuple_and_a_tuple_of_one_are_read_as_what_they_mean():
    assert Layout([None, (), ["model"]]) == Layout([UNSHARDED, UNSHARDED, "model"])
    assert Layout(PartitionSpec("batch", None), MESH) == Layout(("batch", UNSHARDED), MESH)
    assert Layout([["batch", "model"]]) == Layout([("batch", "model")])


def test_the_order_of_axes_on_one_dim_matters():
    assert Layout([("batch", "model")], MESH) != Layout([("model", "batch")], MESH)


def test_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Layout([UNSHARDED], MESH).specs = ()


def test_ready_made_layouts():
    assert Layout.replicated(MESH, 2) == Layout([None, None], MESH)
    assert Layout.replicated(MESH, rank=0) == Layout([], MESH)
    assert Layout.batch_sharded(MESH, "batch", rank=3) == Layout(["batch", None, None], MESH)
    assert Layout.batch_sharded(MESH, "batch", rank=2, dim=-1) == Layout([None, "batch"], MESH)
    assert Layout.batch_sharded(None, ["batch", "model"], 1) == Layout([("batch", "model")])
    assert Layout.inner_sharded(MESH, "model", rank=3) == Layout([None, None, "model"], MESH)


def test_replication_and_batch_parallelism_are_told():
    assert Layout.replicated(MESH, 2).is_fully_replicated
    assert Layout(["x"], Mesh({"x": 1})).is_fully_replicated
    assert not Layout(["batch"], MESH).is_fully_replicated
    assert Layout([None]).is_fully_replicated
    assert not Layout(["x"]).is_fully_replicated
    assert Layout([("batch", "model"), None]).is_batch_parallel()
    assert not Layout(["batch", "model"]).is_batch_parallel()
    assert not Layout([None, "batch"]).is_batch_parallel()
    assert not Layout([]).is_batch_parallel()


@pytest.mark.parametrize(
    "other", [3, None, "[batch]", ["batch"], np.zeros((2, 2)), PartitionSpec("batch"), MESH]
)
def test_equality_with_anything_is_a_plain_no(other):
    assert (Layout(["batch"], MESH) == other) is False
    assert (Layout(["batch"], MESH) != other) is True


def test_dims_mesh_and_binding_make_the_difference():
    others = {
        Layout([], MESH),
        Layout([None], MESH),
        Layout([None]),
        Layout([MATCH], MESH),
        Layout(["batch"], MESH),
        Layout(["batch"]),
        Layout(["batch"], create_mesh(MESH.axes)),
    }
    assert len(others) == 7


@given(layouts())
def test_equal_layouts_hash_alike_and_copies_are_equal(layout):
    for twin in (Layout(layout.specs, layout.mesh), copy.copy(layout), copy.deepcopy(layout)):
        assert twin == layout
        assert hash(twin) == hash(layout)


@given(layouts())
def test_text_and_pickle_lead_back(layout):
    assert Layout.from_string(str(layout)) == layout
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(layout, protocol)) == layout


@given(layouts(on=abstract_meshes() | st.none()))
def test_repr_can_be_pasted_back_while_there_are_no_devices(layout):
    assert eval(repr(layout)) == layout


def test_pickle_leads_back_after_the_sharding_was_asked_for():
    layout = Layout(["batch"], create_mesh(MESH.axes))
    assert layout.sharding is layout.sharding
    assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize("text", ["", "batch", "[batch", "batch]", "[batch] batch=4", "[a], [b]"])
def test_text_that_is_no_layout_is_an_error_that_shows_the_text(text):
    with pytest.raises(LayoutError) as error:
        Layout.from_string(text)
    assert f"expected a layout such as '[unsharded, model] on model=2'; received {text!r}" in str(
        error.value
    )


def test_as_layout_takes_a_layout_or_bare_specs():
    layout = Layout(["batch"], MESH)
    assert as_layout(layout) is layout
    assert as_layout(["batch", None]) == Layout(["batch", None])


# Other layouts from one


@given(layouts(on=abstract_meshes()))
def test_unbinding_and_binding_lead_back(layout):
    assert layout.unbound().mesh is None
    assert layout.unbound().on(layout.mesh) == layout
    assert layout.on(layout.mesh) is layout


def test_on_another_mesh_the_specs_stay():
    other = Mesh({"model": 16, "batch": 1})
    assert Layout(["batch", "model"], MESH).on(other) == Layout(["batch", "model"], other)


def test_delete_leaves_the_dims_that_remain():
    layout = Layout(["batch", None, "model"], MESH)
    assert layout.delete([1]) == Layout(["batch", "model"], MESH)
    assert layout.delete([0, -1]) == Layout([None], MESH)
    assert layout.delete([]) == layout


def test_match_is_filled_in_from_what_lies_there():
    present = Layout([("batch", "model"), None], MESH)
    assert Layout([MATCH, None], MESH).matching(present) == present
    assert Layout([MATCH, MATCH]).matching(present) == present.unbound()
    assert Layout([None, "model"], MESH).matching(present) == Layout([None, "model"], MESH)


def test_match_that_would_use_an_axis_twice_is_an_error():
    with pytest.raises(LayoutError, match="axis 'batch' is used 2 times"):
        Layout([MATCH, "batch"], MESH).matching(Layout(["batch", None], MESH))


# The arithmetic, against JAX's own


@given(layouts_with_dims(on=bound_meshes()))
def test_offsets_and_local_dims_are_those_of_jax(case):
    layout, dims = case
    indices = layout.sharding.devices_indices_map(dims)
    local = layout.local_dims(dims)
    assert local == layout.sharding.shard_shape(dims)
    for device, offset in zip(layout.mesh.devices, layout.offsets(dims), strict=True):
        starts_and_stops = [
            index.indices(size)[:2] for index, size in zip(indices[device], dims, strict=True)
        ]
        assert starts_and_stops == [
            (start, start + size) for start, size in zip(offset, local, strict=True)
        ]


@given(layouts_with_dims())
def test_the_pieces_make_the_whole(case):
    layout, dims = case
    assert layout.global_dims(layout.local_dims(dims)) == dims
    assert layout.shard_bytes(dims, 4) * layout.total_shards == 4 * math.prod(dims)
    assert len(set(layout.offsets(dims))) == layout.total_shards


def test_pieces_of_an_empty_tensor_are_empty():
    assert Layout(["batch", None], MESH).local_dims([0, 3]) == (0, 3)


@given(layouts(on=nameless_bound | nameless_abstract, unsplit=(UNSHARDED,)))
def test_named_shardings_lead_back(layout):
    sharding = layout.sharding
    assert isinstance(sharding, NamedSharding)
    assert Layout.from_sharding(sharding, layout.rank) == layout


@given(layouts_with_dims(on=nameless_bound))
def test_real_arrays_tell_their_layout_and_lie_as_computed(case):
    layout, dims = case
    whole = np.arange(math.prod(dims)).reshape(dims)
    array = jax.device_put(whole, layout.sharding)
    assert Layout.from_sharding(array.sharding, array.ndim) == layout
    offsets = dict(zip(layout.mesh.devices, layout.offsets(dims), strict=True))
    for shard in array.addressable_shards:
        start = offsets[shard.device]
        piece = whole[tuple(slice(a, a + n) for a, n in zip(start, shard.data.shape, strict=True))]
        np.testing.assert_array_equal(shard.data, piece)
        assert shard.data.nbytes == layout.shard_bytes(dims, whole.astype(array.dtype).itemsize)


def test_a_short_partition_spec_leaves_the_other_dims_unsharded():
    sharding = NamedSharding(MESH.jax_mesh, PartitionSpec("batch"))
    assert Layout.from_sharding(sharding, rank=3) == Layout(["batch", None, None], MESH)


def test_an_array_on_one_device_lies_on_a_mesh_of_one():
    device = jax.devices()[2]
    array = jax.device_put(np.ones((2, 3)), device)
    layout = Layout.from_sharding(array.sharding, array.ndim)
    assert layout == Layout.replicated(Mesh.from_device(device), 2)


def test_the_name_of_the_mesh_is_all_that_a_sharding_loses():
    named = Layout(["batch"], create_mesh(MESH.axes, name="pod"))
    back = Layout.from_sharding(named.sharding, 1)
    assert back == named
    assert back.bound_mesh().name == ""


# Bad input: each a ValueError of our tree that names names and values

FAULTS = {
    "a bare axis": (lambda: Layout("batch", MESH), r"one entry per dim.* received 'batch'"),
    "a number": (lambda: Layout(2, MESH), "one entry per dim.* received 2"),
    "a number for a dim": (lambda: Layout([0], MESH), "an entry must be an axis.* received 0"),
    "nested tuples": (lambda: Layout([(("a",), "b")]), "an entry must be an axis.* received"),
    "JAX's sharding": (lambda: Layout(Layout(["batch"], MESH).sharding), "Layout.from_sharding"),
    "JAX's mesh": (lambda: Layout(["batch"], MESH.jax_mesh), "Mesh.from_jax"),
    "sizes for a mesh": (lambda: Layout(["batch"], {"batch": 4}), "received {'batch': 4}"),
    "an unknown axis": (
        lambda: Layout([None, "modle"], MESH),
        r"dim 1 lies on axis 'modle', .*\(batch=4, model=2\).* 'batch', 'model'",
    ),
    "an axis on two dims": (
        lambda: Layout(["batch", "batch"], MESH),
        r"axis 'batch' is used 2 times, on dims \[0, 1\]",
    ),
    "an axis twice on one dim": (
        lambda: Layout([("batch", "batch")]),
        r"axis 'batch' is used 2 times, on dims \[0, 0\]",
    ),
    "unsharded among axes": (
        lambda: Layout([("batch", UNSHARDED)]),
        r"dim 0 lies on \('batch', 'unsharded'\): 'unsharded' must stand alone",
    ),
    "match among axes": (lambda: Layout([(MATCH, "a")]), "'match' must stand alone"),
    "no name": (lambda: Layout([""]), "dim 0 lies on '', which is not a valid axis name"),
    "two names in one text": (
        lambda: Layout(["a,b"]),
        "dim 0 lies on 'a,b', which is not a valid axis name",
    ),
    "a left-over plus": (lambda: Layout.from_string("[a+]"), "'', which is not a valid axis name"),
    "a dim too far": (
        lambda: Layout.batch_sharded(MESH, "batch", rank=2, dim=2),
        r"no dim 2: the tensor has 2 dim.s., 0 to 1",
    ),
    "a dim too far back": (
        lambda: Layout.batch_sharded(MESH, "batch", rank=2, dim=-3),
        "no dim -3: the tensor has 2 dim",
    ),
    "a batch of rank 0": (
        lambda: Layout.batch_sharded(MESH, "batch", rank=0),
        "no dim 0: the tensor has no dims",
    ),
    "an inner dim of rank 0": (lambda: Layout.inner_sharded(MESH, "model", rank=0), "no dim -1"),
    "a batch on an unknown axis": (
        lambda: Layout.batch_sharded(MESH, "data", rank=2),
        "dim 0 lies on axis 'data', which the mesh",
    ),
    "a negative rank": (
        lambda: Layout.replicated(MESH, -1),
        "rank must be an integer.*received -1",
    ),
    "half a rank": (lambda: Layout.replicated(MESH, 1.5), "rank must be an integer.*received 1.5"),
    "num_shards of no dim": (lambda: Layout(["batch"], MESH).num_shards(1), "no dim 1"),
    "dim_axes of a truth": (lambda: Layout(["batch"], MESH).dim_axes(False), "no dim False"),
    "delete of no dim": (lambda: Layout(["batch"]).delete([3]), "no dim 3"),
    "on a mesh without the axis": (
        lambda: Layout(["model"], MESH).on(Mesh({"batch": 8})),
        "axis 'model', which the mesh .batch=8. does not have. Its axes are 'batch'",
    ),
    "num_shards while unbound": (
        lambda: Layout(["batch"]).num_shards(0),
        r"layout \[batch\] is unbound; bind it with layout.on\(mesh\)",
    ),
    "a sharding while unbound": (lambda: Layout(["batch"]).sharding, r"\[batch\] is unbound"),
    "offsets while unbound": (lambda: Layout(["batch"]).offsets([4]), r"\[batch\] is unbound"),
    "a sharding with MATCH": (lambda: Layout([MATCH], MESH).sharding, "holds MATCH.* relayout"),
    "MATCH of another rank": (
        lambda: Layout([MATCH], MESH).matching(Layout([None, None], MESH)),
        "MATCH keeps .* 1 dims .* with 2",
    ),
    "another rank": (
        lambda: Layout(["batch"], MESH).check([4, 3], "x"),
        r"x has 2 dims \(4, 3\), but its layout \[batch\] on .* has 1: write one entry per dim",
    ),
    "an open size": (
        lambda: Layout(["batch"], MESH).check([None], "x"),
        r"x has dims \(None,\); sizes must be whole numbers",
    ),
    "half a size": (lambda: Layout(["batch"], MESH).local_dims([2.5]), r"dims \(2.5,\)"),
    "a negative size": (lambda: Layout(["batch"], MESH).local_dims([-4]), r"dims \(-4,\)"),
    "a piece of another rank": (
        lambda: Layout(["batch"], MESH).global_dims([1, 1]),
        r"dims \(1, 1\) does not fit layout \[batch\]",
    ),
    "no sharding": (lambda: Layout.from_sharding("cpu:0", 1), "str has no named axes"),
    "a sharding of higher rank": (
        lambda: Layout.from_sharding(NamedSharding(MESH.jax_mesh, PartitionSpec(None, None)), 1),
        r"P.*None, None.* does not fit an array with 1 dims",
    ),
    "JAX's own word": (
        lambda: Layout([PartitionSpec.UNCONSTRAINED], MESH),
        "an entry must be an axis.* received UNCONSTRAINED",
    ),
}


@pytest.mark.parametrize(("build", "message"), FAULTS.values(), ids=FAULTS)
def test_bad_input_is_a_value_error_with_names_and_values(build, message):
    with pytest.raises(LayoutError, match=message) as error:
        build()
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, MeshwrightError)


def test_sums_that_are_left_to_do_are_no_layout():
    explicit = jax.sharding.AbstractMesh((4,), ("batch",), (jax.sharding.AxisType.Explicit,))
    sharding = NamedSharding(explicit, PartitionSpec(None, unreduced={"batch"}))
    with pytest.raises(LayoutError, match="no pending sums"):
        Layout.from_sharding(sharding, 1)


@pytest.mark.parametrize(
    ("specs", "dims", "message"),
    [
        (["batch"], [30], r"dim 0 of x \(size 30\) .* axis 'batch' \(size 4\). Pad it to 32, or"),
        ([None, "model"], [4, 7], r"dim 1 of x \(size 7\) .* axis 'model' \(size 2\). Pad it to 8"),
        (
            [("batch", "model")],
            [12],
            r"size 12.* axis 'batch' \(size 4\) x axis 'model' \(size 2\). Pad it to 16",
        ),
        (["batch"], [1], r"\(size 1\).* Pad it to 4"),
    ],
)
def test_a_dim_that_does_not_divide_tells_the_sizes_and_the_way_out(specs, dims, message):
    layout = Layout(specs, MESH)
    for ask in (layout.check, lambda dims, _: layout.offsets(dims)):
        with pytest.raises(DivisibilityError, match=message.replace("of x", "of .*")):
            ask(dims, "x")
    with pytest.raises(DivisibilityError, match=message):
        layout.check(dims, "x")


@given(layouts(on=abstract_meshes(), unsplit=(UNSHARDED,)), st.data())
def test_just_the_dims_that_do_not_divide_are_faults(layout, data):
    dims = [data.draw(st.integers(0, 40)) for _ in range(layout.rank)]
    wrong = [dim for dim in range(layout.rank) if dims[dim] % layout.num_shards(dim)]
    faults = layout.faults(dims, "x")
    assert [fault.split(" of x")[0] for fault in faults] == [f"dim {dim}" for dim in wrong]


def test_all_faults_stand_in_one_error():
    with pytest.raises(LayoutError) as error:
        Layout(["batch", "rows", "batch", "cols"], MESH)
    for fault in ("'batch' is used 2 times", "axis 'rows'", "axis 'cols'"):
        assert fault in str(error.value)
    with pytest.raises(DivisibilityError) as error:
        Layout(["batch", "model"], MESH).check([30, 7])
    assert len(str(error.value).splitlines()) == 2


# Other processes


def test_read_where_the_devices_are_missing_a_layout_comes_back_on_the_same_axes(tmp_path):
    layout = Layout([("model", "batch"), None], create_mesh(MESH.axes, name="pod"))
    file = tmp_path / "layout.pickle"
    file.write_bytes(pickle.dumps((layout, str(layout))))
    out = run_in_fresh_process(
        f"""
        import pickle
        from pathlib import Path
        import meshwright as mw
        from meshwright._compat import jax_is_running

        def read():
            pickled, text = pickle.loads(Path({str(file)!r}).read_bytes())
            assert mw.Layout.from_string(text) == pickled
            return pickled

        print(read(), jax_is_running())
        mw.virtual_devices(4)
        mw.create_mesh()
        print(read(), jax_is_running())
        """
    )
    assert out.splitlines() == [
        "[model+batch, unsharded] on pod: batch=4, model=2 False",
        "[model+batch, unsharded] on pod: batch=4, model=2 True",
    ]


def test_read_where_the_devices_are_a_layout_comes_back_bound(tmp_path):
    layout = Layout(["batch", None], create_mesh(MESH.axes, devices=jax.devices()[::-1]))
    file = tmp_path / "layout.pickle"
    file.write_bytes(pickle.dumps(layout))
    out = run_in_fresh_process(
        f"""
        import pickle
        from pathlib import Path
        import meshwright as mw
        mw.virtual_devices(8)
        mw.create_mesh()
        print(pickle.loads(Path({str(file)!r}).read_bytes()))
        """
    )
    assert out.strip() == str(layout)


def test_layouts_never_start_jax():
    out = run_in_fresh_process(
        """
        import pickle
        import meshwright as mw
        from meshwright._compat import jax_is_running

        layout = mw.Layout([("batch", "model"), None], mw.Mesh({"batch": 4, "model": 2}))
        hash(layout), str(layout), repr(layout), pickle.loads(pickle.dumps(layout))
        mw.Layout.from_string("[batch] on batch=8 @ cpu:0-7"), layout.unbound().on(layout.mesh)
        layout.offsets([8, 3]), layout.local_dims([8, 3]), layout.shard_bytes([8, 3], 4)
        layout.partition_spec, layout.sharding
        mw.Layout.from_sharding(layout.sharding, 2) == layout
        print(jax_is_running())
        """
    )
    assert out == "False\n"
    assert mw.Layout.from_string("[]").rank == 0
