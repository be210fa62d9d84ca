"""Dims with names, and the rules that lay them out: values, without any device."""

from __future__ import annotations

import pickle

import pytest

from meshwright import (
    MATCH,
    UNSHARDED,
    DimError,
    DimNames,
    DivisibilityError,
    Layout,
    LayoutError,
    LayoutMap,
    Mesh,
    MeshwrightWarning,
    ParamInfo,
    Placement,
    PlacementError,
    dims,
)
from meshwright.layouts.dim_rules import Dim, DimRules, as_dims, text_of
from meshwright.layouts.strict import inspect
from meshwright.testing import run_in_fresh_process

MESH = Mesh({"rows": 4, "cols": 2})
FFN = {"ffn.*kernel": dims("d_model d_ff")}


def info(path="ffn/kernel", sizes=(8, 6), **more):
    return ParamInfo(path, (path,), sizes, "float32", 4, **more)


def layout_of(one, layouts=FFN, rules="batch:rows;d_ff:cols"):
    return Placement.of(MESH, layouts, rules=rules).place([one])[0].layout


# Dims


@pytest.mark.parametrize(
    "text", ["batch:64 io:16", "batch:64;io:16", " batch:64 , io:16.", "batch:64;\n io:16"]
)
def test_dims_are_read_from_text_with_any_sign_between(text):
    assert as_dims(text) == (Dim("batch", 64), Dim("io", 16))


def test_dims_are_read_from_what_looks_like_them():
    batch = Dim("batch", 64)
    assert as_dims(batch) == as_dims([batch]) == as_dims([("batch", 64)]) == (batch,)
    assert as_dims("") == as_dims([]) == ()
    assert text_of(as_dims(text_of([batch, Dim("io", 16)]))) == "batch:64 io:16"


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ("x", "'x' in 'x' is not of the form 'batch:64'"),
        ("x:4:5", "'x:4:5' in 'x:4:5' is not of the form"),
        ("x:foo", "size 'foo' in 'x:foo' is not a whole number"),
        ("x:-4", "size '-4' in 'x:-4' is not a whole number"),
        ("x:4 y:2 x:4", r"dim 'x' appears twice in \[x:4 y:2 x:4\].*Rename one"),
        ("x:4 x:5", "dim 'x' appears twice"),
        ([("a b", 2)], "a dim name must be a word such as 'batch'; received 'a b'"),
        ([("a", 2.5)], "the size of dim 'a' must be a whole number, at least 0; received 2.5"),
        ([("a", True)], "received True"),
    ],
)
def test_what_is_no_dim_is_an_error_that_shows_it(dims, message):
    with pytest.raises(DimError, match=message) as error:
        as_dims(dims)
    assert isinstance(error.value, ValueError)


def test_a_dim_is_a_value_that_gives_others():
    dim = Dim("batch", 64)
    assert dim.resized(8) == Dim("batch", 8)
    assert dim.renamed("rows") == Dim("rows", 64)
    assert {dim: 1}[Dim("batch", 64)] == 1


# Rules


@pytest.mark.parametrize(
    "rules",
    [
        "batch:rows;hidden:cols",
        "batch:rows, hidden:cols",
        {"batch": "rows", "hidden": "cols"},
        [("batch", "rows"), ("hidden", "cols")],
        DimRules("batch:rows hidden:cols"),
        "batch:rows batch:rows hidden:cols",
    ],
)
def test_rules_are_one_value_however_they_are_written(rules):
    result = DimRules(rules)
    assert result == DimRules("batch:rows;hidden:cols")
    assert str(result) == "batch:rows;hidden:cols"
    assert pickle.loads(pickle.dumps(result)) == result
    assert hash(result) == hash(DimRules(str(result)))


def test_two_axes_for_one_dim_are_an_error():
    with pytest.raises(LayoutError, match=r"dim 'a' is given 2 axes \('x', 'y'\).*write 'a:x\+y'"):
        DimRules("a:x;a:y")


def test_an_axis_that_the_mesh_lacks_is_an_error_that_names_the_rule():
    with pytest.raises(LayoutError, match=r"rule 'a:modle': 'modle' is not an axis of the mesh"):
        DimRules("a:modle").check(MESH)


def test_rules_give_layouts_and_check_sizes_where_there_is_a_mesh():
    rules = DimRules("batch:rows;hidden:cols")
    assert rules.layout(as_dims("batch:7 io:3")) == Layout(["rows", None])
    assert rules.layout(as_dims("io:3 hidden:4"), MESH) == Layout([None, "cols"], MESH)
    with pytest.raises(DivisibilityError) as error:
        rules.layout(as_dims("batch:7 hidden:1"), MESH, "x")
    assert str(error.value) == (
        "x [batch:7 hidden:1]: dim 'batch' (size 7) does not divide over axis 'rows' (size 4). "
        "Sizes that do: 4 and 8.\n"
        "x [batch:7 hidden:1]: dim 'hidden' (size 1) does not divide over axis 'cols' (size 2). "
        "Sizes that do: 2."
    )


def test_two_dims_of_one_array_on_one_axis_are_an_error_that_names_both():
    with pytest.raises(LayoutError) as error:
        DimRules("batch:all;hidden:all").layout(as_dims("batch:8 hidden:4"), None, "h")
    assert str(error.value) == (
        "h [batch:8 hidden:4]: dims 'batch:8' and 'hidden:4' would both lie along axis 'all', "
        "which can split one of them. Leave one out of the rules (batch:all;hidden:all), or "
        "rename it where they meet."
    )


# Names without sizes


def test_names_are_a_value_from_text_or_sequence():
    names = dims("d_model d_ff")
    assert names == dims(["d_model", "d_ff"]) == dims("d_model, d_ff") == DimNames(names.names)
    assert names.rank == 2
    assert eval(repr(names)) == names
    assert eval(repr(dims("_ vocab", pad=True))) == dims([None, "vocab"], pad=True)
    assert pickle.loads(pickle.dumps(names)) == names
    assert hash(names) == hash(dims("d_model d_ff"))
    assert dims("").rank == dims([]).rank == 0


def test_names_become_layouts_by_rules():
    names = dims("heads _ d_kv _")
    assert names.layout(DimRules("heads:cols")) == Layout(["cols", None, None, None])
    assert dims("vocab", pad=True).layout(DimRules("vocab:cols")) == Layout(["cols"], pad=True)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("d_model d_model", "dim 'd_model' appears 2 times.*Name the one that no rule .* '_'"),
        ("d_model:512 d_ff", "'d_model:512': names stand alone here; sizes are the array's own"),
        (["d model"], "a dim name must be a word such as 'd_model'; received 'd model'"),
        ([5], "received 5"),
        (5, "dim names must be a string such as 'd_model d_ff'; received 5"),
    ],
)
def test_what_are_no_names_is_an_error(names, message):
    with pytest.raises(DimError, match=message):
        dims(names)


def test_padding_is_true_or_false():
    with pytest.raises(DimError, match=r"pad must be True .*received 'yes'"):
        dims("vocab", pad="yes")


# In a layout map


def test_a_layout_map_keeps_names_beside_layouts():
    layouts = LayoutMap(layouts={**FFN, "output": ["d_model", "d_ff"]})
    assert layouts["ffn.*kernel"] == dims("d_model d_ff")
    assert layouts["output"] == Layout(["d_model", "d_ff"])  # a bare sequence is always axes
    assert repr(layouts) == (
        "LayoutMap(2 layouts)\n  'ffn.*kernel': dims('d_model d_ff')\n  'output': [d_model, d_ff]"
    )


def test_names_and_rules_make_the_layout_that_axes_would():
    by_axes = Placement.of(MESH, {"ffn.*kernel": [None, "cols"]}, batch="rows")
    assert layout_of(info()) == by_axes.place([info()])[0].layout
    placed = Placement.of(MESH, FFN, rules="d_ff:cols").place([info()])[0]
    assert placed.reason == "layout 'ffn.*kernel', d_ff:cols"
    assert placed.names == dims("d_model d_ff")


def test_the_rules_alone_change_and_the_map_stays():
    assert layout_of(info(), rules="d_model:rows;d_ff:cols").specs == ("rows", "cols")
    assert layout_of(info(), rules="d_model:cols").specs == ("cols", UNSHARDED)
    assert layout_of(info(), rules="").specs == (UNSHARDED, UNSHARDED)


def test_a_slot_lies_as_its_parameter_that_has_names():
    slot = info("adam/velocity", role="slot", owner="ffn/kernel")
    factored = info("adafactor/rows", (6,), role="slot", owner="ffn/kernel", names=dims("d_ff"))
    placed = Placement.of(MESH, FFN, rules="d_ff:cols").place([slot, factored, info()])
    assert [variable.layout.specs for variable in placed] == [
        (UNSHARDED, "cols"),
        ("cols",),
        (UNSHARDED, "cols"),
    ]


def test_a_name_may_pad():
    layouts = {"vocab": dims("d_model vocab", pad=True)}
    placed = Placement.of(MESH, layouts, rules="vocab:cols").place([info("vocab", (8, 7))])[0]
    assert placed.stored_dims == (8, 8)
    assert placed.reason == "layout 'vocab', vocab:cols, stored as 8x8"


def test_inputs_targets_and_activations_may_be_named_too():
    placement = Placement.of(
        MESH,
        inputs={"image": dims("batch height _ _")},
        targets=dims("batch"),
        activations={"hidden": dims("batch d_ff")},
        rules="batch:rows;height:cols;d_ff:cols",
    )
    assert placement.input_layout("image", 0, (8, 4, 4, 3)).specs == (
        "rows",
        "cols",
        UNSHARDED,
        UNSHARDED,
    )
    assert placement.target_layout(None, 0, (8,)).specs == ("rows",)
    assert placement.activation_layout("hidden").specs == ("rows", "cols")


# The batch


def test_the_batch_lies_where_the_rules_lay_the_dim_of_that_name():
    assert Placement.of(MESH, FFN, rules="batch:rows;d_ff:cols").batch == "rows"
    assert Placement.of(MESH, FFN, rules="d_ff:cols").batch is None
    assert Placement.of(MESH, FFN, batch="cols", rules="d_ff:rows").batch == "cols"
    assert Placement.of(MESH, FFN, batch=["rows"], rules="batch:rows").batch == ("rows",)
    assert Placement.of(Mesh({"batch": 2})).batch == "batch"


def test_a_batch_that_contradicts_the_rules_is_an_error():
    with pytest.raises(LayoutError, match="batch='cols' and the rule 'batch:rows' give different"):
        Placement.of(MESH, batch="cols", rules="batch:rows")
    with pytest.raises(LayoutError, match="batch=None and the rule 'batch:rows' give different"):
        Placement.of(MESH, batch=None, rules="batch:rows")


# Another mesh


def test_on_another_mesh_the_same_rules_hold_and_others_may_be_given():
    placement = Placement.of(MESH, FFN, rules="batch:rows;d_ff:cols")
    wide = Mesh({"cols": 3, "rows": 1})
    assert placement.on(wide).place([info()])[0].layout == Layout([None, "cols"], wide)
    assert placement.on(wide).on(MESH) == placement
    flat = placement.on(Mesh({"all": 2}), rules="batch:all;d_model:all")
    assert flat.batch == "all"
    assert flat.place([info()])[0].layout.specs == ("all", UNSHARDED)
    assert placement.on(Mesh({"all": 2}), rules="d_ff:all").batch is None
    assert Placement.of(Mesh({"batch": 2})).on(MESH, rules="batch:cols").batch == "cols"
    own = Placement.of(MESH, FFN, batch="rows", rules="d_ff:cols").on(MESH, rules="d_model:cols")
    assert own.batch == "rows"


def test_on_a_mesh_without_the_axis_of_a_rule_it_is_named():
    placement = Placement.of(MESH, FFN, rules="batch:rows;d_ff:cols")
    with pytest.raises(LayoutError, match=r"rule 'd_ff:cols': 'cols' is not an axis of .*data=8"):
        placement.on(Mesh({"data": 8}))


# Errors


def test_every_variable_that_cannot_lie_so_stands_in_one_error():
    layouts = {
        "a": dims("d_model d_ff d_kv"),
        "b": dims("d_model d_ff"),
        "c": dims("heads d_ff"),
        "d": ["rows", "cols"],
    }
    infos = [info(name, sizes) for name, sizes in (("a", (8, 6)), ("b", (8, 7)), ("c", (2, 6)))]
    with pytest.raises(PlacementError) as error:
        Placement.of(MESH, layouts, rules="d_ff:cols;heads:cols").place([*infos, info("d", (3, 2))])
    assert (
        str(error.value)
        == """\
4 variable(s) cannot be laid out on the mesh (rows=4, cols=2); nothing was allocated.
  a (8, 6), dims [d_model d_ff d_kv] by layout 'a': there are 2 dims (8, 6) and 3 names \
[d_model d_ff d_kv]: write one name per dim, '_' for one that is never split.
  b (8, 7), dims [d_model d_ff] by layout 'b': the variable [d_model:8 d_ff:7]: dim 'd_ff' (size \
7) does not divide over axis 'cols' (size 2). Sizes that do: 6 and 8.
  c (2, 6), dims [heads d_ff] by layout 'c': the variable [heads:2 d_ff:6]: dims 'heads:2' and \
'd_ff:6' would both lie along axis 'cols', which can split one of them. Leave one out of the rules \
(d_ff:cols;heads:cols), or rename it where they meet.
  d (3, 2), [rows, cols] by layout 'd': dim 0 of the variable (size 3) does not divide over axis \
'rows' (size 4). Pad it to 4, or leave it UNSHARDED.
A layout with pad=True pads such a weight where a step stores it, and only there."""
    )


FAULTS = {
    "names without rules": (
        lambda: Placement.of(MESH, FFN, batch="rows"),
        r"layout 'ffn\.\*kernel': its dims are named \[d_model d_ff\], but there are no rules "
        r"from dims to axes: pass rules='batch:rows;d_ff:cols'",
    ),
    "names without rules, of an input": (
        lambda: Placement.of(MESH, batch="rows", inputs=dims("batch io")),
        r"the layout of input 0: its dims are named \[batch io\]",
    ),
    "an axis that the mesh lacks": (
        lambda: Placement.of(MESH, FFN, rules="d_ff:modle"),
        r"rule 'd_ff:modle': 'modle' is not an axis of the mesh \(rows=4, cols=2\)",
    ),
    "two axes for one dim": (
        lambda: Placement.of(MESH, FFN, rules="d_ff:rows;d_ff:cols"),
        "dim 'd_ff' is given 2 axes",
    ),
    "a rule for what is never split": (
        lambda: Placement.of(MESH, FFN, rules="_:rows"),
        "rule '_:rows': '_' names dims that are never split",
    ),
    "two dims of an input on one axis": (
        lambda: Placement.of(MESH, inputs=dims("batch io"), rules="batch:rows;io:rows"),
        r"input 0: dims 'batch' and 'io' of \[batch io\] would both lie along axis 'rows'",
    ),
    "a padded activation": (
        lambda: Placement.of(MESH, activations={"h": dims("d", pad=True)}, rules="d:cols"),
        "activation 'h': pad=True is for weights",
    ),
    "no rules at all": (
        lambda: Placement.of(MESH, FFN, rules="d_ff"),
        "'d_ff' in 'd_ff' is not of the form 'batch:rows'",
    ),
    "MATCH, which is no name": (
        lambda: Placement.of(MESH, {"k": [MATCH]}, rules="d_ff:cols"),
        "layout 'k': MATCH keeps",
    ),
}


@pytest.mark.parametrize(("build", "message"), FAULTS.values(), ids=FAULTS)
def test_bad_input_says_what_is_wrong_and_what_to_do(build, message):
    with pytest.raises((LayoutError, DimError), match=message):
        build()


def test_a_rule_that_no_dim_has_is_an_error_and_without_strict_a_warning():
    placement = Placement.of(MESH, FFN, rules="batch:rows;dff:cols")
    with pytest.raises(PlacementError) as error:
        inspect(placement, [info()])
    assert str(error.value) == (
        "no dim is named as in the rule(s) 'dff:cols', so they split nothing. Named dims: 'd_ff', "
        "'d_model'. Correct the rules or remove them; strict=False makes this a warning."
    )
    lenient = Placement.of(MESH, FFN, rules="batch:rows;dff:cols;d_ff:cols", strict=False)
    with pytest.warns(MeshwrightWarning, match="no dim is named as in the rule.* 'dff:cols'"):
        inspect(lenient, [info()])


def test_rules_and_no_dims_at_all_are_an_error_that_shows_how_to_name_them():
    placement = Placement.of(MESH, {"ffn": [None, "cols"]}, rules="batch:rows;d_ff:cols")
    with pytest.raises(PlacementError, match=r"Nothing has named dims: name those of weights, lay"):
        inspect(placement, [info()])


def test_where_a_layout_is_expected_elsewhere_names_are_refused():
    with pytest.raises(LayoutError, match=r"received dims\('a b'\)"):
        Layout(dims("a b"))


def test_naming_dims_needs_no_jax():
    run_in_fresh_process(
        "import sys, meshwright as mw\n"
        "mw.Placement.of(mw.Mesh({'all': 8}), {'k': mw.dims('a b')}, rules='b:all')\n"
        "assert 'jax' not in sys.modules"
    )


# Several axes for one dim

TWO = "batch:rows;d_ff:rows+cols"


@pytest.mark.parametrize(
    "rules",
    [
        TWO,
        {"batch": "rows", "d_ff": "rows+cols"},
        {"batch": ("rows",), "d_ff": ("rows", "cols")},  # as Plan.rules are
        [("batch", ["rows"]), ("d_ff", ["rows", "cols"])],
        {"batch": "rows", "d_ff": ("rows", "cols"), "io": ()},
    ],
)
def test_a_dim_may_lie_along_several_axes(rules):
    result = DimRules(rules)
    assert str(result) == TWO
    assert DimRules(str(result)) == DimRules(result) == result == pickle.loads(pickle.dumps(result))
    assert (result.axes("batch"), result.axes("d_ff")) == (("rows",), ("rows", "cols"))
    assert result.pieces("d_ff", MESH) == 8
    layout = result.layout(as_dims("d_model:4 d_ff:16"), MESH)
    assert layout == Layout([UNSHARDED, ("rows", "cols")], MESH)
    assert layout_of(info(sizes=(8, 16)), rules="d_ff:rows+cols") == layout
    with pytest.raises(DivisibilityError, match=r"axes 'rows' \(size 4\) and 'cols' \(size 2\)"):
        result.layout(as_dims("d_ff:12"), MESH)
    with pytest.raises(LayoutError, match="would both lie along axis 'rows'"):
        result.layout(as_dims("batch:8 d_ff:16"))
    with pytest.raises(LayoutError, match="'planes' is not an axis of the mesh"):
        DimRules("d_ff:rows+planes").check(MESH)
    with pytest.raises(LayoutError, match=r"lies along 2 axes .* where one is supported"):
        result.axis("d_ff")


def test_the_batch_follows_a_rule_of_several_axes():
    placement = Placement.of(MESH, FFN, rules="batch:rows+cols")
    assert placement.batch_axes == ("rows", "cols")
    assert Placement.of(MESH, FFN, batch=["rows", "cols"], rules="batch:rows+cols") == placement
    with pytest.raises(LayoutError, match=r"the rule 'batch:rows\+cols' give different axes"):
        Placement.of(MESH, FFN, batch="rows", rules="batch:rows+cols")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"d_ff": 4}, "received 'd_ff': 4"),
        ({"d_ff": (None,)}, r"received 'd_ff': \(None,\)"),
        ({"d_ff": ("rows", 2)}, r"received 'd_ff': \('rows', 2\)"),
        ({("d_ff",): "rows"}, r"received \('d_ff',\): 'rows'"),
    ],
)
def test_an_axis_that_is_no_text_is_a_type_error(rules, message):
    with pytest.raises(TypeError, match=message) as caught:
        DimRules(rules)
    assert isinstance(caught.value, LayoutError)


def test_a_dim_of_no_axes_is_whole():
    assert DimRules([("embed", None), ("d_ff", "cols"), ("heads", ())]) == DimRules("d_ff:cols")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("d_ff:rows+", "has an empty axis next to"),
        ("d_ff:+rows", "has an empty axis next to"),
        ("d_ff:rows+rows", "names axis 'rows' more than once"),
    ],
)
def test_axes_that_are_not_there_or_twice(rules, message):
    with pytest.raises(LayoutError, match=message):
        DimRules(rules)
