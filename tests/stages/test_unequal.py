"""Models where nothing repeats, cut into stages that differ: one device's numbers."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers
from models import conv, mesh_of
from small_transformer import KEEPS_GRADIENTS

import meshwright as mw
from meshwright.program import TrainState
from meshwright.stages.line import divided
from meshwright.stages.packing import Packing
from meshwright.step.assemble import assemble

ROWS, TOLERANCE = 8, 5e-6  # of the largest gradient


def images(rows: int = ROWS) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "x": draw.normal(size=[rows, 8, 8, 2]).astype("float32"),
        "y": draw.normal(size=[rows, 8, 8, 3]).astype("float32"),
    }


def unet_loss(params: Any, batch: Any) -> Any:
    """Two skips, a scale that every level shares, and a penalty on all kernels."""
    down = jnp.tanh(conv(batch["x"], params["down"])) * params["scale"]
    half = down.reshape(-1, 4, 2, 4, 2, 4).mean((2, 4))
    middle = jnp.tanh(conv(half, params["middle"])) * params["scale"]
    deep = jnp.tanh(conv(middle, params["deep"])) + middle
    up = jnp.repeat(jnp.repeat(deep, 2, 1), 2, 2)
    x = jnp.tanh(conv(jnp.concatenate([up, down], -1), params["up"]))
    result = conv(x, params["head"]) * params["scale"]
    penalty = sum((kernel**2).sum() for kernel in jax.tree.leaves(params))
    return ((result - batch["y"]) ** 2).mean() + 1e-2 * penalty


def unet(optimizer: Any = KEEPS_GRADIENTS) -> mw.Program:
    draw = np.random.default_rng(1)
    dims = {
        "down": (3, 3, 2, 4),
        "middle": (3, 3, 4, 6),
        "deep": (3, 3, 6, 6),
        "up": (3, 3, 10, 4),
        "head": (1, 1, 4, 3),
    }
    params = {name: (0.3 * draw.normal(size=of)).astype("float32") for name, of in dims.items()}
    params["scale"] = np.full([], 1.5, "float32")
    return mw.jax_program(unet_loss, params, optimizer, batch=images())


def stepped(
    program: mw.Program, mesh: dict[str, int], pipeline: mw.Pipeline | None = None
) -> tuple[Any, float]:
    placement = mw.Placement.of(mesh_of(mesh), batch="data" if "data" in mesh else None)
    trainer = mw.Trainer(program, placement, mw.StepOptions(pipeline=pipeline))
    state, logs = trainer.step(trainer.init(), trainer.put(images()))
    return jax.tree.map(np.asarray, trainer.unpadded(state)), float(logs["loss"])


def assert_same(actual: tuple[Any, float], reference: tuple[Any, float]) -> None:
    assert actual[1] == pytest.approx(reference[1], rel=1e-5)
    for part, expected in zip(actual[0], reference[0], strict=True):
        largest = max((np.abs(values).max() for values in expected.values()), default=0.0)
        for path, values in expected.items():
            assert np.abs(part[path] - values).max() <= TOLERANCE * largest, path


@pytest.fixture(scope="module")
def one_device() -> tuple[Any, float]:
    return stepped(unet(), {"data": 1})


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ({"stage": 4, "data": 2}, mw.Pipeline("stage", 4)),
        pytest.param(
            {"stage": 3},
            mw.Pipeline("stage", 4, "gpipe", remat_stages=False),
            marks=pytest.mark.full,
        ),
        pytest.param({"stage": 2}, mw.Pipeline("stage", 4, cuts=["deep"]), marks=pytest.mark.full),
    ],
)
def test_a_net_with_skips_has_the_gradients_of_one_device(
    one_device: tuple[Any, float], mesh: dict[str, int], pipeline: mw.Pipeline
) -> None:
    assert_same(stepped(unet(), mesh, pipeline), one_device)


@pytest.mark.full
def test_a_checkpoint_goes_on_as_other_stages_and_as_none(tmp_path: Any) -> None:
    def trained(mesh: dict[str, int], stages: mw.Pipeline | None, steps: int) -> Any:
        placement = mw.Placement.of(mesh_of(mesh), batch="data" if "data" in mesh else None)
        trainer = mw.Trainer(unet(), placement, mw.StepOptions(pipeline=stages))
        with mw.Checkpoints(tmp_path) as checkpoints:
            state, _ = trainer.train(trainer.init(), [images()] * steps, checkpoints=checkpoints)
        return jax.tree.map(np.asarray, trainer.unpadded(state))

    trained({"stage": 4}, mw.Pipeline("stage", 4), 1)
    trained({"stage": 2, "data": 2}, mw.Pipeline("stage", 2, "gpipe", cuts=["up"]), 2)
    result = trained({"data": 2}, None, 3)
    alone = mw.Trainer(unet(), mw.Placement.of(mesh_of({"data": 1}), batch="data"))
    reference, _ = alone.train(alone.init(), [images()] * 3)
    for part, values in (("params", reference.params), ("slots", reference.slots)):
        for path, expected in values.items():
            np.testing.assert_allclose(getattr(result, part)[path], expected, atol=1e-5)


@pytest.mark.full
def test_strided_depthwise_convolutions_beside_a_batch_axis_have_the_gradients_of_one_device() -> (
    None
):
    draw = np.random.default_rng(2)
    dims = {"stem": (3, 3, 2, 4), "deep": (3, 3, 1, 4), "out": (1, 1, 4, 3)}
    params = {name: (0.3 * draw.normal(size=of)).astype("float32") for name, of in dims.items()}

    def loss(params: Any, batch: Any) -> Any:
        x = jax.nn.relu(conv(batch["x"], params["stem"]))
        x = jax.lax.conv_general_dilated(
            x, params["deep"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=4,
        )  # fmt: skip
        result = conv(jax.nn.silu(x), params["out"])
        return ((result - batch["y"][:, ::2, ::2]) ** 2).mean()

    def program() -> mw.Program:
        return mw.jax_program(loss, params, KEEPS_GRADIENTS, batch=images())

    result = stepped(program(), {"stage": 2, "data": 2}, mw.Pipeline("stage", 2))
    assert_same(result, stepped(program(), {"data": 1}))


def test_each_stage_holds_its_own_weights_in_its_row_alone() -> None:
    placement = mw.Placement.of(mesh_of({"stage": 3}), batch=None)
    options = mw.StepOptions(pipeline=mw.Pipeline("stage", 4, cuts=["middle", "up"]))
    trainer = mw.Trainer(unet(optax.adam(0.1)), placement, options)
    state = trainer.init()
    weights = {"down": 72, "middle": 216, "deep": 324, "up": 360, "head": 12}
    longest = -(-max(weights["middle"] + weights["deep"], weights["up"] + 12) // 128) * 128
    for values, kinds in ((state.params, 1), (state.slots, 2)):
        rows = [value for path, value in values.items() if path.endswith("by stage")]
        assert len(rows) == kinds
        for row in rows:
            assert {shard.data.shape for shard in row.addressable_shards} == {(1, longest)}
    (row,) = (value for path, value in state.params.items() if path.endswith("by stage"))
    used = [int((np.asarray(shard.data) != 0).sum()) for shard in row.addressable_shards]
    assert used == [72, 216 + 324, 360 + 12]


def test_cuts_are_found_by_time_and_warned_of_where_they_send_much() -> None:
    widths = [8, 40, 8, 40, 8]
    params = {
        f"w{number}": np.ones(of, "float32") for number, of in enumerate(itertools.pairwise(widths))
    }

    def loss(params: Any, x: Any) -> Any:
        for number, activation in enumerate((jnp.tanh, jnp.sin, jnp.cos, jax.nn.sigmoid)):
            x = activation(x @ params[f"w{number}"])
        return x.mean()

    def explained(*cuts: str) -> Any:
        program = mw.jax_program(loss, params, optax.sgd(0.1), batch=np.ones([8, 8], "float32"))
        placement = mw.Placement.of(mesh_of({"stage": 2}), batch=None)
        options = mw.StepOptions(pipeline=mw.Pipeline("stage", 4, cuts=cuts or None))
        return assemble(program, placement, options).explained

    assert [stage.params for stage in explained().stages] == [("w0", "w1"), ("w2", "w3")]
    message = r"before 'w3' sends 320 bytes for each micro-batch; no more than 64 .* before 'w2'"
    with pytest.warns(mw.MeshwrightWarning, match=message):
        explained("w3")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.data())
def test_a_line_is_divided_as_the_best_of_all_ways(steps: list[int], data: st.DataObject) -> None:
    time = np.cumsum([0.0, *steps])
    parts = data.draw(st.integers(1, len(steps)))
    longest, begins = divided(time, parts)

    def of(inner: tuple[int, ...]) -> float:
        return max(time[b] - time[a] for a, b in itertools.pairwise((0, *inner, len(steps))))

    ways = itertools.combinations(range(1, len(steps)), parts - 1)
    assert longest == of(tuple(begins)) == min(map(of, ways))


def test_two_equal_layers_among_many_others_do_not_decide_where_a_model_is_cut() -> None:
    widths = [40, 44, 36, 48, 40, 8, 8, 8]
    params = {
        f"w{number}": np.ones(of, "float32") for number, of in enumerate(itertools.pairwise(widths))
    }

    def loss(params: Any, x: Any) -> Any:
        activations = jnp.sin, jnp.cos, jnp.exp, jax.nn.sigmoid, jnp.arctan, jnp.tanh, jnp.tanh
        for number, activation in enumerate(activations):
            x = activation(x @ params[f"w{number}"])
        return x.mean()

    program = mw.jax_program(loss, params, optax.sgd(0.1), batch=np.ones([64, 40], "float32"))
    placement = mw.Placement.of(mesh_of({"stage": 2}), batch=None)
    options = mw.StepOptions(pipeline=mw.Pipeline("stage", 4))
    stages = assemble(program, placement, options).explained.stages
    assert max(stage.flops_share for stage in stages) < 0.6  # the equal two have 2 %


def test_what_needs_equal_blocks_is_refused_with_a_way_out_and_a_loop_is_warned_of() -> None:
    def cut(program: mw.Program, mesh: dict[str, int], **more: Any) -> None:
        placement = mw.Placement.of(mesh_of(mesh), batch="data" if "data" in mesh else None, **more)
        assemble(program, placement, mw.StepOptions(pipeline=mw.Pipeline("stage", 4)))

    with pytest.raises(mw.PipelineError, match=r"axis 'model' splits .* batch=\['data', 'model'\]"):
        cut(unet(), {"stage": 2, "data": 2, "model": 2})
    with pytest.raises(mw.PipelineError, match=r"zero=1 needs equal blocks; leave it out: each"):
        cut(unet(), {"stage": 2, "data": 2}, zero=1)

    def loop(params: Any, x: Any) -> Any:
        x = jnp.sin(x @ params["first"])
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jax.lax.scan(layer, x, params["layers"], reverse=True)[0].mean()

    params = {"first": np.ones([4, 4], "float32"), "layers": np.ones([8, 4, 4], "float32")}
    program = mw.jax_program(loop, params, optax.sgd(0.1), batch=np.ones([8, 4], "float32"))
    with pytest.warns(mw.MeshwrightWarning, match=r"89% of .* in one loop .* one after the other"):
        cut(program, {"stage": 2})


def unet_of_layers() -> keras.Model:
    """As anybody writes it: constants that a layer makes from its variables when it is built, batch
    statistics, dropout, a penalty, a norm over all gradients."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input([8, 8, 2])
    x = layers.Normalization(axis=-1)(inputs)
    skips = []
    for number, filters in enumerate([4, 6]):
        x = layers.Conv2D(filters, 3, padding="same", name=f"down{number}")(x)
        x = layers.BatchNormalization(name=f"norm{number}")(x)
        x = layers.Activation("relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x) if number == 0 else layers.Dropout(0.3)(x)
    x = layers.Concatenate()([layers.UpSampling2D()(x), skips[0]])
    x = layers.Conv2D(4, 3, padding="same", activation="relu", kernel_regularizer="l2")(x)
    model = keras.Model(inputs, layers.Conv2D(3, 1, name="head")(x))
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5), "mse", metrics=["mae"]
    )
    return model


def fitted(strategy: mw.Sharded, rows: int) -> tuple[keras.Model, dict[str, list[float]]]:
    with strategy.scope():
        model = unet_of_layers()
    batch = images(16)
    history = strategy.fit(
        model, batch["x"], batch["y"], batch_size=rows, epochs=2, shuffle=False, verbose=0
    )
    return model, history.history


@pytest.mark.full
def test_batch_statistics_are_those_of_micro_batches_as_where_gradients_accumulate() -> None:
    plain, expected = fitted(
        mw.DataParallel(mesh_of({"data": 1}), batch="data", accumulate=4), rows=2
    )
    strategy = mw.Sharded(
        mesh_of({"stage": 3}),
        batch=None,
        unmatched="replicate",
        pipeline=mw.Pipeline("stage", 4),
    )
    model, actual = fitted(strategy, rows=8)
    assert actual == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}
    for one, other in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=2e-5, err_msg=one.path)
    (note,) = [note for note in strategy.explain(model).notes if "micro_batches=1" in note]
    assert "statistics are those of a micro-batch of 2 rows" in note


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:micro_batches=1 over 2 stages")
def test_one_micro_batch_has_the_statistics_of_the_whole_batch() -> None:
    plain, expected = fitted(mw.DataParallel(mesh_of({"data": 1}), batch="data"), rows=8)
    pipeline = mw.Pipeline("stage", 1)
    mesh = mesh_of({"stage": 2})
    strategy = mw.Sharded(mesh, batch=None, unmatched="replicate", pipeline=pipeline)
    model, actual = fitted(strategy, rows=8)
    notes = strategy.explain(model).notes
    assert not any("micro_batches=1" in note for note in notes)
    assert actual == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}
    for one, other in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=2e-5, err_msg=one.path)


def test_stages_that_share_all_weights_have_the_gradients_of_one_device() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = jnp.sin(jnp.tanh(batch["x"] @ params["w"]) @ params["w"].T)
        return jnp.square(x[..., :1] - batch["y"]).mean()

    params = {"w": np.random.default_rng(1).normal(size=[2, 4]).astype("float32")}
    program = mw.jax_program(loss, params, KEEPS_GRADIENTS, batch=images())
    result = stepped(program, {"stage": 2, "data": 2}, mw.Pipeline("stage", 2))
    one = mw.jax_program(loss, params, KEEPS_GRADIENTS, batch=images())
    assert_same(result, stepped(one, {"data": 1}))


def test_whole_numbers_and_truths_that_layers_make_reach_the_loss_without_gradients() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x, choices = batch["x"], list[Any]()
        for name, kernel in sorted(params.items()):
            x = jnp.tanh(x @ kernel)
            choice = jnp.argmax(x.mean((1, 2)), 1)
            choices.append(choice if name == "a" else choice > 0)
        scale = jnp.asarray(1.0 + sum(choices))[:, None, None, None]
        return jnp.mean(scale * (x[..., :1] - batch["y"]) ** 2)

    draw = np.random.default_rng(1)
    sizes = {"a": (2, 4), "b": (4, 6), "c": (6, 3)}
    params = {name: draw.normal(size=dims).astype("float32") for name, dims in sizes.items()}
    program = mw.jax_program(loss, params, KEEPS_GRADIENTS, batch=images())
    result = stepped(program, {"stage": 2, "data": 2}, mw.Pipeline("stage", 2))
    assert_same(result, stepped(program, {"data": 1}))


def test_rows_are_gathered_once_and_not_for_each_of_their_arrays() -> None:
    params = {f"w{number}": np.zeros([128, 128], "float32") for number in range(16)}
    program = mw.jax_program(
        lambda p, batch: sum(w.sum() for w in p.values()), params, optax.sgd(0.1)
    )
    owner = {info.path: number % 2 for number, info in enumerate(program.params)}
    placement = mw.Placement.of(mesh_of({"stage": 2}), batch=None)
    packing = Packing.by_owner(program, placement, "stage", owner)
    (rows,) = packing.packs.params.values()
    lies = packing.stored.params[rows.info.path].sharding
    stored = jax.ShapeDtypeStruct(rows.info.dims, "float32", sharding=lies)

    def arrays(stored: Any) -> Any:
        state = TrainState({rows.info.path: stored}, {}, {}, {})
        return packing.unstack(state).params

    whole = mw.Layout.replicated(placement.mesh, 2).sharding
    compiled = jax.jit(arrays, out_shardings=whole).lower(stored).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 3 * rows.info.nbytes
