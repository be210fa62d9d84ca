"""Where shards come to lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ClusterError
from meshwright.ps.shared.consistency import Async, Backup, Stale, Sync, consistency_of
from meshwright.ps.shared.placing import by_bytes, placed, placing, round_robin

SIZES = st.lists(st.integers(0, 10**9), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 6))
def test_by_bytes_is_within_one_shard_of_even(sizes, servers):
    loads = [0] * servers
    for size, server in zip(sizes, by_bytes(sizes, loads, 0), strict=True):
        loads[server] += max(1, size)
    assert max(loads) - min(loads) <= max(1, *sizes)


@given(SIZES, st.integers(1, 6), st.integers(0, 100))
def test_round_robin_goes_on_where_it_was(sizes, servers, before):
    places = round_robin(sizes, [0] * servers, before)
    assert places == [(before + index) % servers for index in range(len(sizes))]


def test_one_large_table_leaves_the_small_ones_to_the_others():
    assert by_bytes([10**6, 10, 10, 10], [0, 0], 0) == [0, 1, 1, 1]
    assert round_robin([10**6, 10, 10, 10], [0, 0], 0) == [0, 1, 0, 1]


def test_shards_have_names_of_their_own():
    spec = placed("w", (5, 3), "float32", num_shards=3, loads_bytes=[0, 0])
    assert [shard.name for shard in spec.shards] == ["w/0", "w/1", "w/2"]
    assert [spec.shard_shape(shard) for shard in spec.shards] == [(2, 3), (2, 3), (1, 3)]
    assert placed("b", (), "float32", num_shards=1, loads_bytes=[0]).shards[0].name == "b"


def test_an_unknown_rule_is_named():
    with pytest.raises(ClusterError, match="'bytes', 'round_robin'"):
        placing("random")


@pytest.mark.parametrize(
    ("choice", "value"),
    [("async", Async()), ("sync", Sync()), (Stale(2), Stale(2)), (Backup(1), Backup(1))],
)
def test_consistency_is_a_value(choice, value):
    assert consistency_of(choice) == value
    assert hash(consistency_of(choice)) == hash(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: consistency_of("later"), "received 'later'"),
        (lambda: Stale(-1), "Stale needs .* received -1"),
        (lambda: Stale(True), "Stale needs .* received True"),
        (lambda: Backup(0), "Backup needs .* received 0"),
        (lambda: Async(compensation=-1.0), "compensation must be .* received -1.0"),
        (lambda: Stale(1, adaptive=True), "give compensation= too"),
    ],
)
def test_wrong_consistency_is_refused(make, message):
    with pytest.raises(ClusterError, match=message):
        make()
