"""Programs with no cluster: the same rules, in this process."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any, cast

import keras
import numpy as np
import pytest
from clusters import add_up, check_exhausted

import meshwright as mw
from meshwright.errors import (
    ArrayError,
    CancelledError,
    ClusterError,
    ScheduledError,
    ShippingError,
    TaskError,
    UnreachableError,
)
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.coordinator.links import LocalLinks
from meshwright.ps.shared.partitioners import FixedShardsPartitioner
from meshwright.ps.shared.placing import placed
from meshwright.ps.strategy import ParameterServer, current_strategy
from meshwright.ps.worker.context import current

WAIT_S = 20.0


@pytest.fixture
def strategy():
    with ParameterServer() as cluster:
        yield cluster


@pytest.fixture
def coordinator(strategy):
    return ClusterCoordinator(strategy)


def test_the_classic_sample_with_one_shared_iterator(strategy, coordinator):
    total = strategy.variable(0.0)
    numbers = iter([1.0, 2.0, 3.0, 4.0, 5.0])

    add_up(coordinator, total, numbers)


def test_a_coordinator_whose_clock_is_behind_that_of_the_one_before_loses_no_step(
    strategy, coordinator, monkeypatch
):
    total = strategy.variable(0.0)
    coordinator.schedule(total.assign_add, args=(1.0,))
    coordinator.join()
    an_hour_ago = time.time_ns() - 3_600_000_000_000
    monkeypatch.setattr("meshwright.ps.coordinator.dispatcher.time.time_ns", lambda: an_hour_ago)
    coordinator._dispatcher.stop(stop_workers=False)
    strategy.coordinator_made = None
    other = ClusterCoordinator(strategy)
    other.schedule(total.assign_add, args=(2.0,))
    other.join()
    assert total.read() == 3.0


def test_the_worker_of_this_process_is_not_declared_dead_while_it_has_nothing_to_do():
    with ParameterServer(heartbeat_s=0.05, dead_after_s=0.2) as cluster:
        coordinator = ClusterCoordinator(cluster)
        for number in range(2):
            assert coordinator.fetch(coordinator.schedule(abs, args=(-number,)), WAIT_S) == number
            time.sleep(0.6)


@pytest.mark.parametrize("sharding", ["dynamic", "static", "copy"])
def test_the_classic_sample_with_data_of_the_workers(strategy, coordinator, sharding):
    total = strategy.variable(0.0)
    dataset = coordinator.create_per_worker_dataset(lambda: [1.0, 2.0, 3.0, 4.0, 5.0], sharding)
    numbers = iter(dataset)

    add_up(coordinator, total, numbers)
    check_exhausted(coordinator, numbers)


def test_a_loop_takes_what_is_left_and_a_new_iterator_begins_anew(strategy, coordinator):
    dataset = coordinator.create_per_worker_dataset([1, 2, 3])

    def all_of(numbers):
        return sum(numbers)

    first = iter(dataset)
    values = [coordinator.schedule(all_of, args=(it,)) for it in (first, first, iter(dataset))]
    assert coordinator.fetch(values, WAIT_S) == [6, 0, 6]


def test_results_keep_their_nesting(coordinator):
    def nested(x):
        return {"a": (x, [None, np.arange(3) * x]), "b": "text"}

    value = coordinator.schedule(nested, kwargs={"x": 2})
    result = coordinator.fetch(({"one": value}, 7), WAIT_S)
    assert result[1] == 7
    assert result[0]["one"]["a"][0] == 2
    np.testing.assert_array_equal(result[0]["one"]["a"][1][1], [0, 2, 4])
    assert value.get() is value.fetch()
    assert "ready" in repr(value)


def test_the_first_error_surfaces_once_and_the_queue_is_cancelled(strategy, coordinator):
    total = strategy.variable(0.0)

    def good():
        total.assign_add(1.0)

    def bad(text):
        time.sleep(0.1)  # so that both are queued before the first has failed
        total.assign_add(100.0)
        raise ValueError(text)

    values = [coordinator.schedule(bad, args=(text,)) for text in ("first", "second")]
    with pytest.raises(ValueError, match="first"):
        coordinator.join(WAIT_S)
    assert total.read() == 0.0  # what a function that raised has asked for is not done
    with pytest.raises(ValueError, match="first"):
        values[0].fetch(WAIT_S)
    with pytest.raises(CancelledError, match="cancelled, as another step"):
        values[1].fetch(WAIT_S)
    coordinator.schedule(good)
    coordinator.join(WAIT_S)
    assert coordinator.done()
    assert total.read() == 1.0


@pytest.mark.parametrize("ask", ["schedule", "done"])
def test_an_error_surfaces_at_whatever_is_called_next(coordinator, ask):
    def bad():
        raise KeyError("here")

    value = coordinator.schedule(bad)
    with pytest.raises(KeyError):
        value.fetch(WAIT_S)
    with pytest.raises(KeyError):
        coordinator.schedule(bad) if ask == "schedule" else coordinator.done()
    assert coordinator.done()


def test_an_iterator_that_raises_fails_its_step(coordinator):
    def numbers():
        yield 1
        raise OSError("disk")

    shared = numbers()
    values = [coordinator.schedule(next, args=(shared,)) for _ in range(2)]
    assert values[0].fetch(WAIT_S) == 1
    with pytest.raises(OSError, match="disk"):
        coordinator.join(WAIT_S)


def test_a_function_sees_its_own_changes_and_others_only_when_it_has_ended(strategy, coordinator):
    w = strategy.variable(np.zeros((4, 2), "float32"))
    n = strategy.variable(3, dtype="int64")

    def step():
        n.assign_add(2)
        w.assign(np.ones((4, 2)))
        w.rows_add([1, 1], np.full((2, 2), 10.0))
        w.rows_assign([3], [[7.0, 7.0]])
        w.assign_sub(1.0)
        actual = current().servers.read([w.spec])[0]
        return n.read(), w.read(), w.lookup([3, 1]), actual

    n_seen, w_seen, rows, servers_value = coordinator.schedule(step).fetch(WAIT_S)
    expected = np.array([[0, 0], [20, 20], [0, 0], [6, 6]], "float32")
    assert n_seen == n.read() == 5
    np.testing.assert_array_equal(w_seen, expected)
    np.testing.assert_array_equal(rows, expected[[3, 1]])
    np.testing.assert_array_equal(servers_value, np.zeros((4, 2)))
    np.testing.assert_array_equal(w.read(), expected)


def test_a_function_that_has_changed_a_variable_may_look_up_no_rows(strategy, coordinator):
    table = strategy.variable(np.zeros((3, 2)))

    def step():
        table.assign_add(1.0)
        return table.lookup([]).shape

    assert coordinator.fetch(coordinator.schedule(step), WAIT_S) == (0, 2)


def test_a_function_sees_what_it_has_subtracted_from_unsigned_integers(strategy, coordinator):
    count = strategy.variable(np.array([5, 7], "uint8"))

    def step():
        count.assign_sub(1)
        count.rows_sub([0, 0], [1, 2])
        return count.read(), count.lookup([0])

    seen, row = coordinator.fetch(coordinator.schedule(step), WAIT_S)
    assert (seen.tolist(), row.tolist()) == ([1, 6], [1])
    assert count.read().tolist() == [1, 6]


def test_at_least_once_sends_changes_at_once():
    with ParameterServer(at_least_once=True) as strategy:
        coordinator = ClusterCoordinator(strategy)
        total = strategy.variable(0.0)

        def bad():
            total.assign_add(1.0)
            raise ValueError

        coordinator.schedule(bad)
        with pytest.raises(ValueError):  # noqa: PT011
            coordinator.join(WAIT_S)
        assert total.read() == 1.0


class Counting:
    """A callable with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, by: int) -> int:
        self.calls += by
        return self.calls


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_what_would_end_a_program_ends_the_function_alone(strategy, coordinator, kind):
    total = strategy.variable(0)

    def step():
        total.assign_add(1)
        raise kind("enough")

    coordinator.schedule(step)
    with pytest.raises(ScheduledError, match=f"{kind.__name__} was raised in worker:0: enough"):
        coordinator.join(WAIT_S)
    assert coordinator.fetch(coordinator.schedule(total.read), WAIT_S) == 0


def test_an_iterator_that_would_end_a_program_ends_its_function_alone(coordinator):
    def elements():
        yield 1
        raise SystemExit("enough")

    shared = elements()
    assert coordinator.fetch(coordinator.schedule(next, (shared,)), WAIT_S) == 1
    coordinator.schedule(next, (shared,))
    with pytest.raises(ScheduledError, match="SystemExit was raised by an iterator: enough"):
        coordinator.join(WAIT_S)
    assert coordinator.fetch(coordinator.schedule(abs, (-2,)), WAIT_S) == 2


def test_a_callable_keeps_its_state_on_the_worker(coordinator):
    counting = Counting()
    step = functools.partial(counting, 2)
    values = [coordinator.schedule(step) for _ in range(3)]
    assert coordinator.fetch(values, WAIT_S) == [2, 4, 6]
    assert counting.calls == 0


def test_what_cannot_be_shipped_is_named(strategy, coordinator):
    lock = strategy._lock
    with pytest.raises(ShippingError, match=r"an argument of 'len' cannot be sent.*RLock"):
        coordinator.schedule(len, args=(lock,))
    with pytest.raises(ShippingError, match="not callable"):
        coordinator.schedule(3)
    deep = functools.reduce(lambda inner, _: [inner], range(5000), [])
    with pytest.raises(ShippingError, match=r"an argument of 'len' cannot be sent.*recursion"):
        coordinator.schedule(len, args=(deep,))
    deep[0] = deep
    assert coordinator.fetch(coordinator.schedule(len, args=(deep,)), WAIT_S) == 1
    value = coordinator.schedule(len, args=("abc",))
    with pytest.raises(ShippingError, match=r"fetch\(\) it first"):
        coordinator.schedule(len, args=(value,))
    with pytest.raises(ShippingError, match="pass iter"):
        coordinator.schedule(len, args=(coordinator.create_per_worker_dataset([1]),))
    coordinator.schedule(object)
    with pytest.raises(ShippingError, match="a result cannot travel"):
        coordinator.join(WAIT_S)


def test_what_belongs_to_the_program_is_named_in_a_function(strategy, coordinator):
    with pytest.raises(ShippingError, match="a coordinator cannot be used in a scheduled"):
        coordinator.schedule(lambda: coordinator.schedule(object))
    coordinator.schedule(lambda: strategy.variable(1.0))
    with pytest.raises(AttributeError, match=r"strategy\.variable is not there in a scheduled"):
        coordinator.join(WAIT_S)


def test_elements_are_not_taken_here(coordinator):
    with pytest.raises(TaskError, match=r"call next\(\) in a scheduled function"):
        next(iter(coordinator.create_per_worker_dataset([1])))


def test_join_says_what_is_being_done_when_it_is_late(coordinator):
    def sleepy():
        time.sleep(1.0)

    coordinator.schedule(sleepy)
    with pytest.raises(UnreachableError, match=r"(?s)join has waited for 0\.2 s.*worker:0.*sleepy"):
        coordinator.join(0.2)
    coordinator.join(WAIT_S)


def test_one_coordinator_for_a_strategy(strategy, coordinator):
    assert ClusterCoordinator(strategy) is coordinator
    with pytest.raises(ClusterError, match="takes a ParameterServer"):
        ClusterCoordinator("strategy")


def test_variables_outside_of_functions(strategy):
    with strategy.scope():
        assert current_strategy() is strategy
        w = strategy.variable("glorot_uniform", shape=(6, 3), name="w")
    assert current_strategy() is None
    assert np.abs(w.read()).max() > 0
    w.assign(0.0)
    w.rows_add([2, 2], np.ones((2, 3)))
    assert w.read().sum() == 6
    assert strategy.variable("zeros", shape=(6, 3), name="w").read().sum() == 6
    with pytest.raises(ArrayError, match="has shape"):
        w.assign(np.zeros((5, 3)))
    with pytest.raises(ArrayError, match="takes one dim of row numbers"):
        w.rows_add([1], np.zeros(3))
    with pytest.raises(ArrayError, match="needs a shape"):
        strategy.variable("zeros")
    for words in ({"value": np.array(["abc"])}, {"value": "zeros", "shape": [2], "dtype": "<U3"}):
        with pytest.raises(ArrayError, match=r"dtype '<U3' is not supported.*Pass numbers"):
            strategy.variable(**words)


def test_an_array_keeps_its_dtype_and_no_number_becomes_another(strategy):
    for value in (np.array([1e300]), np.float64(1e300), np.array([2**40])):
        variable = strategy.variable(value)
        assert (variable.dtype, variable.read()) == (value.dtype, value)
    assert strategy.variable([1.0, np.inf]).dtype == "float32"
    for value, dtype in ((1e300, None), (2**40, None), (np.array([1e300]), "float32"), (-1, "u1")):
        with pytest.raises(ArrayError, match=r"cannot be stored.*Make the variable with a dtype"):
            strategy.variable(value, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("float32", None, r"takes real numbers; received None"),
        ("float32", "much", r"takes real numbers; received 'much'"),
        ("float32", 1j, r"takes real numbers; received 1j"),
        ("float32", [[1, 2], [3]], r"takes real numbers; received \[\[1, 2\], \[3\]\]"),
        ("float32", 10**400, r"takes real numbers"),
        ("float32", 1e300, r"1e\+300 cannot be stored as float32"),
        ("int32", 0.5, r"holds whole numbers \(int32\); received 0.5. Round it"),
        ("int32", np.nan, r"holds whole numbers \(int32\); received nan"),
        ("int32", np.inf, r"holds whole numbers \(int32\); received inf"),
        ("int32", 2**31, r"2147483648 cannot be stored as int32"),
        ("uint8", np.int64(256), r"256 cannot be stored as uint8"),
    ],
)
@pytest.mark.parametrize("change", ["assign", "assign_add", "assign_sub", "rows_add"])
def test_a_value_that_a_variable_cannot_hold_is_refused(strategy, dtype, value, message, change):
    variable = strategy.variable(np.ones(2, dtype))
    rows = [[0]] if change.startswith("rows") else []
    with pytest.raises(ArrayError, match=message):
        getattr(variable, change)(*rows, value)
    assert variable.read().tolist() == [1, 1]


def test_an_initializer_of_keras_keeps_its_numbers_or_is_refused(strategy):
    constant: Any = keras.initializers.Constant
    three = constant(np.float32(3))
    assert strategy.variable(three, shape=[2]).read().tolist() == [3, 3]

    class Normal(keras.initializers.Constant):
        pass

    for initializer, match in [
        (constant([1.0, 2.0]), r"'constant' has value=\[1.0, 2.0\]; servers"),
        (Normal(1.0), "'normal' is a class of your own"),
    ]:
        with pytest.raises(ArrayError, match=match):
            strategy.variable(initializer, shape=[2])


@pytest.mark.parametrize(
    ("initializer", "match"),
    [
        ({"kind": 3, "params": 7, "seed": "x"}, r"kind must be.*\n.*params must be.*\n.*seed must"),
        ({"params": {}}, "kind must be a name"),
        ({"kind": "normal", "params": {"stddev": "x"}}, "stddev='x'; expected a number"),
        ({"kind": "variance_scaling", "mode": "fan"}, r"mode='fan'; expected one of 'fan_in', "),
    ],
)
def test_what_is_wrong_with_an_initializer_is_said(strategy, initializer, match):
    with pytest.raises(ArrayError, match=match):
        strategy.variable(initializer, shape=[2])


def test_arguments_by_name_are_a_dict(coordinator):
    for kwargs in [3, {1: 2}]:
        with pytest.raises(ShippingError, match="arguments by name as a dict"):
            coordinator.schedule(dict, kwargs=kwargs)


def test_a_partitioner_is_called():
    for partitioner in [3, FixedShardsPartitioner]:
        with pytest.raises(ClusterError, match=r"partitioner must be called .* received .*[3F]"):
            ParameterServer(partitioner=cast("Any", partitioner))


@pytest.mark.parametrize("value", ["zeros", 1.0])
@pytest.mark.parametrize("shape", [3, (2.5, 2), (-1, 2), "ab"])
def test_a_shape_is_of_whole_numbers(strategy, value, shape):
    with pytest.raises(ArrayError, match="a shape is a tuple of whole numbers"):
        strategy.variable(value, shape=shape)


def test_long_doubles_are_refused_before_they_are_saved(strategy):
    with pytest.raises(ArrayError, match="is not supported by servers"):
        strategy.variable(np.zeros(2, np.longdouble))


def test_pairs_of_gradients_and_variables_are_of_these(strategy):
    sgd = {"class_name": "SGD", "config": {"learning_rate": 1.0}}
    w, gradient = strategy.variable([0.0, 0.0]), np.ones(2, "float32")
    for pair in [(w, gradient), (None, w), (gradient, keras.Variable([0.0, 0.0])), w, (gradient,)]:
        with pytest.raises(ArrayError, match="pairs of a gradient and a variable that strategy"):
            strategy.apply_gradients(sgd, [pair])
    strategy.apply_gradients(sgd, [(gradient, w)])
    assert w.read().tolist() == [-1, -1]


@pytest.mark.parametrize("rows", [[0.9, 1.0], [False, True], ["0", "1"]])
def test_rows_are_whole_numbers(strategy, rows):
    variable = strategy.variable(np.zeros([2, 1]))
    sgd = {"class_name": "SGD", "config": {"learning_rate": 1.0}}
    for change in (variable.rows_assign, variable.rows_add, variable.rows_sub):
        with pytest.raises(ArrayError, match="are one dim of whole numbers"):
            change(rows, [[1.0], [1.0]])
    with pytest.raises(ArrayError, match="are one dim of whole numbers"):
        strategy.apply_gradients(sgd, [((rows, np.ones([2, 1])), variable)])
    variable.rows_add([], np.zeros([0, 1]))
    assert not variable.read().any()


def test_numbers_that_a_variable_can_hold_are_converted(strategy):
    whole, truth = strategy.variable([0, 1]), strategy.variable([False, True])
    whole.assign_add(np.array([2.0, 1.0]))
    whole.rows_add([0], [True])
    truth.assign(np.array([2, 0]))
    assert (whole.read().tolist(), truth.read().tolist()) == ([3, 2], [True, False])
    for subtract in (truth.assign_sub, functools.partial(truth.rows_sub, [0, 1])):
        with pytest.raises(ArrayError, match="holds booleans, from which nothing can be"):
            subtract([True, True])


def test_a_partitioner_cuts_and_nobody_sees_it():
    with ParameterServer(partitioner=FixedShardsPartitioner(3)) as strategy:
        w = strategy.variable(np.arange(14.0).reshape(7, 2))
        assert [(s.start, s.stop) for s in w.shards] == [(0, 3), (3, 5), (5, 7)]
        w.assign_add(np.ones((7, 2)))
        np.testing.assert_array_equal(w.read(), np.arange(14.0).reshape(7, 2) + 1)


KEYS = [
    np.s_[2:5], np.s_[-1], np.s_[::-2], np.s_[[6, 0, 6]], np.s_[1:4, 1], np.s_[3, ::-1],
    np.s_[..., 0], np.s_[np.arange(7) % 2 == 0], np.s_[[0, 2], [1, 0]], np.s_[[[1], [5]]],
    np.s_[5:2], np.s_[()], np.s_[2:4, None, ..., 1],
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_variable_is_sliced_as_an_array_and_only_those_rows_travel(key):
    value = np.arange(14.0, dtype="float32").reshape(7, 2)
    with ParameterServer(partitioner=FixedShardsPartitioner(3)) as strategy:
        w = strategy.variable(value)
        before = strategy.parameter_bytes
        result = w[key]
        np.testing.assert_array_equal(result, value[key])
        assert result.shape == value[key].shape
        if isinstance(key, slice):
            assert strategy.parameter_bytes - before <= len(result) * (value[0].nbytes + 8)


def test_what_cannot_be_sliced_says_so(strategy, coordinator):
    w = strategy.variable(np.arange(6.0).reshape(3, 2))
    with pytest.raises(IndexError, match="out of bounds"):
        w[3]
    with pytest.raises(TypeError, match="not iterable"):
        iter(w)
    with pytest.raises(ArrayError, match=r"is a scalar: use read\(\)"):
        strategy.variable(1.0)[0]

    def step():
        w.rows_add([1], np.ones((1, 2)))
        return w[1:]

    np.testing.assert_array_equal(coordinator.schedule(step).fetch(WAIT_S), [[3, 4], [4, 5]])


def test_each_worker_has_a_value_of_its_own(coordinator):
    def make():
        return {"made": time.monotonic(), "count": 0}

    own = coordinator.create_per_worker_values(make)

    def step(mine):
        assert mine is own  # closed over or given: the same one
        mine["count"] += 1
        return mine["made"], mine["count"]

    values = coordinator.fetch([coordinator.schedule(step, args=(own,)) for _ in range(4)])
    assert [count for _, count in values] == [1, 2, 3, 4]
    assert len({number for number, _ in values}) == 1
    another = coordinator.create_per_worker_values(make)
    assert coordinator.schedule(lambda: another["count"]).fetch(WAIT_S) == 0
    with pytest.raises(TaskError, match="is on the workers"):
        next(own)
    with pytest.raises(ShippingError, match="not callable"):
        coordinator.create_per_worker_values(5)

    def broken():
        raise KeyError("no model")

    coordinator.schedule(step, args=(coordinator.create_per_worker_values(broken),))
    with pytest.raises(KeyError, match="no model"):
        coordinator.join(WAIT_S)


def test_statistics_and_no_parameter_bytes_through_here(strategy, coordinator):
    w = strategy.variable(np.zeros(1000, "float32"))

    def step():
        w.assign_add(np.ones(1000, "float32"))

    before = strategy.parameter_bytes  # the first value
    for _ in range(4):
        coordinator.schedule(step)
    coordinator.join(WAIT_S)
    stats = coordinator.stats()
    assert (stats["scheduled"], stats["done"], stats["failed"]) == (4, 4, 0)
    assert stats["parameter_bytes"] == before
    assert stats["result_bytes"] == 0
    assert stats["staleness"] == {0: 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster": "host:1"}, "received 'host:1'"),
        ({"placement": "random"}, "placement must be one of"),
        ({"heartbeat_s": 3.0, "dead_after_s": 1.0}, "heartbeat_s=3.0"),
        ({"consistency": "later"}, "received 'later'"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(ClusterError, match=message):
        ParameterServer(**arguments)


@pytest.mark.full
def test_a_dataset_is_let_go_when_nobody_can_use_its_iterator(strategy, coordinator):
    def alive():
        import gc

        gc.collect()
        return sum(type(one).__name__ == "Tracked" for one in gc.get_objects())

    class Tracked(list):
        pass

    def first(numbers):
        return next(numbers)

    def made():
        return Tracked([1, 2])

    numbers = iter(coordinator.create_per_worker_dataset(made))
    assert coordinator.schedule(first, args=(numbers,)).fetch(WAIT_S) == 1
    before = alive()
    del numbers
    deadline_s = time.monotonic() + WAIT_S
    while alive() >= before and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert alive() < before


def test_a_second_strategy_begins_with_its_own_first_values(strategy):
    first = strategy.variable(1.0)
    first.assign_add(5.0)
    again = strategy.variable(1.0)
    assert (first.read(), again.read()) == (6.0, 1.0)


def test_a_variable_of_another_strategy_is_not_taken_for_ones_own(strategy, coordinator):
    mine = strategy.variable(1.0, name="x")
    with mw.ParameterServer() as other:
        foreign = other.variable(5.0, name="x")
        sgd = {"class_name": "SGD", "config": {"learning_rate": 1.0}}
        for use in (
            lambda: coordinator.schedule(_add_one, args=(foreign,)),
            lambda: coordinator.schedule(lambda: foreign.assign_add(1.0)),
            lambda: strategy.apply_gradients(sgd, [(np.float32(1.0), foreign)]),
        ):
            with pytest.raises(mw.MeshwrightError, match="made by another strategy"):
                use()
        coordinator.join(WAIT_S)
        assert (mine.read(), foreign.read()) == (1.0, 5.0)


def _add_one(variable):
    variable.assign_add(1.0)


COUNTS = {"one each": [1] * 60, "as it comes": [(7 * k * k) % 4 for k in range(60)]}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize("sharding", ["shared", "dynamic", "copy", "static"])
def test_one_worker_takes_elements_in_order(coordinator, sharding, counts):
    numbers = range(1000)
    if sharding == "shared":
        elements = iter(numbers)
    else:
        elements = iter(coordinator.create_per_worker_dataset(lambda: numbers, sharding))
    values = [coordinator.schedule(_take_some, args=(elements, count)) for count in counts]
    coordinator.join(WAIT_S)
    taken = [one for value in coordinator.fetch(values) for one in value]
    assert taken == list(numbers[: sum(counts)])


def _take_some(elements, count):
    return [next(elements) for _ in range(count)]


def test_what_an_iterator_raises_is_raised_in_its_place(coordinator):
    def numbers():
        yield from range(20)
        raise KeyError("row 20")

    elements = numbers()
    values = [coordinator.schedule(_take_some, args=(elements, 1)) for _ in range(21)]
    with pytest.raises(KeyError, match="row 20"):
        coordinator.join(WAIT_S)
    assert [value.fetch() for value in values[:20]] == [[n] for n in range(20)]


def test_an_error_that_carries_a_note_is_raised_once_and_the_coordinator_goes_on(
    strategy, coordinator
):
    total = strategy.variable(0.0)

    def noted():
        error = UnreachableError("gone", "worker:9")
        error.add_note("batch 17")
        raise error

    spec = placed("nowhere", (2,), "float32", num_shards=1, loads_bytes=[0])

    def refused_by_a_server():
        current().servers.read([spec])

    for function, error in ((noted, UnreachableError), (refused_by_a_server, mw.TaskError)):
        coordinator.schedule(function)
        with pytest.raises(error) as caught:
            coordinator.join(WAIT_S)
        caught.value.add_note("one more")
        coordinator.schedule(total.assign_add, args=(1.0,))
        coordinator.join(WAIT_S)
    assert total.read() == 2.0


def test_an_exhausted_dataset_is_named_and_not_one_before_it():
    coordinator = mw.ClusterCoordinator(mw.ParameterServer())
    shared, dataset = iter([1.0]), coordinator.create_per_worker_dataset(lambda: [1, 2])
    for elements, name in ((shared, "shared iterator"), (iter(dataset), r"over .*<lambda>")):
        with pytest.raises(mw.ExhaustedError, match=f"no more elements: .*{name}"):
            _take_three(coordinator, elements)


def test_an_iterator_may_use_the_memory_of_its_elements_again(coordinator):
    def counted():
        batch = np.zeros(2)
        for number in range(12):
            batch[:] = number
            yield batch

    def take_two(numbers):
        return [next(numbers)[0], next(numbers)[1]]

    numbers = counted()
    taken = [coordinator.schedule(take_two, args=(numbers,)) for _ in range(6)]
    assert np.sort(coordinator.fetch(taken, WAIT_S), axis=None).tolist() == list(range(12))


@pytest.mark.parametrize("size", [3, 3000])
def test_arguments_and_what_a_function_holds_are_those_of_the_call(coordinator, size):
    given, held = np.zeros(size), np.zeros(size)

    def both(given):
        return [given[0], held[0]]

    results = []
    for number in range(4):
        given[:] = held[:] = number
        results.append(coordinator.schedule(both, args=(given,)))
    assert coordinator.fetch(results, WAIT_S) == [[number, 0] for number in range(4)]


def test_a_result_is_what_the_function_returned_also_when_the_next_one_overwrites_it(coordinator):
    counts = coordinator.create_per_worker_values(lambda: np.zeros(3000))

    def count(counts):
        counts += 1
        return counts

    results = [coordinator.schedule(count, args=(counts,)) for _ in range(4)]
    assert [value[0] for value in coordinator.fetch(results, WAIT_S)] == [1, 2, 3, 4]


def _take_three(coordinator, elements):
    for _ in range(3):
        coordinator.schedule(_take, args=(elements,))
    coordinator.join()


def _take(elements):
    return next(elements)


def test_a_name_that_has_another_shape_is_refused():
    strategy = mw.ParameterServer()
    strategy.variable(np.zeros([4, 2]), name="table")
    with pytest.raises(mw.ArrayError, match=r"'table' exists with shape \(4, 2\)"):
        strategy.variable(np.zeros(3), name="table")


@pytest.mark.parametrize("args", [5, "text"])
def test_arguments_are_a_tuple(args):
    coordinator = mw.ClusterCoordinator(mw.ParameterServer())
    with pytest.raises(mw.ShippingError, match=r"as a tuple, args=\(x,\)"):
        coordinator.schedule(_take, args=args)


def test_what_is_no_dataset_is_refused_at_once():
    coordinator = mw.ClusterCoordinator(mw.ParameterServer())
    with pytest.raises(mw.DataError, match=r"expected a dataset.*received 5"):
        coordinator.create_per_worker_dataset(5)


def test_a_coordinator_that_is_closed_may_be_woken():
    links = LocalLinks(mw.ParameterServer().connect("worker:0"), lambda name, request: ([], []))
    links.wake()
    links.close()
    links.wake()  # a thread that schedules while another one closes


def test_a_closed_coordinator_takes_no_function():
    strategy = mw.ParameterServer()
    coordinator = mw.ClusterCoordinator(strategy)
    strategy.close()
    with pytest.raises(TaskError, match="the coordinator is closed"):
        coordinator.schedule(_take, args=(1,))
