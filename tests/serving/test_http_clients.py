"""The clients that people use: Triton's, MLflow's, and OpenTelemetry's traces."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from http_calls import call, listening
from http_models import KERNEL, Linear, Shelf

from meshwright.serving.http.app import serving_app
from meshwright.serving.http.telemetry import traced

pytestmark = [pytest.mark.targets, pytest.mark.alone]

HOW = 'pip install -e ".[clients]"'
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with listening(serving_app(Shelf(Linear()))) as port:
        yield port


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_triton(port, binary, compression):
    triton = pytest.importorskip("tritonclient.http", reason=HOW)
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    assert client.is_server_ready()
    assert client.is_model_ready("linear", "1")
    tensor = triton.InferInput("x", list(X.shape), "FP32")
    tensor.set_data_from_numpy(X, binary_data=binary)
    answer = client.infer(
        "linear",
        [tensor],
        outputs=[triton.InferRequestedOutput("y", binary_data=binary)],
        request_id="mine",
        request_compression_algorithm=compression,
    )
    assert np.allclose(answer.as_numpy("y"), X @ KERNEL)
    assert answer.get_response()["id"] == "mine"
    client.close()


def test_triton_shows_why_a_request_is_refused(port):
    triton = pytest.importorskip("tritonclient.http", reason=HOW)
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    tensor = triton.InferInput("x", [1, 3], "FP32")
    tensor.set_data_from_numpy(np.zeros([1, 3], np.float32))
    with pytest.raises(triton.InferenceServerException, match=r"expected shape \[rows, 4\]"):
        client.infer("linear", [tensor])
    client.close()


def test_mlflow(port):
    scoring = pytest.importorskip("mlflow.pyfunc.scoring_server.client", reason=HOW)
    pandas = pytest.importorskip("pandas")
    client = scoring.ScoringServerClient("127.0.0.1", port)
    client.wait_server_ready(timeout=10)
    answer = client.invoke(pandas.DataFrame(X)).get_predictions()
    assert np.allclose(np.asarray(answer, np.float32), X @ KERNEL)


def test_a_request_is_a_span_of_the_clients_trace():
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason=HOW)
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    spans = export.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    app = traced(serving_app(Shelf(Linear())), provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    call(app, "POST", "/v1/models/linear:predict", {"inputs": X.tolist()}, traceparent=parent)
    (span,) = spans.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == parent[3:35]
    assert span.name == "POST tf_serving"
    assert span.attributes["meshwright.rows"] == 2
    assert span.attributes["http.response.status_code"] == 200
