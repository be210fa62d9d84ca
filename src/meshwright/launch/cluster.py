"""What a strategy asks of a cluster: its tasks and keys, and what has become of their processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol, runtime_checkable

from ..errors import ClusterError
from .joining import WORKER_DEVICES, keys_from
from .keys import Keys
from .resolvers import ClusterResolver, not_entered
from .spec import ClusterSpec

if TYPE_CHECKING:
    from .local import LocalCluster

    _fulfils: type[Cluster] = LocalCluster


@runtime_checkable
class Cluster(Protocol):
    """Servers and workers: a ``LocalCluster``, tasks that others started, or this process alone."""

    @property
    def spec(self) -> ClusterSpec | None:
        """The present tasks; ``None``: everything runs in this process."""
        ...

    @property
    def keys(self) -> Keys | None:
        """The chief's keys."""
        ...

    @property
    def worker_devices(self) -> int | None:
        """CPU devices that were made in each worker; ``None``: those that JAX finds there."""
        ...

    def check(self, job: str | None = None) -> None:
        """Raise ``TaskError`` for tasks (of one job) that have ended and are not started again."""
        ...

    def has_ended(self, task: str, pid: int) -> bool:
        """Whether this process of a task is known to have ended."""
        ...

    def replace(self, task: str, pid: int) -> bool:
        """Start a task again whose process does not respond; ``False`` if it cannot."""
        ...


class _Unsupervised:
    """Processes that this one neither watches nor starts."""

    def check(self, job: str | None = None) -> None:
        """Nothing is known of the tasks."""

    def has_ended(self, task: str, pid: int) -> bool:
        """Not as far as is known here."""
        return False

    def replace(self, task: str, pid: int) -> bool:
        """Not possible from here: errors name the task instead."""
        return False


@dataclass(frozen=True)
class DescribedCluster(_Unsupervised):
    """Tasks that were started elsewhere, by Slurm or Kubernetes for example."""

    spec: ClusterSpec
    keys: Keys | None = None
    worker_devices: int | None = None


@dataclass(frozen=True)
class ThisProcess(_Unsupervised):
    """No cluster: servers and the worker are in this process."""

    spec: None = None
    keys: None = None
    worker_devices: None = None

    def __enter__(self) -> NoReturn:
        """There is nothing to leave."""
        raise not_entered("ThisProcess() stands for a program without a cluster")

    def __exit__(self, *_: object) -> None:
        """Never called."""

    def __repr__(self) -> str:
        return "ThisProcess()"


def cluster_of(cluster: object) -> Cluster:
    """The cluster for what a user gives: one, a resolver, a spec, a spec with keys, or ``None``.

    Raises :class:`~meshwright.errors.ClusterError` for anything else, and for a cluster that has
    no chief, or spans hosts and has no keys.

    >>> cluster_of(None)
    ThisProcess()
    """
    if cluster is None:
        return ThisProcess()
    if isinstance(cluster, Cluster):
        return cluster
    described, keys = (
        cluster if isinstance(cluster, tuple) and len(cluster) == 2 else (cluster, None)
    )
    spec = described.cluster_spec() if isinstance(described, ClusterResolver) else described
    if not isinstance(spec, ClusterSpec) or not isinstance(keys, Keys | None):
        raise ClusterError(
            "cluster must be a LocalCluster, a ClusterSpec, a pair of a ClusterSpec and Keys, a "
            f"resolver, or None; received {cluster!r}."
        )
    if "chief" not in spec.jobs:
        raise ClusterError(
            "there must be one chief in the cluster, and there is none: workers join it there. "
            "Give it an address, such as {'chief': ['host:8887'], ...}."
        )
    devices = os.environ.get(WORKER_DEVICES, "")
    return DescribedCluster(
        spec,
        keys_from(spec) if keys is None else keys,
        int(devices) if devices.isdecimal() else None,
    )
