"""Launchers of one group on several hosts: they share out the ranks, and tell each other's fate.

All are started by the same command. The one that can listen at the rendezvous address is the hub:
it counts the others in, judges the ranks of all hosts, and passes on the first failure. A host that
falls silent is a failure too.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import zmq

from ..errors import ClusterError
from .failure import Failure
from .progress import Progress
from .stalls import Seen, Stall

_EVERY_S = 0.25
_SILENT_S = 10.0
_POLL_MS = 100


@dataclass(frozen=True)
class Share:
    """The part of a group that a host runs: ``processes`` ranks of ``total`` from ``first`` on."""

    first: int
    processes: int
    total: int
    coordinator: str  # host:port
    meeting: str  # an endpoint of ZeroMQ


class Hub:
    """The launcher at the rendezvous; rank 0 runs on its host."""

    def __init__(self, bound: zmq.Socket[bytes], host: str, ports: tuple[int, int]) -> None:
        self._socket, self._host, self._ports = bound, host, ports
        self._nodes: dict[bytes, dict[str, Any]] = {}
        self._heard_s: dict[bytes, float] = {}
        self._seen: dict[int, Seen] = {}
        self._gone: set[bytes] = set()  # their ranks have all ended
        self.blamed: Stall | None = None
        self._total = 0

    def meet(self, nodes: int, processes: int, wait_s: float) -> Share:
        """Wait for all other hosts; the share of this one."""
        until_s = time.monotonic() + wait_s
        while len(self._nodes) < nodes - 1:
            if self._socket.poll(_POLL_MS):
                sender, said = self._receive()
                if said["kind"] == "join":
                    self._nodes[sender] = said
            elif time.monotonic() > until_s:
                here = ", ".join([self._host, *(n["host"] for n in self._nodes.values())])
                raise ClusterError(
                    f"{nodes - 1 - len(self._nodes)} of {nodes} hosts have not come within "
                    f"{wait_s:g} s; present: {here}. Run the same command on each host."
                )
        self._total = processes + sum(node["processes"] for node in self._nodes.values())
        first = processes
        for sender, node in self._nodes.items():
            share = self._share(first, node["processes"])
            node["first"] = first
            self._heard_s[sender] = time.monotonic()
            self._send(sender, {"kind": "start", "share": asdict(share)})
            first += node["processes"]
        return self._share(0, processes)

    def exchange(
        self, _seen: Iterable[Seen], done: bool, failure: Failure | None
    ) -> Failure | None:
        """Hear the others, and pass a failure on to all; the first one."""
        while self._socket.poll(0):
            sender, said = self._receive()
            if sender not in self._nodes:
                continue
            self._heard_s[sender] = time.monotonic()
            if said["kind"] == "status":
                self._seen |= {r: _seen_from(r, at) for r, at in said["ranks"]}
                if said["done"]:
                    self._gone.add(sender)
                failure = failure or _failure_from(said["failure"])
            self._send(sender, {"kind": "heard"})
        failure = failure or self._silent()
        if failure is not None:
            for sender in self._nodes:
                self._send(sender, {"kind": "end", "failure": asdict(failure)})
        return failure

    def others(self) -> list[Seen]:
        """What the ranks of other hosts were last seen doing."""
        return list(self._seen.values())

    def blame(self, stall: Stall) -> None:
        """Have the launcher of a rank on another host read its stack, and report the failure."""
        for sender, node in self._nodes.items():
            if node["first"] <= stall.rank < node["first"] + node["processes"]:
                self._send(sender, {"kind": "blame", "stall": asdict(stall)})

    def all_done(self) -> bool:
        """Whether the ranks of all other hosts have ended."""
        return len(self._gone) == len(self._nodes)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def _silent(self) -> Failure | None:
        now_s = time.monotonic()
        for sender, heard_s in self._heard_s.items():
            if sender not in self._gone and now_s - heard_s > _SILENT_S:
                node = self._nodes[sender]
                what = f"is out of reach: the launcher of its host is silent for {_SILENT_S:.0f} s"
                first = node["first"]
                return Failure(first, self._total, node["host"], 0, "", 0, what)
        return None

    def _share(self, first: int, processes: int) -> Share:
        coordinator, meeting = self._ports
        return Share(
            first,
            processes,
            self._total,
            f"{self._host}:{coordinator}",
            f"tcp://{self._host}:{meeting}",
        )

    def _receive(self) -> tuple[bytes, dict[str, Any]]:
        sender, message = self._socket.recv_multipart()
        return sender, msgpack.unpackb(message)

    def _send(self, sender: bytes, message: Mapping[str, Any]) -> None:
        packed: bytes = msgpack.packb(message) or b""
        self._socket.send_multipart([sender, packed])


class Spoke:
    """A launcher on another host than the rendezvous."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.connect(f"tcp://{address}")
        self._said_s = 0.0
        self._heard_s = time.monotonic()
        self.blamed: Stall | None = None
        self._share: Share | None = None

    def meet(self, _nodes: int, processes: int, wait_s: float) -> Share:
        """Wait for the hub to say which ranks this host runs."""
        self._send({"kind": "join", "processes": processes, "host": socket.gethostname()})
        if not self._socket.poll(round((wait_s + 5) * 1000)):
            raise ClusterError(
                f"the rendezvous {self._address} does not answer within {wait_s:g} s. Start the "
                "same command on that host, and see whether a firewall closes the port."
            )
        self._share = Share(**msgpack.unpackb(self._socket.recv())["share"])
        self._heard_s = time.monotonic()
        return self._share

    def exchange(self, seen: Iterable[Seen], done: bool, failure: Failure | None) -> Failure | None:
        """Report to the hub; the failure that ends the group, if there is one."""
        now_s = time.monotonic()
        if failure is not None or done or now_s - self._said_s > _EVERY_S:
            self._said_s = now_s
            self._send(
                {
                    "kind": "status",
                    "ranks": [(s.rank, _seen_as_list(s, now_s)) for s in seen],
                    "done": done,
                    "failure": None if failure is None else asdict(failure),
                }
            )
        while self._socket.poll(0):
            said = msgpack.unpackb(self._socket.recv())
            self._heard_s = now_s
            if said["kind"] == "end":
                failure = _failure_from(said["failure"])
            if said["kind"] == "blame":
                self.blamed = Stall(**said["stall"])
        if failure is None and not done and now_s - self._heard_s > _SILENT_S:
            what = f"is out of reach: the launcher at {self._address} is silent"
            total = 0 if self._share is None else self._share.total
            failure = Failure(0, total, self._address.rpartition(":")[0], 0, "", 0, what)
        return failure

    def others(self) -> list[Seen]:
        """Nothing: the hub judges."""
        return []

    def blame(self, stall: Stall) -> None:
        """Never called."""

    def all_done(self) -> bool:
        """A host whose own ranks have ended may leave."""
        return True

    def close(self) -> None:
        """Leave, once the last message is sent."""
        self._socket.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.send(msgpack.packb(message))


def rendezvous(address: str, free_port: tuple[int, int]) -> Hub | Spoke:
    """A hub where this host can listen at ``host:port``, and else a spoke of the hub there.

    Raises :class:`~meshwright.errors.ClusterError` for an address that is invalid or unknown.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(f"--rendezvous must be host:port; received {address!r}.")
    try:
        ip = socket.gethostbyname(host)
    except OSError as error:
        raise ClusterError(f"--rendezvous: unknown host {host!r} ({error}).") from error
    bound = zmq.Context.instance().socket(zmq.ROUTER)
    bound.linger = 1000
    try:
        bound.bind(f"tcp://{ip}:{port}")
    except zmq.ZMQError as error:
        bound.close()
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise ClusterError(
                f"--rendezvous {address}: {os.strerror(error.errno or 0)}."
            ) from error
        return Spoke(f"{ip}:{port}")
    return Hub(bound, ip, free_port)


def _seen_as_list(seen: Seen, now_s: float) -> list[Any]:
    at = seen.progress
    return [at.section, at.step, seen.age_s(now_s), at.pid, seen.stopped_s]


def _seen_from(rank: int, values: list[Any]) -> Seen:
    section, step, age_s, pid, stopped_s = values
    return Seen(rank, Progress(section, step, time.monotonic() - age_s, pid), stopped_s)


def _failure_from(values: dict[str, Any] | None) -> Failure | None:
    return None if values is None else Failure(**{**values, "lines": tuple(values["lines"])})
