"""The parts of ``TF_CONFIG``: texts in, values out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ClusterError
from .spec import Job

_FORM = (
    'It reads {"cluster": {"worker": ["host:port"], "ps": ["host:port"]}, '
    '"task": {"type": "worker", "index": 0}}.'
)


def read_config(text: str) -> Mapping[str, Any]:
    """The mapping that the text holds. Raises :class:`ClusterError` where it holds none."""
    if not text:
        raise ClusterError(f"TF_CONFIG is not set. {_FORM}")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"TF_CONFIG is not valid JSON ({error}): {text!r}. {_FORM}") from error
    if not isinstance(config, Mapping):
        raise ClusterError(f"TF_CONFIG must be a JSON object; received {text!r}. {_FORM}")
    return config


def jobs_of(config: Mapping[str, Any]) -> Mapping[str, Job]:
    """The cluster's jobs. Raises :class:`ClusterError` where there is no cluster."""
    cluster = config.get("cluster")
    if not cluster or not isinstance(cluster, Mapping):
        raise ClusterError(f"TF_CONFIG has no cluster in it: {cluster!r}. {_FORM}")
    if "master" in cluster and "chief" in cluster:
        raise ClusterError("TF_CONFIG has a chief and a master, which are two names for one job.")
    # TensorFlow 1 called the chief "master".
    return {"chief" if job == "master" else job: tasks for job, tasks in cluster.items()}


def task_of(config: Mapping[str, Any], jobs: Mapping[str, Job]) -> tuple[Any, Any] | None:
    """Job and index of this process, unchecked. Raises :class:`ClusterError` if one is missing."""
    task = config.get("task")
    if not task:
        return None
    if not isinstance(task, Mapping) or "type" not in task:
        raise ClusterError(f"TF_CONFIG's task has no type: {task!r}. {_FORM}")
    job = "chief" if task["type"] == "master" else task["type"]
    index = task.get("index")
    if index is None and len(jobs.get(job, ())) > 1:
        raise ClusterError(f"TF_CONFIG's task has no index, and there is more than one {job}.")
    return job, 0 if index is None else _whole(index)


def _whole(index: Any) -> Any:
    return int(index) if isinstance(index, str) and index.isdecimal() else index
