"""Variables of the environment as a mapping, and what to say where some are missing."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ClusterError

Environment = Mapping[str, str]


def need(variables: Environment, names: tuple[str, ...], where: str) -> None:
    """Raise :class:`ClusterError`, naming every variable that is not set."""
    missing = [name for name in names if not variables.get(name)]
    if missing:
        raise ClusterError(f"{where} needs {', '.join(names)}; not set: {', '.join(missing)}.")
