"""The placement: what each variable, input and activation is told, and every refusal at once."""

from __future__ import annotations

import pickle

import pytest

from meshwright import (
    MATCH,
    UNSHARDED,
    BatchError,
    Layout,
    LayoutError,
    LayoutMap,
    Mesh,
    ParamInfo,
    Placement,
    PlacementError,
)
from meshwright.testing import run_in_fresh_process

MESH = Mesh({"batch": 4, "model": 2})


def info(path="dense/kernel", dims=(8, 6), also=(), **more):
    return ParamInfo(path, (path, *also), dims, "float32", 4, **more)


def place(layouts, *infos, mesh=MESH):
    return Placement.of(mesh, layouts).place(infos)


def layout_of(layouts, one):
    return place(layouts, one)[0].layout


# A value


def test_friendly_arguments_make_a_value():
    placement = Placement.of(
        MESH,
        {"kernel": [None, "model"]},
        batch=["batch", "model"],
        inputs=["batch", "model"],
        targets={"label": ["batch"], 1: [None]},
        activations={"hidden": ["batch", None]},
    )
    assert placement.layouts[0].layout == Layout([None, "model"])
    assert placement.batch == ("batch", "model")
    assert placement.inputs == ((0, Layout(["batch", "model"])),)
    assert placement.targets == (("label", Layout(["batch"])), (1, Layout([None])))
    assert placement.activations[0].pattern == "hidden"
    twin = pickle.loads(pickle.dumps(placement))
    assert twin == placement
    assert hash(twin) == hash(placement)


def test_a_layout_map_and_a_mapping_say_the_same():
    layouts = LayoutMap(MESH, {"kernel": Layout([None, "model"])})
    assert Placement.of(MESH, layouts) == Placement.of(MESH, {"kernel": [None, "model"]})


def test_a_later_change_of_the_map_does_not_reach_the_placement():
    layouts = LayoutMap(layouts={"kernel": [None, "model"]})
    placement = Placement.of(MESH, layouts)
    layouts["kernel"] = ["model", None]
    assert placement.layouts[0].layout == Layout([None, "model"])


# Variables


def test_rules_place_variables_and_the_reason_is_told():
    kernel, bias = place({"kernel": [None, "model"]}, info(), info("dense/bias", (6,)))
    assert kernel.layout == Layout([None, "model"], MESH)
    assert kernel.reason == "layout 'kernel'"
    assert kernel.bytes_per_device == 8 * 3 * 4
    assert bias.layout == Layout.replicated(MESH, 1)
    assert bias.reason == "no layout: replicated"
    assert bias.bytes_per_device == bias.info.nbytes == 6 * 4


def test_exact_path_wins_else_the_first_pattern():
    layouts = {"kernel": [None, "model"], "dense": ["model", None], "dense/kernel": ["batch", None]}
    assert layout_of(layouts, info()).specs == ("batch", UNSHARDED)
    assert layout_of(layouts, info("dense_1/kernel")).specs == (UNSHARDED, "model")


@pytest.mark.parametrize("pattern", ["feature.kernel", "feature/kernel", "dense/k", "^sequential"])
def test_every_spelling_of_a_path_is_seen(pattern):
    one = info("sequential/dense/kernel", also=("dense/kernel", "feature.kernel"))
    assert layout_of({pattern: ["batch", None]}, one).specs == ("batch", UNSHARDED)


def test_seeds_and_metrics_are_replicated_whatever_the_rules_say():
    for role in ("seed", "metric"):
        (placed,) = place({".*": ["batch"]}, info("accuracy/total", (3,), role=role))
        assert placed.layout == Layout.replicated(MESH, 1)
        assert placed.reason == f"{role}: replicated"


def test_a_slot_lies_as_its_parameter_unless_its_dims_differ():
    kernel = info()
    slots = [
        info("adam/kernel_velocity", role="slot", owner="dense/kernel"),
        info("adafactor/kernel_rows", (8,), role="slot", owner="dense/kernel"),
        info("adam/iteration", (), role="slot"),
    ]
    velocity, rows, iteration, placed = place({".*kernel": [None, "model"]}, *slots, kernel)
    assert velocity.layout == placed.layout == Layout([None, "model"], MESH)
    assert velocity.reason == "slot of dense/kernel"
    assert rows.layout == Layout([None], MESH)
    assert iteration.layout == Layout([], MESH)
    assert rows.reason == iteration.reason == "slot: replicated"


def test_the_layers_own_argument_beats_a_pattern():
    layout = Layout(["model", None])
    (placed,) = place({"kernel": [None, "model"]}, info(asked=layout))
    assert placed.layout == layout.on(MESH)
    assert placed.reason == "the layer's own argument"


def test_the_layers_own_argument_and_a_rule_for_the_very_path_may_agree():
    layout = Layout(["model", None])
    assert layout_of({"dense.kernel": ["model", None]}, info(asked=layout)) == layout.on(MESH)


@pytest.mark.parametrize("exact", ["dense/kernel", "dense.kernel", "feature.kernel"])
def test_where_they_contradict_each_other_it_is_an_error(exact):
    one = info(also=("feature/kernel",), asked=Layout(["model", None]))
    with pytest.raises(PlacementError) as error:
        place({exact: [None, "model"]}, one)
    assert (
        "dense/kernel (8, 6), [model, unsharded] by the layer's own argument: the variable is laid "
        f"out twice: layout {exact!r} names this very path and gives [unsharded, model]. Keep one"
    ) in str(error.value)


def test_every_failing_variable_stands_in_one_error():
    infos = [
        info("a/kernel", (8, 7)),
        info("a/bias", (6,)),
        info("b/kernel", (3, 3, 8)),
        info("c/kernel", (8, 8)),
        info("d/kernel", (9, 5), asked=Layout(["batch", "model"])),
        info("e/kernel", (8, 8), asked=Layout(["rows", None])),
        info("f/kernel", (8, 8), asked=Layout(["batch", None])),
        info("g/kernel", (8, 8), asked=Layout([MATCH, None])),
    ]
    with pytest.raises(PlacementError) as error:
        place({"f/kernel": [None, "model"], "kernel": [None, "model"]}, *infos)
    expected = """\
6 variable(s) cannot be laid out on the mesh (batch=4, model=2); nothing was allocated.
  a/kernel (8, 7), [unsharded, model] by layout 'kernel': dim 1 of the variable (size 7) does not \
divide over axis 'model' (size 2). Pad it to 8, or leave it UNSHARDED.
  b/kernel (3, 3, 8), [unsharded, model] by layout 'kernel': the variable has 3 dims (3, 3, 8), \
but its layout [unsharded, model] on batch=4, model=2 has 2: write one entry per dim.
  d/kernel (9, 5), [batch, model] by the layer's own argument: dim 0 of the variable (size 9) does \
not divide over axis 'batch' (size 4). Pad it to 12, or leave it UNSHARDED.
  d/kernel (9, 5), [batch, model] by the layer's own argument: dim 1 of the variable (size 5) does \
not divide over axis 'model' (size 2). Pad it to 6, or leave it UNSHARDED.
  e/kernel (8, 8), [rows, unsharded] by the layer's own argument: dim 0 lies on axis 'rows', which \
the mesh (batch=4, model=2) does not have. Its axes are 'batch', 'model'.
  f/kernel (8, 8), [batch, unsharded] by the layer's own argument: the variable is laid out twice: \
layout 'f/kernel' names this very path and gives [unsharded, model]. Keep one of the two.
  g/kernel (8, 8), [match, unsharded] by the layer's own argument: MATCH keeps the layout that a \
dim has, and here it has none yet; name an axis, or leave the dim UNSHARDED.
A layout with pad=True pads such a weight where a step stores it, and only there."""
    assert str(error.value) == expected
    assert isinstance(error.value, ValueError)


def test_equal_layers_stand_in_one_line():
    """KV heads that do not divide: one line for all layers, and one for their values."""
    infos = [
        ParamInfo(path, (path,), (64, 8, 16), "float32", 4)
        for path in (f"blocks.{i}.attention/{name}" for i in range(32) for name in ("key", "value"))
    ]
    placement = Placement.of(Mesh({"model": 16}), {"attention": [None, "model", None]}, batch=None)
    with pytest.raises(PlacementError, match=r"64 variable\(s\) cannot be laid out") as caught:
        placement.place(infos)
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == [
        "blocks.0…31.attention/key",
        "blocks.0…31.attention/value",
    ]
    assert len(lines) == 4  # the last says how to pad


def test_on_another_mesh_the_same_rules_hold():
    placement = Placement.of(MESH, {"kernel": [None, "model"]}, inputs={"x": ["batch", "model"]})
    other = Mesh({"model": 3, "batch": 1})
    assert placement.on(other).place([info()])[0].layout == Layout([None, "model"], other)
    assert placement.on(other).input_layout("x", 0, (1, 3)).mesh == other
    assert placement.on(other).on(MESH) == placement
    assert placement.mesh == MESH


def test_on_a_mesh_without_the_axes_every_rule_that_needs_them_is_listed():
    placement = Placement.of(
        MESH,
        {"kernel": [None, "model"], "bias": ["model"]},
        inputs={"x": ["model"]},
        targets={2: ["model"]},
        activations={"hidden": ["model"]},
    )
    with pytest.raises(LayoutError) as error:
        placement.on(Mesh({"data": 8}))
    message = str(error.value)
    for what in (
        "layout 'kernel': dim 1 lies on axis 'model', which the mesh (data=8) does not have",
        "layout 'bias': dim 0",
        "the layout of input 'x'",
        "the layout of target 2",
        "activation 'hidden'",
        "batch='batch': the mesh (data=8) has no axis 'batch'. Use batch='data', or batch=None",
    ):
        assert what in message


# Inputs, targets, activations


def test_inputs_lie_along_the_batch_by_their_first_dim():
    placement = Placement.of(MESH)
    assert placement.input_layout("x", 0, (8, 28, 28)) == Layout(["batch", None, None], MESH)
    assert placement.target_layout(None, 0, (8,)) == Layout(["batch"], MESH)
    assert placement.input_layout(None, 0, ()) == Layout([], MESH)
    assert placement.batch_shards == 4


def test_the_batch_may_lie_over_several_axes_or_none():
    both = Placement.of(MESH, batch=("batch", "model"))
    assert both.batch_shards == 8
    assert both.input_layout("x", 0, (16, 3)) == Layout([("batch", "model"), None], MESH)
    none = Placement.of(MESH, batch=None)
    assert none.batch_shards == 1
    assert none.input_layout("x", 0, (7, 3)) == Layout.replicated(MESH, 2)


def test_inputs_are_named_by_name_or_else_by_position():
    placement = Placement.of(
        MESH, inputs={"image": ["batch", "model"], 0: [None, "model"], 1: ["model", None]}
    )
    assert placement.input_layout("image", 0, (8, 2)).specs == ("batch", "model")
    assert placement.input_layout("mask", 1, (8, 2)).specs == ("model", UNSHARDED)
    assert placement.input_layout(None, 0, (8, 2)).specs == (UNSHARDED, "model")
    assert placement.input_layout("mask", 2, (8, 2)).specs == ("batch", UNSHARDED)


def test_a_target_of_lower_rank_keeps_the_dims_that_it_has():
    placement = Placement.of(MESH, targets={0: ["batch", "model"]})
    assert placement.target_layout(None, 0, (8,)) == Layout(["batch"], MESH)


def test_activations_are_named_by_layer_path():
    placement = Placement.of(MESH, activations={"hidden": ["batch", "model"]})
    spellings = ["net/dense/out", "hidden"]
    assert placement.activation_layout(spellings) == Layout(["batch", "model"], MESH)
    assert placement.activation_layout(["net/output"]) is None


@pytest.mark.parametrize(
    ("rows", "nearest"), [(30, "28 and 32"), (3, "4"), (5, "4 and 8"), (127, "124 and 128")]
)
def test_a_batch_that_does_not_divide_tells_the_nearest_sizes(rows, nearest):
    message = (
        rf"a batch of {rows} does not divide over axis 'batch' \(size 4\). "
        rf"The nearest sizes that do: {nearest}\."
    )
    with pytest.raises(BatchError, match=message) as error:
        Placement.of(MESH).input_layout("x", 0, (rows, 3))
    assert isinstance(error.value, ValueError)
    with pytest.raises(BatchError, match=message):
        Placement.of(MESH).target_layout(None, 0, (rows,))


def test_a_batch_over_two_axes_tells_both():
    with pytest.raises(BatchError, match=r"'batch' \(size 4\) x axis 'model' \(size 2\).*8 and 16"):
        Placement.of(MESH, batch=("batch", "model")).input_layout("x", 0, (12, 3))


def test_another_dim_of_an_input_that_does_not_divide_is_named():
    placement = Placement.of(MESH, inputs={"image": ["batch", "model"]})
    with pytest.raises(BatchError, match=r"dim 1 of input 'image' \(size 3\) does not divide"):
        placement.input_layout("image", 0, (8, 3))


def test_an_input_of_higher_rank_than_its_layout_is_an_error():
    placement = Placement.of(MESH, inputs={"image": ["batch", "model"]})
    with pytest.raises(BatchError, match=r"input 'image' has 3 dims \(8, 2, 1\), .* has 2"):
        placement.input_layout("image", 0, (8, 2, 1))


def test_an_input_of_lower_rank_than_its_layout_is_an_error():
    placement = Placement.of(MESH, inputs=["batch", "model", None])
    with pytest.raises(BatchError, match=r"input 0 has 2 dims \(8, 2\), .* has 3"):
        placement.input_layout(None, 0, (8, 2))


def test_layouts_of_data_that_are_not_there_are_an_error():
    placement = Placement.of(MESH, inputs={"imgae": ["batch", None], 2: ["batch"]}, targets={0: []})
    says = r"inputs= lays out 'imgae', 2, but the batch has 2 inputs: 'image', 'mask'\. Use these"
    with pytest.raises(LayoutError, match=says):
        placement.check_data_keys("input", ["image", "mask"])
    with pytest.raises(LayoutError, match=r"lays out 2, but the batch has 1 input, which have no"):
        placement.check_data_keys("input", [None])
    placement.check_data_keys("target", [None])
    placement.check_data_keys("target", [])  # a batch to predict from has none
    Placement.of(MESH, inputs={2: ["batch"]}, strict=False).check_data_keys("input", [None])


# Bad input

FAULTS = {
    "an unknown axis in a rule": (
        lambda: Placement.of(MESH, {"kernel": ["modle", None]}),
        "layout 'kernel': dim 0 lies on axis 'modle', .* Its axes are 'batch', 'model'",
    ),
    "an unknown batch axis": (
        lambda: Placement.of(MESH, batch="data"),
        "batch='data': the mesh .batch=4, model=2. has no axis 'data'. Use batch='batch', or",
    ),
    "the batch on the same axis twice": (
        lambda: Placement.of(MESH, batch=("batch", "batch")),
        "names axis 'batch' more than once",
    ),
    "the batch on a number": (
        lambda: Placement.of(MESH, batch=4),
        "batch must be an axis.*received 4",
    ),
    "an input named by neither": (
        lambda: Placement.of(MESH, inputs={("a", "b"): ["batch"]}),
        r"inputs must be keyed by name or position; received \('a', 'b'\)",
    ),
    "a list of layouts": (
        lambda: Placement.of(MESH, inputs=[["batch", None], ["batch"]]),
        r"one layout is a list of axes.* position: inputs=\{0: \['batch', None\], \.\.\.\}",
    ),
    "a bare axis for an input": (
        lambda: Placement.of(MESH, inputs={"image": "batch"}),
        r"inputs\['image'\]: a layout is a sequence .* received 'batch'",
    ),
    "an axis twice in a target": (
        lambda: Placement.of(MESH, targets={1: ["batch", "batch"]}),
        r"targets\[1\]: axis 'batch' is used 2 times",
    ),
    "MATCH in a rule": (
        lambda: Placement.of(MESH, {"kernel": [MATCH, "model"]}),
        "layout 'kernel': MATCH keeps the layout that a dim has, and here it has none yet",
    ),
    "MATCH in an input": (
        lambda: Placement.of(MESH, inputs={"x": [MATCH]}),
        "the layout of input 'x': MATCH keeps",
    ),
    "no regular expression": (
        lambda: Placement.of(MESH, activations={"(": ["batch"]}),
        r"pattern '\(' is not a valid regular expression",
    ),
}


@pytest.mark.parametrize(("build", "message"), FAULTS.values(), ids=FAULTS)
def test_bad_input_is_a_layout_error_with_names_and_values(build, message):
    with pytest.raises(LayoutError, match=message):
        build()


def test_a_misspelt_argument_is_an_error():
    with pytest.raises(TypeError, match="layout_map"):
        Placement.of(MESH, layout_map={"kernel": ["model"]})


def test_placing_never_starts_jax():
    out = run_in_fresh_process(
        """
        import meshwright as mw
        from meshwright._compat import jax_is_running

        mesh = mw.Mesh({"batch": 4, "model": 2})
        placement = mw.Placement.of(mesh, {"kernel": [None, "model"]})
        placement.place([mw.ParamInfo("a/kernel", ("a/kernel",), (8, 6), "float32", 4)])
        placement.input_layout("x", 0, (8, 3))
        print(jax_is_running())
        """
    )
    assert out == "False\n"
