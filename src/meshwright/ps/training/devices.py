"""A worker's own devices: the mesh that a step was exported for, and its code on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import topology
from ...errors import TopologyError
from ...layouts.mesh import Mesh, create_mesh


def here(mesh: Mesh) -> Mesh:
    """This mesh on the devices of this process, all of them; one that has devices is as it is.

    Raises :class:`~meshwright.TopologyError` where their number is another.
    """
    if not mesh.is_abstract:
        return mesh
    there = topology.devices()
    if len(there) != mesh.size:
        raise TopologyError(
            f"the worker's strategy needs a mesh of {mesh.size} devices ({mesh.axes_text}), but "
            f"this worker has {len(there)} ({there[0].platform}). {_way_out(mesh, there)}"
        )
    return create_mesh(mesh.axes)


class OnDevices:
    """Exported code as a function; on the devices of a mesh, where it was exported for one."""

    def __init__(self, code: bytes, mesh: Mesh | None) -> None:
        import jax
        from jax import export as jax_export

        exported = jax_export.deserialize(bytearray(code))
        self._lies: tuple[Any, ...] | None = None
        if mesh is not None:
            flat = exported.in_shardings_jax(mesh.jax_mesh)
            self._lies, _ = jax.tree.unflatten(exported.in_tree, flat)
        self.call: Callable[..., Any] = (
            jax.jit(exported.call)
            if self._lies is None
            else jax.jit(exported.call, in_shardings=self._lies)
        )

    def put(self, argument: int, values: Any) -> Any:
        """The values of one argument on the devices, to be given many times."""
        import jax

        return jax.device_put(values, None if self._lies is None else self._lies[argument])


def _way_out(mesh: Mesh, there: list[Any]) -> str:
    if there[0].platform == "cpu":
        return (
            f"Start the cluster with LocalCluster(worker_devices={mesh.size}), or workers with the "
            f"environment variable JAX_NUM_CPU_DEVICES={mesh.size}, or make the mesh smaller."
        )
    return (
        f"Use a mesh of {len(there)} devices, or set the devices that each worker sees in its "
        "environment (CUDA_VISIBLE_DEVICES, for example)."
    )
