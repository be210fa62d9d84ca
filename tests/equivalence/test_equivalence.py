"""Equivalence with one device: what is the same is told so, and what is not is found."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.equivalence import Beyond, check
from meshwright.equivalence.judging import Run, Tolerance, judge
from meshwright.testing import Case, assert_equivalent

draw = np.random.default_rng(3)
X = draw.normal(size=[32, 12]).astype("float32")
Y = draw.integers(0, 4, 32)
SHAPE = jax.ShapeDtypeStruct(X.shape, "float32")
MESHES = ["batch=8", "batch=4, model=2"]
SPLIT = {"hidden.*kernel": [None, "model"], "hidden.*bias": ["model"]}


def shards() -> int:
    """Into how many pieces the strategy in force cuts the batch."""
    strategy: Any = keras.distribution.distribution()
    return 1 if strategy is None else strategy.num_model_replicas


def dense(
    *more: keras.layers.Layer, activation: Any = "relu", optimizer: Any = "adam"
) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input([12], 32), layers.Dense(16, activation, name="hidden"), *more, layers.Dense(4)]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def linear(loss: Any = None) -> Any:
    def squares(params: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)

    params = {"w": X[:12, :8] * 0.3, "v": X[12:20, :1]}
    params = {path: np.asarray(value, float) for path, value in params.items()}
    program = mw.jax_program(loss or squares, params, optax.adam(0.01))
    return program, {"x": X, "y": X[:, :1]}


# What is the same


@pytest.mark.full
def test_a_keras_model_is_the_same_under_every_mesh() -> None:
    def build() -> Any:
        return dense(keras.layers.Dropout(0.2)), (X, Y)

    result = assert_equivalent(build, MESHES, SPLIT, steps=3)
    assert [mesh.mesh.axes_text for mesh in result.meshes] == ["batch=8", "batch=4, model=2"]
    assert len(result.losses) == 3
    kernel = result.meshes[1]["hidden/kernel"]
    assert kernel.gradient is not None
    assert 0 < kernel.gradient.relative < 1e-5
    assert kernel.first is None


@pytest.mark.full
@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 3, "accumulate": 4}], ids=str)
def test_a_program_is_the_same_under_every_mesh(options: dict[str, Any]) -> None:
    result = assert_equivalent(linear, MESHES, {"w": [None, "model"]}, **options)
    assert {v.role for v in result.meshes[0].variables} == {"parameter", "slot"}
    assert {v.path for v in result.meshes[0].variables if v.gradient} == {"w", "v"}


def test_float64_leaves_only_rounding_and_ends_with_the_check() -> None:
    result = assert_equivalent(linear, "batch=8", double=True)
    assert (result.tolerance.dtype, result.tolerance.rtol) == ("float64", 1e-12)
    gap = result.meshes[0]["w"].gradient
    assert gap is not None
    assert gap.relative < 1e-14
    assert jnp.ones([]).dtype == jnp.float32
    assert keras.config.floatx() == "float32"


@pytest.mark.full
def test_float64_reaches_into_keras_layers() -> None:
    def build() -> Any:
        return dense(keras.layers.BatchNormalization(), keras.layers.Activation("tanh")), (X, Y)

    result = assert_equivalent(build, MESHES, SPLIT, double=True)
    assert result.tolerance.dtype == "float64"
    assert max(mesh.loss.relative for mesh in result.meshes) < 1e-14


@pytest.mark.full
def test_a_bias_whose_exact_gradient_is_zero_does_not_raise_alarm() -> None:
    """Under Adam it moves by rounding alone: as far as any other parameter, and each time else."""

    def build() -> Any:
        return dense(keras.layers.BatchNormalization(), activation=None), (X, Y)

    result = assert_equivalent(build, MESHES, SPLIT)
    bias = result.meshes[0]["hidden/bias"]
    assert bias.is_noise
    assert bias.value.relative > 0.01
    assert "by rounding alone, on one device too: hidden/bias" in str(result)


@pytest.mark.full
def test_bfloat16_is_judged_by_its_own_spacing() -> None:
    def loss(params: Any, batch: Any) -> Any:
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (batch["x"], params))
        hidden = jnp.tanh(half[0] @ half[1]["w"]) @ half[1]["v"]
        return jnp.mean((hidden - batch["y"]).astype(jnp.float32) ** 2)

    result = assert_equivalent(lambda: linear(loss), "batch=8")
    assert (result.tolerance.dtype, result.tolerance.rtol) == ("bfloat16", 4 * 2**-7)


@pytest.mark.full
def test_several_batches_are_taken_in_turn() -> None:
    def build(batches: int) -> Case:
        program, batch = linear()
        return Case(program, [{k: v + i for k, v in batch.items()} for i in range(batches)])

    three = assert_equivalent(lambda: build(3), "batch=8", steps=4)
    one = assert_equivalent(lambda: build(1), "batch=8", steps=4)
    assert three.losses[0] == one.losses[0]
    assert three.losses[1] != one.losses[1]


# What is not the same


class PerShard(keras.layers.Layer):
    """Centres the rows of each replica by themselves, as batch statistics without a sum do."""

    def call(self, x: Any) -> Any:
        parts = keras.ops.reshape(x, [shards(), -1, x.shape[-1]])
        mean: Any = keras.ops.mean(parts, axis=1, keepdims=True)
        return keras.ops.reshape(parts - mean, [-1, x.shape[-1]])

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


@pytest.mark.full
def test_statistics_of_each_shard_alone_are_found() -> None:
    with pytest.raises(AssertionError, match="NOT equal to one device; first difference: loss in"):
        assert_equivalent(lambda: (dense(PerShard()), (X, Y)), "batch=4", steps=2)


class Unsummed(keras.Model):
    """Its own step, which forgets that the mean is over all replicas."""

    off = 1e-3

    def train_step(self, state: Any, data: Any) -> Any:
        params, other, slots, metrics = state
        differentiate: Any = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, aux), grads = differentiate(
            params, other, metrics, *data, None, training=True, optimizer_variables=slots
        )
        grads = [g * (1 + self.off * (shards() - 1)) for g in grads]
        params, slots = self.optimizer.stateless_apply(slots, grads, params)
        return {"loss": aux[0]}, (params, aux[2], slots, aux[3])


def of_one_layer(kind: type[keras.Model], optimizer: Any = None) -> Any:
    """A model of this class, and its batch."""
    source = keras.Input([12])
    model = kind(source, keras.layers.Dense(4, name="hidden")(source))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss)
    return model, (X, Y)


@pytest.mark.full
def test_a_wrong_gradient_of_a_models_own_step_is_found() -> None:
    build = functools.partial(of_one_layer, Unsummed)
    (under,) = check(build, "batch=4", steps=2).meshes
    assert under.first == Beyond(1, "gradient", "hidden/kernel")
    gap = under["hidden/kernel"].gradient
    assert gap is not None
    assert gap.relative == pytest.approx(3e-3, rel=0.01)
    assert "gradient, step 1" in str(check(build, "batch=4", steps=1))


def test_a_step_without_a_log_of_that_name_is_compared_by_its_variables() -> None:
    """As that of Keras' GANs, whose logs are ``d_loss`` and ``g_loss``."""

    class Renamed(Unsummed):
        def train_step(self, state: Any, data: Any) -> Any:
            logs, state = super().train_step(state, data)
            return {"d_loss": logs["loss"]}, state

    result = check(functools.partial(of_one_layer, Renamed), "batch=4", steps=1)
    assert result.losses == ()
    assert result.meshes[0].first == Beyond(1, "gradient", "hidden/kernel")
    assert "loss: not compared: the step has no log 'loss'" in str(result)


class Scaled(keras.optimizers.SGD):
    """Its steps depend on the number of replicas."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate * (1 + 1e-4 * (shards() - 1)))


def test_a_wrong_update_in_a_models_own_step_is_found_too() -> None:
    class Right(Unsummed):
        off = 0.0

    build = functools.partial(of_one_layer, Right, Scaled(0.1))
    for mesh in ("batch=4", "batch=4,model=2"):  # the second is guarded, and traced apart
        (under,) = check(build, mesh, steps=2).meshes
        assert under.first is not None
        assert under.first.quantity == "value"
        assert all(v.gradient.excess < 1 for v in under.variables if v.gradient)


def test_a_wrong_update_is_found_in_the_values() -> None:
    (under,) = check(lambda: (dense(optimizer=Scaled(0.01)), (X, Y)), "batch=4", steps=2).meshes
    assert under.first is not None
    assert (under.first.step, under.first.quantity) == (1, "value")
    assert all(v.gradient.excess < 1 for v in under.variables if v.gradient)


def test_other_initial_values_are_found() -> None:
    values = iter([1.0, 2.0])

    def build() -> Any:
        _, batch = linear()
        w = np.full([12, 8], next(values), "float32")
        return mw.jax_program(
            lambda p, b: jnp.mean((b["x"] @ p["w"]) ** 2), {"w": w}, optax.sgd(0.1)
        ), batch

    (under,) = check(build, "batch=8", steps=1).meshes
    assert under.first == Beyond(0, "initial value", "w")
    assert under["w"].value.absolute >= 1


@pytest.mark.full
def test_xlas_wrong_gradient_of_uneven_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows over four devices: what the strategy avoids, and what happens where it does not."""

    def build() -> Any:
        def loss(params: Any, batch: Any) -> Any:
            dims = ("NHWC", "HWIO", "NHWC")
            conv = functools.partial(
                jax.lax.conv_general_dilated, padding="SAME", dimension_numbers=dims
            )
            x = conv(batch["x"], params["first"], (2, 1))  # 12 rows become 6
            x = conv(jnp.tanh(x), params["second"], (1, 1), feature_group_count=4)
            return jnp.mean(x**2)

        filters = {
            "first": draw.normal(size=[3, 3, 2, 4]).astype("float32"),
            "second": draw.normal(size=[3, 3, 1, 4]).astype("float32"),
        }
        return mw.jax_program(loss, filters, optax.sgd(0.01)), {"x": images}

    images = draw.normal(size=[2, 12, 4, 2]).astype("float32")
    state = draw.bit_generator.state

    def again() -> Any:
        draw.bit_generator.state = state
        return build()

    options = {"inputs": {"x": [None, "rows", None, None]}, "batch": None}
    assert_equivalent(again, "rows=4", steps=1, **options)
    monkeypatch.setattr("meshwright.step.spatial.guard", lambda function, lying: function)
    with pytest.raises(AssertionError, match="first difference: gradient of second in step 1"):
        assert_equivalent(again, "rows=4", steps=1, **options)


# How it is judged, without any device


def _run(values: Any, gradient: Any = None, loss: float = 1.0) -> Run:
    values = np.asarray(values, "float32")
    start = np.zeros_like(values)
    return Run((("w", "parameter"),), ((start,), (values,)), (gradient,), (loss,))


def _judged(run: Run, one: Run, *again: Run) -> Any:
    mesh = mw.Mesh({"batch": 8})
    return judge(mesh, run, one, again or (one,), Tolerance(1e-5, "float32", 1.2e-7))


def test_a_value_is_judged_by_how_far_it_moved() -> None:
    one = _run([1.0, 1e-3])
    assert _judged(_run([1.0, 1e-3 + 9e-6]), one).equal
    assert not _judged(_run([1.0, 1e-3 + 2e-5]), one).equal


def test_what_rounding_does_on_one_device_is_allowed_element_by_element() -> None:
    one, noisy = _run([1.0, 1.0, 1.0]), _run([1.0, 1.01, 1.0])
    assert _judged(_run([1.0, 1.02, 1.0]), one, one, noisy).equal
    assert not _judged(_run([1.02, 1.0, 1.0]), one, one, noisy).equal
    assert not _judged(_run([1.0, 2.5, 1.0]), one, one, noisy).equal


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nothing_is_near_to_what_is_not_finite(value: float) -> None:
    under = _judged(_run([1.0, value]), _run([1.0, 1.0]))
    assert under.first == Beyond(1, "value", "w")
    assert under["w"].value.excess == np.inf


def test_whole_numbers_are_equal_or_not() -> None:
    def counted(count: int) -> Run:
        at = np.asarray(count, "int32")
        return Run((("iterations", "slot"),), ((at,),), (None,), (1.0,))

    assert _judged(counted(1_000_000), counted(1_000_000)).equal
    assert not _judged(counted(1_000_001), counted(1_000_000)).equal


# What cannot be checked


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (None, r"build\(\) returned NoneType None; build\(\) must return \(model, batch\)"),
        ((1, (X, Y)), "returned 1 for a model; it must be a compiled Keras model or a Program"),
        ((linear()[0], None), "returned no batch"),
        ((dense(), iter([(X, Y)])), "a batch that holds a list_iterator, not arrays"),
        ((linear()[0], {"x": SHAPE, "y": Y}), r"with float32 of shape \(32, 12\), without values"),
        ((dense(), (SHAPE, Y)), r"with float32 of shape \(32, 12\), without values"),
        ((keras.Sequential([keras.Input([2])]), (X, Y)), "is not compiled: call model.compile"),
    ],
    ids=[
        "nothing",
        "no model",
        "no batch",
        "a dataset",
        "shapes",
        "shapes for Keras",
        "not compiled",
    ],
)
def test_what_build_must_return_is_told(built: Any, message: str) -> None:
    with pytest.raises((mw.ModelError, mw.BatchError), match=message):
        check(lambda: built, "batch=8")


def test_axes_that_no_mesh_has_are_all_told() -> None:
    layouts = {"w": ["modl", None], "v": ["model", None]}
    with pytest.raises(
        mw.LayoutError, match=r"(?s)1 axis name is unknown to the mesh.*layout 'w' names .*'modl'"
    ):
        check(linear, MESHES, layouts)


@pytest.mark.full
def test_an_axis_that_one_mesh_lacks_is_noted() -> None:
    result = assert_equivalent(linear, MESHES, {"w": [None, "model"]}, steps=1)
    notes = [mesh.notes for mesh in result.meshes]
    assert notes == [
        ("the mesh has no axis 'model'; dims laid out on it are not split here",),
        (),
    ]


def test_an_axis_that_splits_nothing_is_noted() -> None:
    result = assert_equivalent(linear, "batch=4, model=2", steps=1)
    assert "lies along axis 'model' (size 2)" in result.meshes[0].notes[0]


def test_an_unknown_option_is_told_with_those_that_there_are() -> None:
    with pytest.raises(mw.LayoutError, match=r"take no option 'zer'; .*targets.*zero"):
        check(linear, "batch=8", zer=1)


def test_too_few_devices_are_told() -> None:
    with pytest.raises(mw.MeshError, match="needs 64 devices; 8 are available"):
        check(linear, {"batch": 64})


def test_a_fault_under_one_mesh_says_under_which() -> None:
    with pytest.raises(mw.BatchError) as caught:
        check(linear, ["batch=8", "batch=7"])
    assert caught.value.__notes__ == ["This happened under the mesh batch=7."]


def test_one_device_that_diverges_is_told() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.log(params["w"].sum() * 0)

    with pytest.raises(mw.ModelError, match="the loss of step 1 is -inf on one device already"):
        check(lambda: linear(loss), "batch=8")


def test_a_build_that_makes_another_model_each_time_is_told() -> None:
    sizes = iter([("a", "b"), ("a", "c")])

    def build() -> Any:
        program = mw.jax_program(
            lambda p, b: sum(jnp.sum(v) for v in p.values()),
            {name: np.ones(2, "float32") for name in next(sizes)},
            optax.sgd(0.1),
        )
        return program, {"x": X}

    with pytest.raises(mw.ModelError, match=r"missing \['b'\], added \['c'\]"):
        check(build, "batch=8")


def test_a_build_that_draws_another_batch_each_time_is_told() -> None:
    draw = np.random.default_rng(0)

    def build() -> Any:
        return linear()[0], {"x": draw.random([32, 12]), "y": X[:, :1]}

    with pytest.raises(mw.ModelError, match="returned another batch than for one device"):
        check(build, "batch=8", steps=1)
