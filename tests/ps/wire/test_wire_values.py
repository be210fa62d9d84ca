"""Values and messages: whatever may travel comes back equal and of the same type; no more may."""

from __future__ import annotations

import collections
import contextlib
import enum
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from meshwright.errors import ProtocolError, ShippingError
from meshwright.ps.wire import message as messages
from meshwright.ps.wire.message import Message, decode, encode
from meshwright.ps.wire.values import MOST_LEVELS, pack_value, unpack_value

DTYPES = st.one_of(
    npst.scalar_dtypes(),
    npst.byte_string_dtypes(),
    npst.unicode_string_dtypes(),
)
ANY_TEXT = st.text(st.characters(codec=None), max_size=8)  # lone surrogates too
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    st.complex_numbers(),
    ANY_TEXT,
    st.binary(max_size=8),
    npst.arrays(DTYPES, npst.array_shapes(min_dims=0, min_side=0, max_side=3)),
    DTYPES.flatmap(lambda dtype: npst.arrays(dtype, ())).map(lambda array: array[()]),
)
KEYS = st.one_of(st.integers(), ANY_TEXT, st.booleans(), st.tuples(st.integers(), ANY_TEXT))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type and, bit for bit, in content: NaN is itself, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def travelled(value: Any) -> Any:
    head, arrays = pack_value(value)
    result = decode(encode(Message("result", {"value": head}, arrays)))
    return unpack_value(result.head["value"], result.arrays)


@given(VALUES)
@settings(deadline=None)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(value, travelled(value))


def test_the_comparison_of_these_tests_can_fail() -> None:
    pairs = [(1, True), (0.0, -0.0), ((1,), [1]), (np.int32(1), np.int64(1)), ({1: 2}, {1: 3})]
    assert not any(same(one, other) for one, other in pairs)


def test_arrays_of_jax_come_back_as_those_of_numpy() -> None:
    value = {"a": jnp.arange(5.0), "b": (jnp.float32(2), jnp.ones((2, 3), jnp.bfloat16))}
    result = travelled(value)
    assert type(result["a"]) is type(result["b"][1]) is np.ndarray
    np.testing.assert_array_equal(result["a"], np.arange(5, dtype=np.float32))
    assert result["b"][1].dtype == ml_dtypes.bfloat16
    assert result["b"][0] == 2


Point = collections.namedtuple("Point", "x y")
Colour = enum.IntEnum("Colour", "RED")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "the value is a object"),
        ({"a": [1, {2, 3}]}, r"the value\['a'\]\[1\] is a set"),
        (Point(1, 2), r"is a test_wire_values\.Point"),
        (Colour.RED, r"is a test_wire_values\.Colour"),
        (np.array([None]), "is an array of dtype object"),
        (np.zeros(2, [("x", "f4")]), "is an array of dtype"),
        (jax.random.key(0), "is a .*PRNGKeyArray and not an array of numbers"),
        ({Point(1, 2): 3}, r"the key Point\(x=1, y=2\) of the value is a"),
        (lambda: 1, "is a function"),
    ],
)
def test_what_may_not_travel_is_named(value: object, named: str) -> None:
    with pytest.raises(ShippingError, match=named) as caught:
        pack_value(value)
    assert "What may travel: None, bool, int" in str(caught.value)


def test_every_part_that_may_not_travel_is_named_at_once() -> None:
    with pytest.raises(ShippingError) as caught:
        pack_value([{1}, 2, {"x": object()}])
    assert "the value[0] is a set." in str(caught.value)
    assert "the value[2]['x'] is a object." in str(caught.value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ShippingError, match=f"nested more than {MOST_LEVELS} levels deep"):
        pack_value(value)
    deep: list[Any] = []
    for _ in range(MOST_LEVELS - 1):
        deep = [deep]
    assert travelled(deep) == deep


@given(
    st.recursive(
        st.one_of(st.integers(-3, 12), st.text(max_size=2), st.binary(max_size=2)),
        lambda inner: st.lists(inner, max_size=4),
    )
)
def test_no_head_does_worse_than_a_protocol_error(head: Any) -> None:
    with contextlib.suppress(ProtocolError):
        unpack_value(head, (np.zeros(2),))


@given(st.binary(max_size=60))
def test_no_bytes_do_worse_than_a_protocol_error(content: bytes) -> None:
    for frames in ([content], [messages._PREFIX + content], [messages._PREFIX + content, content]):
        with contextlib.suppress(ProtocolError):
            decode(frames)


def frame(*parts: Any) -> bytes:
    packed: bytes = msgpack.packb(parts) or b""
    return messages._PREFIX + packed


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [frame("push", {})],
        [frame(1, {}, [], None)],
        [frame("push", {}, [], None), b"more"],
        [frame("push", {}, [["<f4", [3], b"too few"]], None)],
        [frame("push", {}, [["<f4", [3], None]], None)],
        [frame("push", {}, [["|O", [1], bytes(8)]], None)],
        [frame("push", {}, [["no dtype", [1], bytes(8)]], None)],
        [frame("push", {}, [["<f4", [-1], bytes(8)]], None)],
        [frame("push", {}, [["<f4", ["2"], bytes(8)]], None)],
        [frame("push", {}, [["<f4", [2], [0, 0]]], None)],
        [messages._PREFIX + pickle.dumps("push")],
    ],
)
def test_broken_messages_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


def test_another_version_is_refused_naming_both() -> None:
    theirs = encode(Message("push"))[0]
    theirs = bytes(theirs).replace(b"meshwright-ps/2\n", b"meshwright-ps/7\n")
    with pytest.raises(ProtocolError, match=r"speaks version 2 of the protocol.*peer version 7"):
        decode([theirs])
    with pytest.raises(ProtocolError, match="not a Meshwright message"):
        decode([b"GET / HTTP/1.1"])


def test_a_large_array_is_not_copied_into_its_frames() -> None:
    array = np.zeros(300_000)
    pieces = encode(Message("push", {}, (array,)))[1:]
    assert len(pieces) == messages.num_pieces(array.nbytes) == 19
    array[:] = 1
    assert all(np.frombuffer(piece, np.float64).all() for piece in pieces)
