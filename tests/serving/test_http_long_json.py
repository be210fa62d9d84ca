"""Long JSON is read in pieces: what it says is the same, and other requests have their turn."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from test_http_contracts import json_values

from meshwright.errors import RequestError
from meshwright.serving.api import TensorSpec
from meshwright.serving.http import json_pieces
from meshwright.serving.http import tensors as tensors_module
from meshwright.serving.http.contracts import invocations, open_inference, tf_serving
from meshwright.serving.http.limits import Limits


def read_or_refused(read, text):
    try:
        return repr(read(text))  # NaN is equal to itself there
    except ValueError as error:
        return str(error)


texts = st.text(st.sampled_from('[]{},:"01. N'), max_size=60).map(str.encode)
long_arrays = arrays.arrays("int64", st.tuples(st.integers(1, 9), st.integers(1, 9)))
nearly = st.tuples(
    st.sampled_from(
        ["%s", '{"x": %s}', '{"a": [{"n": "b", "d": %s}], "c": "d"}', '["\\u00000", %s]']
    ),
    long_arrays.map(lambda array: json.dumps(array.tolist(), indent=len(array) % 3)),
    st.integers(0, 200),
    st.sampled_from(["", "", "", ",", "]", "[", '"', " ", "{}"]),
)


def spoiled(case):
    form, array, at, more = case
    text = form % array
    return (text[:at] + more + text[at:]).encode()


@settings(max_examples=150, deadline=None)
@given(st.one_of(json_values.map(json.dumps).map(str.encode), texts, nearly.map(spoiled)))
@example(b"[1111111111,]")
@example(b'["\\u00000", [1111111111, 2222222222]]')
def test_json_in_pieces_is_what_it_is_at_once(text):
    with mock.patch.multiple(json_pieces, _LONG=0, _PIECE=8, _TAIL=16):
        found = read_or_refused(json_pieces.loaded_in_pieces, text)
    assert found == read_or_refused(json_pieces.loaded, text)


ROWS = np.arange(40_000, dtype="float32").reshape(-1, 4) / 7
TENSOR = {
    "name": "x",
    "datatype": "FP32",
    "shape": [*ROWS.shape],
    "data": ROWS.ravel().tolist(),
}
LONG = {
    "rows": {"instances": ROWS.tolist()},
    "columns": {"inputs": {"x": ROWS.tolist()}},
    "split": {"dataframe_split": {"columns": list("abcd"), "data": ROWS.tolist()}},
    "flat": {"inputs": [TENSOR]},
}


@pytest.mark.parametrize("form", LONG)
def test_a_long_body_holds_no_other_request_up_for_long(form, monkeypatch):
    texts, rows = [], []
    loads, loose = json_pieces.loaded, tensors_module._loose
    monkeypatch.setattr(json_pieces, "loaded", lambda text: texts.append(len(text)) or loads(text))
    monkeypatch.setattr(
        tensors_module, "_loose", lambda value: rows.append(len(value)) or loose(value)
    )
    specs = [TensorSpec("x", "float32", (None, 4))]
    body = json.dumps(LONG[form]).encode()
    if form == "flat":
        request = open_inference.read(body, None, specs, Limits())
    else:
        request = invocations.read(body, "", "", specs, Limits())
    np.testing.assert_array_equal(request.inputs["x"], ROWS)
    assert max(texts) < 2 * json_pieces._PIECE < len(body)
    assert sum(texts) > len(body) - len(texts)
    assert max(rows) <= tensors_module._ELEMENTS


def test_a_fault_in_a_long_body_is_that_of_the_whole():
    specs = [TensorSpec("x", "float32", (None, 4))]
    wrong = {"instances": [*ROWS.tolist(), [1, 2, 3]]}
    for body, says in (
        (json.dumps(wrong), "rows that differ"),
        (json.dumps({"instances": [*ROWS.tolist(), [1, 2, None, 4]]}), "received null"),
        (json.dumps(LONG["rows"]).replace("]]", ",]]"), "not valid JSON"),
    ):
        with pytest.raises(RequestError, match=says):
            tf_serving.read(body.encode(), specs, Limits())
