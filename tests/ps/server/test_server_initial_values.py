"""First values: the same however a table is cut, and of the law that was asked for."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
from asking import Asking
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.ps.server import initial_values
from meshwright.ps.server.initial_values import KINDS, Draw, rows_by_key, rows_of

RANDOM = [k for k in KINDS if k not in ("zeros", "ones", "constant")]


@given(
    kind=st.sampled_from(RANDOM),
    rows=st.integers(1, 300),
    cuts=st.sets(st.integers(1, 299), max_size=4),
    seed=st.integers(0, 2**63),
)
def test_a_table_does_not_depend_on_how_it_is_cut(kind, rows, cuts, seed) -> None:
    shape, size = (rows, 1000), initial_values.block_rows((rows, 1000))
    assert 1 < size < 100  # so that tables have several blocks
    draw = Draw.of({"kind": kind}, shape)
    whole = rows_of(draw, seed, shape, 0, rows, np.dtype("f"))
    bounds = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    parts = [
        rows_of(draw, seed, shape, low, high, np.dtype("f"))
        for low, high in itertools.pairwise(bounds)
    ]
    assert np.array_equal(np.concatenate(parts), whole)


def test_servers_make_their_shards_of_one_table() -> None:
    one, two = Asking(), Asking()
    init = {"kind": "normal", "seed": 4, "full_shape": [100, 3]}
    one.table("t", [100, 3], **init, rows=[0, 100])
    two.table("t#0", [37, 3], **init, rows=[0, 37])
    two.table("t#1", [63, 3], **init, rows=[37, 100])
    assert np.array_equal(one.read("t")[0], np.concatenate(two.read("t#0", "t#1")))
    assert one.table("other", [100, 3], **{**init, "seed": 5})
    first, second = one.read("t", "other")
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("kind", [k for k in RANDOM if k not in ("uniform", "normal")])
@pytest.mark.parametrize("by_key", [False, True])
def test_values_are_spread_as_those_of_keras(kind, by_key) -> None:
    shape = (400, 300)
    draw = Draw.of({"kind": kind}, shape)
    if by_key:
        values = rows_by_key(draw, 7, np.arange(400) * 7919 - 5, shape[1:], np.dtype("f"))
    else:
        values = rows_of(draw, 7, shape, 0, 400, np.dtype("f"))
    keras.utils.set_random_seed(1)
    initializer: Any = keras.initializers.get(kind)
    theirs = np.asarray(initializer(shape))
    assert (values.shape, values.dtype) == (shape, np.float32)
    for share in (0.001, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999):
        ours, expected = np.quantile(values, share), np.quantile(theirs, share)
        assert abs(ours - expected) < (0.03 if 0.1 <= share <= 0.9 else 0.15) * theirs.std()
    near = np.abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1])
    assert near < 0.02
    assert abs(values).max() <= abs(theirs).max() * 1.25


def test_every_key_has_its_own_row_whoever_makes_it() -> None:
    draw = Draw.of({"kind": "truncated_normal"}, (1, 5))
    keys = np.array([3, -9, 2**62, 0])
    rows = rows_by_key(draw, 1, keys, (5,), np.dtype("f"))
    again = rows_by_key(draw, 1, keys[::-1], (5,), np.dtype("f"))[::-1]
    assert np.array_equal(rows, again)
    assert len(np.unique(rows)) == 20
    assert not np.array_equal(rows, rows_by_key(draw, 2, keys, (5,), np.dtype("f")))


def test_plain_kinds_and_numbers() -> None:
    server = Asking()
    server.table("ones", [2], kind="ones")
    server.table("scalar", [], kind="constant", value=2.5)
    server.table("count", [], "int64", kind="constant", value=7)
    server.table("far", [5000], kind="uniform", minval=3.0, maxval=4.0)
    server.table("nested", [5000], kind="normal", params={"mean": 9.0, "stddev": 0.5})
    assert server.read("ones")[0].tolist() == [1, 1]
    assert server.read("scalar")[0] == 2.5
    assert server.read("count")[0] == 7
    assert 3 <= server.read("far")[0].min() < 3.01
    assert abs(server.read("nested")[0].mean() - 9) < 0.05


def test_what_cannot_be_made_is_refused() -> None:
    server = Asking()
    with pytest.raises(mw.ArrayError, match="unknown initializer"):
        server.table("t", [2], kind="magic")
    with pytest.raises(mw.ArrayError, match="'constant' takes value; received valeu"):
        server.table("t", [2], kind="constant", params={"valeu": 3})
    with pytest.raises(mw.ArrayError, match="'t' of int32 cannot be made by 'normal'"):
        server.table("t", [2], "int32", kind="normal")
    with pytest.raises(mw.ArrayError, match=r"does not fit rows 0 to 3 of \[9, 2\]"):
        server.table("t", [2, 2], rows=[0, 3], full_shape=[9, 2])
    with pytest.raises(mw.ArrayError, match="'t': dtype bfloat16 is not supported by servers"):
        server.table("t", [2], "bfloat16")
    with pytest.raises(mw.ArrayError, match=r"of shape \[2\] is given values of \[\[3\]\]"):
        server.ask("create", np.ones(3), name="t", shape=[2], dtype="<f4", init={"kind": "value"})
