"""The description of the app in OpenAPI 3.1, with the tensors of the models that it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...views import Viewable
from ..api import Models, TensorSpec
from ..ranges import wider
from .contracts.open_inference import DATATYPES
from .looking import looked_at

_ERRORS = {
    "400": "The request does not fit the model; the message lists every fault.",
    "401": "The server asks for an API key.",
    "404": "Unknown model or version.",
    "413": "The body is too large.",
    "429": "The queue is full; see Retry-After.",
    "500": "The model failed.",
    "503": "The server is loading or draining.",
    "504": "The deadline passed.",
}


@dataclass(frozen=True)
class Paths(Viewable):
    """The description, to be seen as a page."""

    description: Mapping[str, Any]


def openapi(models: Models, version: str) -> dict[str, Any]:
    """The description as a JSON value."""
    paths: dict[str, Any] = {}
    for name in models.names():
        model = looked_at(models, name)
        paths[f"/v2/models/{name}/infer"] = _post(
            "Open Inference protocol V2", _v2(model.inputs), _v2(model.outputs, "outputs")
        )
        paths[f"/v1/models/{name}:predict"] = _post(
            "TensorFlow Serving", _columns(model.inputs), _columns(model.outputs, "outputs")
        )
        paths[f"/v2/models/{name}"] = _get("Inputs and outputs of the model")
    anything = {"type": "object"}
    paths["/invocations"] = _post("SageMaker and MLflow", anything, anything)
    for path, text in _PAGES.items():
        paths[path] = _get(text)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Meshwright", "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}},
    }


_PAGES = {
    "/v2/health/live": "Whether the process answers",
    "/v2/health/ready": "Whether all models answer",
    "/ping": "Whether all models answer, for SageMaker and MLflow",
    "/metrics": "Figures for Prometheus",
}
_ERROR = {
    "type": "object",
    "required": ["error", "error_code", "request_id"],
    "properties": {key: {"type": "string"} for key in ("error", "error_code", "request_id")},
}


def _get(summary: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": {"description": "OK"}}}}


def _post(summary: str, schema: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    content = {"application/json": {"schema": answer}}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    responses |= {code: {"description": t, "content": error} for code, t in _ERRORS.items()}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _nested(spec: TensorSpec) -> dict[str, Any]:
    """The schema of nested arrays."""
    whole = "integer" if "int" in spec.dtype else "number"
    schema: dict[str, Any] = {"type": "boolean" if spec.dtype == "bool" else whole}
    for size in reversed(spec.shape):
        schema = {"type": "array", "items": schema}
        if size is not None:
            schema |= {"minItems": size, "maxItems": size}
    return schema


def _columns(specs: Sequence[TensorSpec], key: str = "inputs") -> dict[str, Any]:
    """Tensors by name; one output stands alone, as TensorFlow Serving writes it."""
    tensors = {spec.name: _nested(spec) for spec in specs}
    named = {"type": "object", "required": list(tensors), "properties": tensors}
    whole = next(iter(tensors.values())) if key == "outputs" and len(tensors) == 1 else named
    return {"type": "object", "required": [key], "properties": {key: whole}}


def _datatypes(dtype: str, accepts_wider: bool) -> list[str]:
    names = [dtype, wider(dtype)] if accepts_wider else [dtype]
    return [DATATYPES.get(name, name) for name in names if name is not None]


def _v2(specs: Sequence[TensorSpec], key: str = "inputs") -> dict[str, Any]:
    tensors = [
        {
            "type": "object",
            "required": ["name", "datatype", "shape"],
            "properties": {
                "name": {"const": spec.name},
                "datatype": {"enum": _datatypes(spec.dtype, accepts_wider=key == "inputs")},
                "shape": {"type": "array", "items": {"type": "integer"}},
                "data": {"type": "array"},
            },
        }
        for spec in specs
    ]
    listed = {"type": "array", "prefixItems": tensors, "minItems": len(tensors)}
    return {"type": "object", "required": [key], "properties": {key: listed}}
