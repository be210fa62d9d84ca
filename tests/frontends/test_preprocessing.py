"""Models that make numbers of raw data in their own ``fit``, as Keras Hub's tasks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw

TEXTS = np.array(["a", "bb", "ccc", "dddd", "eeeee"] * 4)
Y = np.char.str_len(TEXTS)[:, None] / 5.0
HOW: Any = {"batch_size": 8, "verbose": 0}


class _Read(keras.utils.PyDataset):
    """Batches of rows that a task has preprocessed."""

    def __init__(self, task: Any, size: int, *arrays: Any) -> None:
        super().__init__()
        self._task, self._size, self._arrays = task, size, arrays

    def __len__(self) -> int:
        return -(-len(self._arrays[0]) // self._size)

    def __getitem__(self, index: int) -> Any:
        rows = slice(self._size * index, self._size * (index + 1))
        return self._task.preprocess_samples(*(a if a is None else a[rows] for a in self._arrays))


class Task(keras.Sequential):
    """What ``keras_hub.models.Task`` does: text and images never reach Keras' own methods."""

    preprocessor: Any = staticmethod(lambda texts: np.char.str_len(texts)[:, None] / 10.0)

    def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        return keras.utils.pack_x_y_sample_weight(self.preprocessor(x), y, sample_weight)

    def fit(
        self, x: Any = None, y: Any = None, batch_size: Any = None, validation_data: Any = None,
        validation_split: Any = None, sample_weight: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        kept = int(len(x) * (1 - (validation_split or 0)))
        if validation_split:
            validation_data = x[kept:], y[kept:]
        held_out = _Read(self, batch_size, *validation_data) if validation_data else None
        data = _Read(self, batch_size, x[:kept], y[:kept])
        return super().fit(x=data, validation_data=held_out, **options)

    def evaluate(
        self, x: Any = None, y: Any = None, batch_size: Any = None, sample_weight: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        if not options.get("_use_cached_eval_dataset"):
            x = _Read(self, batch_size, x, y, sample_weight)
        return super().evaluate(x=x, **options)

    def predict(self, x: Any, batch_size: Any = None, **options: Any) -> Any:
        return super().predict(x=_Read(self, batch_size, x), **options)


def build() -> Task:
    keras.utils.set_random_seed(1)
    model = Task([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.filterwarnings("ignore:Your `PyDataset` class should call")
def test_a_task_trains_on_text_as_on_one_device() -> None:
    alone, strategy = build(), mw.DataParallel(mw.create_mesh({"batch": 8}))
    with strategy.scope():
        model = build()
    options: Any = {"epochs": 2, "shuffle": False, "validation_split": 0.4, **HOW}
    expected = alone.fit(TEXTS, Y, **options)
    actual = strategy.fit(model, TEXTS, Y, **options)
    for name, values in expected.history.items():
        np.testing.assert_allclose(actual.history[name], values, rtol=1e-5, err_msg=name)
    weighed = {"sample_weight": np.linspace(0, 1, 20), **HOW}
    np.testing.assert_allclose(
        strategy.evaluate(model, TEXTS, Y, **weighed), alone.evaluate(TEXTS, Y, **weighed), 1e-5
    )
    outputs = strategy.predict(model, TEXTS, **HOW)
    np.testing.assert_allclose(outputs, alone.predict(TEXTS, **HOW), rtol=1e-5)


def test_a_task_is_given_numbers_on_parameter_servers_and_without_its_preprocessor() -> None:
    model, strategy = build(), mw.ParameterServer()
    for call in (strategy.fit, strategy.evaluate):
        with pytest.raises(mw.ModelError, match=r"workers do not have its code.*preprocessor\(x\)"):
            call(model, TEXTS, Y, **HOW)
    with pytest.raises(mw.ModelError, match="workers do not have its code"):
        strategy.predict(model, TEXTS, **HOW)
    model.preprocessor = None
    with pytest.raises(mw.DataError, match="Convert strings to ids first"):
        mw.DataParallel(mw.create_mesh({"batch": 8})).fit(model, TEXTS, Y, **HOW)


def test_a_task_without_a_preprocessor_reads_arrays_in_their_own_order() -> None:
    """Its ``fit`` makes a dataset of them, which nothing shuffles."""
    numbers = np.linspace(0, 1, 20)[:, None]
    alone, strategy = build(), mw.DataParallel(mw.create_mesh({"batch": 8}))
    with strategy.scope():
        model = build()
    for task in (alone, model):
        task.preprocessor = None
    keras.Sequential.fit(alone, numbers, Y, shuffle=False, **HOW)
    strategy.fit(model, numbers, Y, **HOW)
    np.testing.assert_allclose(model.get_weights()[0], alone.get_weights()[0], rtol=1e-5)


def build_normalized(*, is_adapted: bool) -> keras.Sequential:
    keras.utils.set_random_seed(1)
    scaled = keras.layers.Normalization(name="scaled")
    if is_adapted:
        scaled.adapt(NUMBERS)
    model = keras.Sequential([keras.Input([2]), scaled, keras.layers.Dense(1, name="out")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


NUMBERS = np.arange(40, dtype="float32").reshape(20, 2) + 7


def test_normalization_is_by_the_statistics_of_a_file(tmp_path: Path) -> None:
    model = build_normalized(is_adapted=True)
    model.save(tmp_path / "m.keras")
    with mw.Server(tmp_path / "m.keras", buckets=[8]) as server:
        outputs = server.answer({"input": NUMBERS[:8]}).outputs["out"]
    np.testing.assert_allclose(outputs, model.predict(NUMBERS[:8], verbose=0), rtol=1e-5)


def test_normalization_is_by_the_statistics_of_a_checkpoint(tmp_path: Path) -> None:
    """Keras' layer computes with what it was adapted to in this process, or with 0 and 1."""
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    with strategy.scope():
        model, fresh = (build_normalized(is_adapted=adapted) for adapted in (True, False))
    strategy.fit(model, NUMBERS, Y, checkpoint=tmp_path, **HOW)
    expected = strategy.predict(model, NUMBERS, verbose=0)
    strategy.restore(fresh, tmp_path)
    for predict in (strategy.predict, keras.Model.predict):
        np.testing.assert_allclose(predict(fresh, NUMBERS, verbose=0), expected, rtol=1e-5)
    np.testing.assert_allclose(fresh(NUMBERS), expected, rtol=1e-5)
    with mw.Server(
        build=lambda: build_normalized(is_adapted=False), checkpoint=tmp_path, buckets=[8]
    ) as server:
        outputs = server.answer({"input": NUMBERS[:8]}).outputs["out"]
    np.testing.assert_allclose(outputs, expected[:8], rtol=1e-5)


class Bins(keras.layers.Hashing):
    """One that needs no TensorFlow before it is called."""

    def __init__(self, **options: Any) -> None:
        keras.layers.Layer.__init__(self, **options)

    def call(self, inputs: Any) -> Any:
        return keras.ops.cast(keras.ops.zeros_like(inputs, "int32"), "int32")

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, "int32")


def _lookup(layer: keras.layers.Layer, dtype: str) -> keras.Model:
    ids = keras.Input([1], dtype=dtype, name="ids")
    vectors = keras.layers.Embedding(8, 2)(layer(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(vectors)), name="shop")
    model.compile("sgd", "mse")
    return model


IDS, TARGETS = np.arange(16)[:, None], np.ones([16, 1])


@pytest.mark.parametrize(
    "call",
    [
        lambda model: mw.DataParallel(mw.create_mesh({"batch": 8})).fit(model, IDS, TARGETS),
        lambda model: mw.DataParallel(mw.create_mesh({"batch": 8})).predict(model, IDS),
        lambda model: mw.ParameterServer().fit(model, IDS, TARGETS),
        lambda model: mw.ParameterServer().predict(model, IDS),
        lambda model: mw.plan(model, (IDS, TARGETS), target="cpu:8"),
        mw.Server,
    ],
)
def test_a_layer_that_looks_values_up_on_the_host_is_named(call: Any) -> None:
    """TensorFlow computes it, and fails with a message about itself when a step is traced."""
    model = _lookup(Bins(name="bins"), "int32")
    with pytest.raises(mw.ModelError, match=r"'shop'.*layer 'bins' \(Bins\) looks values up"):
        call(model)


def test_a_model_that_takes_strings_is_refused_by_its_input() -> None:
    with pytest.raises(mw.ModelError, match=r"'words' \(Bins\).*input 'ids' takes strings"):
        mw.Server(_lookup(Bins(name="words"), "string"))


def test_a_crop_that_is_drawn_in_the_step_is_refused_by_its_name() -> None:
    """JAX cannot compile its slices; Keras runs such a model piece by piece."""
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    x, y = np.zeros([8, 6, 6, 1], "float32"), np.zeros([8, 1], "float32")

    def cropping(size: int) -> keras.Model:
        crop = keras.layers.RandomCrop(size, size, name="crop")
        head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input([6, 6, 1]), crop, *head], name="eyes")
        model.compile("sgd", "mse")
        return model

    def dry_run(model: keras.Model, x: Any, y: Any) -> Any:
        return mw.dry_run(model, (x, y), strategy=strategy, target="cpu:8")

    for call in (strategy.fit, dry_run):
        with pytest.raises(mw.ModelError, match=r"'eyes'.*layer 'crop' \(RandomCrop\) cuts at"):
            call(cropping(4), x, y)
    assert strategy.predict(cropping(4), x, verbose=0).shape == (8, 1)
    strategy.fit(cropping(6), x, y, verbose=0)  # nothing is drawn


@pytest.mark.filterwarnings("ignore:The structure of `inputs` doesn't match")  # so in Keras alone
def test_inputs_that_were_an_attribute_of_a_layer_keep_their_names() -> None:
    """As those of a ``FeatureSpace``: Keras' dict is no container to JAX."""
    holder: Any = keras.layers.Layer()
    holder.features = {name: keras.Input([2], name=name) for name in ("age", "income")}
    joined = keras.layers.Concatenate()(list(holder.features.values()))
    model = keras.Model(holder.features, keras.layers.Dense(1, name="score")(joined))
    features = {"age": NUMBERS[:8], "income": NUMBERS[8:16]}
    with mw.Server(model, buckets=[8]) as server:
        outputs = server.answer(features).outputs["score"]
    np.testing.assert_allclose(outputs, model.predict(features, verbose=0), rtol=1e-5)
