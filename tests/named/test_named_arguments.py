"""Arguments that are no arrays: wrong numbers and keys are errors that say what is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
import meshwright.named as mn

KEY = jax.random.key(0)


def row() -> mn.NamedArray:
    return mn.named(jnp.arange(8.0), "length:8")


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "slice from": (lambda: mn.slice(row(), "length", 0.5, 3), "begin must be a whole number"),
    "slice of": (lambda: mn.slice(row(), "length", 0, "3"), "size must be a whole number"),
    "slice traced": (
        lambda: jax.jit(lambda i: mn.slice(row(), "length", i, 3))(2),
        "begin is known only at run time",
    ),
    "index": (lambda: row()[{"length": slice(0.5, 2)}], "a bound must be a whole number"),
    "split": (lambda: mn.split(row(), "length", 2.5), "parts must be a whole number"),
    "split sizes": (lambda: mn.split(row(), "length", [2.5, 5.5]), "size must be a whole number"),
    "stack": (lambda: mn.stack([row()], "copy", 0.5), "position must be a whole number"),
    "stack nothing": (lambda: mn.stack(None, "copy"), "expected a list of named arrays"),
    "concat": (lambda: mn.concat("ab", "length"), "expected a list of named arrays"),
    "pad": (lambda: mn.pad(row(), "length", 1.5), "before must be a whole number"),
    "fori_loop": (lambda: mn.fori_loop(0, 2.5, lambda i, x: x, row()), "received a float32"),
    "fori_loop dims": (lambda: mn.fori_loop(row(), 3, lambda i, x: x, row()), "low must be one"),
    "normal": (lambda: mn.normal(KEY, "io:3", dtype="int32"), "dtype must be a floating-point"),
    "uniform": (lambda: mn.uniform(KEY, "io:3", dtype="complex64"), "received 'complex64'"),
    "no type": (lambda: mn.truncated_normal(KEY, "io:3", dtype="flot32"), "received 'flot32'"),
    "key": (lambda: mn.normal(7, "io:3"), "key must be one random key.*received 7"),
    "keys": (lambda: mn.bernoulli(jax.random.split(KEY, 3), "io:3"), "received 3 keys"),
    "floats as key": (lambda: mn.dropout(row(), jnp.ones(2), rate=0.5), "one random key"),
    "text": (lambda: row() + mn.clip(row(), "one", 1.0), "cannot make an array of"),
    "ragged": (lambda: mn.named([[1], [1, 2]], "x:2 y:2"), "cannot make an array of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(mw.MeshwrightError, match=text):
        call()


def test_numbers_of_numpy_and_raw_keys_are_taken() -> None:
    one = np.int64(1)
    assert mn.slice(row(), "length", one, np.int8(3)).array.tolist() == [1, 2, 3]
    assert len(mn.split(row(), "length", np.int64(2))) == 2
    assert mn.split(row(), "length", np.array([2, 6]))[1].size == 6
    assert mn.stack([row(), row()], "copy", one).shape == {"length": 8, "copy": 2}
    assert mn.fori_loop(one, jnp.int8(3), lambda i, x: x + i, row()).array[0] == 3
    assert mn.normal(jax.random.PRNGKey(0), "io:3").array[0] == mn.normal(KEY, "io:3").array[0]


def test_a_whole_probability() -> None:
    """1 is certain, as 1.0 is."""
    assert mn.bernoulli(KEY, "io:3", 1).array.all()
