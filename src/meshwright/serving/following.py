"""Newer weights of a model that serves: what could not be served, and what all processes agree on.

Reading a checkpoint is for each process alone, and may fail in one of them. What runs on the
devices of all, such as a cast, must begin in the same order everywhere. So rank 0 says both: first
"read", to which each process replies, then "finish", among the batches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import _compat
from ..checkpoint import newest_paths, read_checkpoint
from ..errors import CheckpointError, MeshwrightError, NotReadyError
from .exports import exports_in, fulls_in

_AGAIN_S = 10.0  # at least, until a checkpoint that was refused is read again
_LOOK_S = 0.1  # between looks at whether the other processes are still there

_TEXT_BYTES = 512

Tell = Callable[..., None]


class Refusals:
    """The newest checkpoint, where it could not be served, and when it is read again.

    The time doubles with each attempt; a newer checkpoint is read at once.

    Example:
        >>> refusals = Refusals(first_s=60.0)
        >>> refusals.add(Path("runs/first/step_2"))
        >>> refusals.holds(Path("runs/first/step_2")), refusals.holds(Path("runs/first/step_3"))
        (True, False)
    """

    def __init__(self, first_s: float | None = None) -> None:
        self._first_s = max(first_s or 0.0, _AGAIN_S)
        self._directory: Path | None = None
        self._times = 0
        self._again_s = 0.0

    def add(self, directory: Path) -> None:
        """This checkpoint could not be served."""
        self._times = self._times + 1 if directory == self._directory else 1
        self._directory = directory
        self._again_s = time.monotonic() + self._first_s * 2 ** (self._times - 1)

    def holds(self, directory: Path) -> bool:
        """Whether this checkpoint is not to be read yet."""
        return directory == self._directory and time.monotonic() < self._again_s


def cannot_be_served(directory: Path, error: Exception) -> MeshwrightError:
    """What to say of a checkpoint of which the files, or the devices, raised an error."""
    if isinstance(error, MeshwrightError):
        return error
    text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}".rstrip(": .")
    if isinstance(error, MemoryError) or _compat.ran_out_of_memory(str(error)):
        fault = (
            f"{directory} does not fit into memory beside the weights that are served: {text}. "
            "It is read again later; leave room for two copies, or restart the server."
        )
    elif isinstance(error, OSError):
        fault = f"{directory} cannot be read now: {text}. It is read again later."
    else:
        fault = (
            f"{directory} cannot be read: {text}. It may be damaged, or have been removed by the "
            "run that writes there."
        )
    failure = CheckpointError(fault)
    failure.__cause__ = error
    return failure


class Others:
    """The other processes of a group, as rank 0 speaks with them of weights of one model."""

    def __init__(self, tell: Tell, number: int, count: int) -> None:
        self._tell, self._number, self._count = tell, number, count
        self._replies: dict[int, str] = {}
        self._request = 0
        self._changed = threading.Condition()

    def say(self, word: dict[str, Any]) -> int:
        """Ask all of them for something; :meth:`wait` for what they reply. Its number."""
        with self._changed:
            self._request += 1
            self._replies = {}
        self._tell({**word, "model": self._number, "request": self._request})
        return self._request

    def receive(self, word: dict[str, Any]) -> None:
        """One of them has replied."""
        with self._changed:
            if word["request"] == self._request:
                self._replies[word["rank"]] = word["error"]
                self._changed.notify_all()

    def wait(self, stopped: Callable[[], str | None]) -> None:
        """Return once all have done it.

        Raises :class:`CheckpointError` with what one of them could not do, and
        :class:`NotReadyError` where ``stopped`` says why there is no reply.
        """
        with self._changed:
            while len(self._replies) < self._count:
                if (why := stopped()) is not None:
                    raise NotReadyError(f"the other processes have not replied: {why}.")
                self._changed.wait(_LOOK_S)
            faults = [f"rank {rank}: {text}" for rank, text in self._replies.items() if text]
        if faults:
            raise CheckpointError("\n".join(faults))


def reply_to(word: dict[str, Any], error: Exception | None) -> dict[str, Any]:
    """What a process says to rank 0 when it has done, or could not do, what it was asked for."""
    import jax

    text = "" if error is None else str(error) or type(error).__name__
    reply = {name: word[name] for name in ("do", "model", "request")}
    return {**reply, "rank": jax.process_index(), "error": text}


# While a server loads, in every process at once


def shared_text(text: str) -> str:
    """The text of rank 0, in every process."""
    import jax
    import numpy as np

    if jax.process_count() == 1:
        return text
    from jax.experimental import multihost_utils

    raw = np.zeros(_TEXT_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode(), np.uint8)
    raw[: len(encoded)] = encoded
    found = np.asarray(multihost_utils.broadcast_one_to_all(raw))
    return found.tobytes().rstrip(b"\0").decode()


def raise_everywhere(fault: Exception | None) -> None:
    """Raise the fault of this process, or say that another one has one."""
    import jax
    import numpy as np

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        flags = multihost_utils.process_allgather(np.asarray(fault is not None))
        ranks = [str(rank) for rank, is_fault in enumerate(np.ravel(flags)) if is_fault]
        if ranks and fault is None:
            raise CheckpointError(f"rank {', '.join(ranks)} cannot read it.")
    if fault is not None:
        raise fault


class FirstChoice:
    """The checkpoints that a server may begin with, as rank 0 names them to all.

    One that follows a run begins with an older one where the newest is damaged. Of a folder of
    exports they are the full ones.
    """

    def __init__(self, directory: Path, may_be_older: bool) -> None:
        self._directory = directory
        self._may_be_older = may_be_older
        self._failure: MeshwrightError | None = None

    def __iter__(self) -> Iterator[Path]:
        import jax

        remaining = iter(self._candidates() if jax.process_index() == 0 else ())
        while name := shared_text(_name_of(next(remaining, None), self._directory)):
            yield self._directory if name == "." else self._directory / name

    def _candidates(self) -> list[Path]:
        if exports_in(self._directory):
            fulls = [export.path for export in fulls_in(self._directory)]
            if not fulls:
                fault = f"{self._directory} has deltas, and no full export."
                self._failure = CheckpointError(fault)
            return fulls
        if self._may_be_older and (paths := newest_paths(self._directory)):
            return paths
        try:
            return [read_checkpoint(self._directory).directory]
        except CheckpointError as error:
            self._failure = error
            return []

    def failed(self, error: MeshwrightError) -> None:
        """One of them could not be served."""
        self._failure = self._failure or error

    @property
    def failure(self) -> MeshwrightError:
        """Why there is none: what is wrong with the newest one."""
        return self._failure or CheckpointError(f"rank 0 finds no checkpoint in {self._directory}.")


def _name_of(path: Path | None, directory: Path) -> str:
    return "" if path is None else str(path.relative_to(directory))
