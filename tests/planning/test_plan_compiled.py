"""Plans whose best candidates are compiled and ranked again."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import keras
import optax
import pytest
from models import CPU
from models import shapes as shape
from small_graphs import mlp

import meshwright as mw
from meshwright.errors import CompileError, PlanError
from meshwright.planning import compile_ahead
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.estimate import estimate
from meshwright.planning.search import Plan, plan_step
from meshwright.planning.search.verification import verified


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
    result = estimate(compiled, CPU)

    class Report:
        step_time_s = result.step_time_s
        peak_bytes = compiled.argument_bytes + compiled.temporary_bytes
        fits = peak_bytes <= 10**9

    return Report()


@pytest.mark.full
def test_the_best_are_compiled_and_ranked_again():
    requests = []

    def dry_run_of(plan):
        requests.append(plan.axes)
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
    assert len(requests) == 4  # plain data parallel too
    times = [option.dry_run_time_s for option in (plan.chosen, *plan.runners_up)]
    assert None not in times
    assert times == sorted(times)
    assert "dry run: step" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_plainer_layouts_are_compiled_beside_the_best():
    requests = []

    class Report:
        peak_bytes, fits = 5, True

        def __init__(self, plan):
            requests.append((plan.axes, plan.zero))
            self.step_time_s = float(plan.axes != (("batch", 8),))

    best = plan_step(mlp(4096, 256, 256), "cpu:8", hardware=CPU)
    plan = plan_step(mlp(4096, 256, 256), "cpu:8", hardware=CPU, verify=1, dry_run_of=Report)
    assert requests[0] == (best.axes, best.zero)
    assert {(best.axes, zero) for zero in range(min(2, best.zero))} <= set(requests)
    assert ((("batch", 8),), 0) in requests
    assert plan.axes == (("batch", 8),)


def test_tables_cut_by_rows_are_compiled_beside_data_parallel():
    """Of a look-up the rows of the table may lie along the axes of the batch's rows."""

    def loss(params, ids):
        return jnp.mean(jnp.tanh(params["table"][ids] @ params["w"]))

    params = {"table": shape(1 << 20, 16), "w": shape(16, 64)}
    program = mw.jax_program(loss, params, optax.adam(0.1))
    one = mw.Placement.of(mw.Mesh({"batch": 1}))
    step = abstract_step(program, shape(4096, dtype="int32"), one)
    requests = []

    class Report:
        peak_bytes, fits = 5, True

        def __init__(self, plan):
            requests.append(plan)
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
    with pytest.raises(PlanError, match="none of 3 dry-run plans fits") as caught:
        verified(plans, Report, 100, nothing_smaller)
    assert f"{plans[0].chosen.layouts}. No other holds" in str(caught.value)  # all take 5 bytes
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

    with pytest.raises(PlanError, match=r"The nearest takes 2\.86 MiB") as caught:
        verified([plan, other], Report, 100, nothing_smaller)
    assert str(other.chosen.layouts) in str(caught.value)
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

    (result,) = verified([first, other], Report, 100, lambda _limit: [])
    assert result.axes == other.axes
    assert f"left out: {first.chosen.layouts}: the compiler gave up" in str(result)
    with pytest.raises(CompileError, match="the compiler gave up"):
        verified([first], Report, 100, lambda _limit: [])


def test_no_plan_is_dry_run_twice_whether_it_compiles_or_not():
    fails, large = (
        replace(plan_step(mlp(64, 256, 4096), "cpu:8", hardware=CPU, axes=axes), runners_up=())
        for axes in ({"batch": 8}, {"model": 8})
    )
    requests = []

    class Report:
        step_time_s, peak_bytes, fits = 1.0, 500, False

        def __init__(self, plan):
            requests.append(plan.axes)
            if plan.axes == fails.axes:
                raise CompileError("the compiler gave up")

    with pytest.raises(PlanError) as caught:
        verified([fails, large], Report, 100, lambda _limit: [fails, large])
    assert requests == [fails.axes, large.axes]
    assert f"left out: {fails.chosen.layouts}: the compiler gave up. No other" in str(caught.value)
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
    visible = replace(
        best, limit_bytes=100, runners_up=(other.chosen,), data_parallel=None, classics=()
    )
    (row,) = [line.split() for line in str(visible).splitlines() if line.startswith("  fits")]
    assert row[-2:] == ["yes", "no"]


def test_fsdp_is_verified_too():
    options = []

    class Report:
        step_time_s, peak_bytes, fits = None, None, True

        def __init__(self, plan):
            options.append(plan.chosen)

    plan_step(mlp(64, 1024, 4096), "h100:8", verify=1, dry_run_of=Report)
    alone = [option for option in options if option.zero == 3 and option.axes == (("batch", 8),)]
    assert [(option.rules, option.remat) for option in alone] == [
        ((("batch", ("batch",)),), "none")
    ]
    options.clear()
    plan_step(mlp(64, 1024, 4096), "h100:8", zero=(0, 1), verify=1, dry_run_of=Report)
    assert {option.zero for option in options} <= {0, 1}


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
    requests = []

    class Report:
        """A compiler that takes twice what the model says."""

        step_time_s = None

        def __init__(self, plan):
            requests.append(plan.chosen.layouts)
            self.peak_bytes = 2 * plan.chosen.peak_bytes
            self.fits = self.peak_bytes <= limit

    plan = plan_step(graph, "h100:8", zero=(0, 3), memory_limit=limit, verify=1, dry_run_of=Report)
    assert plan.chosen.dry_run_peak_bytes <= limit
    assert plan.limit_bytes == limit
    assert len(requests) == len(set(requests)) > 1  # none is compiled twice
    assert "did not fit by their dry runs; this one stays within" in str(plan)
    worse = [option for option in plan.runners_up if option.dry_run_peak_bytes > limit]
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
    assert [plan.axes for plan in ranked] == [between.axes, slow.axes, fast.axes]
    assert len(searches) == 1  # what was found fits
    assert "did not fit by their dry runs; this one stays within" in str(ranked[0])
    assert verified([slow, between], Report, 100, within)[0].axes == between.axes
    assert len(searches) == 1  # nor are others wanted where the fastest fits
