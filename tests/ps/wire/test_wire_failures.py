"""Errors that travel: the same class with the same words, where it may be rebuilt."""

from __future__ import annotations

import inspect
import json

import pytest

from meshwright import errors
from meshwright.errors import DoesNotFitError, NotFiniteError, ScheduledError, UnreachableError
from meshwright.ps.wire.failures import failure, raise_failure, rebuilt
from meshwright.ps.wire.message import Message, decode, encode

BUILTIN = [
    ValueError("no such row"),
    KeyError("depth"),
    KeyError(3),
    OSError(2, "No such file", "weights.npz"),
    FileNotFoundError(2, "No such file"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ZeroDivisionError("division by zero"),
    StopIteration(4),
    AssertionError(),
    Exception("a", 1, 2.5, None),
]


def travelled(error: BaseException) -> Exception:
    return rebuilt(decode(encode(failure(error, "worker:1"))))


@pytest.mark.parametrize("error", BUILTIN, ids=repr)
def test_pythons_own_errors_come_back_as_they_were(error: Exception) -> None:
    result = travelled(error)
    assert type(result) is type(error)
    assert (str(result), result.args) == (str(error), error.args)


OURS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, Exception) and not issubclass(kind, Warning)
]


@pytest.mark.parametrize("kind", OURS)
def test_errors_of_meshwright_come_back_as_they_were(kind: type[Exception]) -> None:
    error = kind("no", 8, 4, "b") if kind is DoesNotFitError else kind("no")
    result = travelled(error)
    assert type(result) is kind
    assert (str(result), result.args) == (str(error), error.args)
    assert {**vars(result), "__notes__": None} == {**vars(error), "__notes__": None}


def test_what_an_error_knows_travels_with_it() -> None:
    result = travelled(UnreachableError("gone", "ps:1"))
    assert isinstance(result, UnreachableError)
    assert result.task == "ps:1"
    lost = travelled(NotFiniteError("NaN", 3, 1, ("dense/kernel",)))
    assert isinstance(lost, NotFiniteError)
    assert (lost.step, lost.epoch, lost.variables) == (3, 1, ("dense/kernel",))


class OwnError(ValueError):
    """A class that the asking task cannot be sure to have."""


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OwnError("broken"), r"test_wire_failures\.OwnError was raised in worker:1: broken\. "),
        (json.JSONDecodeError("bad", "{", 1), r"json\.decoder\.JSONDecodeError was raised"),
        (ValueError(object()), r"builtins\.ValueError was raised in worker:1: <object"),
        (SystemExit(3), r"builtins\.SystemExit was raised in worker:1: 3"),
        (KeyboardInterrupt(), r"builtins\.KeyboardInterrupt was raised in worker:1"),
        (errors.Preempted("end"), r"meshwright\.errors\.Preempted was raised"),
        (ExceptionGroup("two", [ValueError("x")]), r"builtins\.ExceptionGroup was raised"),
    ],
)
def test_every_other_error_is_named(error: BaseException, named: str) -> None:
    with pytest.raises(ScheduledError, match=named) as caught:
        raise_failure(failure(error, "worker:1"))
    assert caught.value.task == "worker:1"


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_travels_whatever_its_words_are() -> None:
    half = travelled(FileNotFoundError(2, "No such file", "half\udcff.npz"))
    assert type(half) is FileNotFoundError
    assert half.filename == "half\\udcff.npz"
    held: list[object] = []
    held.append(held)
    for error in (MuteError(), ValueError(held)):
        assert f"{type(error).__qualname__} was raised" in str(travelled(error))


def test_the_traceback_travels_as_a_note() -> None:
    def inner_function() -> None:
        raise ValueError("deep")

    with pytest.raises(ValueError, match="deep") as caught:
        inner_function()
    (note,) = travelled(caught.value).__notes__
    assert note.startswith("in worker:1:\n")
    assert "inner_function" in note


@pytest.mark.parametrize("name", ["open", "eval", "SystemExit", "__import__", "no_such", "int", 3])
def test_no_name_makes_a_peer_do_more_than_raise(name: object) -> None:
    message = Message("error", {"room": "builtins", "type": name, "text": "t", "args": ["1"]})
    with pytest.raises(ScheduledError):
        raise_failure(message)


@pytest.mark.parametrize("head", [{}, {"room": ["x"]}, {"attributes": 3, "args": 1}])
def test_a_broken_telling_still_raises(head: dict[str, object]) -> None:
    with pytest.raises(ScheduledError):
        raise_failure(Message("error", head))


@pytest.mark.parametrize("error", [ValueError("bad row"), UnreachableError("gone", "ps:0")])
def test_notes_travel_over_several_tasks_and_more_can_be_added(error: Exception) -> None:
    error.add_note("batch 17")
    result = travelled(travelled(error))
    result.add_note("one more")
    first, second, third, last = result.__notes__
    assert (first, last) == ("batch 17", "one more")
    assert second.startswith("in worker:1:\n")
    assert third.startswith("in worker:1:\n")
    assert "batch 17" not in second


@pytest.mark.parametrize("name", ["__notes__", "__class__", "add_note", "with_traceback"])
def test_no_attribute_of_a_peer_takes_the_place_of_pythons_own(name: str) -> None:
    head = {
        "room": "meshwright.errors",
        "type": "TaskError",
        "args": ["t"],
        "attributes": {name: ["x"]},
        "notes": {"x": 3},
    }
    error = rebuilt(Message("error", head))
    error.add_note("n")
    assert error.__notes__[-1] == "n"
