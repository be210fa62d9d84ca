"""A plan of a real model: inferred, planned, trained."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from models import CPU

import meshwright as mw
from meshwright.planning.abstract_step import abstract_step

U = mw.UNSHARDED


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
    expected = single.fit(x, y, batch_size=32, epochs=3, verbose=0, shuffle=False).history["loss"]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    if plan.rules:
        split = [w.value.sharding.spec for w in model.weights if "kernel" in w.path]
        assert any("model" in str(spec) for spec in split)


def test_a_plan_of_a_batch_with_sample_weights_trains_where_more_than_rows_is_split():
    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input([16, 8]), keras.layers.Dense(8, name="tokens")])
        model.compile("sgd", "mse")
        return model

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(4, 16, 8)).astype("f") for _ in range(2))
    weights = rng.random([4, 16]).astype("f")
    goal = {"target": "cpu:8", "objective": "memory", "axes": {"batch": 2, "length": 4}}
    with mw.abstract():
        plan = mw.plan(build(), (x, y, weights), **goal)
    plan = mw.Plan.from_json(plan.to_json())
    assert all(len(along) > 1 and along[1] for along in plan.layouts_of(inputs=True).values())
    assert dict(plan.placement().targets).keys() == {0}
    strategy = plan.strategy()
    with strategy.scope():
        model = build()
    given: Any = {"sample_weight": weights, "epochs": 2, "verbose": 0, "shuffle": False}
    rows = 4 // plan.accumulate
    losses = strategy.fit(model, x, y, batch_size=rows, **given).history["loss"]
    expected = build().fit(x, y, batch_size=4, **given).history["loss"]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


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
    expected = [[*along] for path, along in plan.layouts if path.endswith("kernel")]
    assert sum(bool(axes) for along in expected for axes in along) >= 2
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
    message = "none of 60 patterns matches a variable of model '.*'; they are for another model"
    with pytest.raises(mw.PlacementError, match=message) as caught:
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
    infos = [variable.info for variable in abstract_step(program, rows, one).placed]
    lies = {variable.info.path: variable.layout for variable in byhand.place(infos)}
    assert lies == {
        variable.info.path: variable.layout for variable in plan.placement().place(infos)
    }
    assert lies["up"] == layout


def test_dims_that_no_variable_or_input_has_are_not_split():
    """No layout says how they lie, so a device would compute all of them."""

    def loss(params, batch):
        modes = jnp.fft.rfft(batch["x"], axis=1)
        whole = jnp.concatenate([modes[:, :8] * params["filter"], 0 * modes[:, 8:]], axis=1)
        return jnp.mean((jnp.fft.irfft(whole, n=32, axis=1) - batch["x"]) ** 2)

    program = mw.jax_program(loss, {"filter": jnp.ones([8])}, optax.sgd(0.1))
    plan = mw.plan(program, {"x": np.ones([32, 32], "float32")}, target="v5e:4x4")
    assert plan.rules == {}
    assert plan.axes == (("batch", 1),)
