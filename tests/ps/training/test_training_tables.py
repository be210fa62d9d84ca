"""Tables that are on servers alone, in checkpoints: the same rows and slots on other servers."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from training_models import apart, ratings, recommender

import meshwright as mw
from meshwright.errors import CheckpointError
from meshwright.ps.server.core import ServerCore
from meshwright.ps.shared.client import Servers, connect_here
from meshwright.ps.shared.placing import VariableSpec, placed
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.training import table_files, table_of
from meshwright.ps.training.embeddings import Embedding
from meshwright.ps.worker.context import Context, entered
from meshwright.ps.worker.gradients import tell_optimizer
from meshwright.ps.worker.updates import Update

NADAM = {"class_name": "Nadam", "config": {"learning_rate": 0.05}}
KEYS = np.array([3, -8, 2**40, 17, 5, 90, 1, 0])
ROWS = np.arange(11)


class Tables:
    """A hash table and a dense one over some servers, with the slots of an optimizer."""

    def __init__(self, num_servers: int) -> None:
        self.servers: Servers = connect_here([ServerCore(i) for i in range(num_servers)])
        self.specs = {
            "users": spec_of("users", (0, 3), num_servers, is_hash=True),
            "items": spec_of("items", (11, 2), num_servers),
        }
        for spec in self.specs.values():
            self.servers.create(spec, {"kind": "uniform", "params": {}, "seed": 3})
        tell_optimizer(self.servers, {}, NADAM, list(self.specs.values()), {})

    def train(self, seeds: range) -> None:
        for seed in seeds:
            rng = np.random.default_rng(seed)
            for name, own in (("users", KEYS), ("items", ROWS)):
                spec = self.specs[name]
                values = rng.normal(size=(len(own), *spec.shape[1:])).astype("float32")
                self.servers.push([Update(spec, "rows_gradient", (own, values))])

    def rows(self) -> list[np.ndarray]:
        named = zip(("users", "items"), (KEYS, ROWS), strict=True)
        return [self.servers.lookup(self.specs[name], own) for name, own in named]

    def here(self):
        return entered(Context(self.servers))


def spec_of(name: str, shape: tuple, servers: int, is_hash: bool = False) -> VariableSpec:
    loads = [0] * servers
    return placed(name, shape, "float32", num_shards=servers, loads_bytes=loads, is_hash=is_hash)


@pytest.mark.parametrize("num_servers", [1, 2, 3, 4])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_two_servers_write_and_any_number_reads(
    tmp_path: Path, monkeypatch, num_servers, piece_bytes
):
    monkeypatch.setattr(table_files, "PIECE_BYTES", piece_bytes)
    before = Tables(2)
    before.train(range(3))
    with before.here():
        table_files.save_tables_here(str(tmp_path / "saved"), before.specs)
    after = Tables(num_servers)
    after.servers.lookup(after.specs["users"], np.array([77, 78]))  # rows that were not saved
    after.train(range(5, 6))
    with after.here():
        table_files.restore_tables_here(str(tmp_path / "saved"), after.specs)
    assert after.servers.read([after.specs["users"]])[0].shape == (len(KEYS), 3)
    for _ in range(2):  # once as saved; and once more, as the slots were saved too
        for one, other in zip(before.rows(), after.rows(), strict=True):
            np.testing.assert_array_equal(one, other)
        before.train(range(7, 9))
        after.train(range(7, 9))


def test_tables_that_differ_are_all_named_and_nothing_is_changed(tmp_path: Path):
    before = Tables(1)
    with before.here():
        table_files.save_tables_here(str(tmp_path / "saved"), before.specs)
    index = table_files.read_index(tmp_path / "saved")
    other = {
        "users": spec_of("users", (0, 4), 1, is_hash=True),
        "items": spec_of("items", (12, 2), 1),
        "shops": spec_of("shops", (1, 2), 1),
    }
    with pytest.raises(CheckpointError) as caught:
        table_files.check_tables(index, other, "step_3")
    for part in ("shops is not in", "'row': \\[3\\]", "'num_rows': 11"):
        assert part.replace("\\", "") in str(caught.value)
    with pytest.raises(CheckpointError, match="all workers and the coordinator must see"):
        table_files.read_index(tmp_path / "nowhere")


def model_of() -> keras.Model:
    return recommender(keras.optimizers.Adam(0.05), Embedding("bought", 4, "hash"))


@pytest.mark.full
def test_a_run_goes_on_with_its_tables(tmp_path: Path):
    x, y = ratings()
    how = {"batch_size": 16, "shuffle": False, "verbose": 0, "keep": 2}
    keys = np.arange(10)
    with ParameterServer() as strategy:
        whole = model_of()
        strategy.fit(whole, x, y, epochs=4, batch_size=16, shuffle=False, verbose=0)
        expected = table_of(strategy, whole, "bought").lookup(keys)
    with ParameterServer() as strategy:
        strategy.fit(model_of(), x, y, epochs=3, checkpoint=tmp_path, **how)
    tables = sorted(path.name for path in tmp_path.glob("*tables*"))
    assert len(tables) == 2  # of the checkpoints that are kept
    assert tables[-1] == mw.read_checkpoint(tmp_path).notes["tables"]
    with ParameterServer() as strategy:  # new servers
        model = model_of()
        strategy.fit(model, x, y, epochs=4, checkpoint=tmp_path, **how)
        np.testing.assert_array_equal(table_of(strategy, model, "bought").lookup(keys), expected)
    assert apart(whole, model) == 0
    with ParameterServer() as strategy:
        other = recommender(keras.optimizers.Adam(0.05), Embedding("others", 4, "hash"))
        with pytest.raises(CheckpointError, match="others is not in the checkpoint"):
            strategy.fit(other, x, y, epochs=5, checkpoint=tmp_path, **how)
