"""What lasts while a group is started again: the link to other hosts, its places, its programs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import ClusterError
from .devices import device_variables
from .discovery import Discovery
from .elastic import FAILURES, MOST, Elastic
from .failure import Failure
from .group_options import GroupOptions
from .joining import GENERATION
from .memory import MEMORY, HostMemory
from .nodes import Hub, Share, Spoke, rendezvous
from .private_folder import PrivateFolder
from .processes import free_port
from .standby import Standbys

_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Start:
    """What a group is started with: its share of the ranks, their places, and what they read.

    ``devices`` are variables of each place, ``variables`` those of every start, and
    ``of_generation`` those of this one.
    """

    share: Share
    places: tuple[int, ...]
    devices: Sequence[Mapping[str, str]]
    variables: Mapping[str, str]
    of_generation: Mapping[str, str]
    standbys: Standbys | None  # where processes are started ahead


@dataclass(frozen=True)
class End:
    """How a group has ended; ``again``: it is to be started again, and else ``why`` not."""

    code: int  # the exit code
    failure: Failure | None = None
    again: bool = False
    why: str = ""
    saved: int = -1  # the step of the newest checkpoint; -1: there is none
    first_rank: int = 0  # of this host


class Ground:
    """What lasts while groups are started again: link to other hosts, places, compiled programs."""

    def __init__(self, options: GroupOptions, rule: Elastic) -> None:
        self._options, self.rule = options, rule
        if options.log_dir is not None:
            _make_folder(options.log_dir)
        changes = options.is_elastic or options.nodes > 1
        self._devices = device_variables(
            options.processes, options.devices, os.environ, changes=changes
        )
        self.folder = PrivateFolder()
        is_ahead = rule.max_restarts > 0 and options.standby
        self._standbys = Standbys(self.folder.path) if is_ahead else None
        self._memory: HostMemory | None = None
        self._discovery: Discovery | None = None
        self.link: Hub | Spoke | None = None
        try:
            if rule.max_restarts > 0:
                self._memory = HostMemory(self.folder.path, options.processes)
            if options.discovery is not None:
                self._discovery = Discovery(options.discovery)
            if options.nodes > 1:
                least = options.least_nodes or options.nodes
                goes_on = rule.max_restarts > 0
                self.link = rendezvous(
                    options.rendezvous, least, options.nodes, goes_on, options.stall_s
                )
        except BaseException:
            self.close()
            raise
        self._places: list[int] = []

    def start(self, generation: int, failures: str) -> Start | None:
        """The next start; ``None`` where the other hosts have come to their end."""
        self._places = self._wait_for_places()
        count, wait_s = len(self._places), self._options.join_s
        if self.link is None:
            share = Share(0, count, count, f"127.0.0.1:{free_port()}", "")
        else:
            answer = self.link.meet(count, wait_s)
            if answer is None:
                return None
            share = answer
        variables: dict[str, str] = {}
        if self._options.is_elastic:
            variables[MOST] = str(self._options.nodes * self._options.processes)
        if self._memory is not None:
            variables[MEMORY] = str(self._memory.folder)
            variables |= _compiled_in(self.folder.path)
        of_generation = {GENERATION: str(generation), FAILURES: failures}
        places = tuple(self._places)
        return Start(share, places, self._devices, variables, of_generation, self._standbys)

    def has_changed(self) -> bool:
        """Whether a group on other places, or other hosts, is to take the place of this one."""
        if self.link is not None:
            return isinstance(self.link, Hub) and self.link.has_changed()
        return self._present() != self._places

    @property
    def outlives_hosts(self) -> bool:
        """Whether the group goes on where another host leaves."""
        return self._options.least_nodes is not None

    def close(self) -> None:
        """Leave the other hosts, and what was compiled."""
        if self._discovery is not None:
            self._discovery.close()
        if self._standbys is not None:
            self._standbys.close()
        if self.link is not None:
            self.link.close()
        if self._memory is not None:
            self._memory.close()
        self.folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _present(self) -> list[int]:
        return self.rule.places(None if self._discovery is None else self._discovery.places)

    def _wait_for_places(self) -> list[int]:
        until_s = time.monotonic() + self._options.join_s
        while len(present := self._present()) < self.rule.least:
            if time.monotonic() > until_s:
                raise ClusterError(
                    f"there are {len(present)} places for processes after "
                    f"{self._options.join_s:g} s, and {self.rule.least} are needed."
                )
            time.sleep(_LOOK_EVERY_S)
        return present


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"the folder for logs cannot be made: {error}. Name another one by --log-dir."
        ) from error


def _compiled_in(folder: Path) -> dict[str, str]:
    """Variables by which a process finds what those of former starts have compiled."""
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {} if "JAX_COMPILATION_CACHE_DIR" in os.environ else variables
