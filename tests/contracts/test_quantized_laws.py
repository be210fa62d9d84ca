"""A quantized or LoRA-adapted model under a strategy is that of one device.

What Keras adds to a kernel (scales, zeros, histories, factors) and the kernel that it packs lie as
the rule for the kernel says, though their dims are others.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from oracle import OneDevice, largest_gap, made, weights

import meshwright as mw

TOKENS = np.random.default_rng(0).integers(0, 16, [16, 8], "int32")
TARGETS = np.random.default_rng(1).normal(size=[16, 8, 4]).astype("float32")
RULES = {
    "emb/embeddings": ["model", None],
    "heads/kernel": [None, "model", None],
    "merge/kernel": ["model", None, None],
    "h/kernel": [None, "model"],
    "out/kernel": ["model", None],
}
_ALL_DEVICES = {"h/kernel": [None, "model"], "out/kernel": ["model", None]}
STRATEGIES = {
    "model=2": lambda: mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), RULES),
    "model=8": lambda: mw.Sharded(mw.create_mesh({"model": 8}), _ALL_DEVICES, batch=None),
    "zero=3": lambda: mw.DataParallel(mw.create_mesh({"batch": 8}), zero=3),
}
ALWAYS = ("int8", "model=2")
MODES = ["int8", "float8", "int4", "lora"]


def build(mode: str, of: Any = layers, **layouts: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    tokens = keras.Input([8], dtype="int32")
    x = layers.Embedding(16, 8, name="emb")(tokens)
    x = layers.EinsumDense("abc,cde->abde", (None, 2, 4), name="heads")(x)
    x = of.EinsumDense("abde,dec->abc", (None, 8), name="merge", **layouts)(x)
    x = layers.Dense(8, activation="relu", name="h")(x)
    model = keras.Model(tokens, layers.Dense(4, name="out", use_bias=False)(x))
    if mode == "lora":
        for name in ("emb", "heads", "merge", "h"):
            model.get_layer(name).enable_lora(3)
    else:
        for name in ("emb", "heads", "merge", "h", "out"):
            if (name, mode) != ("emb", "float8"):  # tables have no such mode
                model.get_layer(name).quantize(mode)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        pytest.param(mode, name, marks=[] if (mode, name) == ALWAYS else pytest.mark.full)
        for mode in MODES
        for name in (STRATEGIES if mode in ("int8", "float8") else ["model=2"])
    ],
)
def test_a_quantized_model_predicts_and_trains_as_on_one_device(mode: str, name: str) -> None:
    strategy = STRATEGIES[name]()
    alone, model = (made(placement, lambda: build(mode)) for placement in (OneDevice(), strategy))
    expected = alone.predict(TOKENS, batch_size=16, verbose=0)
    actual = strategy.predict(model, TOKENS, batch_size=16, verbose=0)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    if mode in ("float8", "lora"):
        how: Any = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        alone.fit(TOKENS, TARGETS, **how)
        strategy.fit(model, TOKENS, TARGETS, **how)
        gap, path = largest_gap(weights(model), weights(alone))
        assert gap <= 1e-5, path


def test_a_trained_model_is_quantized_though_its_optimizer_keeps_the_slots_of_old_kernels() -> None:
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), {"kernel": [None, "model"]})
    x = TARGETS.reshape(-1, 4)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), layers.Dense(4, name="h")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    strategy.fit(model, x, x, verbose=0)
    model.get_layer("h").quantize("int8")
    actual, expected = strategy.predict(model, x, verbose=0), model.predict(x, verbose=0)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    slots = {
        path: layout for path, layout in layouts_of(model, strategy).items() if "momentum" in path
    }
    assert "[unsharded, model]" in slots.values()


def layouts_of(model: keras.Model, strategy: mw.Sharded) -> dict[str, str]:
    return {
        variable.info.path: str(variable.layout.unbound())
        for variable in strategy.explain(model).placed
    }


def test_what_belongs_to_a_kernel_lies_as_it_does() -> None:
    strategy = STRATEGIES["model=2"]()
    int8, int4, lora = (layouts_of(build(mode), strategy) for mode in ("int8", "int4", "lora"))
    whole, split = "[unsharded]", "[model]"
    assert (int8["h/kernel_scale"], int8["out/kernel_scale"]) == (split, whole)
    assert int8["emb/embeddings_scale"] == split
    assert int8["heads/kernel_scale"] == "[unsharded, unsharded, model, unsharded]"
    assert int4["heads/kernel"] == int4["heads/kernel_zero"] == "[unsharded, model]"  # 8x4 of 8x2x4
    assert int4["merge/kernel"] == "[model, unsharded]"  # 8x4 of 2x4x8
    assert (int4["h/g_idx"], int4["emb/embeddings_zero"]) == (whole, "[model, unsharded]")
    assert lora["heads/lora_kernel_a"] == "[unsharded, model, unsharded]"
    assert lora["h/lora_kernel_b"] == "[unsharded, model]"
    assert lora["emb/lora_embeddings_a"] == "[model, unsharded]"


def test_a_rule_of_its_own_comes_first_and_a_layer_may_say_the_layout() -> None:
    rules = {"h/kernel_scale": [None, None], **RULES}
    del rules["merge/kernel"]
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), rules)
    model = build("int4", mw.keras.layers, kernel_layout=["model", None, None])
    layouts = layouts_of(model, strategy)
    assert layouts["h/kernel"] == "[unsharded, model]"
    assert layouts["h/kernel_scale"] == "[unsharded, unsharded]"
    assert layouts["merge/kernel"] == "[model, unsharded]"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_kernel_under_calibration_is_stored_by_columns(bits: int) -> None:
    """GPTQ keeps the kernel beside the packed one until it is calibrated."""
    config = keras.quantizers.GPTQConfig(
        dataset=["a"], tokenizer=None, weight_bits=bits, group_size=2
    )
    model = keras.Sequential([keras.Input([4]), layers.Dense(8, name="h")])
    model.layers[0].quantize("gptq", config=config)
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), {"h/kernel": [None, "model"]})
    layouts = layouts_of(model, strategy)
    assert layouts["h/kernel_scale"] == layouts["h/kernel_zero"] == "[model, unsharded]"
    stored = {str(v.layout.unbound()) for v in placed(model, strategy) if v.name == "kernel"}
    assert stored == {"[unsharded, model]", "[model, unsharded]"}


def placed(model: keras.Model, strategy: mw.Sharded) -> list[Any]:
    strategy.place(model)
    return model.variables
