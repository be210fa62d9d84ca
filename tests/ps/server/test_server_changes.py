"""A server says which rows have changed since it was asked, and which keys it has no longer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from asking import Asking

import meshwright as mw
from meshwright.ps.server.core import ServerCore

ONES = np.ones((2, 3), "f")


def since(server: Asking, name: str, answer=None):
    head = {} if answer is None else {key: answer.head[key] for key in ("life", "mark")}
    return server.ask("changes", name=name, **head)


def changed(server: Asking, name: str, answer):
    answer = since(server, name, answer)
    assert answer.head["known"]
    return answer, [sorted(array.tolist()) for array in answer.arrays]


@pytest.mark.parametrize("optimizer", [None, "Adam"])
def test_rows_of_a_plain_table_that_changed(optimizer: str | None) -> None:
    server = Asking()
    server.table("t", [1000, 3])
    op = "rows_add"
    if optimizer:
        server.optimizer(optimizer, ["t"])
        op = "rows_gradient"
    first = since(server, "t")
    assert not first.head["known"]
    server.push(("t", op, [np.array([7, 3]), ONES]))
    second, result = changed(server, "t", first)
    assert result == [[3, 7], []]
    server.push(("t", op, [np.array([7, 9]), ONES]))
    assert changed(server, "t", second)[1] == [[7, 9], []]
    assert changed(server, "t", first)[1] == [[3, 7, 9], []]  # another one may ask, too
    last, result = changed(server, "t", since(server, "t"))
    assert result == [[], []]
    whole = op.removeprefix("rows_")
    server.push(("t", whole, [np.ones((1000, 3), "f")]))
    assert changed(server, "t", last)[1] == [list(range(1000)), []]


def test_keys_that_were_made_and_removed() -> None:
    server = Asking()
    server.table("t", [0, 3], kind="normal", hash=True)
    server.ask("lookup", np.array([5, 1 << 50]), name="t", make=True)
    first = since(server, "t")
    assert first.arrays[0].tolist() == [5, 1 << 50]
    server.push(("t", "rows_add", [np.array([-4, 5]), ONES]))
    server.ask("lookup", np.arange(100, 500), name="t", make=True)  # the table grows
    second, result = changed(server, "t", first)
    assert result == [[-4, 5, *range(100, 500)], []]
    server.ask("load", np.array([5, 8]), ONES, tables=["t"])
    third, result = changed(server, "t", second)
    assert result == [[5, 8], [-4, *range(100, 500), 1 << 50]]
    server.push(("t", "rows_assign", [np.array([-4, 200]), ONES]))
    assert changed(server, "t", third)[1] == [[-4, 200], []]
    assert changed(server, "t", second)[1][0] == [-4, 5, 8, 200]
    assert -4 not in changed(server, "t", second)[1][1]


def test_after_a_restart_all_rows_are_asked_for(tmp_path: Path) -> None:
    server = Asking(ServerCore(snapshot_dir=tmp_path))
    server.table("t", [0, 3], kind="normal", hash=True)
    server.push(("t", "rows_add", [np.array([1, 2]), ONES]))
    first = since(server, "t")
    server.ask("snapshot", path="s")
    server.push(("t", "rows_add", [np.array([1, 3]), ONES]))
    second = since(server, "t", first)
    server.ask("restore", path="s")
    again = since(server, "t", second)
    assert not again.head["known"]
    assert again.arrays[0].tolist() == [1, 2]
    assert not since(server, "t", second).head["known"]
    server.push(("t", "rows_add", [np.array([1, 3]), ONES]))
    assert changed(server, "t", again)[1] == [[1, 3], []]


def test_a_scalar_has_no_rows_to_ask_for() -> None:
    server = Asking()
    server.value("s", np.float32(1))
    with pytest.raises(mw.ArrayError, match="variable 's' is a scalar, and has no rows"):
        since(server, "s")
