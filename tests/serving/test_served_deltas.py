"""A server follows the deltas of a run: it answers as the model does that was read whole."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw
from meshwright.commands.serve import options_of
from meshwright.commands.serving import ServeOptions, server_for
from meshwright.launch.group import run_group
from meshwright.launch.group_options import GroupOptions
from meshwright.launch.local import LocalCluster
from meshwright.ps.wire.message import Message
from meshwright.ps.worker.updates import Update

HOW: dict[str, Any] = {"batch_size": 64, "verbose": 0}
DIM, HELD = 16, 4000
FAR = 1 << 40


def build(outputs: int = 1) -> keras.Model:
    keras.utils.set_random_seed(0)
    user = keras.Input([], dtype="int32", name="user")
    item = keras.Input([], dtype="int32", name="item")
    people = mw.ps.Embedding("people", DIM, 500)(user)
    bought = mw.ps.Embedding("bought", DIM, "hash")(item)
    both = keras.layers.Concatenate()([people, bought])
    model = keras.Model(
        {"user": user, "item": item}, keras.layers.Dense(outputs, name="out")(both), name="shop"
    )
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def plain() -> keras.Model:
    return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])


def rows(items: Any, user: int = 3) -> dict[str, np.ndarray]:
    items = np.asarray(items)
    return {"user": np.full(len(items), user, "int32"), "item": items + FAR}


class Shop:
    """A model that is trained on servers of this process, and exported."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.strategy, self.model, self.folder = mw.ParameterServer(), build(), folder
        self.train(np.arange(HELD))
        self.exporter = mw.DeltaExporter(self.model, self.strategy, folder, **how)

    def train(self, items: Any, user: int = 3) -> None:
        x = rows(items, user)
        self.strategy.fit(self.model, x, np.ones([len(x["item"]), 1], "float32"), **HOW)

    def predict(self, x: dict[str, np.ndarray]) -> np.ndarray:
        return self.strategy.predict(self.model, x)


@pytest.fixture
def shop(tmp_path: Path):
    shop = Shop(tmp_path / "exports")
    yield shop
    shop.strategy.close()


def served(shop: Shop, **how: Any) -> mw.Server:
    return mw.Server(build=build, checkpoint=shop.folder, buckets=[8], name="shop", **how)


X = rows([0, 1, 2, 70, 3999, 5000, 6000, 7])  # two of them are made later


def test_answers_after_each_delta_are_those_of_the_whole_model(shop: Shop) -> None:
    full = shop.exporter.export()
    assert (full.number, full.kind, full.rows) == (1, "full", HELD + 500)
    with served(shop) as server:
        model = server.model("shop")
        np.testing.assert_allclose(server.answer(X).outputs["out"], shop.predict(X), atol=1e-6)
        sizes = {}
        for version, items in enumerate(([0, 1], [0, 5000, *range(70, 268)], []), start=2):
            if items:
                shop.train(items)
            delta = shop.exporter.export()
            assert (delta.kind, delta.rows) == ("delta", len(items) + bool(items))
            sizes[len(items)] = delta.nbytes
            assert model.reload()
            answer = server.answer(X)
            assert answer.version == str(version)
            expected = shop.predict(X)
            np.testing.assert_allclose(answer.outputs["out"], expected, atol=1e-6)
        assert not model.reload()
    row_bytes = 4 * DIM + 8
    assert sizes[2] - sizes[0] < 5 * row_bytes + 1000
    assert abs(sizes[200] - sizes[2] - 198 * row_bytes) < 1000
    assert full.nbytes > HELD * row_bytes
    with pytest.raises(mw.ModelError, match="not in the export, or have another shape there: out/"):
        mw.Server(build=lambda: build(2), checkpoint=shop.folder).load()
    with served(shop) as server:  # it starts late: the full one, and all deltas
        late = server.answer(X)
    assert late.version == "4"
    np.testing.assert_array_equal(late.outputs["out"], answer.outputs["out"])


def test_the_command_serves_a_folder_of_exports(shop: Shop) -> None:
    shop.exporter.export()
    words = [str(shop.folder), "--model", "test_served_deltas:build", "--follow", "0.05"]
    with server_for(
        ServeOptions(**options_of([*words, "--name", "shop", "--buckets", "8"]))
    ) as server:
        shop.train([0, 1])
        shop.exporter.export()
        limit = time.monotonic() + 20
        while server.model("shop").version != "2" and time.monotonic() < limit:
            time.sleep(0.02)
        answer = server.answer(X)
        assert answer.version == "2"
        np.testing.assert_allclose(answer.outputs["out"], shop.predict(X), atol=1e-6)


def test_a_run_that_begins_anew_in_the_folder_is_served_by_its_own_full_export(
    shop: Shop, tmp_path: Path
) -> None:
    """Its deltas are not those of the full export that is served, whatever their numbers."""
    shop.exporter.export()
    with served(shop) as server:
        model = server.model("shop")
        shutil.rmtree(shop.folder)
        shop.train([0, 1])
        again = mw.DeltaExporter(shop.model, shop.strategy, shop.folder)
        again.export()
        shop.train([5000])
        assert (again.export().number, model.version) == (2, "1")
        assert model.reload()
        answer = server.answer(X)
        assert answer.version == "2"
        np.testing.assert_allclose(answer.outputs["out"], shop.predict(X), atol=1e-6)
        shutil.rmtree(shop.folder)
        shop.train([2])
        mw.DeltaExporter(shop.model, shop.strategy, shop.folder).export()
        assert model.reload()  # its number is lower than the one that was served
        np.testing.assert_allclose(server.answer(X).outputs["out"], shop.predict(X), atol=1e-6)


def test_keys_that_are_gone_get_their_first_rows_again(shop: Shop) -> None:
    shop.exporter.export()
    fresh = shop.predict(rows([9999]))
    table = shop.exporter._live.tables["bought"]
    keys = np.arange(HELD - 1000) + FAR
    values = shop.exporter._live.lookup("bought", keys)
    gone = Message("load", {"tables": [table.shards[0].name]}, (keys, values))
    with served(shop) as server:
        before = server.answer(X).outputs["out"]
        shop.exporter._live.ask(lambda servers: servers.ask(0, gone))
        delta = shop.exporter.export()
        assert (delta.kind, delta.removed) == ("delta", 1000)
        assert server.model("shop").reload()
        after = server.answer(X).outputs["out"]
    np.testing.assert_allclose(after, shop.predict(X), atol=1e-6)
    assert abs(after[4] - before[4]) > 1e-3  # of item 3999
    assert np.isfinite(fresh).all()


def test_a_gap_and_a_damaged_delta_are_refused_until_a_full_one(shop: Shop) -> None:
    shop.exporter.export()
    with served(shop) as server:
        model = server.model("shop")
        shop.train([1])
        export = shop.exporter.export()
        assert model.reload()
        present = server.answer(X).outputs["out"]
        shop.train([2])
        damaged = shop.exporter.export()
        with next(damaged.path.rglob("0.1.values.npy")).open("r+b") as file:
            file.seek(-3, 2)
            file.write(b"odd")
        with pytest.raises(mw.CheckpointError, match=r"(?s)delta_00000003_of_00000001 is damaged"):
            model.reload()
        assert "refused delta_00000003_of_00000001: " in model.status().refusal
        shop.train([3])
        assert shop.exporter.export().kind == "delta"
        shutil.rmtree(damaged.path)
        fault = "expected delta 3 of full export 1; the next one there is delta 4 of full export 1"
        with pytest.raises(mw.CheckpointError, match=fault):
            model.reload()
        answer = server.answer(X)
        assert (answer.version, export.number) == ("2", 2)
        np.testing.assert_array_equal(answer.outputs["out"], present)
        with served(shop) as late:
            assert late.answer(X).version == "2"
            assert "expected delta 3" in late.model("shop").status().refusal
        healed = shop.exporter.export()  # a delta would build on what is gone
        assert (healed.number, healed.kind) == (5, "full")
        assert model.reload()
        answer = server.answer(X)
        assert (answer.version, model.status().refusal) == ("5", "")
        np.testing.assert_allclose(answer.outputs["out"], shop.predict(X), atol=1e-6)


def test_a_server_that_follows_mixes_no_versions(shop: Shop) -> None:
    shop.exporter.export()
    expected = {"1": shop.predict(X)}
    wrong: list[str] = []
    answered: dict[str, np.ndarray] = {}
    done = threading.Event()

    def ask(server: mw.Server) -> None:
        while not done.is_set():
            answer = server.answer(X)
            first = answered.setdefault(answer.version, answer.outputs["out"])
            if not np.array_equal(first, answer.outputs["out"]):
                wrong.append(answer.version)

    with served(shop, follow_s=0.02) as server:
        asking = threading.Thread(target=ask, args=(server,))
        asking.start()
        for number in range(2, 5):
            shop.train([0, 1, 5000 + number])
            exported = shop.exporter.export()
            expected[str(exported.number)] = shop.predict(X)
            while server.model("shop").version != str(number):
                time.sleep(0.005)
            server.answer(X)
        done.set()
        asking.join()
    assert not wrong
    for version, outputs in answered.items():
        np.testing.assert_allclose(outputs, expected[version], atol=1e-6)
    assert len(answered) > 1


def test_old_exports_are_removed_and_a_new_exporter_begins_with_a_full_one(tmp_path: Path) -> None:
    shop = Shop(tmp_path, full_every=1, keep=1)
    kinds = [shop.exporter.export().kind for _ in range(4)]
    assert kinds == ["full", "delta", "full", "delta"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "delta_00000004_of_00000003",
        "full_00000003",
    ]
    about = json.loads((tmp_path / "full_00000003" / "export.json").read_text())
    assert (about["kind"], about["number"], about["base"]) == ("full", 3, 3)
    other = mw.DeltaExporter(shop.model, shop.strategy, tmp_path)
    assert (other.export().kind, other.export().number) == ("full", 6)
    with pytest.raises(mw.CheckpointError, match="One DeltaExporter at a time writes"):
        shop.exporter.export()
    with pytest.raises(mw.ModelError, match="expected a model with tables on parameter servers"):
        mw.DeltaExporter(plain(), shop.strategy, tmp_path)
    shop.strategy.close()


@pytest.mark.alone
@pytest.mark.full
def test_two_processes_take_the_same_delta(shop: Shop, tmp_path: Path) -> None:
    shop.exporter.export()
    expected = []
    for items in ([0, 1], [2, 5000]):
        shop.train(items)
        later = shop.exporter.export()
        expected.append(shop.predict(X))
    later.path.rename(tmp_path / "later")
    program = str(Path(__file__).parent / "serving_deltas_group.py")
    assert run_group([program, str(tmp_path)], GroupOptions(2, 1, join_s=180)) == 0
    answers = np.load(tmp_path / "answers.npz")
    assert list(answers["versions"]) == ["2", "3"]
    for number, outputs in enumerate(expected):
        np.testing.assert_allclose(answers[str(number)], outputs, atol=1e-6)


def test_a_model_without_tables_is_not_served_from_exports(tmp_path: Path) -> None:
    (tmp_path / "full_00000001").mkdir()
    server = mw.Server(build=plain, checkpoint=tmp_path, name="plain")
    with pytest.raises(mw.ModelError, match="'plain': the model has no tables on parameter serv"):
        server.load()


def test_after_a_server_is_killed_comes_a_full_export(tmp_path: Path) -> None:
    how: dict[str, Any] = {"heartbeat_s": 0.2, "logs": False, "snapshot_every": 1}
    with (
        LocalCluster(1, 2, **how) as cluster,
        mw.ParameterServer(cluster) as strategy,
        mw.DeltaExporter(build(), strategy, tmp_path) as exporter,
    ):
        assert exporter.export().kind == "full"
        table = exporter._live.tables["bought"]
        keys = np.array([1, 2]) + FAR
        with mw.Server(build=build, checkpoint=tmp_path, buckets=[8], name="shop") as server:

            def push(value: float) -> None:
                values = np.full([2, DIM], value, "float32")
                exporter._live.ask(
                    lambda servers: servers.push([Update(table, "rows_assign", (keys, values))])
                )

            push(1.0)
            delta = exporter.export()
            assert (delta.kind, delta.rows) == ("delta", 2)
            cluster.kill("ps:0", signal.SIGKILL)
            push(2.0)  # waits for the server that is started again
            assert exporter.export().kind == "full"
            push(3.0)
            assert exporter.export().kind == "delta"
            assert server.model("shop").reload()
            answer = server.answer(rows([1, 2], 0))
        result = exporter._live.lookup("bought", keys)
        kernel = exporter._live.values().params["out/kernel"]
        people = exporter._live.lookup("people", np.array([0, 0]))
        np.testing.assert_array_equal(result, np.full([2, DIM], 3.0))
        expected = np.concatenate([people, result], 1) @ kernel
        np.testing.assert_allclose(answer.outputs["out"], expected, atol=1e-5)
        assert answer.version == "4"
