"""The servers of a cluster as one: variables read and changed across their shards.

Every operation is sent to all servers that it touches before the first answer is waited for.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ClusterError, UnknownVariableError
from ...launch.addresses import to_connect
from ...launch.keys import Keys
from ...launch.spec import ClusterSpec
from ..server.core import ServerCore
from ..wire.channel import Channel
from ..wire.memory import MemoryChannel
from ..wire.message import Message
from ..wire.sockets import SocketChannel
from ..worker.updates import Update
from .cutting import assembled, by_server, checked_rows, rows_of, split, split_rows
from .placing import VariableSpec
from .pushing import Acknowledged, Pending, Push, RoundState, Stamp, applied_of, next_to_clip

_AGAIN_S = 0.05  # between two tries while a restarted server is given its variables again
_REFILL_S = 30.0  # how long such tries go on


class Servers:
    """All servers of a cluster, over one channel each; not for several threads at once.

    ``timeout_s`` is how long one answer is waited for: a server that restarts is waited for as
    long as that. Raises :class:`~meshwright.errors.UnreachableError` after it.
    """

    def __init__(self, channels: Sequence[Channel], timeout_s: float = 120.0) -> None:
        self.channels = list(channels)
        self.timeout_s = timeout_s
        self.num_bytes = 0  # of arrays, sent and received
        self._restarts: dict[int, tuple[int, int]] = {}  # generation, and version it began with
        self._connections = [1] * len(self.channels)
        # Version of each server when something was last read from it.
        self._versions: list[int | None] = [None] * len(self.channels)

    def __len__(self) -> int:
        return len(self.channels)

    def close(self) -> None:
        """Close every channel."""
        for channel in self.channels:
            channel.close()

    # Asking

    def ask(self, server: int, message: Message) -> Message:
        """One answer of one server."""
        return self._gather([(server, message)])[0]

    def ask_all(self, message: Message) -> list[Message]:
        """The answers of all servers to the same message, in their order."""
        return self._gather([(server, message) for server in range(len(self))])

    def _gather(self, messages: Sequence[tuple[int, Message]]) -> list[Message]:
        sent = [(server, self._send(server, message), message) for server, message in messages]
        return [self._owned(server, answer) for server, answer in self._wait_all(sent)]

    def _send(self, server: int, message: Message) -> int:
        self.num_bytes += message.num_bytes
        return self.channels[server].send(message)

    def _wait_all(self, sent: list[tuple[int, int, Message]]) -> list[tuple[int, Message]]:
        answers, errors = self._answers(sent)
        if errors:
            raise next(iter(errors.values()))
        return answers

    def _answers(
        self, sent: list[tuple[int, int, Message]]
    ) -> tuple[list[tuple[int, Message]], dict[int, Exception]]:
        answers: list[tuple[int, Message]] = []
        errors: dict[int, Exception] = {}
        for server, number, message in sent:
            try:
                answers.append((server, self._wait(server, number, message)))
            except Exception as error:  # every answer is fetched, whatever one of them says
                errors[server] = error
        return answers, errors

    def _wait(self, server: int, number: int, message: Message) -> Message:
        """An answer; while a restarted server lacks the variables, the question is repeated."""
        channel = self.channels[server]
        until = time.monotonic() + _REFILL_S
        while True:
            try:
                answer = channel.wait(number, self.timeout_s)
                if "generation" in answer.head:
                    self._restarts[server] = (answer.head["generation"], answer.head["base"])
                return answer
            except UnknownVariableError:
                if time.monotonic() >= until or not self.generation(server):
                    raise
            time.sleep(_AGAIN_S)
            number = channel.send(message)

    def generation(self, server: int) -> int:
        """How often a server was started again, as far as it has said."""
        restarts = self._restarts.get(server, (0, 0))[0]
        welcome = self.channels[server].welcome
        return restarts if welcome is None else max(restarts, welcome.head.get("generation", 0))

    def restarts(self) -> list[tuple[int, int, int]]:
        """Server, generation and first version of those that were started again, as they said."""
        return [(server, *restart) for server, restart in self._restarts.items()]

    def _owned(self, server: int, answer: Message) -> Message:
        if answer.arrays and "version" in answer.head:
            self._versions[server] = answer.head["version"]
        self.num_bytes += answer.num_bytes
        # A received array is a view that the next message may overwrite.
        return Message(answer.kind, answer.head, tuple(array.copy() for array in answer.arrays))

    # Variables

    def create(
        self,
        spec: VariableSpec,
        init: Mapping[str, Any],
        value: np.ndarray | None = None,
        only: int | None = None,
    ) -> bool:
        """Make a variable, each shard on its server; returns whether it was not there before.

        ``init`` is how values are made, as servers know it; with ``"value"``, ``value`` is cut
        into shards. ``only`` names one server, where the others have theirs.
        """
        messages = []
        for shard in spec.shards:
            if only is not None and shard.server != only:
                continue
            how = {**init, "rows": [shard.start, shard.stop], "full_shape": list(spec.shape)}
            if spec.is_hash:
                how |= {"rows": None, "hash": True}
            head = {
                "name": shard.name,
                "shape": list(spec.shard_shape(shard)),
                "dtype": spec.dtype,
                "init": how,
            }
            arrays = () if value is None else (rows_of(spec, shard, value),)
            messages.append((shard.server, Message("create", head, arrays)))
        return all(answer.head.get("made", False) for answer in self._gather(messages))

    def read(self, specs: Sequence[VariableSpec], **more: Any) -> list[np.ndarray]:
        """Whole variables; ``more`` goes into the question, as ``round=3`` of a barrier."""
        names_of = {s: [shard.name for _, shard in own] for s, own in by_server(specs).items()}
        messages = [
            (server, Message("read", {"names": n, **more})) for server, n in names_of.items()
        ]
        return assembled(specs, names_of, self._gather(messages))

    def lookup(self, spec: VariableSpec, rows: np.ndarray, *, make: bool = False) -> np.ndarray:
        """Some rows of a variable, in the order in which they are asked for.

        A key that a hash table has not seen has the values that its row would begin with; only with
        ``make`` the row is made.
        """
        rows = checked_rows(spec, rows)
        parts = list(split_rows(spec, rows))
        messages = [
            (shard.server, Message("lookup", {"name": shard.name, "make": make}, (local,)))
            for shard, _, local in parts
        ]
        values = np.empty((len(rows), *spec.shape[1:]), np.dtype(spec.dtype))
        for (_, at, _), answer in zip(parts, self._gather(messages), strict=True):
            values[at] = answer.arrays[0]
        return values

    def keys(self, spec: VariableSpec) -> np.ndarray:
        """The keys of a hash table, in the order of the rows that :meth:`read` gives."""
        messages = [(shard.server, Message("keys", {"name": shard.name})) for shard in spec.shards]
        return np.concatenate([answer.arrays[0] for answer in self._gather(messages)])

    # Changing

    def push(
        self,
        updates: Iterable[Update],
        stamp: Stamp | None = None,
        then_read: Sequence[VariableSpec] = (),
        everywhere: bool = False,
    ) -> Acknowledged:
        """Send updates, one message to each server that they touch, and wait for the answers."""
        return self.settle(self.start_push(updates, stamp, then_read, everywhere))

    def start_push(
        self,
        updates: Iterable[Update],
        stamp: Stamp | None = None,
        then_read: Sequence[VariableSpec] = (),
        everywhere: bool = False,
    ) -> Pending:
        """Send updates and do not wait. ``everywhere``: also to servers that they do not touch."""
        stamp = stamp or Stamp()
        parts: dict[int, Push] = {}
        if everywhere:
            parts = {server: Push() for server in range(len(self))}
        for update in updates:
            for server, name, arrays in split(update):
                parts.setdefault(server, Push()).add(update, name, arrays)
        for spec in then_read:
            for shard in spec.shards:
                parts.setdefault(shard.server, Push()).then_read.append(shard.name)
        pending = Pending(then_read=tuple(then_read))
        for server, part in parts.items():
            message = part.message(stamp, self._versions[server])
            number = self._send(server, message)
            pending.sent.append((server, number, message))
        return pending

    def settle(self, pending: Pending) -> Acknowledged:
        """Wait until every server has answered a push.

        What one server refuses others may have applied: then a note to the error says who has.
        """
        answers, errors = self._answers(pending.sent)
        if errors:
            raise self._half_applied(pending, answers, errors)
        applied = tuple(applied_of(server, answer) for server, answer in answers)
        self._clip_after(answers)
        if not pending.then_read:
            return Acknowledged(applied)
        owned = [self._owned(server, answer) for server, answer in answers]
        names_of = {server: sent.head.get("then_read", []) for server, _, sent in pending.sent}
        return Acknowledged(applied, tuple(assembled(pending.then_read, names_of, owned)))

    def _half_applied(
        self,
        pending: Pending,
        answers: Sequence[tuple[int, Message]],
        errors: Mapping[int, Exception],
    ) -> Exception:
        error = next(iter(errors.values()))
        applied = [self.channels[s].peer for s, answer in answers if answer.head.get("applied")]
        if applied:
            step = pending.sent[0][2].head.get("step")
            refused = ", ".join(self.channels[server].peer for server in errors)
            error.add_note(
                f"This push{'' if step is None else f' of step {step}'} was applied on "
                f"{', '.join(applied)}, and not on {refused}: made again, it counts twice there."
            )
        return error

    def reconnected(self) -> set[int]:
        """The servers that reconnected since the last call.

        An answer that came meanwhile may be from before or after a restart.
        """
        servers: set[int] = set()
        for server, channel in enumerate(self.channels):
            channel.receive_nowait()  # takes in what has happened to the connection
            if channel.connections > self._connections[server]:
                servers.add(server)
                self._connections[server] = channel.connections
        return servers

    def again(self, pending: Pending, servers: set[int]) -> Acknowledged:
        """Ask some servers again for the same push: it is applied where it was lost."""
        messages = [(server, message) for server, _, message in pending.sent if server in servers]
        sent = [(server, self._send(server, message), message) for server, message in messages]
        return self.settle(Pending(sent))

    def resize_rounds(self, rounds: Iterable[Sequence[int]]) -> None:
        """Rounds that were broken off: each is applied with as many gradients as it got."""
        for number, of in rounds:
            self.ask_all(Message("round", {"round": number, "of": of}))
            self.clip_rounds()

    def clip_rounds(self) -> None:
        """Let servers apply the rounds that are complete on all, and wait to be clipped."""
        self._clip(self._round_states(self.ask_all(Message("norms"))))

    def _clip_after(self, answers: Sequence[tuple[int, Message]]) -> None:
        """The second phase of a push in a round, if there is one, and it is this client's turn."""
        states = self._round_states([answer for _, answer in answers if "clipping" in answer.head])
        if not any(one.waits for one in states):
            return
        # One whose answer came early may have got another worker's gradient since.
        if len(states) < len(self) or (next_to_clip(states) is None and len(self) > 1):
            self.clip_rounds()
        else:
            self._clip(states)

    def _clip(self, states: Sequence[RoundState]) -> None:
        while (due := next_to_clip(states)) is not None:
            number, totals = due
            head = {"round": number, "totals": totals}
            states = self._round_states(self.ask_all(Message("clip", head)))

    def _round_states(self, answers: Iterable[Message]) -> list[RoundState]:
        return [RoundState.of(answer.head["clipping"]) for answer in answers]

    def fence(self, incarnation: str) -> None:
        """No server takes a push of this incarnation of a worker any more."""
        self.ask_all(Message("fence", {"incarnation": incarnation}))


def connect(
    spec: ClusterSpec,
    keys: Keys | None,
    task: str,
    incarnation: str = "",
    watch: Callable[[], None] | None = None,
) -> Servers:
    """Channels of a task to all servers of a cluster; ``watch`` is as for a ``SocketChannel``."""
    incarnation = incarnation or uuid.uuid4().hex[:16]
    hello = Message("hello", {"task": task, "incarnation": incarnation})
    return Servers(
        [
            SocketChannel(
                to_connect(spec.task_address("ps", index)),
                keys,
                f"ps:{index}",
                identity=f"{task}/{incarnation}",
                hello=hello,
                watch=watch,
            )
            for index in spec.task_indices("ps")
        ]
    )


def connect_here(cores: Sequence[ServerCore]) -> Servers:
    """Channels to servers in this process."""
    identity = uuid.uuid4().hex[:16]
    return Servers(
        [MemoryChannel(core, f"ps:{index}", identity=identity) for index, core in enumerate(cores)]
    )


def checked_times(heartbeat_s: float, dead_after_s: float) -> tuple[float, float]:
    """Both, or :class:`~meshwright.errors.ClusterError` where they do not go together."""
    if not 0 < heartbeat_s < dead_after_s:
        raise ClusterError(
            "heartbeat_s must be above 0, and dead_after_s above heartbeat_s; received "
            f"heartbeat_s={heartbeat_s!r}, dead_after_s={dead_after_s!r}."
        )
    return heartbeat_s, dead_after_s
