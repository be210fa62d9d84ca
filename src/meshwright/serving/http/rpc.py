"""The Open Inference protocol, version 2, over gRPC, beside the HTTP face of the same server.

Messages and stubs are those that Triton's own client brings, so nothing is generated here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
from starlette.applications import Starlette
from tritonclient.grpc import service_pb2
from tritonclient.grpc import service_pb2_grpc as stubs

from ...errors import MeshwrightError, OverloadedError, RequestError, ServingError
from ..api import Answer, Models, ServedModel
from .answers import REQUEST_ID
from .body import Held, Pending
from .contracts import open_inference
from .keys import Known
from .limits import Limits
from .log import LOGGER, id_of
from .looking import check_version, looked_at
from .problems import refuse, short, status_of, without_values
from .run import Listening, is_draining

messages: Any = service_pb2  # whose classes are made at run time
_CODES = {  # by the status that HTTP has for an error
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CONTENTS = {  # the field of typed values; other types come as raw bytes
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_OVERHEAD = 1 << 16  # bytes of a message beside its tensors


def with_rpc(
    app: Starlette,
    listening: Listening,
    *,
    limits: Limits | None = None,
    keys: Iterable[str] = (),
) -> Starlette:
    """The app, whose lifespan serves the same models over gRPC, too.

    It listens before the models are loaded, so that a port that is taken is an error at once.
    """
    inner = app.router.lifespan_context
    service = _Service(app, limits or Limits(), tuple(keys))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[Any]:
        try:
            server = await _started(service, listening)
        except ServingError as error:
            app.state.failure = error
            raise
        try:
            async with inner(app) as state:
                yield state
                await server.stop(listening.answer_s)
        finally:
            await server.stop(0)

    app.router.lifespan_context = lifespan
    return app


async def _started(service: _Service, listening: Listening) -> Any:
    most = service.limits.body_bytes + _OVERHEAD
    options = [
        ("grpc.max_receive_message_length", most),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # or two servers would share a port unseen
    ]
    server = grpc.aio.server(options=options)
    stubs.add_GRPCInferenceServiceServicer_to_server(service, server)
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    place = f"{host}:{listening.port}"
    try:
        if listening.certificate is None or listening.private_key is None:
            port = server.add_insecure_port(place)
        else:
            pair = listening.private_key.read_bytes(), listening.certificate.read_bytes()
            port = server.add_secure_port(place, grpc.ssl_server_credentials([pair]))
    except (RuntimeError, OSError) as error:
        raise ServingError(
            f"cannot listen on {place} for gRPC: {error}. Choose another --grpc-port, or 0 for any "
            "that is free."
        ) from error
    await server.start()
    LOGGER.info("listening", extra={"fields": {"grpc": f"{host}:{port}"}})
    return server


class _Service(stubs.GRPCInferenceServiceServicer):
    """The calls of the protocol over one set of models."""

    def __init__(self, app: Starlette, limits: Limits, keys: tuple[str, ...]) -> None:
        self._state = app.state
        self._models: Models = app.state.models
        self.limits = limits
        self._pending = Pending(limits)
        self._keys = Known(keys) if keys else None

    # Health and descriptions

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        ready = self._models.ready and not is_draining(self._state)
        return messages.ServerReadyResponse(ready=ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return await self._answered(
            context,
            lambda: messages.ModelReadyResponse(ready=self._model(request).ready),
        )

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        from importlib.metadata import version

        def of() -> Any:
            about = open_inference.server_metadata(version("meshwright"))
            return messages.ServerMetadataResponse(**about)

        return await self._answered(context, of)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        def of() -> Any:
            model = self._model(request)
            about = open_inference.model_metadata(model, self._models.versions(model.name))
            return messages.ModelMetadataResponse(**about)

        return await self._answered(context, of)

    def _model(self, request: Any) -> ServedModel:
        return looked_at(self._models, request.name, request.version or None)

    async def _answered(self, context: Any, of: Callable[[], Any]) -> Any:
        try:
            self._check_key(context)
            return of()
        except MeshwrightError as error:
            await _abort(context, error)

    def _check_key(self, context: Any) -> None:
        if self._keys is not None:
            metadata = dict(context.invocation_metadata() or ())
            self._keys.refuse(
                str(metadata.get("authorization", "")), str(metadata.get("x-api-key", ""))
            )

    # Predictions

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        begin_s, code = time.perf_counter(), grpc.StatusCode.OK
        metadata = dict(context.invocation_metadata() or ())
        identity = id_of(str(metadata.get(REQUEST_ID, "")) or request.id)
        fields = {"request_id": identity, "contract": "grpc", "model": request.model_name[:200]}
        try:
            await context.send_initial_metadata(((REQUEST_ID, identity),))
            self._check_key(context)
            with Held(self._pending) as reserved:
                reserved.take(request.ByteSize())
                model = self._models.model(request.model_name, request.model_version or None)
                inputs = _inputs(request, model, self.limits)
                left_s = context.time_remaining()
                timeout_s = min(self.limits.request_s, left_s or self.limits.request_s)
                answer = await model.predict(inputs, timeout_s=_timeout_s(request, timeout_s))
                fields["version"] = answer.version
                check_version(model.name, request.model_version or None, answer)
                return _reply(request, answer, model)
        except MeshwrightError as error:
            code = _code(error)
            fields["error"] = without_values(str(error))
            await _abort(context, error)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            code = grpc.StatusCode.UNKNOWN
            LOGGER.exception("unexpected error", extra={"fields": fields})
            raise
        finally:
            seconds = round(time.perf_counter() - begin_s, 6)
            fields = {**fields, "status": code.name, "seconds": seconds}
            LOGGER.info("request", extra={"fields": fields})


def _code(error: MeshwrightError) -> Any:
    return _CODES.get(status_of(error)[0], grpc.StatusCode.INVALID_ARGUMENT)


async def _abort(context: Any, error: MeshwrightError) -> None:
    """End the call with what the error says, and when to try again where that is known."""
    metadata = ()
    if isinstance(error, OverloadedError):
        metadata = (("grpc-retry-pushback-ms", str(round(1e3 * error.retry_after_s))),)
    await context.abort(_code(error), str(error), metadata)


def _inputs(request: Any, model: ServedModel, limits: Limits) -> dict[str, Any]:
    """The arrays of a request. Raises RequestError with all its faults."""
    tensors, faults = [], list[str]()
    if len(request.inputs) > limits.tensors:
        refuse([f"the request has {len(request.inputs):,} inputs; at most {limits.tensors} are "
                "read."])  # fmt: skip
    raw: list[bytes] = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        refuse([f"raw_input_contents has {len(raw)} tensors for {len(request.inputs)} inputs."])
    for entry in request.inputs:
        tensor = {"name": entry.name, "datatype": entry.datatype, "shape": list(entry.shape)}
        if not raw and (field := _CONTENTS.get(entry.datatype)):
            tensor["data"] = list(getattr(entry.contents, field))
        _check_field(entry, bool(raw), faults)
        tensors.append(tensor)
    refuse(faults)
    views = (memoryview(entry) for entry in raw) if raw else (None for _ in tensors)
    raws = {tensor["name"]: view for tensor, view in zip(tensors, views, strict=True)}
    inputs = open_inference.arrays_of(tensors, raws, model.inputs, faults)
    refuse(faults)
    return inputs


def _check_field(entry: Any, is_raw: bool, faults: list[str]) -> None:
    """A datatype has one field for its values, which is empty where they are raw."""
    field = None if is_raw else _CONTENTS.get(entry.datatype)
    others = [about.name for about, _ in entry.contents.ListFields() if about.name != field]
    if others and (is_raw or field):
        expected = "raw_input_contents" if is_raw else field
        faults.append(
            f"input {short(entry.name)}: expected its values in {expected} alone; received "
            f"{', '.join(others)}."
        )


def _timeout_s(request: Any, most_s: float) -> float:
    """Triton's ``timeout``, in microseconds, where a request has one."""
    if "timeout" not in request.parameters:
        return most_s
    timeout = request.parameters["timeout"].int64_param
    if timeout <= 0:
        raise RequestError(f"timeout must be a number of microseconds; received {short(timeout)}.")
    return min(most_s, timeout / 1e6)


def _reply(request: Any, answer: Answer, model: ServedModel) -> Any:
    names = [output.name for output in request.outputs]
    open_inference.check_outputs(names, answer)
    reply = messages.ModelInferResponse(
        model_name=model.name, model_version=answer.version, id=request.id
    )
    for name in names or answer.outputs:
        array = open_inference.little_endian(np.ascontiguousarray(answer.outputs[name]))
        tensor = reply.outputs.add(name=name, shape=array.shape)
        tensor.datatype = open_inference.DATATYPES[array.dtype.name]
        reply.raw_output_contents.append(array.tobytes())
    return reply
