"""Replicas that take steps of their own between two exchanges, beside each of them by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import meshwright as mw

DRAW = np.random.default_rng(2)
PARAMS = {
    name: DRAW.normal(size=d).astype("float32") for name, d in {"w": (6, 3), "b": (3,)}.items()
}
BATCHES = [
    (DRAW.normal(size=(16, 6)).astype("float32"), DRAW.normal(size=(16, 3)).astype("float32"))
    for _ in range(6)
]
REPLICAS, EVERY = 4, 3


def loss(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def alone(params: Any, batches: Any) -> Any:
    """Where plain SGD with momentum arrives on these batches."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    slots = optimizer.init(params)
    for batch in batches:
        grads = jax.grad(loss)(params, batch)
        changes, slots = optimizer.update(grads, slots, params)
        params = optax.apply_updates(params, changes)
    return params


def piece(batch: Any, replica: int) -> Any:
    rows = 16 // REPLICAS
    return tuple(array[replica * rows : (replica + 1) * rows] for array in batch)


def mean(trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *trees)


def trained(local: Any, batches: Any) -> Any:
    program = mw.jax_program(loss, PARAMS, optax.sgd(0.1, momentum=0.9))
    placement = mw.Placement.of(mw.create_mesh({"batch": REPLICAS}, jax.devices()[:REPLICAS]))
    trainer = mw.Trainer(program, placement, mw.StepOptions(local=local))
    return trainer.train(trainer.init(), batches)


def test_replicas_take_their_own_steps_and_are_averaged() -> None:
    state, logs = trained(mw.LocalSGD(EVERY), BATCHES[:EVERY])
    expected = mean(
        [alone(PARAMS, [piece(b, r) for b in BATCHES[:EVERY]]) for r in range(REPLICAS)]
    )
    for name, value in expected.items():
        np.testing.assert_allclose(state.params[name], value, atol=1e-6)
    assert float(logs["loss"]) > 0


def test_complex_parameters_are_averaged_and_logs_may_be_plain_numbers() -> None:
    def spectrum(params: Any, batch: Any) -> Any:
        return loss({"w": jnp.abs(params["c"]), "b": 0.0}, batch), {"halves": 0.5, "count": 2}

    c = PARAMS["w"] + 1j * PARAMS["w"][::-1]
    program = mw.jax_program(spectrum, {"c": c}, optax.sgd(0.1))
    placement = mw.Placement.of(mw.create_mesh({"batch": REPLICAS}, jax.devices()[:REPLICAS]))
    trainer = mw.Trainer(program, placement, mw.StepOptions(local=mw.LocalSGD(1)))
    state, logs = trainer.step(trainer.init(), BATCHES[0])
    gradient = jax.grad(lambda c: spectrum({"c": c}, BATCHES[0])[0])(c)
    np.testing.assert_allclose(state.params["c"], c - 0.1 * gradient, atol=1e-6)
    assert (float(logs["halves"]), float(logs["count"])) == (0.5, 2)


def test_counts_that_differ_between_replicas_are_one_number_afterwards() -> None:
    """One replica leaves its steps out, for its rows are not finite."""
    program = mw.jax_program(loss, PARAMS, optax.apply_if_finite(optax.adam(0.1), 5))
    placement = mw.Placement.of(mw.create_mesh({"batch": REPLICAS}, jax.devices()[:REPLICAS]))
    trainer = mw.Trainer(program, placement, mw.StepOptions(local=mw.LocalSGD(1)))
    x, y = BATCHES[0]
    x = np.where(np.arange(16)[:, None] == 0, np.nan, x)
    state, _ = trainer.step(trainer.init(), (x, y))
    for name, least in {"inner_state/0/count": 1, "total_notfinite": 1, "last_finite": 1}.items():
        of_devices = [int(shard.data) for shard in state.slots[name].addressable_shards]
        assert of_devices == [least] * REPLICAS, name


def test_diloco_steps_from_where_they_began_along_their_mean_move() -> None:
    def run(params: Any) -> Any:
        return mean([alone(params, [piece(b, r) for b in [BATCHES[0]]]) for r in range(REPLICAS)])

    state, _ = trained(mw.DiLoCo(1, learning_rate=0.5, momentum=0.8), BATCHES[:1])
    arrived = run(PARAMS)
    for name, start in PARAMS.items():
        move = start - arrived[name]
        np.testing.assert_allclose(state.params[name], start - 0.5 * (0.8 * move + move), atol=1e-6)
        np.testing.assert_allclose(state.slots[f"{name}/outer_momentum"], move, atol=1e-6)


def test_each_row_has_the_key_that_it_has_without_replicas() -> None:
    def noisy(params: Any, batch: Any, keys: Any) -> Any:
        x, y = batch
        return loss(params, (x + jax.vmap(lambda key: jax.random.normal(key, [6]))(keys), y))

    program = mw.jax_program(noisy, PARAMS, optax.sgd(0.1))
    placement = mw.Placement.of(mw.create_mesh({"batch": REPLICAS}, jax.devices()[:REPLICAS]))
    plain, local = (
        mw.Trainer(program, placement, mw.StepOptions(local=how))
        for how in (None, mw.LocalSGD(1))  # the mean of one step of SGD is that of its gradients
    )
    expected, state = (job.train(job.init(), BATCHES[:2])[0] for job in (plain, local))
    assert state.state["counts/rows"] == expected.state["counts/rows"] == 32
    for name, value in expected.params.items():
        np.testing.assert_allclose(state.params[name], value, atol=1e-6)


def test_only_one_exchange_of_gradients_and_parameters_is_compiled() -> None:
    program = mw.jax_program(loss, PARAMS, optax.sgd(0.1))
    trainer = mw.Trainer(
        program,
        mw.Placement.of(mw.create_mesh({"batch": 8})),
        mw.StepOptions(local=mw.LocalSGD(EVERY)),
    )
    batches = tuple(map(trainer.put, BATCHES[:EVERY]))
    text = trainer.step.lower(trainer.init(), batches).compile().as_text()
    assert (
        sum(f"f32[{6 * 3 + 3}]" in line for line in text.splitlines() if "all-reduce(" in line) == 1
    )


@pytest.mark.full
def test_keras_models_train_resume_and_keep_the_outer_momentum(tmp_path: Any) -> None:
    def build() -> tuple[Any, Any]:
        keras.utils.set_random_seed(3)
        strategy = mw.DataParallel(mw.create_mesh({"batch": 8}), local=mw.DiLoCo(2))
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input([6]),
                    keras.layers.Dense(8, "relu"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dropout(0.2),
                    keras.layers.Dense(3),
                ]
            )
            model.compile("adam", "mse", metrics=["mae"])
        return strategy, model

    x, y = (np.concatenate(part) for part in zip(*BATCHES, strict=True))
    how = {"batch_size": 16, "verbose": 0, "shuffle": False}
    strategy, whole = build()
    first = strategy.fit(whole, x, y, epochs=4, **how).history
    assert first["loss"][-1] < first["loss"][0]
    strategy, half = build()
    strategy.fit(half, x, y, epochs=2, checkpoint=tmp_path, **how)
    strategy, resumed = build()
    again = strategy.fit(resumed, x, y, epochs=4, checkpoint=tmp_path, **how).history
    np.testing.assert_allclose(again["loss"][-2:], first["loss"][-2:], rtol=1e-6)
    assert sum("outer_momentum" in v.path for v in resumed.optimizer.variables) == 6


def test_what_cannot_be_is_refused() -> None:
    mesh = mw.Mesh({"batch": 4, "model": 2})
    with pytest.raises(mw.LayoutError, match=r"local=LocalSGD\(every=2\): .* more than the batch"):
        mw.DataParallel(mesh, local=mw.LocalSGD(2))
    with pytest.raises(mw.ModelError, match="not supported together with accumulate= or sums="):
        mw.StepOptions(local=mw.LocalSGD(2), accumulate=2)
    program = mw.jax_program(loss, PARAMS, optax.sgd(0.1))
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}))
    trainer = mw.Trainer(program, placement, mw.StepOptions(local=mw.LocalSGD(2)))
    for one in (trainer.put(BATCHES[0][0]), trainer.put({"x": BATCHES[0][0]})):
        with pytest.raises(mw.BatchError, match=r"local=.* takes a tuple of batches, all of one"):
            trainer.step.lower(trainer.init(), one)
    odd = trainer.put(tuple(array[:12] for array in BATCHES[0]), last=True)
    with pytest.raises(mw.BatchError, match="12 rows do not divide over 8 replicas"):
        trainer.step.lower(trainer.init(), (odd, odd))
    masked = trainer.put((*BATCHES[0], np.ones([8], "float32")))
    with pytest.raises(mw.BatchError, match=r"share a batch out by its rows.*\(16, 3\), \(8,\)"):
        trainer.step.lower(trainer.init(), (masked, masked))
