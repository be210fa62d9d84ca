"""What a plan cannot be made for, and the remedies that an error names."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from small_graphs import Builder, mlp, transformer

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.planning.search import plan_step, solve


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
    more = [remedy for remedy in caught.value.remedies if remedy.startswith("more devices, h100:")]
    assert len(more) == 1
    # The remedy is true: with those devices there is a plan, with half of them there is not.
    result = more[0].partition(",")[2].partition(":")[2].partition(":")[0]
    count = int(result)
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
    assert any(line.startswith(remedy) for line in caught.value.remedies), caught.value
    result = plan_step(graph, "h100:8", memory_limit=limit, **({"axes": axes} | NOTHING | change))
    assert result.chosen.peak_bytes <= limit


def test_a_smaller_batch_is_said_with_its_rows():
    with pytest.raises(PlanError) as caught:
        plan_step(
            mlp(4096, 64, 128), "h100:8", memory_limit=2_000_000, axes={"batch": 1}, **NOTHING
        )
    assert any(remedy.startswith("smaller batch, 512 rows") for remedy in caught.value.remedies)
    plan = plan_step(
        mlp(512, 64, 128), "h100:8", memory_limit=2_000_000, axes={"batch": 1}, **NOTHING
    )
    assert plan.chosen.peak_bytes <= 2_000_000


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
    ("wish", "message"),
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
def test_wishes_that_cannot_be_are_refused(wish, message):
    with pytest.raises(PlanError, match=message):
        plan_step(mlp(), "h100:8", **wish)


def test_a_mesh_may_be_a_text():
    axes = plan_step(mlp(1024, 512, 2048), "h100:8", axes="batch=4,model=2").axes
    assert dict(axes) == {"batch": 4, "model": 2}


@pytest.mark.parametrize(
    ("model", "batch", "error", "message"),
    [
        (5, ((8, 4), (8, 2)), mw.ModelError, "expected a compiled Keras model or a Program"),
        (None, None, mw.BatchError, r"a batch of .* must be \(x, y\).*received NoneType"),
        (None, [np.zeros([8, 4])], mw.BatchError, "received list of length 1"),
    ],
)
def test_what_is_no_model_and_no_batch(model, batch, error, message):
    if model is None:
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    with pytest.raises(error, match=message):
        mw.plan(model, batch, target="h100:8")


def test_or_tools_missing_names_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    missing = r'pip install "meshwright\[plan\]"'
    with pytest.raises(PlanError, match=missing):
        solve.solver_module()
    with pytest.raises(PlanError, match=missing):  # before anything is traced, or even looked at
        mw.plan(None, None, target="h100:8")
