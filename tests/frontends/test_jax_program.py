"""Parameters of a JAX program: trees, functions that make them, and trees that can be called."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw


def network(width=16):
    return eqx.nn.MLP(8, 4, width, depth=2, key=jax.random.key(0))  # holds its activation, too


def loss(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def batch():
    x, y = jax.random.normal(jax.random.key(1), (2, 16, 8))
    return np.asarray(x), np.asarray(y[:, :4])


@pytest.mark.parametrize("params", [network(), network], ids=["made", "made by a function"])
def test_an_equinox_module_trains_as_optax_trains_it_alone(params):
    model, optimizer = network(), optax.adam(0.01)
    program = mw.jax_program(loss, params, optimizer, forward=lambda m, x: jax.vmap(m)(x))
    paths = [info.path for info in program.params]
    assert paths[:2] == ["layers/0/weight", "layers/0/bias"]
    assert len(paths) == 6
    layouts = {"layers/0/weight": ["model", None], "layers/1/weight": [None, "model"]}
    mesh = mw.create_mesh({"batch": 4, "model": 2})
    placement = mw.Placement.of(mesh, layouts, unmatched="replicate")
    trainer = mw.Trainer(program, placement)
    state = trainer.init()
    rows = batch()
    slots = optimizer.init(eqx.filter(model, eqx.is_array))
    for _ in range(3):
        state, logs = trainer.step(state, rows)
        value, slopes = eqx.filter_value_and_grad(loss)(model, rows)
        changes, slots = optimizer.update(slopes, slots)
        model = eqx.apply_updates(model, changes)
        np.testing.assert_allclose(logs["loss"], value, rtol=1e-4)
    weight = state.params["layers/1/weight"]
    np.testing.assert_allclose(weight, model.layers[1].weight, rtol=1e-3, atol=1e-5)
    assert str(weight.sharding.spec) == "P(None, 'model')"
    result = trainer.forward(state, rows[0])
    np.testing.assert_allclose(result, jax.vmap(model)(rows[0]), rtol=1e-3, atol=1e-5)


def test_a_module_of_shapes_is_planned_with():
    model = eqx.filter_eval_shape(network, 4096)
    program = mw.jax_program(loss, model, optax.adam(0.01))
    rows = jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((16, 4), "float32")
    plan = mw.plan(program, rows, target="h100:4")
    assert {"layers/0/weight", "layers/2/bias"} <= plan.layouts_of(inputs=False).keys()


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"w": jnp.ones(3)},
        functools.partial(lambda n: {"w": jnp.ones(n)}, 3),
        jax.tree_util.Partial(lambda n: {"w": jnp.ones(3) * n}, 1.0),
        jax.jit(lambda: {"w": jnp.ones(3)}),
    ],
    ids=["function", "partial", "tree of a partial", "jitted"],
)
def test_a_function_stillmakes_parameters(make):
    program = mw.jax_program(lambda p, b: jnp.sum(p["w"] * b), make, optax.sgd(0.1))
    assert [(info.path, info.dims) for info in program.params] == [("w", (3,))]
    np.testing.assert_array_equal(program.initial().params["w"], np.ones(3))


def test_the_forward_pass_is_right_for_split_images_as_they_lie():
    draw = np.random.default_rng(0)
    kernel = draw.normal(size=[3, 3, 3, 4]).astype("float32")
    images = draw.normal(size=[4, 8, 8, 3]).astype("float32")

    def forward(params, x):
        dims = "NHWC", "HWIO", "NHWC"
        return jax.lax.conv_general_dilated(
            x, params["kernel"], (1, 1), "SAME", dimension_numbers=dims
        )

    program = mw.jax_program(
        lambda params, x: jnp.mean(forward(params, x) ** 2),
        {"kernel": kernel},
        optax.sgd(0.1),
        forward=forward,
    )
    mesh = mw.create_mesh({"batch": 2, "rows": 2, "model": 2})
    split = ["batch", "rows", None, None]
    placement = mw.Placement.of(mesh, {"kernel": [None, None, None, "model"]}, inputs=split)
    trainer = mw.Trainer(program, placement)
    result = trainer.forward(
        trainer.init(), jax.device_put(images, mw.Layout(split, mesh).sharding)
    )
    # XLA alone is wrong by a tenth of the largest output.
    np.testing.assert_allclose(result, forward({"kernel": kernel}, images), atol=1e-4)


def on_one_device(program, batch):
    mesh = mw.create_mesh({"batch": 1}, devices=jax.devices()[:1])
    trainer = mw.Trainer(program, mw.Placement.of(mesh, {}))
    return trainer.step(trainer.init(), batch)


def test_two_parameters_of_one_path_are_refused():
    params = {"a/b": jnp.ones([4, 1]), "a": {"b": jnp.zeros([4, 1])}}
    with pytest.raises(mw.ModelError) as caught:
        mw.jax_program(lambda p, x: jnp.mean(x @ p["a/b"]), params, optax.sgd(0.1))
    assert str(caught.value) == ("['a']['b'] and ['a/b'] have the same path, 'a/b': rename a key.")


def test_parameters_keep_their_dtype_as_by_optax():
    params, optimizer = {"w": jnp.ones([4, 1], "bfloat16")}, optax.adam(0.1, mu_dtype="float32")
    rows = jnp.ones([8, 4], "bfloat16")

    def mean(params, rows):
        return jnp.mean(rows @ params["w"])

    state, _ = on_one_device(mw.jax_program(mean, params, optimizer), rows)
    changes, _ = optimizer.update(jax.grad(mean)(params, rows), optimizer.init(params), params)
    expected = optax.apply_updates(params, changes)["w"]
    assert state.params["w"].dtype == expected.dtype == "bfloat16"
    np.testing.assert_array_equal(state.params["w"], expected)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda rows: rows, r"received float32 of shape \(8,\)\. Take a mean"),
        (lambda rows: None, "received NoneType"),
        (lambda rows: jnp.sum(rows > 0), r"received int32 of shape \(\)"),
        (lambda rows: (rows.mean(), [1.0]), "must be a dict of scalars.*received list"),
        (lambda rows: (rows.mean(), {"a": {"b": 1.0}}), "log 'a' of the loss is a dict"),
        (lambda rows: (rows.mean(), {"loss": rows.sum()}), "'loss' is the name of the loss itself"),
        (lambda rows: (rows.mean(), {}, {}), "received tuple"),
    ],
)
def test_a_loss_that_returns_something_else_says_what(returned, words):
    program = mw.jax_program(
        lambda p, x: returned((x @ p["w"])[:, 0]), {"w": jnp.ones([4, 1])}, optax.sgd(0.1)
    )
    with pytest.raises(mw.ModelError, match=words):
        on_one_device(program, np.ones([8, 4], "float32"))


def test_parameters_without_a_gradient_are_named():
    params = {"w": jnp.ones([4, 1]), "rngs": {"count": jnp.zeros([], "uint32")}}
    program = mw.jax_program(lambda p, x: jnp.mean(x @ p["w"]), params, optax.sgd(0.1))
    with pytest.raises(mw.ModelError, match=r"received rngs/count \(uint32\)\. Leave them out"):
        on_one_device(program, np.ones([8, 4], "float32"))


@pytest.mark.parametrize("place", ["params", "state"])
def test_a_function_that_needs_a_key_to_make_arrays_says_how_to_give_it(place):
    def weights(key, width=4):
        return {"w": jax.random.normal(key, [width])}

    arrays = {"params": {"w": jnp.ones([4])}, "state": None, place: weights}
    params, state = arrays.values()
    words = r"received weights\(key\)\. .* lambda: weights\(jax\.random\.key\(0\)\)"
    with pytest.raises(mw.ModelError, match=words):
        mw.jax_program(lambda p, x, state: 0.0, params, optax.sgd(0.1), state=state or {})


def test_a_function_that_makes_something_else_than_arrays_says_what():
    with pytest.raises(mw.ModelError, match=r"received 'relu' at \['act'\]\. Leave them out"):
        mw.jax_program(
            lambda p, x: 0.0, lambda: {"w": jnp.ones([4]), "act": "relu"}, optax.sgd(0.1)
        )


def test_the_optimizer_of_flax_is_refused_in_a_line_with_the_way_out():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(mw.ModelError, match=r"^expected an Optax .{,160} Pass its tx\.$"):
        mw.jax_program(lambda params, x: 0.0, {"w": 1.0}, optimizer)
