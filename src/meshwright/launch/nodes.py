"""Launchers of one group on several hosts: they share out the ranks, and tell each other's fate.

All are started by the same command. The one that can listen at the rendezvous address is the hub:
it counts the others in, judges the ranks of all hosts, and passes on the first failure. A host that
falls silent is a failure too.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import zmq

from ..errors import ClusterError
from .addresses import ADDRESS_FORM, is_ipv6, split_address
from .doors import NO_KEYS, Entrance, Visit, group_keys, packed
from .failure import Failure
from .processes import free_port
from .progress import Progress
from .stalls import Seen, Stall

_EVERY_S = 0.25
_POLL_MS = 100
_LINGER_MS = 1000
_LAST_CALL_S = 5.0  # for more hosts, once the least number has come
_JOIN_EVERY_S = 2.0
_DECISION_S = 5.0
_PAUSE_S = 2.0  # this process itself was stopped, perhaps with all others


@dataclass(frozen=True)
class Share:
    """The part of a group that a host runs: ``processes`` ranks of ``total`` from ``first`` on."""

    first: int
    processes: int
    total: int
    coordinator: str  # host:port
    meeting: str  # an endpoint of ZeroMQ


class Hub:
    """The launcher at the rendezvous; rank 0 runs on its host.

    It waits for ``least`` to ``most`` hosts; those that are too many are spare.
    """

    def __init__(
        self,
        entrance: Entrance,
        host: str,
        least: int,
        most: int,
        silent_s: float,
    ) -> None:
        self._entrance, self._socket, self._host = entrance, entrance.socket, host
        self._least, self._most, self._round = least, most, 0
        self._silent_s = silent_s
        self._ports = free_port(), free_port()
        self._nodes: dict[bytes, dict[str, Any]] = {}
        self._waiting: dict[bytes, dict[str, Any]] = {}  # for the next start
        self._heard_s: dict[bytes, float] = {}
        self._exchanged_s = time.monotonic()
        self._states: dict[int, Seen] = {}
        self._ended: set[bytes] = set()  # their ranks have all ended
        self._departed: set[bytes] = set()  # they end for good, or are out of reach
        self.blamed: Stall | None = None
        self.is_changing = False
        self._total = 0

    def meet(self, processes: int, wait_s: float) -> Share | None:
        """Wait for the other hosts; the share of this one.

        All that took part before are waited for, and new ones only at the first time. Raises
        :class:`~meshwright.errors.ClusterError` where too few come.
        """
        members, first = set(self._nodes), self._round == 0
        until_s, newest_s = time.monotonic() + wait_s, time.monotonic()
        while not self._are_here(first, newest_s):
            before = len(self._waiting)
            if self._socket.poll(_POLL_MS):
                self._hear()
            newest_s = time.monotonic() if len(self._waiting) > before else newest_s
            if time.monotonic() > until_s:
                if self._may_start() and not first:
                    break
                self._refuse(wait_s)
        self._ended, self._departed, self._states = set(), set(), {}
        self._round += 1
        self.is_changing = False
        invited = sorted(self._waiting, key=lambda sender: sender not in members)[: self._most - 1]
        self._nodes = {sender: self._waiting.pop(sender) for sender in invited}
        self._ports = free_port(), free_port()
        self._total = processes + sum(node["processes"] for node in self._nodes.values())
        begin = processes
        for sender, node in self._nodes.items():
            node["first"] = begin if node["rank"] is None else node["rank"]
            share = self._share(node["first"], node["processes"])
            self._heard_s[sender] = time.monotonic()
            self._send(sender, {"kind": "start", "share": asdict(share), "round": self._round})
            begin += node["processes"]
        return self._share(0, processes)

    def _are_here(self, first: bool, newest_s: float) -> bool:
        if len(self._waiting) >= self._most - 1:
            return True
        now_s = time.monotonic()
        if first:
            return self._may_start() and now_s - newest_s > _LAST_CALL_S
        silent = {s for s, heard_s in self._heard_s.items() if now_s - heard_s > self._silent_s}
        present = set(self._nodes) - self._departed - silent
        return present <= set(self._waiting) and self._may_start()

    def _may_start(self) -> bool:
        return len(self._waiting) + 1 >= self._least

    def _refuse(self, wait_s: float) -> None:
        here = ", ".join([self._host, *(n["host"] for n in self._waiting.values())])
        missing = self._least - 1 - len(self._waiting)
        raise ClusterError(
            f"{missing} of {self._least} hosts have not come within {wait_s:g} s; present: {here}. "
            "Run the same command on each host."
        )

    def exchange(
        self, _seen: Iterable[Seen], is_done: bool, failure: Failure | None, _leaves: bool
    ) -> Failure | None:
        """Hear the others; the first failure."""
        now_s, before_s = time.monotonic(), self._exchanged_s
        self._exchanged_s = now_s
        if now_s - before_s > _PAUSE_S:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        while self._socket.poll(0):
            failure = self._hear() or failure
        return failure or self._silent()

    def end(self, failure: Failure, why_not_again: str | None) -> str | None:
        """Pass a failure on to all, and whether the group is started again."""
        message = {"kind": "end", "failure": asdict(failure), "why": why_not_again}
        for sender in self._nodes:
            self._send(sender, message)
        return why_not_again

    def has_changed(self) -> bool:
        """Whether there is room for a host that has come."""
        return bool(self._waiting) and len(self._nodes) + 1 < self._most

    def change(self) -> None:
        """Have all hosts save and meet again."""
        for sender in self._nodes:
            self._send(sender, {"kind": "change"})

    def _hear(self) -> Failure | None:
        received = self._entrance.receive()
        if received is None:
            return None
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a stranger's
            return self._take(*received)
        return None

    def _take(self, sender: bytes, message: dict[str, Any]) -> Failure | None:
        if message["kind"] == "join":
            message = _join_from(message)
            self._heard_s[sender] = time.monotonic()
            if sender not in self._nodes or message["round"] == self._round:  # else it comes late
                self._waiting[sender] = message
            self._send(sender, {"kind": "heard"})
            return None
        if message["kind"] == "leave":
            self._waiting.pop(sender, None)
            self._departed.add(sender)
        if sender not in self._nodes:
            return None
        self._heard_s[sender] = time.monotonic()
        failure = None
        if message["kind"] == "status":
            self._states |= {r: _seen_from(r, at) for r, at in message["ranks"]}
            if message["done"]:
                self._ended.add(sender)
            if message["leaves"]:
                self._departed.add(sender)
            failure = _failure_from(message["failure"])
        self._send(sender, {"kind": "heard"})
        return failure

    def others(self) -> list[Seen]:
        """What the ranks of other hosts were last seen doing."""
        return list(self._states.values())

    def blame(self, stall: Stall) -> None:
        """Have the launcher of a rank on another host read its stack, and report the failure."""
        self._send_to_host_of(stall.rank, {"kind": "blame", "stall": asdict(stall)})

    def name(self, rank: int, what: str) -> None:
        """Have the launcher of a rank on another host say this of it, with its stack."""
        self._send_to_host_of(rank, {"kind": "name", "rank": rank, "what": what})

    def _send_to_host_of(self, rank: int, message: Mapping[str, Any]) -> None:
        for sender, node in self._nodes.items():
            if node["first"] <= rank < node["first"] + node["processes"]:
                self._send(sender, message)

    def all_done(self) -> bool:
        """Whether the ranks of all other hosts have ended."""
        return len(self._ended) == len(self._nodes)

    def close(self) -> None:
        """Stop listening; hosts that wait for another start have come to their end."""
        for sender in {**self._nodes, **self._waiting}:
            self._send(sender, {"kind": "over"})
        self._entrance.close()

    def _silent(self) -> Failure | None:
        now_s = time.monotonic()
        for sender, node in self._nodes.items():
            is_expected = sender not in self._ended | self._departed
            if is_expected and now_s - self._heard_s[sender] > self._silent_s:
                what = (
                    f"is out of reach: the agent of its host is silent for {self._silent_s:.0f} s"
                )
                first = node["first"]
                self._departed.add(sender)
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

    def _send(self, sender: bytes, message: Mapping[str, Any]) -> None:
        self._socket.send_multipart([sender, packed(message)])


class Spoke:
    """A launcher on another host than the rendezvous; ``rank`` is its first one, if it is known."""

    def __init__(
        self, address: str, goes_on: bool, silent_s: float, rank: int | None = None
    ) -> None:
        self._address, self._goes_on, self._silent_s = address, goes_on, silent_s
        self._rank = rank
        keys = group_keys(address)
        self._named: list[tuple[int, str]] = []
        self._visit = Visit(f"tcp://{address}", keys, f"the rendezvous {address}", _LINGER_MS)
        self._socket = self._visit.socket
        self._said_s = 0.0
        self._heard_s = self._exchanged_s = time.monotonic()
        self.blamed: Stall | None = None
        self.is_changing = False
        self._round = 0
        self._why: str | None = ""
        self._failure: Failure | None = None
        self._share: Share | None = None

    def meet(self, processes: int, wait_s: float) -> Share | None:
        """Wait for the hub to say which ranks this host runs; ``None``: its group has ended."""
        self.blamed, self.is_changing, self._failure, self._why = None, False, None, ""
        self._named = []
        join: dict[str, Any] = {
            "kind": "join",
            "processes": processes,
            "host": socket.gethostname(),
            "rank": self._rank,
        }
        join["round"] = self._round
        said_s, heard_s = 0.0, time.monotonic()
        while time.monotonic() - heard_s < wait_s + 5:
            if time.monotonic() - said_s > _JOIN_EVERY_S:
                said_s = time.monotonic()
                self._send(join)
            self._visit.check()
            if not self._socket.poll(_POLL_MS):
                continue
            message = msgpack.unpackb(self._socket.recv())
            if self._goes_on:
                heard_s = time.monotonic()  # it may be spare for a long time
            if message["kind"] == "over":
                return None
            if message["kind"] == "start":
                self._share, self._round = Share(**message["share"]), message["round"]
                self._heard_s = time.monotonic()
                return self._share
        raise ClusterError(
            f"the rendezvous {self._address} does not answer within {wait_s:g} s. Start the "
            "same command on that host, and see whether a firewall closes the port."
        )

    def exchange(
        self, states: Iterable[Seen], is_done: bool, failure: Failure | None, leaves: bool
    ) -> Failure | None:
        """Report to the hub; the failure that ends the group, if there is one."""
        now_s, before_s = time.monotonic(), self._exchanged_s
        self._exchanged_s = now_s
        if now_s - before_s > _PAUSE_S:
            self._heard_s = now_s
        if failure is not None or is_done or now_s - self._said_s > _EVERY_S:
            self._said_s = now_s
            self._tell(states, is_done, failure, leaves)
        while self._socket.poll(0):
            self._hear()
        if self._failure is None and not is_done and now_s - self._heard_s > self._silent_s:
            what = f"is out of reach: the agent at {self._address} is silent"
            total = 0 if self._share is None else self._share.total
            host = self._address.rpartition(":")[0]
            self._failure = Failure(0, total, host, 0, "", 0, what)
        return self._failure or failure

    def end(self, failure: Failure, _why_not_again: str | None) -> str | None:
        """Wait for the hub to say whether the group is started again; ``None``: it is.

        A hub that is slow to decide, but there, is waited for.
        """
        asked_s = self._heard_s = time.monotonic()
        patience_s = max(_DECISION_S, self._silent_s)
        while self._failure is None and not self.is_changing:
            now_s = time.monotonic()
            if now_s - self._heard_s > patience_s:
                return f"the rendezvous {self._address} does not say whether the group goes on"
            if now_s - asked_s > _EVERY_S:
                asked_s = now_s
                self._tell([], False, failure, False)
            if self._socket.poll(_POLL_MS):
                self._hear()
        return None if self._failure is None else self._why

    def _tell(
        self, states: Iterable[Seen], is_done: bool, failure: Failure | None, leaves: bool
    ) -> None:
        now_s = time.monotonic()
        ranks = [(s.rank, _seen_as_list(s, now_s)) for s in states]
        status = {
            "ranks": ranks,
            "done": is_done,
            "leaves": leaves,
            "failure": None if failure is None else asdict(failure),
        }
        self._send({"kind": "status", **status})

    def _hear(self) -> None:
        message = msgpack.unpackb(self._socket.recv())
        self._heard_s = time.monotonic()
        if message["kind"] == "end":
            self._failure, self._why = _failure_from(message["failure"]), message["why"]
        if message["kind"] == "blame":
            self.blamed = Stall(**message["stall"])
        if message["kind"] == "name":
            self._named.append((message["rank"], message["what"]))
        if message["kind"] == "change":
            self.is_changing = True

    def others(self) -> list[Seen]:
        """Nothing: the hub judges."""
        return []

    def blame(self, stall: Stall) -> None:
        """Never called."""

    def name(self, rank: int, what: str) -> None:
        """Never called."""

    def named(self) -> list[tuple[int, str]]:
        """What the hub has said of slow ranks of this host since the last call."""
        named, self._named = self._named, []
        return named

    def all_done(self) -> bool:
        """A host whose own ranks have ended may leave."""
        return True

    def close(self) -> None:
        """Leave, once the last message is sent."""
        self._send({"kind": "leave"})
        self._visit.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.send(packed(message))


def rendezvous(
    address: str,
    least: int = 1,
    most: int = 1,
    goes_on: bool = False,
    silent_s: float = 10.0,
) -> Hub | Spoke:
    """A hub where this host can listen at ``host:port``, and else a spoke of the hub there.

    ``least`` to ``most`` hosts take part; with ``goes_on`` they may meet again. One that is silent
    for longer than ``silent_s`` is out of reach.

    Raises :class:`~meshwright.errors.ClusterError` for an address that is invalid or unknown.
    """
    parts = split_address(address)
    if parts is None:
        raise ClusterError(f"--rendezvous must be {ADDRESS_FORM}; received {address!r}.")
    host, port = parts
    try:
        ip = _ip_of(host)
    except OSError as error:
        raise ClusterError(f"--rendezvous: unknown host {host!r} ({error}).") from error
    keys = group_keys(f"{ip}:{port}")
    entrance = Entrance(keys)
    try:
        entrance.bind(f"tcp://{ip}:{port}")
    except zmq.ZMQError as error:
        entrance.close()
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise ClusterError(
                f"--rendezvous {address}: {os.strerror(error.errno or 0)}."
            ) from error
        return Spoke(f"{ip}:{port}", goes_on, silent_s)
    if keys is None:
        print(f"meshwright launch: --rendezvous {address}: {NO_KEYS}", file=sys.stderr, flush=True)
    return Hub(entrance, ip, least, most, silent_s)


def _ip_of(host: str) -> str:
    """The address of a host, of IPv4 where it has one; an IPv6 address is in brackets."""
    addresses = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    ip = min(addresses, key=lambda info: info[0] != socket.AF_INET)[4][0]
    return f"[{ip}]" if is_ipv6(str(ip)) else str(ip)


def _seen_as_list(state: Seen, now_s: float) -> list[Any]:
    at = state.progress
    unseen = state.stopped_s, state.waits_s, state.idle_s
    return [at.section, at.step, state.age_s(now_s), at.pid, *unseen]


def _seen_from(rank: int, values: list[Any]) -> Seen:
    section, step, age_s, pid, *seconds = values
    since_s = time.monotonic() - age_s
    return Seen(rank, Progress(section, step, since_s, pid), *seconds)


def _join_from(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a launcher says of itself; raises for anything else."""
    if not isinstance(message["host"], str):
        raise TypeError(message["host"])
    numbers = {name: operator.index(message[name]) for name in ("processes", "round")}
    rank = None if message["rank"] is None else operator.index(message["rank"])
    return {"host": message["host"], "rank": rank, **numbers}


def _failure_from(values: dict[str, Any] | None) -> Failure | None:
    return None if values is None else Failure(**{**values, "lines": tuple(values["lines"])})
