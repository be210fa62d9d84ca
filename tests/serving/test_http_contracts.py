"""Contracts are pure: what a client writes is what the model reads, for any tensors."""

from __future__ import annotations

import io
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from meshwright.errors import RequestError
from meshwright.serving.api import Answer, TensorSpec
from meshwright.serving.http.contracts import invocations, open_inference, tf_serving
from meshwright.serving.http.json_text import written
from meshwright.serving.http.limits import Limits
from meshwright.serving.http.problems import BodyTooLargeError, MediaTypeError

LIMITS = Limits()
DTYPES = [*open_inference.DATATYPES]
JSON_DTYPES = [name for name in DTYPES if name not in ("float16", "bfloat16")]
few = settings(max_examples=60, deadline=None)


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@st.composite
def tensors(draw: st.DrawFn, names: list[str] = DTYPES) -> tuple[list[TensorSpec], dict]:
    """Specs, and arrays that fit them: any dtype, one to three inputs, some dims ragged."""
    rows = draw(st.integers(1, 4))
    specs, values = [], {}
    for number in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(names))
        dims = draw(st.lists(st.integers(1, 3), max_size=2))
        raw = draw(arrays.arrays("float64", (rows, *dims), elements=st.integers(0, 100)))
        values[f"input_{number}"] = (raw > 50 if dtype == "bool" else raw).astype(dtype_of(dtype))
        ragged = [draw(st.sampled_from([None, dim])) for dim in dims]
        specs.append(TensorSpec(f"input_{number}", dtype, (None, *ragged)))
    return specs, values


def same(read: dict, values: dict) -> bool:
    return read.keys() == values.keys() and all(
        read[name].dtype == value.dtype and np.array_equal(read[name], value)
        for name, value in values.items()
    )


def v2_body(specs: list[TensorSpec], values: dict, binary: set[str]) -> tuple[bytes, str]:
    """A request as the protocol's text says, written here without our own code."""
    heads, tail = [], b""
    for spec in specs:
        value = values[spec.name]
        datatype = open_inference.DATATYPES[spec.dtype]
        head = {"name": spec.name, "datatype": datatype, "shape": list(value.shape)}
        if spec.name in binary:
            raw = value.astype(value.dtype.newbyteorder("<")).tobytes()
            tail += raw
            head["parameters"] = {"binary_data_size": len(raw)}
        else:
            head["data"] = value.ravel().tolist()
        heads.append(head)
    text = json.dumps({"id": "a", "inputs": heads}).encode()
    return text + tail, str(len(text))


@few
@given(tensors(), st.data())
def test_open_inference_reads_what_was_written_in_binary_or_json(case, data):
    specs, values = case
    half = {name for name, value in values.items() if value.dtype.itemsize == 2}
    names = data.draw(st.sets(st.sampled_from(sorted(values)))) | half
    body, length = v2_body(specs, values, names)
    request = open_inference.read(body, length, specs, LIMITS)
    assert same(request.inputs, values)
    assert request.id == "a"


@few
@given(tensors(JSON_DTYPES), st.booleans())
def test_tensorflow_servings_rows_and_columns_are_the_same_arrays(case, named):
    specs, values = case
    columns = {name: value.tolist() for name, value in values.items()}
    count = len(next(iter(values.values())))
    rows = [{name: column[row] for name, column in columns.items()} for row in range(count)]
    if len(specs) == 1 and not named:
        columns, rows = columns["input_0"], [row["input_0"] for row in rows]
    for body in ({"inputs": columns}, {"instances": rows, "signature_name": "serving_default"}):
        request = tf_serving.read(json.dumps(body).encode(), specs, LIMITS)
        assert same(request.inputs, values)


@few
@given(tensors(JSON_DTYPES))
def test_the_forms_of_mlflow_are_the_same_arrays(case):
    specs, values = case
    columns = {name: value.tolist() for name, value in values.items()}
    count = len(next(iter(values.values())))
    rows = [[column[row] for column in columns.values()] for row in range(count)]
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    forms = (
        {"inputs": columns},
        {"instances": records},
        {"dataframe_records": records},
        {"dataframe_split": {"columns": list(columns), "data": rows}},
    )
    for body in forms:
        request = invocations.read(json.dumps(body).encode(), "", "", specs, LIMITS)
        assert same(request.inputs, values), body


@few
@given(st.binary(max_size=300), st.one_of(st.none(), st.text(max_size=5)))
def test_any_bytes_are_read_or_refused(body, length):
    specs = [TensorSpec("x", "float32", (None, 2))]
    readers = [
        lambda: open_inference.read(body, length, specs, LIMITS),
        lambda: tf_serving.read(body, specs, LIMITS),
        *(
            lambda kind=kind: invocations.read(body, kind, "", specs, LIMITS)
            for kind in (invocations.JSON, invocations.CSV, invocations.NPY)
        ),
    ]
    for read in readers:
        try:
            request = read()
        except RequestError:
            continue
        assert request.inputs["x"].shape[1:] == (2,)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["inputs", "instances", "x", "name", "shape", "datatype", "data", "parameters"]
                + ["binary_data_size", "outputs", "id", "columns", "dataframe_split"]
                + ["dataframe_records", "signature_name", "timeout"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(json_values)
def test_any_json_is_read_or_refused(value):
    body = json.dumps(value).encode()
    specs = [TensorSpec("x", "int8", (None, 2)), TensorSpec("y", "float32", (None,))]
    for read in (
        lambda: open_inference.read(body, None, specs, LIMITS),
        lambda: tf_serving.read(body, specs, LIMITS),
        lambda: invocations.read(body, "", "", specs, LIMITS),
    ):
        with pytest.raises(RequestError):
            read()


X = [TensorSpec("x", "float32", (None, 2))]
WRONG = {  # body -> what the message says
    '{"instances": [[1, "2"]]}': r"input 'x': expected float32 values; received string",
    '{"instances": [[1, null]]}': "received null",
    '{"instances": [[1, true]]}': "received boolean",
    '{"instances": [[1, 2], [3]]}': "rows that differ in length or depth",
    '{"instances": [[1, 2, 3]]}': r"expected shape \[rows, 2\]; received \[1, 3\]",
    '{"instances": []}': "must be an array of rows",
    '{"instances": [[1, 1e300]]}': r"'x': value 1e\+300 is outside the range of float32, -3",
    '{"instances": [[1, 2]], "inputs": [[1, 2]]}': "expected either 'instances'",
    '{"instances": [[1, 2]], "signature_name": "other"}': "unknown signature 'other'",
    '{"inputs": {"x": [[1, 2]], "z": [1]}}': r"unknown input 'z'\. The model takes 'x'",
    '{"inputs": {}}': "missing input 'x'",
    '{"inputs": {"x": []}}': "expected at least one row; received none",
    '{"instances": [[1, 2]]': "not valid JSON",
    "[" * 100_000: "not valid JSON",
    '{"instances": ' + "[" * 900 + "]" * 900 + "}": "differ in length or depth|received",
}


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body[:40])
def test_a_wrong_request_has_its_own_message(body):
    with pytest.raises(RequestError, match=WRONG[body]):
        tf_serving.read(body.encode(), X, LIMITS)


@pytest.mark.parametrize("body", ['{"instances": ["a secret"', '{"inputs": {"x": "a secret"}}'])
def test_values_of_a_wrong_body_are_not_in_the_message_which_is_logged(body):
    with pytest.raises(RequestError) as caught:
        tf_serving.read(body.encode(), X, LIMITS)
    assert "a secret" not in str(caught.value)


@pytest.mark.parametrize("value", [[[300, 1]], [[-1, 1]], [[1.0, 1]], [[1e30, 1]], [[10**30, 1]]])
def test_an_integer_keeps_its_value_or_is_refused(value):
    spec = [TensorSpec("x", "uint8", (None, 2))]
    with pytest.raises(RequestError, match=r"outside the range of uint8|received float"):
        tf_serving.read(json.dumps({"inputs": value}).encode(), spec, LIMITS)


def test_all_faults_of_a_request_come_at_once():
    specs = [*X, TensorSpec("y", "int32", (None,))]
    body = {"inputs": {"x": [[1, "a"]], "y": [1.5], "z": []}}
    with pytest.raises(RequestError, match="3 faults") as caught:
        tf_serving.read(json.dumps(body).encode(), specs, LIMITS)
    assert all(name in str(caught.value) for name in ("'x'", "'y'", "'z'"))


def test_inputs_of_other_row_counts_are_refused():
    specs = [*X, TensorSpec("y", "int32", (None,))]
    body = {"inputs": {"x": [[1, 2]], "y": [1, 2]}}
    with pytest.raises(RequestError, match="'x' has 1, 'y' has 2"):
        tf_serving.read(json.dumps(body).encode(), specs, LIMITS)


V2_WRONG = {  # changes of a tensor -> what the message says
    "datatype": ("FP16", "expected datatype FP32; received 'FP16'"),
    "shape": ([2, 2], "takes 16 bytes; received 8"),
    "parameters": ({"binary_data_size": 7}, "take 7 bytes by their binary_data_size; 8 bytes"),
    "name": (3, "must be an object with a name"),
    "data": ([1.0, 2.0], "expected data or binary_data_size; received both"),
}


@pytest.mark.parametrize("key", V2_WRONG)
def test_a_wrong_binary_tensor_is_refused(key):
    value, message = V2_WRONG[key]
    parameters = {"binary_data_size": 8}
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": parameters}
    text = json.dumps({"inputs": [{**tensor, key: value}]}).encode()
    with pytest.raises(RequestError, match=message):
        open_inference.read(text + bytes(8), str(len(text)), X, LIMITS)


@pytest.mark.parametrize("name", ["binary_data", "binary_data_output"])
def test_a_wish_for_bytes_is_true_or_false(name):
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}
    output = {"name": "y", "parameters": {"binary_data": "yes"} if name == "binary_data" else {}}
    body = {"inputs": [tensor], "outputs": [output], "parameters": {"binary_data_output": "yes"}}
    with pytest.raises(RequestError, match=f"{name} must be true or false; received 'yes'"):
        open_inference.read(json.dumps(body).encode(), None, X, LIMITS)


@pytest.mark.parametrize("size", [-1, 1e3, True, "8", 1 << 70])
def test_sizes_that_are_none_are_refused(size):
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, size], "data": [1.0]}
    with pytest.raises(RequestError, match="shape must be an array of sizes"):
        open_inference.read(json.dumps({"inputs": [tensor]}).encode(), None, X, LIMITS)


def test_limits_on_text_and_on_tensors():
    small = Limits(text_bytes=100, tensors=2)
    with pytest.raises(BodyTooLargeError, match=r"100 B; received 1.95 KiB"):
        tf_serving.read(b"[" * 2000, X, small)
    body = json.dumps({"inputs": [{"name": "x"}] * 3}).encode()
    with pytest.raises(RequestError, match="has 3 tensors; at most 2"):
        open_inference.read(body, None, X, small)


# Answers

ANSWER = Answer({"y": np.array([[0.1, 2], [3, 4]], np.float32)}, "7")


def test_open_inference_answers_in_binary_where_it_is_asked_to():
    request = open_inference.Request({}, "", "me", {"y": True})
    reply = open_inference.write(request, ANSWER, "m")
    length = int(reply.headers[open_inference.HEADER])
    head = json.loads(reply.body[:length])
    assert (head["id"], head["model_version"]) == ("me", "7")
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 16}
    array = np.frombuffer(reply.body[length:], "<f4").reshape(head["outputs"][0]["shape"])
    assert np.array_equal(array, ANSWER.outputs["y"])


def test_an_output_that_the_model_does_not_have_is_refused():
    with pytest.raises(RequestError, match=r"unknown output 'z'\. The model's outputs are 'y'"):
        open_inference.write(open_inference.Request({}, outputs={"z": False}), ANSWER, "m")


@few
@given(arrays.arrays("float32", (2, 2), elements=st.floats(width=32)))
def test_floats_survive_json_both_ways(array):
    reply = tf_serving.write(tf_serving.Request({}, "instances"), Answer({"y": array}, "1"))
    back = np.array(json.loads(reply.body)["predictions"], "float32")
    assert np.array_equal(back, array, equal_nan=True)
    body = written({"instances": array})
    assert np.array_equal(tf_serving.read(body, X, LIMITS).inputs["x"], array, equal_nan=True)


def test_bfloat16_answers_are_written_as_floats():
    answer = Answer({"y": np.array([1.5, 2], ml_dtypes.bfloat16)}, "1")
    assert (
        tf_serving.write(tf_serving.Request({}, "inputs"), answer).body == b'{"outputs":[1.5,2.0]}'
    )
    reply = open_inference.write(open_inference.Request({}, "binary"), answer, "m")
    assert reply.body.endswith(np.array([1.5, 2], ml_dtypes.bfloat16).tobytes())


def test_several_outputs_are_answered_by_row_and_by_column():
    answer = Answer({"a": np.array([1, 2]), "b": np.array([[1.5], [2.5]])}, "1")
    by_row = tf_serving.write(tf_serving.Request({}, "instances"), answer)
    assert json.loads(by_row.body) == {"predictions": [{"a": 1, "b": [1.5]}, {"a": 2, "b": [2.5]}]}
    by_column = tf_serving.write(tf_serving.Request({}, "inputs"), answer)
    assert json.loads(by_column.body) == {"outputs": {"a": [1, 2], "b": [[1.5], [2.5]]}}


# /invocations in other forms


@pytest.mark.parametrize("head", ["", "first,second\n"])
def test_csv_with_and_without_names_of_columns(head):
    request = invocations.read(f"{head}1,2\n3,4.5\n".encode(), "text/csv", "", X, LIMITS)
    assert np.array_equal(request.inputs["x"], np.array([[1, 2], [3, 4.5]], "float32"))


@pytest.mark.parametrize("line", ["1;2;3;4", "first,second"])
def test_csv_of_which_the_only_line_is_taken_for_names_says_so(line):
    says = f"only line of the CSV, '{line}', .*taken for the names of columns.*commas"
    with pytest.raises(RequestError, match=says):
        invocations.read(line.encode(), "text/csv", "", X, LIMITS)


def test_csv_keeps_large_integers_exact_and_fills_dims():
    spec = [TensorSpec("x", "int64", (None, 2, 1))]
    request = invocations.read(b"9007199254740993,1\n", "text/csv", "", spec, LIMITS)
    assert request.inputs["x"].tolist() == [[[9007199254740993], [1]]]


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def test_npy_both_ways():
    array = np.array([[1, 2]], "float32")
    request = invocations.read(npy(array), invocations.NPY, invocations.NPY, X, LIMITS)
    assert np.array_equal(request.inputs["x"], array)
    reply = invocations.write(request, ANSWER)
    assert np.array_equal(np.load(io.BytesIO(reply.body)), ANSWER.outputs["y"])


HOSTILE = {
    "a pickle": npy(np.array([{}], dtype=object)),
    "a size that is not there": npy(np.zeros([1, 2], "float32")).replace(b"(1, 2)", b"(9, 2)"),
    "an endless header": b"\x93NUMPY\x02\x00" + b"\xff\xff\xff\x7f" + b"{" * 100,
    "no file": b"PK\x03\x04",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_npy_is_refused_unread(name):
    with pytest.raises(RequestError, match=r"input 'x'|not an .npy file|little-endian"):
        invocations.read(HOSTILE[name], invocations.NPY, "", X, LIMITS)


def test_media_types_that_are_not_spoken_are_named():
    with pytest.raises(MediaTypeError, match="'application/x-parquet' is not supported"):
        invocations.read(b"", "application/x-parquet", "", X, LIMITS)
    with pytest.raises(MediaTypeError, match="cannot answer with 'image/png'"):
        invocations.read(b'{"inputs": [[1, 2]]}', "", "image/png", X, LIMITS)


def test_csv_answers_have_a_line_for_each_row():
    request = invocations.read(b"1,2", "text/csv", "text/csv", X, LIMITS)
    assert invocations.write(request, ANSWER).body == b"0.10000000149011612,2.0\n3.0,4.0\n"
