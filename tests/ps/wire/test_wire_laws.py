"""The contract table: every law of a channel, for every transport."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from answering import TRANSPORTS, Asked

from meshwright.errors import ShippingError, UnreachableError
from meshwright.ps.wire.channel import Channel
from meshwright.ps.wire.message import Message

NUMBERS = np.random.default_rng(1)
ARRAYS = {
    "small": np.arange(12, dtype=np.int16).reshape(3, 4),
    "no dims": np.array(2.5),
    "empty": np.zeros((3, 0, 2), np.float32),
    "at the border": NUMBERS.integers(0, 255, 16 << 10, np.uint8),
    "one less": NUMBERS.integers(0, 255, (16 << 10) - 1, np.uint8),
    "large": NUMBERS.normal(size=(300, 500)),
    "larger than a segment": NUMBERS.normal(size=500_001),
    "every second column": NUMBERS.normal(size=(200, 300))[:, ::2],
    "transposed": NUMBERS.normal(size=(150, 200)).astype(np.float32).T,
    "backwards": NUMBERS.integers(0, 9, 30_000)[::-1],
    "big endian": NUMBERS.normal(size=9_000).astype(">f8"),
    "bfloat16": NUMBERS.normal(size=(100, 300)).astype(ml_dtypes.bfloat16),
    "float8": np.arange(20, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn),
    "bool": NUMBERS.integers(0, 2, 40_000).astype(bool),
    "complex": NUMBERS.normal(size=3_000) * 1j,
    "text": np.array(["one", "three"]),
}


@pytest.fixture(params=TRANSPORTS)
def core_and_channel(request: pytest.FixtureRequest) -> Iterator[tuple[Asked, Channel]]:
    core = Asked()
    with TRANSPORTS[request.param](core) as channel:
        yield core, channel


@pytest.fixture
def core(core_and_channel: tuple[Asked, Channel]) -> Asked:
    return core_and_channel[0]


@pytest.fixture
def channel(core_and_channel: tuple[Asked, Channel]) -> Channel:
    return core_and_channel[1]


def test_arrays_of_every_kind_come_back_as_they_were(channel: Channel) -> None:
    for _ in range(3):  # shared memory is used again
        answer = channel.ask(Message("echo", {}, tuple(ARRAYS.values())))
        for (name, sent), result in zip(ARRAYS.items(), answer.arrays, strict=True):
            assert (result.dtype, result.shape) == (sent.dtype, sent.shape), name
            assert result.tobytes() == sent.tobytes(), name
            assert result.flags.aligned, name
            assert not result.flags.writeable, name


def test_heads_come_back_as_they_were(channel: Channel) -> None:
    head = {"step": 1 << 62, "names": ["a", "ü"], "none": None, "raw": b"\0", 3: {"x": 0.1}}
    answer = channel.ask(Message("echo", {**head, "count": np.int64(4)}))
    assert {**head, "count": 4} == {key: answer.head[key] for key in [*head, "count"]}


def test_each_answer_belongs_to_its_question_in_any_order(channel: Channel) -> None:
    numbers = [channel.send(Message("echo", {"n": n}, (np.full(5000, n),))) for n in range(20)]
    for n in [*range(19, 9, -1), *range(10)]:
        answer = channel.wait(numbers[n])
        assert answer.head["n"] == n
        assert (answer.arrays[0] == n).all()


def test_messages_arrive_in_the_order_in_which_they_were_sent(
    core: Asked, channel: Channel
) -> None:
    kinds = ["echo", "add", "now"] * 10
    numbers = [channel.send(Message(kind, {}, (np.ones(3000),))) for kind in kinds]
    for number in numbers:
        channel.wait(number)
    assert [kind for kind in core.kinds if kind != "hello"] == kinds


def test_an_answer_may_come_later(channel: Channel) -> None:
    late = channel.send(Message("later"))
    with pytest.raises(UnreachableError, match="ps:0"):
        channel.wait(late, 0.1)
    channel.ask(Message("now"))
    assert channel.wait(late).head["was"] == "late"


@pytest.mark.parametrize(("what", "kind"), [("value", ValueError), ("key", KeyError)])
def test_an_error_comes_back_as_that_error(channel: Channel, what: str, kind: type) -> None:
    with pytest.raises(kind, match="no such row") as caught:
        channel.ask(Message("fail", {"what": what}))
    assert type(caught.value) is kind
    assert "in ps:0" in caught.value.__notes__[0]
    assert "answering.py" in caught.value.__notes__[0]
    assert channel.ask(Message("echo", {"after": 1})).head["after"] == 1


def test_what_is_told_arrives_and_needs_no_answer(core: Asked, channel: Channel) -> None:
    channel.tell(Message("add", {}, (np.ones(5000),)))
    assert channel.ask(Message("add", {}, (np.ones(1),))).head["total"] == 5001
    assert channel.receive_nowait() is None


def test_what_is_no_plain_value_is_refused_before_it_leaves(core: Asked, channel: Channel) -> None:
    with pytest.raises(ShippingError, match=r"the head of message 'echo'.*type object"):
        channel.ask(Message("echo", {"x": object()}))
    with pytest.raises(ShippingError, match="dtype object"):
        channel.ask(Message("echo", {}, (np.zeros(4000), np.array([object()]))))
    assert channel.ask(Message("echo", {"after": 1})).head["after"] == 1
    assert "echo" in core.kinds


def test_arrays_stay_what_they_were_while_somebody_holds_them(channel: Channel) -> None:
    arrays = [channel.ask(Message("echo", {}, (np.full(9000, n),))).arrays[0] for n in range(30)]
    assert [int(array[0]) for array in arrays] == list(range(30))
    assert all((array == array[0]).all() for array in arrays)


def test_a_number_that_nobody_sent_has_no_answer(channel: Channel) -> None:
    number = channel.send(Message("echo"))
    channel.wait(number)
    for wrong in (number, number + 100):
        with pytest.raises(KeyError, match=f"no answer is due to message {wrong}"):
            channel.wait(wrong)


def test_closed_twice_does_no_harm_and_a_closed_one_says_so(channel: Channel) -> None:
    channel.ask(Message("echo"))
    channel.close()
    channel.close()
    for use in (channel.ask, channel.send, channel.tell):
        with pytest.raises(UnreachableError, match="the channel to ps:0 is closed"):
            use(Message("echo"))
