"""The environment variables from which a task reads its settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..errors import ClusterError
from .addresses import is_local
from .keys import HOW_TO_MAKE, Keys
from .own_keys import keys_of_this_user
from .resolvers import Environment, resolve
from .settings import TaskSettings
from .spec import ClusterSpec, Task

KEYS = "MESHWRIGHT_KEYS"  # a file
GENERATION = "MESHWRIGHT_GENERATION"
WORKER_DEVICES = "MESHWRIGHT_WORKER_DEVICES"  # tells a chief how many were made in each worker
_SNAPSHOTS = "MESHWRIGHT_SNAPSHOTS"  # a folder
_NUMBERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "heartbeat_s": ("MESHWRIGHT_HEARTBEAT_S", float),
    "snapshot_every": ("MESHWRIGHT_SNAPSHOT_EVERY", int),
    "generation": (GENERATION, int),
    "orphan_s": ("MESHWRIGHT_ORPHAN_S", float),
}


def cluster_variables(spec: ClusterSpec, task: Task, keys_path: str | None) -> dict[str, str]:
    """The variables that make a process this task of this cluster."""
    return {
        "MESHWRIGHT_CLUSTER": spec.to_json(),
        "MESHWRIGHT_TASK": str(task),
        KEYS: keys_path or "",
    }


def variables_of(settings: TaskSettings, keys_path: str | None) -> dict[str, str]:
    """All variables from which :func:`settings_from` makes these settings again."""
    variables = cluster_variables(settings.spec, settings.task, keys_path)
    values = {name: getattr(settings, field) for field, (name, _) in _NUMBERS.items()}
    values[_SNAPSHOTS] = settings.snapshot_dir
    # An empty text says nothing, and covers what the parent's own environment may say.
    return variables | {n: "" if value is None else str(value) for n, value in values.items()}


def settings_from(environment: Environment | None = None) -> TaskSettings:
    """The settings of the task that the environment describes.

    Raises :class:`~meshwright.errors.ClusterError` where it describes none, where the cluster has
    no chief, or spans hosts and has no keys.
    """
    variables = os.environ if environment is None else environment
    resolver = resolve(variables)
    spec, task = resolver.cluster_spec(), resolver.task()
    if task is None:
        raise ClusterError(
            f"the environment describes a cluster ({', '.join(map(str, spec.tasks))}), but does "
            'not say which task this process is: set MESHWRIGHT_TASK="worker:0", or "task" in '
            "TF_CONFIG."
        )
    if "chief" not in spec.jobs:
        raise ClusterError(
            "there must be one chief, and the cluster has none: workers and servers wait for the "
            "program that runs there. Give it an address."
        )
    keys = keys_from(spec, variables)
    return TaskSettings(
        task,
        spec,
        None if keys is None else keys.of(task.job),
        snapshot_dir=variables.get(_SNAPSHOTS) or None,
        **_numbers(variables),
    )


def keys_from(spec: ClusterSpec, environment: Environment | None = None) -> Keys | None:
    """The keys in the file that ``MESHWRIGHT_KEYS`` names, or those of this user on this host.

    ``None`` where every task has a socket in the file system, which has owner and mode. Raises
    :class:`~meshwright.errors.ClusterError` where other hosts could connect without keys: a worker
    runs whatever function its chief sends.
    """
    variables = os.environ if environment is None else environment
    path = variables.get(KEYS)
    if path:
        return Keys.load(path)
    open_to_others = [t for t in spec.tasks if not is_local(spec.address(t))]
    if open_to_others:
        raise ClusterError(
            f"{KEYS} is not set, and other hosts can reach "
            f"{', '.join(map(str, open_to_others))}: without keys they could run any code there. "
            f"{HOW_TO_MAKE} Set {KEYS} to its path in every task."
        )
    if all(spec.address(task).startswith("ipc://") for task in spec.tasks):
        return None
    return keys_of_this_user()


def _numbers(variables: Environment) -> dict[str, Any]:
    numbers, faults = {}, []
    for field, (name, kind) in _NUMBERS.items():
        text = variables.get(name)
        if not text:
            continue
        try:
            numbers[field] = kind(text)
        except ValueError:
            faults.append(f"{name} must be a number; received {text!r}.")
    if faults:
        raise ClusterError("\n".join(faults))
    return numbers
