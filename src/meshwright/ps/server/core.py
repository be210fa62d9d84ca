"""A parameter server without its sockets: it takes messages, and answers them.

Nothing here looks at a clock or starts a thread, and files are touched only by the messages that
name one; so everything that a server promises can be tested without a process.

    hello      task, incarnation                  who the server is, and what it holds
    create     name, shape, dtype, init           a variable, or a table with hashed keys
    read       names, round, at_least             values; it may wait until they are new enough
    lookup     name, make; rows or keys           some rows
    push       updates, step, then_read, ...      changes and gradients: all or nothing, once
    optimizer  group, config, names               what gradients of these variables mean
    rate       group, learning_rate               in the place of the optimizer's own
    slots      names                              the optimizer's arrays
    load       values, tables, slots, steps       what a checkpoint holds
    keys       name                               those of a hash table, in the order of its rows
    piece      name, start, stop                  some rows of a table, with their slots
    changes    name, life, mark                   rows that have changed since, and removed keys
    put        name, slots, scalars, steps        rows of a table and their slots, from a piece
    round      round, of                          a round gets another number of gradients
    norms                                         of the round that waits to be clipped
    clip       round, totals                      apply it; the squares of all servers together
    fence      incarnation                        nothing of this one is taken any more
    snapshot, restore   path                      all of the state, to or from a file
    stats, stop                                   counts; and the end

Every answer tells the server's ``version``, the count of pushes that it has applied; and, of a
server that was started again, its ``generation`` and ``base``, the version it came back with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ArrayError, ProtocolError, TaskError
from ..wire.failures import failure
from ..wire.message import Message
from ..wire.schema import TO_SERVER, check
from .groups import answer_of, begin_averages
from .loading import changes_of, load, piece_of, put_piece
from .pushes import push
from .shards import HashShard
from .snapshot import read, restore, snapshot_of, write
from .state import State


class ServerCore:
    """The core of server ``ps:<index>``; not for several threads at once.

    ``generation`` counts its restarts, ``memory_bytes`` bounds what variables and slots may take.
    ``snapshot_dir`` is the only directory in which ``snapshot`` and ``restore`` may name a file.
    With ``copy_reads=False`` the arrays of an answer are the variables' own memory, which the
    next message may change: for a transport that has copied them by then.

    >>> core = ServerCore()
    >>> zeros = {"name": "w", "shape": [2], "dtype": "float32", "init": {"kind": "zeros"}}
    >>> core.handle("worker:0", Message("create", zeros)).head["made"]
    True
    >>> add = {"step": 0, "updates": [["w", "add", 1, {}]], "then_read": ["w"]}
    >>> core.handle("worker:0", Message("push", add, (np.ones(2),))).arrays
    (array([1., 1.], dtype=float32),)
    """

    def __init__(
        self,
        index: int = 0,
        *,
        generation: int = 0,
        memory_bytes: int | None = None,
        snapshot_dir: str | Path | None = None,
        copy_reads: bool = True,
    ) -> None:
        self.task = f"ps:{index}"
        self.state = State(self.task, generation, memory_bytes)
        self.stopped = False
        self.copy_reads = copy_reads
        self._snapshot_dir = None if snapshot_dir is None else Path(snapshot_dir)
        self._waiting = Waiting()
        self._later: list[tuple[str, int, Message]] = []

    def handle(self, peer: str, message: Message) -> Message | None:
        """The answer to a message; ``None``: it comes later, out of :meth:`ready`.

        What goes wrong is an answer of kind ``"error"``.
        """
        counts = self.state.counts
        counts.bytes_in += message.num_bytes
        try:
            answer = self._answer(peer, message)
        except Exception as error:
            answer = failure(error, self.task)
        if answer is None:
            return None
        if answer.kind == "error":
            counts.refused += 1
        counts.bytes_out += answer.num_bytes
        return answer

    def ready(self) -> list[tuple[str, int, Message]]:
        """Answers that have become due: peer, the request's number, and the answer."""
        for peer, message in self._waiting.due(self.state):
            answer = self._read_now(peer, message)
            self.state.counts.bytes_out += answer.num_bytes
            self._later.append((peer, int(message.head.get("id") or 0), answer))
        later, self._later = self._later, []
        return later

    def _answer(self, peer: str, message: Message) -> Message | None:
        answer = _ANSWERS.get(message.kind)
        if answer is None:
            raise ProtocolError(
                f"{self.task}: unknown request {message.kind!r}; expected one of "
                f"{', '.join(sorted(_ANSWERS))}.",
                self.task,
            )
        check(message, TO_SERVER[message.kind], self.task)
        if message.kind != "fence":
            self.state.fences.check(message.head.get("incarnation"), self.task)
        return answer(self, peer, message)

    def _ok(self, head: Mapping[str, Any], *arrays: np.ndarray) -> Message:
        state = self.state
        whole = {"version": state.version, **head}
        if state.generation:  # an answer may come before the greeting of a new connection
            whole |= {"generation": state.generation, "base": state.base}
        return Message("ok", whole, arrays)

    # What messages ask for, by kind

    def _hello(self, peer: str, message: Message) -> Message:
        state = self.state
        return self._ok(
            {
                "task": self.task,
                "generation": state.generation,
                "base": state.base,
                "names": state.store.names,
                "snapshot": state.snapshot_head(),
                "rounds": state.rounds.applied,
            }
        )

    def _create(self, peer: str, message: Message) -> Message:
        head = message.head
        is_new = self.state.store.create(
            head["name"], head["shape"], head["dtype"], head["init"], message.arrays
        )
        self.state.reshaped = self.state.reshaped or is_new
        return self._ok({"made": is_new})

    def _read(self, peer: str, message: Message) -> Message | None:
        self.state.store.get(message.head["names"])
        if self._waiting.must_wait(self.state, message):
            self._waiting.add(peer, message)
            return None
        return self._read_now(peer, message)

    def _read_now(self, peer: str, message: Message) -> Message:
        names = message.head["names"]
        arrays = self._values(peer, names)
        self.state.counts.reads += 1
        return self._ok({"versions": [self.state.version] * len(names)}, *arrays)

    def _values(self, peer: str, names: list[str]) -> list[np.ndarray]:
        shards = self.state.store.get(names)
        for shard in shards:
            self.state.backups.keep(peer, shard)
        return self._sent([shard.values for shard in shards])

    def _sent(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [array.copy() for array in arrays] if self.copy_reads else arrays

    def _lookup(self, peer: str, message: Message) -> Message:
        shard = self.state.store.one(message.head["name"])
        if len(message.arrays) != 1:
            raise ArrayError(
                f"a lookup of {shard.name!r} takes one array of rows, not {len(message.arrays)}."
            )
        rows = message.arrays[0]
        self.state.counts.lookups += 1
        make = bool(message.head.get("make", False))
        values = shard.lookup(rows, make=make)
        if make or not shard.is_hash:
            self.state.backups.keep_rows(peer, shard, rows, values)
        return self._ok({}, values)

    def _push(self, peer: str, message: Message) -> Message:
        head = push(self.state, peer, message)
        names = message.head.get("then_read") or []
        return self._ok(head, *(self._values(peer, names) if names else ()))

    def _optimizer(self, peer: str, message: Message) -> Message:
        group, is_new = self.state.groups.set(self.state.store, message.head)
        self.state.reshaped = self.state.reshaped or is_new
        if group.compensated:
            self.state.backups.keep_all(group.names)
        return self._ok(answer_of(group, is_new))

    def _rate(self, peer: str, message: Message) -> Message:
        rate = message.head["learning_rate"]
        self.state.groups.set_rate(message.head["group"], rate)
        return self._ok({"learning_rate": float(rate)})

    def _slots(self, peer: str, message: Message) -> Message:
        shards = self.state.store.get(message.head["names"])
        for shard in shards:
            begin_averages(shard)
        arrays = [shard.slot(name) for shard in shards for name in shard.slots]
        head = {
            "slots": [[shard.name, list(shard.slots)] for shard in shards],
            "steps": {shard.name: shard.steps for shard in shards},
        }
        return self._ok(head, *self._sent(arrays))

    def _load(self, peer: str, message: Message) -> Message:
        load(self.state.store, message)
        self.state.reshaped = True
        return self._ok({})

    def _keys(self, peer: str, message: Message) -> Message:
        shard = self.state.store.one(message.head["name"])
        if not isinstance(shard, HashShard):
            raise TaskError(
                f"variable {shard.name!r} is not a hash table and has no keys.", self.task
            )
        return self._ok({}, shard.keys)

    def _piece(self, peer: str, message: Message) -> Message:
        head = message.head
        shard = self.state.store.one(head["name"])
        about, arrays = piece_of(shard, int(head["start"]), int(head["stop"]))
        return self._ok(about, *self._sent(arrays))

    def _changes(self, peer: str, message: Message) -> Message:
        head = message.head
        shard = self.state.store.one(head["name"])
        if not shard.shape:
            raise ArrayError(f"variable {shard.name!r} is a scalar, and has no rows.")
        about, arrays = changes_of(shard, head.get("life"), head.get("mark"))
        return self._ok(about, *arrays)

    def _put(self, peer: str, message: Message) -> Message:
        shard = self.state.store.one(message.head["name"])
        put_piece(shard, message.head, message.arrays)
        self.state.reshaped = True
        return self._ok({})

    def _fence(self, peer: str, message: Message) -> Message:
        new = self.state.fences.add(str(message.head["incarnation"]))
        self.state.fenced = self.state.fenced or new
        return self._ok({"new": new})

    def _round(self, peer: str, message: Message) -> Message:
        self.state.rounds.resize(int(message.head["round"]), int(message.head["of"]))
        self.state.apply_rounds()
        return self._ok({"rounds": self.state.rounds.applied})

    def _norms(self, peer: str, message: Message) -> Message:
        return self._ok({"clipping": self.state.clipping_head()})

    def _clip(self, peer: str, message: Message) -> Message:
        self.state.clip_round(int(message.head["round"]), message.head["totals"])
        return self._ok({"clipping": self.state.clipping_head()})

    def _stats(self, peer: str, message: Message) -> Message:
        state = self.state
        stats = {
            **state.counts.as_dict(),
            "task": self.task,
            "generation": state.generation,
            "base": state.base,
            "variables": len(state.store.names),
            "variable_bytes": state.store.variable_bytes,
            "slot_bytes": state.store.slot_bytes,
            "rounds": state.rounds.applied,
            "kept_steps": len(state.applied),
            "first_free_step": state.applied.first_free,
            "snapshot": state.snapshot_head(),
            "save_fault": state.save_fault,
        }
        return self._ok(stats)

    def _snapshot(self, peer: str, message: Message) -> Message:
        path = self._inside(message.head["path"])
        snapshot = snapshot_of(self.state, self.state.snapshot.number + 1)
        write(snapshot, path)
        return self._ok({"path": str(path), "num_bytes": snapshot.num_bytes})

    def _restore(self, peer: str, message: Message) -> Message:
        state = self.state
        snapshot = read(self._inside(message.head["path"]))
        self.state = restore(snapshot, state.generation, state.store.memory_bytes)
        self.state.reshaped = True
        return self._ok({"names": self.state.store.names})

    def _inside(self, path: str) -> Path:
        """A path relative to the directory of snapshots; one that leads out of it is refused."""
        if self._snapshot_dir is None:
            raise TaskError(f"{self.task} has no directory for snapshots.", self.task)
        directory = self._snapshot_dir.resolve()
        target = (directory / path).resolve()
        if not target.is_relative_to(directory) or target == directory:
            raise TaskError(
                f"{self.task} writes and reads snapshots inside {directory}; received {path!r}. "
                "Give the name of a file in it.",
                self.task,
            )
        return target

    def _stop(self, peer: str, message: Message) -> Message:
        self.stopped = True
        return self._ok({})


# A kind of message is declared in the schema, and answered by the method of its name.
_ANSWERS: dict[str, Callable[[ServerCore, str, Message], Message | None]] = {
    kind: getattr(ServerCore, f"_{kind}") for kind in TO_SERVER
}


class Waiting:
    """Reads in the order in which they came."""

    def __init__(self) -> None:
        self._reads: list[tuple[str, Message]] = []

    def must_wait(self, state: State, message: Message) -> bool:
        """Whether a read asks for a round or a version that has not come."""
        rounds = message.head.get("round")
        if rounds is not None and state.rounds.applied < rounds:
            return True
        return state.version < _version(message.head.get("at_least"))

    def add(self, peer: str, message: Message) -> None:
        """Let a read wait; the same request, sent again, takes the place of the former."""
        number = message.head.get("id")
        self._reads = [
            (other, one)
            for other, one in self._reads
            if other != peer or one.head.get("id") != number
        ]
        self._reads.append((peer, message))

    def due(self, state: State) -> list[tuple[str, Message]]:
        """The reads that need wait no longer; they are no longer kept."""
        if not self._reads:
            return []
        due = [one for one in self._reads if not self.must_wait(state, one[1])]
        if due:
            self._reads = [one for one in self._reads if self.must_wait(state, one[1])]
        return due


def _version(at_least: Any) -> int:
    if isinstance(at_least, dict):
        at_least = at_least.get("version")
    return int(at_least or 0)
