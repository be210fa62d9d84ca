"""The plan: a value that explains itself, goes to JSON and back, and lays a model out."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CPU
from small_graphs import Builder, mlp, transformer

import meshwright as mw
from meshwright.errors import CompileError, PlanError
from meshwright.layouts.params import ParamInfo
from meshwright.planning import compile_ahead
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.estimate import estimate
from meshwright.planning.search import Choices, Option, Plan, cost, plan_step, solve
from meshwright.planning.search.plan import Reason
from meshwright.planning.search.verification import verified
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
    (line,) = [str(each) for each in plan.why if each.choice == "hidden over model"]
    mesh = tuple(axes.items())
    choices = Choices(plan.zero, plan.accumulate, plan.remat)
    with_it, without = (
        cost(graph, mesh, each, choices, target="cpu:8", hardware=CPU)
        for each in ({"batch": ["batch"], "hidden": ["model"]}, {"batch": ["batch"]})
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
    assert [str(each.layout.unbound()) for each in placed] == [
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
    ("change", "said"),
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
def test_what_is_no_plan_is_refused(change, said):
    read = json.loads(plan_step(mlp(), "v5e:2x4").to_json())
    with pytest.raises(PlanError, match=said):
        Plan.from_json(json.dumps(change(read)))


# When nothing fits


def test_the_nearest_miss_and_what_would_make_it_fit():
    graph = mlp(64, 1024, 4096)
    # Weights and their slots of Adam take 100 MB; the gradients come on top.
    with pytest.raises(PlanError) as caught:
        plan_step(
            graph,
            "h100:2",
            memory_limit=40_000_000,
            axes={"batch": 2},
            zero=(0,),
            accumulate=(1,),
            remat=("none",),
        )
    error = caught.value
    assert error.available_bytes == 40_000_000 < error.needed_bytes
    assert "no layout keeps within 38.1 MiB on h100:2. The nearest takes" in str(error)
    with pytest.raises(PlanError) as caught:
        plan_step(graph, "h100:2", memory_limit=40_000_000, zero=(0,), accumulate=(1,))
    more = [each for each in caught.value.remedies if each.startswith("more devices, h100:")]
    assert len(more) == 1
    # The remedy is true: with those devices there is a plan, with half of them there is not.
    found = more[0].partition(",")[2].partition(":")[2].partition(":")[0]
    count = int(found)
    enough = {"memory_limit": 40_000_000, "zero": (0,), "accumulate": (1,)}
    assert plan_step(graph, f"h100:{count}", **enough).chosen.peak_bytes <= 40_000_000
    with pytest.raises(PlanError):
        plan_step(graph, f"h100:{count // 2}", **enough)


NOTHING = {"zero": (0,), "accumulate": (1,), "remat": ("none",)}


@pytest.mark.parametrize(
    ("remedy", "graph", "axes", "change"),
    [
        ("ZeRO", mlp(1024, 512, 1024), {"batch": 8}, {"zero": (0, 1, 2, 3)}),
        ("remat", transformer(8, blocks=4), {"batch": 2}, {"remat": ("none", "block")}),
        ("accumulate", transformer(8, blocks=4), {"batch": 2}, {"accumulate": (1, 4)}),
        ("another mesh", mlp(21, 64, 4096), {"batch": 7}, {"axes": None}),
    ],
)
def test_each_remedy_is_found_where_it_helps(remedy, graph, axes, change):
    def least(**more):
        plan = plan_step(graph, "h100:8", objective="memory", **({"axes": axes} | NOTHING | more))
        return plan.chosen.peak_bytes

    limit = (least() + least(**change)) // 2
    assert limit < least()
    with pytest.raises(PlanError) as caught:
        plan_step(graph, "h100:8", memory_limit=limit, axes=axes, **NOTHING)
    assert any(each.startswith(remedy) for each in caught.value.remedies), caught.value
    found = plan_step(graph, "h100:8", memory_limit=limit, **({"axes": axes} | NOTHING | change))
    assert found.chosen.peak_bytes <= limit


def test_a_smaller_batch_is_said_with_its_rows():
    with pytest.raises(PlanError) as caught:
        plan_step(
            mlp(4096, 64, 128), "h100:8", memory_limit=2_000_000, axes={"batch": 1}, **NOTHING
        )
    assert any(each.startswith("smaller batch, 512 rows") for each in caught.value.remedies)
    found = plan_step(
        mlp(512, 64, 128), "h100:8", memory_limit=2_000_000, axes={"batch": 1}, **NOTHING
    )
    assert found.chosen.peak_bytes <= 2_000_000


def test_nothing_helps_where_one_array_is_too_large():
    builder = Builder()
    builder.dim("odd", 1_000_003)
    builder.tensor("x", "odd", "input")
    builder.add("sort", "x", "y", "odd", whole="odd")
    with pytest.raises(PlanError, match="were tried; none is enough"):
        plan_step(builder.graph(), "h100:2", memory_limit=1000)


def test_a_mesh_too_large_is_refused():
    with pytest.raises(PlanError, match="takes 16 devices, and h100:8 has 8"):
        plan_step(mlp(), "h100:8", axes={"batch": 16})


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"objective": "speed"}, "objective must be 'time', .* received 'speed'"),
        ({"memory_limit": 0}, "memory_limit must be 1 byte or more; received 0"),
        ({"verify": -1}, "verify must be .* received -1"),
        (
            {"remat": ("blocks",)},
            "one or more of 'none', 'selective', 'block'; received .'blocks',.",
        ),
        ({"remat": ()}, "list one or more of"),
    ],
)
def test_wishes_that_cannot_be_are_refused(wish, said):
    with pytest.raises(PlanError, match=said):
        plan_step(mlp(), "h100:8", **wish)


def test_a_mesh_may_be_a_text():
    axes = plan_step(mlp(1024, 512, 2048), "h100:8", axes="batch=4,model=2").axes
    assert dict(axes) == {"batch": 4, "model": 2}


@pytest.mark.parametrize(
    ("model", "batch", "error", "said"),
    [
        (5, ((8, 4), (8, 2)), mw.ModelError, "a compiled Keras model or a Program is planned"),
        (None, None, mw.BatchError, r"a batch of a Keras model is \(x, y\)"),
    ],
)
def test_what_is_no_model_and_no_batch(model, batch, error, said):
    if model is None:
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    with pytest.raises(error, match=said):
        mw.plan(model, batch, target="h100:8")


def test_or_tools_missing_names_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    missing = r'pip install "meshwright\[plan\]"'
    with pytest.raises(PlanError, match=missing):
        solve.solver_module()
    with pytest.raises(PlanError, match=missing):  # before anything is traced, or even looked at
        mw.plan(None, None, target="h100:8")


# Verified by dry runs


def dry_run_of_mlp(plan):
    """A real compile of the two layers, laid out as the plan says, for eight CPU devices."""
    mesh = plan.mesh
    layouts = plan.layouts_of(inputs=False) | plan.layouts_of(inputs=True)
    shapes = {"x": (64, 256), "w": (256, 4096), "v": (4096, 256)}
    arguments = [
        jax.ShapeDtypeStruct(
            shapes[path], jnp.float32, sharding=mw.Layout(layouts[path], mesh).sharding
        )
        for path in ("x", "w", "v")
    ]

    def step(x, w, v):
        def loss(w, v):
            return jnp.sum(jnp.square(jax.nn.relu(x @ w) @ v - x))

        slopes = jax.grad(loss, (0, 1))(w, v)
        return w - slopes[0], v - slopes[1]

    compiled = compile_ahead(jax.jit(step), arguments, f"cpu:{mesh.size}")
    found = estimate(compiled, CPU)

    class Report:
        step_time_s = found.step_time_s
        peak_bytes = compiled.argument_bytes + compiled.temporary_bytes
        fits = peak_bytes <= 10**9

    return Report()


@pytest.mark.full
def test_the_best_are_compiled_and_ranked_again():
    asked = []

    def dry_run_of(plan):
        asked.append(plan.axes)
        return dry_run_of_mlp(plan)

    plan = plan_step(
        mlp(64, 256, 4096, adam=False),
        "cpu:8",
        hardware=CPU,
        zero=(0,),
        accumulate=(1,),
        remat=("none",),
        verify=3,
        dry_run_of=dry_run_of,
    )
    assert len(asked) == 4  # plain data parallel too
    times = [each.dry_run_time_s for each in (plan.chosen, *plan.runners_up)]
    assert None not in times
    assert times == sorted(times)
    assert "dry run: step" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_plainer_layouts_are_compiled_beside_the_best():
    asked = []

    class Report:
        peak_bytes, fits = 5, True

        def __init__(self, plan):
            asked.append((plan.axes, plan.zero))
            self.step_time_s = float(plan.axes != (("batch", 8),))

    best = plan_step(mlp(4096, 256, 256), "cpu:8", hardware=CPU)
    plan = plan_step(mlp(4096, 256, 256), "cpu:8", hardware=CPU, verify=1, dry_run_of=Report)
    assert asked[0] == (best.axes, best.zero)
    assert {(best.axes, zero) for zero in range(min(2, best.zero))} <= set(asked)
    assert ((("batch", 8),), 0) in asked
    assert plan.axes == (("batch", 8),)


def test_tables_cut_by_rows_are_compiled_beside_data_parallel():
    """Of a look-up the rows of the table may lie along the axes of the batch's rows."""

    def loss(params, ids):
        return jnp.mean(jnp.tanh(params["table"][ids] @ params["w"]))

    def shape(*dims, dtype="float32"):
        return jax.ShapeDtypeStruct(dims, dtype)

    params = {"table": shape(1 << 20, 16), "w": shape(16, 64)}
    program = mw.jax_program(loss, params, optax.adam(0.1))
    one = mw.Placement.of(mw.Mesh({"batch": 1}))
    step = abstract_step(program, shape(4096, dtype="int32"), one)
    asked = []

    class Report:
        peak_bytes, fits = 5, True

        def __init__(self, plan):
            asked.append(plan)
            self.step_time_s = 2.0 - (plan.axes == (("batch", 8),)) * len(plan.rules) / 2

    plan = plan_step(step, "h100:8", verify=1, dry_run_of=Report)
    assert plan.rules == {"batch": ("batch",), "table.in": ("batch",)}
    layouts = dict(plan.layouts)
    assert layouts["table"] == (("batch",), ())
    assert layouts["w"] == ((), ())
    assert plan.batch == ("batch",)


def test_the_dry_run_has_the_last_word():
    plans = [
        replace(plan, runners_up=())
        for plan in (
            plan_step(mlp(64, 256, 4096), "cpu:8", hardware=CPU, axes=axes)
            for axes in ({"batch": 8}, {"model": 8}, {"batch": 2, "model": 4})
        )
    ]
    seconds = dict(zip([plan.axes for plan in plans], [3.0, 1.0, 2.0], strict=True))
    fits = dict(zip([plan.axes for plan in plans], [True, False, True], strict=True))

    class Report:
        def __init__(self, plan):
            self.step_time_s, self.peak_bytes = seconds[plan.axes], 5
            self.fits = fits[plan.axes]

    def nothing_smaller(_limit):
        return []

    ranked = verified(plans, Report, 100, nothing_smaller)
    assert [plan.chosen.dry_run_time_s for plan in ranked] == [2.0, 3.0, 1.0]
    assert "by its dry run this is faster" in str(ranked[0])
    fits.update(dict.fromkeys(fits, False))
    with pytest.raises(PlanError, match="none of 3 dry-run plans fits") as told:
        verified(plans, Report, 100, nothing_smaller)
    assert f"{plans[0].chosen.layouts}. No other holds" in str(told.value)  # all take 5 bytes
    with pytest.raises(PlanError, match=r"the dry-run plan does not fit\. The"):
        verified(plans[:1], Report, 100, nothing_smaller)


def test_a_dry_run_without_a_peak_is_not_the_nearest():
    plan = plan_step(mlp(64, 256, 4096), "cpu:8", hardware=CPU, axes={"batch": 8})
    other = plan_step(mlp(64, 256, 4096), "cpu:8", hardware=CPU, axes={"model": 8})

    class Report:
        step_time_s, fits = None, False

        def __init__(self, plan):
            self.peak_bytes = 3_000_000 if plan.axes == other.axes else None

    def nothing_smaller(_limit):
        return []

    with pytest.raises(PlanError, match=r"The nearest takes 2\.86 MiB") as told:
        verified([plan, other], Report, 100, nothing_smaller)
    assert str(other.chosen.layouts) in str(told.value)
    with pytest.raises(PlanError, match=r"does not fit\. No other holds so much less"):
        verified([plan], Report, 100, nothing_smaller)


def test_a_plan_that_does_not_compile_is_left_out():
    first, other = (
        replace(plan_step(mlp(64, 256, 4096), "cpu:8", hardware=CPU, axes=axes), runners_up=())
        for axes in ({"batch": 8}, {"model": 8})
    )

    class Report:
        step_time_s, peak_bytes, fits = 1.0, 5, True

        def __init__(self, plan):
            if plan.axes == first.axes:
                raise CompileError("the compiler gave up")

    (found,) = verified([first, other], Report, 100, lambda _limit: [])
    assert found.axes == other.axes
    assert f"left out: {first.chosen.layouts}: the compiler gave up" in str(found)
    with pytest.raises(CompileError, match="the compiler gave up"):
        verified([first], Report, 100, lambda _limit: [])


def test_no_plan_is_dry_run_twice_whether_it_compiles_or_not():
    fails, large = (
        replace(plan_step(mlp(64, 256, 4096), "cpu:8", hardware=CPU, axes=axes), runners_up=())
        for axes in ({"batch": 8}, {"model": 8})
    )
    asked = []

    class Report:
        step_time_s, peak_bytes, fits = 1.0, 500, False

        def __init__(self, plan):
            asked.append(plan.axes)
            if plan.axes == fails.axes:
                raise CompileError("the compiler gave up")

    with pytest.raises(PlanError) as told:
        verified([fails, large], Report, 100, lambda _limit: [fails, large])
    assert asked == [fails.axes, large.axes]
    assert f"left out: {fails.chosen.layouts}: the compiler gave up. No other" in str(told.value)
    with pytest.raises(CompileError, match="gave up"):
        verified([fails], Report, 100, lambda _limit: pytest.fail("nothing else compiles either"))


def test_a_limit_that_is_asked_for_holds_for_dry_runs_too():
    plan, small = (
        replace(plan_step(mlp(64, 256, 4096), "cpu:8", hardware=CPU, axes=axes), runners_up=())
        for axes in ({"batch": 8}, {"model": 8})
    )

    class Report:
        """It fits the device, which has more than is to be used."""

        step_time_s, fits = None, True

        def __init__(self, plan):
            self.peak_bytes = 60 if plan.axes == small.axes else 200

    best, other = verified([plan], Report, 100, lambda _limit: [small])
    assert (best.axes, other.axes) == (small.axes, plan.axes)
    shown = replace(
        best, limit_bytes=100, runners_up=(other.chosen,), data_parallel=None, classics=()
    )
    (row,) = [line.split() for line in str(shown).splitlines() if line.startswith("  fits")]
    assert row[-2:] == ["yes", "no"]


def test_fsdp_is_verified_too():
    asked = []

    class Report:
        step_time_s, peak_bytes, fits = None, None, True

        def __init__(self, plan):
            asked.append(plan.chosen)

    plan_step(mlp(64, 1024, 4096), "h100:8", verify=1, dry_run_of=Report)
    alone = [each for each in asked if each.zero == 3 and each.axes == (("batch", 8),)]
    assert [(each.rules, each.remat) for each in alone] == [((("batch", ("batch",)),), "none")]
    asked.clear()
    plan_step(mlp(64, 1024, 4096), "h100:8", zero=(0, 1), verify=1, dry_run_of=Report)
    assert {each.zero for each in asked} <= {0, 1}


def test_a_plan_that_splits_targets_of_a_keras_model_is_verified():
    with mw.abstract():
        model = keras.Sequential([keras.Input([256]), keras.layers.Dense(512)])
        model.compile("adam", "mse")
    batch = tuple(jax.ShapeDtypeStruct((8, width), "float32") for width in (256, 512))
    plan = mw.plan(model, batch, target="cpu:4", hardware=CPU, verify=1)
    assert dict(plan.layouts)["input/1"] == ((), ("model",))
    assert plan.is_compiled


def test_what_does_not_fit_by_its_dry_run_gives_way_to_what_holds_less():
    graph = mlp(1 << 18, 256, 1024)
    free = plan_step(graph, "h100:8", zero=(0, 3))
    limit = round(1.1 * free.chosen.peak_bytes)
    asked = []

    class Report:
        """A compiler that takes twice what the model says."""

        step_time_s = None

        def __init__(self, plan):
            asked.append(plan.chosen.layouts)
            self.peak_bytes = 2 * plan.chosen.peak_bytes
            self.fits = self.peak_bytes <= limit

    plan = plan_step(graph, "h100:8", zero=(0, 3), memory_limit=limit, verify=1, dry_run_of=Report)
    assert plan.chosen.dry_run_peak_bytes <= limit
    assert plan.limit_bytes == limit
    assert len(asked) == len(set(asked)) > 1  # none is compiled twice
    assert "did not fit by their dry runs; this one stays within" in str(plan)
    worse = [each for each in plan.runners_up if each.dry_run_peak_bytes > limit]
    assert worse
    assert worse[0].time_s <= plan.chosen.time_s


def test_where_only_slow_ones_fit_faster_ones_that_hold_less_are_looked_for():
    plans = [
        replace(plan_step(mlp(64, 256, 4096), "cpu:8", hardware=CPU, axes=axes), runners_up=())
        for axes in ({"batch": 8}, {"model": 8}, {"batch": 2, "model": 4})
    ]
    fast, slow, between = plans
    figures = {fast.axes: (1.0, 200), slow.axes: (3.0, 50), between.axes: (2.0, 90)}
    searches = []

    class Report:
        def __init__(self, plan):
            self.step_time_s, self.peak_bytes = figures[plan.axes]
            self.fits = self.peak_bytes <= 100

    def within(limit):
        searches.append(limit)
        return [between]

    ranked = verified([fast, slow], Report, 100, within)
    assert [each.axes for each in ranked] == [between.axes, slow.axes, fast.axes]
    assert len(searches) == 1  # what was found fits
    assert "did not fit by their dry runs; this one stays within" in str(ranked[0])
    assert verified([slow, between], Report, 100, within)[0].axes == between.axes
    assert len(searches) == 1  # nor are others wanted where the fastest fits


# A real model, inferred, planned, trained


def test_a_plan_of_a_keras_model_trains_it():
    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input([64]),
                keras.layers.Dense(512, activation="relu", name="up"),
                keras.layers.Dense(8, name="down"),
            ]
        )
        model.compile("sgd", "mse")
        return model

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 64)).astype("f"), rng.normal(size=(32, 8)).astype("f")
    with mw.abstract():
        plan = mw.plan(build(), (x, y), target="cpu:8", hardware=CPU, axes={"batch": 2, "model": 4})
    assert plan.how.accumulate == plan.accumulate
    assert plan.num_inputs == 1
    assert mw.Plan.from_json(plan.to_json()) == plan
    assert {"up/kernel", "down/kernel"} <= set(plan.layouts_of(inputs=False))
    strategy = plan.strategy()
    assert strategy.placement == plan.placement(mw.create_mesh({"batch": 2, "model": 4}))
    with strategy.scope():
        model = build()
    rows = 32 // plan.accumulate
    losses = strategy.fit(model, x, y, batch_size=rows, epochs=3, verbose=0).history["loss"]
    single = build()
    wanted = single.fit(x, y, batch_size=32, epochs=3, verbose=0, shuffle=False).history["loss"]
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    if plan.rules:
        split = [w.value.sharding.spec for w in model.weights if "kernel" in w.path]
        assert any("model" in str(spec) for spec in split)


def axes_of(spec):
    return () if spec is None else (spec,) if isinstance(spec, str) else tuple(spec)


@pytest.mark.parametrize("is_built_first", [False, True])
def test_a_plan_is_for_the_model_built_again_whatever_keras_calls_its_layers(is_built_first):
    def build():
        inner = keras.Sequential([keras.layers.Dense(512), keras.layers.Dense(64)])
        model = keras.Sequential([keras.Input([64]), inner, keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        return model

    batch = jax.ShapeDtypeStruct((32, 64), "float32"), jax.ShapeDtypeStruct((32, 8), "float32")
    axes = {"batch": 2, "model": 4}
    with mw.abstract():
        plan = mw.plan(build(), batch, target="cpu:8", hardware=CPU, axes=axes)
    plan = mw.Plan.from_json(plan.to_json())
    assert dict(plan.layouts).keys() > {"sequential#0/dense#1/kernel", "dense#0/kernel"}
    wanted = [[*along] for path, along in plan.layouts if path.endswith("kernel")]
    assert sum(bool(each) for along in wanted for each in along) >= 2
    for _ in range(2):
        strategy = plan.strategy()
        if is_built_first:
            model = build()
            strategy.place(model)
        else:
            with strategy.scope():
                model = build()
        kernels = [w for w in model.weights if "kernel" in w.path]
        lies = {tuple(w.shape): [axes_of(s) for s in w.value.sharding.spec] for w in kernels}
        shapes = {"dense#0": (64, 8), "sequential#0/dense#0": (64, 512)}
        shapes |= {"sequential#0/dense#1": (512, 64)}
        known = dict(plan.layouts)
        assert lies == {dims: [*known[f"{path}/kernel"]] for path, dims in shapes.items()}


def test_a_plan_for_another_model_is_an_error_of_a_few_lines():
    def build(prefix, blocks):
        names = [f"{prefix}_{i}" for i in range(blocks)]
        dense = [keras.layers.Dense(64, name=name) for name in names]
        model = keras.Sequential([keras.Input([64]), *dense])
        model.compile("sgd", "mse")
        return model

    rows = np.ones((32, 64), "float32")
    with mw.abstract():
        model = build("one", 30)
        plan = mw.plan(model, (rows, rows), target="cpu:8", hardware=CPU, axes={"batch": 8})
    said = "none of 60 patterns matches a variable of model '.*'; they are for another model"
    with pytest.raises(mw.PlacementError, match=said) as caught:
        plan.strategy().fit(build("other", 4), rows, rows, verbose=0)
    assert "'one_0…29/kernel'" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 4


def test_rules_of_a_plan_are_rules():
    """They lay a named program out by hand as the plan does, and come back."""
    import meshwright.named as mn

    def init():
        return {
            "up": mn.named(jnp.ones([8, 4096]), "io:8 hidden:4096"),
            "down": mn.named(jnp.ones([4096, 8]), "hidden:4096 io:8"),
        }

    def loss(params, batch):
        hidden = mn.relu(mn.einsum([batch["x"], params["up"]]))
        return mn.reduce_mean(mn.square(mn.einsum([hidden, params["down"]]) - batch["x"]))

    program = mw.named_program(loss, init, optax.sgd(0.1), batch={"x": "batch io"})
    rows = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}
    axes = {"rows": 2, "cols": 4}
    plan = mw.plan(program, rows, target="cpu:8", hardware=CPU, axes=axes)
    assert plan.rules == {"hidden": ("rows", "cols")}
    rules = mn.DimRules(plan.rules)
    assert str(rules) == "hidden:rows+cols"
    assert {dim: rules.axes(dim) for dim, _ in rules.pairs} == plan.rules
    assert mn.DimRules(str(rules)) == rules
    layout = mw.Layout([U, ("rows", "cols")], plan.mesh)
    assert mn.layout_of("io:8 hidden:4096", plan.rules, plan.mesh) == layout
    byhand = mw.Placement.of(plan.mesh, rules=plan.rules)
    assert byhand.rules == rules
    strategy = mw.Sharded(plan.mesh, {"kernel": mw.dims("_ hidden")}, rules=plan.rules)
    assert strategy.placement.rules == rules
    one = mw.Placement.of(mw.Mesh({"batch": 1}))
    infos = [each.info for each in abstract_step(program, rows, one).placed]
    lies = {each.info.path: each.layout for each in byhand.place(infos)}
    assert lies == {each.info.path: each.layout for each in plan.placement().place(infos)}
    assert lies["up"] == layout


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
    assert all(plan.chosen.time_s <= each.time_s for each in fit)
    assert plan.chosen.peak_bytes <= plan.limit_bytes
    head = str(plan).splitlines()[1]
    assert all(name in head for name in NAMED)
    levels = {name: each.zero for name, each in plan.named.items()}
    assert [levels[name] for name in NAMED] == [0, 0, 3, 3]
    rows, weights, fully, both = (plan.named[name] for name in NAMED)
    assert dict(rows.rules).keys() == dict(fully.rules).keys() == {"batch"}
    assert "batch" not in dict(weights.rules)
    assert len(both.axes) == 2


def test_names_that_the_step_has_nothing_for_are_left_out():
    assert list(plan_step(mlp(4096, 512, 2048), "h100:8", zero=(0, 1)).named) == NAMED[:2]
    odd = mlp(4097, 512, 2048)  # 17 * 241 rows
    plan = plan_step(odd, "h100:8")
    assert list(plan.named) == [NAMED[1]]
    assert "data parallel is left out: the batch does not divide" in str(plan)


def test_a_mesh_of_ones_own_is_that_of_all_columns():
    plan = plan_step(mlp(4096, 512, 2048), "h100:8", axes={"rows": 4, "cols": 2})
    assert {each.axes for each in plan.named.values()} == {(("rows", 4), ("cols", 2))}
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
    said = r"no layout that keeps within 1000 B was found within 0 s\. The nearest so far"
    with pytest.raises(PlanError, match=said) as told:
        plan_step(mlp(), "h100:8", limit_s=0.0, memory_limit=1000)
    assert told.value.needed_bytes > told.value.available_bytes == 1000
    assert "limit_s=" in str(told.value)
