"""The queue before a model does what a plain list would do, however requests come and go."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving.requests import Request
from meshwright.serving.waiting import Waiting

MAX_ROWS = 4
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 6), st.integers(0, 1), st.none() | st.integers(0, 9)),
    st.tuples(st.just("remove"), st.integers(0, 9)),
    st.tuples(st.just("expire"), st.integers(0, 9)),
    st.tuples(st.just("batch")),
)


def plain_batch(requests: list[Request]) -> list[Request]:
    if not requests:
        return []
    batch, rows = [requests[0]], requests[0].rows
    alike = [request for request in requests if request.padded == requests[0].padded]
    for request in alike[1 : 2 * MAX_ROWS]:
        if rows + request.rows <= MAX_ROWS:
            batch.append(request)
            rows += request.rows
    return batch


@given(st.lists(ACTIONS, max_size=40))
def test_waiting_is_a_list_without_its_costs(actions: list[tuple]) -> None:
    waiting, plain = Waiting(), list[Request]()
    for number, (action, *arguments) in enumerate(actions):
        if action == "add":
            rows, shape, deadline_s = arguments
            request = Request([np.zeros(0)], rows, (), (shape,), deadline_s, arrived_s=number)
            waiting.add(request)
            plain.append(request)
        elif action == "remove" and plain:
            request = plain.pop(arguments[0] % len(plain))
            assert waiting.remove(request)
            assert not waiting.remove(request)
        elif action == "expire":
            late = [r for r in plain if r.deadline_s is not None and r.deadline_s <= arguments[0]]
            assert set(waiting.take_late(arguments[0])) == set(late)
            plain = [request for request in plain if request not in late]
        else:
            assert waiting.batch(MAX_ROWS) == plain_batch(plain)
        assert (len(waiting), waiting.rows) == (len(plain), sum(r.rows for r in plain))
    assert set(waiting.clear()) == set(plain)
    assert not len(waiting)
