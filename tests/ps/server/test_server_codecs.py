"""Gradients that were made smaller for the wire."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from asking import Asking
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

import meshwright as mw
from meshwright.ps.server.codecs import decode_gradient


@given(hn.arrays(np.float32, 20, elements=st.floats(width=32)))
def test_bfloat16_is_that_of_ml_dtypes(values) -> None:
    with np.errstate(over="ignore"):
        halves = values.astype(ml_dtypes.bfloat16)
    back = decode_gradient("bfloat16", [halves.view(np.uint16)], values.shape)
    assert np.array_equal(back, halves.astype(np.float32), equal_nan=True)


def stepped(arrays, codec, op="gradient") -> np.ndarray:
    server = Asking()
    server.table("w", [4, 2])
    server.optimizer("SGD", ["w"], learning_rate=1.0)
    server.push(("w", op, arrays, {"codec": codec}))
    return -server.read("w")[0]


def test_a_server_decodes_what_was_made_smaller() -> None:
    gradient = np.arange(8, dtype="f").reshape(4, 2) / 3
    half = gradient.astype(np.float16)
    assert np.array_equal(stepped([half], "float16"), half.astype("f"))
    brain = gradient.astype(ml_dtypes.bfloat16)
    assert np.array_equal(stepped([brain.view(np.uint16)], "bfloat16"), brain.astype("f"))
    top = stepped([np.array([7, 0], np.int32), np.array([5.0, 3.0], "f")], "topk")
    assert top.ravel().tolist() == [3, 0, 0, 0, 0, 0, 0, 5]
    by_rows = stepped([np.array([2, 2]), half[:2]], "float16", "rows_gradient")
    np.testing.assert_allclose(by_rows[2], half[:2].astype("f").sum(axis=0), rtol=1e-6)


def test_what_does_not_decode_is_refused() -> None:
    with pytest.raises(mw.ArrayError, match=r"codec 'zip'; expected one of None, 'float16'"):
        stepped([np.zeros(8, "f")], "zip")
    with pytest.raises(mw.ArrayError, match="codec 'topk' takes 2 arrays; received 1"):
        stepped([np.zeros(8, "f")], "topk")
    with pytest.raises(mw.ArrayError, match="places outside an array of 8 elements"):
        stepped([np.array([8]), np.zeros(1, "f")], "topk")
    with pytest.raises(mw.ArrayError, match=r"int64\[1\] and float32\[2\]"):
        stepped([np.array([1]), np.zeros(2, "f")], "topk")
    with pytest.raises(mw.ArrayError, match="16 bits as uint16, not float32"):
        stepped([np.zeros((4, 2), "f")], "bfloat16")
    with pytest.raises(mw.ArrayError, match=r"of shape \[4, 2\]; received \[8\]"):
        stepped([np.zeros(8, np.float16)], "float16")
    with pytest.raises(mw.ArrayError, match="takes floats; received int64"):
        stepped([np.zeros((4, 2), np.int64)], None)
