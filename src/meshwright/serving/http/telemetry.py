"""Traces of requests by OpenTelemetry: one span each, with the trace that the client began.

OpenTelemetry's own variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ...) say where spans go.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import ServingError
from ...extras import require


def traced(app: Starlette, provider: Any = None) -> Starlette:
    """The app with a span around each request; without a provider they go out by OTLP.

    Raises ServingError where OpenTelemetry is not installed.
    """
    require("opentelemetry.sdk", ServingError, "traces take OpenTelemetry", "telemetry")
    app.add_middleware(_Spans, provider=provider or _exporting())
    return app


def _exporting() -> Any:
    """A provider that sends spans in the background, as the environment says."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class _Spans:
    """ASGI middleware: a server span for each request."""

    def __init__(self, app: ASGIApp, provider: Any) -> None:
        from opentelemetry import trace

        self._app = app
        self._tracer = trace.get_tracer("meshwright", tracer_provider=provider)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from opentelemetry import propagate, trace

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        with self._tracer.start_as_current_span(
            scope["method"], propagate.extract(headers), trace.SpanKind.SERVER
        ) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            try:
                await self._app(scope, receive, noting)
            finally:
                self._describe(span, scope)

    @staticmethod
    def _describe(span: Any, scope: Scope) -> None:
        state = scope.get("state", {})
        route = state.get("contract", "")
        span.update_name(f"{scope['method']} {route}" if route else scope["method"])
        span.set_attribute("http.request.method", scope["method"])
        span.set_attribute("url.path", scope["path"])
        for key in ("request_id", "model", "version", "rows", "contract"):
            if key in state:
                span.set_attribute(f"meshwright.{key}", state[key])
