"""Workers of several devices: what ``ParameterServer(worker=...)`` takes."""

from __future__ import annotations

import os
from typing import Any

from ..errors import ClusterError
from ..launch.joining import WORKER_DEVICES


def checked_worker(worker: Any, cluster: Any) -> Any:
    """The strategy of each worker over its own devices, on a mesh without any where those are away.

    Raises :class:`~meshwright.errors.ClusterError` that lists all that cannot be done so.
    """
    if worker is None:
        return None
    if not hasattr(worker, "placement") or not hasattr(worker, "how"):
        raise ClusterError(
            "worker must be mw.Sharded(mesh, layouts) or mw.DataParallel(mesh), the layout of the "
            f"step over each worker's own devices; received {worker!r}."
        )
    size, there = worker.mesh.size, devices_of(cluster)
    faults = []
    if there is not None and there != size:
        faults.append(
            f"worker={worker!r} lies on a mesh of {size} devices ({worker.mesh.axes_text}), and "
            f"each worker of the cluster has {there}. Start it with "
            f"LocalCluster(worker_devices={size}), or make the mesh of {there}."
        )
    if worker.how.accumulate != 1:
        faults.append(
            f"worker={worker!r} with accumulate={worker.how.accumulate}: a worker takes one batch "
            "in a step. Leave it out, and give the optimizer gradient_accumulation_steps="
            f"{worker.how.accumulate}: the servers accumulate."
        )
    if cluster is None and worker.mesh.is_abstract:
        faults.append(
            f"worker={worker!r}: without a cluster this process is the worker, and the mesh "
            f"({worker.mesh.axes_text}) has no devices. Make it with "
            f"create_mesh({dict(worker.mesh.axes)!r})."
        )
    if faults:
        raise ClusterError("\n".join(faults))
    away = cluster is not None and not worker.mesh.is_abstract
    return worker.on(worker.mesh.abstract()) if away else worker


def devices_of(cluster: Any) -> int | None:
    """How many CPU devices were made in each worker of a cluster; ``None``: those that it finds."""
    if cluster is None or hasattr(cluster, "worker_devices"):
        return getattr(cluster, "worker_devices", None)
    told = os.environ.get(WORKER_DEVICES, "")
    return int(told) if told.isdecimal() else None


def platforms_of(cluster: Any) -> tuple[str, ...] | None:
    """The platforms of a cluster's workers, where they need not be those of this process."""
    return None if devices_of(cluster) is None else ("cpu",)
