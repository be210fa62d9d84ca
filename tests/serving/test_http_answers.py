"""Every contract over HTTP, from bytes to bytes, with a Keras model that the engine serves."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from http_calls import Answered, call
from http_models import KERNEL, served

import meshwright as mw
from meshwright.serving.http.app import serving_app

X = np.array([[1, 2, 3, 4], [0.5, 0, -1, 2]], np.float32)
Y = X @ KERNEL
TENSOR = {"name": "x", "datatype": "FP32", "shape": [2, 4]}
HEADER = "inference-header-content-length"


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def binary(array: np.ndarray) -> tuple[bytes, dict[str, str]]:
    """A request of Open Inference with a binary tensor, and its header."""
    tensor = {**TENSOR, "parameters": {"binary_data_size": array.nbytes}}
    head = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    text = json.dumps(head).encode()
    return text + array.tobytes(), {HEADER.replace("-", "_"): str(len(text))}


def from_binary(answered: Answered) -> np.ndarray:
    head = int(answered.headers[HEADER])
    (tensor,) = json.loads(answered.body[:head])["outputs"]
    return np.frombuffer(answered.body[head:], np.float32).reshape(tensor["shape"])


CONTRACTS = {  # path -> body, headers, and how its answer is read
    "/v1/models/linear:predict": ({"instances": X.tolist()}, {}, "predictions"),
    "/v1/models/linear/versions/1:predict": ({"inputs": {"x": X.tolist()}}, {}, "outputs"),
    "/invocations": (
        {"dataframe_split": {"columns": list("abcd"), "data": X.tolist()}}, {}, "predictions",
    ),
    "/invocations?model=linear": (X.tolist(), {}, "predictions"),
    "/invocations?of=records": (
        {"dataframe_records": [dict(zip("abcd", row, strict=True)) for row in X.tolist()]},
        {}, "predictions",
    ),
    "/invocations?of=csv": (
        "\n".join(",".join(map(str, row)) for row in X).encode(),
        {"content_type": "text/csv", "accept": "text/csv"}, "csv",
    ),
    "/invocations?of=npy": (
        npy(X), {"content_type": "application/x-npy", "accept": "application/x-npy"}, "npy",
    ),
    "/v2/models/linear/infer": (
        {"inputs": [{**TENSOR, "data": X.ravel().tolist()}]}, {}, "v2",
    ),
    "/v2/models/linear/versions/1/infer": (*binary(X), "binary"),
}  # fmt: skip


@pytest.mark.parametrize("path", CONTRACTS)
def test_every_contract_gives_the_answer_of_a_keras_model(path):
    body, headers, form = CONTRACTS[path]
    answered = call(serving_app(served()), "POST", path, body, **headers)
    assert answered.status == 200, answered.body
    assert answered.headers["x-model-version"] == "1"
    read = {
        "csv": lambda: np.loadtxt(io.BytesIO(answered.body), delimiter=","),
        "npy": lambda: np.load(io.BytesIO(answered.body)),
        "v2": lambda: np.reshape(answered.json["outputs"][0]["data"], Y.shape),
        "binary": lambda: from_binary(answered),
    }.get(form, lambda: answered.json[form])
    np.testing.assert_allclose(read(), Y, atol=1e-6)


def of_64_bits(x, path):
    """The body and headers of a request with numbers of 64 bits, in a form that names their type
    or has none."""
    array = np.array(x)
    tensor = {"name": "x", "datatype": {"i": "INT64", "f": "FP64"}[array.dtype.kind]}
    tensor["shape"] = array.shape
    if path.endswith("of=npy"):
        return npy(array), {"content_type": "application/x-npy"}
    if path.endswith("of=binary"):
        tensor["parameters"] = {"binary_data_size": array.nbytes}
        head = json.dumps({"inputs": [tensor]}).encode()
        return head + array.tobytes(), {HEADER.replace("-", "_"): str(len(head))}
    return ({"inputs": [{**tensor, "data": x}]} if "v2" in path else {"instances": x}), {}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # of Keras, on the way
@pytest.mark.parametrize(
    ("dtype", "fits", "wrong", "says"),
    [
        (
            "int64",
            [[-(2**31)], [5]],
            2**33 + 5,
            "value 8589934597 is outside the range of int32, -2147",
        ),
        (
            "float64",
            [[1.5], [-1e38]],
            1e300,
            "value 1e+300 is outside the range of float32, -3.402",
        ),
    ],
)
def test_numbers_of_64_bits_are_served_where_they_fit_and_else_refused(dtype, fits, wrong, says):
    import keras

    x = keras.Input([1], name="x", dtype=dtype)
    model = keras.Model(x, keras.ops.cast(x, "float32") * 0.5, name="wide")
    app = serving_app(mw.Server(model, buckets=[2]))
    (described,) = call(app, "GET", "/v2/models/wide").json["inputs"]
    assert described["datatype"] == {"int64": "INT32", "float64": "FP32"}[dtype]
    infer = "/v2/models/wide/infer"
    for path in ("/v1/models/wide:predict", infer, f"{infer}?of=binary", "/invocations?of=npy"):
        body, headers = of_64_bits(fits, path)
        answered = call(app, "POST", path, body, **headers)
        assert answered.status == 200, answered.body
        out = answered.json["outputs"][0]["data"] if "v2" in path else answered.json["predictions"]
        np.testing.assert_allclose(np.ravel(out), np.ravel(fits) / 2, rtol=1e-6)
        body, headers = of_64_bits([[wrong]], path)
        answered = call(app, "POST", path, body, **headers)
        assert answered.status == 400, answered.body
        assert f"input 'x': {says}" in answered.json["error"]


def test_a_model_is_asked_for_the_rows_and_types_that_it_takes():
    app = serving_app(served())
    for path, body, says in (
        ("/v1/models/linear:predict", {"instances": [[1, 2, 3]]}, "expected shape [rows, 4]"),
        ("/v2/models/linear/infer", {"inputs": [{**TENSOR, "data": [1] * 7}]}, "28"),
        ("/invocations", {"dataframe_split": {"columns": ["a"], "data": [["b"]]}}, "string"),
    ):
        answered = call(app, "POST", path, body)
        assert (answered.status, says in answered.json["error"]) == (400, True), answered.body
