"""Write the schemas in ``tests/serving/schemas``, by which manifests are checked.

It needs ``pip install kserve kubernetes cloudcoil-models-knative-serving``, best with ``--target``
a folder of its own that is named in PYTHONPATH. The classes of the first two are generated from the
OpenAPI documents of KServe and Kubernetes, the last from Knative's custom resource definitions.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

from job_schemas import of_model, write

FOLDER = Path(__file__).parent.parent / "tests" / "serving" / "schemas"
_PLAIN = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
# Numbers or texts; their classes are gone by the time that types are written down.
_EITHER = {"IntOrString", "ResourceQuantity"}


class OpenApi:
    """Classes of OpenAPI's generator for Python as definitions of one JSON Schema."""

    def __init__(self, *modules: Any) -> None:
        self._modules = modules
        self.definitions: dict[str, Any] = {}

    def schema(self, root: str) -> dict[str, Any]:
        """The schema of a class and all that it refers to."""
        return {**self._of(root), "$defs": self.definitions}

    def _of(self, name: str) -> dict[str, Any]:
        if name in _PLAIN:
            return {"type": _PLAIN[name]}
        if inner := re.fullmatch(r"list\[(.*)\]", name):
            return {"type": "array", "items": self._of(inner[1])}
        if inner := re.fullmatch(r"dict\([^,]*, (.*)\)", name):
            value = {} if inner[1] == "str" else self._of(inner[1])  # quantities are called texts
            return {"type": "object", "additionalProperties": value}
        found = next((getattr(m, name) for m in self._modules if hasattr(m, name)), None)
        if found is None or name in _EITHER:
            return {}
        if name not in self.definitions:
            self.definitions[name] = {}
            self.definitions[name] = {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    found.attribute_map[key]: self._of(kind)
                    for key, kind in found.openapi_types.items()
                },
            }
        return {"$ref": f"#/$defs/{name}"}


def main() -> None:
    """Write all of them."""
    import kubernetes.client

    front_door = types.ModuleType("kserve")  # the package's own imports a whole server
    front_door.__path__ = list(importlib.util.find_spec("kserve").submodule_search_locations or ())
    sys.modules["kserve"] = front_door
    import kserve.models
    from cloudcoil.models.knative_serving.serving.v1 import Service

    kserve_classes = OpenApi(kserve.models, kubernetes.client)
    write(FOLDER, "InferenceService", kserve_classes.schema("V1beta1InferenceService"))
    write(FOLDER, "Service", of_model(Service))


if __name__ == "__main__":
    main()
