"""The strategy by which each worker lays its step out over its own devices."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from ..errors import ClusterError
from ..launch.cluster import Cluster
from ..step.summing import GradientSum


@runtime_checkable
class _Layout(Protocol):
    """``mw.Sharded`` and its kin; this room loads no Keras."""

    mesh: Any

    @property
    def placement(self) -> Any: ...
    @property
    def how(self) -> Any: ...
    def on(self, mesh: Any) -> Any: ...


def checked_worker(worker: Any, cluster: Cluster) -> Any:
    """The strategy of each worker over its own devices, on a mesh without any where those are away.

    Raises :class:`~meshwright.errors.ClusterError` that lists all that cannot be done so.
    """
    if worker is None:
        return None
    if not isinstance(worker, _Layout):
        raise ClusterError(
            "worker must be mw.Sharded(mesh, layouts) or mw.DataParallel(mesh), the layout of the "
            f"step over each worker's own devices; received {worker!r}."
        )
    size, num_devices = worker.mesh.size, cluster.worker_devices
    faults = []
    if num_devices is not None and num_devices != size:
        faults.append(
            f"worker={worker!r} lies on a mesh of {size} devices ({worker.mesh.axes_text}), and "
            f"each worker of the cluster has {num_devices}. Start it with "
            f"LocalCluster(worker_devices={size}), or make the mesh of {num_devices}."
        )
    if worker.how.accumulate != 1:
        faults.append(
            f"worker={worker!r} with accumulate={worker.how.accumulate}: a worker takes one batch "
            "in a step. Leave it out, and give the optimizer gradient_accumulation_steps="
            f"{worker.how.accumulate}: the servers accumulate."
        )
    if worker.how.local is not None:
        faults.append(
            f"worker={worker!r} with local={worker.how.local!r}: say it in fit(local=...), and the "
            "worker's steps go to the servers so."
        )
    if isinstance(worker.how.sums, GradientSum):
        faults.append(
            f"worker={worker!r} with sums={worker.how.sums!r}: the servers sum what workers send. "
            "Leave it out; compression= makes gradients smaller on their way."
        )
    here = cluster.spec is None
    if here and worker.mesh.is_abstract:
        faults.append(
            f"worker={worker!r}: without a cluster this process is the worker, and the mesh "
            f"({worker.mesh.axes_text}) has no devices. Make it with "
            f"create_mesh({dict(worker.mesh.axes)!r})."
        )
    if faults:
        raise ClusterError("\n".join(faults))
    return worker if here or worker.mesh.is_abstract else worker.on(worker.mesh.abstract())
