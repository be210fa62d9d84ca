"""Pipelines of unchanged models: one device's numbers, and each stage's weights on its devices."""

from __future__ import annotations

from dataclasses import replace

import jax
import keras
import numpy as np
import optax
import pytest
import small_transformer
from models import mesh_of
from small_transformer import ROWS, TOKENS, batch_of, keras_model, program_of, tied_loss
from transfers import permutes

import meshwright as mw
from meshwright.equivalence.check import check
from meshwright.stages import running
from meshwright.step.assemble import assemble
from meshwright.units import bytes_text

TOLERANCE = 5e-6  # of the largest gradient


def stepped(program, mesh, how=None, layouts=None, **more):
    """Gradients (which the slots keep), parameters and logs after one step, by their own paths."""
    batch = "data" if "data" in mesh else None
    placement = mw.Placement.of(mesh_of(mesh), layouts, batch=batch, **more)
    trainer = mw.Trainer(program, placement, how or mw.StepOptions())
    state, logs = trainer.step(trainer.init(), trainer.put(batch_of()))
    whole = jax.tree.map(np.asarray, trainer.unpadded(state))
    return whole.slots, whole.params, {name: float(value) for name, value in logs.items()}


def piped(schedule="1f1b", micro_batches=4, repeats=1, remat_stages=None, cuts=None, **more):
    pipeline = mw.Pipeline("stage", micro_batches, schedule, repeats, remat_stages, cuts)
    return mw.StepOptions(pipeline=pipeline, **more)


@pytest.fixture(scope="module")
def one_device():
    return stepped(program_of(8), {"data": 1})


def assert_same(actual, reference):
    for part, expected in zip(actual[:2], reference[:2], strict=True):
        assert part.keys() == expected.keys()
        largest = max(np.abs(values).max() for values in expected.values())
        for path, values in expected.items():
            assert np.abs(part[path] - values).max() <= TOLERANCE * largest, path
    assert actual[2] == pytest.approx(reference[2], rel=1e-5)


SPLIT = {"qkv": [None, "model"], "up": [None, "model"], "down": ["model", None]}


@pytest.mark.parametrize(
    ("mesh", "how", "more"),
    [
        ({"stage": 4, "data": 2}, piped("1f1b", 8), {}),
        ({"stage": 2, "data": 2, "model": 2}, piped("gpipe"), {"layouts": SPLIT}),
        ({"stage": 2, "data": 2}, piped("circular", repeats=2), {"zero": 2}),
        ({"stage": 4}, piped("zero_bubble"), {}),
        ({"stage": 3, "data": 2}, piped(), {}),  # 3, 3 and 2 blocks
        pytest.param({"stage": 8}, piped("gpipe", 16), {}, marks=pytest.mark.full),
        pytest.param({"stage": 3, "model": 2}, piped(), {"layouts": SPLIT}, marks=pytest.mark.full),
        pytest.param({"stage": 3}, piped("zero_bubble"), {}, marks=pytest.mark.full),
        pytest.param(
            {"stage": 2, "data": 2},
            piped("circular", repeats=3),
            {"zero": 1},
            marks=pytest.mark.full,
        ),
        pytest.param({"stage": 2, "data": 2}, piped(cuts=["blocks.1"]), {}, marks=pytest.mark.full),
        pytest.param({"stage": 4, "model": 2}, piped(), {"layouts": SPLIT}, marks=pytest.mark.full),
        pytest.param(
            {"stage": 2, "data": 4}, piped(remat="block"), {"zero": 1}, marks=pytest.mark.full
        ),
        pytest.param({"stage": 1, "data": 2}, piped(), {}, marks=pytest.mark.full),
        pytest.param(
            {"stage": 2, "data": 2, "seq": 2},
            piped(),
            {"inputs": ["data", "seq"]},
            marks=pytest.mark.full,
        ),
        pytest.param({"stage": 4}, piped("circular", repeats=2), {}, marks=pytest.mark.full),
        pytest.param(
            {"stage": 2, "data": 4}, piped("zero_bubble"), {"zero": 2}, marks=pytest.mark.full
        ),
        pytest.param(
            {"stage": 2, "data": 2}, piped("1f1b", remat_stages=False), {}, marks=pytest.mark.full
        ),
        pytest.param(
            {"stage": 2, "model": 2},
            piped("circular", repeats=2, remat_stages=False, remat="block"),
            {"layouts": SPLIT},
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_step_by_stages_has_the_numbers_of_one_device(one_device, mesh, how, more):
    assert_same(stepped(program_of(8), mesh, how, **more), one_device)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ({"stage": 2, "data": 2}, piped("1f1b", remat_stages=False)),
        ({"stage": 2}, piped("circular", repeats=2)),
        ({"stage": 3}, piped("zero_bubble")),
    ],
    ids=["1f1b", "circular", "zero_bubble"],
)
def test_blocks_in_a_loop_have_the_numbers_of_one_device(one_device, monkeypatch, mesh, how):
    """As those of an accelerator are, and of a CPU where a stage has many."""
    monkeypatch.setattr(running, "_FEW_BLOCKS", 1)
    assert_same(stepped(program_of(8), mesh, how), one_device)


@pytest.mark.full
def test_wide_blocks_beside_a_model_axis_have_the_numbers_of_one_device(monkeypatch):
    """A first version was off by 8e-3 here: its stages skipped what they had nothing to do for in
    conditionals, as they do where only rows are split.

    With that back (``runs_alone`` always true) the step hangs at a width of 256: a
    collective-permute of all four devices stands inside a branch that only the two of one stage
    take. The error of 8e-3 itself could not be reproduced; that a collective met the wrong
    partners in it is a guess.
    """
    monkeypatch.setattr(small_transformer, "WIDTH", 256)
    mesh = {"stage": 2, "model": 2}
    result = stepped(program_of(2), mesh, piped("gpipe", 2), SPLIT)
    assert_same(result, stepped(program_of(2), {"data": 1}))


def test_tied_embeddings_get_the_gradients_of_both_ends():
    def tied(mesh, how=None):
        program = program_of(4, tied_loss)
        return stepped(program, mesh, how)

    assert_same(tied({"stage": 2, "data": 2}, piped()), tied({"data": 1}))


def test_a_mask_that_each_block_makes_for_itself_is_one_for_all_of_them():
    """NumPy makes a constant of its own in every block; a random key is one, too."""
    key = jax.random.key(0)

    def loss(params, batch):
        x = batch
        for number in range(4):
            mask = np.tri(16, dtype="float32") * jax.random.uniform(key)
            scores = jax.nn.softmax(x @ x.mT * mask)
            x = x + scores @ jax.numpy.tanh(x @ params[f"block_{number}"])
        return (x**2).mean()

    draw = np.random.default_rng(0)
    params = {f"block_{n}": draw.normal(size=[8, 8]).astype("float32") for n in range(4)}
    batch = draw.normal(size=[8, 16, 8]).astype("float32")
    program = mw.jax_program(loss, params, optax.sgd(0.1), batch=batch)
    placement = mw.Placement.of(mesh_of({"stage": 2}), batch=None)
    explained = assemble(program, placement, piped()).explained
    assert [stage.blocks for stage in explained.stages] == [(0, 1), (2, 3)]


def test_each_stage_holds_its_own_weights_and_slots_alone():
    placement = mw.Placement.of(mesh_of({"stage": 4, "data": 2}), batch="data")
    trainer = mw.Trainer(program_of(8), placement, piped())
    state, _ = trainer.step(trainer.init(), trainer.put(batch_of()))
    for part in (state.params, state.slots):
        stacks = [value for path, value in part.items() if "blocks" in path]
        assert len(stacks) == 3
        for stack in stacks:
            on_device = {s.device.id: s.data.nbytes for s in stack.addressable_shards}
            assert set(on_device.values()) == {stack.nbytes // 4}
            blocks = {s.device.id // 2: s.index[0].start or 0 for s in stack.addressable_shards}
            assert blocks == {0: 0, 1: 2, 2: 4, 3: 6}


@pytest.mark.full
def test_a_checkpoint_of_four_stages_goes_on_as_any_other_number(tmp_path):
    """Ten blocks: 3, 3, 2 and 2, then two on two of eight stages, then five on each of two beside a
    model axis, then without stages."""

    def trainer(mesh, how=None, layouts=None, **more):
        batch = "data" if "data" in mesh else None
        placement = mw.Placement.of(mesh_of(mesh), layouts, batch=batch, **more)
        return mw.Trainer(program_of(10), placement, how or mw.StepOptions())

    def trained(one, steps):
        with mw.Checkpoints(tmp_path) as checkpoints:
            state, _ = one.train(one.init(), [batch_of()] * steps, checkpoints=checkpoints)
        return jax.tree.map(np.asarray, one.unpadded(state))

    trained(trainer({"stage": 4}, piped()), 1)
    trained(trainer({"stage": 8}, piped("gpipe", 8)), 2)
    trained(trainer({"stage": 2, "data": 2, "model": 2}, piped(), SPLIT), 3)
    result = trained(trainer({"data": 4}, zero=1), 4)
    plain = trainer({"data": 1})
    reference, _ = plain.train(plain.init(), [batch_of()] * 4)
    for part, values in zip(("params", "slots"), (reference.params, reference.slots), strict=True):
        for path, expected in values.items():
            np.testing.assert_allclose(getattr(result, part)[path], expected, atol=1e-5)


# Keras


def fitted(strategy, rows=ROWS, **more):
    with strategy.scope():
        model = keras_model(**more)
    batch = batch_of()
    history = strategy.fit(
        model,
        batch["x"],
        batch["y"],
        batch_size=rows,
        epochs=2,
        shuffle=False,
        verbose=0,
        sample_weight=np.linspace(0.5, 1.5, ROWS * TOKENS).reshape(ROWS, TOKENS),
    )
    return model, history.history


@pytest.mark.full
def test_an_unchanged_keras_transformer_trains_by_stages():
    plain, expected = fitted(mw.DataParallel(mesh_of({"data": 1}), batch="data"))
    mesh = mesh_of({"stage": 4, "data": 2})
    strategy = mw.Sharded(
        mesh, batch="data", unmatched="replicate", pipeline=mw.Pipeline("stage", 4)
    )
    model, actual = fitted(strategy)
    assert actual == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    batch = batch_of()
    measured = strategy.evaluate(model, batch["x"], batch["y"], verbose=0, return_dict=True)
    assert measured["loss"] < actual["loss"][-1]


@pytest.mark.full
def test_a_smaller_last_batch_counts_as_it_does_without_stages():
    def trained(mesh, how=None):
        placement = mw.Placement.of(mesh_of(mesh), batch="data")
        trainer = mw.Trainer(program_of(4), placement, how or mw.StepOptions())
        state, _ = trainer.train(trainer.init(), [batch_of(), batch_of(6)])
        return jax.tree.map(np.asarray, trainer.unpadded(state)).params

    nbytes = 2 * sum(array.nbytes for array in jax.tree.leaves(small_transformer.params_of(4)))
    message = (
        rf"a batch of 6 rows .* micro_batches=4 over 2 pieces of the batch: its step takes no "
        rf"stages. .* {bytes_text(nbytes)}\. If that is too much, leave the last rows of the data"
    )
    with pytest.warns(mw.MeshwrightWarning, match=message) as warned:
        result = trained({"stage": 2, "data": 2}, piped())
    assert len(warned) == 1
    expected = trained({"data": 2})
    for path, values in expected.items():
        np.testing.assert_allclose(result[path], values, atol=1e-6)


@pytest.mark.full
def test_dropout_draws_what_accumulated_micro_batches_draw():
    """Seeds count on from micro-batch to micro-batch, on whatever stage a block is."""
    one = mw.DataParallel(mesh_of({"data": 1}), batch="data", accumulate=4)
    plain, expected = fitted(one, rows=ROWS // 4, blocks=2, dropout=0.5)
    strategy = mw.Sharded(
        mesh_of({"stage": 2, "data": 2}),
        batch="data",
        unmatched="replicate",
        pipeline=mw.Pipeline("stage", 4),
    )
    model, actual = fitted(strategy, blocks=2, dropout=0.5)
    assert actual == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}
    for one, other in zip(model.variables, plain.variables, strict=True):  # seeds among them
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-5)


# What cannot be a pipeline


@pytest.mark.parametrize(
    ("program", "mesh", "how", "more", "message"),
    [
        (program_of(3), {"stage": 2}, piped("circular", repeats=2), {}, "3 equal blocks, fewer"),
        (program_of(), {"stage": 2}, piped(cuts=["block.3"]), {}, "mean 'blocks/3'"),
        (
            program_of(),
            {"stage": 2},
            piped(cuts=["lock"]),
            {},
            r"mean 'blocks'\? .* by whole parts of its path",
        ),
        (
            program_of(),
            {"stage": 3},
            piped(cuts=["head", "blocks.1"]),
            {},
            "must follow each other",
        ),
        (program_of(), {"stage": 4}, piped(cuts=["blocks.1"]), {}, "4 stages need 3 cuts"),
        (program_of(4), {"data": 4}, piped(), {}, "has no axis 'stage'"),
        (program_of(4), {"stage": 2, "data": 2}, piped(), {"zero": 3}, "zero=3 is not supported"),
        (
            program_of(4),
            {"stage": 2, "model": 2},
            piped("zero_bubble"),
            {"layouts": SPLIT},
            "not supported beside axis 'model'",
        ),
        (replace(program_of(4), example=None), {"stage": 2}, piped(), {}, "needs an example"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_runs(program, mesh, how, more, message):
    batch = "data" if "data" in mesh else None
    placement = mw.Placement.of(mesh_of(mesh), batch=batch, **more)
    with pytest.raises(mw.PipelineError, match=message):
        mw.Trainer(program, placement, how).init()


@pytest.mark.parametrize(
    ("how", "what"), [(mw.Pipeline("stage", 4), "stages"), (mw.Branches("stage"), "branches")]
)
def test_a_strategy_wants_the_axis_in_its_mesh(how, what):
    with pytest.raises(mw.PipelineError, match=f"has no axis 'stage' for the {what}"):
        mw.Sharded(mw.Mesh({"data": 4}), batch="data", pipeline=how)
    with pytest.raises(mw.ModelError, match="received 'stage'"):
        mw.Sharded(mw.Mesh({"data": 4}), batch="data", pipeline=how.axis)


@pytest.mark.parametrize("how", [mw.Pipeline("stage", 4), mw.Branches("stage")])
def test_a_loss_that_calls_python_is_refused_beside_other_axes(how):
    def loss(params, rows):
        shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        rows = jax.pure_callback(np.sin, shape, rows)
        return sum((rows @ weight).mean() for weight in params)

    rows = np.ones([8, 4], "float32")
    program = mw.jax_program(loss, [np.ones([4, 4], "float32")] * 2, optax.sgd(0.1), batch=rows)
    placement = mw.Placement.of(mesh_of({"stage": 2, "data": 2}), batch="data")
    with pytest.raises(mw.PipelineError, match=r"calls Python by jax.pure_callback.*axis 'data'"):
        mw.Trainer(program, placement, mw.StepOptions(pipeline=how)).init()


def by_block(kinds):
    """An optimizer for each block: Adam, a momentum alone, or none, as for frozen weights."""

    def labels(params):
        pairs = zip(params["blocks"], kinds, strict=True)
        blocks = [dict.fromkeys(of, kind) for of, kind in pairs]
        return {"embed": "none", "head": "adam", "blocks": blocks}

    ways = {"adam": optax.adam(0.1, eps=1e-3), "momentum": optax.trace(0.9)}
    return optax.multi_transform({**ways, "none": optax.set_to_zero()}, labels)


def test_blocks_without_slots_go_with_those_that_have_some_but_not_with_other_slots():
    def step(kinds, mesh, how=None):
        _, params, logs = stepped(program_of(4, optimizer=by_block(kinds)), mesh, how)
        return params, params, logs

    kinds = ["none", "adam", "none", "adam"]
    assert_same(step(kinds, {"stage": 2}, piped()), step(kinds, {"data": 1}))
    with pytest.raises(mw.PipelineError, match="blocks/2/qkv has 1 and blocks/3/qkv has 2"):
        step(["none", "none", "momentum", "adam"], {"stage": 2}, piped())


@pytest.mark.full
def test_statistics_of_batches_and_weights_of_all_blocks_do_not_go_with_zero():
    def cut(normed, shared):
        mesh = mesh_of({"stage": 2, "data": 2})
        pipeline = mw.Pipeline("stage", 4)
        strategy = mw.Sharded(mesh, batch="data", unmatched="replicate", zero=1, pipeline=pipeline)
        with strategy.scope():
            x = inputs = keras.Input([4])
            dense = keras.layers.Dense(4, activation="relu")
            for _ in range(4):
                x = (dense if shared else keras.layers.Dense(4, activation="relu"))(x)
                x = keras.layers.BatchNormalization()(x) if normed else x
            model = keras.Model(inputs, keras.layers.Dense(2)(x))
            model.compile("sgd", "mse")
        strategy.explain(model, (np.ones([16, 4], "float32"), np.ones([16, 2], "float32")))

    with pytest.raises(mw.PipelineError, match=r"(?s)moving_mean.*taken as equal.*zero=1 needs"):
        cut(normed=True, shared=False)
    with pytest.raises(mw.PipelineError, match=r"(?s)share parameters.*zero=1 needs"):
        cut(normed=False, shared=True)


def test_a_batch_that_does_not_divide_into_micro_batches_names_the_nearest():
    placement = mw.Placement.of(mesh_of({"stage": 2, "data": 2}), batch="data")
    trainer = mw.Trainer(program_of(4), placement, piped(micro_batches=4))
    with pytest.raises(mw.BatchError, match=r"a batch of 20 does not divide .* do: 16 and 24"):
        trainer.step(trainer.init(), trainer.put(batch_of(20)))
    mesh = mw.Mesh({"stage": 2, "data": 2})
    strategy = mw.Sharded(mesh, batch="data", unmatched="replicate", pipeline=piped().pipeline)
    for rows, nearest in ((20, "16 and 24"), (4, "8")):
        with pytest.raises(mw.BatchError, match=f"a batch of {rows} does not .* do: {nearest}"):
            mw.dry_run(
                program_of(4), batch_of(rows), strategy=strategy, target="cpu:4", compile=False
            )


def test_options_that_do_not_go_with_a_pipeline_are_listed():
    with pytest.raises(mw.ModelError) as caught:
        piped(accumulate=2, remat="selective", sums="float32")
    assert [name in str(caught.value) for name in ("accumulate=2", "remat=", "sums=")] == [True] * 3
    with pytest.raises(mw.ModelError, match=r"accumulate=2, remat='block' are .* branches, which"):
        mw.StepOptions(accumulate=2, remat="block", pipeline=mw.Branches("branch"))
    with pytest.raises(mw.ModelError, match="'block' is not supported with schedule='zero_bubble'"):
        piped("zero_bubble", remat="block")


# What else goes through the same assembly


@pytest.mark.full
def test_a_dry_run_a_measurement_and_the_check_take_the_pipeline():
    program, batch = program_of(4), batch_of()
    strategy = mw.Sharded(
        mesh_of({"stage": 2, "data": 2}),
        batch="data",
        unmatched="replicate",
        pipeline=mw.Pipeline("stage", 4),
    )
    report = mw.dry_run(program, batch, strategy=strategy, target="cpu:4")
    modelled = mw.dry_run(program, batch, strategy=strategy, target="cpu:4", compile=False)
    assert modelled.memory.argument_bytes == report.memory.argument_bytes
    assert permutes(modelled) == permutes(report)
    measured = mw.measure(program, batch, strategy=strategy, steps=2)
    assert report.beside(measured).row("parameters").ratio == 1.0
    sums = [c for c in report.collectives if c.kind == "all-reduce" and c.axes == ("data",)]
    assert max(sums, key=lambda c: c.bytes_per_device).count == 1  # blocks' gradients: once a step
    result = check(
        lambda: (program, batch),
        {"stage": 2, "data": 2},
        batch="data",
        unmatched="replicate",
        pipeline=mw.Pipeline("stage", 4),
        steps=2,
    )
    assert result.equal, result


@pytest.mark.full
def test_a_sequential_model_is_cut_as_it_is() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=[32, 8]).astype("float32"), draw.normal(size=[32, 4]).astype("float32")
    strategy = mw.Sharded(
        mesh_of({"stage": 2, "data": 2}), batch="data", pipeline=mw.Pipeline("stage", 4)
    )

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        blocks = [keras.layers.Dense(16, "tanh", name=f"block{i}") for i in range(4)]
        model = keras.Sequential(
            [keras.Input([8]), keras.layers.Dense(16), *blocks, keras.layers.Dense(4)]
        )
        model.compile("adam", "mse")
        return model

    with strategy.scope():
        model = build()
    alone = build()
    strategy.fit(model, x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    alone.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    for weight, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-6)
