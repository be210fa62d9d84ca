"""The helpers for tests: they find what differs, and can fail."""

from __future__ import annotations

import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.testing import run_in_fresh_process, tree_allclose, tree_differences

# Trees


def test_trees_agree_whatever_their_layout_dtype_or_kind_of_array():
    mesh = mw.create_mesh({"batch": 8})
    spread = jax.device_put(np.arange(8.0), mw.Layout(["batch"], mesh).sharding)
    actual = {"a": spread, "b": (jnp.bfloat16(0.5), 1 + 2j), "c": [True, 3, None], "key": "text"}
    expected = {"a": np.arange(8), "b": (0.5, np.complex64(1 + 2j)), "c": [True, 3, None]}
    assert tree_allclose(actual, {**expected, "key": "text"})
    assert tree_differences(actual, {**expected, "key": "text"}) == []


def test_every_leaf_that_differs_is_listed_with_its_path_and_largest_difference():
    actual = {
        "kernel": np.array([[1.0, 2.0], [3.0, 4.0]]),
        "bias": np.zeros(3),
        "steps": 7,
        "only_here": 1.0,
        "right": 1.0,
    }
    expected = {
        "kernel": np.array([[1.0, 2.5], [3.0, 5.0]]),
        "bias": np.zeros((3, 1)),
        "steps": 8,
        "only_there": 1.0,
        "right": 1.0,
    }
    with pytest.raises(AssertionError) as error:
        tree_allclose(actual, expected, rtol=1e-3)
    assert str(error.value).splitlines() == [
        "5 of 6 leaves differ (rtol=0.001, atol=0.0):",
        "  ['bias']: has dims (3,), expected (3, 1)",
        "  ['kernel']: 2 of 4 elements differ, most at (1, 1): 4.0 and 5.0, by 1 (relative 0.2)",
        "  ['only_here']: is only in the actual tree",
        "  ['steps']: 1 of 1 elements differ, most: 7 and 8, by 1 (relative 0.125)",
        "  ['only_there']: is only in the expected tree",
    ]


def test_differences_are_data_as_well():
    (difference,) = tree_differences([1.0, np.array([2.0, 2.0])], [1.0, np.array([2.0, 2.25])])
    assert (difference.path, difference.largest) == ("[1]", 0.25)
    (difference,) = tree_differences(np.ones(2), np.zeros(2))
    assert difference.path == "the array"


@pytest.mark.parametrize(
    ("actual", "expected", "tolerances", "agree"),
    [
        (1.0, 1.0 + 1e-7, {}, True),
        (1.0, 1.0 + 1e-5, {}, False),
        (1.0, 1.0 + 1e-5, {"rtol": 1e-4}, True),
        (0.0, 1e-9, {}, False),
        (0.0, 1e-9, {"atol": 1e-8}, True),
        (np.nan, np.nan, {"atol": 1.0}, False),
        (1.0, np.nan, {"atol": 1.0}, False),
        (np.inf, np.inf, {}, True),
        (np.inf, -np.inf, {"atol": 1.0}, False),
        (np.inf, 1.0, {"atol": 1.0}, False),
        (1.0, np.inf, {"atol": 1.0}, False),
        (1 + 1j, 1 + 1.1j, {}, False),
        (1 + 1j, 1 + 1.1j, {"atol": 0.2}, True),
        (1.0 + 0j, 1.0, {}, True),
        (2**60, 2**60 + 1, {"rtol": 0.1}, False),
        (True, False, {"atol": 2.0}, False),
        (True, 1, {}, True),
        ("a", "b", {}, False),
        (np.zeros(0), np.zeros(0), {}, True),
        (np.zeros(0), np.zeros((0, 1)), {}, False),
        (jnp.bfloat16(1), jnp.bfloat16(1.0078125), {}, False),
        (jax.random.key(0), jax.random.key(0), {}, True),
        (jax.random.key(0), jax.random.key(1), {}, False),
    ],
)
def test_what_agrees_and_what_does_not(actual, expected, tolerances, agree):
    assert (tree_differences(actual, expected, **tolerances) == []) is agree


# Fresh processes


def test_code_runs_afresh_and_what_it_prints_comes_back():
    out = run_in_fresh_process(
        """
        import os, sys
        print("jax" in sys.modules, os.environ.get("NPROC"), os.environ["COLOUR"])
        """,
        env={"COLOUR": "blue"},
    )
    assert os.environ["NPROC"]
    assert out == "False None blue\n"


def test_a_process_that_fails_shows_its_own_words():
    with pytest.raises(AssertionError, match=r"(?s)status 3.*said.*also said"):
        run_in_fresh_process(
            "import sys; print('said'); print('also said', file=sys.stderr); sys.exit(3)"
        )
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_in_fresh_process("1 / 0")


def test_a_process_that_hangs_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        run_in_fresh_process("import time; time.sleep(60)", timeout_s=0.5)
