"""Models with tables on servers answer as `strategy.predict`, from files and beside training."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw

FAR = 1 << 40  # a key that 32 bits do not hold
HOW: dict[str, Any] = {"batch_size": 16, "verbose": 0}


BESIDE_TRAINING = """
import gc

import keras, numpy as np

import meshwright as mw
from meshwright.launch.local import LocalCluster

def main():
    with LocalCluster(1, 1, logs=False) as cluster, mw.ParameterServer(cluster) as strategy:
        users = keras.Input([], dtype="int32", name="users")
        model = keras.Model(users, mw.ps.Embedding("people", 4, 20)(users), name="shop")
        server = mw.Server(model, strategy, buckets=[2])
        for _ in range(2):
            with server:
                print(server.answer({"users": [1, 2]}).outputs["people"].shape)

main()
gc.collect()
"""


def build(**options: Any) -> keras.Model:
    """A table of 20 rows that is looked up twice, and weighed bags of hashed items."""
    keras.utils.set_random_seed(0)
    pair = keras.Input([2], dtype="int32", name="users")
    bought = keras.Input([3], dtype="int32", name="items")
    amount = keras.Input([3], name="amounts")
    people = mw.ps.Embedding("people", 4, 20)
    of_items = mw.ps.Embedding("bags", 4, "hash", combiner="mean", padding_id=-1)
    joined = keras.layers.Concatenate()(
        [people(pair[:, 0]), people(keras.ops.abs(pair[:, 1])), of_items(bought, amount)]
    )
    inputs = {"users": pair, "items": bought, "amounts": amount}
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(joined), name="shop")
    model.compile(keras.optimizers.Adam(0.05, **options), "mse")
    return model


def data() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(1)
    users, items = rng.integers(0, 20, [32, 2]), rng.integers(0, 10, [32, 3])
    items[::3, 2] = -1
    items[5] = -1  # none at all
    x = {
        "users": users.astype("int32"),
        "items": np.where(items > 5, items + FAR, items),
        "amounts": rng.random([32, 3], "float32"),
    }
    return x, rng.normal(size=[32, 1]).astype("float32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    x, y = data()
    with mw.ParameterServer() as strategy:
        model, run = build(), tmp_path_factory.mktemp("shop") / "run"
        strategy.fit(model, x, y, epochs=2, checkpoint=run, **HOW)
        yield strategy, model, run, strategy.predict(model, x)


def test_rows_come_out_of_a_snapshot_and_newer_ones_without_a_restart(trained, tmp_path: Path):
    strategy, model, run, expected = trained
    x, y = data()
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    with mw.Server(build=build, checkpoint=folder, buckets=[8]) as server:
        served = server.model("shop")
        assert [str(spec) for spec in served.inputs] == [
            "amounts float32[rows, 3]",
            "items int64[rows, 3]",
            "users int32[rows, 2]",
        ]
        assert served.why_alone is None
        shapes = served.forward.shapes
        answer = server.answer(x)
        np.testing.assert_allclose(answer.outputs["out"], expected, atol=1e-6)
        new = {**{name: values[:1] for name, values in x.items()}, "items": [[7, 1 << 50, -1]]}
        np.testing.assert_allclose(  # as a key that was never trained begins
            server.answer(new).outputs["out"],
            strategy.predict(model, {n: np.asarray(v) for n, v in new.items()}),
            atol=1e-6,
        )
        shutil.rmtree(folder)  # what is served has been opened
        np.testing.assert_array_equal(server.answer(x).outputs["out"], answer.outputs["out"])
        with mw.ParameterServer() as other:
            later = build()
            other.fit(later, x, y, epochs=3, checkpoint=folder, **HOW)
            assert served.reload()
            again = server.answer(x)
            np.testing.assert_allclose(again.outputs["out"], other.predict(later, x), atol=1e-6)
        assert (answer.version, again.version) == ("4", "6")
        assert served.forward.shapes == shapes


def test_averages_of_rows_answer_as_after_fit(tmp_path: Path):
    def averaging() -> keras.Model:
        return build(use_ema=True, ema_momentum=0.9)

    x, y = data()
    with mw.ParameterServer() as strategy:
        model = averaging()
        strategy.fit(model, x, y, epochs=2, checkpoint=tmp_path, **HOW)
        expected = strategy.predict(model, x)
    with mw.Server(build=averaging, checkpoint=tmp_path, buckets=[8]) as server:
        np.testing.assert_allclose(server.answer(x).outputs["out"], expected, atol=1e-6)


def test_an_id_that_a_table_lacks_fails_its_own_request(trained):
    _, _, run, expected = trained
    x, _ = data()
    with mw.Server(build=build, checkpoint=run, max_rows=4) as server:
        wrong = {name: values[:2].copy() for name, values in x.items()}
        wrong["users"][1, 1] = 20  # the model computes this id
        actual = server.answer(wrong).outputs["out"]
        np.testing.assert_allclose(actual[0], expected[0], atol=1e-6)
        assert np.isnan(actual[1]).all()
    plain = keras.Input([1], dtype="int32", name="user")
    model = keras.Model(plain, mw.ps.Embedding("people", 4, 20)(plain), name="shop")
    with mw.ParameterServer() as strategy, mw.Server(model, strategy, buckets=[2]) as server:
        fault = r"input 'user': id 20 is out of range for table 'people', whose ids are 0 to 19"
        with pytest.raises(mw.RequestError, match=fault):
            server.answer({"user": [[3], [20]]})
        assert server.answer({"user": [[19]]}).outputs


def test_keys_that_the_model_also_computes_with_are_not_cut():
    keys = keras.Input([1], dtype="int32", name="key")
    rows = mw.ps.Embedding("hashed", 2, "hash")(keys)
    joined = keras.layers.Concatenate()([rows[:, 0], keras.ops.cast(keys, "float32")])
    model = keras.Model(keys, joined, name="both")
    with mw.ParameterServer() as strategy, mw.Server(model, strategy, buckets=[2]) as server:
        with pytest.raises(mw.RequestError, match="value 1099511627781 is outside"):
            server.answer({"key": [[FAR + 5]]})
        assert server.answer({"key": [[7]]}).outputs["output"][0, 2] == 7


def test_beside_training_rows_are_the_newest(trained):
    x, y = data()
    with mw.ParameterServer() as strategy:
        model = build()
        strategy.fit(model, x, y, **HOW)
        with mw.Server(model, strategy, buckets=[32], follow_s=0.05) as server:
            before = server.answer(x).outputs["out"]
            np.testing.assert_allclose(before, strategy.predict(model, x), atol=1e-6)
            training = threading.Thread(
                target=strategy.fit, args=(model, x, y), kwargs={"epochs": 3, **HOW}
            )
            training.start()
            while training.is_alive():
                assert np.isfinite(server.answer(x).outputs["out"]).all()
            served = server.model("shop")
            served.update()
            after = server.answer(x).outputs["out"]
            assert int(served.version) > 1
            served.source.live._servers.close()
            with pytest.raises(mw.NotReadyError, match="servers of model 'shop' do not answer: "):
                server.answer(x)
        np.testing.assert_allclose(after, strategy.predict(model, x), atol=1e-6)
        assert np.abs(after - before).max() > 1e-3


def test_a_server_beside_training_leaves_no_socket_open():
    words = [sys.executable, "-W", "default::ResourceWarning", "-c", BESIDE_TRAINING]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout == "(2, 4)\n(2, 4)\n"


def test_without_its_tables_a_model_is_refused(trained, tmp_path: Path):
    _, model, run, _ = trained
    with pytest.raises(mw.ModelError, match=r"(?s)tables people, bags .*checkpoint='runs/first'"):
        mw.Server(model).load()
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run").glob("tables_*"):
        shutil.rmtree(path)
    with pytest.raises(mw.CheckpointError, match="lists the tables of a checkpoint"):
        mw.Server(build=build, checkpoint=tmp_path / "run").load()
    with pytest.raises(mw.ModelError, match="precision='int8' is not supported for model 'shop'"):
        mw.Server(build=build, checkpoint=run, precision="int8")
