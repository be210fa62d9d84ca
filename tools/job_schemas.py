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
_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_FLOAT, _OBJECT, _PODS = {"type": "number"}, {"type": "object"}, {"$ref": "#/$defs/Pods"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
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

    def fields(
        required: str, texts: str = "", numbers: str = "", flags: str = "", **other: Any
    ) -> dict[str, Any]:
        several = ((texts, _TEXT), (numbers, _NUMBER), (flags, _FLAG))
        simple = {name: schema for names, schema in several for name in names.split()}
        return {
            "type": "object",
            "properties": simple | other,
            "required": required.split(),
            "additionalProperties": False,
        }

    head = fields(
        "template",
        texts="serviceType",
        flags="enableIngress",
        template=_PODS,
        headService=_OBJECT,
        rayStartParams=_TEXTS,
    )
    workers = fields(
        "groupName template",
        texts="groupName",
        numbers="replicas minReplicas maxReplicas idleTimeoutSeconds numOfHosts",
        flags="suspend",
        template=_PODS,
        rayStartParams=_TEXTS,
        scaleStrategy=_OBJECT,
    )
    cluster = fields(
        "headGroupSpec",
        texts="managedBy rayVersion",
        flags="suspend enableInTreeAutoscaling",
        headGroupSpec=head,
        workerGroupSpecs={"type": "array", "items": workers},
        autoscalerOptions=_OBJECT,
        headServiceAnnotations=_TEXTS,
        gcsFaultToleranceOptions=_OBJECT,
    )
    spec = fields(
        "",
        texts="managedBy entrypoint runtimeEnvYAML jobId submissionMode entrypointResources",
        numbers="activeDeadlineSeconds backoffLimit ttlSecondsAfterFinished",
        flags="shutdownAfterJobFinishes suspend",
        rayClusterSpec=cluster,
        submitterPodTemplate=_PODS,
        submitterConfig=_OBJECT,
        deletionStrategy=_OBJECT,
        **dict.fromkeys(["metadata", "clusterSelector"], _TEXTS),
        **dict.fromkeys(["entrypointNumCpus", "entrypointNumGpus"], _FLOAT),
    )
    root = fields(
        "apiVersion kind spec",
        apiVersion={"enum": ["ray.io/v1"]},
        kind={"enum": ["RayJob"]},
        metadata=_OBJECT,
        spec=spec,
    )
    return {**root, "$defs": {"Pods": pods, **pod_template["$defs"]}}


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
        text = json.dumps(schema, separators=(",", ":"), sort_keys=True)
        (FOLDER / f"{kind}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
