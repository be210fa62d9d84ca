"""Processes of one host sum in memory that they share: the memory, and real processes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from meshwright.launch import neighbors
from meshwright.launch.group import run_group
from meshwright.launch.group_options import GroupOptions
from meshwright.launch.neighbors import Neighbors, Span

PROGRAM = str(Path(__file__).with_name("shared_sums.py"))

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@contextlib.contextmanager
def group(count: int) -> Iterator[list[Neighbors]]:
    """Neighbours that are threads of this process."""
    peers: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for a in range(count):
        for b in range(a):
            peers[a][b], peers[b][a] = socket.socketpair()
    memory = os.memfd_create("test")
    files = [memory, *(os.dup(memory) for _ in range(count - 1))]
    members = [Neighbors(rank, peers[rank], files[rank]) for rank in range(count)]
    try:
        yield members
    finally:
        for member in members:
            member.close()


def in_threads(tasks: Sequence[Callable[[], None]]) -> list[Exception | None]:
    errors: list[Exception | None] = [None] * len(tasks)

    def run(i: int) -> None:
        try:
            tasks[i]()
        except Exception as error:
            errors[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def spans(arrays: Sequence[np.ndarray]) -> list[Span]:
    return [Span(array.ctypes.data, array.nbytes) for array in arrays]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("sizes", [(1,), (5, 0, 1000, 3), (300_000, 7, 300_001)])
def test_all_get_the_same_sums_in_place_or_not(count, sizes, monkeypatch):
    monkeypatch.setattr(neighbors, "_WINDOW", 1 << 20)
    draw = np.random.default_rng(count)
    values = [[draw.normal(size=size).astype("f") for size in sizes] for _ in range(count)]
    expected = [sum(value[i].astype("d") for value in values) for i in range(len(sizes))]
    with group(count) as members:
        for targets in ([[np.zeros_like(v) for v in own] for own in values], values):
            errors = in_threads(
                [
                    functools.partial(member.sum, spans(own), spans(target))
                    for member, own, target in zip(members, values, targets, strict=True)
                ]
            )
            assert errors == [None] * count
            for sums in targets:
                for total, first, right in zip(sums, targets[0], expected, strict=True):
                    np.testing.assert_array_equal(total, first)
                    np.testing.assert_allclose(total, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [2, 3])
def test_sums_of_changing_sizes_follow_each_other(count):
    def run(member: Neighbors) -> None:
        for size in (10, 3000, 20, 100_000, 50, 100_001, 200_000, 7):
            for _ in range(3):
                values = np.full(size, member.rank + 1.0, "f")
                member.sum(spans([values]), spans([values]))
                np.testing.assert_array_equal(values, np.full(size, count * (count + 1) / 2, "f"))

    with group(count) as members:
        tasks = [functools.partial(run, member) for member in members]
        assert in_threads(tasks) == [None] * count


def test_one_that_sums_something_else_or_ends_is_an_error_in_the_others():
    small, large = np.ones(10, "f"), np.ones(1000, "f")
    with group(2) as (one, other):
        tasks = [
            lambda: one.sum(spans([small]), spans([small])),
            lambda: other.sum(spans([large]), spans([large])),
        ]
        errors = in_threads(tasks)
        assert [type(error) for error in errors] == [ConnectionError] * 2
        assert "rank 1 sums 4000 bytes and rank 0 40: their programs differ" in str(errors[0])
    with group(2) as (one, other):
        other.close()
        (error,) = in_threads([lambda: one.sum(spans([small]), spans([small]))])
        assert "rank 1 has ended while gradients were summed" in str(error)


@pytest.mark.alone
def test_processes_of_one_host_train_in_shared_memory_as_through_gloo(capfd):
    assert run_group([PROGRAM], GroupOptions(2)) == 0
    text = capfd.readouterr().out
    matches = re.findall(r"^\[rank:(\d)\] (shared|apart) (.*)$", text, re.MULTILINE)
    assert {(rank, way) for rank, way, _ in matches} == set(product("01", ("shared", "apart")))
    assert len({losses for *_, losses in matches}) == 1, matches
    assert "[rank:0] refused: rank 1 has ended while gradients were summed" in text


def test_a_switch_leaves_shared_memory_out(monkeypatch):
    assert neighbors._host()
    monkeypatch.setenv(neighbors.SHARED_MEMORY, "0")
    assert not neighbors._host()
