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
from meshwright.serving.api import Answer, TensorSpec
from meshwright.serving.http import json_pieces, json_text
from meshwright.serving.http import tensors as tensors_module
from meshwright.serving.http.contracts import invocations, open_inference, tf_serving
from meshwright.serving.http.contracts.request import Request
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
        result = read_or_refused(json_pieces.loaded_in_pieces, text)
    assert result == read_or_refused(json_pieces.loaded, text)


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


outputs = st.dictionaries(
    st.text(max_size=3),
    arrays.arrays(
        st.sampled_from(["float32", "int8", "bool", "float64"]),
        arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5),
    ),
    max_size=3,
)


@settings(max_examples=50, deadline=None)
@given(st.one_of(outputs, st.lists(outputs, max_size=4)))
def test_json_is_written_in_pieces_as_at_once(value):
    at_once = json_text.written(value)
    with mock.patch.multiple(json_pieces, _PIECE=8, _FEW=2):
        assert json_text.written(value) == at_once


@pytest.mark.parametrize("odd", [1.5, np.nan])
@pytest.mark.parametrize("form", ["rows", "columns", "flat"])
def test_a_long_answer_holds_no_other_request_up_for_long(form, odd, monkeypatch):
    long = ROWS.copy()
    long[0, 0] = odd
    answer = Answer({"small": ROWS[:, 0].copy(), "y": long}, "1")
    pieces = []
    for name in ("_strict", "_loose"):
        dumps = getattr(json_text, name)
        monkeypatch.setattr(
            json_text,
            name,
            lambda value, of=dumps: pieces.append(len(text := of(value))) or text,
        )
    request = Request({}, "inputs" if form == "columns" else "")
    if form == "flat":
        body = open_inference.write(request, answer, "m").body
        results = {t["name"]: t["data"] for t in json.loads(body)["outputs"]}
        results["y"] = np.reshape(results["y"], ROWS.shape)
    else:
        body = tf_serving.write(request, answer).body
        results = next(iter(json.loads(body).values()))
        if form == "rows":
            results = {name: [row[name] for row in results] for name in answer.outputs}
    for name, expected in answer.outputs.items():
        np.testing.assert_array_equal(np.asarray(results[name], "float32"), expected)
    assert max(pieces) < 6 * json_pieces._PIECE < len(body)  # a float takes up to 20 letters


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
