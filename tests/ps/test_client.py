"""The servers as one: every operation against one NumPy array, however it is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ArrayError, TaskError
from meshwright.ps.server.core import ServerCore
from meshwright.ps.shared.client import Servers
from meshwright.ps.shared.placing import placed
from meshwright.ps.shared.pushing import Stamp
from meshwright.ps.wire.failures import failure
from meshwright.ps.wire.memory import MemoryChannel
from meshwright.ps.worker.updates import Update


def made_servers(count: int) -> Servers:
    return Servers([MemoryChannel(ServerCore(i), f"ps:{i}") for i in range(count)])


def table(servers: Servers, value: np.ndarray, num_shards: int, name: str = "w"):
    spec = placed(
        name, value.shape, value.dtype.name, num_shards=num_shards, loads_bytes=[0] * len(servers)
    )
    servers.create(spec, {"kind": "value"}, value)
    return spec


@given(st.integers(1, 4), st.integers(1, 5), st.integers(5, 12), st.data())
@settings(max_examples=40, deadline=None)
def test_rows_and_wholes_agree_with_numpy(num_servers, num_shards, rows, data):
    value = np.arange(rows * 2, dtype="float32").reshape(rows, 2)
    servers = made_servers(num_servers)
    spec = table(servers, value, num_shards)
    picked = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=8)), np.int64)
    change = np.ones((len(picked), 2), "float32")
    answer = servers.push(
        [
            Update(spec, "add", (np.full((rows, 2), 2.0, "float32"),)),
            Update(spec, "rows_add", (picked, change)),
        ],
        then_read=[spec],
    )
    expected = value + 2
    np.add.at(expected, picked, change)
    np.testing.assert_array_equal(servers.read([spec])[0], expected)
    np.testing.assert_array_equal(answer.values[0], expected)
    np.testing.assert_array_equal(servers.lookup(spec, picked), expected[picked])


def test_only_touched_servers_get_a_message():
    servers = made_servers(3)
    spec = table(servers, np.zeros((9, 1), "float32"), 3)
    answer = servers.push([Update(spec, "rows_add", (np.array([1]), np.ones((1, 1), "float32")))])
    assert [server.server for server in answer.servers] == [0]
    everywhere = servers.push([], Stamp(5, round=0, of=1), everywhere=True)
    assert [server.server for server in everywhere.servers] == [0, 1, 2]


def test_a_step_is_applied_once_on_each_server():
    servers = made_servers(2)
    spec = table(servers, np.zeros(4, "float32"), 2)
    update = Update(spec, "add", (np.ones(4, "float32"),))
    half = Update(spec, "rows_add", (np.array([0]), np.ones(1, "float32")))
    servers.push([half], Stamp(7, 1, "a"))  # the first attempt reached one server, and no more
    again = servers.push([update], Stamp(7, 2, "b"))
    assert [server.applied for server in again.servers] == [False, True]
    np.testing.assert_array_equal(servers.read([spec])[0], [1, 0, 1, 1])


def test_a_random_table_does_not_depend_on_its_cut():
    init = {"kind": "normal", "params": {}, "seed": 3}
    tables = []
    for num_shards in (1, 2, 5):
        servers = made_servers(2)
        spec = placed("w", (1000, 8), "float32", num_shards=num_shards, loads_bytes=[0, 0])
        servers.create(spec, init)
        tables.append(servers.read([spec])[0])
    assert tables[0].std() > 0
    np.testing.assert_array_equal(tables[0], tables[1])
    np.testing.assert_array_equal(tables[0], tables[2])


def test_hashed_rows_are_found_again_on_their_servers():
    servers = made_servers(2)
    spec = placed("h", (4, 3), "float32", num_shards=2, loads_bytes=[0, 0], is_hash=True)
    servers.create(spec, {"kind": "zeros", "params": {}, "seed": 0})
    keys = np.array([10**12, 3, 8, 3])
    values = np.arange(12, dtype="float32").reshape(4, 3)
    servers.push([Update(spec, "rows_add", (keys, values))])
    np.testing.assert_array_equal(
        servers.lookup(spec, np.array([3, 10**12])), [values[1] + values[3], values[0]]
    )


def test_reading_a_key_makes_no_row():
    servers = made_servers(2)
    spec = placed("h", (0, 3), "float32", num_shards=2, loads_bytes=[0, 0], is_hash=True)
    servers.create(spec, {"kind": "normal", "params": {}, "seed": 3})
    keys = np.array([10**12, 3, 8])
    actual = servers.lookup(spec, keys)
    assert actual.std() > 0
    assert servers.read([spec])[0].shape == (0, 3)
    np.testing.assert_array_equal(servers.lookup(spec, keys, make=True), actual)
    assert servers.read([spec])[0].shape == (3, 3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([9], "row 9"), ([-1], "row -1"), ([0.5], "whole numbers"), ([[1]], "dim")],
)
def test_wrong_rows_are_named(rows, message):
    servers = made_servers(2)
    spec = table(servers, np.zeros((9, 1), "float32"), 2)
    with pytest.raises(ArrayError, match=message):
        servers.lookup(spec, np.array(rows))


def test_an_error_of_one_server_leaves_no_answer_behind():
    servers = made_servers(2)
    spec = table(servers, np.zeros(2, "float32"), 2)
    missing = placed("none", (2,), "float32", num_shards=2, loads_bytes=[0, 0])
    with pytest.raises(TaskError, match="has no variable"):
        servers.read([spec, missing])
    np.testing.assert_array_equal(servers.read([spec])[0], [0, 0])


def test_a_push_that_one_server_refuses_tells_who_has_applied_it():
    servers = Servers([MemoryChannel(ServerCore(i, memory_bytes=m), f"ps:{i}")
                       for i, m in enumerate((None, 20_000))])  # fmt: skip
    spec = placed("h", (0, 3), "float32", num_shards=2, loads_bytes=[0, 0], is_hash=True)
    servers.create(spec, {"kind": "zeros", "params": {}, "seed": 0})
    many = np.arange(4000)
    update = Update(spec, "rows_add", (many, np.ones((4000, 3), "float32")))
    with pytest.raises(TaskError, match=r"takes .* more on ps:1") as caught:
        servers.push([update], Stamp(7))
    message = (
        "This push of step 7 was applied on ps:0, and not on ps:1: made again, it counts twice"
    )
    assert message in caught.value.__notes__[-1]
    assert message in failure(caught.value).head["notes"][-1]  # as the coordinator shows it
    refused = placed("none", (2,), "float32", num_shards=1, loads_bytes=[0, 9])
    with pytest.raises(TaskError) as caught:
        servers.push([Update(refused, "add", (np.ones(2, "float32"),))])
    assert "applied on" not in "".join(caught.value.__notes__)


def test_staleness_counts_what_others_applied_since_the_last_read():
    core = ServerCore(0)
    mine = Servers([MemoryChannel(core, "ps:0", identity="a")])
    other = Servers([MemoryChannel(core, "ps:0", identity="b")])
    spec = table(mine, np.zeros(1, "float32"), 1)
    update = Update(spec, "add", (np.ones(1, "float32"),))
    assert mine.push([update]).servers[0].staleness == 0  # nothing was read
    mine.read([spec])
    for _ in range(3):
        other.push([update])
    assert mine.push([update]).servers[0].staleness == 3
