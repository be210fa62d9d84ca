"""JAX programs and functions behind a server: from checkpoints, from params, from a Trainer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw

X = np.random.default_rng(0).normal(size=[6, 4]).astype("float32")
LAYOUTS = {"w1": [None, "model"], "b1": ["model"], "w2": ["model", None]}


def init() -> dict[str, Any]:
    one, two = jax.random.split(jax.random.key(0))
    w1, w2 = jax.random.normal(one, [4, 8]), jax.random.normal(two, [8, 2])
    return {"w1": w1, "b1": jnp.zeros(8), "w2": w2}


def forward(params: Any, x: Any) -> Any:
    return jax.nn.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def loss(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((forward(params, x) - y) ** 2)


def program() -> mw.Program:
    return mw.jax_program(loss, init, optax.sgd(0.1), forward=forward, name="mlp")


def on(**axes: int) -> mw.Placement:
    size = int(np.prod(list(axes.values())))
    mesh = mw.create_mesh(axes, jax.devices()[:size])
    return mw.Placement.of(mesh, LAYOUTS, batch="batch" if "batch" in axes else None)


def test_params_are_served_and_a_newer_state_takes_their_place() -> None:
    trainer = mw.Trainer(program(), on(batch=2, model=2))
    batch = (X, np.ones([6, 2], "float32"))
    state, _ = trainer.train(trainer.init(), [batch] * 2)
    with mw.Server(program(), on(model=4), params=state, example=X, buckets=[8]) as server:
        served = server.model("mlp")
        per_device = 4 * (4 * 8 + 8 + 8 * 2) // 4
        assert served.status().bytes_by_device == {f"cpu:{n}": per_device for n in range(4)}
        assert served.moved.nbytes == 4 * per_device
        first = np.asarray(trainer.forward(state, X))
        state, _ = trainer.train(state, [batch] * 2)  # donates what was passed in
        np.testing.assert_allclose(server.answer({"input": X}).outputs["output"], first, atol=1e-6)
        served.update(state)
        answer = server.answer({"input": X})
        assert answer.version == "2"
        expected = np.asarray(trainer.forward(state, X))
        np.testing.assert_allclose(answer.outputs["output"], expected, atol=1e-6)
        assert np.abs(expected - first).max() > 1e-3
        params = jax.tree.map(np.array, init())
        served.update(params)
        params["w2"] *= 0  # of the caller: what is served is memory of its own
        expected = forward(init(), X)
        answer = server.answer({"input": X}).outputs["output"]
        np.testing.assert_allclose(answer, expected, atol=1e-6)
        with pytest.raises(mw.ModelError, match=r"update\(params\), with a tree of parameters or"):
            served.update()
    stale = state
    trainer.train(state, [batch])
    with pytest.raises(mw.ModelError, match="w1 was donated to a later step"):
        mw.Server(program(), on(model=4), params=stale, example=X)


def test_params_that_do_not_fit_are_refused_with_every_difference() -> None:
    wrong = {"w1": np.zeros([4, 9]), "w2": np.zeros([8, 2], "complex64"), "b": 1.0}
    with pytest.raises(mw.ModelError) as refused:
        mw.Server(program(), params=wrong, example=X)
    assert str(refused.value).splitlines() == [
        "params= does not fit program 'mlp':",
        "  b1 is missing, of shape (8,)",
        "  b is unknown",
        "  w1 has shape (4, 9); the program has (4, 8)",
        "  w2 has dtype complex64; the program has float32",
    ]
    with pytest.raises(mw.ModelError, match=r"received 'runs/mlp'. Pass the folder .* checkpoint="):
        mw.Server(program(), params="runs/mlp", example=X)


def test_values_have_one_place(tmp_path: Any) -> None:
    import keras

    with pytest.raises(mw.ModelError, match=r"both in checkpoint='.*' and in params=: leave one"):
        mw.Server(program(), params=init(), example=X, checkpoint=tmp_path)
    with pytest.warns(mw.MeshwrightWarning, match=r"'mlp' is served with the values that it begin"):
        mw.Server(program(), example=X)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    with pytest.raises(mw.ModelError, match="values of its own: leave params= out"):
        mw.Server(model, params=init(), example=X)
    model.save(tmp_path / "m.keras")
    with pytest.raises(mw.ModelError, match=r"m\.keras holds the values of its model"):
        mw.Server(tmp_path / "m.keras", params=init())


@pytest.mark.parametrize(
    ("precision", "per_device", "near"),
    [
        ("bfloat16", 2 * (4 * 8 + 8 + 8 * 2) // 4, 0.02),
        ("int8", (4 * 8 + 8 * 2 + 4 * 8 + 4 * 8) // 4 + 4 * 2, 0.05),  # the last scales are whole
    ],
)
def test_parameters_are_kept_in_fewer_bits_and_answers_are_in_their_own_type(
    precision: Any, per_device: int, near: float, tmp_path: Any
) -> None:
    params = {path: np.asarray(value) for path, value in init().items()}
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, mw.TrainState(params, {}, {}, {}))
    how = {"example": X, "buckets": [8], "sample": {"input": X}, "checkpoint": tmp_path}
    with mw.Server(program(), on(model=4), precision=precision, **how) as server:
        served = server.model("mlp")
        answer = server.answer({"input": X}).outputs["output"]
        (difference,) = served.differences
        assert set(served.status().bytes_by_device.values()) == {per_device}
        with mw.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(2, mw.TrainState({**params, "w2": 2 * params["w2"]}, {}, {}, {}))
        assert served.reload()
        double = server.answer({"input": X}).outputs["output"]
    expected = np.asarray(forward(params, X))
    largest = np.abs(answer - expected).max()
    assert (answer.dtype, 0 < largest < near * np.abs(expected).max()) == ("float32", True)
    assert difference.largest == pytest.approx(largest, rel=1e-2)
    np.testing.assert_allclose(double, 2 * answer, rtol=1e-5)
    abstract = mw.Placement.of(mw.Mesh({"model": 4}), LAYOUTS, batch=None)
    options = {"target": "h100:4", "rows": [8], "compile": False, "strategy": abstract}
    report = mw.dry_serve(program(), X, precision=precision, **options)
    assert report.weight_bytes == per_device


def test_a_loop_over_matrices_of_eight_bits_makes_those_of_one_turn() -> None:
    @jax.jit
    def deep(params: Any, x: Any) -> Any:
        def turn(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w) @ params["mix"], None

        return jax.lax.scan(turn, x, params["w"])[0]

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=[3, 4, 4]), "mix": rng.normal(size=[4, 4])}
    params = {path: value.astype("float32") for path, value in params.items()}
    with mw.Server(deep, params=params, example=X, precision="int8", buckets=[8]) as server:
        served = server.model("deep")
        answer = server.answer({"input": X}).outputs["output"]
        text = str(jax.make_jaxpr(served.source.steps.predict_step)(
            served.forward.state.params, {}, jax.ShapeDtypeStruct((8, 4), "float32")
        ))  # fmt: skip
        status = served.status()
        served.update({path: 2 * value for path, value in params.items()})
        assert {weight.dtype for weight in status.weights} == {"int8", "float32"}
        assert {weight.dtype for weight in served.status().weights} == {"int8", "float32"}
    assert "i8[3,4,4]" in text
    assert "f32[3,4,4]" not in text
    expected = np.asarray(deep(params, X))
    np.testing.assert_allclose(answer, expected, atol=0.05 * np.abs(expected).max())


def test_eight_bits_take_a_matrix() -> None:
    with pytest.raises(
        mw.ModelError, match=r"precision='int8' quantizes .*and '<lambda>' has none"
    ):
        mw.Server(lambda p, x: x * p["b"], params={"b": np.ones(4, "float32")}, example=X,
                  precision="int8")  # fmt: skip


def test_a_forward_pass_that_fails_is_an_error_with_the_inputs_that_it_got() -> None:
    batch = {"x": X, "y": X}  # all of it goes in; of a tuple, x alone
    message = r"forward pass of 'mlp' cannot be traced .*TypeError.*\n.*'x': 'float32\[\d+, 4\]'"
    served = mw.Server(program(), on(model=4), params=init(), example=batch)
    with pytest.raises(mw.ModelError, match=message), served:
        pass
    abstract = mw.Placement.of(mw.Mesh({"model": 4}), LAYOUTS, batch=None)
    for compile in (True, False):
        with pytest.raises(mw.ModelError, match=message):
            mw.dry_serve(
                program(), batch, strategy=abstract, target="cpu:4", rows=[8], compile=compile
            )
