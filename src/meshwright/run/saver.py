"""What a run saves and when, and the checkpoint that it resumes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.experimental import multihost_utils

from ..checkpoint import CheckpointInfo, Checkpoints, Position
from ..checkpoint.copies import Copies
from ..checkpoint.snapshot import describe
from ..errors import CheckpointError, ProcessError
from ..launch import progress
from ..launch.join import agree, compared_member
from ..launch.memory import host_memory
from ..program import Logs
from .logs import as_json
from .pace import Pace
from .stopping import Stopping

if TYPE_CHECKING:
    from .epochs import Callbacks, Steps

Resume = Literal["auto"] | bool
SaveEvery = int | Literal["auto"] | None

_marks = itertools.count()  # a name that no host has looked up yet: NFS remembers what is not there


class Saver:
    """Saves a run every ``every`` steps, or after each epoch; without checkpoints it saves nothing.

    ``every="auto"`` measures how often is best (see :class:`~meshwright.run.pace.Pace`).
    ``resume`` says what to begin with, which :meth:`claimed` chooses, and ``layout`` describes the
    layouts in words. With ``peer_copies`` the memory of the hosts holds the newest state, where
    agents keep some; a run that resumes begins with what is newer there. Raises
    :class:`CheckpointError` for options that contradict each other or what the directory holds.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None = None,
        every: SaveEvery = None,
        resume: Resume = "auto",
        layout: str = "",
        peer_copies: int = 0,
    ) -> None:
        if every not in (None, "auto") and not (isinstance(every, int) and every >= 1):
            raise CheckpointError(
                "save_every must be a whole number of steps, at least 1, or 'auto'; received "
                f"{every!r}."
            )
        if every is not None and checkpoints is None:
            raise CheckpointError(
                f"save_every={every!r} needs checkpoint=<directory> (checkpoints= of a Trainer)."
            )
        if not (isinstance(peer_copies, int) and peer_copies >= 0):
            raise CheckpointError(
                f"peer_copies must be a number of hosts, 0 or more; received {peer_copies!r}."
            )
        if peer_copies and checkpoints is None:
            raise CheckpointError(
                f"peer_copies={peer_copies} needs checkpoint=<directory> (checkpoints= of a "
                "Trainer): what the memory of hosts has lost is read from there."
            )
        if checkpoints is not None:
            _start_of(checkpoints, resume)  # what cannot be is refused before it is waited for
        self.checkpoints, self.start, self.step = checkpoints, None, 0
        self.stopping = Stopping(saves=checkpoints is not None)
        self._resume: Resume = resume
        self._peer_copies = peer_copies
        self._every, self._layout = every if isinstance(every, int) else None, layout
        self._claim = contextlib.ExitStack()
        self._copies: Copies | None = None
        self._in_memory: Any = None  # the newest state of the hosts' memory, if it is the start
        self._pace = Pace(0, _of_first_process) if every == "auto" else None
        self._saved = 0, 0, 0

    @classmethod
    def of(
        cls,
        directory: str | Path | None,
        every: SaveEvery,
        keep: int | None,
        resume: Resume,
        layout: str = "",
        peer_copies: int = 0,
    ) -> Saver:
        """The saver that these options of ``fit`` ask for.

        Raises :class:`CheckpointError` if they contradict each other or what the directory holds.
        """
        if directory is None:
            if resume is True:
                raise CheckpointError("resume=True needs checkpoint=<directory>.")
            return cls(every=every, peer_copies=peer_copies)
        return cls(Checkpoints(directory, keep), every, resume, layout, peer_copies)

    @property
    def is_on(self) -> bool:
        """Whether anything is saved."""
        return self.checkpoints is not None

    @property
    def by_epoch(self) -> bool:
        """Whether every epoch is saved."""
        return self.is_on and not self._every and self._pace is None

    @property
    def is_due(self) -> bool:
        """Whether ``every`` steps were taken since the last multiple of it that was saved."""
        if self._pace is not None:
            return self._pace.is_due(self.step)
        return bool(self._every) and self.step // self._every > self._saved[0] // self._every

    def until_due(self, most: int) -> int:
        """How many of the steps that are left may be taken before the next checkpoint."""
        if self._pace is not None:
            return min(most, self._pace.until_due(self.step))
        if not (self.is_on and self._every):
            return most
        return min(most, self._every - self.step % self._every)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Around the making of a run and the run: its directory is claimed, and its start chosen.

        In this order, since a run that waited for another one begins with what that has written.
        What :meth:`running` is around ends the claim as well.
        """
        with self._claim:
            if self.checkpoints is not None:
                self._claim.enter_context(self.checkpoints.claimed())
                _check_shared(self.checkpoints.directory)  # and rank 0 has claimed it
                self._choose_start(self.checkpoints)
            yield

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the whole run: signals are heard, and what is being written is finished."""
        nothing = contextlib.nullcontext()
        copies = contextlib.closing(self._copies) if self._copies else nothing
        with self._claim, self.stopping, copies, self.checkpoints or nothing:
            try:
                yield
                self.stopping.finish()
            except ProcessError:
                if self.checkpoints is not None:
                    self.checkpoints.abandon()
                raise
        if self.stopping.is_asked:
            raise self.stopping.error()

    def restore(self, steps: Steps) -> None:
        """Give the steps the state that the run resumes."""
        if self._copies is not None and self._in_memory is not None:
            steps.load(self._copies.restore(self._in_memory, steps.state()))
            return
        assert self.checkpoints is not None  # where the checkpoint comes from
        steps.load(self.checkpoints.restore(steps.state(), self.start))

    def save(
        self,
        steps: Steps,
        callbacks: Callbacks,
        epoch: int,
        batches: int,
        logs: Logs,
        ended: bool,
    ) -> None:
        """Save the run at this place, in the background, unless it was saved there."""
        if self.checkpoints is None or not self.stopping.saves:
            return
        position = steps.position(epoch, batches)
        here = self.step, position.epoch, position.batches
        if here == self._saved:
            return
        self._saved = here
        began_s, step = time.monotonic(), self.step
        self.checkpoints.save(
            step,
            steps.state(),
            position,
            layout=self._layout,
            notes=_notes(steps, callbacks, position, ended),
            late_notes=lambda: {"logs": as_json(logs)},
            then=lambda: self._is_written(step),
        )
        if self._pace is not None:
            self._pace.saving(time.monotonic() - began_s)

    def copy(
        self, steps: Steps, callbacks: Callbacks, epoch: int, batches: int, logs: Logs
    ) -> None:
        """Have the memory of the hosts hold the run at this place, where that is asked for."""
        if self._copies is None or self.checkpoints is None or not self.stopping.saves:
            return
        state, position, step = steps.state(), steps.position(epoch, batches), self.step
        notes = _notes(steps, callbacks, position, ended=False)
        arrays, directory = tuple(describe(state)), self.checkpoints.directory
        info = CheckpointInfo(directory, step, arrays, self._layout, position, notes)
        late_notes, then = lambda: {"logs": as_json(logs)}, lambda: progress.saved(step)
        self._copies.save(info, state, late_notes, then)

    def _choose_start(self, checkpoints: Checkpoints) -> None:
        start, memory = _start_of(checkpoints, self._resume), host_memory()
        if self._peer_copies and memory is not None:
            # Before all must come.
            agree("peer copies", lambda: {"peer_copies": str(self._peer_copies)})
            self._copies = Copies(memory, checkpoints.directory, self._peer_copies)
            if self._resume is not False:
                self._in_memory = self._copies.newest(start.step if start else -1)
        if self._in_memory is not None:
            start = self._in_memory.info
        self.start, self.step = start, start.step if start else 0
        if self._pace is not None:
            self._pace = Pace(self.step, _of_first_process)
        position = start.position if start else Position()
        self._saved = self.step, position.epoch, position.batches
        progress.saved(self.step if start else -1)

    def _is_written(self, step: int) -> None:
        progress.saved(step)
        if self._pace is not None:
            self._pace.written()


def _notes(steps: Steps, callbacks: Callbacks, position: Position, ended: bool) -> dict[str, Any]:
    notes = {**callbacks.notes(), "num_batches": steps.num_batches, "ended": ended}
    return notes | steps.notes(position)


def _of_first_process(number: int) -> int:
    """The number that the first process has, in all of them; each must ask."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(jax.numpy.int32(number)))


def _start_of(checkpoints: Checkpoints, resume: Resume) -> CheckpointInfo | None:
    """The checkpoint that a run begins with, if with any."""
    if resume not in ("auto", True, False):
        raise CheckpointError(
            "resume must be 'auto' (resume if there is a checkpoint), True (there must be one) or "
            f"False (there must be none); received {resume!r}."
        )
    latest = checkpoints.latest
    if resume is True and latest is None:
        raise CheckpointError(
            f"resume=True, but {checkpoints.directory} holds no complete checkpoint. Use "
            "resume='auto' to begin a new run there."
        )
    if resume is False and latest is not None:
        raise CheckpointError(
            f"resume=False, but {checkpoints.directory} holds checkpoints up to step "
            f"{latest.step}, which are not overwritten. Choose another directory, remove this one, "
            "or use resume='auto' to go on from there."
        )
    return latest


def _check_shared(directory: Path) -> None:
    """Check that all processes see one folder under the name that each was given.

    Rank 0 writes a file there, which the others must see; alone, nothing is done.

    Raises :class:`~meshwright.AgreementError` in all processes where some do not see it.
    """
    member = compared_member()
    if member is None:
        return
    mark = directory / f".shared-{member.address[1]}-{next(_marks)}"
    if member.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        agree("checkpoint folder", dict)  # rank 0 has written
        name = f"checkpoint folder {directory}, which all must share"
        agree("checkpoint folder", lambda: {name: _which_folder(mark, member.rank)})
    finally:
        if member.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink()


def _which_folder(mark: Path, rank: int) -> str:
    if rank == 0 or mark.exists():
        return "shared with rank 0"
    return "another folder than that of rank 0 (mount the same file system on every host)"
