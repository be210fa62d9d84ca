"""The layout map: a dict of rules, and which rule wins."""

from __future__ import annotations

import pickle

import pytest

from meshwright import UNSHARDED, Layout, LayoutError, LayoutMap, Mesh, layout_map_scope
from meshwright.layouts import layout_map
from meshwright.layouts.layout_map import Finder, PathLayout, find_layout

MESH = Mesh({"batch": 4, "model": 2})
A, B, C = Layout(["a"]), Layout(["b"]), Layout(["c"])


def rules(*patterns):
    """Rules whose layouts tell their position: the first gives axis ``r0``."""
    return [PathLayout(pattern, Layout([f"r{i}"])) for i, pattern in enumerate(patterns)]


def winner(patterns, *spellings):
    result = find_layout(rules(*patterns), spellings)
    return None if result is None else result.pattern


# Which rule wins


def test_an_exact_path_wins_over_a_pattern_that_was_there_first():
    assert winner(["kernel", ".*", "dense/kernel"], "dense/kernel") == "dense/kernel"


def test_else_the_first_inserted_pattern_that_is_found_wins():
    assert winner(["bias", "dense", "kernel"], "dense/kernel") == "dense"
    assert winner(["kernel", "dense"], "dense/kernel") == "kernel"


def test_a_pattern_may_be_found_anywhere_and_can_be_anchored():
    assert winner(["feature.*kernel"], "net/feature/kernel") == "feature.*kernel"
    assert winner(["^feature"], "net/feature/kernel") is None
    assert winner(["ker$", "kernel$"], "net/feature/kernel") == "kernel$"


def test_without_a_match_there_is_no_rule():
    assert winner(["bias"], "dense/kernel") is None
    assert winner([], "dense/kernel") is None
    assert winner(["kernel"]) is None


def test_patterns_that_name_paths_are_not_compared_with_every_path(monkeypatch):
    monkeypatch.setattr(layout_map, "finds", lambda *_: pytest.fail("searched"))
    patterns = [f"block_{n}.kernel" for n in range(2000)]
    finder = Finder(rules(*patterns, "block_7/kernel"))
    calls = []
    original = layout_map._with
    monkeypatch.setattr(layout_map, "_with", lambda *a: calls.append(a) or original(*a))
    winners = [finder.find([f"block_{n}/kernel", f"net.block_{n}.kernel"]) for n in range(2000)]
    assert [result.pattern for result in winners] == patterns
    assert len(calls) == 2 * 2000


@pytest.mark.parametrize("path", ["blocks/0/kernel", "blocks.0.kernel", "blocks/0.kernel"])
@pytest.mark.parametrize(
    "pattern",
    ["blocks/0/kernel", "blocks.0.kernel", "blocks.0/kernel", "0/kernel", r"0\.kernel", "s.0"],
)
def test_dots_and_slashes_are_alike_in_paths(pattern, path):
    assert winner([pattern], path) == pattern


@pytest.mark.parametrize("exact", ["dense/kernel", "dense.kernel"])
@pytest.mark.parametrize("path", ["dense/kernel", "dense.kernel"])
def test_an_exact_path_is_exact_in_either_writing(exact, path):
    assert winner(["kernel", exact], path) == exact


def test_a_variable_is_found_under_each_of_its_spellings():
    spellings = ["sequential/dense/kernel", "feature/kernel", "head.kernel"]
    assert winner(["^feature"], *spellings) == "^feature"
    assert winner(["^head"], *spellings) == "^head"
    assert winner(["^sequential"], *spellings) == "^sequential"
    assert winner(["dense", "head/kernel"], *spellings) == "head/kernel"


def test_the_map_finds_as_find_rule_does():
    layouts = LayoutMap(layouts={"kernel": ["a"], "dense/kernel": ["b"]})
    assert layouts.find(["dense.kernel"]) == PathLayout("dense/kernel", B)
    assert layouts.find(["conv.kernel"]) == PathLayout("kernel", A)
    assert layouts.find("conv.kernel") == PathLayout("kernel", A)
    assert layouts.find(["conv.bias"]) is None


# It behaves as a dict does


def test_behaves_as_a_dict_does():
    layouts = LayoutMap()
    layouts["kernel"] = [UNSHARDED, "model"]
    layouts["bias"] = A
    assert len(layouts) == 2
    assert list(layouts) == list(layouts.keys()) == ["kernel", "bias"]
    assert layouts["kernel"] == Layout([UNSHARDED, "model"])
    assert "bias" in layouts
    assert "dense/bias" not in layouts
    assert layouts.get("dense/bias") is None
    assert layouts.pop("kernel") == Layout([UNSHARDED, "model"])
    assert layouts.pop("kernel", None) is None
    assert dict(layouts) == {"bias": A}
    layouts.update({"gamma": B})
    assert layouts.setdefault("gamma", C) == B
    del layouts["bias"]
    assert layouts == {"gamma": B}
    layouts.clear()
    assert not layouts


def test_a_key_that_is_not_there_is_a_key_error():
    layouts = LayoutMap()
    for ask in (layouts.__getitem__, layouts.__delitem__, layouts.pop):
        with pytest.raises(KeyError, match="kernel"):
            ask("kernel")


def test_a_rule_that_is_set_again_keeps_its_place():
    layouts = LayoutMap(layouts={"kernel": A, "dense": B})
    layouts["kernel"] = C
    assert layouts.entries == (PathLayout("kernel", C), PathLayout("dense", B))


def test_layouts_may_be_bound_or_not_and_the_map_may_have_a_mesh():
    bound = Layout(["model"], MESH)
    layouts = LayoutMap(MESH, {"bias": bound, "kernel": [None, "model"]})
    assert layouts["bias"] is bound
    assert layouts.mesh is layouts.get_default_mesh() is MESH
    assert LayoutMap().get_default_mesh() is None


def test_rules_are_a_value_and_the_map_pickles():
    layouts = LayoutMap(MESH, [("bias", A), ("kernel", B)])
    assert hash(layouts.entries) == hash((PathLayout("bias", A), PathLayout("kernel", B)))
    twin = pickle.loads(pickle.dumps(layouts))
    assert twin.entries == layouts.entries
    assert twin.mesh == MESH


def test_repr_lists_the_rules_in_order():
    layouts = LayoutMap(layouts={"kernel": [None, "model"], "bias": ["model"]})
    assert repr(layouts) == (
        "LayoutMap(2 layouts)\n  'kernel': [unsharded, model]\n  'bias': [model]"
    )


# Bad input

FAULTS = {
    "no regular expression": (
        lambda: LayoutMap(layouts={"kernel(": A}),
        r"pattern 'kernel\(' is not a valid regular expression: missing \)",
    ),
    "an empty pattern": (
        lambda: LayoutMap(layouts={"": A}),
        "a pattern must be a string .* received ''",
    ),
    "a number": (lambda: LayoutMap(layouts={3: A}), "a pattern must be a string .* received 3"),
    "a bare axis": (
        lambda: LayoutMap(layouts={"kernel": "model"}),
        "the layout of 'kernel': a layout is a sequence .* received 'model'",
    ),
    "an axis twice": (
        lambda: LayoutMap(layouts={"kernel": ["model", "model"]}),
        "the layout of 'kernel': axis 'model' is used 2 times",
    ),
    "rules in the place of the mesh": (
        lambda: LayoutMap({"kernel": A}),
        r"must be a meshwright Mesh; received {'kernel'.*LayoutMap\(layouts=...\)",
    ),
    "a scope without a mesh": (
        lambda: layout_map_scope(LayoutMap()),
        r"the layout map has no mesh. Use LayoutMap\(mesh\)",
    ),
}


@pytest.mark.parametrize(("build", "message"), FAULTS.values(), ids=FAULTS)
def test_bad_input_is_a_layout_error_with_names_and_values(build, message):
    with pytest.raises(LayoutError, match=message):
        build()


def test_a_refused_rule_leaves_the_map_as_it_was():
    layouts = LayoutMap(layouts={"kernel": A})
    with pytest.raises(LayoutError):
        layouts["kernel"] = "model"
    assert layouts == {"kernel": A}
