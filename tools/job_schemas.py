"""Write the schemas in ``tests/launch/schemas``, by which manifests are checked.

It needs ``pip install kubeflow-trainer-api``, whose models are generated from the OpenAPI documents
of Kubernetes, JobSet and Kubeflow Trainer; the fields of a RayJob are those of KubeRay's API
reference (``docs/reference/api.md``), around the same pods. Descriptions are left out.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "tests" / "launch" / "schemas"
_KINDS = {
    "text": {"type": "string"},
    "texts": {"type": "object", "additionalProperties": {"type": "string"}},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "object": {"type": "object"},
    "pods": {"$ref": "#/$defs/Pods"},
}
_KEPT = ("type", "properties", "items", "anyOf", "$ref", "enum", "required", "additionalProperties")


def strict(schema: Any) -> Any:
    """Without descriptions and defaults; a field that is unknown is refused, as by the server."""
    if isinstance(schema, list):
        return [strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {k: strict(v) for k, v in schema.items() if k in _KEPT and k != "properties"}
    if "properties" in schema:
        kept["properties"] = {k: strict(v) for k, v in schema["properties"].items()}
        kept["additionalProperties"] = False
    return kept


def reachable(root: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The definitions that a schema refers to, directly or not."""
    found: dict[str, Any] = {}

    def visit(part: Any) -> None:
        if isinstance(part, list):
            for entry in part:
                visit(entry)
        if isinstance(part, dict):
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name and name not in found:
                found[name] = definitions[name]
                visit(definitions[name])
            for entry in part.values():
                visit(entry)

    visit(root)
    return found


def of_model(model: Any) -> dict[str, Any]:
    """The schema of one of the package's models."""
    whole = model.model_json_schema(by_alias=True)
    definitions = {name: strict(part) for name, part in whole.pop("$defs").items()}
    # A quantity is written as a number or a text; the models know it as a wrapper of either.
    for name in definitions:
        if "Quantity" in name or "IntOrString" in name:
            definitions[name] = {"type": ["string", "integer", "number"]}
    root = strict(whole)
    return {**root, "$defs": reachable(root, definitions)}


def ray_job(pod_template: dict[str, Any]) -> dict[str, Any]:
    """The schema of a RayJob, from KubeRay's API reference."""
    pods = {k: v for k, v in pod_template.items() if k != "$defs"}

    head = _fields(
        "template! pods, serviceType text, enableIngress flag, headService object, "
        "rayStartParams texts"
    )
    workers = _fields(
        "groupName! text, template! pods, replicas integer, minReplicas integer, "
        "maxReplicas integer, idleTimeoutSeconds integer, numOfHosts integer, suspend flag, "
        "rayStartParams texts, scaleStrategy object"
    )
    cluster = _fields(
        "headGroupSpec! head, workerGroupSpecs workers, managedBy text, rayVersion text, "
        "suspend flag, enableInTreeAutoscaling flag, autoscalerOptions object, "
        "headServiceAnnotations texts, gcsFaultToleranceOptions object",
        head=head,
        workers={"type": "array", "items": workers},
    )
    spec = _fields(
        "rayClusterSpec cluster, submitterPodTemplate pods, submitterConfig object, "
        "deletionStrategy object, metadata texts, clusterSelector texts, managedBy text, "
        "entrypoint text, runtimeEnvYAML text, jobId text, submissionMode text, "
        "entrypointResources text, entrypointNumCpus number, entrypointNumGpus number, "
        "activeDeadlineSeconds integer, backoffLimit integer, ttlSecondsAfterFinished integer, "
        "shutdownAfterJobFinishes flag, suspend flag",
        cluster=cluster,
    )
    root = _fields(
        "apiVersion! version, kind! kind, metadata object, spec! spec",
        version={"enum": ["ray.io/v1"]},
        kind={"enum": ["RayJob"]},
        spec=spec,
    )
    return {**root, "$defs": {"Pods": pods, **pod_template["$defs"]}}


def _fields(text: str, **own: Any) -> dict[str, Any]:
    """The schema of an object from its fields: ``"name! kind, other kind"``; ``!`` is required."""
    fields = [item.split() for item in text.split(", ")]
    return {
        "type": "object",
        "properties": {name.rstrip("!"): {**_KINDS, **own}[kind] for name, kind in fields},
        "required": [name.rstrip("!") for name, _ in fields if name.endswith("!")],
        "additionalProperties": False,
    }


def write(folder: Path, kind: str, schema: dict[str, Any]) -> None:
    """Write a schema, compressed."""
    text = json.dumps(schema, separators=(",", ":"), sort_keys=True)
    (folder / f"{kind}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main() -> None:
    """Write all of them."""
    from kubeflow_trainer_api import models

    schemas = {
        "JobSet": of_model(models.JobsetV1alpha2JobSet),
        "TrainingRuntime": of_model(models.TrainerV1alpha1TrainingRuntime),
        "TrainJob": of_model(models.TrainerV1alpha1TrainJob),
        "RayJob": ray_job(of_model(models.IoK8sApiCoreV1PodTemplateSpec)),
    }
    for kind, schema in schemas.items():
        write(FOLDER, kind, schema)


if __name__ == "__main__":
    main()
