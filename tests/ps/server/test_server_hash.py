"""Tables whose rows are made when a key is first used."""

from __future__ import annotations

import numpy as np
import pytest
from asking import Asking
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.ps.server.core import ServerCore


def hashed(name: str = "t", kind: str = "uniform", seed: int = 3, **init) -> Asking:
    server = Asking()
    assert server.table(name, [0, 4], kind=kind, seed=seed, rows=None, hash=True, **init)
    return server


KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30)


@given(st.lists(KEYS, min_size=1, max_size=5), st.randoms())
def test_a_row_depends_on_its_key_alone(lookups, random) -> None:
    one, other = hashed(), hashed()
    keys = np.array([key for keys in lookups for key in keys])
    for part in lookups:
        one.ask("lookup", np.array(part), name="t", make=True)
    mixed = keys.copy()
    random.shuffle(mixed)
    other.ask("lookup", mixed, name="t", make=True)
    (ours,), (theirs,) = (server.ask("lookup", keys, name="t").arrays for server in (one, other))
    assert np.array_equal(ours, theirs)
    assert len(one.ask("keys", name="t").arrays[0]) == len(set(keys.tolist()))


def test_looking_without_making() -> None:
    server = hashed()
    keys = np.array([10**12, 5])
    actual = server.ask("lookup", keys, name="t", make=False).arrays[0]
    assert server.read("t")[0].shape == (0, 4)
    assert np.array_equal(server.ask("lookup", keys[1:], name="t", make=True).arrays[0], actual[1:])
    server.push(("t", "rows_add", [keys[1:], np.ones((1, 4), "f")]))
    again = server.ask("lookup", keys, name="t", make=False).arrays[0]
    assert np.array_equal(again, actual + np.array([[0], [1]], "f"))
    assert server.read("t")[0].shape == (1, 4)


def test_a_hash_table_learns_as_a_plain_one_does() -> None:
    """Also where it grows between the steps, and the optimizer remembers."""
    server, plain = hashed(kind="zeros"), Asking()
    plain.table("t", [2000, 4])
    random = np.random.default_rng(0)
    for one in (server, plain):
        one.optimizer("Adagrad", ["t"], learning_rate=0.1)
    for step in range(6):
        rows = random.integers(0, 200 * (step + 1), size=300)
        values = random.normal(size=(300, 4)).astype("f")
        server.push(("t", "rows_gradient", [rows * 7 - 50, values]))
        plain.push(("t", "rows_gradient", [rows, values]))
    keys = server.ask("keys", name="t").arrays[0]
    assert len(keys) > 400
    assert np.array_equal(server.read("t")[0], plain.read("t")[0][(keys + 50) // 7])
    slots = [one.ask("slots", names=["t"]).arrays[0] for one in (server, plain)]
    assert np.array_equal(slots[0], slots[1][(keys + 50) // 7])


def test_a_table_is_loaded_by_its_keys() -> None:
    one, other = hashed(), hashed(seed=9)
    for server in (one, other):
        server.optimizer("Adam", ["t"])
    random = np.random.default_rng(1)
    for keys in (random.integers(0, 50, 20), random.integers(0, 900, 600)):
        one.push(("t", "rows_gradient", [keys, random.normal(size=(len(keys), 4)).astype("f")]))
    other.push(("t", "rows_gradient", [np.array([10**6]), np.ones((1, 4), "f")]))
    keys, (values,) = one.ask("keys", name="t").arrays[0], one.read("t")
    reply = one.ask("slots", names=["t"])
    head = {"tables": ["t"], "slots": reply.head["slots"], "steps": reply.head["steps"]}
    other.ask("load", keys, values, *reply.arrays, **head)
    more = np.concatenate([keys[:5], keys[-5:]])
    for server in (one, other):
        server.push(("t", "rows_gradient", [more, np.ones((10, 4), "f")]))
    assert np.array_equal(one.read("t")[0], other.read("t")[0])
    assert np.array_equal(one.ask("keys", name="t").arrays[0], keys)
    with pytest.raises(mw.ArrayError, match=r"keys of shape \[2\] and values of \[1, 4\]"):
        other.ask("load", np.array([1, 2]), np.ones((1, 4)), tables=["t"])
    other.table("plain", [2])
    with pytest.raises(mw.ArrayError, match="'plain' is not a hash table and takes no keys"):
        other.ask("load", np.array([1, 2]), np.ones((1, 4)), tables=["plain"])
    with pytest.raises(mw.ArrayError, match="a load that needs 2 arrays brings 1"):
        other.ask("load", np.array([1, 2]), tables=["t"])


def test_keys_may_be_of_any_integer_dtype() -> None:
    server = hashed()
    for dtype in (np.int8, np.int32, np.uint16):
        server.ask("lookup", np.array([3, 100, 3], dtype), name="t", make=True)
    server.ask("lookup", np.array([2**64 - 1], np.uint64), name="t", make=True)
    assert sorted(server.ask("keys", name="t").arrays[0].tolist()) == [-1, 3, 100]


def test_a_hash_table_does_not_outgrow_the_memory() -> None:
    server = Asking(ServerCore(memory_bytes=20_000))
    server.table("t", [0, 4], rows=None, hash=True)
    server.ask("lookup", np.arange(600), name="t", make=True)
    with pytest.raises(mw.TaskError, match=r"'t' takes .* KiB more on ps:0, which holds"):
        server.ask("lookup", np.arange(2000), name="t", make=True)
    assert server.read("t")[0].shape == (600, 4)
    assert server.ask("lookup", np.array([599, 10**9]), name="t").arrays[0].shape == (2, 4)


def test_hash_tables_are_made_once() -> None:
    server = hashed()
    assert not server.table("t", [0, 4], kind="uniform", seed=3, rows=None, hash=True)
    with pytest.raises(mw.ArrayError, match=r"as a hash table of rows float32\[4\]; it is asked"):
        server.table("t", [0, 5], kind="uniform", rows=None, hash=True)
    with pytest.raises(mw.ArrayError, match="as a hash table of rows"):
        server.table("t", [0, 4])
    server.table("plain", [2])
    with pytest.raises(mw.TaskError, match="'plain' is not a hash table and has no keys"):
        server.ask("keys", name="plain")
