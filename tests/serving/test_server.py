"""Whatever is served answers as on one device, from wherever its weights come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import meshwright as mw
from meshwright.commands.serving import ServeOptions, server_for
from meshwright.serving import options
from meshwright.serving.source import source_of

ROWS = np.random.default_rng(0).normal(size=[6, 8]).astype("float32")


def build(optimizer: Any = "adam") -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input([8]),
            keras.layers.Dense(16, "relu", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(4, name="last"),
        ],
        name="small",
    )
    model.compile(optimizer, "mse")
    return model


def averaging() -> keras.Model:
    return build(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))


LAYOUTS = {"hidden.*kernel": [None, "model"], "last.*kernel": ["model", None]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[keras.Model, mw.Sharded, str]:
    """A model that was trained on batch=4, model=2, and the directory of its run."""
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), LAYOUTS, zero=1)
    run = str(tmp_path_factory.mktemp("run"))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
    x = np.tile(ROWS, [4, 1])
    strategy.fit(model, x, x[:, :4], batch_size=8, epochs=1, verbose=0, checkpoint=run)
    return model, strategy, run


def test_a_training_checkpoint_on_another_mesh(trained: tuple) -> None:
    model, strategy, run = trained
    mesh = mw.create_mesh({"model": 4}, devices=mw.create_mesh({"d": 8}).bound_devices()[:4])
    with mw.Server(run, strategy.serving(mesh), build=build) as server:
        answer = server.answer({"input": ROWS})
        served: Any = server.model("small")
        status = served.status()
    np.testing.assert_allclose(answer.outputs["last"], model.predict(ROWS, verbose=0), atol=1e-6)
    assert answer.version == "3"
    assert [str(spec) for spec in served.inputs] == ["input float32[rows, 8]"]
    assert [str(spec) for spec in served.outputs] == ["last float32[rows, 4]"]
    # Kernels in pieces of a quarter, biases and statistics whole; no slot.
    per_device = 4 * (8 * 16 // 4 + 16 + 4 * 16 + 16 * 4 // 4 + 4)
    assert status.bytes_by_device == {f"cpu:{n}": per_device for n in range(4)}
    assert served.moved.nbytes == 4 * per_device  # which is all that was read
    assert {w.name: w.bytes_per_device for w in status.weights}["hidden/kernel"] == 128


def test_the_command_takes_a_builder_of_the_model_alone_and_a_mesh_of_some_devices(
    trained: tuple,
) -> None:
    model, _, run = trained
    layouts = {pattern: mw.Layout(specs) for pattern, specs in LAYOUTS.items()}
    options = ServeOptions(
        Path(run), f"{__name__}:build", mw.Mesh({"model": 2}), layouts, buckets=(8,)
    )
    with server_for(options) as server:
        (name,) = server.names()
        answer = server.answer({"input": ROWS})
        bytes_by_device = server.model(name).status().bytes_by_device
    np.testing.assert_allclose(answer.outputs["last"], model.predict(ROWS, verbose=0), atol=1e-6)
    assert set(bytes_by_device) == {"cpu:0", "cpu:1"}


@pytest.mark.parametrize("precision", [None, pytest.param("int8", marks=pytest.mark.full)])
def test_averages_of_weights_answer_as_after_fit(precision: Any, tmp_path: Path) -> None:
    """A run's checkpoints hold the weights from before Keras puts the averages in."""
    mesh = mw.create_mesh({"batch": 4, "model": 2})
    strategy, model = mw.Sharded(mesh, LAYOUTS, zero=1), averaging()
    x = np.tile(ROWS, [4, 1])
    strategy.fit(model, x, x[:, :4], batch_size=8, verbose=0, checkpoint=tmp_path)
    expected = model.predict(ROWS, verbose=0)
    with mw.Server(tmp_path, strategy.serving(mesh), build=averaging, precision=precision) as s:
        answer = s.answer({"input": ROWS}).outputs["last"]
    np.testing.assert_allclose(answer, expected, atol=1e-6 if precision is None else 0.02)
    strategy.restore(model, tmp_path)
    assert np.abs(model.predict(ROWS, verbose=0) - expected).max() > 0.05


@pytest.mark.full
def test_a_keras_file(trained: tuple, tmp_path: pytest.TempPathFactory) -> None:
    model, strategy, _ = trained
    path = tmp_path / "small.keras"
    model.save(path)
    with mw.Server(path, strategy.serving(mw.create_mesh({"model": 8}))) as server:
        answer = server.answer({"input": ROWS})
        bytes_by_device = server.model("small").status().bytes_by_device
    np.testing.assert_allclose(answer.outputs["last"], model.predict(ROWS, verbose=0), atol=1e-6)
    assert set(bytes_by_device.values()) == {4 * (8 * 16 // 8 + 16 + 4 * 16 + 16 * 4 // 8 + 4)}


def test_weights_of_training_in_memory(trained: tuple) -> None:
    model, strategy, _ = trained
    with mw.Server(model, strategy.serving(mw.create_mesh({"model": 8}))) as server:
        served = server.model("small")
        assert served.moved.nbytes == sum(served.status().bytes_by_device.values())
        before = server.answer({"input": ROWS}).outputs["last"]
        x = np.tile(ROWS, [4, 1])
        strategy.fit(model, x, x[:, :4], batch_size=8, epochs=1, verbose=0)  # donates its arrays
        np.testing.assert_array_equal(server.answer({"input": ROWS}).outputs["last"], before)
        moved = served.update()
        after = server.answer({"input": ROWS})
    assert moved.seconds > 0
    assert after.version == "2"
    np.testing.assert_allclose(after.outputs["last"], model.predict(ROWS, verbose=0), atol=1e-6)
    assert model.layers[0].kernel.layout.mesh == strategy.mesh  # the model is where it was


def test_a_path_that_is_no_model_names_what_may_have_been_meant(tmp_path: Path) -> None:
    with pytest.raises(mw.CheckpointError, match=r"has no \.keras file\. Name a model that"):
        mw.Server(tmp_path / "missing.keras")
    (tmp_path / "other.keras").write_text("not a model")
    with pytest.raises(mw.CheckpointError, match=r"has other\.keras\. Name a model that"):
        mw.Server(tmp_path / "missing.keras")
    with pytest.raises(mw.CheckpointError, match=r"is a folder.*Server\(build=build, checkpoint="):
        mw.Server(tmp_path)
    with pytest.raises(mw.CheckpointError, match=r"cannot be read as a Keras model.*model\.save"):
        mw.Server(tmp_path / "other.keras")
    with pytest.raises(mw.ModelError, match=r"p\.json is a plan, .* Server\(model, '.*p\.json'\)"):
        mw.Server(tmp_path / "p.json")
    with pytest.raises(mw.ServingError, match=r"is a plan, not a run: .* --plan .*p\.json"):
        server_for(ServeOptions(tmp_path / "p.json"))


def test_a_mesh_without_devices_is_refused_by_name() -> None:
    model, mesh = build(), mw.Mesh({"model": 2})
    for strategy in (mesh, mw.Sharded(mesh, LAYOUTS, batch=None)):
        with pytest.raises(mw.TopologyError, match=r"is abstract\. Use mw\.create_mesh"):
            mw.Server(model, strategy)
    strategy = mw.Sharded(mesh, LAYOUTS, batch=None)
    for name, arguments in (
        ("fit", (model, ROWS, ROWS)),
        ("predict", (model, ROWS)),
        ("evaluate", (model, ROWS)),
        ("put", ((ROWS,),)),
        ("restore", (model, "nowhere")),
    ):
        with pytest.raises(mw.TopologyError, match=rf"^{name}\(\.\.\.\) needs devices"):
            getattr(strategy, name)(*arguments)


def of_named_inputs() -> keras.Model:
    one, other = keras.Input((8,), name="left"), keras.Input((8,))
    return keras.Model([one, other], keras.layers.Dense(2)(one + other))


class OfNested(keras.Model):
    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(2)

    def call(self, x):
        return self.last(x["query"]["ids"] + x["others"][0])


NAMED: dict[str, Any] = {
    "in a list": (of_named_inputs, [ROWS, ROWS], ["left", "input_1"]),
    "nested": (OfNested, {"query": {"ids": ROWS}, "others": [ROWS]}, ["others_0", "query_ids"]),
}


@pytest.mark.parametrize("case", NAMED)
def test_inputs_have_the_names_that_a_model_gives_them(case):
    build, example, names = NAMED[case]
    source = source_of(build(), mw.DataParallel(mw.create_mesh({"batch": 8})), example=example)
    assert sorted(spec.name for spec in source.inputs) == sorted(names)


def test_nested_outputs_have_their_keys_joined() -> None:
    """Also where their layers have names; those of a list have the names alone."""
    x = keras.Input((8,))
    deep, other = keras.layers.Dense(1, name="q")(x), keras.layers.Dense(2, name="r")(x)

    def outputs(tree: Any) -> set[str]:
        mesh = mw.DataParallel(mw.create_mesh({"batch": 8}))
        with mw.Server(keras.Model(x, tree), mesh) as server:
            return set(server.answer({"input": ROWS[:1]}).outputs)

    assert outputs({"n": {"deep": deep, "pair": [other, other]}, "m": other}) == {
        "n_deep", "n_pair_0", "n_pair_1", "m"
    }  # fmt: skip
    assert outputs([deep, other]) == {"q", "r"}


@pytest.mark.parametrize("option", [{"lengths": 8}, {"buckets": 8}, {"wait_s": None}])
def test_options_of_another_type_are_refused_by_name(option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(mw.ModelError, match=f"{name}={value}: expected"):
        options.ServeOptions.of(option)


def test_no_lengths_may_be_said_as_none() -> None:
    none = {"lengths": None, "buckets": None}
    assert options.ServeOptions.of(none) == options.ServeOptions()


@pytest.mark.parametrize("pipeline", [None, mw.Pipeline("stage", micro_batches=1)])
def test_a_server_is_compiled_where_jit_is_disabled(
    pipeline: mw.Pipeline | None,
) -> None:
    """By ``JAX_DISABLE_JIT``, for all threads."""
    mesh = mw.create_mesh({"batch": 4, "stage": 2} if pipeline else {"batch": 8})
    strategy = mw.Sharded(mesh, batch="batch", pipeline=pipeline)
    model = build()
    expected = np.asarray(model(ROWS))
    jax.config.update("jax_disable_jit", True)
    try:
        with mw.Server(model, strategy) as server:
            (answer,) = server.answer({"input": ROWS}).outputs.values()
    finally:
        jax.config.update("jax_disable_jit", False)
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)
