"""A Keras or JAX model whose dims are named in a layout map, laid out by a string of rules."""

from __future__ import annotations

import keras
import numpy as np
import optax
import pytest

import meshwright as mw

VOCAB, D_MODEL, D_FF, HEADS, D_KV, LENGTH = 24, 16, 32, 4, 8, 6
AXES = {"rows": 4, "cols": 2}
RULES = "batch:rows;vocab:cols;d_ff:cols;heads:cols"

BY_NAME = {
    "embedding": mw.dims("vocab d_model"),
    "attention/(query|key|value).*kernel": mw.dims("d_model heads d_kv"),
    "attention/attention_output.*kernel": mw.dims("heads d_kv d_model"),
    "attention/(query|key|value).*bias": mw.dims("heads d_kv"),
    "up/kernel": mw.dims("d_model d_ff"),
    "up/bias": mw.dims("d_ff"),
    "down/kernel": mw.dims("d_ff d_model"),
    "logits/kernel": mw.dims("d_model vocab"),
    "logits/bias": mw.dims("vocab"),
}
BY_AXES = {
    "embedding": ["cols", None],
    "attention/(query|key|value).*kernel": [None, "cols", None],
    "attention/attention_output.*kernel": ["cols", None, None],
    "attention/(query|key|value).*bias": ["cols", None],
    "up/kernel": [None, "cols"],
    "up/bias": ["cols"],
    "down/kernel": ["cols", None],
    "logits/kernel": [None, "cols"],
    "logits/bias": ["cols"],
}


def transformer_block():
    words = keras.Input([LENGTH], dtype="int32")
    x = keras.layers.Embedding(VOCAB, D_MODEL, name="embedding")(words)
    attention = keras.layers.MultiHeadAttention(HEADS, D_KV, name="attention")
    x = keras.layers.LayerNormalization(name="norm")(x + attention(x, x, use_causal_mask=True))
    return keras.Model(words, feed_forward(x))


def word_by_word():
    words = keras.Input([LENGTH], dtype="int32")
    x = keras.layers.Embedding(VOCAB, D_MODEL, name="embedding")(words)
    return keras.Model(words, feed_forward(x))


def feed_forward(x):
    up = keras.layers.Dense(D_FF, activation="relu", name="up")(x)
    return keras.layers.Dense(VOCAB, name="logits")(
        x + keras.layers.Dense(D_MODEL, name="down")(up)
    )


def without_attention(layouts):
    return {pattern: layout for pattern, layout in layouts.items() if "attention" not in pattern}


def data():
    words = np.random.default_rng(0).integers(0, VOCAB, [32, LENGTH + 1])
    return words[:, :-1], words[:, 1:]


def trained(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = word_by_word()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
    history = strategy.fit(model, *data(), batch_size=16, epochs=2, verbose=0)
    return model, history.history["loss"]


@pytest.fixture(scope="module")
def mesh():
    return mw.create_mesh(AXES)


@pytest.fixture(scope="module")
def by_name(mesh):
    strategy = mw.Sharded(mesh, without_attention(BY_NAME), rules="batch:rows;vocab:cols;d_ff:cols")
    return strategy, *trained(strategy)


def test_a_string_of_rules_lays_a_keras_model_out_as_axes_by_hand_do(mesh):
    tables = []
    for strategy in (
        mw.Sharded(mesh, BY_NAME, rules=RULES),
        mw.Sharded(mesh, BY_AXES, batch="rows"),
    ):
        with strategy.scope():
            model = transformer_block()
        tables.append(strategy.explain(model))
    named, axes = ([(p.info.path, p.layout) for p in table.placed] for table in tables)
    assert named == axes
    assert tables[0]["attention/query/kernel"].layout == mw.Layout([None, "cols", None], mesh)


@pytest.mark.full
def test_and_the_losses_are_the_same(mesh, by_name):
    strategy, model, losses = by_name
    by_hand = mw.Sharded(mesh, without_attention(BY_AXES), batch="rows")
    twin, expected = trained(by_hand)
    assert losses == expected
    for table in (strategy.explain(model), by_hand.explain(twin)):
        (velocity,) = (p for p in table.placed if p.info.path.endswith("up/kernel/velocity"))
        assert velocity.layout == table["up/kernel"].layout == mw.Layout([None, "cols"], mesh)


def test_the_table_shows_names_sizes_and_the_rule_that_split_them(by_name):
    strategy, model, _ = by_name
    table = strategy.explain(model)
    assert table["up/kernel"].reason == "layout 'up/kernel', d_ff:cols"
    text = str(table)
    assert "d_model:16 d_ff:32" in text
    assert "_:" not in text
    moment = next(line for line in text.splitlines() if "up/kernel/velocity" in line)
    assert "d_model:16 d_ff:32" in moment
    assert "slot of up/kernel" in moment


@pytest.mark.full_for("axes2-batch:rows;vocab:cols;d_ff:cols;d_model:planes")
@pytest.mark.parametrize(
    ("axes", "rules"),
    [
        pytest.param({"all": 8}, "batch:all", marks=pytest.mark.full),
        pytest.param({"all": 2}, "vocab:all;d_ff:all", marks=pytest.mark.full),
        ({"rows": 2, "cols": 2, "planes": 2}, "batch:rows;vocab:cols;d_ff:cols;d_model:planes"),
    ],
)
def test_the_map_stays_and_other_rules_run_it_elsewhere_with_the_same_losses(by_name, axes, rules):
    import jax

    strategy, _, expected = by_name
    count = int(np.prod(list(axes.values())))
    other = strategy.on(mw.create_mesh(axes, devices=jax.devices()[:count]), rules=rules)
    model, losses = trained(other)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    axis_of = dict(pair.split(":") for pair in rules.split(";"))
    wanted_specs = tuple(axis_of.get(name, "unsharded") for name in ("d_model", "d_ff"))
    assert model.get_layer("up").kernel.layout.specs == wanted_specs


def test_the_same_rules_hold_on_another_mesh_with_these_axes(by_name):
    strategy, _, _ = by_name
    other = strategy.on(mw.Mesh({"rows": 64, "cols": 4}))
    assert other.placement.rules == strategy.placement.rules
    assert other.placement.batch == "rows"
    assert "rules='batch:rows;vocab:cols;d_ff:cols'" in repr(other)


def test_a_checkpoint_written_under_one_string_goes_on_under_another(by_name, tmp_path):
    strategy, model, _ = by_name
    strategy.save(model, tmp_path)
    other = strategy.on(strategy.mesh, rules="batch:rows;d_model:cols")
    with other.scope():
        twin = word_by_word()
    other.restore(twin, tmp_path, parts=("params", "state"))
    assert twin.get_layer("up").kernel.layout.specs == ("cols", "unsharded")
    for one, two in zip(twin.weights, model.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def test_a_plain_jax_model_may_be_named_too(mesh):
    import jax.numpy as jnp

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"]) ** 2)

    params = {"up": np.ones([4, 8], "float32") / 8, "down": np.ones([8, 2], "float32")}
    program = mw.jax_program(loss, params, optax.adam(0.1))
    layouts = {"up": mw.dims("io hidden"), "down": mw.dims("hidden io")}
    batches = [{"x": np.eye(8, 4, dtype="float32")}] * 3
    results = []
    for placement in (
        mw.Placement.of(mesh, layouts, rules="batch:rows;hidden:cols", inputs=mw.dims("batch io")),
        mw.Placement.of(mesh, {"up": [None, "cols"], "down": ["cols", None]}, batch="rows"),
    ):
        trainer = mw.Trainer(program, placement)
        _, logs = trainer.train(trainer.init(), batches)
        results.append((trainer.layouts, float(logs["loss"])))
    assert results[0] == results[1]


# Errors


def test_a_wrong_number_of_names_is_told_of_every_variable_before_anything_is_made(mesh):
    layouts = {"up": mw.dims("d_model d_ff"), "down/kernel": mw.dims("d_ff d_model d_kv")}
    strategy = mw.Sharded(mesh, layouts, rules="batch:rows;d_ff:cols")
    with pytest.raises(mw.PlacementError) as error, strategy.scope():
        transformer_block()
    text = str(error.value)
    assert "2 variable(s) cannot be laid out on the mesh (rows=4, cols=2)" in text
    assert "up/bias (32,), dims [d_model d_ff] by layout 'up': there are 1 dims (32,) and 2" in text
    assert "down/kernel (32, 16), dims [d_ff d_model d_kv] by layout 'down/kernel'" in text


def test_names_without_rules_and_rules_without_names_are_errors_at_once(mesh):
    with pytest.raises(
        mw.LayoutError, match=r"named \[d_model d_ff\], but there are no rules .* rules="
    ):
        mw.Sharded(mesh, {"up": mw.dims("d_model d_ff")}, batch="rows")
    with pytest.raises(mw.PlacementError, match="Nothing has named dims: name those of weights"):
        mw.Sharded(mesh, {"up": [None, "cols"]}, rules="batch:rows;d_ff:cols")


def test_a_misspelt_dim_is_an_error_at_once(mesh):
    with pytest.raises(mw.PlacementError, match=r"'dff:cols', so they split nothing.*'d_ff'"):
        mw.Sharded(mesh, BY_NAME, rules="batch:rows;dff:cols")
    with pytest.warns(mw.MeshwrightWarning, match="'dff:cols'"):
        mw.Sharded(mesh, BY_NAME, rules="batch:rows;dff:cols", strict=False)
    strategy = mw.Sharded(mesh, BY_NAME, rules=RULES)
    with pytest.raises(mw.PlacementError, match="'dff:cols'"):
        strategy.on(mesh, rules="dff:cols")


def test_a_layer_argument_is_axes_and_says_so():
    with pytest.raises(mw.LayoutError, match=r"kernel_layout=dims\('d_model d_ff'\).*sequence"):
        mw.keras.layers.Dense(4, kernel_layout=mw.dims("d_model d_ff"))


@pytest.mark.full
def test_it_is_checked_like_any_other_layout():
    def build():
        up = keras.layers.Dense(D_FF, activation="tanh", name="up")
        model = keras.Sequential([keras.Input([4]), up, keras.layers.Dense(4, name="down")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        names = {key: BY_NAME[key] for key in ("up/kernel", "up/bias", "down/kernel")}
        return model, (np.eye(8, 4), np.ones([8, 4])), names

    mw.testing.assert_equivalent(build, [AXES, {"rows": 8}], rules="batch:rows;d_ff:cols")
