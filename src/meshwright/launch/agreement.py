"""Whether all processes of a group are about to do the same: facts of each in, differences out.

A process with another model, seed or batch size trains wrongly and silently, or hangs all others
in a collective. Each one therefore says what it is about to do, over a channel that needs no JAX,
and all get the same answer.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from ..errors import AgreementError, MeshwrightError, ProcessError
from .doors import Entrance, Visit, packed
from .keys import Keys
from .outlines import Outline, Outlined, Search, windows

Facts = Mapping[str, str]
_SHOWN = 12
_POLL_MS = 200
_LATER_ROUND_S = 600.0  # reading data may take one rank much longer than another
_LONGEST_VALUE = 160
_APART_S = 5.0  # of clocks; an answer may be on its way for a part of it
_SEARCH_S = 20.0  # for the next answer of each process about what differs


@dataclass(frozen=True)
class Party:
    """One process and what it says of itself."""

    rank: int
    host: str
    pid: int
    facts: Facts
    outlined: tuple[str, ...] = ()  # facts that stand for a list of texts

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def differences(parties: Sequence[Party]) -> list[str]:
    """A line for each field in which two of them differ; JSON objects differ by entry.

    A field that some do not have is not compared with them.

    >>> a = Party(0, "n01", 17, {"batch size": "32", "epochs": "3"})
    >>> b = Party(1, "n02", 18, {"batch size": "64", "epochs": "3"})
    >>> differences([a, b])
    ['batch size: 32 on rank 0 (host n01, pid 17), 64 on rank 1 (host n02, pid 18)']
    """
    lines = []
    for name in dict.fromkeys(name for party in parties for name in party.facts):
        values = {p.rank: p.facts[name] for p in parties if name in p.facts}
        if len(set(values.values())) > 1:
            lines += _by_entry(name, values, parties)
    return lines


def _by_entry(name: str, values: dict[int, str], parties: Sequence[Party]) -> list[str]:
    objects = {rank: _object(value) for rank, value in values.items()}
    if any(own is None for own in objects.values()):
        return [f"{name}: {_shared_out(values, parties)}"]
    entries = dict.fromkeys(key for own in objects.values() for key in own or {})
    lines = []
    for key in entries:
        of_key = {
            r: json.dumps((o or {}).get(key), default=str).strip('"') for r, o in objects.items()
        }
        if len(set(of_key.values())) > 1:
            lines.append(f"{name}, {key}: {_shared_out(of_key, parties)}")
    return lines


def _object(value: str) -> dict[str, Any] | None:
    if not value.startswith("{"):
        return None
    try:
        entries = json.loads(value)
    except ValueError:  # a dict of Python's
        return None
    return entries if isinstance(entries, dict) else None


def _shared_out(values: dict[int, str], parties: Sequence[Party]) -> str:
    """Which value is whose: ``32 on rank 0 (host a, pid 1) and 2 more, 64 on rank 3 (...)``."""
    by_rank = {party.rank: party for party in parties}
    parts = []
    for value in dict.fromkeys(values.values()):
        ranks = [rank for rank, own in values.items() if own == value]
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        short = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}…"
        parts.append(f"{short} on {by_rank[ranks[0]]}{more}")
    return ", ".join(parts)


def disagreement(lines: Sequence[str], processes: int) -> str:
    """The message about these differences."""
    lines_shown = [
        *lines[:_SHOWN],
        *([f"and {len(lines) - _SHOWN} more"] if lines[_SHOWN:] else []),
    ]
    return (
        f"the {processes} processes of the group differ:\n  "
        + "\n  ".join(lines_shown)
        + "\nAll of them must run the same program on the same data with the same options "
        "(--no-agree, or MESHWRIGHT_AGREE=0, leaves this check out)."
    )


def clock_note(party: Party, ahead_s: float) -> str:
    """What to say of a clock that is this far ahead of rank 0's; nothing within a few seconds.

    >>> party = Party(3, "n02", 18, {})
    >>> clock_note(party, 1.5)
    ''
    >>> print(clock_note(party, -90.0).partition(". ")[0])
    the clock of rank 3 (host n02, pid 18) is 90 s behind that of rank 0
    """
    if abs(ahead_s) < _APART_S:
        return ""
    where = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"the clock of {party} is {abs(ahead_s):.0f} s {where} that of rank 0. Training goes on: "
        "no limit, deadline or checkpoint depends on it. Times in logs and of files do, and "
        "storage that checks the time may refuse requests. Set the clocks of the hosts by NTP."
    )


class Meeting:
    """Where the processes of a group meet: a thread that collects facts, round by round.

    ``wait_s`` is how long the first round waits for the last process after the first has come;
    with ``keys`` only processes that have them may come, and all that agree receive ``tells``.
    Raises :class:`zmq.ZMQError` where it cannot listen at the address.
    """

    def __init__(
        self,
        address: str,
        processes: int,
        wait_s: float = 60.0,
        keys: Keys | None = None,
        tells: Mapping[str, Any] | None = None,
    ) -> None:
        self._processes, self._wait_s, self._tells = processes, wait_s, dict(tells or {})
        self._entrance = Entrance(keys)
        self._socket = self._entrance.socket
        self._rounds: dict[int, dict[int, tuple[bytes, Party]]] = {}
        self._began_s: dict[int, float] = {}
        self._error: dict[str, Any] | None = None
        self._search: _Searching | None = None
        self._closed = False
        try:
            self._entrance.bind(address)
        except BaseException:
            self._entrance.close()
            raise
        self._thread = threading.Thread(target=self._run, name="meeting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._entrance):
            while not self._closed:
                if self._socket.poll(_POLL_MS):
                    self._hear()
                if self._search is not None and time.monotonic() > self._search.until_s:
                    self._end_search()
                for number, began_s in list(self._began_s.items()):
                    limit_s = self._wait_s if number == 0 else _LATER_ROUND_S
                    if time.monotonic() - began_s > limit_s:
                        self._refuse(number, self._missing(number, limit_s))

    def _hear(self) -> None:
        """Take the next message, and leave out what no process of a group has sent."""
        received = self._entrance.receive()
        if received is None:
            return
        sender, message = received
        if self._search is not None and _is_answer(message):
            self._go_on(sender, message)
        elif _is_attendance(message):
            outlined = tuple(message.get("outlined", ()))
            who = message["rank"], message["host"], message["pid"]
            party = Party(*who, message["facts"], outlined)
            self._take(sender, party, message["round"], message["processes"])

    def _take(self, sender: bytes, party: Party, number: int, processes: int) -> None:
        if self._error is not None:
            self._answer(sender, self._error)
            return
        present = self._rounds.setdefault(number, {})
        self._began_s.setdefault(number, time.monotonic())
        other = present.get(party.rank)
        twice = other is not None and (other[1].host, other[1].pid) != (party.host, party.pid)
        key = party.rank if not twice else -1 - len(present)
        present[key] = (sender, party)
        if other is not None and twice:
            text = (
                f"two processes have rank {party.rank}: host {other[1].host}, pid {other[1].pid}, "
                f"and host {party.host}, pid {party.pid}. Each process needs a rank of its own."
            )
            self._refuse(number, {"text": text, "kind": "agreement"})
        elif processes != self._processes:
            text = f"processes: {self._processes} where the group meets, {processes} on {party}"
            lines = [text]
            self._refuse(
                number, {"text": disagreement(lines, self._processes), "kind": "agreement"}
            )
        elif len(present) == self._processes:
            self._decide(number)

    def _decide(self, number: int) -> None:
        parties = [party for _, (_, party) in sorted(self._rounds[number].items())]
        lines = differences(parties)
        if lines:
            self._search = _search(number, lines, parties)
            self._ask() if self._search else self._differ(number, lines)
            return
        seed = hash((parties[0].host, parties[0].pid)) % 2**31
        for sender, _ in self._rounds.pop(number).values():
            self._answer(sender, {"seed": seed, "clock_s": time.time(), **self._tells})
        del self._began_s[number]

    def _differ(self, number: int, lines: Sequence[str]) -> None:
        text = disagreement(lines, self._processes)
        self._refuse(number, {"text": text, "kind": "agreement"})

    # Where long texts first differ

    def _ask(self) -> None:
        assert self._search is not None
        searching = self._search
        searching.until_s, searching.answers = time.monotonic() + _SEARCH_S, {}
        question = {"ask": searching.search.name, "ends": searching.search.asks()}
        for rank, (sender, _) in self._rounds[searching.number].items():
            if rank in searching.search.ranks:
                self._answer(sender, question)

    def _go_on(self, sender: bytes, message: Mapping[str, Any]) -> None:
        """Take an answer; once all are here, ask the next question, or say what differs."""
        assert self._search is not None
        searching = self._search
        for rank, (of_rank, _) in self._rounds[searching.number].items():
            if of_rank == sender:
                searching.answers[rank] = message["answer"]
        if searching.search.ranks <= searching.answers.keys():
            searching.search.take(searching.answers)
            self._ask() if searching.search.shown is None else self._end_search()

    def _end_search(self) -> None:
        assert self._search is not None
        searching, self._search = self._search, None
        parties = [party for _, (_, party) in sorted(self._rounds[searching.number].items())]
        shown = windows(searching.search.shown or {})
        more = [f"{searching.search.title}: {_shared_out(shown, parties)}"] if shown else []
        self._differ(searching.number, [*searching.lines, *more])

    def _missing(self, number: int, limit_s: float) -> dict[str, Any]:
        present = [party for _, party in self._rounds[number].values()]
        missing = sorted(set(range(self._processes)) - {party.rank for party in present})
        ranks = ", ".join(map(str, missing))
        text = (
            f"rank {ranks} of {self._processes} has not come within {limit_s:g} s; "
            f"{', '.join(map(str, present))} {'is' if len(present) == 1 else 'are'} here. "
            "See whether it was started, and whether it can reach this host."
        )
        return {"text": text, "kind": "process", "rank": missing[0] if missing else -1}

    def _refuse(self, number: int, error: dict[str, Any]) -> None:
        """One error for all: those that wait, and those that come later."""
        self._error = error
        for sender, _ in self._rounds.pop(number, {}).values():
            self._answer(sender, error)
        self._began_s.clear()

    def _answer(self, sender: bytes, answer: dict[str, Any]) -> None:
        self._socket.send_multipart([sender, packed(answer)])


class Attendance:
    """One process's side of a :class:`Meeting`: :meth:`agree` waits for all others."""

    def __init__(
        self,
        address: str,
        party: Party,
        processes: int,
        wait_s: float = 60.0,
        keys: Keys | None = None,
    ) -> None:
        self._address, self._party, self._processes = address, party, processes
        self._outlined: dict[str, Outlined] = {}
        self._outlines: dict[str, Outline] = {}
        self._wait_s, self._round = wait_s, 0
        self._visit = Visit(address, keys, f"rank 0 at {address}", linger_ms=0)
        self._socket = self._visit.socket

    def agree(self, facts: Facts) -> dict[str, Any]:
        """Say these facts and wait for the answer; every process gets the same one.

        Raises :class:`~meshwright.AgreementError` where they differ, and
        :class:`~meshwright.ProcessError` for a process that does not come.
        """
        self.say(facts)
        return self.answer()

    def close(self) -> None:
        """Leave the meeting."""
        self._visit.close()

    def say(self, facts: Facts) -> None:
        """The first half of :meth:`agree`: it does not wait."""
        message = {
            "round": self._round,
            "rank": self._party.rank,
            "processes": self._processes,
            "host": self._party.host,
            "pid": self._party.pid,
            "facts": dict(facts),
        }
        self._round += 1
        self._outlined = {n: fact for n, fact in facts.items() if isinstance(fact, Outlined)}
        self._outlines = {}
        self._socket.send(packed({**message, "outlined": list(self._outlined)}))

    def answer(self) -> dict[str, Any]:
        """The second half of :meth:`agree`."""
        while "ask" in (answer := self._received()):
            name = answer["ask"]
            if name not in self._outlines:
                self._outlines[name] = Outline(self._outlined[name].texts())
            self._socket.send(packed({"answer": self._outlines[name].answer(answer["ends"])}))
        self._outlined = {}
        if "text" in answer:
            raise _error(answer)
        return answer

    def _received(self) -> dict[str, Any]:
        wait_s = self._wait_s if self._round == 1 else _LATER_ROUND_S
        until_s = time.monotonic() + wait_s + 2.0  # the ranks that wait there give up earlier
        while not self._socket.poll(_POLL_MS):
            self._visit.check()
            if time.monotonic() > until_s:
                raise ProcessError(
                    f"rank 0 does not answer {self._party} at {self._address} within "
                    f"{wait_s:.0f} s. See whether it was started, and whether a firewall closes "
                    "that port.",
                    rank=0,
                )
        return msgpack.unpackb(self._socket.recv())


def _is_attendance(message: Mapping[str, Any]) -> bool:
    """Whether a message is one of :meth:`Attendance.say`."""
    facts = message.get("facts")
    return (
        all(isinstance(message.get(n), int) for n in ("rank", "pid", "round", "processes"))
        and isinstance(message.get("host"), str)
        and isinstance(facts, dict)
        and all(isinstance(text, str) for text in facts.values())
    )


def _is_answer(message: Mapping[str, Any]) -> bool:
    """Whether a message answers a question about what differs."""
    answer = message.get("answer")
    return isinstance(answer, list) and all(isinstance(text, str) for text in answer)


@dataclass
class _Searching:
    """A search, the round that it is for, and what is known to differ there."""

    search: Search
    number: int
    lines: Sequence[str]
    until_s: float = 0.0
    answers: dict[int, list[str]] = field(default_factory=dict)


def _search(number: int, lines: Sequence[str], parties: Sequence[Party]) -> _Searching | None:
    """The search in the first fact that differs and has an outline in all that have the fact."""
    for name in dict.fromkeys(name for party in parties for name in party.outlined):
        having = [party for party in parties if name in party.facts]
        is_outlined = all(name in party.outlined for party in having)
        if is_outlined and len({party.facts[name] for party in having}) > 1:
            return _Searching(Search(name, {party.rank for party in having}), number, lines)
    return None


def _error(answer: dict[str, Any]) -> MeshwrightError:
    if answer["kind"] == "process":
        return ProcessError(answer["text"], rank=answer["rank"])
    return AgreementError(answer["text"])
