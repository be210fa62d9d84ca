"""The plan: a value that explains itself, goes to JSON and back, and lays arrays out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CPU
from small_graphs import chain, mlp, transformer

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.layouts.params import ParamInfo
from meshwright.planning.search import Choices, Option, Plan, cost, plan_step
from meshwright.planning.search.plan import Reason
from meshwright.planning.search.request import Request
from meshwright.units import bytes_text, seconds_text

U = mw.UNSHARDED


def big():
    """Sixteen blocks of 50M parameters."""
    return transformer(32, 512, 2048, 16, 128, 8192, 32000, 16)


def test_a_plan_shows_what_it_decided_against():
    plan = plan_step(big(), "h100:8")
    text = str(plan)
    assert plan.runners_up
    assert plan.data_parallel is not None
    words = ("chosen", "runner-up", "data parallel", "fits 74.5 GiB", "micro-batches", "saves")
    for word in words:
        assert word in text
    assert plan.chosen.time_s <= plan.runners_up[0].time_s
    assert plan.chosen.time_s <= plan.data_parallel.time_s
    assert str(plan.why[0]).startswith("batch over batch: saves ")
    assert " of all-reduce" in text


def test_reasons_are_differences_of_the_model():
    """What a line says is the cost with and without, not a phrase."""
    graph = mlp(1024, 512, 2048)
    axes = {"batch": 2, "model": 4}
    plan = plan_step(graph, "cpu:8", hardware=CPU, axes=axes)
    assert plan.rules == {"batch": ("batch",), "hidden": ("model",)}
    (line,) = [str(reason) for reason in plan.why if reason.choice == "hidden over model"]
    mesh = tuple(axes.items())
    choices = Choices(plan.zero, plan.accumulate, plan.remat)
    with_it, without = (
        cost(graph, mesh, rules, choices, target="cpu:8", hardware=CPU)
        for rules in ({"batch": ["batch"], "hidden": ["model"]}, {"batch": ["batch"]})
    )
    assert f"saves {bytes_text(without.peak_bytes - with_it.peak_bytes)}" in line
    assert without.compute_s is not None
    assert with_it.compute_s is not None
    assert f"saves {seconds_text(without.compute_s - with_it.compute_s)} of compute" in line


def test_a_plan_is_a_value():
    first, second = (plan_step(mlp(), "v5e:2x4") for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != replace(first, target="v5e:1x1")


def test_one_device_is_said_to_be_fastest():
    plan = plan_step(mlp(), "v5e:2x4")
    assert plan.axes == (("batch", 1),)
    assert "one device is fastest" in str(plan)
    assert plan.placement().batch is None


def test_layouts_of_parameters_and_inputs():
    axes = {"rows": 2, "cols": 4}
    plan = plan_step(mlp(1024, 512, 2048), "cpu:8", hardware=CPU, axes=axes)
    assert plan.rules == {"batch": ("rows",), "hidden": ("cols",)}
    assert plan.layouts_of(inputs=False) == {"w": [U, "cols"], "v": ["cols", U]}
    assert plan.layouts_of(inputs=True) == {"x": ["rows", U]}
    placement = plan.placement()
    infos = [
        ParamInfo(path, (path,), dims, "float32", 4)
        for path, dims in [("w", (512, 2048)), ("v", (2048, 512))]
    ]
    placed = placement.with_zero(0).place(infos)
    assert [str(variable.layout.unbound()) for variable in placed] == [
        "[unsharded, cols]",
        "[cols, unsharded]",
    ]
    assert placement.batch_axes == ("rows",)
    bound = plan.placement(mw.create_mesh(axes))
    assert not bound.mesh.is_abstract


def test_inputs_that_are_split_otherwise_than_by_rows():
    """A batch (tokens, labels), both split along their length too."""
    plan = plan_step(mlp(64, 256, 4096), "cpu:8", hardware=CPU, axes={"rows": 2, "cols": 4})
    lies = (("rows",), ("cols",))
    plan = replace(plan, layouts=(("input/0", lies), ("input/1", lies)), batch=("rows",))
    plan = replace(plan, inputs=("input/0", "input/1"))
    both = plan.placement()
    assert str(both.input_layout(None, 1, (8, 8)).unbound()) == "[rows, cols]"
    keras = replace(plan, num_inputs=1).placement()
    assert dict(keras.inputs).keys() == dict(keras.targets).keys() == {0}
    assert str(keras.target_layout(None, 0, (8, 8)).unbound()) == "[rows, cols]"


# JSON

names = st.text("abc/._[]'0", min_size=1, max_size=8)
along = st.lists(names, max_size=2).map(tuple)
numbers = st.none() | st.floats(0, 1e6)
options = st.builds(
    Option,
    axes=st.lists(st.tuples(names, st.integers(1, 512)), max_size=3).map(tuple),
    rules=st.lists(st.tuples(names, along), max_size=3).map(tuple),
    zero=st.integers(0, 3),
    accumulate=st.integers(1, 64),
    remat=st.sampled_from(["none", "selective", "block"]),
    time_s=numbers,
    compute_s=numbers,
    communication_s=numbers,
    peak_bytes=st.integers(0, 2**50),
    dry_run_time_s=numbers,
    dry_run_peak_bytes=st.none() | st.integers(0, 2**50),
)
texts = st.lists(st.text(max_size=20), max_size=3).map(tuple)
plans = st.builds(
    Plan,
    target=names,
    hardware=names,
    objective=st.sampled_from(["time", "memory"]),
    limit_bytes=st.none() | st.integers(0, 2**50),
    chosen=options,
    runners_up=st.lists(options, max_size=2).map(tuple),
    data_parallel=st.none() | options,
    layouts=st.lists(st.tuples(names, st.lists(along, max_size=3).map(tuple)), max_size=3).map(
        tuple
    ),
    inputs=st.lists(names, max_size=2).map(tuple),
    batch=along,
    why=st.lists(st.builds(Reason, st.text(max_size=20), texts), max_size=3).map(tuple),
    notes=texts,
    is_proven=st.booleans(),
)


@settings(max_examples=50, deadline=None)
@given(plans)
def test_json_keeps_all_of_a_plan(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_a_file_keeps_a_plan(tmp_path):
    plan = plan_step(mlp(), "v5e:2x4")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(PlanError, match=r"no plan can be read from .*other\.json"):
        Plan.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda read: read | {"kind": "dry-run lock"}, "received a dry-run lock"),
        (lambda read: read | {"version": 0}, "expected 3. Plan again"),
        (lambda read: read | {"colour": 1}, "unknown keys in the plan file: colour"),
        (lambda read: {k: v for k, v in read.items() if k != "chosen"}, "KeyError: 'chosen'"),
        (
            lambda read: read | {"chosen": read["chosen"] | {"remat": "blok"}},
            "remat must be one of 'none', 'selective', 'block'; received 'blok'",
        ),
        (lambda read: [], r"not a readable plan.*Plan.to_json\(\) writes one"),
    ],
)
def test_what_is_no_plan_is_refused(change, message):
    read = json.loads(plan_step(mlp(), "v5e:2x4").to_json())
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(change(read)))


# Layouts that are known by name, and seconds that run out

NAMED = ["data parallel", "tensor parallel", "FSDP", "FSDP × tensor parallel"]
LARGE = 10**12


@pytest.mark.parametrize("target", ["h100:8", "v5e:4x4"])
@pytest.mark.parametrize(
    ("graph", "memory_limit"),
    [
        (mlp(4096, 512, 2048), None),
        (transformer(32, blocks=4), LARGE),
        (transformer(32, blocks=4), 12_000_000),
        (transformer(64, 512, 2048, 16, 128, 8192, 32000, 4), 4 * 10**9),
    ],
    ids=["mlp", "transformer", "tight", "big"],
)
@pytest.mark.parametrize("limit_s", [0.0, pytest.param(10.0, marks=pytest.mark.full)])
def test_no_plan_is_slower_than_a_layout_that_is_known_by_name(
    target, graph, memory_limit, limit_s
):
    """By its own model, of those that fit, however little time the search had."""
    plan = plan_step(graph, target, memory_limit=memory_limit, limit_s=limit_s)
    assert list(plan.named) == NAMED
    fit = [o for o in plan.named.values() if o.peak_bytes <= plan.limit_bytes]
    assert all(plan.chosen.time_s <= option.time_s for option in fit)
    assert plan.chosen.peak_bytes <= plan.limit_bytes
    head = str(plan).splitlines()[1]
    assert all(name in head for name in NAMED)
    levels = {name: option.zero for name, option in plan.named.items()}
    assert [levels[name] for name in NAMED] == [0, 0, 3, 3]
    rows, weights, fully, both = (plan.named[name] for name in NAMED)
    assert dict(rows.rules).keys() == dict(fully.rules).keys() == {"batch"}
    assert "batch" not in dict(weights.rules)
    assert len(both.axes) == 2


def test_splits_that_are_slower_than_one_seen_are_not_priced(monkeypatch):
    """Where it is fastest to split no weight, each of twelve dims could be the one that is."""
    priced, candidate = [], Request.candidate
    monkeypatch.setattr(Request, "candidate", lambda *args: priced.append(args) or candidate(*args))
    plan = plan_step(chain(12), "v5e:4x2", limit_s=0.0, explains=False)
    assert list(plan.named) == NAMED
    assert "d1" in dict(plan.named["tensor parallel"].rules)
    assert len(priced) < 12


def test_names_that_the_step_has_nothing_for_are_left_out():
    assert list(plan_step(mlp(4096, 512, 2048), "h100:8", zero=(0, 1)).named) == NAMED[:2]
    odd = mlp(4097, 512, 2048)  # 17 * 241 rows
    plan = plan_step(odd, "h100:8")
    assert list(plan.named) == [NAMED[1]]
    assert "data parallel is left out: the batch does not divide" in str(plan)


def test_a_mesh_of_ones_own_is_that_of_all_columns():
    plan = plan_step(mlp(4096, 512, 2048), "h100:8", axes={"rows": 4, "cols": 2})
    assert {option.axes for option in plan.named.values()} == {(("rows", 4), ("cols", 2))}
    assert dict(plan.named["tensor parallel"].rules) == {"hidden": ("rows", "cols")}


def test_the_first_line_says_whether_a_plan_was_compiled():
    class Report:
        step_time_s, peak_bytes, fits = 1.0, 5, True

        def __init__(self, plan):
            pass

    plan = plan_step(mlp(4096, 512, 2048), "h100:8")
    assert str(plan).startswith("plan for h100:8, estimated, not compiled: least time")
    assert not plan.is_compiled
    compiled = plan_step(mlp(4096, 512, 2048), "h100:8", verify=1, dry_run_of=Report)
    assert str(compiled).startswith("plan for h100:8, compiled: least time")


def test_where_nothing_fits_in_time_the_nearest_is_named():
    message = r"no layout that keeps within 1000 B was found within 0 s\. The nearest so far"
    with pytest.raises(PlanError, match=message) as caught:
        plan_step(mlp(), "h100:8", limit_s=0.0, memory_limit=1000)
    assert caught.value.needed_bytes > caught.value.available_bytes == 1000
    assert "limit_s=" in str(caught.value)
