"""Batches that do not divide: every number is that of one device on the true rows."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, losses, metrics, ops
from oracle import OneDevice, gradients, made, relative, weights

import meshwright as mw
from meshwright.frontends.keras.compiled import functions_of
from meshwright.frontends.keras.epochs import Epochs
from meshwright.frontends.keras.program import KerasVariables
from meshwright.frontends.keras.rowwise import RowWise
from meshwright.run.options import Data
from meshwright.step.padding import Padded

# One process: each oracle is computed once.
pytestmark = pytest.mark.xdist_group("batch_laws")

draw = np.random.default_rng(5)
ROWS = 29  # in batches of 16: the last one has 13, which 8 devices do not share
X = draw.normal(size=[ROWS, 12]).astype("float32")
Y = draw.integers(0, 4, ROWS)
W = draw.uniform(0.2, 2.0, ROWS).astype("float32")
IMAGES = draw.normal(size=[ROWS, 8, 8, 3]).astype("float32")
WORDS = draw.integers(0, 9, [ROWS, 5])  # 0 is masked
TAGS = draw.integers(0, 4, [ROWS, 5])


def logits_loss(reduction: str = "sum_over_batch_size") -> losses.Loss:
    return losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def mlp(*between: Callable[[], Any], **options: Any) -> Callable[[], keras.Model]:
    """A small net with layers in between, compiled as told."""

    def build() -> keras.Model:
        hidden = [make() for make in between]
        stack = [keras.Input([12]), layers.Dense(16, activation="relu"), *hidden]
        model = keras.Sequential([*stack, layers.Dense(4)])
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            **{"loss": logits_loss(), "metrics": ["accuracy"], **options},
        )
        return model

    return build


def convolutions() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input([8, 8, 3]),
            layers.Conv2D(4, 3, strides=2, padding="same", activation="gelu"),
            layers.GroupNormalization(2),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    model.compile("adam", logits_loss(), metrics=["accuracy"])
    return model


def masked_tagger() -> keras.Model:
    """Masks of padded words reach loss and metrics."""
    words = keras.Input([5], dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(words)
    x = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
    x = layers.LSTM(6, return_sequences=True)(x)
    model = keras.Model(words, layers.Dense(4)(x))
    model.compile("sgd", logits_loss(), weighted_metrics=["accuracy"])
    return model


def two_in_two_out() -> keras.Model:
    a, b = keras.Input([12], name="a"), keras.Input([3], name="b")
    x = layers.Dense(8, activation="tanh")(layers.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, {"c": layers.Dense(4)(x), "d": layers.Dense(1)(x)})
    model.compile(
        "sgd", {"c": logits_loss(), "d": "mse"}, {"c": 1.0, "d": 0.5}, weighted_metrics={"d": "mae"}
    )
    return model


class MeanOfAll(losses.Loss):
    """Reduces by itself, over rows that meet."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        per_row: Any = ops.logsumexp(y_pred, axis=-1)
        return ops.add(ops.std(per_row), ops.mean(per_row))


class AddsLoss(layers.Layer):
    """A loss over all rows together."""

    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(ops.square(x)))
        return x


class OwnStep(keras.Model):
    def train_step(self, state: Any, data: Any) -> Any:
        return super().train_step(state, data)


def own_step() -> keras.Model:
    x = keras.Input([12])
    model = OwnStep(x, layers.Dense(4)(x))
    model.compile("sgd", logits_loss(), metrics=["accuracy"])
    return model


@ops.custom_gradient
def _twice(x: Any) -> Any:
    return 2 * x, lambda upstream: 2 * upstream


@dataclass(frozen=True)
class Case:
    build: Callable[[], keras.Model]
    x: Any = field(default_factory=lambda: X)
    y: Any = field(default_factory=lambda: Y)
    options: dict[str, Any] = field(default_factory=dict)  # of fit; weights also of evaluate
    mixes: str | None = None  # why batches are not padded in training
    batch_size: int = 16


CASES = {
    "dense": Case(mlp(weighted_metrics=["accuracy"]), options={"sample_weight": W}),
    "dropout": Case(mlp(lambda: layers.Dropout(0.3, seed=2))),
    "BatchNormalization": Case(mlp(layers.BatchNormalization), mixes="reduce_sum over dim 0"),
    "masks": Case(masked_tagger, WORDS, TAGS),
    "several inputs and outputs": Case(
        two_in_two_out, {"a": X, "b": X[:, :3]}, {"c": Y, "d": X[:, :1]}
    ),
    "a loss that reduces by itself": Case(mlp(loss=MeanOfAll(), metrics=[])),
    "an added loss": Case(mlp(AddsLoss), mixes="reduce_sum over dim 0"),
    "a batch size that never divides": Case(mlp(), batch_size=12),
}
MORE = {
    "convolutions": Case(convolutions, IMAGES),
    "class_weight": Case(mlp(), options={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5, 3: 3.0}}),
    "weight decay": Case(mlp(lambda: layers.Dense(5, kernel_regularizer="l2"))),
    "activity regularization": Case(
        mlp(lambda: layers.Dense(5, activity_regularizer="l2")), mixes="reduce_sum over dim 0"
    ),
    "noise": Case(mlp(lambda: layers.GaussianNoise(0.1, seed=3), layers.LayerNormalization)),
    "own train_step": Case(own_step, mixes="its own train_step"),
    "metrics of other kinds": Case(
        mlp(
            metrics=[
                metrics.SparseTopKCategoricalAccuracy(2),
                metrics.SparseCategoricalCrossentropy(from_logits=True),
            ]
        )
    ),
    **{
        f"reduction {reduction}": Case(
            mlp(loss=logits_loss(reduction)), options={"sample_weight": W}
        )
        for reduction in ("sum", "mean", "mean_with_sample_weight")
    },
    "mixed precision": Case(mlp(lambda: layers.Dense(8, dtype="mixed_bfloat16"))),
}
MESHES = {"batch=8": {"batch": 8}, "batch=4,model=2": {"batch": 4, "model": 2}}


def strategy(mesh: str = "batch=8") -> mw.Sharded:
    rules = {r"\bdense/kernel": [None, "model"]} if "model" in mesh else {}
    return mw.Sharded(mw.create_mesh(MESHES[mesh]), rules)


def run(strategy: Any, case: Case) -> tuple[Any, ...]:
    """Curve, weights, evaluation and outputs."""
    model = made(strategy, case.build)
    sized: dict[str, Any] = {"batch_size": case.batch_size, "verbose": 0}
    history = strategy.fit(
        model, case.x, case.y, epochs=2, shuffle=False, **sized, **case.options
    ).history
    weighted = {k: v for k, v in case.options.items() if k == "sample_weight"}
    measured = strategy.evaluate(model, case.x, case.y, return_dict=True, **sized, **weighted)
    outputs = strategy.predict(model, case.x, **sized)
    return history, measured, outputs, weights(model)


@functools.cache
def one_device(name: str) -> tuple[Any, ...]:
    return run(OneDevice(), (CASES | MORE)[name])


def agree(actual: tuple[Any, ...], expected: tuple[Any, ...], coarse: bool = False) -> None:
    """Raise unless all numbers agree; ``coarse`` is for activations of eight bits."""
    rtol, atol = (2e-2, 2e-3) if coarse else (2e-5, 2e-6)
    for ours, theirs in zip(actual, expected, strict=True):
        assert keras.tree.flatten(ours), "nothing to compare"
        if isinstance(theirs, dict):
            assert ours.keys() == theirs.keys()
        for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
            assert np.shape(a) == np.shape(b)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def warning(case: Case) -> contextlib.AbstractContextManager[Any]:
    if case.batch_size % 8 == 0:
        return contextlib.nullcontext()
    return pytest.warns(mw.MeshwrightWarning, match="batch of 12 .*8 and 16.*padded to 16 rows")


QUICK = ("dense", "BatchNormalization", "an added loss")


@pytest.mark.full_for("BatchNormalization", "an added loss", "dense")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in CASES]
)
def test_the_numbers_are_those_of_one_device_on_the_true_rows(name: str) -> None:
    with warning(CASES[name]):
        actual = run(strategy(), CASES[name])
    agree(actual, one_device(name))


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_so_they_are_for_more_models(name: str) -> None:
    agree(run(strategy(), MORE[name]), one_device(name), coarse=name == "mixed precision")


# What is padded, weighed and masked does not depend on the mesh; how its rows are shared out does.
WITH_A_SECOND_AXIS = ("dense", "BatchNormalization", "masks", "a loss that reduces by itself")


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_A_SECOND_AXIS)
def test_so_they_are_with_a_second_axis(name: str) -> None:
    agree(run(strategy("batch=4,model=2"), CASES[name]), one_device(name))


@pytest.mark.full_for("masks")
@pytest.mark.parametrize("name", CASES | MORE)
def test_a_batch_is_padded_exactly_where_rows_leave_each_other_alone(name: str) -> None:
    """In training; in evaluation BatchNormalization does, and prediction always here."""
    case = (CASES | MORE)[name]
    row_wise = _row_wise(case)
    batch = (case.x, case.y)
    why = row_wise.why_not("train", batch, 13, 16)
    assert why is None if case.mixes is None else case.mixes in str(why)
    assert row_wise.why_not("predict", (case.x,), 13, 16) is None
    if name == "BatchNormalization":
        assert row_wise.why_not("test", batch, 13, 16) is None


def _row_wise(case: Case) -> RowWise:
    sharded = strategy()
    model = made(sharded, case.build)
    return RowWise(model, sharded.prepare(model, lambda: (case.x, case.y)))


MIXING: dict[str, Callable[[Any], Any]] = {
    "a mean over rows": lambda x: x - ops.mean(x, axis=0),
    "the number of rows": lambda x: x / x.shape[0],
    "rows in another order": lambda x: ops.flip(x, axis=0),
    "the row before": lambda x: x + ops.roll(x, 1, axis=0),
    "similarities of rows": lambda x: ops.matmul(x, ops.transpose(x)) @ x,
    "rows merged into features": lambda x: ops.reshape(
        ops.transpose(ops.reshape(ops.transpose(x), (-1, 2))), (-1, 16)
    ),
    "a cumulative sum": lambda x: ops.cumsum(x, axis=0),
    "sorted rows": lambda x: ops.sort(x, axis=0),
    "the first row for all": lambda x: x + x[:1],
    "a gradient of one's own": _twice,
    "another form for more rows": lambda x: x * 2 if x.shape[0] > 14 else x,
}


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
def test_what_mixes_rows_is_found(mix: Callable[[Any], Any]) -> None:
    row_wise = _row_wise(Case(mlp(lambda: layers.Lambda(mix, output_shape=(16,)))))
    assert row_wise.why_not("train", (X, Y), 13, 16) is not None


@pytest.mark.full
def test_padding_a_model_whose_rows_mix_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws above can fail."""
    expected = one_device("BatchNormalization")
    monkeypatch.setattr(RowWise, "why_not", lambda *_: None)
    actual = run(strategy(), CASES["BatchNormalization"])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        agree(actual, expected)


def test_a_padded_batch_is_shared_out_and_gives_the_gradients_of_the_true_rows() -> None:
    sharded = strategy()
    model = made(sharded, CASES["dense"].build)
    one = made(OneDevice(), CASES["dense"].build)
    variables = sharded.prepare(model, lambda: (X, Y))
    data = Epochs(sharded.placement, model, Data(X[:13], Y[:13], batch_size=16))
    data.pad_where(functions_of(sharded, model, variables).row_wise)
    [(number, batch)] = data.batches()
    assert number == 0
    assert isinstance(batch, Padded)
    assert batch.rows == 13
    assert {shard.data.shape for shard in batch.arrays[0].addressable_shards} == {(2, 12)}
    assert batch.arrays[1].shape == (13,)

    import jax

    program, state = sharded.program(model), sharded.state(model)

    def of_params(params: Any, batch: Any) -> Any:
        with sharded.in_force(model):
            return program.loss(params, state, batch, True)[0]

    ours = jax.jit(jax.grad(of_params))(state.params, batch)
    theirs = gradients(OneDevice(), one, (X[:13], Y[:13]))
    by_order = zip(KerasVariables.of(model).params, theirs.values(), strict=True)
    for path, expected in by_order:
        assert relative(ours[path], expected) < 1e-6, path


def test_predicting_a_smaller_last_batch_compiles_nothing_new() -> None:
    sharded = strategy()
    model = made(sharded, CASES["dense"].build)
    outputs = sharded.predict(model, X, batch_size=16, verbose=0)
    assert outputs.shape == (ROWS, 4)
    step = functions_of(sharded, model, KerasVariables.of(model)).predict
    assert step._cache_size() == 1


@pytest.mark.full
def test_batches_of_a_generator_may_have_any_number_of_rows() -> None:
    """In the middle of an epoch too."""
    edges = np.cumsum([0, 5, 16, 3, 5])

    def batches() -> Iterator[Any]:
        for begin, end in itertools.pairwise(edges):
            yield X[begin:end], Y[begin:end]

    results = []
    options: dict[str, Any] = {"steps_per_epoch": 4, "verbose": 0, "shuffle": False}
    for side in (strategy(), OneDevice()):
        model = made(side, CASES["dense"].build)
        if isinstance(side, OneDevice):
            side.fit(model, batches(), **options)
        else:
            with pytest.warns(mw.MeshwrightWarning, match=r"batch of 5 .*padded to 8 rows"):
                side.fit(model, batches(), **options)
        results.append(weights(model))
    agree((results[0],), (results[1],))
