"""The clients that people use: Triton's, MLflow's, and OpenTelemetry's traces."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from http_calls import call, listening
from http_models import KERNEL, Linear, Shelf, served
from ports import free_port

from meshwright.errors import ServingError
from meshwright.serving.http.app import serving_app
from meshwright.serving.http.limits import Limits
from meshwright.serving.http.run import Listening
from meshwright.serving.http.telemetry import traced

pytestmark = [pytest.mark.targets, pytest.mark.alone]

HOW = 'pip install -e ".[clients]"'
KEY = "k" * 32
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with listening(serving_app(served())) as port:
        yield port


def triton_over_http() -> Any:
    pytest.importorskip("geventhttpclient", reason=HOW)  # without it that module cannot be imported
    return pytest.importorskip("tritonclient.http", reason=HOW)


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_triton(port, binary, compression):
    triton = triton_over_http()
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
    triton = triton_over_http()
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    tensor = triton.InferInput("x", [1, 3], "FP32")
    tensor.set_data_from_numpy(np.zeros([1, 3], np.float32))
    with pytest.raises(triton.InferenceServerException, match=r"expected shape \[rows, 4\]"):
        client.infer("linear", [tensor])
    client.close()


@pytest.fixture(scope="module")
def rpc_port() -> Iterator[int]:
    pytest.importorskip("tritonclient.grpc", reason=HOW)
    from meshwright.serving.http.rpc import with_rpc

    port = free_port()
    slow = Linear("slow")
    slow.gate = asyncio.Event()
    app = serving_app(Shelf(Linear(), slow), keys=[KEY])
    with_rpc(app, Listening(port=port), limits=Limits(body_bytes=1 << 16), keys=[KEY])
    with listening(app):
        yield port


def test_triton_over_grpc(rpc_port, caplog):
    triton = pytest.importorskip("tritonclient.grpc", reason=HOW)
    key = {"authorization": f"Bearer {KEY}"}
    with triton.InferenceServerClient(f"127.0.0.1:{rpc_port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("linear", "1", headers=key)
        about = client.get_model_metadata("linear", headers=key)
        assert [tensor.shape for tensor in about.inputs] == [[-1, 4]]
        tensor = triton.InferInput("x", list(X.shape), "FP32")
        tensor.set_data_from_numpy(X)
        with caplog.at_level(logging.INFO, "meshwright.serving"):
            answer = client.infer("linear", [tensor], request_id="mine", headers=key)
        (line,) = [r.fields for r in caplog.records if r.message == "request"]
        assert (line["request_id"], line["contract"]) == ("mine", "grpc")
        assert np.allclose(answer.as_numpy("y"), X @ KERNEL)
        assert answer.get_response().id == "mine"
        assert answer.get_response().model_version == "1"
        wrong = triton.InferInput("x", [1, 3], "FP32")
        wrong.set_data_from_numpy(np.zeros([1, 3], np.float32))
        large = triton.InferInput("x", [8192, 4], "FP32")
        large.set_data_from_numpy(np.zeros([8192, 4], np.float32))
        for inputs, how, code, text in (
            ([wrong], {"model_name": "linear"}, "INVALID_ARGUMENT", r"expected shape \[rows, 4\]"),
            ([tensor], {"model_name": "other"}, "NOT_FOUND", "unknown model"),
            ([tensor], {"model_name": "linear", "headers": {}}, "UNAUTHENTICATED", "API key"),
            ([tensor], {"model_name": "slow", "timeout": 1000}, "DEADLINE_EXCEEDED", "in time"),
            ([large], {"model_name": "linear"}, "RESOURCE_EXHAUSTED", "larger than max"),
        ):
            with pytest.raises(triton.InferenceServerException, match=text) as caught:
                client.infer(inputs=inputs, **{"headers": key, **how})
            assert caught.value.status() == f"StatusCode.{code}"


def test_typed_contents_over_grpc(rpc_port):
    """As clients send them that do not write raw bytes, such as grpcurl."""
    grpc = pytest.importorskip("grpc", reason=HOW)
    from tritonclient.grpc import service_pb2 as messages
    from tritonclient.grpc import service_pb2_grpc as stubs

    request = messages.ModelInferRequest(model_name="linear")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[2, 4])
    tensor.contents.fp32_contents.extend(X.ravel())
    with grpc.insecure_channel(f"127.0.0.1:{rpc_port}") as channel:
        stub = stubs.GRPCInferenceServiceStub(channel)
        call = functools.partial(stub.ModelInfer, metadata=[("x-api-key", KEY)], timeout=60)
        reply = call(request)
        tensor.contents.int_contents.append(1)
        with pytest.raises(grpc.RpcError, match="in fp32_contents alone; received int_contents"):
            call(request)
        request.raw_input_contents.append(X.tobytes())
        with pytest.raises(grpc.RpcError, match=r"raw_input_contents alone.* int_contents, fp32_"):
            call(request)
    result = np.frombuffer(reply.raw_output_contents[0], np.float32).reshape(2, 3)
    assert np.allclose(result, X @ KERNEL)


def test_a_port_that_is_taken_is_an_error_of_the_lifespan(rpc_port):
    from meshwright.serving.http.rpc import with_rpc

    app = with_rpc(serving_app(Shelf(Linear())), Listening(port=rpc_port))

    async def begun() -> None:
        async with app.router.lifespan_context(app):
            pass

    with pytest.raises(ServingError, match="Choose another --grpc-port"):
        asyncio.run(begun())


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
