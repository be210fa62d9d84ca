"""Weights that do not divide: the layout's words for padding, its refusals, what is stored."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import LayoutError, PlacementError
from meshwright.layouts.params import ParamInfo
from meshwright.layouts.placement import Placement
from meshwright.step.storing import Stored, Storing

MESH = mw.Mesh({"batch": 2, "model": 4})
COLUMNS = mw.Layout([None, "model"], pad=True)


def info(path: str = "output/kernel", dims: tuple[int, ...] = (64, 10)) -> ParamInfo:
    return ParamInfo(path, (path,), dims, "float32", 4)


# The layout


@pytest.mark.parametrize("layout", [COLUMNS, COLUMNS.on(MESH), mw.Layout([("a", "b")], pad=True)])
def test_a_padded_layout_is_a_value(layout: mw.Layout) -> None:
    assert mw.Layout.from_string(str(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    plain = mw.Layout(layout.specs, layout.mesh)
    assert layout != plain
    assert len({layout, plain, mw.Layout(layout.specs, layout.mesh, pad=True)}) == 2


def test_it_reads_as_text() -> None:
    assert str(COLUMNS) == "[unsharded, model] padded"
    assert str(COLUMNS.on(MESH)) == "[unsharded, model] padded on batch=2, model=4"
    assert repr(COLUMNS) == "Layout(['unsharded', 'model'], pad=True)"
    assert eval(repr(COLUMNS), {"Layout": mw.Layout}) == COLUMNS
    assert str(mw.Layout([None, "model"])) == "[unsharded, model]"


def test_other_layouts_made_from_it_are_padded_too() -> None:
    bound = COLUMNS.on(MESH)
    assert bound.pad
    assert bound.unbound() == COLUMNS
    assert bound.delete([0]) == mw.Layout(["model"], MESH, pad=True)
    assert mw.Layout(["match", "model"], pad=True).matching(mw.Layout(["a", None])).pad
    assert not bound.fitting([64, 10]).pad


@pytest.mark.parametrize(
    ("specs", "dims", "stored", "fitting"),
    [
        ([None, "model"], (64, 10), (64, 12), [None, None]),
        ([None, "model"], (64, 12), (64, 12), [None, "model"]),
        (["model", "batch"], (7, 3), (8, 4), [None, None]),
        ([("model", "batch"), None], (50257, 8), (50264, 8), [None, None]),
        (["batch", "model"], (6, 1), (6, 4), ["batch", None]),
    ],
)
def test_stored_dims_are_the_next_that_divide(specs, dims, stored, fitting) -> None:
    layout = mw.Layout(specs, MESH, pad=True)
    assert layout.stored_dims(dims) == stored
    assert mw.Layout(specs, MESH).stored_dims(dims) == dims
    assert layout.fitting(dims) == mw.Layout(fitting, MESH)


def test_dims_of_another_rank_are_refused() -> None:
    with pytest.raises(LayoutError, match="write one entry per dim"):
        COLUMNS.on(MESH).stored_dims([10])
    with pytest.raises(LayoutError, match="write one entry per dim"):
        COLUMNS.on(MESH).fitting([10])


def test_an_array_alone_is_not_padded() -> None:
    with pytest.raises(mw.DivisibilityError, match="does not divide"):
        COLUMNS.on(MESH).check([64, 10])


def test_pad_is_yes_or_no() -> None:
    with pytest.raises(LayoutError, match=r"pad must be True .*received 'zeros'"):
        mw.Layout(["model"], pad="zeros")  # pyright: ignore[reportArgumentType]


# The placement


def test_a_parameter_and_its_slots_are_stored_padded() -> None:
    kernel = info()
    slot = ParamInfo("m", ("m",), (64, 10), "float32", 4, "slot", "output/kernel")
    placed = Placement.of(MESH, {"output": COLUMNS}).place([kernel, slot])
    for variable in placed:
        assert variable.stored_dims == (64, 12)
        assert variable.bytes_per_device == 64 * 3 * 4
        assert variable.unpadded == mw.Layout([None, None], MESH)
    assert placed[0].reason == "layout 'output', stored as 64x12"


def test_a_parameter_that_divides_is_not_padded() -> None:
    (placed,) = Placement.of(MESH, {"output": COLUMNS}).place([info(dims=(64, 12))])
    assert placed.layout == mw.Layout([None, "model"], MESH)
    assert placed.reason == "layout 'output'"


def test_zero_shares_out_what_is_stored() -> None:
    rules = {"output": COLUMNS}
    (placed,) = Placement.of(MESH, rules, zero=3).place([info(dims=(512, 50))])
    assert placed.layout == mw.Layout(["batch", "model"], MESH, pad=True)
    assert placed.stored_dims == (512, 52)
    # Splitting a padded dim further never makes it larger: both levels store the same dims.
    for size in range(1, 400):
        (whole,) = Placement.of(MESH, rules).place([info(dims=(601, size))])
        (shared,) = Placement.of(MESH, rules, zero=3).place([info(dims=(601, size))])
        assert whole.stored_dims == shared.stored_dims


def test_without_pad_the_error_names_it() -> None:
    with pytest.raises(PlacementError) as raised:
        Placement.of(MESH, {"output": [None, "model"]}).place([info()])
    text = str(raised.value)
    assert "dim 1 of the variable (size 10) does not divide over axis 'model' (size 4)" in text
    assert text.endswith("pad=True pads such a weight where a step stores it, and only there.")


def test_padding_does_not_excuse_a_wrong_rank() -> None:
    with pytest.raises(PlacementError, match="write one entry per dim") as raised:
        Placement.of(MESH, {"output": COLUMNS}).place([info(dims=(10,))])
    assert "pad=True" not in str(raised.value)


def test_batches_and_activations_are_not_padded_by_layouts() -> None:
    with pytest.raises(LayoutError) as raised:
        Placement.of(MESH, inputs=COLUMNS, targets={"y": COLUMNS}, activations={"a": COLUMNS})
    faults = str(raised.value).splitlines()
    assert len(faults) == 3
    assert all("pad=True is for weights" in fault for fault in faults)


def test_a_layer_and_a_rule_that_differ_in_padding_contradict_each_other() -> None:
    info = ParamInfo("a/kernel", ("a/kernel",), (64, 10), "f", 4, asked=mw.Layout([None, "model"]))
    with pytest.raises(PlacementError, match="laid out twice"):
        Placement.of(MESH, {"a/kernel": COLUMNS}).place([info])


# What a step stores


def test_padding_and_cutting_are_inverse() -> None:
    mesh = mw.create_mesh(dict(MESH.axes))
    layout = COLUMNS.on(mesh)
    kernel = Stored((6, 10), layout, layout)
    value = jnp.arange(60.0).reshape(6, 10)
    padded = jax.jit(kernel.pad)(value)
    assert padded.shape == (6, 12)
    assert padded.sharding.shard_shape(padded.shape) == (6, 3)
    assert not np.asarray(padded)[:, 10:].any()
    for back in (kernel.cut, kernel.take):
        assert np.array_equal(jax.jit(back)(padded), value)


def test_the_gradient_of_a_padded_array_is_stored_with_zeros() -> None:
    mesh = mw.create_mesh(dict(MESH.axes))
    kernel = Stored((6, 10), COLUMNS.on(mesh), COLUMNS.on(mesh))
    padded = jax.jit(kernel.pad)(jnp.ones([6, 10]))
    gradient = jax.jit(jax.grad(lambda k: (kernel.take(k) ** 3).sum()))(padded)
    assert gradient.sharding.shard_shape(gradient.shape) == (6, 3)
    assert np.array_equal(np.asarray(gradient)[:, :10], np.full([6, 10], 3.0))
    assert not np.asarray(gradient)[:, 10:].any()


def test_nothing_is_stored_otherwise_where_nothing_is_padded() -> None:
    mesh = mw.create_mesh(dict(MESH.axes))
    placement = Placement.of(mesh, {"output": [None, "model"]})
    storing = Storing.of(placement, [info(dims=(64, 12))], [], [], [])
    assert not storing
    state = mw.TrainState({"output/kernel": jnp.ones([64, 12])}, {}, {}, {})
    assert storing.store(state) is state
