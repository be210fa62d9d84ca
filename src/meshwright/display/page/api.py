"""The paths of a server as a page: its description in OpenAPI, to read without a program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .document import page_of
from .elements import Column, element

if TYPE_CHECKING:
    from ...serving.http.openapi import Paths


def api_page(paths: Paths) -> str:
    """Every path with what it takes and gives; one file without scripts of others."""
    description = paths.description
    operations = [
        (method.upper(), path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    columns = (Column("method"), Column("path", "path"), Column("what it does", "words"))
    rows = [(method, path, operation["summary"]) for method, path, operation in operations]
    table = element("table", "paths-table", "Paths", columns, rows, shown=None)
    info = description["info"]
    head = element("head", info["title"], "Paths of the server", "", info["version"], [], [])
    calls = [
        text for method, path, operation in operations for text in _schemas(method, path, operation)
    ]
    errors = {
        code: answer["description"]
        for _, _, operation in operations
        for code, answer in operation["responses"].items()
        if code != "200"
    }
    if errors:
        listed = "\n".join(f"{code}  {text}" for code, text in sorted(errors.items()))
        form = json.dumps(description["components"]["schemas"]["Error"], indent=2)
        calls.append(("Errors, and the form of their answers", f"{listed}\n\n{form}"))
    return page_of("Paths of the server", head, {"calls": {"table": table, "calls": calls}})


def _schemas(method: str, path: str, operation: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What a path takes and gives, where that has a schema."""
    parts = {
        "takes": operation.get("requestBody", {}),
        "gives": operation["responses"]["200"],
    }
    for verb, part in parts.items():
        for kind, content in part.get("content", {}).items():
            yield f"{method} {path} {verb} {kind}", json.dumps(content["schema"], indent=2)
