"""What a strategy refuses: at once, all of it, in the user's words, with nothing allocated."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import meshwright as mw

MESH = {"batch": 4, "model": 2}
X, Y = np.zeros([16, 12], "float32"), np.zeros([16], "int32")
SYMBOLIC = keras.Input([12])


def bytes_on_devices() -> int:
    """What live arrays hold on all devices together; reading their shards would add to it."""
    gc.collect()
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.live_arrays()
        for _ in array.sharding.device_set
    )


def sequential() -> keras.Model:
    return keras.Sequential(
        [keras.Input([12]), layers.Dense(15, name="wide"), layers.Dense(7, name="narrow")]
    )


def functional() -> keras.Model:
    x = keras.Input([12])
    return keras.Model(x, layers.Dense(7, name="narrow")(layers.Dense(15, name="wide")(x)))


class Sub(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.wide = layers.Dense(15)
        self.narrow = layers.Dense(7)

    def call(self, x: Any) -> Any:
        return self.narrow(self.wide(x))


def not_yet_built() -> keras.Model:
    return keras.Sequential([layers.Dense(15, name="wide"), layers.Dense(7, name="narrow")])


BUILDERS = {"Sequential": sequential, "Functional": functional}
LATE = {"subclassed": Sub, "Sequential without Input": not_yet_built}


def strategy(layouts: Any = None, **options: Any) -> mw.Sharded:
    return mw.Sharded(mw.create_mesh(MESH), layouts, **options)


INDIVISIBLE = {"wide/kernel": [None, "model"], "wide/bias": ["model"], "narrow/kernel": ["model"]}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_every_variable_that_cannot_lie_so_is_listed_and_nothing_allocated(
    build: Callable[[], keras.Model],
) -> None:
    before = bytes_on_devices()
    with pytest.raises(mw.PlacementError) as caught, strategy(INDIVISIBLE).scope():
        build()
    _lists_all_three(str(caught.value))
    del caught
    assert bytes_on_devices() == before


@pytest.mark.parametrize("build", LATE.values(), ids=LATE)
def test_models_built_by_their_first_batch_are_checked_then(
    build: Callable[[], keras.Model],
) -> None:
    sharded = strategy(INDIVISIBLE)
    with sharded.scope():
        model = build()
        model.compile("adam", "mse")
    before = bytes_on_devices()
    with pytest.raises(mw.PlacementError) as caught:
        sharded.fit(model, X, np.zeros([16, 7], "float32"), batch_size=16, verbose=0)
    _lists_all_three(str(caught.value))
    del caught
    assert bytes_on_devices() == before


def _lists_all_three(message: str) -> None:
    """Path, shape, layout and rule of each, and what to do."""
    assert "3 variable(s)" in message
    lines = message.splitlines()
    for path, shape, axes in [
        ("wide/kernel", "(12, 15)", "[unsharded, model]"),
        ("wide/bias", "(15,)", "[model]"),
        ("narrow/kernel", "(15, 7)", "[model]"),
    ]:
        line = next(line for line in lines if line.strip().startswith(path))
        for part in (shape, axes, f"layout '{path}'"):
            assert part in line, (part, line)
    assert "dim 1 of the variable (size 15) does not divide over axis 'model' (size 2)" in message
    assert "has 1: write one entry per dim" in message


def test_a_layout_of_the_wrong_rank_names_both_ranks() -> None:
    with pytest.raises(mw.PlacementError, match=r"narrow/kernel \(15, 7\).*2 dims.* has 1"):
        strategy({"narrow/kernel": ["model"]}).place(sequential())


def test_an_axis_that_the_mesh_lacks_is_refused_at_once() -> None:
    with pytest.raises(mw.LayoutError, match=r"layout '.*kernel'.*'models'.*'batch'.*'model'"):
        strategy({".*kernel": [None, "models"]})
    with pytest.raises(mw.LayoutError, match=r"batch='data'.*no axis 'data'.*batch='batch'"):
        strategy(batch="data")
    with pytest.raises(mw.LayoutError, match=r"activation 'wide'"):
        strategy(activations={"wide": ["nowhere", None]})


@pytest.fixture(scope="module")
def trained() -> tuple[mw.Sharded, keras.Model]:
    sharded = mw.DataParallel(mw.create_mesh({"batch": 8}))
    with sharded.scope():
        model = keras.Sequential([keras.Input([12]), layers.Dense(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return sharded, model


@pytest.mark.full_for("fit")
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_batch_size_that_does_not_divide_is_warned_of_with_axis_and_nearest_sizes(
    trained: tuple[mw.Sharded, keras.Model], call: str
) -> None:
    sharded, model = trained
    data = (X,) if call == "predict" else (X, Y)
    says = r"batch of 12 .*'batch' \(size 8\).*8 and 16.*padded to 16"
    with pytest.warns(mw.MeshwrightWarning, match=says) as warnings:
        getattr(sharded, call)(model, *data, batch_size=12, verbose=0)
    assert len(warnings) == 1
    with pytest.warns(mw.MeshwrightWarning, match=r"batch of 5 .*: 8\. .*padded to 8"):
        getattr(sharded, call)(model, *data, batch_size=5, verbose=0)


def test_a_batch_size_that_does_not_divide_costs_more_where_rows_mix() -> None:
    sharded = mw.DataParallel(mw.create_mesh({"batch": 8}))
    with sharded.scope():
        model = keras.Sequential([keras.Input([12]), layers.BatchNormalization(), layers.Dense(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    says = r"batch of 6 .*: 8\..*Every device computes all rows.*\(reduce_sum over dim 0\)"
    with pytest.warns(mw.MeshwrightWarning, match=says):
        sharded.fit(model, X, Y, batch_size=6, verbose=0)


def test_a_batch_that_does_not_divide_is_refused_by_put(
    trained: tuple[mw.Sharded, keras.Model],
) -> None:
    with pytest.raises(mw.BatchError, match=r"batch of 9 .*8 and 16"):
        trained[0].put((X[:9], Y[:9]))


def test_a_source_that_fails_leaves_the_weights_of_what_came_before(
    trained: tuple[mw.Sharded, keras.Model],
) -> None:
    sharded, model = trained

    def batches() -> Any:
        for _ in range(3):
            yield X[:8], Y[:8]
        raise OSError("the disk is gone")

    before = int(model.optimizer.iterations)
    with pytest.raises(OSError, match="the disk is gone"):
        sharded.fit(model, batches(), steps_per_epoch=5, verbose=0, shuffle=False)
    assert int(model.optimizer.iterations) == before + 3
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_misspelt_argument_is_an_error(
    trained: tuple[mw.Sharded, keras.Model], call: str
) -> None:
    sharded, model = trained
    data = (X,) if call == "predict" else (X, Y)
    with pytest.raises(TypeError, match="batchsize"):
        getattr(sharded, call)(model, *data, batchsize=8)


def test_a_misspelt_argument_of_the_strategy_is_an_error() -> None:
    with pytest.raises(TypeError, match="layout"):
        mw.Sharded(mw.create_mesh(MESH), layout={})  # pyright: ignore[reportCallIssue]


def test_a_mesh_without_devices_says_how_to_get_them() -> None:
    abstract = mw.Sharded(mw.Mesh(MESH))
    with pytest.raises(mw.TopologyError, match=r"abstract.*on\(mw\.create_mesh"), abstract.scope():
        pass
    with pytest.raises(mw.TopologyError, match=r"abstract.*on\(mw\.create_mesh"):
        abstract.place(sequential())


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_a_model_that_is_not_compiled_is_an_error(call: str) -> None:
    with pytest.raises(mw.ModelError, match=r"not compiled.*model\.compile"):
        getattr(strategy(), call)(sequential(), X, Y)


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_a_step_that_is_written_for_tensorflow_is_an_error(call: str) -> None:
    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return {"loss": 0.0}

    model = Own([keras.Input([12]), layers.Dense(4)])
    model.compile("sgd", "mse")
    with pytest.raises(
        mw.ModelError, match=r"train_step of .* takes \(data.*must take \(state, data"
    ):
        getattr(strategy(), call)(model, X, Y)


def test_a_model_that_is_not_built_cannot_be_placed() -> None:
    with pytest.raises(mw.ModelError, match="not built"):
        strategy().place(not_yet_built())


def test_a_model_that_is_not_built_is_neither_saved_nor_restored(tmp_path: Path) -> None:
    """Neither call takes a batch, so neither asks for one."""
    for call in (strategy().save, strategy().restore):
        with pytest.raises(mw.ModelError, match=r"is not built.*Call it on one batch"):
            call(not_yet_built(), tmp_path)


def test_a_model_without_shapes_needs_a_batch_for_its_step() -> None:
    model = not_yet_built()
    model.compile("sgd", "mse")
    with pytest.raises(mw.ModelError, match="pass a batch"):
        strategy().train_step(model)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_keras_own_loops_refuse_inputs_laid_out_one_by_one(call: str) -> None:
    """And leave the weights where they are."""
    sharded = strategy(inputs=["batch", "model"])
    with sharded.scope():
        model = keras.Sequential([keras.Input([12]), layers.Dense(4)])
        model.compile("sgd", "sparse_categorical_crossentropy")
    before = model.get_weights()
    data = (X,) if call == "predict" else (X, Y)
    with sharded.scope(), pytest.raises(mw.LayoutError, match=rf"strategy\.{call}"):
        getattr(model, call)(*data, batch_size=16, verbose=0)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_an_input_of_the_wrong_size_is_named() -> None:
    sharded = strategy(inputs={"picture": ["batch", "model", None]})
    with pytest.raises(mw.BatchError, match=r"'picture'.*7|7.*'model'"):
        sharded.put(({"picture": np.zeros([8, 7, 3], "float32")},))


def test_layouts_of_inputs_and_targets_that_do_not_fit_are_an_error() -> None:
    cut = strategy(inputs=["batch", "model", None])
    with pytest.raises(mw.BatchError, match=r"input 'wide_in' has 2 dims \(16, 12\), .* has 3"):
        cut.fit(named(), X, Y, batch_size=16, verbose=0)
    misspelt = strategy(inputs={"wide": ["batch", "model"]}, targets={"out": ["batch", None]})
    with pytest.raises(mw.LayoutError, match=r"lays out 'wide', .* 1 input: 'wide_in'"):
        misspelt.predict(named(), X, verbose=0)
    with pytest.raises(mw.LayoutError, match=r"lays out 'out', .* 1 target: 'narrow'"):
        mw.Sharded(mw.create_mesh({"batch": 8}), targets={"out": ["batch"]}).fit(
            named(), X, Y, batch_size=16, verbose=0
        )


def named() -> keras.Model:
    x = keras.Input([12], name="wide_in")
    model = keras.Model(x, layers.Dense(7, name="narrow")(x))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def test_no_data_is_an_error(trained: tuple[mw.Sharded, keras.Model]) -> None:
    sharded, model = trained
    with pytest.raises(ValueError, match="at least one batch"):
        sharded.fit(model, (batch for batch in ()), shuffle=False, verbose=0)


def test_an_activation_that_does_not_divide_names_its_layer() -> None:
    sharded = strategy(activations={"wide": ["batch", "model"]})
    with sharded.scope():
        model = sequential()
    with pytest.raises(mw.LayoutError, match=r"output of layer '.*wide' \(size 15\)"):
        sharded.predict(model, X, batch_size=16, verbose=0)


OPTIONS = {  # of fit, with what they are told to be
    "epochs": (2.5, "x", None, -1),
    "initial_epoch": (None, -1),
    "batch_size": (0, 2.5, "x"),
    "steps_per_epoch": (2.5, "x"),
    "validation_split": ("x", 1.5, None),
    "validation_freq": (None, 0, "x", [0]),
    "validation_batch_size": (2.5,),
    "validation_steps": ("x",),
    "callbacks": (5, "x", [5]),
    "class_weight": (-1, [1.0]),
    "shuffle": (None, [1]),
    "verbose": ("loud", 3, None),
    "save_every": ("x", 0, 1.5),
    "keep": ("x", 0, 1.5),
    "resume": ("x", 2),
    "nan_guard": (None, "x"),
}
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a mesh that is none": (lambda: mw.Sharded(5), mw.MeshError, r"expected a mesh.*received 5"),  # type: ignore[arg-type]
    "axes for a mesh": (lambda: mw.DataParallel({"batch": 8}), mw.MeshError, "expected a mesh"),  # type: ignore[arg-type]
    "devices that are a number": (
        lambda: mw.create_mesh({"batch": 8}, devices=8),  # type: ignore[arg-type]
        mw.MeshError,
        r"devices=8: expected a list",
    ),
    "devices that are None": (
        lambda: mw.create_mesh({"batch": 1}, devices=[None]),
        mw.MeshError,
        "expected a JAX device or its name, such as 'cpu:3'; received None",
    ),
    "rules that are a number": (lambda: strategy(5), mw.LayoutError, "expected layouts as a dict"),
    "rules that are a text": (lambda: strategy("kernel"), mw.LayoutError, "as a dict"),
    "one rule without its dict": (lambda: strategy(["h", "model"]), mw.LayoutError, "as a dict"),
    "rules None in a map": (lambda: mw.LayoutMap(layouts=None), mw.LayoutError, "received None"),
    "a layout that is a number": (lambda: strategy({"h": 5}), mw.LayoutError, "'h'.*5"),
    "activations that are a number": (
        lambda: strategy(activations=5),
        mw.LayoutError,
        "as a dict",
    ),
    "a path that is none": (lambda: mw.LayoutMap().find(5), mw.LayoutError, "expected a path"),  # type: ignore[arg-type]
    "no model first": (lambda: strategy().fit(X, Y), mw.ModelError, r"The model comes first"),
    "a model that is None": (lambda: strategy().place(None), mw.ModelError, "received None"),  # type: ignore[arg-type]
    "a model to explain": (lambda: strategy().explain("m"), mw.ModelError, "received 'm'"),  # type: ignore[arg-type]
    "a model to predict": (lambda: strategy().predict(5, X), mw.ModelError, "received 5"),
    "a state that is none": (
        lambda: whole().load_state(with_state(), {}),  # type: ignore[arg-type]
        mw.ModelError,
        r"expected the mw\.TrainState",
    ),
    "a state of another model": (
        lambda: whole().load_state(with_state(), mw.TrainState({}, {}, {}, {})),
        mw.ModelError,
        "lacks 6 variable.*params narrow/kernel",
    ),
    "x that is None": (lambda: strategy().fit(compiled(), None, Y), mw.DataError, "x=None"),
    "x that is empty": (lambda: strategy().evaluate(compiled(), [], Y), mw.DataError, r"x=\[\]"),
    "y that is missing": (lambda: strategy().fit(compiled(), X), mw.DataError, "y is None"),
    "validation data that are none": (
        lambda: strategy().fit(compiled(), X, Y, validation_data=-1),
        mw.DataError,
        "validation_data=-1",
    ),
    "an empty batch": (lambda: strategy().put(()), mw.BatchError, "the batch is empty"),
    "texts in a batch": (
        lambda: strategy().put((np.array(["a"] * 4),)),
        mw.BatchError,
        "dtype <U1.*expected numbers",
    ),
    "texts as x": (
        lambda: strategy().fit(compiled(), np.array(["a"] * 4), Y),
        mw.DataError,
        "x has dtype <U1.*expected numbers",
    ),
    "a symbolic x": (
        lambda: strategy().fit(compiled(), SYMBOLIC, Y),
        mw.DataError,
        r"x is a symbolic tensor of shape \(None, 12\), which has no values",
    ),
    "a symbolic x in a dict": (
        lambda: strategy().evaluate(compiled(), {"x": SYMBOLIC}, Y),
        mw.DataError,
        "x is a symbolic tensor",
    ),
    "shapes as x": (
        lambda: strategy().predict(compiled(), jax.ShapeDtypeStruct((4, 12), "float32")),
        mw.DataError,
        r"x is a symbolic tensor of shape \(4, 12\)",
    ),
    "a symbolic y": (lambda: strategy().fit(compiled(), X, SYMBOLIC), mw.DataError, "y is a symb"),
    "symbolic weights": (
        lambda: strategy().fit(compiled(), X, Y, sample_weight=SYMBOLIC),
        mw.DataError,
        "sample_weight is a symbolic",
    ),
    "symbolic targets of validation": (
        lambda: strategy().fit(compiled(), X, Y, validation_data=(X, SYMBOLIC)),
        mw.DataError,
        r"validation_data\[1\] is a symbolic",
    ),
    "a symbolic batch": (
        lambda: strategy().put((SYMBOLIC, Y)),
        mw.BatchError,
        "an array of the batch is a symbolic tensor",
    ),
    "a symbolic batch of one step": (
        lambda: in_scope("train_on_batch", SYMBOLIC, Y),
        mw.BatchError,
        "an array of the batch is a symbolic tensor",
    ),
    "a dry run of no size": (
        lambda: mw.dry_run(compiled(), (SYMBOLIC, SYMBOLIC), strategy=whole(), target="cpu:8"),
        mw.BatchError,
        r"has shape \(None, 12\): expected the size of every dim",
    ),
    "a plan of no size": (
        lambda: mw.plan(compiled(), (SYMBOLIC, SYMBOLIC), target="h100:8"),
        mw.BatchError,
        r"has shape \(None, 12\): expected the size of every dim",
    ),
    "a batch without targets": (
        lambda: mw.dry_run(compiled(), (X,), strategy=whole(), target="cpu:8"),
        mw.BatchError,
        r"must be \(x, y\).*received tuple of length 1",
    ),
    "a directory that is none": (lambda: mw.Checkpoints(5), mw.CheckpointError, "received 5"),  # type: ignore[arg-type]
    "a checkpoint that is none": (
        lambda: mw.read_checkpoint(None),  # type: ignore[arg-type]
        mw.CheckpointError,
        "received None",
    ),
}


def compiled() -> keras.Model:
    model = keras.Sequential([keras.Input([12]), layers.Dense(4, name="narrow")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    return model


def with_state() -> keras.Model:
    model = compiled()
    whole().state(model, (X, Y))
    return model


def in_scope(call: str, *data: Any) -> None:
    with whole().scope():
        getattr(compiled(), call)(*data)


def whole() -> mw.Sharded:
    return mw.DataParallel(mw.create_mesh({"batch": 8}))


@pytest.mark.parametrize("case", WRONG)
def test_what_has_the_wrong_type_is_an_error_of_ours(case: str) -> None:
    call, error, says = WRONG[case]
    with pytest.raises(error, match=says):
        call()


def test_every_option_of_fit_is_looked_at_first(tmp_path: Path) -> None:
    """With what it was and what it should be; and before any step is taken."""
    model = compiled()
    for name, values in OPTIONS.items():
        for value in values:
            options = {"checkpoint": tmp_path, name: value, "validation_data": (X, Y)}
            with pytest.raises(mw.MeshwrightError, match=rf"{name}.*{re.escape(repr(value))}"):
                strategy().fit(model, X, Y, **options)
    with pytest.raises(mw.ModelError, match=r"(?s)batch_size=0: .*epochs=None: "):
        strategy().fit(model, X, Y, batch_size=0, epochs=None)
    assert int(model.optimizer.iterations) == 0
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_built_has_nothing_to_explain():
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    with pytest.raises(mw.ModelError, match="'empty' has no variables to explain: build it first"):
        strategy.explain(keras.Sequential([keras.layers.Dense(2)], name="empty"))
