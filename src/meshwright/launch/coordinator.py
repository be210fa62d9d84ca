"""JAX's coordination service in an agent: outside the ranks, so that it outlives each of them.

JAX itself puts the service into rank 0 and ends every process that loses it, without its
``finally`` blocks. Here the death of rank 0 is that of any other rank.
"""

from __future__ import annotations

from .. import _compat
from ..errors import ClusterError

HOSTED = "MESHWRIGHT_COORDINATED"  # "1": an agent runs the service, and rank 0 does not
_SHUTDOWN_S = 24 * 3600  # an agent ends the group long before; JAX's 300 s would end a slow save


class Coordinator:
    """The service for a group of ``processes`` at ``host:port``, an address of this host.

    Raises :class:`~meshwright.errors.ClusterError` if the port is taken.
    """

    def __init__(self, address: str, processes: int) -> None:
        port = address.rpartition(":")[2]
        try:
            self._service = _compat.start_coordination_service(port, processes, _SHUTDOWN_S)
        except RuntimeError as error:
            raise ClusterError(
                f"port {port} is taken by another program; the group needs {address} for JAX's "
                "coordination service. End that program, or choose another port."
            ) from error

    def close(self) -> None:
        """Stop the service; the ranks must have ended."""
        self._service.shutdown()
