"""Models whose inputs have dims of any size: what is compiled, padded, cut off and refused."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import meshwright as mw

DRAW = np.random.default_rng(0)


def image(*stack: Any) -> keras.Model:
    pixels = keras.Input([None, None, 3], name="pixels")
    return keras.Model(pixels, keras.Sequential(stack)(pixels), name="image")


def pixels(rows: int, height: int, width: int) -> np.ndarray:
    return DRAW.random([rows, height, width, 3], "float32")


def assert_answers(server: mw.Server, model: Any, inputs: Any) -> None:
    answer = server.answer(inputs if isinstance(inputs, dict) else {"pixels": inputs})
    expected = model.predict(inputs, verbose=0)
    (output,) = answer.outputs.values()
    assert output.shape == expected.shape
    np.testing.assert_allclose(output, expected, atol=1e-6)


def test_a_model_that_cannot_be_computed_in_short_rows() -> None:
    """Convolutions without padding, as in InceptionV3, have no place in some four pixels."""
    model = image(
        *(layers.Conv2D(4, 3, strides=2) for _ in range(3)), layers.GlobalAveragePooling2D()
    )
    with mw.Server(model, buckets=[2]) as server:
        assert_answers(server, model, pixels(2, 17, 23))
    sound = keras.Input([None, 1], name="pixels")  # as of Moonshine, which begins with some 900
    model = keras.Model(sound, layers.Conv1D(2, 900)(sound))
    with mw.Server(model, buckets=[1]) as server:
        assert_answers(server, model, DRAW.random([1, 1000, 1], "float32"))


def test_each_dim_of_an_image_is_cut_to_its_own_length() -> None:
    model = image(layers.Dense(2, use_bias=False))
    with mw.Server(model, lengths=[4, 8], buckets=[2]) as server:
        for height, width in itertools.product((3, 5, 8), repeat=2):
            assert_answers(server, model, pixels(1, height, width))


@pytest.mark.parametrize(
    ("last", "fault"),
    [
        (layers.GlobalAveragePooling2D, "padding a row from 8 to 16 with 0 changes output"),
        (
            lambda: layers.Dense(1),
            "is not as long: dim 1 of output 'output', dim 2 of",
        ),
    ],
)
def test_padding_that_would_change_an_answer_is_refused(last: Any, fault: str) -> None:
    """In rows of less than four pooling would hide it: two and three pixels become one."""
    model = image(layers.Conv2D(4, 3, padding="same"), layers.MaxPooling2D(2), last())
    with pytest.raises(mw.ModelError, match=fault):
        mw.Server(model, lengths=[3, 6, 16], buckets=[1]).load()


def test_inputs_that_belong_together_are_as_long_as_each_other() -> None:
    ids = keras.Input([None], dtype="int32", name="ids")
    mask = keras.Input([None], name="mask")
    x = layers.Embedding(9, 4)(ids) * ops.expand_dims(mask, -1)
    model = keras.Model({"ids": ids, "mask": mask}, {"sum": ops.sum(x, axis=1)})
    inputs = {"ids": np.ones([1, 5], "int32"), "mask": np.ones([1, 5], "float32")}
    with mw.Server(model, lengths=[4, 8], buckets=[1]) as server:
        answer = server.answer(inputs)
        np.testing.assert_allclose(
            answer.outputs["sum"], model.predict(inputs, verbose=0)["sum"], atol=1e-6
        )
        for length in (7, 8):
            with pytest.raises(mw.RequestError, match=f"'mask' is {length} long and input 'ids' 5"):
                server.answer({**inputs, "mask": np.ones([1, length], "float32")})


def test_a_precision_that_the_platform_does_not_have_is_refused() -> None:
    ids = keras.Input([4], dtype="int32", name="ids")
    x = layers.Embedding(9, 8)(ids)
    model = keras.Model(ids, layers.MultiHeadAttention(2, 4)(x, x))
    with pytest.raises(mw.ModelError, match="precision='float16': the forward pass of model"):
        mw.Server(model, precision="float16", buckets=[1]).load()


def test_outputs_have_the_names_that_the_user_gave() -> None:
    x = keras.Input([3], name="x")
    hidden = layers.Dense(2, name="hidden")(x)
    score, best = layers.Dense(1, name="own")(hidden), ops.argmax(hidden, axis=-1)
    for outputs, names in (
        ({"score": score, "best": best}, ["best", "score"]),
        ([score, best], ["own", "output_1"]),
        ({"score": score}, ["score"]),
        (best, ["output"]),
        (layers.Dense(1)(hidden), ["output"]),
        (layers.Reshape([1, 2])(hidden), ["output"]),
        (layers.GlobalAveragePooling1D()(layers.Reshape([1, 2])(hidden)), ["output"]),
    ):
        with mw.Server(keras.Model(x, outputs, name="m"), buckets=[1]) as server:
            assert [spec.name for spec in server.model("m").outputs] == names
